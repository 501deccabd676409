# SPDX-License-Identifier: Apache-2.0
"""The words of a plan: who holds what, who writes what, what travels. Data only."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megads_ucp.layout.boxes import Box
from megads_ucp.layout.layout import Layout
from megads_ucp.layout.partition import Fragment

MESSAGE_ALIGNMENT = 8
"""Transfers start at multiples of so many bytes in a message, so that any dtype can be viewed in it."""


@dataclass(frozen=True)
class StateSpec:
    """One state of a parameter: its name, its dtype on the ranks and in the file."""

    name: str
    live: torch.dtype
    written: torch.dtype


@dataclass(frozen=True)
class Holding:
    """A fragment of a parameter in some rank's partition of one of its groups (-1: not owned by the optimizer)."""

    rank: int
    tp_rank: int
    group: int
    fragment: Fragment


@dataclass(frozen=True)
class Subject:
    """A parameter to be exported: how it is cut, its states, and everybody who holds a part of it."""

    layout: Layout
    states: tuple[StateSpec, ...]
    holdings: tuple[Holding, ...]
    owned: bool = True
    """Whether an optimizer owns it. Copies of what none owns (buffers) may differ; the first one is written, or
    their mean where the layout says so."""
    rounds_alike: bool = True
    """Whether its copies on tensor-parallel ranks come from sums that all have one rounding, so that they are equal to
    the last bit as long as nothing is wrong."""
    elsewhere: tuple[tuple[Holding, ...], ...] = ()
    """Who holds a copy of it on each further pipeline stage that keeps one (a tied parameter), cut over TP ranks like
    the first: compared, never written."""

    @property
    def name(self) -> str:
        return self.layout.name

    def metadata(self) -> dict[str, Any]:
        """The keys beside "param" in its files; the stock converter gives none to what no optimizer owns."""
        return self.layout.metadata() if self.owned else {}


@dataclass(frozen=True)
class Extent:
    """Elements [start, stop) of the file of one state of ``subjects[subject]``, and the rank that writes them (that
    reads them, in a plan that runs backwards)."""

    subject: int
    state: StateSpec
    start: int
    stop: int
    writer: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * self.state.written.itemsize


@dataclass(frozen=True, slots=True)
class Transfer:
    """The boxes of one holding that lie in one extent, ``numel`` elements in all.

    ``turn`` 0 lays elements down; every later turn brings another copy of them, to be added (or, in an inspection,
    compared). A writer takes the turns of an extent in order.
    """

    extent: int
    holding: Holding
    boxes: tuple[Box, ...]
    numel: int
    turn: int
    round: int = 0


def message_bytes(numel: int, itemsize: int) -> int:
    """The room a transfer of ``numel`` elements takes in a message."""
    return -(-numel * itemsize // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """What every rank does in one export. ``transfers`` are in the order in which each writer takes them.

    A plan that runs ``backwards`` is one of a resume: extents are read by their writers, and travel to the holdings.
    """

    subjects: tuple[Subject, ...]
    extents: tuple[Extent, ...]
    transfers: tuple[Transfer, ...]
    backwards: bool = False

    def writer(self, transfer: Transfer) -> int:
        return self.extents[transfer.extent].writer

    def sender(self, transfer: Transfer) -> int:
        return self.writer(transfer) if self.backwards else transfer.holding.rank

    def receiver(self, transfer: Transfer) -> int:
        return transfer.holding.rank if self.backwards else self.writer(transfer)

    def size(self, transfer: Transfer) -> int:
        """Bytes the transfer takes in a message."""
        return message_bytes(transfer.numel, self.extents[transfer.extent].state.live.itemsize)

    @cached_property
    def rounds(self) -> int:
        return max((transfer.round for transfer in self.transfers), default=-1) + 1

    @cached_property
    def bytes_by_writer(self) -> dict[int, int]:
        """Payload bytes each rank writes; ranks that write none are absent."""
        written: dict[int, int] = defaultdict(int)
        for extent in self.extents:
            written[extent.writer] += extent.nbytes
        return dict(written)

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes that leave one rank for another."""
        return sum(self.size(t) for t in self.transfers if t.holding.rank != self.writer(t))

    def imbalance(self, world: int) -> float:
        """Bytes of the busiest writer over the mean of all ``world`` ranks; 1.0 is perfect."""
        total = sum(self.bytes_by_writer.values())
        return max(self.bytes_by_writer.values()) * world / total if total else 1.0

    @cached_property
    def _by_receiver(self) -> dict[int, list[Transfer]]:
        transfers: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in self.transfers:
            transfers[self.receiver(transfer)].append(transfer)
        return dict(transfers)

    @cached_property
    def _by_sender(self) -> dict[int, list[Transfer]]:
        transfers: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in self.transfers:
            if self.sender(transfer) != self.receiver(transfer):
                transfers[self.sender(transfer)].append(transfer)
        return dict(transfers)

    def incoming(self, rank: int) -> list[Transfer]:
        """What ``rank`` lays down, what it has itself included, in order."""
        return self._by_receiver.get(rank, [])

    def outgoing(self, rank: int) -> list[Transfer]:
        """What ``rank`` sends to other ranks, in order."""
        return self._by_sender.get(rank, [])
