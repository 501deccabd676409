# SPDX-License-Identifier: Apache-2.0
"""Whether the copies that several ranks hold of the same elements still agree.

Only checksums travel, one 64-bit number per copy of a block, in one reduction over all ranks. Data travels where they
differ, to find by how much.

Checksums are taken of bits, so a NaN or an infinity is as good as any number. Where they differ, values decide: NaNs of
different bits, and zeros of different sign, are no drift. (The sign of a NaN depends on the instruction that made it.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isnan

import torch

from megads_ucp.comm.channel import Channel
from megads_ucp.comm.exchange import Exchange, Source
from megads_ucp.errors import DriftError
from megads_ucp.layout.boxes import Box
from megads_ucp.layout.strides import Ints, index_of
from megads_ucp.plan.replicas import (
    BLOCK,
    Replica,
    ReplicaBlock,
    contributions,
    holder_of,
    inspection,
    replica_blocks,
)
from megads_ucp.plan.types import Holding, StateSpec, Subject, Transfer

logger = logging.getLogger("megads_ucp")

_ROUNDING = (
    "That may be rounding: three or more data-parallel ranks add up a gradient in an order that goes by its place in "
    "their buffers, and these copies have other places (uneven tensor parallelism) or buffers (pipeline stages). One "
    "copy of each is exported, and a resume gives it to all."
)
_MEND = (
    "Look for a missing all-reduce of a gradient (sequence parallelism?), or declare the parameter in "
    "parameter_to_average_patterns of universal_checkpoint_info."
)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_MOST_LISTED = 5
"""States of parameters that a message lists; the rest is counted."""


Values = Callable[[Holding, StateSpec], torch.Tensor]
"""The 1-D values, on any device, of one of this rank's holdings in some state."""


def source_of(values: Values) -> Source:
    """What an exchange takes this rank's own transfers from."""
    return lambda transfer: (values(transfer.holding, transfer.extent.state), transfer.holding.fragment.param_start)


