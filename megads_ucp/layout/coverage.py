# SPDX-License-Identifier: Apache-2.0
"""Whether a Layout's pieces tile shards and full tensor: every element held, none held twice.

Pure, and never element by element: the cost depends on the number of pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

from deepspeed.checkpoint.affine import AffinePiece

from megads_ucp.errors import LayoutError
from megads_ucp.layout.strides import Ints, cut, index_of, pack_axes, reach


class Pieces(Protocol):
    """What is checked of a Layout."""

    @property
    def name(self) -> str: ...
    @property
    def rule(self) -> Any: ...
    @property
    def tp_degree(self) -> int: ...
    @property
    def shape(self) -> Ints: ...
    @property
    def shard_shapes(self) -> Sequence[Ints]: ...
    def pieces(self, tp_rank: int) -> list[AffinePiece]: ...


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


def check_coverage(layout: Pieces) -> None:
    """Check that shards and full tensor account for each other exactly.

    Every element of the full tensor must be held by exactly the TP ranks that its piece names, and every element of a
    shard must be in exactly one piece (or, after a vocabulary cut, be padding).

    Raises:
        LayoutError: some element is not; the message names the first one.
    """
    padded = layout.rule.vocabulary_size is not None
    for tp_rank, shape in enumerate(layout.shard_shapes):
        sides = [Side(piece.shape, piece.dest_offset, piece.dest_strides) for piece in layout.pieces(tp_rank)]
        if defect := first_defect(sides, prod(shape), holes_allowed=padded):
            raise _not_covered(layout, defect, shape, f"the shard of TP rank {tp_rank}")
    for sides, holders in _tilings(layout):
        if defect := first_defect(sides, prod(layout.shape)):
            raise _not_covered(layout, defect, layout.shape, f"the full tensor, as held by {holders}")


def _tilings(layout: Pieces) -> list[tuple[list[Side], str]]:
    """Sets of pieces that must each tile the full tensor.

    Where ranks share elements, one of them stands for all, and each rank that describes its copy differently must fill
    the same place.
    """
    by_holders = _full_sides(layout)
    first = {holders: by_rank.get(min(holders), set()) for holders, by_rank in by_holders.items()}
    tilings = [([side for sides in first.values() for side in sides], "all TP ranks")]
    for holders, by_rank in by_holders.items():
        for rank in holders:
            copy = by_rank.get(rank, set())
            if copy != first[holders]:
                others = [side for key, sides in first.items() if key != holders for side in sides]
                tilings.append(([*others, *copy], f"TP rank {rank} and those it shares nothing with"))
    return tilings


def _full_sides(layout: Pieces) -> dict[frozenset[int], dict[int, set[Side]]]:
    """The pieces' places in the full tensor, by the TP ranks that hold a copy and by the rank that describes it."""
    found: dict[frozenset[int], dict[int, set[Side]]] = {}
    for rank in range(layout.tp_degree):
        for piece in layout.pieces(rank):
            if rank not in piece.locations or max(piece.locations) >= layout.tp_degree:
                raise LayoutError(
                    f"{layout.name}: the layout from {layout.rule.source} gives TP rank {rank} of {layout.tp_degree} "
                    f"a piece (shape {piece.shape}, full offset {piece.source_offset}) that it says TP ranks "
                    f"{sorted(piece.locations)} hold. Correct that source, or use another one."
                )
            sides = found.setdefault(piece.locations, {}).setdefault(rank, set())
            side = Side(piece.shape, piece.source_offset, piece.source_strides)
            if side in sides:
                raise _not_covered(layout, Defect("overlap", side.offset), layout.shape, f"TP rank {rank}")
            sides.add(side)
    return found


def _not_covered(layout: Pieces, defect: Defect, shape: Ints, where: str) -> LayoutError:
    what = {"outside": "a piece reaches beyond it, to", "overlap": "two pieces hold", "hole": "no piece holds"}
    index = f" (index {index_of(defect.address, shape)})" if defect.kind != "outside" else ""
    return LayoutError(
        f"{layout.name}: the layout from {layout.rule.source} does not fit {where} (shape {shape}): "
        f"{what[defect.kind]} element {defect.address}{index}. Correct that source, or describe the parameter with "
        "another one."
    )


def first_defect(sides: Sequence[Side], length: int, *, holes_allowed: bool = False) -> Defect | None:
    """The first address in ``[0, length)`` that non-empty boxes do not hold exactly once; None if they tile it.

    With ``holes_allowed``, no box need hold it. Addresses are read as rows as long as the longest stride. Between two
    rows where some box begins or ends all rows are alike, so one of them is looked at, in the same way.
    """
    for side in sides:
        if side.offset < 0 or side.last >= length:
            return Defect("outside", side.offset if side.offset < 0 else side.last)
    return _sweep([_packed(side) for side in sides], length, holes_allowed)


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
    """``side`` as ``(first row, number of rows, the part in each of them)``, in rows of ``period`` addresses."""
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


def _packed(side: Side) -> Side:
    shape, strides = pack_axes(side.shape, side.strides)
    return Side(shape, side.offset, strides)
