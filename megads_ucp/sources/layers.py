# SPDX-License-Identifier: Apache-2.0
"""What a model's layers say about the layouts of their parameters, all sources asked."""

from __future__ import annotations

from dataclasses import dataclass

from megads_ucp.engine.state import LiveState
from megads_ucp.sources.attributes import ATTRIBUTES, rules_from_attributes
from megads_ucp.sources.autotp import rules_from_autotp
from megads_ucp.sources.megatron_core import rules_from_sharded_state_dict
from megads_ucp.sources.megatron_deepspeed import MEGATRON_DEEPSPEED, rules_from_megatron_deepspeed
from megads_ucp.sources.resolve import Claim, Trust


@dataclass(frozen=True)
class LayerWords:
    """What a model's layers say about their parameters' layouts, by source."""

    claims: tuple[Claim, ...]
    vocabulary: tuple[str, ...]
    warnings: tuple[str, ...]


def ask_layers(live: LiveState) -> LayerWords:
    """Ask every layer.

    Raises:
        LayoutError: a layer says something that its own tensors contradict.
    """
    layers = rules_from_sharded_state_dict(live.module, live.parameters)
    claims = (
        Claim("megatron-core", Trust.LAYERS, layers.rules),
        Claim("AutoTP", Trust.LAYERS, rules_from_autotp(live.module, live.parameters)),
        Claim(
            MEGATRON_DEEPSPEED,
            Trust.LAYERS,
            rules_from_megatron_deepspeed(live.module, live.parameters, live.coordinates.tp_degree),
        ),
        Claim(ATTRIBUTES, Trust.ATTRIBUTES, rules_from_attributes(live.parameters, live.coordinates.tp_degree)),
    )
    return LayerWords(claims, layers.vocabulary, layers.warnings)
