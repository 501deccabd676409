# SPDX-License-Identifier: Apache-2.0
"""Elements that several tensor-parallel ranks hold a copy of: their checksums, and how the copies get to one rank.

Nobody's cuts are anybody else's: where tensor parallelism is uneven, the same element lies in another fragment, on
another data-parallel rank, in each copy. So a checksum here is a *sum* over elements, each weighted by its place in the
full tensor: whoever holds a part of a copy adds its part, in any order, and no two copies need be cut alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from megads_ucp.layout.boxes import Ints
from megads_ucp.layout.core import Box, clip
from megads_ucp.plan.traffic import chunks, schedule
from megads_ucp.plan.types import MESSAGE_ALIGNMENT, Extent, Holding, Plan, StateSpec, Subject, Transfer

BLOCK = 1 << 16
"""Elements of the full tensor that share a checksum. The weights of one block (512 KiB) stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Lot:
    """The elements in [start, stop) of one state of ``subjects[subject]`` that the same TP ranks have copies of.

    ``tp_ranks``, two or more, hold them all; the checksum of number ``i`` of them is number ``slot + i`` of all.
    """

    subject: int
    state: StateSpec
    start: int
    stop: int
    tp_ranks: Ints
    slot: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one fragment adds to a checksum: boxes of it that lie in the block of the full tensor from ``start`` on."""

    slot: int
    holding: Holding
    state: StateSpec
    start: int
    boxes: tuple[Box, ...]


def lots_of(subjects: Sequence[Subject]) -> tuple[Lot, ...]:
    """Everything of which there are copies that ought to agree, in an order that all ranks share.

    Averaged parameters differ by design, and what no optimizer owns may: see :class:`Subject`.
    """
    lots: list[Lot] = []
    slot = 0
    for index, subject in enumerate(subjects):
        if not subject.owned or subject.layout.averaged:
            continue
        for block, tp_ranks in _shared_blocks(subject):
            start, stop = block * BLOCK, min((block + 1) * BLOCK, subject.layout.numel)
            for state in subject.states:
                lots.append(Lot(index, state, start, stop, tp_ranks, slot))
                slot += len(tp_ranks)
    return tuple(lots)


def _shared_blocks(subject: Subject) -> list[tuple[int, Ints]]:
    """(block, TP ranks) wherever these have elements of that block in common. A strided box may reach over blocks in
    which it has nothing: their checksums are all zero."""
    layout = subject.layout
    found: set[tuple[int, Ints]] = set()
    for tp_rank, shape in enumerate(layout.shard_shapes):
        for box in layout.runs(tp_rank, 0, prod(shape)):
            if box.holders[0] == tp_rank and len(box.holders) > 1:
                found.update((block, box.holders) for block in _blocks(box))
    return sorted(found)


def _blocks(box: Box) -> range:
    first, end = box.full_span
    return range(first // BLOCK, (end - 1) // BLOCK + 1)


def shares_of(subjects: Sequence[Subject], lots: Sequence[Lot], rank: int) -> list[Share]:
    """What ``rank`` adds to which checksum."""
    at: dict[tuple[int, int, Ints], list[Lot]] = defaultdict(list)
    for lot in lots:
        at[lot.subject, lot.start // BLOCK, lot.tp_ranks].append(lot)
    shares = []
    for index in dict.fromkeys(lot.subject for lot in lots):
        for holding in subjects[index].holdings:
            if holding.rank != rank:
                continue
            found: dict[tuple[int, Ints], list[Box]] = defaultdict(list)
            for box in _boxes(subjects[index], holding):
                for block in _blocks(box) if len(box.holders) > 1 else ():
                    if inside := clip(box, block * BLOCK, (block + 1) * BLOCK):
                        found[block, box.holders] += inside
            for (block, holders), boxes in found.items():
                for lot in at[index, block, holders]:
                    slot = lot.slot + holders.index(holding.tp_rank)
                    shares.append(Share(slot, holding, lot.state, lot.start, tuple(boxes)))
    return shares


def _boxes(subject: Subject, holding: Holding) -> tuple[Box, ...]:
    return subject.layout.runs(holding.tp_rank, holding.fragment.param_start, holding.fragment.numel)


def inspection(subjects: Sequence[Subject], lots: Sequence[Lot], bucket_bytes: int) -> Plan:
    """A plan that brings all copies of each lot to one of the ranks that hold it: that of number ``i`` of its TP ranks
    in turn ``i``.

    Its extents are the lots, in their order; nothing is to be written, so values stay in their live dtype.
    """
    extents, transfers = [], []
    for index, lot in enumerate(lots):
        parts = list(_parts(subjects[lot.subject], lot))
        state = replace(lot.state, written=lot.state.live)
        extents.append(Extent(lot.subject, state, lot.start, lot.stop, writer=parts[0][1].rank))
        limit = bucket_bytes // MESSAGE_ALIGNMENT * MESSAGE_ALIGNMENT // state.live.itemsize
        for turn, holding, boxes in parts:
            transfers += [Transfer(index, holding, *chunk, turn) for chunk in chunks(boxes, limit)]
    return Plan(tuple(subjects), tuple(extents), tuple(schedule(extents, transfers, bucket_bytes)))


def _parts(subject: Subject, lot: Lot) -> Iterator[tuple[int, Holding, list[Box]]]:
    """(number of the TP rank, a holding of it, its boxes in the lot) of all that have any, by that number."""
    for turn, tp_rank in enumerate(lot.tp_ranks):
        for holding in subject.holdings:
            if holding.tp_rank == tp_rank:
                boxes = [box for box in _boxes(subject, holding) if box.holders == lot.tp_ranks]
                if inside := [part for box in boxes for part in clip(box, lot.start, lot.stop)]:
                    yield turn, holding, inside


def holder_of(subject: Subject, tp_rank: int, element: int) -> int:
    """The global rank that has the TP rank's copy of one element of the full tensor."""
    for holding in subject.holdings:
        there = holding.tp_rank == tp_rank
        if there and any(clip(box, element, element + 1) for box in _boxes(subject, holding)):
            return holding.rank
    raise AssertionError(f"tensor-parallel rank {tp_rank} has no copy of element {element} of {subject.name}")
