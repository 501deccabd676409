# SPDX-License-Identifier: Apache-2.0
"""Layouts against a slow reference: plain torch cuts of a tensor whose every element is its own index."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import (
    AffinePiece,
    ParamAffineMap,
    contiguous_split_map,
    replicated_map,
)
from deepspeed.checkpoint.universal_checkpoint import SubparamShape, _narrow_sub_params
from hypothesis import given, settings
from hypothesis import strategies as st

from megads_ucp.errors import LayoutError
from megads_ucp.layout.boxes import Box, clip, clip_shard
from megads_ucp.layout.coverage import check_coverage
from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.rule import Rule
from tests.support.drawn_layouts import PADDING, Case, cases, widths


def pairs(box: Box, layout: Layout, tp_rank: int) -> torch.Tensor:
    """(shard offset, full offset) of each of a box's elements, as torch sees them."""
    shard = box.shard_view(torch.arange(prod(layout.shard_shapes[tp_rank])), 0)
    full = box.full_view(torch.arange(layout.numel), 0)
    return torch.stack([shard.flatten(), full.flatten()], dim=1)


def in_shard_order(boxes: tuple[Box, ...], layout: Layout, tp_rank: int) -> torch.Tensor:
    found = torch.cat([torch.empty(0, 2, dtype=torch.int64), *(pairs(box, layout, tp_rank) for box in boxes)])
    return found[found[:, 0].argsort(stable=True)]


def some_range(data: st.DataObject, numel: int) -> tuple[int, int]:
    """Long ranges and, as often, short ones that begin and end within one row."""
    start = data.draw(st.integers(0, numel))
    return start, data.draw(st.integers(start, numel) | st.integers(start, min(start + 2, numel)))


# -- runs and clip -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=120)
@given(cases(), st.data())
def test_runs_hold_exactly_the_range_and_know_where_it_lies(case: Case, data: st.DataObject) -> None:
    layout = case.layout
    for tp_rank, index in enumerate(case.indices):
        start, stop = some_range(data, index.numel())
        boxes = layout.runs(tp_rank, start, stop - start)
        real = torch.arange(start, stop)[index[start:stop] != PADDING]
        assert torch.equal(in_shard_order(boxes, layout, tp_rank), torch.stack([real, index[real]], dim=1))
        assert len(boxes) <= len(layout.affine.pieces_by_rank[tp_rank]) * (2 * case.ndim - 1)
        assert all(tp_rank in box.holders and box.numel for box in boxes)


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(cases(), st.data())
def test_clip_keeps_exactly_what_lies_in_the_extent(case: Case, data: st.DataObject) -> None:
    layout = case.layout
    for tp_rank, index in enumerate(case.indices):
        start, stop = some_range(data, index.numel())
        first, last = some_range(data, layout.numel)
        for box in layout.runs(tp_rank, start, stop - start):
            whole = in_shard_order((box,), layout, tp_rank)
            inside = (whole[:, 1] >= first) & (whole[:, 1] < last)
            parts = clip(box, first, last)
            assert torch.equal(in_shard_order(parts, layout, tp_rank), whole[inside])
            assert len(parts) <= 2 * case.ndim - 1
            assert [part.full_span for part in parts] == sorted(part.full_span for part in parts)
            assert all((part.scale, part.holders) == (box.scale, box.holders) for part in parts)


@settings(deadline=None, max_examples=80)
@given(cases(), st.data())
def test_fragments_of_all_ranks_rebuild_the_full_tensor_and_are_read_back_from_it(
    case: Case, data: st.DataObject
) -> None:
    """Both directions, through buffers that are views into larger ones, for any data-parallel cut of the shards."""
    layout = case.layout
    cut = data.draw(st.integers(0, layout.numel))
    extents = [torch.full((size,), PADDING) for size in (cut, layout.numel - cut)]
    fragments = []
    for tp_rank, index in enumerate(case.indices):
        cuts = sorted(data.draw(st.lists(st.integers(0, index.numel()), max_size=3)))
        for start, stop in zip([0, *cuts], [*cuts, index.numel()], strict=True):
            fragments.append((index[start:stop], start, layout.runs(tp_rank, start, stop - start)))

    for fragment, start, boxes in fragments:
        for extent, first in zip(extents, (0, cut), strict=True):
            for part in (part for box in boxes for part in clip(box, first, first + extent.numel())):
                part.full_view(extent, first).copy_(part.shard_view(fragment, start))
    full = torch.cat(extents)
    assert torch.equal(full, torch.arange(layout.numel))

    for fragment, start, boxes in fragments:
        restored = torch.full_like(fragment, PADDING)
        for box in boxes:
            box.shard_view(restored, start).copy_(box.full_view(full, 0))
        assert torch.equal(restored, fragment)


