# SPDX-License-Identifier: Apache-2.0
"""Which rank writes which extent of which file, and what travels to it. Pure: integers, no files, no communication.

A *file* is one state of one parameter, whole. It usually has one writer; a file larger than a rank's share of the whole
checkpoint is cut into *extents*, ranges of its elements, with a writer each. A *holding* is a fragment of the parameter
on some rank. A *transfer* is the part of a holding that lies in one extent; it travels in some *round*, and no rank
sends or receives more than a bounded number of bytes in a round.

Every rank computes the same plan from the same descriptions, so nothing of it is ever sent.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from megads_ucp.errors import PlanError
from megads_ucp.layout.core import Box, Layout, clip
from megads_ucp.partition import Fragment

SHARE_LIMIT = 1.1
"""A rank is given files until it holds this multiple of the mean share, then it is full."""

SMALL_FILE = 0.05
"""A file below this part of the mean share is not worth cutting: it may take a rank past SHARE_LIMIT. Their sum bounds
max/mean by 1.15, short of the 1.2 that is promised."""

CUT_ALIGNMENT = 4096
"""Files are cut at multiples of so many bytes (a page), unless shares are so small that it would unbalance them."""

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
    """Whether an optimizer owns it. Copies of what none owns (buffers) may differ; the first one is written."""

    @property
    def name(self) -> str:
        return self.layout.name

    def metadata(self) -> dict[str, Any]:
        """The keys beside "param" in its files; the stock converter gives none to what no optimizer owns."""
        return self.layout.metadata() if self.owned else {}


@dataclass(frozen=True)
class Extent:
    """Elements [start, stop) of the file of one state of ``subjects[subject]``, and the rank that writes them."""

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


@dataclass(frozen=True)
class Transfer:
    """The boxes of one holding that lie in one extent.

    ``turn`` 0 lays elements down; every later turn brings another tensor-parallel rank's copy of them, to be compared
    or added. A writer takes the turns of an extent in order.
    """

    extent: int
    holding: Holding
    boxes: tuple[Box, ...]
    turn: int
    round: int = 0

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)


def message_bytes(numel: int, itemsize: int) -> int:
    """The room a transfer of ``numel`` elements takes in a message."""
    return -(-numel * itemsize // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """What every rank does in one export. ``transfers`` are in the order in which each writer takes them."""

    subjects: tuple[Subject, ...]
    extents: tuple[Extent, ...]
    transfers: tuple[Transfer, ...]

    def writer(self, transfer: Transfer) -> int:
        return self.extents[transfer.extent].writer

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

    def incoming(self, rank: int) -> list[Transfer]:
        """What ``rank`` lays down, its own holdings included, in order."""
        return [transfer for transfer in self.transfers if self.writer(transfer) == rank]

    def outgoing(self, rank: int) -> list[Transfer]:
        """What ``rank`` sends to other ranks, in order."""
        return [t for t in self.transfers if t.holding.rank == rank and self.writer(t) != rank]


def make_plan(subjects: Sequence[Subject], world: int, bucket_bytes: int) -> Plan:
    """Assign writers and schedule the traffic.

    Args:
        subjects: every parameter, equal on all ranks and in the same order.
        world: number of ranks; all of them may write.
        bucket_bytes: the most a rank sends, and the most it receives, in one round.

    Raises:
        PlanError: some element of a parameter is held by nobody.
    """
    held = [_boxes_of_holdings(subject) for subject in subjects]
    extents = _assign_writers(subjects, held, world)
    transfers = chain.from_iterable(
        _transfers(index, extent, subjects, held, bucket_bytes) for index, extent in enumerate(extents)
    )
    return Plan(tuple(subjects), tuple(extents), tuple(_schedule(extents, transfers, bucket_bytes)))


_Held = list[tuple[Holding, tuple[Box, ...]]]


def _boxes_of_holdings(subject: Subject) -> _Held:
    """Every holding with its boxes; checks that the holdings make whole shards."""
    layout = subject.layout
    elements: dict[int, int] = defaultdict(int)
    held: _Held = []
    for holding in subject.holdings:
        fragment = holding.fragment
        elements[holding.tp_rank] += fragment.numel
        held.append((holding, layout.runs(holding.tp_rank, fragment.param_start, fragment.numel)))
    for tp_rank, shape in enumerate(layout.shard_shapes):
        expected = 1
        for size in shape:
            expected *= size
        if elements[tp_rank] != expected:
            raise PlanError(
                f"parameter {subject.name}: the ranks hold {elements[tp_rank]} elements of tensor-parallel rank "
                f"{tp_rank}'s shard {shape}, which has {expected}. The optimizer's groups are not what was recorded "
                "when it partitioned; do not change them after deepspeed.initialize."
            )
    return held


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


def _assign_writers(subjects: Sequence[Subject], held: Sequence[_Held], world: int) -> list[Extent]:
    """Give every piece of every file to the rank that holds most of it and still has room, largest pieces first."""
    files = [
        _Piece(index, state, 0, subject.layout.numel)
        for index, subject in enumerate(subjects)
        for state in subject.states
    ]
    mean = sum(file.nbytes for file in files) / world
    alignment = CUT_ALIGNMENT if mean >= 64 * CUT_ALIGNMENT else 1
    pieces = [piece for file in files for piece in _cut_to_share(file, mean, alignment)]
    pieces.sort(key=lambda piece: -piece.nbytes)

    load = [0] * world
    lightest = [(0, rank) for rank in range(world)]
    extents: list[Extent] = []

    def give(piece: _Piece, rank: int) -> None:
        load[rank] += piece.nbytes
        heapq.heappush(lightest, (load[rank], rank))
        extents.append(Extent(piece.subject, piece.state, piece.start, piece.stop, rank))

    limit = SHARE_LIMIT * mean
    for piece in pieces:  # grows while it is walked: what is cut off a piece comes last
        overlap = _overlap(piece, subjects[piece.subject], held[piece.subject])
        fitting = [rank for rank in overlap if load[rank] + piece.nbytes <= limit]
        if fitting:
            give(piece, min(fitting, key=lambda rank: (-overlap[rank], load[rank], rank)))
            continue
        while lightest[0][0] != load[lightest[0][1]]:
            heapq.heappop(lightest)
        rank = lightest[0][1]
        grain = max(alignment // piece.state.written.itemsize, 1)
        room = int((limit - load[rank]) // (grain * piece.state.written.itemsize)) * grain
        if room <= 0 or room >= piece.stop - piece.start or piece.nbytes <= SMALL_FILE * mean:
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
    grain = max(alignment // file.state.written.itemsize, 1)
    count = -(-file.nbytes // max(int(share), 1))
    step = max(-(-file.stop // count) // grain * grain, grain)
    for start in range(0, file.stop, step):
        yield replace(file, start=start, stop=min(start + step, file.stop))


def _overlap(piece: _Piece, subject: Subject, held: _Held) -> dict[int, int]:
    """Elements of the piece that each rank holds."""
    overlap: dict[int, int] = defaultdict(int)
    whole = piece.start == 0 and piece.stop == subject.layout.numel
    for holding, boxes in held:
        parts = boxes if whole else _clip_all(boxes, piece.start, piece.stop)
        if numel := sum(box.numel for box in parts):
            overlap[holding.rank] += numel
    return overlap


def _clip_all(boxes: Iterable[Box], start: int, stop: int) -> tuple[Box, ...]:
    return tuple(part for box in boxes for part in clip(box, start, stop))


def _transfers(
    index: int, extent: Extent, subjects: Sequence[Subject], held: Sequence[_Held], bucket_bytes: int
) -> Iterator[Transfer]:
    """All transfers of one extent, none larger than a bucket, in the order of their turns."""
    subject = subjects[extent.subject]
    whole = extent.start == 0 and extent.stop == subject.layout.numel
    limit = max((bucket_bytes - MESSAGE_ALIGNMENT) // extent.state.live.itemsize, 1)
    parts: list[Transfer] = []
    for holding, boxes in held[extent.subject]:
        mine = boxes if whole else _clip_all(boxes, extent.start, extent.stop)
        by_turn: dict[int, list[Box]] = defaultdict(list)
        for box in mine:
            by_turn[_turn(box, holding, extent, subject)].append(box)
        for turn, copies in by_turn.items():
            if turn == 0 or subject.owned:
                parts.extend(Transfer(index, holding, chunk, turn) for chunk in _chunks(copies, limit))
    yield from sorted(parts, key=lambda transfer: transfer.turn)


def _turn(box: Box, holding: Holding, extent: Extent, subject: Subject) -> int:
    """Which copy this is of elements that several tensor-parallel ranks hold.

    The writer's own copy is laid down first, where it has one: what is on the spot need not travel. Copies that are
    averaged are added in rank order, as the stock converter does (ds_to_universal.merge_tp_slices): floating-point
    addition does not commute to the last bit.
    """
    copies = len(box.holders)
    if copies <= 1:
        return 0
    first = 0
    if not subject.layout.averaged and subject.owned:
        near = next((h.tp_rank for h in subject.holdings if h.rank == extent.writer), box.holders[0])
        first = box.holders.index(near) if near in box.holders else 0
    return (box.holders.index(holding.tp_rank) - first) % copies


def _chunks(boxes: Iterable[Box], limit: int) -> Iterator[tuple[Box, ...]]:
    """The boxes in order, in bundles of at most ``limit`` elements; boxes are cut where they must be."""
    bundle: list[Box] = []
    room = limit
    for box in boxes:
        for part in cut_box(box, limit):
            if part.numel > room:
                yield tuple(bundle)
                bundle, room = [], limit
            bundle.append(part)
            room -= part.numel
    if bundle:
        yield tuple(bundle)


def cut_box(box: Box, limit: int, *, spans: bool = False) -> Iterator[Box]:
    """The box in parts of at most ``limit`` elements, in order; with ``spans``, elements of the full tensor that a part
    reaches over count, not only those it takes."""
    size = box.full_span[1] - box.full_span[0] if spans else box.numel
    if size <= limit or not box.shape:
        yield box
        return
    row = replace(box, shape=box.shape[1:], full_strides=box.full_strides[1:], shard_strides=box.shard_strides[1:])
    row_size = max(box.full_strides[0] if spans else row.numel, 1)
    step = max(limit // row_size, 1)
    for start in range(0, box.shape[0], step):
        full = box.full_offset + start * box.full_strides[0]
        shard = box.shard_offset + start * box.shard_strides[0]
        if step > 1 or row_size <= limit:
            count = min(step, box.shape[0] - start)
            yield replace(box, shape=(count, *box.shape[1:]), full_offset=full, shard_offset=shard)
        else:  # one row is more than fits: cut along the next axis
            yield from cut_box(replace(row, full_offset=full, shard_offset=shard), limit, spans=spans)


def _schedule(extents: Sequence[Extent], transfers: Iterable[Transfer], bucket_bytes: int) -> list[Transfer]:
    """Put every transfer into the first round in which its sender and its writer still have room for it.

    A writer takes its transfers in order. Extents with several turns come last, so that the others can be written while
    these still travel. Writers are served in turn, one transfer each, so that none hogs the early rounds.
    """
    streams: dict[int, list[Transfer]] = defaultdict(list)
    late: dict[int, list[Transfer]] = defaultdict(list)
    by_extent: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_extent[transfer.extent].append(transfer)
    for index, parts in by_extent.items():
        (late if parts[-1].turn else streams)[extents[index].writer].extend(parts)
    for writer, parts in late.items():
        streams[writer].extend(parts)

    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    reached: dict[int, int] = defaultdict(int)
    scheduled: list[Transfer] = []
    for position in range(max(map(len, streams.values()), default=0)):
        for writer in sorted(streams):
            if position >= len(streams[writer]):
                continue
            transfer = streams[writer][position]
            sender, turn = transfer.holding.rank, reached[writer]
            if sender != writer:
                size = message_bytes(transfer.numel, extents[transfer.extent].state.live.itemsize)
                while sent[sender, turn] + size > bucket_bytes or received[writer, turn] + size > bucket_bytes:
                    turn += 1
                    if not sent[sender, turn] and not received[writer, turn]:
                        break
                sent[sender, turn] += size
                received[writer, turn] += size
            reached[writer] = turn
            scheduled.append(replace(transfer, round=turn))
    return scheduled
