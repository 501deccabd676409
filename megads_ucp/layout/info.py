# SPDX-License-Identifier: Apache-2.0
"""Layouts in DeepSpeed's own terms: the ``universal_checkpoint_info`` of format 0.4."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION
from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AFFINE_MAP_PARAMS,
    AFFINE_MAP_VERSION,
    AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS,
    ORIGINAL_VOCAB_SIZE,
    PARAMETER_TO_AVERAGE_PATTERNS,
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PARAMETER_WITH_SUB_PARAMS,
    SUB_PARAM_SHARD_WIDTHS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
    VOCABULARY_PARAMETER_PATTERNS,
)

from megads_ucp.layout.layout import Layout


def info_of(layouts: Iterable[Layout]) -> dict[str, Any]:
    """What a client would have had to provide for these layouts, with one exact pattern per parameter.

    Complete: with the widths that each TP rank holds; what no list of patterns can express is in the affine map.
    """
    info: dict[str, Any] = {
        UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        TP_REPLICATED_PARAMETER_PATTERNS: [],
        PARAMETER_TO_AVERAGE_PATTERNS: [],
        PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: [],
        PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: [],
        VOCABULARY_PARAMETER_PATTERNS: [],
        PARAMETER_WITH_SUB_PARAMS: [],
        SUB_PARAM_SHARD_WIDTHS: {},
        AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS: {},  # a model with any of these cannot be exported
    }
    maps: dict[str, Any] = {}
    for pattern, layout, rule in ((f"^{re.escape(layout.name)}$", layout, layout.rule) for layout in layouts):
        if rule.kind == "replicated":
            info[TP_REPLICATED_PARAMETER_PATTERNS].append(pattern)
        elif rule.kind == "averaged":
            info[PARAMETER_TO_AVERAGE_PATTERNS].append(pattern)
        elif rule.kind == "split" and rule.style == "plain" and rule.sub_sizes is None and rule.dim in (0, 1):
            if rule.dim == 1:
                info[PARAMETER_WITH_ROW_PARALLELISM_PATTERNS].append(pattern)
        elif rule.style == "n_sub_params" and rule.dim == 0 and (rule.sub_sizes is None or len(rule.sub_sizes) == 2):
            info[PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0].append(pattern)
        elif rule.style == "sub_param_shape" and rule.dim is not None and rule.sub_sizes is not None:
            shape = tuple(rule.sub_sizes if dim == rule.dim else size for dim, size in enumerate(layout.shape))
            info[PARAMETER_WITH_SUB_PARAMS].append({"patterns": [pattern], "shape": shape, "partition_dim": rule.dim})
            even = [[size // layout.tp_degree] * layout.tp_degree for size in rule.sub_sizes]
            info[SUB_PARAM_SHARD_WIDTHS][pattern] = [list(row) for row in rule.shard_widths or even]
        else:
            maps[pattern] = layout.affine.to_dict()
        if rule.vocabulary_size is not None:
            info[VOCABULARY_PARAMETER_PATTERNS].append(pattern)
            info[ORIGINAL_VOCAB_SIZE] = rule.vocabulary_size
    if maps:
        info[AFFINE_MAP] = {AFFINE_MAP_VERSION: AFFINE_MAP_FORMAT_VERSION, AFFINE_MAP_PARAMS: maps}
    return info