@settings(deadline=None, max_examples=120)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), max_size=3), st.data())
def test_boxes_of_any_strides_are_cut_exactly(axes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Also where rows interlock (strides 3 and 2) or are visited in another order on the two sides."""
    shape, full, shard = (tuple(axis[column] for axis in axes) for column in range(3))
    box = Box(shape, 5, full, 2, shard)
    seen = {side: data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60))) for side in ("full", "shard")}

    def elements(boxes: tuple[Box, ...]) -> list[tuple[int, int]]:
        buffer = torch.arange(200)
        return sorted(
            pair
            for each in boxes
            for pair in zip(
                each.full_view(buffer, 0).flatten().tolist(), each.shard_view(buffer, 0).flatten().tolist(), strict=True
            )
        )

    every = elements((box,))
    start, stop = seen["full"]
    assert elements(clip(box, start, stop)) == [pair for pair in every if start <= pair[0] < stop]
    start, stop = seen["shard"]
    assert elements(clip_shard(box, start, stop)) == [pair for pair in every if start <= pair[1] < stop]


def test_the_worked_example_of_the_module() -> None:
    layout = build_layout("w", Rule("split", "test", dim=1), [(4, 3), (4, 3)])
    assert layout.runs(1, start=2, length=8) == (
        Box((), 5, (), 2, (), holders=(1,)),
        Box((2, 3), 9, (6, 1), 3, (3, 1), holders=(1,)),
        Box((), 21, (), 9, (), holders=(1,)),
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_one_rank_holding_all_sub_parameters_holds_one_run(dim: int) -> None:
    rule = Rule("split", "test", dim=dim, sub_sizes=(8, 4, 4), style="sub_param_shape")
    layout = build_layout("qkv", rule, [(16, 16)])
    assert layout.runs(0, 0, 256) == (Box((256,), 0, (1,), 0, (1,), holders=(0,)),)


def test_the_order_in_which_a_map_lists_its_axes_does_not_matter() -> None:
    affine = ParamAffineMap((4, 3), {0: (4, 3)}, {0: [AffinePiece((3, 4), 0, (1, 3), 0, (1, 3), [0])]})
    layout = build_layout("w", Rule("affine", "test", affine=affine.to_dict()), [(4, 3)])
    assert layout.runs(0, 0, 12) == (Box((12,), 0, (1,), 0, (1,), holders=(0,)),)


def test_box_counts_do_not_grow_with_the_parameter() -> None:
    layout = build_layout("w", Rule("split", "test", dim=1), [(100_000, 1536)] * 8)
    check_coverage(layout)
    assert len(layout.runs(3, 1000, 50_000_000)) == 3
    (rows,) = (box for box in layout.runs(3, 1000, 50_000_000) if len(box.shape) == 2)
    assert len(clip(rows, 1_000_001, 300_000_001)) <= 3


def test_scale_and_holders_travel_with_the_boxes() -> None:
    affine = replicated_map((6,), 2, scale=0.5)
    layout = build_layout("bias", Rule("affine", "test", affine=affine.to_dict()), [(6,), (6,)])
    assert layout.runs(1, 2, 3) == (Box((3,), 2, (1,), 2, (1,), scale=0.5, holders=(0, 1)),)


def test_a_range_outside_the_shard_is_refused() -> None:
    layout = build_layout("w", Rule("split", "test", dim=0), [(3, 2), (1, 2)])
    with pytest.raises(LayoutError, match=r"w: elements \[1, 3\) .* TP rank 1, whose shape is \(1, 2\)"):
        layout.runs(1, 1, 2)
    with pytest.raises(LayoutError, match="no TP rank -1"):
        layout.runs(-1, 0, 1)


def test_a_view_outside_the_buffer_is_refused() -> None:
    buffer = torch.arange(20)
    box = Box((2, 2), 4, (6, 1), 0, (2, 1))
    assert box.full_view(buffer[4:12], 4).tolist() == [[4, 5], [10, 11]]
    for inside, start in ((buffer[5:12], 5), (buffer[4:11], 4)):
        with pytest.raises(LayoutError, match=r"\[4, 12\) of the full tensor, outside the buffer"):
            box.full_view(inside, start)
    with pytest.raises(LayoutError, match="contiguous 1-D buffer of the shard"):
        box.shard_view(buffer.view(4, 5), 0)
    with pytest.raises(LayoutError, match="contiguous 1-D buffer of the shard"):
        box.shard_view(buffer[::2], 0)


# -- what a rule says against what the ranks hold ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "shards", "message"),
    [
        (Rule("replicated", "patterns"), [(4, 2), (2, 2)], r"patterns says .* whole tensor.*\[\(4, 2\), \(2, 2\)\]"),
        (Rule("averaged", "patterns"), [(4,), (2,)], "whole tensor"),
        (Rule("split", "patterns", dim=1), [(4,), (4,)], "split along dimension 1"),
        (Rule("split", "patterns", dim=1), [(4, 2), (3, 2)], "all others must agree"),
        (
            Rule("split", "patterns", dim=0, sub_sizes=(4, 3), style="sub_param_shape"),
            [(4, 2), (3, 2)],
            r"\(4, 3\), given without shard widths, divide evenly by 2",
        ),
        (
            Rule("split", "patterns", dim=0, sub_sizes=(4, 4), style="sub_param_shape"),
            [(3, 2), (3, 2)],
            r"made of sub-parameters \(4, 4\)",
        ),
        (
            Rule("split", "patterns", dim=0, shard_widths=((3, 1), (2, 2)), style="sub_param_shape"),
            [(4, 2), (4, 2)],
            r"widths \(\(3, 1\), \(2, 2\)\)",
        ),
        (Rule("split", "patterns", dim=0, style="n_sub_params"), [(3, 2), (4, 2)], "2 equal parts"),
        (Rule("split", "patterns", dim=0, sub_sizes=(6, 2), style="n_sub_params"), [(4, 2)] * 2, "2 equal parts"),
        (
            Rule("split", "patterns", dim=0, vocabulary_size=9),
            [(4, 2)] * 2,
            r"9 rows .* full tensor has shape \(8, 2\)",
        ),
        (
            Rule("affine", "patterns", affine=contiguous_split_map((4, 2), (2, 2), 0).to_dict()),
            [(2, 2)] * 3,
            "the shard shapes by TP rank are",
        ),
        (Rule("affine", "patterns", affine={"ranks": {}}), [(2, 2)], "cannot be read: KeyError"),
        (
            Rule(
                "affine",
                "patterns",
                affine=ParamAffineMap((4,), {0: (4,)}, {0: [AffinePiece((4,), 3, (-1,), 0, (1,), [0])]}).to_dict(),
            ),
            [(4,)],
            "a stride below 1",
        ),
    ],
)
def test_contradictions_name_both_sides(rule: Rule, shards: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as error:
        build_layout("decoder.w", rule, shards)
    assert "decoder.w" in str(error.value)
    assert "patterns" in str(error.value)


@pytest.mark.parametrize(
    "claim",
    [
        {"kind": "sharded"},
        {"kind": "split"},
        {"kind": "affine"},
        {"kind": "replicated", "dim": 0},
        {"kind": "split", "dim": -1},
        {"kind": "split", "dim": 0, "style": "fancy"},
        {"kind": "split", "dim": 0, "sub_sizes": (4, 4)},
        {"kind": "split", "dim": 0, "style": "sub_param_shape"},
        {"kind": "split", "dim": 0, "sub_sizes": (4,), "shard_widths": ((2, 3),)},
        {"kind": "split", "dim": 0, "shard_widths": ((2, 2), (4,)), "style": "sub_param_shape"},
        {"kind": "split", "dim": 0, "sub_sizes": (4, 4), "style": "sub_param_shape", "sub_param_shape": ((8, 4), -1)},
        {"kind": "replicated", "vocabulary_size": 0},
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(claim: dict) -> None:
    with pytest.raises(LayoutError, match="contradicts itself"):
        Rule(source="test", **claim)


def test_rules_are_equal_when_they_cut_alike_whoever_says_so() -> None:
    lists: Any = [[2, 2], [2, 2]]  # as JSON has them
    one = Rule("split", "patterns", dim=0, sub_sizes=(4, 4), style="sub_param_shape", shard_widths=lists)
    two = Rule("split", "layers", dim=0, style="sub_param_shape", shard_widths=((2, 2), (2, 2)))
    assert one == two
    assert hash(one) == hash(two)
    first, second = (Rule("affine", "map", affine=replicated_map((n,), 1).to_dict()) for n in (2, 3))
    assert first != second


# -- the cut is DeepSpeed's, and so are the keys -----------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(0, 1), st.data())
def test_sub_parameters_are_cut_as_the_stock_loader_cuts_them(tp_degree: int, dim: int, data: st.DataObject) -> None:
    by_sub = tuple(data.draw(st.lists(widths(tp_degree), min_size=1, max_size=3)))
    sizes = [sum(row) for row in by_sub]
    shape = [3, 3]
    shape[dim] = sum(sizes)
    full = torch.arange(prod(shape))
    shards = [
        _narrow_sub_params(full.view(shape), dim, sizes, by_sub, rank, tp_degree, 0.4) for rank in range(tp_degree)
    ]
    shapes = [tuple(sum(row[rank] for row in by_sub) if d == dim else 3 for d in (0, 1)) for rank in range(tp_degree)]
    layout = build_layout("w", Rule("split", "test", dim=dim, shard_widths=by_sub, style="sub_param_shape"), shapes)
    for rank, shard in enumerate(shards):
        mine = torch.full_like(shard, PADDING)
        for box in layout.runs(rank, 0, shard.numel()):
            box.shard_view(mine, 0).copy_(box.full_view(full, 0))
        assert torch.equal(mine, shard)


def test_metadata() -> None:
    def keys(rule: Rule, *shards: tuple[int, ...]) -> dict:
        return build_layout("w", rule, shards).metadata()

    halves = Rule("split", "test", dim=0, sub_sizes=(8, 8), style="n_sub_params")
    derived = Rule("split", "test", dim=0, sub_sizes=(8, 4, 4), style="sub_param_shape", sub_param_patterns=("qkv",))
    written = Rule("split", "test", dim=1, sub_sizes=(4, 2), style="sub_param_shape", sub_param_shape=(-1, (4, 2)))
    assert keys(Rule("replicated", "test"), (8,)) == {}
    assert keys(Rule("averaged", "test"), (8,), (8,)) == {}
    assert keys(Rule("split", "test", dim=1), (8, 4)) == {"cat_dim": 1}  # at TP 1 too: the loader may have more ranks
    assert keys(Rule("split", "test", dim=0, vocabulary_size=250), (128, 2), (128, 2)) == {
        "cat_dim": 0,
        "vocab_tensor": True,
    }
    assert keys(halves, (8, 4), (8, 4)) == {"cat_dim": 0, "param_n_sub_params": 2}
    assert keys(derived, (8, 4), (8, 4)) == {"sub_param_shape": SubparamShape(["qkv"], ((8, 4, 4), 4), 0)}
    assert keys(written, (8, 3), (8, 3)) == {"sub_param_shape": SubparamShape([], (-1, (4, 2)), 1)}
    affine = contiguous_split_map((10, 2), (5, 5), 0).to_dict()
    assert keys(Rule("affine", "test", affine=affine), (5, 2), (5, 2)) == {}
    assert keys(Rule("affine", "test", affine=affine, vocabulary_size=9), (5, 2), (5, 2)) == {"vocab_tensor": True}


def test_vocabulary_padding_is_in_no_box() -> None:
    """Megatron's vocabulary of 5, padded to 8 for TP 4: the third rank holds one real row, the last holds none."""
    layout = build_layout("embedding", Rule("split", "test", dim=0, vocabulary_size=5), [(2, 3)] * 4)
    check_coverage(layout)
    assert layout.shape == (5, 3)
    assert [sum(box.numel for box in layout.runs(rank, 0, 6)) for rank in range(4)] == [6, 6, 3, 0]


def test_empty_shards() -> None:
    """More TP ranks than KV heads: AutoTP leaves the last ranks with nothing, sometimes as a bare torch.empty(0)."""
    rule = Rule("affine", "test", affine=contiguous_split_map((3, 2), (2, 1, 0), 0).to_dict())
    layout = build_layout("k", rule, [(2, 2), (1, 2), (0,)])
    assert layout.runs(2, 0, 0) == ()
    assert build_layout("v", Rule("split", "test", dim=1), [(3, 2), (3, 0)]).shape == (3, 2)


def test_scalars() -> None:
    layout = build_layout("scale", Rule("replicated", "test"), [(), ()])
    check_coverage(layout)
    assert layout.numel == 1
    assert layout.runs(1, 0, 1) == (Box((), 0, (), 0, (), holders=(0, 1)),)
