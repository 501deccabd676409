# SPDX-License-Identifier: Apache-2.0
"""What a resume gives a parameter group beside the values of its fragments: hyperparameters, state names, step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megads_ucp.engine.state import StateGroup
from megads_ucp.storage.format import STEP


@dataclass(frozen=True)
class GroupState:
    """What a checkpoint has for one of this run's parameter groups.

    Attributes:
        hyperparameters: empty where the checkpoint has none for the group.
        states: names of its parameters' states, without the master weights and the step.
        step: as saved, None if the optimizer that saved kept none.
    """

    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    step: Any = None


def state_getter(group: StateGroup, state: str) -> Callable[[], torch.Tensor]:
    """Returns the group's live tensor of a state, once it is there."""
    return lambda: group.state()[state]


def make_states(group: StateGroup, saved: GroupState) -> None:
    """Give the base optimizer the states it will find after its first step; padding is zero in them."""
    state, master, step = group.state(), group.master(), saved.step
    if not saved.states and step is None:
        state.clear()  # saved before its first step, at which the optimizer makes states itself
    for name in saved.states:
        numel = group.placement(name).numel
        if not isinstance(state.get(name), torch.Tensor) or state[name].numel() != numel:
            state[name] = torch.zeros(numel, dtype=master.dtype, device=master.device)
    if step is None:
        return
    current = state.get(STEP)
    if isinstance(current, int) and isinstance(step, torch.Tensor):
        state[STEP] = int(step.item())
    elif isinstance(current, torch.Tensor):
        state[STEP] = torch.as_tensor(step, dtype=current.dtype, device=current.device).clone()
    else:
        state[STEP] = group.own_step(step)
