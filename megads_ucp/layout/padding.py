# SPDX-License-Identifier: Apache-2.0
"""The rows that pad a vocabulary: which elements of the shards they are, and how a resume fills those of another run.

They are trained through the softmax, so an export keeps them (``Rule.vocabulary_size`` rows are the format's own, the
rows after them a tensor of their own), and a resume at another padded size makes its own of them::

    saved   n real rows | S padding rows
    wanted  n real rows | the first S of them, or fewer | further rows repeat the last of the S
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

from deepspeed.checkpoint.affine import ParamAffineMap

from megads_ucp.layout.boxes import Box, clip
from megads_ucp.layout.layout import Layout, build_layout


class Rows(NamedTuple):
    """``number`` padding rows from row ``saved`` on, and the row of the wanted vocabulary where they go."""

    wanted: int
    saved: int
    number: int


def with_padding(layout: Layout) -> Layout:
    """The layout of all rows that the shards hold, real ones and padding."""
    if layout.rule.vocabulary_size is None:
        return layout
    return build_layout(layout.name, replace(layout.rule, vocabulary_size=None), layout.shard_shapes)


def padding_layout(layout: Layout) -> Layout | None:
    """How the same shards make the tensor of all padding rows, which the layout leaves out; None if there are none.

    Elements of a shard in no piece are real rows.
    """
    whole = with_padding(layout)
    start, stop = layout.numel, whole.numel
    if start == stop:
        return None
    boxes = {rank: map(Box.from_piece, whole.pieces(rank)) for rank in range(layout.tp_degree)}
    pieces = {rank: [box.to_piece() for box in moved(held, start, stop, 0)] for rank, held in boxes.items()}
    shape = (whole.shape[0] - layout.shape[0], *layout.shape[1:])
    affine = ParamAffineMap(shape, whole.affine.shard_shapes, pieces)
    return Layout(layout.name, whole.rule, layout.tp_degree, shape, layout.shard_shapes, affine)


def padding_rows(real: int, saved: int, wanted: int) -> Iterator[Rows]:
    """Which saved padding rows become which rows of a vocabulary of another padded size.

    Rows beyond the saved ones repeat the last of those, in their order: of too small a number of real rows, the first
    padding rows may be words, which no row should be a second time.

    Args:
        real: rows before the padding.
        saved: padding rows that were saved.
        wanted: rows of the vocabulary to be filled, padding included.
    """
    room = wanted - real
    if not saved or room <= 0:
        return
    yield Rows(real, 0, min(saved, room))
    block = min(saved, room - saved)
    for done in range(saved, room, max(block, 1)):
        yield Rows(real + done, saved - block, min(block, room - done))


def padding_boxes(layout: Layout, real: int, saved: int, tp_rank: int, start: int, length: int) -> Iterator[Box]:
    """Elements [start, start + length) of a TP rank's shard, as far as they are padding, as boxes of the saved padding.

    Args:
        layout: of the vocabulary to be filled.
        real, saved: rows before the padding, and of the padding, in the checkpoint.
        tp_rank, start, length: as for :meth:`Layout.runs`.
    """
    whole = with_padding(layout)
    width = prod(whole.shape[1:])
    held = whole.runs(tp_rank, start, length)
    for rows in padding_rows(real, saved, whole.shape[0]):
        yield from moved(held, rows.wanted * width, (rows.wanted + rows.number) * width, rows.saved * width)


def moved(boxes: Iterable[Box], start: int, stop: int, to: int) -> Iterator[Box]:
    """What of the boxes lies in full elements [start, stop), as if the first of these were element ``to``."""
    for box in boxes:
        for part in clip(box, start, stop) if box.numel else ():
            yield replace(part, full_offset=part.full_offset - start + to)
