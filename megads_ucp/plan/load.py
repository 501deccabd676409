# SPDX-License-Identifier: Apache-2.0
"""The plan of a cooperative resume: each extent of a file is read once and its parts travel to their holders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megads_ucp.plan.holders import Holders
from megads_ucp.plan.types import Extent, StateSpec, Subject, Transfer


@dataclass(frozen=True)
class ReadPlan:
    """What one rank does in a cooperative resume.

    Attributes:
        subjects: the parameters that are read cooperatively, equal on all ranks.
        transfers: what the rank reads for itself, and what it gives to other ranks and gets from them, in an order that
            all ranks share.
    """

    subjects: tuple[Subject, ...]
    transfers: tuple[Transfer, ...]


def reads_more_than_it_holds(subject: Subject) -> bool:
    """Whether holders, each reading on its own, would also read elements of others, as of a matrix cut along dim 1.

    A rank reads from the first to the last element of each of its boxes: smaller reads cost more than they save.
    """
    layout = subject.layout
    shards = (layout.runs(tp_rank, 0, prod(shape)) for tp_rank, shape in enumerate(layout.shard_shapes))
    return any(box.full_span[1] - box.full_span[0] > box.numel for boxes in shards for box in boxes)


def make_read_plan(subjects: Sequence[Subject], rank: int, extent_bytes: int) -> ReadPlan:
    """The part of ``rank``: every element of every file is read once, by a rank that holds some of its extent.

    Args:
        subjects: the parameters to read, with their states and the files' dtypes; equal on all ranks.
        rank: of the plan.
        extent_bytes: size of one read.

    Raises:
        PlanError: no rank holds some element of a parameter that this rank holds a part of.
    """
    transfers: list[Transfer] = []
    for number, subject in enumerate(subjects):
        if subject.holding(rank) is None:
            continue
        holders = Holders(subject)
        for turn, (state, start, stop) in enumerate(_ranges(subject, extent_bytes)):
            parts = holders.within(start, stop)
            # Any holder will do: it keeps its own part and sends the rest. So they take turns.
            extent = Extent(number, state, start, stop, parts[(number + turn) % len(parts)].holding.rank)
            transfers.extend(
                Transfer(extent, holding, boxes, numel, backwards=True)
                for holding, boxes, numel, _ in parts
                if rank in (extent.writer, holding.rank)
            )
    return ReadPlan(tuple(subjects), tuple(transfers))


def _ranges(subject: Subject, extent_bytes: int) -> Iterator[tuple[StateSpec, int, int]]:
    """The subject's files in ranges of their elements, of whole rows where a row fits."""
    row, numel = prod(subject.layout.shape[1:]), subject.layout.numel
    for state in subject.states:
        most = max(extent_bytes // state.written.itemsize, 1)
        step = most // row * row or most
        for start in range(0, numel, step):
            yield state, start, min(start + step, numel)
