# SPDX-License-Identifier: Apache-2.0
"""The terms of a plan. Data only.

A *file* is one state of one parameter, whole. It usually has one writer; a file larger than a rank's share of the whole
checkpoint is cut into *extents*, ranges of its elements, with a writer each. A *holding* is a fragment of the parameter
on some rank. A *transfer* is the part of a holding that lies in one extent; it travels in some *round*, and no rank
sends or receives more than a bounded number of bytes in a round.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megads_ucp.layout.boxes import Box
    from megads_ucp.layout.layout import Layout
    from megads_ucp.layout.partition import Fragment

MESSAGE_ALIGNMENT = 8
"""In a message, transfers start at multiples of this many bytes, so that any dtype can be viewed in it."""


UNOWNED = -1
"""Group index of frozen parameters and buffers, which no optimizer owns."""


@dataclass(frozen=True)
class StateSpec:
    """One state of a parameter: its name (``fp32``, ``exp_avg``), its dtype on the ranks and in the file."""

    name: str
    live: torch.dtype
    written: torch.dtype


@dataclass(frozen=True)
class Holding:
    """A fragment of a parameter on some rank, and its group in the optimizer there (``UNOWNED``: in none)."""

    rank: int
    tp_rank: int
    group: int
    fragment: Fragment


@dataclass(frozen=True)
class Subject:
    """A parameter to be exported.

    Attributes:
        layout: how it is cut.
        states: its states, each a file.
        holdings: all its fragments on the pipeline stage that exports it.
        owned: whether an optimizer owns it. Copies of what none owns (buffers) may differ; the first one is written, or
            their mean where the layout is an averaged one.
        rounds_alike: whether the gradients of its copies on tensor-parallel ranks are summed in the same order, so that
            intact copies are equal to the last bit.
        tied_holdings: for each further pipeline stage that keeps a copy (a tied parameter), all fragments there, cut
            over TP ranks like the first: compared, never written.
        padding: whether it is the rows that pad a vocabulary, which are in files of ours beside the parameter's own.
    """

    layout: Layout
    states: tuple[StateSpec, ...]
    holdings: tuple[Holding, ...]
    owned: bool = True
    rounds_alike: bool = True
    tied_holdings: tuple[tuple[Holding, ...], ...] = ()
    padding: bool = False

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.name} (its padding rows)" if self.padding else self.name

    def metadata(self) -> dict[str, Any]:
        """The keys beside "param" in its files; none, as from the stock converter, where no optimizer owns it."""
        return self.layout.metadata() if self.owned and not self.padding else {}


@dataclass(frozen=True)
class Extent:
    """Elements [start, stop) of the file of one state of ``Plan.subjects[subject]``.

    ``writer`` is the rank that writes them, or reads them in a plan that runs backwards.
    """

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
    """The boxes of one holding that lie in one extent.

    Attributes:
        extent: index in :attr:`Plan.extents`.
        numel: elements of all boxes.
        copy_index: 0 for the copy that is laid down; higher ones are added to it (or, in an inspection, compared with
            it). A writer takes the copies of an extent in ascending order.
        round: in which it travels.
    """

    extent: int
    holding: Holding
    boxes: tuple[Box, ...]
    numel: int
    copy_index: int
    round: int = 0


def message_bytes(numel: int, itemsize: int) -> int:
    """The room a transfer of ``numel`` elements takes in a message."""
    return -(-numel * itemsize // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """What every rank does in one export, inspection or resume.

    Attributes:
        transfers: in the order in which each writer takes them.
        backwards: whether it is the plan of a resume: extents are read by their writers and travel to the holdings.
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
        """What ``rank`` lays down, its own holdings included, in order."""
        return self._by_receiver.get(rank, [])

    def outgoing(self, rank: int) -> list[Transfer]:
        """What ``rank`` sends to other ranks, in order."""
        return self._by_sender.get(rank, [])
