# SPDX-License-Identifier: Apache-2.0
"""What ranks say of themselves, without engines: two parameters, over any number of stages and TP and DP ranks."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from megads_ucp.engine.state import Coordinates
from megads_ucp.layout.rule import Rule
from megads_ucp.sources.resolve import Claim, Trust
from megads_ucp.survey import GroupDescription, RankDescription
from tests.support.flat_groups import flat_group

Shapes = dict[str, tuple[int, ...]]

STATES = (("fp32", torch.float32), ("exp_avg", torch.bfloat16))
RULES = {"column": Rule("split", "layers", dim=0), "norm": Rule("replicated", "layers")}
SHAPES: Shapes = {"column": (4, 6), "norm": (6,)}


def group(shapes: Shapes, ranks: tuple[int, ...], states=STATES) -> GroupDescription:
    sizes = [prod(shape) for shape in shapes.values()]
    flat = flat_group(list(shapes), sizes, len(ranks), alignment=2 * len(ranks))
    return GroupDescription(flat, tuple(shapes.values()), ranks, states)


def description(
    tp_rank: int = 0,
    *,
    stage: int = 0,
    stages: int = 1,
    tp_degree: int = 2,
    degree: int = 2,
    groups: tuple[Shapes, ...] = (SHAPES,),
    states=STATES,
    unowned: Shapes | None = None,
    buffers: tuple[str, ...] = (),
    rules: dict[str, Rule] | None = None,
    info: dict[str, Any] | None = None,
    tied: tuple[str, ...] = (),
) -> RankDescription:
    """Ranks are numbered as Megatron does: tensor-parallel first, then data-parallel, then stages."""
    ranks = tuple(stage * tp_degree * degree + shard * tp_degree + tp_rank for shard in range(degree))
    return RankDescription(
        coordinates=Coordinates(stage, stages, tp_rank, tp_degree, stage * tp_degree + tp_rank),
        groups=tuple(group(shapes, ranks, states) for shapes in groups),
        unowned=tuple((unowned or {}).items()),
        buffers=buffers,
        claims=(Claim("layers", Trust.LAYERS, RULES if rules is None else rules),),
        info=info,
        tied=tied,
        warnings=(),
    )


def of_all_tp_ranks(**options: Any) -> tuple[RankDescription, ...]:
    return tuple(description(tp_rank, **options) for tp_rank in range(options.get("tp_degree", 2)))
