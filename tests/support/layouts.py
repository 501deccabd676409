# SPDX-License-Identifier: Apache-2.0
"""Layouts applied to whole shards, and layouts that the layers of real ranks describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megads_ucp.layout.coverage import check_coverage
from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.rule import Rule
from tests.support.ranks import run_ranks

Described = tuple[dict[str, Rule], dict[str, torch.Tensor]]  # rules and local tensors, by parameter name


def rebuild(layout: Layout, shards: list[torch.Tensor]) -> torch.Tensor:
    """The full tensor from all TP ranks' shards, by the layout's own boxes."""
    if layout.averaged:
        return sum(shards[1:], shards[0]) / len(shards)
    full = torch.empty(layout.numel, dtype=shards[0].dtype)
    for rank, shard in enumerate(shards):
        for box in layout.runs(rank, 0, shard.numel()):
            box.full_view(full, 0).copy_(box.shard_view(shard.reshape(-1), 0))
    return full.view(layout.shape)


def on_ranks(body: Callable[..., Described], tp: int, *args: Any) -> dict[str, tuple[Layout, torch.Tensor]]:
    """Runs `body` on `tp` ranks; {name: (layout, full tensor)} of every parameter, from the rules they agree on."""
    ranks = run_ranks(body, tp, *args)
    rules = ranks[0][0]
    assert all(described == rules for described, _ in ranks), "ranks describe parameters differently"
    assert all(tensors.keys() == rules.keys() for _, tensors in ranks), "a parameter has no rule"
    result = {}
    for name, rule in rules.items():
        shards = [tensors[name] for _, tensors in ranks]
        layout = build_layout(name, rule, [tuple(shard.shape) for shard in shards])
        check_coverage(layout)
        result[name] = layout, rebuild(layout, shards)
    return result


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def detached(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
