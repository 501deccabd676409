# SPDX-License-Identifier: Apache-2.0
"""Whether the copies that several ranks hold of the same elements still agree.

Only checksums travel, one 64-bit number per copy of a block, in one reduction over all ranks. Data travels where they
differ, to find by how much.

Checksums are taken of bits, so a NaN or an infinity is as good as any number. Where they differ, values decide: NaNs of
different bits, and zeros of different sign, are no drift. (The sign of a NaN depends on the instruction that made it.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isnan

import torch

from megads_ucp.comm.channel import Channel
from megads_ucp.comm.exchange import Exchange
from megads_ucp.layout.boxes import Box, Ints
from megads_ucp.layout.layout import index_of
from megads_ucp.plan.replicas import BLOCK, Lot, Place, holder_of, inspection, lots_of, shares_of
from megads_ucp.plan.types import Holding, Plan, StateSpec, Subject, Transfer

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_MOST_TOLD = 5
"""States of parameters that a message lists; the rest is counted."""


Values = Callable[[Holding, StateSpec], torch.Tensor]
"""The 1-D values, in host memory, of one of this rank's holdings in some state."""


@dataclass(frozen=True)
class Drift:
    """Copies of one state of one parameter that differ from the first one's.

    Attributes:
        parameter, state: of what.
        elsewhere: whether these copies are on later pipeline stages than the first one, which exports the parameter.
        rounding: whether that may be no more than rounding, see :attr:`Subject.rounds_alike`. On other stages always.
        tp_ranks: whose copies differ.
        reference: the TP rank whose copy, on the first stage, they were compared to: for copies on later stages, that
            of the largest difference.
        count: elements that differ, over all these copies.
        largest: the largest difference; NaN if one of two elements is NaN.
        index: where in the full tensor that is.
        ranks: the global ranks that hold the two elements, and
        values: what they hold: the reference first.
    """

    parameter: str
    state: str
    elsewhere: bool
    rounding: bool
    tp_ranks: Ints
    reference: int
    count: int
    largest: float
    index: tuple[int, ...]
    ranks: tuple[int, int]
    values: tuple[float, float]

    def __str__(self) -> str:
        (one, other), (here, there) = self.ranks, self.values
        return (
            f"parameter {self.parameter}, state {self.state}: {self._who()} in {self.count} "
            f"element{'s' if self.count > 1 else ''}, by up to {self.largest:.3g}, at {list(self.index)}: "
            f"{here:.9g} on rank {one}, {there:.9g} on rank {other}"
        )

    def _who(self) -> str:
        many = len(self.tp_ranks) > 1
        whose = f"tensor-parallel rank{'s' if many else ''} {', '.join(map(str, self.tp_ranks))}"
        reference = f"that of rank {self.reference}"
        if self.elsewhere:
            whose, reference = f"{whose} on later pipeline stages", "the first stage's"
        return f"the {'copies' if many else 'copy'} of {whose} {'differ' if many else 'differs'} from {reference}"


class Comparison:
    """Compares all copies of a job's parameters; made once for a survey, used in every export of it.

    Args:
        subjects: equal on all ranks.
        rank: this one.
    """

    def __init__(self, subjects: Sequence[Subject], rank: int) -> None:
        self._subjects = subjects
        self._lots = lots_of(subjects)
        self._shares = shares_of(subjects, self._lots, rank)

    def run(self, channel: Channel, values: Values, bucket_bytes: int) -> tuple[Drift, ...]:
        """What has drifted, the same on every rank. Collective.

        Args:
            channel: the process group.
            values: see :data:`Values`.
            bucket_bytes: bytes per rank and direction that one round of an inspection may move.

        Raises:
            Disagreement: some rank's values cannot be read.
            ChannelError: a peer has died, or the timeout has passed.
        """
        if not self._lots:
            return ()
        with channel.agreed("comparing the copies of parameters"):
            sums = self.checksums(values)
        told = channel.sum_int64(sums).tolist()
        suspects = [lot for lot in self._lots if len(set(told[lot.slot : lot.slot + len(lot.places)])) > 1]
        if not suspects:
            return ()
        judge = _Judge(inspection(self._subjects, suspects, bucket_bytes), suspects)
        with channel.agreed("comparing the copies of parameters"):
            source = lambda transfer, extent: values(transfer.holding, extent.state)  # noqa: E731
            Exchange(channel, judge.plan, source, judge.lay, judge.arrived).run()
        findings = channel.gather(judge.found)
        merged: tuple[Drift, ...] = _merged([drift for theirs in findings or [] for drift in theirs])
        drifted: tuple[Drift, ...] = channel.broadcast(merged, 0)
        return drifted

    def checksums(self, values: Values) -> torch.Tensor:
        """This rank's part of every checksum, int64."""
        last = self._lots[-1]
        sums = torch.zeros(last.slot + len(last.places), dtype=torch.int64)
        weights = _weights()
        for share in self._shares:
            held = values(share.holding, share.state)
            bits = held.view(_BITS[held.element_size()])
            for box in share.boxes:
                part = _folded(box.shard_view(bits, share.holding.fragment.param_start))
                sums[share.slot] += (part * box.full_view(weights, share.start)).sum()
        return sums


