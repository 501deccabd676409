# SPDX-License-Identifier: Apache-2.0
"""What a resume gives a parameter group beside the values of its fragments: hyperparameters, state names, step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.checkpoint.constants import PARAM_GROUPS

from megads_ucp.engine.state import NO_VALUES, StateGroup
from megads_ucp.errors import StorageError
from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.load.groups import match_groups, revived
from megads_ucp.storage.format import MASTER, STEP


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


def saved_groups_of(
    groups: Sequence[StateGroup], common: Mapping[str, Any], checkpoint: Checkpoint, strict: bool
) -> tuple[GroupState, ...]:
    """What the checkpoint has for each group.

    Args:
        groups: of this run.
        common: content of zero/optimizer_state.pt.
        checkpoint: the same.
        strict: whether every parameter must be in it.

    Raises:
        StorageError: a group has not the members that it was saved with, or was not trained.
    """
    hyperparameters = _hyperparameters(groups, common, checkpoint)
    states = [_states(group, checkpoint, strict) for group in groups]
    return tuple(GroupState(values, names, step) for values, (names, step) in zip(hyperparameters, states, strict=True))


def _hyperparameters(
    groups: Sequence[StateGroup], common: Mapping[str, Any], checkpoint: Checkpoint
) -> list[dict[str, Any]]:
    """What each group was saved with: by its members' names or, where the checkpoint does not say them, by position.

    Raises:
        StorageError: a group has not the members that it was saved with, or was not trained.
    """
    stored = [{key: value for key, value in group.items() if key not in NO_VALUES} for group in common[PARAM_GROUPS]]
    saved = checkpoint.groups()
    if not saved:
        if len(groups) != len(stored):
            raise StorageError(
                f"{checkpoint.directory} was saved with {len(stored)} parameter groups, this run has {len(groups)}: "
                "build the same groups, or load with load_optimizer_states=False."
            )
        return stored
    known = {name for group in saved for name in group.parameters}
    members = [[member.name for member in group.flat.members] for group in groups]
    for name in (name for names in members for name in names):
        if name not in known and checkpoint.has(name):
            raise StorageError(
                f"parameter {name} is trained in this run, but {checkpoint.directory} has no optimizer states of it: "
                "it was frozen, or another name of a tied parameter. Freeze or tie it here as well, or load with "
                "load_optimizer_states=False."
            )
    try:
        sources = match_groups(members, saved)
    except StorageError as error:
        raise StorageError(f"{checkpoint.directory}: {error}") from error
    # zero/optimizer_state.pt has the values of the first stage as they were, the manifest all as JSON holds them.
    return [
        {}
        if source is None
        else stored[source.index]
        if source.stage == saved[0].stage
        else revived(source.hyperparameters, group.hyperparameters())
        for source, group in zip(sources, groups, strict=True)
    ]


def _states(group: StateGroup, checkpoint: Checkpoint, strict: bool) -> tuple[tuple[str, ...], Any]:
    """Names of the states that the checkpoint has for the group's parameters, and their step.

    All of a group have the same. One that has none was not trained; if all have none, no step had been taken.
    """
    for member in group.flat.members:
        if strict or checkpoint.has(member.name):
            saved = checkpoint.states(member.name)
            if saved != [MASTER]:
                return tuple(name for name in saved if name not in (MASTER, STEP)), checkpoint.step(member.name)
    return (), None


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
