# SPDX-License-Identifier: Apache-2.0
"""The rows that pad a vocabulary: what a cut layout leaves out, and what another padded size makes of it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.padding import padding_boxes, padding_layout, padding_rows, with_padding
from megads_ucp.layout.rule import Rule
from tests.support.drawn_layouts import PADDING, Case, cases
from tests.support.layouts import rebuild


def shards_of(layout: Layout, full: torch.Tensor) -> list[torch.Tensor]:
    """What the TP ranks hold of all rows, unscaled."""
    found = [torch.full((prod(shape),), -2, dtype=full.dtype) for shape in layout.shard_shapes]
    for rank, shard in enumerate(found):
        for box in layout.runs(rank, 0, shard.numel()):
            box.shard_view(shard, 0).copy_(box.full_view(full.reshape(-1), 0))
    return found


@given(cases())
def test_padding_is_exactly_what_the_cut_layout_leaves_out(case: Case) -> None:
    padding = padding_layout(case.layout)
    whole = with_padding(case.layout)

    if padding is None:
        assert whole.numel == case.layout.numel and all((shard != PADDING).all() for shard in case.indices)
        return
    assert padding.shape == (whole.shape[0] - case.layout.shape[0], *whole.shape[1:])
    full = torch.arange(whole.numel)
    filled = torch.full((padding.numel,), -1)
    for rank, (shard, indices) in enumerate(zip(shards_of(whole, full), case.indices, strict=True)):
        held = torch.full_like(shard, -1)
        for box in padding.runs(rank, 0, shard.numel()):
            box.shard_view(held, 0).copy_(box.shard_view(shard, 0))
            box.full_view(filled, 0).copy_(box.shard_view(shard, 0))
        assert torch.equal(held != -1, indices == PADDING)
    assert torch.equal(filled, full[case.layout.numel :])


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=2, max_size=3),
    st.integers(1, 3),
)
def test_a_chain_of_degrees_keeps_what_it_has_room_for(real: int, sizes: list[tuple[int, int]], width: int) -> None:
    """Each run fills a vocabulary padded in its own way from what the run before it held."""
    layouts = []
    for degree, rows_each in sizes:
        each = max(rows_each, -(-real // degree))
        rule = Rule("split", "test", dim=0, vocabulary_size=real)
        layouts.append(build_layout("w", rule, [(each, width)] * degree))
    first = with_padding(layouts[0])
    held = torch.arange(first.numel).view(first.shape)

    for layout in layouts[1:]:
        saved = held[real:]
        shards = []
        for rank, shape in enumerate(layout.shard_shapes):
            shard = torch.full((prod(shape),), -1)
            for box in layout.runs(rank, 0, shard.numel()):
                box.shard_view(shard, 0).copy_(box.full_view(held[:real].reshape(-1), 0))
            for box in padding_boxes(layout, real, len(saved), rank, 0, shard.numel()):
                box.shard_view(shard, 0).copy_(box.full_view(saved.reshape(-1), 0))
            shards.append(shard.view(shape))
        whole = rebuild(with_padding(layout), shards)
        kept = min(len(whole), len(held))
        assert torch.equal(whole[:kept], held[:kept])
        rest = whole[kept:]
        assert all((row == saved).all(1).any() for row in rest) if len(saved) else (rest == -1).all()
        held = whole


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 40))
def test_every_wanted_row_is_filled_once(real: int, saved: int, wanted: int) -> None:
    found = [row for rows in padding_rows(real, saved, wanted) for row in range(rows.wanted, rows.wanted + rows.number)]
    assert found == (list(range(real, wanted)) if saved else [])


def test_rows_beyond_the_saved_ones_repeat_the_last_of_them() -> None:
    """Of 64 rows, 50 were called real; three more were: none of those is in the vocabulary a second time."""
    assert [tuple(rows) for rows in padding_rows(50, 14, 72)] == [(50, 0, 14), (64, 6, 8)]
    assert [tuple(rows) for rows in padding_rows(5, 2, 12)] == [(5, 0, 2), (7, 0, 2), (9, 0, 2), (11, 0, 1)]


@pytest.mark.parametrize("kind", ["replicated", "averaged"])
def test_padding_of_whole_copies_is_held_alike(kind: str) -> None:
    layout = build_layout("w", Rule(kind, "test", vocabulary_size=3), [(5, 2)] * 2)  # type: ignore[arg-type]
    padding = padding_layout(layout)
    assert padding is not None and padding.shape == (2, 2)
    assert (padding.replicated, padding.averaged) == (layout.replicated, layout.averaged)
    assert [box.holders for box in padding.runs(1, 0, 10)] == [(0, 1)]
    assert padding_layout(build_layout("w", replace(layout.rule, vocabulary_size=5), [(5, 2)] * 2)) is None
