# SPDX-License-Identifier: Apache-2.0
"""Elements that several ranks hold a copy of: their checksums, and how the copies get to one rank.

Those of other tensor-parallel ranks, and of other stages of a pipeline that have the parameter too.

Nobody's cuts are anybody else's: where tensor parallelism is uneven, the same element lies in another fragment, on
another data-parallel rank, in each copy. So a checksum here is a *sum* over elements, each weighted by its place in the
full tensor: whoever holds a part of a copy adds its part, in any order, and no two copies need be cut alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from megads_ucp.layout.boxes import Box, Ints, clip
from megads_ucp.plan.traffic import chunks, schedule
from megads_ucp.plan.types import MESSAGE_ALIGNMENT, Extent, Holding, Plan, StateSpec, Subject, Transfer

BLOCK = 1 << 16
"""Elements of the full tensor that share a checksum. The weights of one block (512 KiB) stay in a core's cache."""


class Place(NamedTuple):
    """Whose copy: ``stage`` counts the pipeline stages that have the parameter; 0 is the one that exports it."""

    stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Lot:
    """The elements in [start, stop) of one state of ``subjects[subject]`` that the same places have copies of.

    ``places``, two or more, hold them all; the checksum of number ``i`` of them is number ``slot + i`` of all.
    """

    subject: int
    state: StateSpec
    start: int
    stop: int
    places: tuple[Place, ...]
    slot: int

    @property
    def tp_ranks(self) -> Ints:
        """Those that hold the elements on each of the stages."""
        return tuple(place.tp_rank for place in self.places if place.stage == 0)


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
        stages = range(1 + len(subject.elsewhere))
        for block, tp_ranks in _shared_blocks(subject):
            places = tuple(Place(stage, tp_rank) for stage in stages for tp_rank in tp_ranks)
            start, stop = block * BLOCK, min((block + 1) * BLOCK, subject.layout.numel)
            for state in subject.states:
                lots.append(Lot(index, state, start, stop, places, slot))
                slot += len(places)
    return tuple(lots)


def _shared_blocks(subject: Subject) -> list[tuple[int, Ints]]:
    """(block, TP ranks) wherever these, on one stage or on several, have copies of elements of that block. A strided
    box may reach over blocks in which it has nothing: their checksums are all zero."""
    layout = subject.layout
    found: set[tuple[int, Ints]] = set()
    for tp_rank, shape in enumerate(layout.shard_shapes):
        for box in layout.runs(tp_rank, 0, prod(shape)):
            if box.holders[0] == tp_rank and _has_copies(subject, box):
                found.update((block, box.holders) for block in _blocks(box))
    return sorted(found)


def _has_copies(subject: Subject, box: Box) -> bool:
    return len(box.holders) > 1 or bool(subject.elsewhere)


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
        for place, holding in _everywhere(subjects[index]):
            if holding.rank != rank:
                continue
            found: dict[tuple[int, Ints], list[Box]] = defaultdict(list)
            for box in _boxes(subjects[index], holding):
                for block in _blocks(box) if _has_copies(subjects[index], box) else ():
                    if inside := clip(box, block * BLOCK, (block + 1) * BLOCK):
                        found[block, box.holders] += inside
            for (block, holders), boxes in found.items():
                for lot in at[index, block, holders]:
                    slot = lot.slot + lot.places.index(place)
                    shares.append(Share(slot, holding, lot.state, lot.start, tuple(boxes)))
    return shares


def _everywhere(subject: Subject) -> Iterator[tuple[Place, Holding]]:
    """Every holding, on other stages too, with the place whose copy it is a part of."""
    for stage, holdings in enumerate((subject.holdings, *subject.elsewhere)):
        for holding in holdings:
            yield Place(stage, holding.tp_rank), holding


def _boxes(subject: Subject, holding: Holding) -> tuple[Box, ...]:
    return subject.layout.runs(holding.tp_rank, holding.fragment.param_start, holding.fragment.numel)


def inspection(subjects: Sequence[Subject], lots: Sequence[Lot], bucket_bytes: int) -> Plan:
    """A plan that brings all copies of each lot to one of the ranks that hold it, that of place ``i`` in turn ``i``.

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
    """(number of the place, a holding of it, its boxes in the lot) of all that have any, by that number."""
    for turn, place in enumerate(lot.places):
        for its_place, holding in _everywhere(subject):
            if its_place == place:
                boxes = [box for box in _boxes(subject, holding) if box.holders == lot.tp_ranks]
                if inside := [part for box in boxes for part in clip(box, lot.start, lot.stop)]:
                    yield turn, holding, inside


def holder_of(subject: Subject, place: Place, element: int) -> int:
    """The global rank that has the place's copy of one element of the full tensor."""
    for its_place, holding in _everywhere(subject):
        if its_place == place and any(clip(box, element, element + 1) for box in _boxes(subject, holding)):
            return holding.rank
    raise AssertionError(f"{place} has no copy of element {element} of {subject.name}")