def _folded(bits: torch.Tensor) -> torch.Tensor:
    """Of 64-bit elements, the upper half xored into the lower one: one to one, and no change is of the highest bits
    alone. There all odd weights are alike modulo 2**64, so that two flipped signs would cancel."""
    return bits ^ ((bits >> 32) & 0xFFFFFFFF) if bits.element_size() == 8 else bits


@functools.cache
def _weights() -> torch.Tensor:
    """The weight of every element of a block: odd, so that the change of any one element changes the sum modulo 2**64
    whatever it is, and random, so that several changes (two elements swapped, say) are unlikely to cancel: about one
    pair in 2**32 does."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=generator) | 1


class _Judge:
    """Takes the copies of lots as they arrive, and notes how each differs from the first."""

    def __init__(self, plan: Plan, lots: Sequence[Lot]) -> None:
        self.plan, self._lots = plan, lots
        self._first: dict[int, torch.Tensor] = {}
        self.found: list[Drift] = []

    def lay(self, transfer: Transfer, values: list[torch.Tensor]) -> None:
        lot = self._lots[transfer.extent]
        if transfer.extent not in self._first:
            self._first[transfer.extent] = torch.empty(lot.stop - lot.start, dtype=torch.float64)
        for box, value in zip(transfer.boxes, values, strict=True):
            first = box.full_view(self._first[transfer.extent], lot.start)
            # Of a scaled piece each rank may hold another multiple, rounded in its own way.
            copy = value.double() if box.scale == 1.0 else (value.float() / box.scale).double()
            if transfer.turn == 0:
                first.copy_(copy)
            else:
                self._compare(lot, lot.places[transfer.turn], box, first, copy)

    def arrived(self, extent: int) -> None:
        self._first.pop(extent, None)

    def _compare(self, lot: Lot, place: Place, box: Box, first: torch.Tensor, copy: torch.Tensor) -> None:
        differing = (first != copy) & ~(first.isnan() & copy.isnan())
        if not differing.any():
            return
        distance = torch.where(differing, (first - copy).abs(), -1.0).flatten()
        worst = int(distance.argmax())  # a NaN, if there is one
        inner = index_of(worst, box.shape)
        element = box.full_offset + sum(i * stride for i, stride in zip(inner, box.full_strides, strict=True))
        subject = self.plan.subjects[lot.subject]
        drift = Drift(
            parameter=subject.name,
            state=lot.state.name,
            elsewhere=place.stage > 0,
            rounding=place.stage > 0 or not subject.rounds_alike,
            tp_ranks=(place.tp_rank,),
            reference=lot.places[0].tp_rank,
            count=int(differing.sum()),
            largest=float(distance[worst]),
            index=index_of(element, subject.layout.shape),
            ranks=(holder_of(subject, lot.places[0], element), holder_of(subject, place, element)),
            values=(float(first[inner]), float(copy[inner])),
        )
        self.found.append(drift)


def _merged(found: Iterable[Drift]) -> tuple[Drift, ...]:
    """One per parameter, state and reference (one for all later stages), which says where the difference is largest."""
    key = lambda d: (d.elsewhere, d.parameter, d.state, -1 if d.elsewhere else d.reference)  # noqa: E731
    merged = []
    for _, group in groupby(sorted(found, key=key), key=key):
        drifts = list(group)
        worst = max(drifts, key=lambda drift: (isnan(drift.largest), drift.largest))
        tp_ranks = tuple(sorted({tp_rank for drift in drifts for tp_rank in drift.tp_ranks}))
        merged.append(replace(worst, tp_ranks=tp_ranks, count=sum(drift.count for drift in drifts)))
    return tuple(merged)


def told(drifts: Sequence[Drift]) -> str:
    """All of it in one message, without the full stop."""
    listed = "; ".join(map(str, drifts[:_MOST_TOLD]))
    rest = f"; and {len(drifts) - _MOST_TOLD} more states of parameters" if len(drifts) > _MOST_TOLD else ""
    return f"copies have drifted apart: {listed}{rest}"
