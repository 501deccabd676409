# SPDX-License-Identifier: Apache-2.0
"""The plan of a cooperative resume: each extent of a file is read once and its parts travel to their holders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from megads_ucp.plan.holders import Holders
from megads_ucp.plan.traffic import schedule
from megads_ucp.plan.types import Extent, Plan, StateSpec, Subject, Transfer


def reads_more_than_it_holds(subject: Subject) -> bool:
    """Whether holders, each reading on its own, would also read elements of others, as of a matrix cut along dim 1.

    A rank reads from the first to the last element of each of its boxes: smaller reads cost more than they save.
    """
    layout = subject.layout
    shards = (layout.runs(tp_rank, 0, prod(shape)) for tp_rank, shape in enumerate(layout.shard_shapes))
    return any(box.full_span[1] - box.full_span[0] > box.numel for boxes in shards for box in boxes)


def make_read_plan(subjects: Sequence[Subject], extent_bytes: int, bucket_bytes: int) -> Plan:
    """A plan that runs backwards: every element of every file is read once, by a rank that holds some of its extent.

    Args:
        subjects: the parameters to read, with their states and the files' dtypes; equal on all ranks.
        extent_bytes: size of one read; at most ``bucket_bytes``.
        bucket_bytes: most bytes that a rank sends, and that it receives, in one round.

    Raises:
        PlanError: no rank holds some element of a parameter.
    """
    extents: list[Extent] = []
    transfers: list[Transfer] = []
    load: dict[int, int] = defaultdict(int)
    for index, subject in enumerate(subjects):
        holders = Holders(subject)
        for state, start, stop in _pieces(subject, extent_bytes):
            parts = holders.parts(start, stop)
            # Any holder will do: it keeps its own part and sends the rest. So the least loaded one reads.
            reader = min((part.holding.rank for part in parts), key=lambda rank: (load[rank], rank))
            extent = Extent(index, state, start, stop, reader)
            load[reader] += extent.nbytes
            transfers.extend(Transfer(len(extents), part.holding, part.boxes, part.numel, 0) for part in parts)
            extents.append(extent)
    return Plan(tuple(subjects), tuple(extents), tuple(schedule(extents, transfers, bucket_bytes)), backwards=True)


def _pieces(subject: Subject, extent_bytes: int) -> Iterator[tuple[StateSpec, int, int]]:
    """The subject's files in ranges of their elements, of whole rows where a row fits."""
    row, numel = prod(subject.layout.shape[1:]), subject.layout.numel
    for state in subject.states:
        most = max(extent_bytes // state.written.itemsize, 1)
        step = most // row * row or most
        for start in range(0, numel, step):
            yield state, start, min(start + step, numel)
