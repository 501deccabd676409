# SPDX-License-Identifier: Apache-2.0
"""Rules from AutoTP, DeepSpeed's tensor parallelism for Hugging Face models.

AutoTP describes each parameter that it split on the parameter itself (``_set_param_uc_meta`` in
deepspeed/module_inject/layers.py), and the untouched ones in the dict ``model.universal_checkpoint_info``
(``collect_autotp_universal_checkpoint_info`` there). Descriptions are affine maps wherever AutoTP can give one, uneven
splits and fused layouts included, and come from the layers that did the splitting, so they are fully trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint.constants import (
    AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS,
    DS_AUTOTP_UC_META,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    VOCABULARY_PARAMETER_PATTERNS,
)
from torch import nn

from megads_ucp.errors import LayoutError
from megads_ucp.layout.rule import Rule, check_affine_version

AFFINE = "AutoTP affine map"
SIZES = "AutoTP partition sizes"
UNTOUCHED = "AutoTP (parameter left whole)"


def rules_from_autotp(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Rule]:
    """Rules of all parameters (by DeepSpeed's names) that AutoTP split or knowingly left whole.

    Empty for a model that AutoTP has not parsed.

    Raises:
        LayoutError: AutoTP cannot describe how it split some parameters; the message gives its reasons.
    """
    info = getattr(module, UNIVERSAL_CHECKPOINT_INFO, None)
    # A client's own information is a method (Megatron-DeepSpeed) or a dict; only AutoTP always writes this key.
    if not isinstance(info, Mapping) or AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS not in info:
        info = {}
    check_affine_version(info)
    whole = set(info.get(TP_REPLICATED_PARAMETER_PATTERNS, ()))
    vocabulary = set(info.get(VOCABULARY_PARAMETER_PATTERNS, ()))
    rules: dict[str, Rule] = {}
    unsupported: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        # AutoTP writes one exact pattern per parameter, for the first name of a tied one.
        pattern = rf"^{re.escape(first.setdefault(id(parameter), name))}$"
        meta = getattr(parameter, DS_AUTOTP_UC_META, None)
        conversion = (meta or {}).get("conversion") or {}
        if reason := conversion.get("unsupported_reason"):
            unsupported[name] = reason
        elif affine := conversion.get("affine_map"):
            rules[name] = _affine_rule(affine, pattern in vocabulary)
        elif meta and (rule := _rule_without_map(meta)):
            rules[name] = rule
        elif not meta and pattern in whole:
            rules[name] = Rule("replicated", UNTOUCHED)
    if unsupported:
        raise _unsupported(unsupported)
    return rules


def _affine_rule(affine: dict[str, Any], is_vocabulary: bool) -> Rule:
    # AutoTP splits a vocabulary unevenly rather than pad it, so all rows are real and only the metadata key is needed.
    # Its original_vocab_size is that of the first vocabulary parameter, and could cut rows off another one.
    rows = affine["logical_shape"][0] if is_vocabulary else None
    return Rule("affine", AFFINE, affine=affine, vocabulary_size=rows)


def _rule_without_map(meta: Mapping[str, Any]) -> Rule | None:
    """The rule of a layer that records sizes only: an embedding split along dim 1 (``AutoTP._slice_embedding``)."""
    if meta.get("replicated"):
        return Rule("replicated", SIZES)
    dim, sizes = meta.get("partition_dim"), meta.get("partition_sizes")
    if dim is None or not sizes or meta.get("sub_param_sizes") or meta.get("sub_param_shape"):
        return None
    return Rule("split", SIZES, dim=dim, sub_sizes=(sum(sizes),), shard_widths=(tuple(sizes),))


def _unsupported(reasons: Mapping[str, str]) -> LayoutError:
    shown = [f"  {name}: {reason}" for name, reason in list(reasons.items())[:10]]
    if len(reasons) > len(shown):
        shown.append(f"  and {len(reasons) - len(shown)} more")
    return LayoutError(
        "AutoTP cannot describe how it split these parameters, so no universal checkpoint of this model is possible:\n"
        + "\n".join(shown)
        + "\nTrain it without tensor parallelism, or use the regular checkpoint at the same topology."
    )
