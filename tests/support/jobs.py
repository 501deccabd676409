# SPDX-License-Identifier: Apache-2.0
"""Jobs to be planned and exchanged, without engines: layouts, partitions, and what each rank would hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.partition import FlatGroup
from megads_ucp.layout.rule import Rule
from megads_ucp.plan.types import UNOWNED, ShardGroup, StateSpec, Subject
from tests.support.flat_groups import flat_group

FLOAT, BRAIN = torch.float32, torch.bfloat16
ADAM = tuple(StateSpec(name, FLOAT, FLOAT) for name in ("fp32", "exp_avg", "exp_avg_sq"))
MIXED = (StateSpec("fp32", BRAIN, FLOAT), StateSpec("exp_avg", BRAIN, BRAIN), StateSpec("exp_avg_sq", FLOAT, FLOAT))


@dataclass(frozen=True)
class Job:
    """A model on ``tp_degree * degree`` ranks. Global rank: shard rank * tp_degree + TP rank, as Megatron has it."""

    layouts: tuple[Layout, ...]
    unowned: tuple[Layout, ...]
    states: tuple[StateSpec, ...]
    tp_degree: int
    degree: int

    @property
    def world(self) -> int:
        return self.tp_degree * self.degree

    def subjects(self) -> tuple[Subject, ...]:
        owned = [self._shards(self.layouts, tp_rank, 0) for tp_rank in range(self.tp_degree)]
        unowned = [self._shards(self.unowned, tp_rank, UNOWNED) for tp_rank in range(self.tp_degree)]
        return (
            *(Subject(layout, self.states, _holding(layout, owned)) for layout in self.layouts),
            *(Subject(layout, ADAM[:1], _holding(layout, unowned), owned=False) for layout in self.unowned),
        )

    def _shards(self, layouts: tuple[Layout, ...], tp_rank: int, group: int) -> ShardGroup:
        ranks = tuple(shard_rank * self.tp_degree + tp_rank for shard_rank in range(self.degree))
        return ShardGroup(tp_rank, group, self._flat(layouts, tp_rank), ranks)

    def _flat(self, layouts: tuple[Layout, ...], tp_rank: int) -> FlatGroup:
        sizes = {layout.name: prod(layout.shard_shapes[tp_rank]) for layout in layouts}
        real = {name: size for name, size in sizes.items() if size}  # as DeepSpeed leaves the empty ones out
        return flat_group(list(real), list(real.values()), self.degree, alignment=2 * self.degree)


def _holding(layout: Layout, shards: list[ShardGroup]) -> tuple[ShardGroup, ...]:
    """Those with elements of the parameter."""
    return tuple(shard for shard in shards if prod(layout.shard_shapes[shard.tp_rank]))


@dataclass(frozen=True)
class Values:
    """What the ranks hold of one state of one subject: each TP rank's whole flat shard, and the full tensor."""

    shards: tuple[torch.Tensor, ...]
    full: torch.Tensor


def values_of(subject: Subject, state: StateSpec, seed: int) -> Values:
    """Random shards; those elements that several TP ranks hold agree, unless they are to be averaged."""
    layout = subject.layout
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(layout.numel, generator=generator).to(state.live)
    shards = []
    for tp_rank, shape in enumerate(layout.shard_shapes):
        shard = torch.full((prod(shape),), torch.nan, dtype=state.live)  # what is padding must never travel
        if layout.averaged:
            shard = torch.randn(shard.shape, generator=generator).to(state.live)
        else:
            for box in layout.runs(tp_rank, 0, shard.numel()):
                box.shard_view(shard, 0).copy_(box.full_view(full, 0))
        shards.append(shard)
    if layout.averaged:  # as ds_to_universal.merge_tp_slices does
        full = sum(shard.to(state.written) for shard in shards) / len(shards)  # type: ignore[assignment]
    return Values(tuple(shards), full.to(state.written))


def replicated(name: str, numel: int, tp_degree: int) -> Layout:
    return build_layout(name, Rule("replicated", "test"), [(numel,)] * tp_degree)


def gpt(layers: int, hidden: int, ffn: int, vocabulary: int, tp_degree: int, degree: int) -> Job:
    """A decoder as Megatron cuts it: columns, rows, gate and up, replicated norms."""
    column, row = Rule("split", "test", dim=0), Rule("split", "test", dim=1)
    gate_up = Rule("split", "test", dim=0, style="n_sub_params")
    norm = Rule("replicated", "test")

    def layout(name: str, rule: Rule, *shape: int) -> Layout:
        shard = [size // tp_degree if axis == rule.dim else size for axis, size in enumerate(shape)]
        return build_layout(name, rule, [shard] * tp_degree)

    found = [layout("embedding", column, vocabulary, hidden)]
    for index in range(layers):
        found += [
            layout(f"{index}.norm1", norm, hidden),
            layout(f"{index}.qkv", column, 3 * hidden, hidden),
            layout(f"{index}.proj", row, hidden, hidden),
            layout(f"{index}.norm2", norm, hidden),
            layout(f"{index}.fc1", gate_up, 2 * ffn, hidden),
            layout(f"{index}.fc2", row, hidden, ffn),
        ]
    return Job(tuple(found), (), ADAM, tp_degree, degree)
