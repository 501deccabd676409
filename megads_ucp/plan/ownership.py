# SPDX-License-Identifier: Apache-2.0
"""Which rank writes which extent: balanced in bytes, and where possible a rank that already holds the bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megads_ucp.plan.holders import Holders
from megads_ucp.plan.types import Extent, StateSpec

SHARE_LIMIT = 1.1
"""A rank is given files until it holds this multiple of the mean share, then it is full."""

SMALL_FILE = 0.05
"""A file below this part of the mean share is not cut: it may take a rank past SHARE_LIMIT. The lightest rank gets it,
and that one is never above the mean, so max/mean stays far below the promised 1.2."""

CUT_ALIGNMENT = 4096
"""Files are cut at multiples of this many bytes (a page), unless shares are so small that it would unbalance them."""


@dataclass(frozen=True)
class _Piece:
    """A range of a file on its way to a writer."""

    subject: int
    state: StateSpec
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.state.written.itemsize


class _Loads:
    """Bytes given to each rank so far."""

    def __init__(self, world: int) -> None:
        self._bytes = [0] * world
        self._heap = [(0, rank) for rank in range(world)]

    def __getitem__(self, rank: int) -> int:
        return self._bytes[rank]

    def add(self, rank: int, nbytes: int) -> None:
        self._bytes[rank] += nbytes
        heapq.heappush(self._heap, (self._bytes[rank], rank))

    def lightest(self) -> int:
        while self._heap[0][0] != self._bytes[self._heap[0][1]]:  # outdated: the rank has been given more since
            heapq.heappop(self._heap)
        return self._heap[0][1]


def assign_writers(holders: Sequence[Holders], world: int) -> list[Extent]:
    """Give every piece of every file to the rank that holds most of it and still has room, largest pieces first.

    Where no holder has room, the lightest rank takes the piece, or as much of it as it has room for.
    """
    files = [
        _Piece(index, state, 0, held.subject.layout.numel)
        for index, held in enumerate(holders)
        for state in held.subject.states
    ]
    mean = sum(file.nbytes for file in files) / world
    limit = SHARE_LIMIT * mean
    alignment = CUT_ALIGNMENT if mean >= 64 * CUT_ALIGNMENT else 1
    pieces = [piece for file in files for piece in _cut_to_share(file, mean, alignment)]
    pieces.sort(key=lambda piece: -piece.nbytes)

    load = _Loads(world)
    extents: list[Extent] = []

    def give(piece: _Piece, rank: int) -> None:
        load.add(rank, piece.nbytes)
        extents.append(Extent(piece.subject, piece.state, piece.start, piece.stop, rank))

    for piece in pieces:  # grows during the loop: the rest of a piece that is cut comes last
        overlap = holders[piece.subject].overlap(piece.start, piece.stop)
        fitting = [rank for rank in overlap if load[rank] + piece.nbytes <= limit]
        if fitting:
            give(piece, min(fitting, key=lambda rank: (-overlap[rank], load[rank], rank)))
            continue
        rank = load.lightest()
        grain = _grain(piece, alignment)
        room = max(int((limit - load[rank]) // (grain * piece.state.written.itemsize)), 1) * grain
        if room >= piece.stop - piece.start or piece.nbytes <= SMALL_FILE * mean:
            give(piece, rank)
        else:
            give(replace(piece, stop=piece.start + room), rank)
            pieces.append(replace(piece, start=piece.start + room))
    return sorted(extents, key=lambda extent: (extent.subject, extent.state.name, extent.start))


def _cut_to_share(file: _Piece, share: float, alignment: int) -> Iterator[_Piece]:
    """The file as it is, or cut into equal pieces no larger than a rank's share."""
    if file.nbytes <= share or file.stop == 0:
        yield file
        return
    grain = _grain(file, alignment)
    count = -(-file.nbytes // max(int(share), 1))
    step = max(-(-file.stop // count) // grain * grain, grain)
    for start in range(0, file.stop, step):
        yield _Piece(file.subject, file.state, start, min(start + step, file.stop))


def _grain(piece: _Piece, alignment: int) -> int:
    """Elements that cuts of the piece are multiples of."""
    return max(alignment // piece.state.written.itemsize, 1)
