# SPDX-License-Identifier: Apache-2.0
"""Random states of Megatron's for data-parallel ranks that a checkpoint does not have."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch

from megads_ucp.integrations.megatron_rng import grow_rng_states
from megads_ucp.layout.attention import Order

HIDDEN, HEADS, HEAD_DIM = 12, 4, 3
ORDERS: tuple[Order, ...] = ("blocks", "interleaved")


def megatron_rng_state(tp_rank: int) -> dict[str, Any]:
    """In the form of megatron/checkpointing.py: tensor-parallel ranks share all but the tracker's state."""
    shared = torch.Generator().manual_seed(1).get_state()
    own = torch.Generator().manual_seed(2 + tp_rank).get_state()
    return {
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": numpy.random.RandomState(1).get_state(),
        "torch_rng_state": shared,
        "cuda_rng_state": shared,
        "rng_tracker_states": {"model-parallel-rng": own},
    }


def test_new_data_parallel_ranks_get_random_states_of_their_own() -> None:
    def drawn(state: torch.Tensor) -> tuple[float, ...]:
        generator = torch.Generator()
        generator.set_state(state)
        return tuple(torch.rand(2, generator=generator).tolist())

    loaded = [{"rng_state": [megatron_rng_state(tp_rank)], "iteration": 5} for tp_rank in range(2)]
    for client_state in loaded:
        grow_rng_states(client_state, 3)

    one, other = (list(client_state["rng_state"]) for client_state in loaded)  # type: ignore[call-overload]
    assert len(one) == 3 and one[0]["random_rng_state"] == random.Random(1).getstate()
    assert len({drawn(state["torch_rng_state"]) for state in one + other}) == 3  # the same on tensor-parallel ranks
    assert len({drawn(state["rng_tracker_states"]["model-parallel-rng"]) for state in one + other}) == 6
    assert len({random_with(state["random_rng_state"]) for state in one}) == 3
    assert len({state["np_rng_state"][1].tobytes() for state in one}) == 3


def random_with(state: Any) -> float:
    generator = random.Random()
    generator.setstate(state)
    return generator.random()


@pytest.mark.parametrize("state", [None, {}, {"rng_state": "mine"}, {"rng_state": [1, 2]}, {"rng_state": []}])
def test_other_clients_states_are_left_alone(state: Any) -> None:
    before = copy.deepcopy(state)
    grow_rng_states(state, 4)
    assert state == before
