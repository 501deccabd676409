# SPDX-License-Identifier: Apache-2.0
"""What Megatron's attributes say of a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megads_ucp.errors import LayoutError
from megads_ucp.layout.layout import build_layout
from megads_ucp.sources.attributes import rules_from_attributes
from tests.support.layouts import rebuild


def parameter(*shape: int, **attributes: Any) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@settings(deadline=None)  # the first example imports megatron-core
@given(
    tp=st.integers(1, 4),
    stride=st.integers(1, 3),
    width=st.integers(1, 3),
    other=st.integers(1, 5),
    dim=st.integers(0, 1),
)
def test_attributes_describe_what_megatron_cuts(tp, stride, width, other, dim):
    layers = pytest.importorskip("megatron.core.tensor_parallel.layers")
    full = [other, other]
    full[dim] = tp * stride * width
    drawn = torch.randn(full)
    weights = []
    for rank in range(tp):
        shape = list(full)
        shape[dim] //= tp
        weights.append(parameter(*shape))
        layers._initialize_affine_weight_cpu(
            weights[-1], *full, shape[dim], dim, lambda t: t.copy_(drawn), stride=stride, rank=rank, world_size=tp
        )
    (rule,) = {rules_from_attributes({"w": weight}, tp)["w"] for weight in weights}
    layout = build_layout("w", rule, [tuple(weight.shape) for weight in weights])
    assert torch.equal(rebuild(layout, [weight.detach() for weight in weights]), drawn)


def test_attributes_set_to_false_mean_replicated_if_any_are_true():
    norm = parameter(4, tensor_model_parallel=False, partition_dim=-1, partition_stride=1, sequence_parallel=True)
    column = parameter(4, 4, tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    bare, autotp = parameter(4), parameter(4, tensor_model_parallel=True)
    rules = rules_from_attributes({"norm": norm, "column": column, "bare": bare, "autotp": autotp}, 2)
    assert {name: rule.kind for name, rule in rules.items()} == {"norm": "replicated", "column": "split"}
    assert rules_from_attributes({"norm": norm, "bare": bare}, 2) == {}


def test_attributes_that_do_not_fit_are_refused():
    with pytest.raises(LayoutError, match=r"bias.*partition_dim 1"):
        rules_from_attributes({"bias": parameter(4, tensor_model_parallel=True, partition_dim=1)}, 2)
