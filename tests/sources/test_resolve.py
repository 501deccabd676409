# SPDX-License-Identifier: Apache-2.0
"""Which source of a layout is believed. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.checkpoint.affine import block_gather_map, contiguous_split_map, replicated_map

from megads_ucp.errors import LayoutError
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.sources.resolve import Claim, Resolution, Trust, check_resolved, resolve

COLUMN, ROW = (Rule("split", f"dim {dim}", dim=dim) for dim in (0, 1))
REPLICATED = Rule("replicated", "whole")
AVERAGED = Rule("averaged", "drifting")
HALVES = Rule("split", "halves", dim=0, sub_sizes=(4, 4), style="n_sub_params")
QKV = Rule("split", "qkv", dim=0, sub_sizes=(4, 2, 2), style="sub_param_shape", sub_param_patterns=("w",))
SHAPES = {"w": [(4, 8), (4, 8)]}


def choose(*claims: tuple[Trust, Rule], shapes: dict[str, Any] = SHAPES, doubt: str | None = None) -> Resolution:
    made = [Claim(rule.source, trust, {"w": rule}) for trust, rule in claims]
    if doubt:
        made[-1] = Claim(made[-1].source, made[-1].trust, made[-1].rules, {"w": doubt})
    result = resolve(["w"], shapes, made, tp_degree=len(shapes["w"]))
    check_resolved([result])
    return result


def test_the_higher_trust_wins_and_says_so_once():
    names = [f"layers.{number}.w" for number in range(30)]
    result = resolve(
        names,
        {name: [(4, 8), (4, 8)] for name in names},
        [
            Claim("patterns", Trust.PATTERNS, dict.fromkeys(names, COLUMN)),
            Claim("layers", Trust.LAYERS, {**dict.fromkeys(names, ROW), "layers.3.w": COLUMN}),
        ],
        tp_degree=2,
    )
    assert result.rules == {**dict.fromkeys(names, ROW), "layers.3.w": COLUMN}
    (warning,) = result.warnings
    assert "29 parameters" in warning
    assert "layers.0.w, layers.1.w, layers.2.w and 26 more: dim 0 says split along dim 0, but dim 1 says" in warning


def test_long_warnings_and_errors_are_cut():
    names = [f"w{number}" for number in range(30)]
    claims = [
        Claim("patterns", Trust.PATTERNS, {name: Rule("replicated", f"pattern {name}") for name in names}),
        Claim("layers", Trust.LAYERS, dict.fromkeys(names, ROW)),
    ]
    shapes: dict[str, list[tuple[int, ...]]] = {name: [(4, 8), (4, 8)] for name in names}
    (warning,) = resolve(names, shapes, claims, tp_degree=2).warnings
    assert len(warning.splitlines()) == 12
    assert "and 20 more" in warning
    with pytest.raises(LayoutError, match="and 20 more") as error:
        check_resolved([resolve(names, shapes, [], tp_degree=2)])
    for way_out in ("tensor_model_parallel", "universal_checkpoint_info", "AutoTP"):
        assert way_out in str(error.value)


def test_equal_trust_must_agree():
    assert choose((Trust.LAYERS, COLUMN), (Trust.LAYERS, Rule("split", "other", dim=0, sub_sizes=(8,)))).warnings == ()
    with pytest.raises(LayoutError, match=r"dim 0 says split along dim 0, but whole says replicated.*trusted equally"):
        choose((Trust.LAYERS, COLUMN), (Trust.LAYERS, REPLICATED))


def test_a_default_is_overridden_without_a_word():
    assert choose((Trust.DEFAULT, COLUMN), (Trust.PATTERNS, ROW)) == Resolution({"w": ROW}, ())


def test_attributes_are_refined_but_layers_are_not():
    assert choose((Trust.ATTRIBUTES, COLUMN), (Trust.PATTERNS, HALVES)) == Resolution({"w": HALVES}, ())
    assert choose((Trust.ATTRIBUTES, COLUMN), (Trust.PATTERNS, QKV)) == Resolution({"w": QKV}, ())
    layers = choose((Trust.LAYERS, COLUMN), (Trust.PATTERNS, HALVES))
    assert layers.rules == {"w": COLUMN}
    assert "halves says split along dim 0 in sub-parameters of [4, 4]" in layers.warnings[0]
    # Attributes that do see halves, and those that see another dimension, are not refined.
    assert choose((Trust.ATTRIBUTES, HALVES), (Trust.PATTERNS, QKV)).rules == {"w": HALVES}
    assert choose((Trust.ATTRIBUTES, ROW), (Trust.PATTERNS, HALVES)).rules == {"w": ROW}


def test_only_the_next_source_refines():
    result = choose((Trust.ATTRIBUTES, COLUMN), (Trust.PATTERNS, COLUMN), (Trust.PATTERNS, HALVES))
    assert result.rules == {"w": COLUMN}
    assert len(result.warnings) == 1
    result = choose((Trust.ATTRIBUTES, COLUMN), (Trust.PATTERNS, QKV), (Trust.PATTERNS, HALVES))
    assert result.rules == {"w": QKV}
    assert len(result.warnings) == 1


@pytest.mark.parametrize("trust", [Trust.LAYERS, Trust.ATTRIBUTES])
def test_copies_that_a_client_says_drift_apart_are_averaged_whoever_calls_them_replicated(trust):
    assert choose((trust, REPLICATED), (Trust.PATTERNS, AVERAGED)) == Resolution({"w": AVERAGED}, ())
    # A lower source that calls them replicated as well was no more wrong than the highest.
    lower = (Trust.PATTERNS, REPLICATED)
    assert choose((Trust.LAYERS, REPLICATED), (Trust.ATTRIBUTES, AVERAGED), lower) == Resolution({"w": AVERAGED}, ())
    # What is split cannot be averaged, and a doubtful word does not suffice.
    split = choose((trust, COLUMN), (Trust.PATTERNS, AVERAGED))
    assert (split.rules, len(split.warnings)) == ({"w": COLUMN}, 1)
    doubtful = choose((trust, REPLICATED), (Trust.PATTERNS, AVERAGED), doubt="matched by accident")
    assert (doubtful.rules, len(doubtful.warnings)) == ({"w": REPLICATED}, 1)


def test_a_doubtful_refinement_is_neither_followed_nor_ignored():
    with pytest.raises(LayoutError, match="in doubt: matched by accident"):
        choose((Trust.ATTRIBUTES, COLUMN), (Trust.PATTERNS, HALVES), doubt="matched by accident")
    assert choose((Trust.ATTRIBUTES, COLUMN), (Trust.PATTERNS, COLUMN), doubt="matched by accident").rules == {
        "w": COLUMN
    }


def test_without_tensor_parallelism_whole_and_split_agree_but_dimensions_do_not():
    shapes = {"w": [(8, 8)]}
    assert choose((Trust.LAYERS, REPLICATED), (Trust.PATTERNS, COLUMN), shapes=shapes).warnings == ()
    assert choose((Trust.LAYERS, ROW), (Trust.PATTERNS, REPLICATED), shapes=shapes) == Resolution({"w": ROW}, ())
    assert choose((Trust.ATTRIBUTES, COLUMN), (Trust.PATTERNS, HALVES), shapes=shapes).rules == {"w": HALVES}
    assert len(choose((Trust.LAYERS, ROW), (Trust.PATTERNS, HALVES), shapes=shapes).warnings) == 1


def test_without_tensor_parallelism_nothing_needs_a_source():
    result = resolve(["w", "scalar"], {"w": [(8, 8)], "scalar": [()]}, [], tp_degree=1)
    assert build_layout("w", result.rules["w"], [(8, 8)]).metadata() == {"cat_dim": 0}
    assert build_layout("scalar", result.rules["scalar"], [()]).shape == ()


def test_affine_maps_are_compared_by_where_they_put_elements():
    def says(affine: Any) -> Rule:
        return Rule("affine", "a map", affine=affine.to_dict())

    column = contiguous_split_map((8, 8), (4, 4), 0)
    assert choose((Trust.LAYERS, says(column)), (Trust.PATTERNS, COLUMN)).warnings == ()
    assert len(choose((Trust.LAYERS, says(column)), (Trust.PATTERNS, ROW)).warnings) == 1
    assert choose((Trust.LAYERS, says(replicated_map((4, 8), 2))), (Trust.PATTERNS, REPLICATED)).warnings == ()
    interleaved = block_gather_map((8, 8), {0: [0, 2], 1: [1, 3]}, 2, 0)
    assert len(choose((Trust.LAYERS, says(interleaved)), (Trust.PATTERNS, COLUMN)).warnings) == 1
    assert choose((Trust.ATTRIBUTES, COLUMN), (Trust.PATTERNS, says(interleaved))).rules["w"].kind == "affine"


def test_a_vocabulary_is_cut_whoever_describes_the_geometry():
    shapes: dict[str, Any] = {"w": [(4, 8), (4, 8)]}
    claims = [Claim("layers", Trust.LAYERS, {"w": COLUMN})]
    rule = resolve(["w"], shapes, claims, tp_degree=2, vocabulary={"w": 5}).rules["w"]
    assert build_layout("w", rule, shapes["w"]).shape == (5, 8)
