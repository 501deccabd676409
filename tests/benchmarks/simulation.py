# SPDX-License-Identifier: Apache-2.0
"""What an export costs at thousands of ranks: the real survey and the real planner, of ranks that do not exist.

    python -m tests.benchmarks.simulation

Llama-3.1-405B (126 layers, hidden 16,384, feed-forward 53,248, 128 heads of which 8 have keys and values, vocabulary
128,256, untied), Adam: three fp32 states. Figures are of all ranks of tensor-parallel groups spread over the first, the
middle and the last stage. Messages, of at most 4 MiB, are what would travel if ranks of a host shared no memory.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch

from megads_ucp.layout.rule import Rule
from megads_ucp.plan.save import SavePlan, make_plan, total_bytes
from megads_ucp.plan.shares import Dealing
from megads_ucp.survey import RankDescription, Survey, build_survey
from tests.benchmarks.instruments import table
from tests.support.descriptions import Shapes, description

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KEY_VALUE_HEADS, HEAD, VOCABULARY = 126, 16384, 53248, 128, 8, 128, 128256
STATES = tuple((name, torch.float32) for name in ("fp32", "exp_avg", "exp_avg_sq"))

COLUMNS, ROWS = Rule("split", "layers", dim=0), Rule("split", "layers", dim=1)
GATE_AND_UP = Rule("split", "layers", dim=0, style="n_sub_params")
WHOLE = Rule("replicated", "layers")

MESSAGE_BYTES = 4 << 20
GROUPS = 12
"""Tensor-parallel groups of a stage in a sample, spread evenly over its data-parallel ranks."""


@dataclass(frozen=True)
class Grid:
    """Ranks as Megatron numbers them: tensor-parallel first, then data-parallel, then stages."""

    tp: int
    dp: int
    pp: int

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    def group_of(self, rank: int) -> int:
        """The number of a rank's tensor-parallel group."""
        return rank // self.tp


