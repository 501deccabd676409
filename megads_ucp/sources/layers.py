# SPDX-License-Identifier: Apache-2.0
"""All claims that a model's own layers make about the layouts of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from megads_ucp.sources.attributes import ATTRIBUTES, rules_from_attributes
from megads_ucp.sources.autotp import rules_from_autotp
from megads_ucp.sources.megatron_core import rules_from_sharded_state_dict
from megads_ucp.sources.megatron_deepspeed import MEGATRON_DEEPSPEED, rules_from_megatron_deepspeed, vocabulary_names
from megads_ucp.sources.resolve import Claim, Trust


@dataclass(frozen=True)
class LayerClaims:
    """What a model's layers say about their parameters.

    Attributes:
        claims: rules, by source.
        vocabulary: names of parameters with a vocabulary that may be padded.
        warnings: layers that could not describe themselves, and why.
    """

    claims: tuple[Claim, ...]
    vocabulary: tuple[str, ...]
    warnings: tuple[str, ...]


def ask_layers(module: nn.Module, parameters: Mapping[str, nn.Parameter], tp_degree: int) -> LayerClaims:
    """Collect the claims of all sources in the model, for its parameters by all of DeepSpeed's names.

    Raises:
        LayoutError: a layer's description contradicts its own tensors.
    """
    core = rules_from_sharded_state_dict(module, parameters)
    claims = (
        Claim("megatron-core", Trust.LAYERS, core.rules),
        Claim("AutoTP", Trust.LAYERS, rules_from_autotp(module, parameters)),
        Claim(MEGATRON_DEEPSPEED, Trust.LAYERS, rules_from_megatron_deepspeed(module, parameters, tp_degree)),
        Claim(ATTRIBUTES, Trust.ATTRIBUTES, rules_from_attributes(parameters, tp_degree)),
    )
    vocabulary = dict.fromkeys((*core.vocabulary, *vocabulary_names(module, parameters)))
    return LayerClaims(claims, tuple(vocabulary), core.warnings)
