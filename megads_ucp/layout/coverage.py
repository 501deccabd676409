# SPDX-License-Identifier: Apache-2.0
"""Whether strided boxes tile a buffer: every address held, none held twice. Pure, and never element by element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from megads_ucp.layout.boxes import Ints, cut, reach


class Side(NamedTuple):
    """A box seen from one side only."""

    shape: Ints
    offset: int
    strides: Ints

    @property
    def last(self) -> int:
        return self.offset + reach(self.shape, self.strides) - 1


class Defect(NamedTuple):
    """The first address at which boxes fail to tile a buffer."""

    kind: str  # "outside", "overlap" or "hole"
    address: int


def first_defect(sides: Sequence[Side], length: int, *, holes_allowed: bool = False) -> Defect | None:
    """Whether non-empty boxes tile addresses ``[0, length)``: each held once (with ``holes_allowed``: at most once).

    Exact, and its cost depends on the number of boxes, not of elements. Addresses are read as rows as long as the
    longest stride; between two rows where some box begins or ends all rows are alike, so one of them is looked at, in
    the same way.
    """
    for side in sides:
        if side.offset < 0 or side.last >= length:
            return Defect("outside", side.offset if side.offset < 0 else side.last)
    return _sweep([_sorted_axes(side) for side in sides], length, holes_allowed)


def _sweep(sides: Sequence[Side], length: int, holes_allowed: bool) -> Defect | None:
    period = max((stride for side in sides for stride in side.strides), default=1)
    if period == 1 and all(len(side.shape) <= 1 for side in sides):
        return _sweep_runs(sides, length, holes_allowed)
    bands = [band for side in sides for band in _rows(side, period)]
    whole_rows, rest = divmod(length, period)
    edges = {0, whole_rows, whole_rows + (rest > 0)}
    for first, count, _ in bands:
        edges.update((first, first + count))
    ordered = sorted(edges)
    for row in ordered[:-1]:
        present = [side for first, count, side in bands if first <= row < first + count]
        defect = _sweep(present, period if row < whole_rows else rest, holes_allowed)
        if defect is not None:
            return Defect(defect.kind, row * period + defect.address)
    return None


def _sweep_runs(runs: Sequence[Side], length: int, holes_allowed: bool) -> Defect | None:
    cursor = 0
    for offset, numel in sorted((run.offset, prod(run.shape)) for run in runs):
        if offset < cursor:
            return Defect("overlap", offset)
        if offset > cursor and not holes_allowed:
            return Defect("hole", cursor)
        cursor = offset + numel
    return Defect("hole", cursor) if cursor < length and not holes_allowed else None


def _rows(side: Side, period: int) -> Iterator[tuple[int, int, Side]]:
    """``side`` as ``(first row, number of rows, what each of these rows holds)`` in rows of ``period`` addresses."""
    shape, offset, strides = side
    count, inner = 1, side
    if shape and strides[0] == period:
        count, inner = shape[0], Side(shape[1:], offset, strides[1:])
    elif shape and period % strides[0] == 0 and shape[0] >= 3 * (period // strides[0]):
        # A long run: whole rows in the middle are one repeated row, whatever their number.
        per_row = period // strides[0]
        head = -(-(period - offset % period) // strides[0]) % per_row
        rows = (shape[0] - head) // per_row
        middle = offset + head * strides[0]
        tail = shape[0] - head - rows * per_row
        yield from _rows(Side((rows, per_row, *shape[1:]), middle, (period, *strides)), period)
        for size, origin in ((head, offset), (tail, middle + rows * period)):
            if size:
                yield from _rows(Side((size, *shape[1:]), origin, strides), period)
        return
    for row in range(inner.offset // period, inner.last // period + 1):
        start = row * period
        for part in cut(inner.shape, inner.offset, inner.strides, 0, (0,) * len(inner.shape), start, start + period):
            yield row, count, Side(part[0], part[1] - start, part[2])


def _sorted_axes(side: Side) -> Side:
    axes = [(size, stride) for size, stride in zip(side.shape, side.strides, strict=True) if size > 1]
    axes.sort(key=lambda axis: axis[1], reverse=True)
    packed: list[tuple[int, int]] = []
    for size, stride in axes:
        if packed and packed[-1][1] == size * stride:
            packed[-1] = (packed[-1][0] * size, stride)
        else:
            packed.append((size, stride))
    return Side(tuple(size for size, _ in packed), side.offset, tuple(stride for _, stride in packed))
