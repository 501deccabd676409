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
        states: dtypes of its parameters' states where they were saved (None: unknown) by name, without the master
            weights and the step.
        master: dtype of the master weights there.
        scalars: states of the whole group by name, the step among them if the optimizer that saved kept one.
        on_device: names of the scalars that were on the accelerator.
    """

    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, torch.dtype | None] = field(default_factory=dict)
    master: torch.dtype | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)
    on_device: tuple[str, ...] = ()


def state_getter(group: StateGroup, state: str) -> Callable[[], torch.Tensor]:
    """Returns the group's live tensor of a state, once it is there."""
    return lambda: group.state()[state]


def make_states(group: StateGroup, saved: GroupState) -> None:
    """Give the base optimizer the states it will find after its first step; padding is zero in them."""
    state, master = group.state(), group.master()
    if not saved.states and not saved.scalars:
        state.clear()  # saved before its first step, at which the optimizer makes states itself
    for name, dtype in saved.states.items():
        numel, current = group.placement(name).numel, state.get(name)
        if not isinstance(current, torch.Tensor) or current.numel() != numel:
            state[name] = torch.zeros(numel, dtype=group.state_dtype(dtype, saved.master), device=master.device)
    for name, value in saved.scalars.items():
        kept = _as_kept(value, state.get(name))
        state[name] = group.own_step(kept) if name == STEP and name not in state else kept
        if name in saved.on_device:
            state[name] = state[name].to(master.device)


def _as_kept(value: Any, current: Any) -> Any:
    """A saved scalar as this run's optimizer keeps it, a tensor or a number, where that can be seen."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
        return value
    if isinstance(current, int | float) and isinstance(value, torch.Tensor):
        return type(current)(value.item())
    if isinstance(current, torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device).clone()
    return value.clone() if isinstance(value, torch.Tensor) else value
