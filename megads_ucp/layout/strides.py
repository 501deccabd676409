# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of strides: which elements of a block of strided axes lie in an interval of addresses.

Everything here rests on one observation. Sort a box's axes by stride, largest first, on the side one looks from. If
each stride exceeds the reach of all the axes inside it (as in any rectangular block of a row-major tensor), walking the
box in index order visits strictly ascending addresses. An interval of addresses is therefore an interval of the index
order, and such an interval is a ragged first row, some whole rows and a ragged last row; each ragged row is the same
question one axis further in. So a box of ``d`` axes meets an interval in at most ``2 * d - 1`` boxes.

Offsets and strides count elements. Pure.
"""

from __future__ import annotations

from math import prod

Ints = tuple[int, ...]


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