def layer(number: int, tp: int) -> Iterator[tuple[str, Rule, tuple[int, ...]]]:
    """Name, rule and shard shape of each parameter of a decoder layer."""
    query, key_value = HEADS * HEAD // tp, KEY_VALUE_HEADS * HEAD // tp
    for name, rule, shape in (
        ("norm1", WHOLE, (HIDDEN,)),
        ("qkv", COLUMNS, (query + 2 * key_value, HIDDEN)),
        ("proj", ROWS, (HIDDEN, HIDDEN // tp)),
        ("norm2", WHOLE, (HIDDEN,)),
        ("gate_up", GATE_AND_UP, (2 * FEED_FORWARD // tp, HIDDEN)),
        ("down", ROWS, (HIDDEN, FEED_FORWARD // tp)),
    ):
        yield f"{number}.{name}", rule, shape


def stages_of(pp: int) -> list[range]:
    """The layers of each stage: as many on all, one less on the first and the last, which have a vocabulary."""
    sizes = [(LAYERS + 2) // pp] * pp
    sizes[0] -= 1
    sizes[-1] -= 1
    ends = [sum(sizes[: n + 1]) for n in range(pp)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def describe(grid: Grid) -> tuple[RankDescription, ...]:
    """One description of each stage and tensor-parallel rank."""
    found = []
    for stage, layers in enumerate(stages_of(grid.pp)):
        parameters = [entry for number in layers for entry in layer(number, grid.tp)]
        words = (VOCABULARY // grid.tp, HIDDEN)
        if stage == 0:
            parameters.insert(0, ("embedding", COLUMNS, words))
        if stage == grid.pp - 1:
            parameters += [("norm", WHOLE, (HIDDEN,)), ("head", COLUMNS, words)]
        shapes: Shapes = {name: shape for name, _, shape in parameters}
        rules = {name: rule for name, rule, _ in parameters}
        for tp_rank in range(grid.tp):
            found.append(
                description(
                    tp_rank,
                    stage=stage,
                    stages=grid.pp,
                    tp_degree=grid.tp,
                    degree=grid.dp,
                    groups=(shapes,),
                    states=STATES,
                    rules=rules,
                )
            )
    return tuple(found)


@dataclass(frozen=True)
class Rank:
    """What one rank does."""

    written: int
    sent: int
    strayed: int  # of these, what leaves the tensor-parallel group
    messages: int
    peers: int
    files: int
    begun: int  # files that the rank begins: a second fsync, where others go on with them


def look_at(plan: SavePlan, grid: Grid) -> Rank:
    sent = strayed = messages = 0
    for piece in plan.sends:
        nbytes = sum(part.numel * piece.extent.state.live.itemsize for part in piece.parts)
        sent += nbytes
        strayed += nbytes if grid.group_of(piece.extent.writer) != grid.group_of(plan.rank) else 0
        messages += sum(1 for _ in piece.transfers(MESSAGE_BYTES))
    files = {(piece.extent.subject, piece.extent.state.name) for piece in plan.writes}
    begun = {(piece.extent.subject, piece.extent.state.name) for piece in plan.writes if not piece.extent.start}
    peers = {piece.extent.writer for piece in plan.sends}
    return Rank(plan.bytes_written, sent, strayed, messages, len(peers), len(files), len(begun))


def planned(survey: Survey, grid: Grid, rank: int) -> SavePlan:
    subjects = survey.subjects()
    return make_plan(subjects, rank, Dealing.of(total_bytes(subjects), grid.world, shared_files=True))


def sample(grid: Grid) -> list[int]:
    """All ranks of some tensor-parallel groups of the first, the middle and the last stage."""
    groups: set[int] = set()
    for stage in {0, grid.pp // 2, grid.pp - 1}:
        groups.update(stage * grid.dp + n * (grid.dp - 1) // max(GROUPS - 1, 1) for n in range(GROUPS))
    return [group * grid.tp + tp_rank for group in sorted(groups) for tp_rank in range(grid.tp)]


def row(grid: Grid) -> tuple[str, ...]:
    survey, chosen = build_survey(describe(grid)), sample(grid)
    tracemalloc.start()
    planned(build_survey(describe(grid)), grid, chosen[len(chosen) // 2])
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    seconds, ranks = [], []
    for rank in chosen:
        started = time.process_time()
        plan = planned(survey, grid, rank)
        seconds.append(time.process_time() - started)
        ranks.append(look_at(plan, grid))
    share = total_bytes(survey.subjects()) / grid.world
    written = sum(rank.written for rank in ranks)
    return (
        f"{grid.world:,}",
        f"{grid.tp} x {grid.dp} x {grid.pp}",
        f"{share / 1e6:,.0f}",
        f"{max(rank.written for rank in ranks) / share:.3f}",
        f"{100 * sum(rank.sent for rank in ranks) / written:.1f}",
        f"{100 * sum(rank.strayed for rank in ranks) / written:.3f}",
        f"{max(rank.messages for rank in ranks):,}",
        f"{max(rank.peers for rank in ranks)}",
        f"{max(rank.files for rank in ranks)}",
        f"{max(rank.begun for rank in ranks)}",
        f"{seconds[0]:.3f}, {median(seconds):.3f}",
        f"{memory / 1e6:.1f}",
    )


def main() -> None:
    header = (
        "ranks",
        "TP x DP x PP",
        "MB each writes",
        "busiest / mean",
        "% sent",
        "% leaves TP",
        "messages",
        "peers",
        "files",
        "begun",
        "planning s: first, later",
        "survey and plan MB",
    )
    grids = [Grid(8, 1, 8), Grid(8, 128, 1), Grid(8, 8, 16), Grid(8, 64, 16), Grid(8, 512, 16)]
    rows = []
    for grid in grids:
        rows.append(row(grid))
        print(table(header, rows), flush=True)


if __name__ == "__main__":
    main()
