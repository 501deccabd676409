# SPDX-License-Identifier: Apache-2.0
"""Elements that several ranks hold a copy of: their checksums, and how the copies get to one rank.

Copies are held by other tensor-parallel ranks, and by other pipeline stages that have the parameter too.

No two copies need be cut alike: where tensor parallelism is uneven, the same element lies in another fragment of each
copy, on another data-parallel rank. So a checksum is a *sum* over elements, each weighted by its place in the full
tensor: every rank adds what its fragments contribute, in any order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from megads_ucp.layout.boxes import Box, clip
from megads_ucp.layout.strides import Ints
from megads_ucp.plan.types import Extent, Holding, StateSpec, Subject, Transfer

BLOCK = 1 << 16
"""Elements of the full tensor that share a checksum. The weights of one block (512 KiB) stay in a core's cache."""


class Replica(NamedTuple):
    """One copy: ``stage`` counts the pipeline stages that have the parameter; stage 0 exports it."""

    stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class ReplicaBlock:
    """Elements [start, stop) of one state of ``subjects[subject]`` that the same replicas, two or more, hold.

    The checksum of the first replica is number ``slot`` of all checksums; those of the other replicas follow it.
    """

    subject: int
    state: StateSpec
    start: int
    stop: int
    replicas: tuple[Replica, ...]
    slot: int

    @property
    def slots(self) -> slice:
        """The checksums of all its replicas."""
        return slice(self.slot, self.slot + len(self.replicas))

    @property
    def tp_ranks(self) -> Ints:
        """The tensor-parallel ranks that hold the elements, the same on each of the stages."""
        return tuple(replica.tp_rank for replica in self.replicas if replica.stage == 0)


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one fragment adds to a checksum: its boxes in the block of the full tensor that begins at ``start``."""

    slot: int
    holding: Holding
    state: StateSpec
    start: int
    boxes: tuple[Box, ...]


def replica_blocks(subjects: Sequence[Subject]) -> tuple[ReplicaBlock, ...]:
    """All elements with copies that should agree, in an order that all ranks share.

    Averaged parameters differ by design, and what no optimizer owns may: see :class:`Subject`.
    """
    blocks: list[ReplicaBlock] = []
    slot = 0
    for index, subject in enumerate(subjects):
        if not subject.owned or subject.layout.averaged:
            continue
        stages = range(1 + len(subject.tied_holdings))
        for number, tp_ranks in _replicated_blocks(subject):
            replicas = tuple(Replica(stage, tp_rank) for stage in stages for tp_rank in tp_ranks)
            start, stop = number * BLOCK, min((number + 1) * BLOCK, subject.layout.numel)
            for state in subject.states:
                blocks.append(ReplicaBlock(index, state, start, stop, replicas, slot))
                slot += len(replicas)
    return tuple(blocks)


def _replicated_blocks(subject: Subject) -> list[tuple[int, Ints]]:
    """(block number, TP ranks) of all blocks in which these TP ranks, on one stage or several, have copies.

    A strided box may span blocks in which it has no element: their checksums are all zero.
    """
    layout = subject.layout
    found: set[tuple[int, Ints]] = set()
    for tp_rank, shape in enumerate(layout.shard_shapes):
        for box in layout.runs(tp_rank, 0, prod(shape)):
            if box.holders[0] == tp_rank and _has_copies(subject, box):
                found.update((number, box.holders) for number in _block_numbers(box))
    return sorted(found)


def _has_copies(subject: Subject, box: Box) -> bool:
    return len(box.holders) > 1 or bool(subject.tied_holdings)


def _block_numbers(box: Box) -> range:
    first, end = box.full_span
    return range(first // BLOCK, (end - 1) // BLOCK + 1)


def contributions(subjects: Sequence[Subject], blocks: Sequence[ReplicaBlock], rank: int) -> list[Contribution]:
    """What ``rank`` adds to which checksum."""
    blocks_at: dict[tuple[int, int, Ints], list[ReplicaBlock]] = defaultdict(list)
    for block in blocks:
        blocks_at[block.subject, block.start // BLOCK, block.tp_ranks].append(block)
    found = []
    for index in dict.fromkeys(block.subject for block in blocks):
        for replica, holding in _all_holdings(subjects[index]):
            if holding.rank != rank:
                continue
            for (number, holders), boxes in _boxes_by_block(subjects[index], holding).items():
                for block in blocks_at[index, number, holders]:
                    slot = block.slot + block.replicas.index(replica)
                    found.append(Contribution(slot, holding, block.state, block.start, tuple(boxes)))
    return found


def _boxes_by_block(subject: Subject, holding: Holding) -> dict[tuple[int, Ints], list[Box]]:
    """The boxes of a holding that have copies, by block number and TP ranks that hold a copy."""
    found: dict[tuple[int, Ints], list[Box]] = defaultdict(list)
    for box in _boxes(subject, holding):
        for number in _block_numbers(box) if _has_copies(subject, box) else ():
            if inside := clip(box, number * BLOCK, (number + 1) * BLOCK):
                found[number, box.holders] += inside
    return found


def _all_holdings(subject: Subject) -> Iterator[tuple[Replica, Holding]]:
    """Every holding on every stage, with the replica that it is a part of."""
    for stage, holdings in enumerate((subject.holdings, *subject.tied_holdings)):
        for holding in holdings:
            yield Replica(stage, holding.tp_rank), holding


def _boxes(subject: Subject, holding: Holding) -> tuple[Box, ...]:
    return subject.layout.runs(holding.tp_rank, holding.fragment.param_start, holding.fragment.numel)


def inspection(
    subjects: Sequence[Subject], blocks: Sequence[ReplicaBlock], rank: int
) -> list[tuple[ReplicaBlock, Transfer]]:
    """What a rank sends and gets so that all replicas of each block come together on one of the ranks that hold it.

    A transfer's extent is the block, its copy number that of the replica. Nothing is to be written, so values stay in
    their live dtype.

    Args:
        subjects: equal on all ranks.
        blocks: the same ones on all ranks.
        rank: this one.

    Returns:
        In an order that all ranks share.
    """
    found = []
    for block in sorted(blocks, key=lambda block: (block.subject, block.slot)):
        parts = list(_parts(subjects[block.subject], block))
        state = replace(block.state, written=block.state.live)
        extent = Extent(block.subject, state, block.start, block.stop, writer=parts[0][1].rank)
        for copy_index, holding, boxes in parts:
            if rank in (extent.writer, holding.rank):
                numel = sum(box.numel for box in boxes)
                found.append((block, Transfer(extent, holding, tuple(boxes), numel, copy_index)))
    return found


def _parts(subject: Subject, block: ReplicaBlock) -> Iterator[tuple[int, Holding, list[Box]]]:
    """(index of the replica, a holding of it, its boxes in the block) of all that have any, by that index."""
    for index, wanted in enumerate(block.replicas):
        for replica, holding in _all_holdings(subject):
            if replica == wanted:
                boxes = [box for box in _boxes(subject, holding) if box.holders == block.tp_ranks]
                if inside := [part for box in boxes for part in clip(box, block.start, block.stop)]:
                    yield index, holding, inside


def holder_of(subject: Subject, replica: Replica, element: int) -> int:
    """The global rank that holds one element of the full tensor in a replica."""
    for candidate, holding in _all_holdings(subject):
        if candidate == replica and any(clip(box, element, element + 1) for box in _boxes(subject, holding)):
            return holding.rank
    raise AssertionError(f"{replica} has no copy of element {element} of {subject.name}")
