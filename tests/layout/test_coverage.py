# SPDX-License-Identifier: Apache-2.0
"""Whether shards and full tensor account for each other exactly, judged as by counting every element."""

from __future__ import annotations

import pytest
import torch
from deepspeed.checkpoint.affine import (
    AffinePiece,
    ParamAffineMap,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megads_ucp.errors import LayoutError
from megads_ucp.layout.boxes import Box, clip
from megads_ucp.layout.coverage import Side, check_coverage, first_defect
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule
from tests.support.drawn_layouts import Case, cases


@settings(deadline=None, max_examples=80)
@given(cases())
def test_every_layout_covers_its_tensor(case: Case) -> None:
    check_coverage(case.layout)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[Side], int]:
    """A buffer cut over and over: at an address, or one axis of a box into every other index and the rest."""
    length = draw(st.integers(1, 60))
    boxes = [Box((length,), 0, (1,), 0, (1,))]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not box.shape or draw(st.booleans()):
            first, last = box.full_span
            cut = draw(st.integers(first, last))
            boxes += [*clip(box, first, cut), *clip(box, cut, last)]
            continue
        axis = draw(st.integers(0, len(box.shape) - 1))
        size, stride = box.shape[axis], box.full_strides[axis]
        every = draw(st.integers(1, size))
        whole = size // every  # axis = (whole, every) and a remainder; one of the `every` columns is set apart
        column = draw(st.integers(0, every - 1))
        for columns, start in ((column, 0), (1, column), (every - column - 1, column + 1)):
            shape = (*box.shape[:axis], whole, columns, *box.shape[axis + 1 :])
            strides = (*box.full_strides[:axis], every * stride, stride, *box.full_strides[axis + 1 :])
            boxes.append(Box(shape, box.full_offset + start * stride, strides, 0, strides))
        shape = (*box.shape[:axis], size - whole * every, *box.shape[axis + 1 :])
        boxes.append(Box(shape, box.full_offset + whole * every * stride, box.full_strides, 0, box.full_strides))
        boxes = [box for box in boxes if box.numel]
    return [Side(box.shape, box.full_offset, box.full_strides) for box in boxes], length


any_side = st.builds(
    lambda axes, offset: Side(tuple(size for size, _ in axes), offset, tuple(stride for _, stride in axes)),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 5, 6, 12])), max_size=3),
    st.integers(0, 40),
)


@settings(deadline=None, max_examples=300)
@given(tilings(), st.data(), st.booleans())
def test_a_tiling_is_judged_as_by_counting_every_element(
    tiling: tuple[list[Side], int], data: st.DataObject, holes_allowed: bool
) -> None:
    boxes, length = tiling
    for change in data.draw(
        st.lists(st.sampled_from(["drop", "repeat", "replace", "lengthen", "shorten"]), max_size=1)
    ):
        broken = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        boxes += [broken, broken] if change == "repeat" else [data.draw(any_side)] if change == "replace" else []
        length += {"lengthen": 1, "shorten": -1}.get(change, 0)
        boxes += [broken] if change in ("lengthen", "shorten") else []
    count = torch.zeros(400, dtype=torch.int64)
    for side in boxes:
        offsets = torch.tensor(side.offset)
        for size, stride in zip(side.shape, side.strides, strict=True):
            offsets = offsets[..., None] + torch.arange(size) * stride
        count += torch.bincount(offsets.flatten(), minlength=400)
    tiles = not count[length:].any() and not (count > 1).any() and (holes_allowed or bool((count[:length] == 1).all()))

    defect = first_defect(boxes, length, holes_allowed=holes_allowed)
    assert (defect is None) == tiles
    if defect is not None:
        kind, address = defect
        assert {"outside": address >= length, "overlap": count[address] > 1, "hole": count[address] == 0}[kind]


def test_long_runs_beside_columns_tile_wherever_they_begin_and_end() -> None:
    """Rows of seven: two blocks of columns of three rows, between runs that fit no row."""
    for before in range(1, 45):
        for after in range(1, 45):
            columns = [Side((3, 4), before, (7, 1)), Side((3, 3), before + 4, (7, 1))]
            runs = [Side((before,), 0, (1,)), Side((after,), before + 21, (1,))]
            assert first_defect([*columns, *runs], before + 21 + after) is None
            assert first_defect([*columns, *runs], before + 22 + after) == ("hole", before + 21 + after)


def affine_rule(pieces: dict[int, list[AffinePiece]], shape: tuple[int, ...], shards: list[tuple[int, ...]]) -> Rule:
    affine = ParamAffineMap(shape, dict(enumerate(shards)), pieces)
    return Rule("affine", "the model's map", affine=affine.to_dict())


def rows(first: int, count: int, to: int, holders: list[int]) -> AffinePiece:
    """``count`` rows of a matrix of 3 columns."""
    return AffinePiece((count, 3), first * 3, (3, 1), to * 3, (3, 1), holders)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({0: [rows(0, 2, 0, [0])], 1: [rows(3, 1, 0, [1]), rows(3, 1, 1, [1])]}, r"TP rank 1 .* two pieces hold"),
        ({0: [rows(0, 2, 0, [0])], 1: [rows(1, 2, 0, [1])]}, r"two pieces hold element 3 \(index \(1, 0\)\)"),
        ({0: [rows(0, 2, 0, [0])], 1: [rows(3, 2, 0, [1])]}, "a piece reaches beyond it, to element 14"),
        ({0: [rows(0, 2, 0, [0])], 1: [rows(2, 1, 0, [1])]}, r"TP rank 1 .* no piece holds element 3 "),
        ({0: [rows(0, 2, 0, [0])], 1: [rows(0, 2, 0, [1])]}, "two pieces hold element 0"),
        ({0: [rows(0, 2, 0, [0, 1])], 1: [rows(2, 2, 0, [1])]}, "full tensor, as held by TP rank 1 .* no piece holds"),
        ({0: [rows(0, 2, 0, [1])], 1: [rows(2, 2, 0, [1])]}, r"TP rank 0 of 2 a piece .* TP ranks \[1\] hold"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(pieces: dict[int, list[AffinePiece]], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as error:
        build_layout("w", affine_rule(pieces, (4, 3), [(2, 3), (2, 3)]), [(2, 3), (2, 3)])
    assert "the model's map" in str(error.value)


def test_a_hole_in_the_full_tensor_is_found() -> None:
    pieces = {0: [rows(0, 2, 0, [0])], 1: [rows(3, 2, 0, [1])]}
    with pytest.raises(LayoutError, match=r"no piece holds element 6 \(index \(2, 0\)\)"):
        build_layout("w", affine_rule(pieces, (5, 3), [(2, 3), (2, 3)]), [(2, 3), (2, 3)])


def test_ranks_may_describe_their_copies_of_shared_elements_in_different_words() -> None:
    pieces = {0: [rows(0, 2, 0, [0, 1])], 1: [rows(0, 1, 0, [0, 1]), rows(1, 1, 1, [0, 1])]}
    layout = build_layout("w", affine_rule(pieces, (2, 3), [(2, 3), (2, 3)]), [(2, 3), (2, 3)])
    assert layout.replicated
