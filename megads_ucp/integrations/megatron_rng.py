# SPDX-License-Identifier: Apache-2.0
"""Megatron's random states, where a run resumes on more data-parallel ranks than it was saved on.

When TP or PP has changed, Megatron itself gives tensor-parallel ranks new states. That leaves
``--data-parallel-random-init``: ``get_rng_state`` (megatron/checkpointing.py) then saves a state for each data-parallel
rank, and ``load_checkpoint`` takes that of its own rank, which the checkpoint may not have.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator

RNG_STATE = "rng_state"


def grow_rng_states(client_state: Any, degree: int) -> None:
    """Give new data-parallel ranks states of their own, derived from the saved ones, in place: no two ranks draw alike.

    Args:
        client_state: of a checkpoint; one without a list of states in Megatron's form is left alone.
        degree: data-parallel degree of this run.
    """
    states = client_state.get(RNG_STATE) if isinstance(client_state, dict) else None
    if isinstance(states, list) and all(isinstance(s, dict) and "torch_rng_state" in s for s in states):
        saved = list(states)
        states += [_another(saved[rank % len(saved)], rank) for rank in range(len(saved), degree) if saved]


def _another(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """A state for ``rank`` in the form of ``state``, derived from it.

    Each part is derived from the same part of ``state``, so tensor-parallel ranks that drew the same numbers still do.
    """

    def seed(part: torch.Tensor, kind: str = "") -> int:
        material = bytes(part.cpu().numpy()) + f"{rank} {kind}".encode()
        return int.from_bytes(hashlib.sha256(material).digest()[:8], "big") >> 2

    def on_accelerator(part: torch.Tensor) -> torch.Tensor:
        return torch.Generator(get_accelerator().device_name()).manual_seed(seed(part)).get_state()

    shared = state["torch_rng_state"]
    return {
        **state,
        "random_rng_state": random.Random(seed(shared, "random")).getstate(),
        "np_rng_state": numpy.random.RandomState(seed(shared, "numpy") % 2**32).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(seed(shared)).get_state(),
        "cuda_rng_state": on_accelerator(state["cuda_rng_state"]),
        "rng_tracker_states": {name: on_accelerator(part) for name, part in state["rng_tracker_states"].items()},
    }
