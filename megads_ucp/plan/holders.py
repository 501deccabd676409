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
    """The boxes of a holding that lie in some range of the full tensor, and how many elements they have."""

    holding: Holding
    boxes: tuple[Box, ...]
    numel: int


class Holders:
    """A subject's holdings by their place in the full tensor.

    Planning looks up the same ranges once per state and once more for the traffic. At thousands of ranks a scan of all
    holdings each time would dominate, so boxes are searched by bisection and results are cached.

    Raises:
        PlanError: the holdings do not make whole shards.
    """

    def __init__(self, subject: Subject) -> None:
        _check_shards(subject)
        self.subject = subject
        self._all_parts = tuple(
            _part(holding, boxes)
            for holding in subject.holdings
            if (boxes := subject.layout.runs(holding.tp_rank, holding.fragment.param_start, holding.fragment.numel))
        )
        self._cache: dict[tuple[int, int], tuple[Part, ...]] = {(0, subject.layout.numel): self._all_parts}

    @cached_property
    def _by_offset(self) -> tuple[list[tuple[int, Box]], list[int], list[int]]:
        """(index in ``_all_parts``, box) by ascending full offset; these offsets; the reach of all boxes up to each."""
        boxes = [(index, box) for index, part in enumerate(self._all_parts) for box in part.boxes]
        boxes.sort(key=lambda entry: entry[1].full_offset)
        reaches = accumulate((box.full_span[1] for _, box in boxes), max)
        return boxes, [box.full_offset for _, box in boxes], list(reaches)

    @cached_property
    def tp_rank_of(self) -> dict[int, int]:
        """The tensor-parallel rank of every rank that holds a part."""
        return {holding.rank: holding.tp_rank for holding in self.subject.holdings}

    def parts(self, start: int, stop: int) -> tuple[Part, ...]:
        """The parts of elements [start, stop) of the full tensor, in the order of the holdings."""
        if (start, stop) not in self._cache:
            boxes, offsets, reaches = self._by_offset
            found: dict[int, list[Box]] = defaultdict(list)
            for index, box in boxes[bisect_right(reaches, start) : bisect_left(offsets, stop)]:
                if inside := clip(box, start, stop):
                    found[index].extend(inside)
            parts = (_part(self._all_parts[index].holding, tuple(found[index])) for index in sorted(found))
            self._cache[start, stop] = tuple(parts)
        return self._cache[start, stop]

    def overlap(self, start: int, stop: int) -> dict[int, int]:
        """Elements of [start, stop) that each rank holds; ranks that hold none are absent."""
        elements: dict[int, int] = defaultdict(int)
        for part in self.parts(start, stop):
            elements[part.holding.rank] += part.numel
        return elements


def _part(holding: Holding, boxes: tuple[Box, ...]) -> Part:
    return Part(holding, boxes, sum(box.numel for box in boxes))


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
