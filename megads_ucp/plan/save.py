# SPDX-License-Identifier: Apache-2.0
"""One rank's part in an export: what it writes, from which holdings, and what it gives to the writers of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megads_ucp.layout.boxes import clip
from megads_ucp.plan.holders import Holders, Part
from megads_ucp.plan.shares import Dealing, shares
from megads_ucp.plan.types import Extent, Subject, Transfer


@dataclass(frozen=True)
class Piece:
    """An extent and holdings that it is made of: all of them for its writer, its own one for any other rank.

    Attributes:
        parts: in the order in which the writer lays them down.
        averaged: whether their copies are added up, to be divided by their number.
    """

    extent: Extent
    parts: tuple[Part, ...]
    averaged: bool

    @cached_property
    def in_place(self) -> bool:
        """Whether the holdings of the writer, one after the other, are the extent to the last bit."""
        state, writer = self.extent.state, self.extent.writer
        return not self.parts or (
            not self.averaged
            and state.live == state.written
            and all(part.holding.rank == writer for part in self.parts)
            and all(box.dense and box.scale == 1.0 for part in self.parts for box in part.boxes)
        )

    def transfers(self, tile_bytes: int) -> Iterator[Transfer]:
        """The parts cut into tiles of the extent, of at most so many bytes of the file, in order."""
        extent, step = self.extent, max(tile_bytes // self.extent.state.written.itemsize, 1)
        for start in range(extent.start, extent.stop, step):
            tile = replace(extent, start=start, stop=min(start + step, extent.stop))
            for holding, boxes, _, copy_index in self.parts:
                inside = tuple(part for box in boxes for part in clip(box, tile.start, tile.stop))
                if inside:
                    yield Transfer(tile, holding, inside, sum(box.numel for box in inside), copy_index)


@dataclass(frozen=True)
class SavePlan:
    """What one rank does in one export.

    Attributes:
        subjects: every parameter, equal on all ranks.
        pieces: what the rank writes, and what it gives to other writers, in an order that all ranks share.
        rank: this one.
    """

    subjects: tuple[Subject, ...]
    pieces: tuple[Piece, ...]
    rank: int

    @cached_property
    def writes(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.extent.writer == self.rank)

    @cached_property
    def sends(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.extent.writer != self.rank)

    @cached_property
    def bytes_written(self) -> int:
        """Payload bytes that the rank writes."""
        return sum(piece.extent.nbytes for piece in self.writes)

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes that it gives to other ranks."""
        return sum(part.numel * piece.extent.state.live.itemsize for piece in self.sends for part in piece.parts)


def make_plan(subjects: Sequence[Subject], rank: int, dealing: Dealing) -> SavePlan:
    """The part of ``rank``. Its cost depends on what the rank holds, not on the number of ranks.

    Args:
        subjects: equal on all ranks and in the same order.
        rank: of the plan.
        dealing: how files are dealt out, equal on all ranks.

    Raises:
        PlanError: no rank holds some element of a parameter that this rank holds a part of.
    """
    pieces = [
        piece for number in _concerning(subjects, rank) for piece in _pieces(subjects[number], number, rank, dealing)
    ]
    return SavePlan(tuple(subjects), tuple(pieces), rank)


def total_bytes(subjects: Iterable[Subject]) -> int:
    """Payload bytes of all files."""
    return sum(s.layout.numel * sum(state.written.itemsize for state in s.states) for s in subjects)


def _concerning(subjects: Sequence[Subject], rank: int) -> Iterator[int]:
    """The numbers of the subjects that the rank holds something of, and, for rank 0, of those without elements."""
    shards = {id(shard): shard for subject in subjects for shard in subject.shards}
    own = {key for key, shard in shards.items() if rank in shard.ranks}
    for number, subject in enumerate(subjects):
        held = any(id(shard) in own and shard.holding(subject.name, rank) for shard in subject.shards)
        if held or (rank == 0 and not subject.layout.numel):
            yield number


def _pieces(subject: Subject, number: int, rank: int, dealing: Dealing) -> Iterator[Piece]:
    """The extents of all states that the rank writes or has a part of."""
    holders, averaged = Holders(subject), subject.layout.averaged
    cut: dict[int, list[tuple[int, int, int, tuple[Part, ...]]]] = {}
    for state in subject.states:
        itemsize = state.written.itemsize
        if itemsize not in cut:
            cut[itemsize] = [
                (start, stop, writer, parts)
                for start, stop, writer in shares(holders, number, itemsize, dealing)
                if (parts := _parts_for(holders, start, stop, writer, rank)) or writer == rank
            ]
        for start, stop, writer, parts in cut[itemsize]:
            yield Piece(Extent(number, state, start, stop, writer), parts, averaged)


def _parts_for(holders: Holders, start: int, stop: int, writer: int, rank: int) -> tuple[Part, ...]:
    parts = holders.to_lay(start, stop, writer)
    return tuple(part for part in parts if rank in (writer, part.holding.rank))
