# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of strided boxes: a block of elements seen from the full tensor and from the shard that holds it.

Everything here rests on one observation. Sort a box's axes by stride, largest first, on the side one looks from. If
each stride exceeds the reach of all the axes inside it (as in any rectangular block of a row-major tensor), walking the
box in index order visits strictly ascending addresses. An interval of addresses is therefore an interval of the index
order, and such an interval is a ragged first row, some whole rows and a ragged last row; each ragged row is the same
question one axis further in. So a box of ``d`` axes meets an interval in at most ``2 * d - 1`` boxes.

Offsets and strides count elements. Pure but for the two ``*_view`` methods, which wrap ``torch.as_strided``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from deepspeed.checkpoint.affine import AffinePiece

from megads_ucp.errors import LayoutError

Ints = tuple[int, ...]


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


def pack_axes(shape: Ints, *strides: Ints) -> tuple[Ints, ...]:
    """Shape and strides of the same elements with as few axes as possible, by descending last strides.

    Axes of one element are dropped, and axes that run on from one another are joined.
    """
    axes = [axis for axis in zip(shape, *strides, strict=True) if axis[0] > 1]
    axes.sort(key=lambda axis: axis[-1], reverse=True)
    packed: list[Ints] = []
    for size, *steps in axes:
        if packed and packed[-1][1:] == tuple(size * step for step in steps):
            size *= packed.pop()[0]
        packed.append((size, *steps))
    return tuple(tuple(axis[column] for axis in packed) for column in range(1 + len(strides)))


Part = tuple[Ints, int, Ints, int, Ints]
"""One part of a cut box: shape; offset and strides on the side that was cut; offset and strides on the other side."""


def cut(shape: Ints, near: int, near_strides: Ints, far: int, far_strides: Ints, start: int, stop: int) -> list[Part]:
    """The elements whose near address lies in ``[start, stop)``, as boxes in ascending order of near address."""
    parts: list[Part] = []
    if not _ascends(shape, near_strides):
        order = sorted(range(len(shape)), key=near_strides.__getitem__, reverse=True)
        shape, near_strides, far_strides = (
            tuple(values[axis] for axis in order) for values in (shape, near_strides, far_strides)
        )
        if not _ascends(shape, near_strides):
            # Rows that interlock (strides 3 and 2, say): no order of axes ascends, so rows are cut one by one.
            for row in range(shape[0]):
                origin, target = near + row * near_strides[0], far + row * far_strides[0]
                parts += cut(shape[1:], origin, near_strides[1:], target, far_strides[1:], start, stop)
            return parts
    low = _elements_below(shape, near_strides, start - near)
    high = _elements_below(shape, near_strides, stop - near)
    _take(shape, near, near_strides, far, far_strides, low, high, parts)
    return parts


def _ascends(shape: Ints, strides: Ints) -> bool:
    """Whether index order is strictly ascending address order."""
    inner = 0
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride <= inner:
            return False
        inner += (size - 1) * stride
    return True


def _elements_below(shape: Ints, strides: Ints, address: int) -> int:
    """How many elements lie below ``address``, counted from the box's first; the box ascends."""
    if address <= 0:
        return 0
    below = 0
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        index, address = divmod(address, stride)
        if index >= size:
            return (below + 1) * prod(shape[axis:])
        below = below * size + index
    return below + (address > 0)


def _take(
    shape: Ints, near: int, near_strides: Ints, far: int, far_strides: Ints, low: int, high: int, parts: list[Part]
) -> None:
    """Append elements ``[low, high)`` of the box in index order: ragged first row, whole rows, ragged last row."""
    if low >= high:
        return
    if not shape:
        parts.append((shape, near, near_strides, far, far_strides))
        return
    inner = shape[1:]
    row = prod(inner)
    near_step, near_inner = near_strides[0], near_strides[1:]
    far_step, far_inner = far_strides[0], far_strides[1:]
    first, skipped = divmod(low, row)
    last, extra = divmod(high, row)
    if skipped:
        end = extra if first == last else row
        _take(inner, near + first * near_step, near_inner, far + first * far_step, far_inner, skipped, end, parts)
        if first == last:
            return
        first += 1
    if last - first > 1:
        origin, target = near + first * near_step, far + first * far_step
        parts.append(((last - first, *inner), origin, near_strides, target, far_strides))
    elif last - first == 1:
        parts.append((inner, near + first * near_step, near_inner, far + first * far_step, far_inner))
    if extra:
        _take(inner, near + last * near_step, near_inner, far + last * far_step, far_inner, 0, extra, parts)


def reach(shape: Ints, strides: Ints) -> int:
    """Distance from the first address of a non-empty box to one past its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def index_of(address: int, shape: Ints) -> Ints:
    """The index of element number ``address`` of a row-major tensor."""
    index = []
    for size in reversed(shape):
        address, position = divmod(address, size)
        index.append(position)
    return tuple(reversed(index))


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
