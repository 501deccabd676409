# SPDX-License-Identifier: Apache-2.0
"""What writers on one host need of each other, in shared memory instead of messages.

A rank's memory begins with a table: for each rank that needs something of it, where that begins. There the pieces
follow each other in the order of the plan, so both ranks know where each of them is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from megads_ucp.comm.shared_memory import SharedMemory
from megads_ucp.plan.holders import Part
from megads_ucp.plan.save import Piece, SavePlan
from megads_ucp.plan.types import Transfer
from megads_ucp.save.replicas import Values

_ALIGNMENT = 64
"""Of every piece, in bytes: a cache line, and enough for any dtype."""


class _Slot(NamedTuple):
    """Where a part is: its bytes from ``offset`` on are the shard's elements from ``start`` to ``stop``."""

    piece: Piece
    part: Part
    offset: int
    start: int
    stop: int


class SharedRows:
    """One rank's view of it, for one plan.

    Args:
        plan: of this rank.
        memory: of the ranks of this host.

    Attributes:
        peers: the other ranks of this host.
        nbytes: that this rank shares.
    """

    def __init__(self, plan: SavePlan, memory: SharedMemory) -> None:
        self._memory = memory
        self.peers = memory.peers
        given: dict[int, list[tuple[Piece, Part]]] = defaultdict(list)
        taken: dict[int, list[tuple[Piece, Part]]] = defaultdict(list)
        for piece in plan.pieces:
            for part in piece.parts:
                if piece.extent.writer != plan.rank and piece.extent.writer in memory.peers:
                    given[piece.extent.writer].append((piece, part))
                elif part.holding.rank in memory.peers and piece.extent.writer == plan.rank:
                    taken[part.holding.rank].append((piece, part))
        self._given: list[_Slot] = []
        self._table, end = [len(given)], _aligned(8 * (1 + 2 * len(given)))
        for peer in sorted(given):
            self._table += [peer, end]
            self._given += _slots(given[peer], end)
            end = _end(self._given[-1])
        self.nbytes = end if given else 0
        self._taken: dict[tuple[int, int, str], list[_Slot]] = defaultdict(list)
        for peer, parts in taken.items():
            for slot in _slots(parts, 0):
                self._taken[peer, slot.piece.extent.subject, slot.piece.extent.state.name].append(slot)
        self._origins: dict[int, int] = {}

    def reserve(self) -> bool:
        """Make this rank's memory large enough; False if there is not so much."""
        return self._memory.reserve(self.nbytes)

    def publish(self, values: Values) -> None:
        """Copy what the peers need into this rank's memory, which holds at least ``nbytes``."""
        self._origins.clear()
        if not self.nbytes:
            return
        memory = self._memory.own()
        table = torch.tensor(self._table, dtype=torch.int64).view(torch.uint8)
        memory[: len(table)].copy_(table)
        for piece, part, offset, start, stop in self._given:
            state, first = piece.extent.state, part.holding.fragment.param_start
            slot = memory[offset : offset + (stop - start) * state.live.itemsize].view(state.live)
            slot.copy_(values(part.holding, state)[start - first : stop - first])

    def find(self, transfer: Transfer) -> tuple[torch.Tensor, int]:
        """What a peer has published for a transfer: shard elements, and the number of the first one."""
        peer, extent = transfer.holding.rank, transfer.extent
        slot = next(
            slot
            for slot in self._taken[peer, extent.subject, extent.state.name]
            if slot.piece.extent.start <= extent.start < slot.piece.extent.stop
            and slot.part.copy_index == transfer.copy_index
        )
        memory, nbytes = self._memory.of(peer), (slot.stop - slot.start) * extent.state.live.itemsize
        begin = self._origin(peer, memory) + slot.offset
        return memory[begin : begin + nbytes].view(extent.state.live), slot.start

    def _origin(self, peer: int, memory: torch.Tensor) -> int:
        """Where in a peer's memory that begins which it has for this rank."""
        if peer not in self._origins:
            count = int(memory[:8].view(torch.int64))
            table = memory[8 : 8 + 16 * count].view(torch.int64).tolist()
            self._origins[peer] = dict(zip(table[::2], table[1::2], strict=True))[self._memory.rank]
        return self._origins[peer]


def _slots(parts: list[tuple[Piece, Part]], offset: int) -> Iterator[_Slot]:
    for piece, part in parts:
        spans = [box.shard_span for box in part.boxes]
        slot = _Slot(piece, part, offset, min(start for start, _ in spans), max(stop for _, stop in spans))
        yield slot
        offset = _end(slot)


def _end(slot: _Slot) -> int:
    return _aligned(slot.offset + (slot.stop - slot.start) * slot.piece.extent.state.live.itemsize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
