# SPDX-License-Identifier: Apache-2.0
"""The universal_checkpoint_info that an export writes where no client gave one: patterns give the same layouts back."""

from __future__ import annotations

import pytest
from deepspeed.checkpoint.affine import segmented_map

from megads_ucp.layout.info import info_of
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.sources.patterns import rules_from_patterns

Shapes = tuple[tuple[int, ...], ...]

# A fused [q; k, v] of which each rank has its query rows and the whole key/value block.
SHARED = segmented_map((8, 3), [(6, False), (2, True)], 0, 2, [[4, 2]])

# name -> (rule, shard shapes)
PARAMETERS: dict[str, tuple[Rule, Shapes]] = {
    "norm.weight": (Rule("replicated", "layers"), ((6,), (6,))),
    "norm.bias": (Rule("averaged", "layers"), ((6,), (6,))),
    "up.weight": (Rule("split", "layers", dim=0), ((5, 3), (4, 3))),
    "down.weight": (Rule("split", "layers", dim=1), ((3, 5), (3, 4))),
    "gate_up.weight": (Rule("split", "layers", dim=0, style="n_sub_params"), ((6, 3), (6, 3))),
    "even.weight": (
        Rule("split", "layers", dim=0, sub_sizes=(8, 4, 4), style="sub_param_shape"),
        ((8, 3), (8, 3)),
    ),
    "uneven.weight": (
        Rule("split", "layers", dim=0, shard_widths=((4, 2), (2, 1), (2, 1)), style="sub_param_shape"),
        ((8, 3), (4, 3)),
    ),
    "shared.weight": (Rule("affine", "layers", affine=SHARED.to_dict()), ((6, 3), (4, 3))),
    "embedding.weight": (Rule("split", "layers", dim=0, vocabulary_size=7), ((4, 3), (4, 3))),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_is_written_gives_the_same_layout_back(name: str) -> None:
    layouts = [build_layout(other, *told) for other, told in PARAMETERS.items()]
    info = info_of(layouts)
    rule, shards = PARAMETERS[name]
    read = rules_from_patterns(info, list(PARAMETERS), {other: told[1] for other, told in PARAMETERS.items()})

    assert not read.doubts and not read.unused
    again = build_layout(name, {**read.defaults, **read.stated}[name], shards)
    written = build_layout(name, Rule(**{**vars(rule), "vocabulary_size": None}), shards)
    assert again.shape == written.shape
    assert again.affine.to_dict() == written.affine.to_dict()
    assert read.vocabulary.get(name) == rule.vocabulary_size


def test_it_is_complete() -> None:
    info = info_of(build_layout(name, *told) for name, told in PARAMETERS.items())
    assert info["universal_checkpoint_version"] == 0.4
    assert info["sub_param_shard_widths"][r"^uneven\.weight$"] == [[4, 2], [2, 1], [2, 1]]
    assert info["sub_param_shard_widths"][r"^even\.weight$"] == [[4, 4], [2, 2], [2, 2]]
    assert info["autotp_unsupported_parameter_patterns"] == {}
    assert list(info["affine_map"]["params"]) == [r"^shared\.weight$"]