@dataclass(frozen=True)
class Drift:
    """Copies of one state of one parameter that differ from the first one's.

    Attributes:
        parameter, state: of what.
        elsewhere: whether these copies are on later pipeline stages than the first one, which exports the parameter.
        rounding: whether that may be no more than rounding, see :attr:`Subject.rounds_alike`. On other stages always.
        tp_ranks: the ones that hold the differing copies.
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
        copies = f"tensor-parallel rank{'s' if many else ''} {', '.join(map(str, self.tp_ranks))}"
        reference = f"that of rank {self.reference}"
        if self.elsewhere:
            copies, reference = f"{copies} on later pipeline stages", "the first stage's"
        return f"the {'copies' if many else 'copy'} of {copies} {'differ' if many else 'differs'} from {reference}"


class Comparison:
    """Compares all copies of a job's parameters; made once for a survey, used in every export of it.

    Args:
        subjects: equal on all ranks.
        rank: this one.
    """

    def __init__(self, subjects: Sequence[Subject], rank: int) -> None:
        self._subjects = subjects
        self._blocks = replica_blocks(subjects)
        self._contributions = contributions(subjects, self._blocks, rank)

    def run(self, channel: Channel, values: Values, window_bytes: int) -> tuple[Drift, ...]:
        """What has drifted, the same on every rank. Collective.

        Args:
            channel: the process group.
            values: see :data:`Values`.
            window_bytes: of messages under way, see :class:`Exchange`.

        Raises:
            Disagreement: some rank's values cannot be read.
            ChannelError: a peer has died, or the timeout has passed.
        """
        if not self._blocks:
            return ()
        with channel.agreed("comparing the copies of parameters"):
            sums = self.checksums(values)
        total = channel.sum_int64(sums).tolist()
        suspects = [block for block in self._blocks if len(set(total[block.slots])) > 1]
        if not suspects:
            return ()
        judge = _Judge(self._subjects)
        with channel.agreed("comparing the copies of parameters"):
            judge.run(channel, inspection(self._subjects, suspects, channel.rank), values, window_bytes)
        findings = channel.gather(judge.found)
        merged: tuple[Drift, ...] = _merged([drift for found in findings or [] for drift in found])
        drifted: tuple[Drift, ...] = channel.broadcast(merged, 0)
        return drifted

    def checksums(self, values: Values) -> torch.Tensor:
        """This rank's part of every checksum, int64."""
        sums = torch.zeros(self._blocks[-1].slots.stop, dtype=torch.int64)
        weights = _weights()
        for contribution in self._contributions:
            held = values(contribution.holding, contribution.state)
            bits = held.view(_BITS[held.element_size()])
            for box in contribution.boxes:
                part = _folded(box.shard_view(bits, contribution.holding.fragment.param_start).cpu())
                sums[contribution.slot] += (part * box.full_view(weights, contribution.start)).sum()
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
    """Takes the replicas of blocks as they arrive, and notes how each differs from the first."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._subjects = subjects
        self._blocks: dict[int, ReplicaBlock] = {}
        self._current: ReplicaBlock | None = None
        self._first = torch.empty(0)
        self.found: list[Drift] = []

    def run(
        self, channel: Channel, inspected: Sequence[tuple[ReplicaBlock, Transfer]], values: Values, window_bytes: int
    ) -> None:
        self._blocks = {id(transfer): block for block, transfer in inspected}
        exchange = Exchange(channel, source_of(values), self._lay, window_bytes=window_bytes)
        exchange.run(transfer for _, transfer in inspected)

    def _lay(self, transfer: Transfer, values: list[torch.Tensor]) -> None:
        block = self._blocks[id(transfer)]
        if block is not self._current:
            self._current, self._first = block, torch.empty(block.stop - block.start, dtype=torch.float64)
        for box, value in zip(transfer.boxes, values, strict=True):
            first = box.full_view(self._first, block.start)
            # Of a scaled piece each rank may hold another multiple, rounded in its own way.
            copy = value.double() if box.scale == 1.0 else (value.float() / box.scale).double()
            if transfer.copy_index == 0:
                first.copy_(copy)
            else:
                self._compare(block, block.replicas[transfer.copy_index], box, first, copy.cpu())

    def _compare(
        self, block: ReplicaBlock, replica: Replica, box: Box, first: torch.Tensor, copy: torch.Tensor
    ) -> None:
        differing = (first != copy) & ~(first.isnan() & copy.isnan())
        if not differing.any():
            return
        distance = torch.where(differing, (first - copy).abs(), -1.0).flatten()
        worst = int(distance.argmax())  # a NaN, if there is one
        inner = index_of(worst, box.shape)
        element = box.full_offset + sum(i * stride for i, stride in zip(inner, box.full_strides, strict=True))
        subject = self._subjects[block.subject]
        drift = Drift(
            parameter=subject.title,
            state=block.state.name,
            elsewhere=replica.stage > 0,
            rounding=replica.stage > 0 or not subject.rounds_alike,
            tp_ranks=(replica.tp_rank,),
            reference=block.replicas[0].tp_rank,
            count=int(differing.sum()),
            largest=float(distance[worst]),
            index=index_of(element, subject.layout.shape),
            ranks=(holder_of(subject, block.replicas[0], element), holder_of(subject, replica, element)),
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


def judge(drifts: Sequence[Drift], on_drift: str, *, speaks: bool) -> None:
    """Warn of replicas that have drifted apart, or refuse the export. Call it on every rank.

    Where sound runs drift, by rounding, it is a warning, whatever the configuration says.

    Args:
        drifts: the same on every rank.
        on_drift: "error" or "warn".
        speaks: whether this rank warns.

    Raises:
        DriftError: others have, and ``on_drift`` calls that an error.
    """
    rounding = [drift for drift in drifts if drift.rounding]
    if rounding and speaks:
        logger.warning("%s. %s", _listed(rounding), _ROUNDING)
    wrong = [drift for drift in drifts if not drift.rounding]
    if wrong and on_drift == "error":
        raise DriftError(f"{_listed(wrong)}. {_MEND} To export one copy as it is, set on_drift to warn.")
    if wrong and speaks:
        logger.warning("%s. One copy of each is exported. %s", _listed(wrong), _MEND)


def _listed(drifts: Sequence[Drift]) -> str:
    """All of it in one message, without the full stop."""
    listed = "; ".join(map(str, drifts[:_MOST_LISTED]))
    rest = f"; and {len(drifts) - _MOST_LISTED} more states of parameters" if len(drifts) > _MOST_LISTED else ""
    return f"copies have drifted apart: {listed}{rest}"
