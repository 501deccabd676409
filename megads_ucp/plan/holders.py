# SPDX-License-Identifier: Apache-2.0
"""A parameter's holdings, looked up by ranges of the full tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from megads_ucp.errors import PlanError
from megads_ucp.layout.boxes import Box, clip
from megads_ucp.plan.types import Holding, Subject


class Part(NamedTuple):
    """Boxes of a holding, how many elements they have, and which copy of these they are, see :class:`Transfer`."""

    holding: Holding
    boxes: tuple[Box, ...]
    numel: int
    copy_index: int = 0


class Holders:
    """A subject's holdings by their place in the full tensor.

    Attributes:
        parts: all of them that have elements of the full tensor.

    Raises:
        PlanError: the holdings do not make whole shards.
    """

    def __init__(self, subject: Subject) -> None:
        _check_shards(subject)
        self.subject = subject
        self.parts = tuple(
            _part(holding, boxes)
            for holding in subject.holdings
            if (boxes := subject.layout.runs(holding.tp_rank, holding.fragment.param_start, holding.fragment.numel))
        )

    @cached_property
    def _by_offset(self) -> tuple[list[tuple[int, Box]], list[int], list[int]]:
        """(index in ``parts``, box) by ascending full offset; these offsets; the reach of all boxes up to each."""
        boxes = [(index, box) for index, part in enumerate(self.parts) for box in part.boxes]
        boxes.sort(key=lambda entry: entry[1].full_offset)
        reaches = accumulate((box.full_span[1] for _, box in boxes), max)
        return boxes, [box.full_offset for _, box in boxes], list(reaches)

    def within(self, start: int, stop: int) -> list[Part]:
        """The parts of elements [start, stop) of the full tensor, in the order of the holdings."""
        boxes, offsets, reaches = self._by_offset
        found: dict[int, list[Box]] = defaultdict(list)
        for index, box in boxes[bisect_right(reaches, start) : bisect_left(offsets, stop)]:
            if inside := clip(box, start, stop):
                found[index].extend(inside)
        return [_part(self.parts[index].holding, tuple(found[index])) for index in sorted(found)]

    def to_lay(self, start: int, stop: int, rank: int) -> list[Part]:
        """What ``rank`` has to lay down to get elements [start, stop), in this order.

        One copy of each element, the rank's own if it has one; of averaged parameters all, in the order of
        tensor-parallel ranks, as in the stock converter (ds_to_universal.merge_tp_slices): floating-point addition is
        not associative to the last bit. Of what no optimizer owns the first copy, since copies may differ.
        """
        averaged = self.subject.layout.averaged
        parts = self.within(start, stop)
        own = next((part.holding.tp_rank for part in parts if part.holding.rank == rank), None)
        preferred = None if averaged or not self.subject.owned else own
        found: list[Part] = []
        for holding, boxes, _, _ in parts:
            copies = [_copy_index(box, holding.tp_rank, preferred) for box in boxes]
            for copy_index in sorted(set(copies)) if averaged else [0]:
                chosen = [box for box, copy in zip(boxes, copies, strict=True) if copy == copy_index]
                if chosen:
                    found.append(_part(holding, tuple(chosen), copy_index))
        return sorted(found, key=lambda part: (part.copy_index, part.holding.rank))


def _part(holding: Holding, boxes: tuple[Box, ...], copy_index: int = 0) -> Part:
    return Part(holding, boxes, sum(box.numel for box in boxes), copy_index)


def _copy_index(box: Box, tp_rank: int, preferred: int | None) -> int:
    """Which of the copies that tensor-parallel ranks hold of a box is that of ``tp_rank``, counted from ``preferred``'s
    if that has one."""
    copies = len(box.holders)
    if copies <= 1:
        return 0
    first = box.holders.index(preferred) if preferred in box.holders else 0
    return (box.holders.index(tp_rank) - first) % copies


def _check_shards(subject: Subject) -> None:
    """Check that every tensor-parallel rank's shard is held from its first element to its last, each element once."""
    by_rank: dict[int, list[Holding]] = defaultdict(list)
    for holding in subject.holdings:
        by_rank[holding.tp_rank].append(holding)
    for tp_rank, shape in enumerate(subject.layout.shard_shapes):
        end, last = 0, "where the shard starts"
        for holding in sorted(by_rank[tp_rank], key=lambda holding: holding.fragment.param_start):
            fragment = holding.fragment
            if fragment.param_start != end:
                raise _broken(subject, tp_rank, end, fragment.param_start, f"{last} and rank {holding.rank}'s fragment")
            end, last = end + fragment.numel, f"rank {holding.rank}'s fragment"
        if end != prod(shape):
            raise _broken(subject, tp_rank, end, prod(shape), f"{last} and the end of the shard")


def _broken(subject: Subject, tp_rank: int, end: int, start: int, between: str) -> PlanError:
    what = (
        f"elements [{end}, {start}) of tensor-parallel rank {tp_rank}'s shard are held by no rank"
        if end < start
        else f"elements [{start}, {end}) of tensor-parallel rank {tp_rank}'s shard are held twice or outside it"
    )
    return PlanError(
        f"parameter {subject.name}: {what}, between {between}. The optimizer's groups are not what was recorded when "
        "it partitioned; do not change them after deepspeed.initialize."
    )
