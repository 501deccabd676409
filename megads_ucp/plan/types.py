# SPDX-License-Identifier: Apache-2.0
"""The terms of a plan. Data only.

A *file* is one state of one parameter, whole. It is cut into *extents*, ranges of its elements, with a writer each. A
*holding* is a fragment of the parameter on some rank. A *transfer* is the part of a holding that lies in one extent, on
its way to the extent's writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megads_ucp.layout.boxes import Box
    from megads_ucp.layout.layout import Layout
    from megads_ucp.layout.partition import FlatGroup, Fragment


UNOWNED = -1
"""Group index of frozen parameters and buffers, which no optimizer owns."""


@dataclass(frozen=True)
class StateSpec:
    """One state of a parameter: its name (``fp32``, ``exp_avg``), its dtype on the ranks and in the file."""

    name: str
    live: torch.dtype
    written: torch.dtype


@dataclass(frozen=True)
class Holding:
    """A fragment of a parameter on some rank, and its group in the optimizer there (``UNOWNED``: in none)."""

    rank: int
    tp_rank: int
    group: int
    fragment: Fragment


@dataclass(frozen=True)
class ShardGroup:
    """One tensor-parallel rank's shards of some parameters, and the data-parallel ranks that share them out.

    Attributes:
        tp_rank: of the shards.
        group: index of the parameters' group in the optimizer there, or ``UNOWNED``.
        flat: the shards end to end, cut over ``ranks``.
        ranks: global rank of every shard rank.
    """

    tp_rank: int
    group: int
    flat: FlatGroup
    ranks: tuple[int, ...]

    @cached_property
    def shard_rank_of(self) -> dict[int, int]:
        return {rank: shard_rank for shard_rank, rank in enumerate(self.ranks)}

    def holdings(self, name: str) -> Iterator[Holding]:
        """All fragments of a parameter, from its first element to its last."""
        for shard_rank, fragment in self.flat.holders(name):
            yield Holding(self.ranks[shard_rank], self.tp_rank, self.group, fragment)

    def holding(self, name: str, rank: int) -> Holding | None:
        """What a rank holds of a parameter."""
        shard_rank = self.shard_rank_of.get(rank)
        fragment = None if shard_rank is None else self.flat.fragment(name, shard_rank)
        return None if fragment is None else Holding(rank, self.tp_rank, self.group, fragment)


@dataclass(frozen=True)
class Subject:
    """A parameter to be exported.

    Attributes:
        layout: how it is cut.
        states: its states, each a file.
        shards: who holds its shards on the pipeline stage that exports it; empty shards are left out.
        owned: whether an optimizer owns it. Copies of what none owns (buffers) may differ; the first one is written, or
            their mean where the layout is an averaged one.
        rounds_alike: whether the gradients of its copies on tensor-parallel ranks are summed in the same order, so that
            intact copies are equal to the last bit.
        tied_shards: for each further pipeline stage that keeps a copy (a tied parameter), who holds it there, cut
            over TP ranks like the first: compared, never written.
        padding: whether it is the rows that pad a vocabulary, which are in files of ours beside the parameter's own.
    """

    layout: Layout
    states: tuple[StateSpec, ...]
    shards: tuple[ShardGroup, ...]
    owned: bool = True
    rounds_alike: bool = True
    tied_shards: tuple[tuple[ShardGroup, ...], ...] = ()
    padding: bool = False

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.name} (its padding rows)" if self.padding else self.name

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """All fragments on the pipeline stage that exports it."""
        return tuple(holding for shard in self.shards for holding in shard.holdings(self.name))

    @cached_property
    def tied_holdings(self) -> tuple[tuple[Holding, ...], ...]:
        """For each further pipeline stage with a copy, all fragments there."""
        return tuple(
            tuple(holding for shard in shards for holding in shard.holdings(self.name)) for shards in self.tied_shards
        )

    def holding(self, rank: int) -> Holding | None:
        """What a rank of the stage that exports it holds."""
        found = (shard.holding(self.name, rank) for shard in self.shards)
        return next((holding for holding in found if holding is not None), None)

    def metadata(self) -> dict[str, Any]:
        """The keys beside "param" in its files; none, as from the stock converter, where no optimizer owns it."""
        return self.layout.metadata() if self.owned and not self.padding else {}


@dataclass(frozen=True)
class Extent:
    """Elements [start, stop) of the file of one state of a plan's subject number ``subject``.

    ``writer`` is the rank that writes them, or reads them where ranks read for each other.
    """

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


@dataclass(frozen=True, slots=True)
class Transfer:
    """The boxes of one holding that lie in one extent.

    Attributes:
        copy_index: 0 for the copy that is laid down; higher ones are added to it (or, in an inspection, compared with
            it).
        numel: elements of all boxes.
        backwards: whether it is part of a resume: the extent is read by its writer and travels to the holding.
    """

    extent: Extent
    holding: Holding
    boxes: tuple[Box, ...]
    numel: int
    copy_index: int = 0
    backwards: bool = False

    @property
    def sender(self) -> int:
        return self.extent.writer if self.backwards else self.holding.rank

    @property
    def receiver(self) -> int:
        return self.holding.rank if self.backwards else self.extent.writer

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.numel * self.extent.state.live.itemsize
