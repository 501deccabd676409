# SPDX-License-Identifier: Apache-2.0
"""Strided boxes: blocks of elements seen from the full tensor and from the shard that holds them.

Offsets and strides count elements. Pure but for the two ``*_view`` methods, which wrap ``torch.as_strided``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from deepspeed.checkpoint.affine import AffinePiece

from megads_ucp.errors import LayoutError
from megads_ucp.layout.strides import Ints, cut, pack_axes, reach


@dataclass(frozen=True, slots=True)
class Box:
    """Elements that keep their arrangement between the full tensor and one rank's shard.

    Element ``index`` lies at ``full_offset + index . full_strides`` of the flattened full tensor and at
    ``shard_offset + index . shard_strides`` of the flattened shard.

    Attributes:
        scale: the shard holds ``full * scale`` (``AffinePiece.scale``).
        holders: the TP ranks that hold a copy of these elements, ascending.
    """

    shape: Ints
    full_offset: int
    full_strides: Ints
    shard_offset: int
    shard_strides: Ints
    scale: float = 1.0
    holders: Ints = ()

    @classmethod
    def from_piece(cls, piece: AffinePiece) -> Box:
        return cls(
            piece.shape,
            piece.source_offset,
            piece.source_strides,
            piece.dest_offset,
            piece.dest_strides,
            piece.scale,
            tuple(sorted(piece.locations)),
        )

    def to_piece(self) -> AffinePiece:
        full, shard = (self.full_offset, self.full_strides), (self.shard_offset, self.shard_strides)
        return AffinePiece(self.shape, *full, *shard, self.holders, self.scale)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def full_span(self) -> tuple[int, int]:
        """First and last-plus-one offset in the full tensor."""
        return self.full_offset, self.full_offset + reach(self.shape, self.full_strides)

    @property
    def shard_span(self) -> tuple[int, int]:
        """First and last-plus-one offset in the shard."""
        return self.shard_offset, self.shard_offset + reach(self.shape, self.shard_strides)

    @property
    def dense(self) -> bool:
        """Whether its elements are neighbours, in the same order, in the full tensor and in the shard."""
        return self.full_strides == self.shard_strides == row_major(self.shape)

    def full_view(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """View of the box in ``buffer`` (1-D), which holds full elements ``[start, start + len(buffer))``.

        Raises:
            LayoutError: the box reaches outside the buffer.
        """
        return _view(buffer, start, self.shape, self.full_strides, self.full_span, "full tensor")

    def shard_view(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """View of the box in ``buffer`` (1-D), which holds shard elements ``[start, start + len(buffer))``.

        Raises:
            LayoutError: the box reaches outside the buffer.
        """
        return _view(buffer, start, self.shape, self.shard_strides, self.shard_span, "shard")


def row_major(shape: Ints) -> Ints:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def clip(box: Box, start: int, stop: int) -> tuple[Box, ...]:
    """The part of ``box`` whose full offsets lie in ``[start, stop)``, as few boxes, ascending."""
    first, last = box.full_span
    if start <= first and last <= stop:
        return (box,)
    if stop <= first or last <= start:
        return ()
    parts = cut(box.shape, box.full_offset, box.full_strides, box.shard_offset, box.shard_strides, start, stop)
    return tuple(
        Box(shape, full, full_strides, shard, shard_strides, box.scale, box.holders)
        for shape, full, full_strides, shard, shard_strides in parts
    )


def clip_shard(box: Box, start: int, stop: int) -> tuple[Box, ...]:
    """The part of ``box`` whose shard offsets lie in ``[start, stop)``, as few boxes, ascending."""
    first, last = box.shard_span
    if start <= first and last <= stop:
        return (box,)
    if stop <= first or last <= start:
        return ()
    parts = cut(box.shape, box.shard_offset, box.shard_strides, box.full_offset, box.full_strides, start, stop)
    return tuple(
        Box(shape, full, full_strides, shard, shard_strides, box.scale, box.holders)
        for shape, shard, shard_strides, full, full_strides in parts
    )


def cut_box(box: Box, limit: int) -> Iterator[Box]:
    """The box in parts, in order, that span at most ``limit`` elements of the full tensor from first to last."""
    if box.full_span[1] - box.full_span[0] <= limit or not box.shape:
        yield box
        return
    row = replace(box, shape=box.shape[1:], full_strides=box.full_strides[1:], shard_strides=box.shard_strides[1:])
    row_size = max(box.full_strides[0], 1)
    step = max(limit // row_size, 1)
    for start in range(0, box.shape[0], step):
        full = box.full_offset + start * box.full_strides[0]
        shard = box.shard_offset + start * box.shard_strides[0]
        if step > 1 or row_size <= limit:
            count = min(step, box.shape[0] - start)
            yield replace(box, shape=(count, *box.shape[1:]), full_offset=full, shard_offset=shard)
        else:  # one row is more than fits: cut along the next axis
            yield from cut_box(replace(row, full_offset=full, shard_offset=shard), limit)


def joined(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same elements in fewer boxes: neighbours merged, then each box packed into as few axes as possible.

    Sub-parameters are cut into one piece each even where one rank holds them all; merged, the shard is one run again.
    """
    merged: list[Box] = []
    for box in boxes:
        follower = _merge(merged[-1], box) if merged else None
        if follower is None:
            merged.append(box)
        else:
            merged[-1] = follower
    return tuple(_coalesce(box) for box in merged)


def _merge(left: Box, right: Box) -> Box | None:
    """One box for both, if ``right`` continues ``left`` along one axis on both sides."""
    if replace(left, shape=right.shape, full_offset=right.full_offset, shard_offset=right.shard_offset) != right:
        return None
    step = (right.full_offset - left.full_offset, right.shard_offset - left.shard_offset)
    for axis, size in enumerate(left.shape):
        others_agree = left.shape[:axis] + left.shape[axis + 1 :] == right.shape[:axis] + right.shape[axis + 1 :]
        if others_agree and step == (size * left.full_strides[axis], size * left.shard_strides[axis]):
            return replace(left, shape=(*left.shape[:axis], size + right.shape[axis], *left.shape[axis + 1 :]))
    return None


def _coalesce(box: Box) -> Box:
    shape, full, shard = pack_axes(box.shape, box.full_strides, box.shard_strides)
    return replace(box, shape=shape, full_strides=full, shard_strides=shard)


def _view(
    buffer: torch.Tensor, start: int, shape: Ints, strides: Ints, span: tuple[int, int], side: str
) -> torch.Tensor:
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise LayoutError(f"A box needs a contiguous 1-D buffer of the {side}, not one of shape {tuple(buffer.shape)}.")
    if span[0] < start or span[1] > start + buffer.numel():
        # as_strided looks at the storage, not at the view: it would silently read a neighbour's elements.
        raise LayoutError(
            f"A box spans elements [{span[0]}, {span[1]}) of the {side}, outside the buffer, "
            f"which holds [{start}, {start + buffer.numel()})."
        )
    return buffer.as_strided(shape, strides, buffer.storage_offset() + span[0] - start)
