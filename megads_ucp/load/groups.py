# SPDX-License-Identifier: Apache-2.0
"""What each parameter group of this run continues: the saved group with its members, by their names and not by place.

A pipeline stage has the groups that its own parameters make. Clients leave out those that would be empty (as
Megatron's get_param_groups does), so the same group may have another index on each stage, and another one when the
number of stages changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint.constants import PARAM_GROUPS

from megads_ucp.engine.state import NO_VALUES, EngineState, StateGroup
from megads_ucp.errors import StorageError
from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.load.states import GroupState
from megads_ucp.storage import GroupRecord
from megads_ucp.storage.format import MASTER, STEP
from megads_ucp.storage.values import GroupValues, Place


@dataclass(frozen=True)
class _Source:
    """A saved group that a group of this run continues.

    Attributes:
        group: as saved.
        member: name of a parameter in both groups.
        name: of the saved group in messages; with its stage if the run that saved had several.
    """

    group: GroupRecord
    member: str
    name: str

    @property
    def place(self) -> tuple[int, int]:
        return self.group.stage, self.group.index


def saved_groups_of(
    state: EngineState, common: Mapping[str, Any], checkpoint: Checkpoint, strict: bool
) -> tuple[GroupState, ...]:
    """What the checkpoint has for each group of this rank.

    Args:
        state: of this run.
        common: content of zero/optimizer_state.pt.
        checkpoint: the same.
        strict: whether every parameter must be in it.

    Raises:
        StorageError: a group has not the members that it was saved with, or was not trained, or its optimizer kept
            more than could be saved.
    """
    values = _values(state, common, checkpoint)
    return tuple(_group_state(group, own, checkpoint, strict) for group, own in zip(state.groups, values, strict=True))


def _values(state: EngineState, common: Mapping[str, Any], checkpoint: Checkpoint) -> list[GroupValues | None]:
    """What each group was saved with: by its members' names or, where the checkpoint does not say them, by position."""
    stored = [{key: value for key, value in group.items() if key not in NO_VALUES} for group in common[PARAM_GROUPS]]
    saved = checkpoint.groups()
    if not saved:
        if len(state.groups) != len(stored):
            raise StorageError(
                f"{checkpoint.directory} was saved with {len(stored)} parameter groups, this run has "
                f"{len(state.groups)}: build the same groups, or load with load_optimizer_states=False."
            )
        return [GroupValues(0, index, 0, values, {}) for index, values in enumerate(stored)]
    sources = _sources_of(state, checkpoint, saved)
    kept = {(values.stage, values.index): values for values in checkpoint.values()}
    if left_out := sorted({entry for values in kept.values() for entry in values.left_out}):
        raise StorageError(
            f"{checkpoint.directory} lacks part of the optimizer's state, as its export has warned: {left_out}. Load "
            "with load_optimizer_states=False, or load the regular checkpoint at the topology it was saved at."
        )
    found: list[GroupValues | None] = []
    for source, group in zip(sources, state.groups, strict=True):
        if source is None:
            found.append(None)
        elif (source.stage, source.index) in kept:
            values = kept[source.stage, source.index]
            found.append(values.of(_place_in(checkpoint, values, state, group)))
        else:  # an export of version 0.1, with the values of the first stage as they were, and all as JSON holds them
            first = source.stage == saved[0].stage
            given = stored[source.index] if first else source.hyperparameters
            found.append(GroupValues(source.stage, source.index, 0, given, {}))
    return found


def _place_in(checkpoint: Checkpoint, values: GroupValues, state: EngineState, group: StateGroup) -> Place:
    """This rank's place in the group that it continues, at the same topology; at another one the first rank's."""
    same = checkpoint.has_grid(state.coordinates) and values.degree == len(group.ranks)
    return (state.coordinates.tp_rank, group.shard_rank) if same else (-1, -1)


def _sources_of(state: EngineState, checkpoint: Checkpoint, saved: tuple[GroupRecord, ...]) -> list[GroupRecord | None]:
    """The saved group that each group of this rank continues."""
    known = {name for group in saved for name in group.parameters}
    members = [[member.name for member in group.flat.members] for group in state.groups]
    for name in (name for names in members for name in names):
        if name not in known and checkpoint.has(name):
            raise StorageError(
                f"parameter {name} is trained in this run, but {checkpoint.directory} has no optimizer states of it: "
                "it was frozen, or another name of a tied parameter. Freeze or tie it here as well, or load with "
                "load_optimizer_states=False."
            )
    try:
        return match_groups(members, saved)
    except StorageError as error:
        raise StorageError(f"{checkpoint.directory}: {error}") from error


def _group_state(group: StateGroup, values: GroupValues | None, checkpoint: Checkpoint, strict: bool) -> GroupState:
    """What the checkpoint has for a group that continues one with these values, None if it continues none.

    All parameters of a group have the same states. One that has none was not trained; if all have none, no step had
    been taken, or the optimizer keeps no tensors.
    """
    values = values or GroupValues(0, 0, 0, {}, {})
    candidates = (m.name for m in group.flat.members if strict or checkpoint.has(m.name))
    name = next((name for name in candidates if checkpoint.states(name) != [MASTER]), None)
    states = [] if name is None else checkpoint.states(name)
    dtypes = {} if name is None else checkpoint.state_dtypes(name)
    step = {STEP: checkpoint.step(name)} if name is not None and STEP in states else {}
    return GroupState(
        revived(values.hyperparameters, group.hyperparameters()),
        {state: dtypes.get(state) for state in states if state not in (MASTER, STEP)},
        dtypes.get(MASTER),
        {**step, **values.scalars},
        values.on_device,
    )


def match_groups(groups: Sequence[Sequence[str]], saved: Sequence[GroupRecord]) -> list[GroupRecord | None]:
    """The saved group that each group of this rank continues.

    Members may come from groups of several stages, if these have the same hyperparameters. A group without known
    members (a stage may have none of some group) continues the one at its place where the numbers of groups are equal,
    and nothing otherwise.

    Groups that are merged, split or swapped are refused even where names would determine the hyperparameters: the state
    of a learning-rate scheduler goes by the order of groups.

    Args:
        groups: names of the members of each group of this rank.
        saved: of all stages, by stage and index.

    Raises:
        StorageError: groups are merged, split or swapped, or a group has two sources with other hyperparameters.
    """
    sources = _sources(groups, saved)
    for index, found in enumerate(sources):
        _check_alike(index, found)
    _check_order(sources)
    by_place = _by_place(len(groups), saved)
    return [
        min(found, key=lambda source: source.place).group if found else place
        for found, place in zip(sources, by_place, strict=True)
    ]


def _sources(groups: Sequence[Sequence[str]], saved: Sequence[GroupRecord]) -> list[list[_Source]]:
    """The saved groups that hold members of each group of this rank, in the order of the members."""
    several = len({group.stage for group in saved}) > 1
    by_member: dict[str, list[GroupRecord]] = defaultdict(list)
    for group in saved:
        for name in group.parameters:
            by_member[name].append(group)
    sources = []
    for members in groups:
        found: dict[tuple[int, int], _Source] = {}
        for member in members:
            for group in by_member.get(member, ()):
                name = f"group {group.index}" + (f" of stage {group.stage}" if several else "")
                found.setdefault((group.stage, group.index), _Source(group, member, name))
        sources.append(list(found.values()))
    return sources


def _by_place(count: int, saved: Sequence[GroupRecord]) -> Sequence[GroupRecord | None]:
    first = [group for group in saved if group.stage == saved[0].stage]
    return first if len(first) == count else [None] * count


def _check_alike(index: int, sources: Sequence[_Source]) -> None:
    """Check that a group of this run continues one group of each stage, and that these have the same values."""
    for number, source in enumerate(sources):
        for other in sources[:number]:
            before, after = other.group.hyperparameters, source.group.hyperparameters
            differing = [
                f"{key} ({before.get(key)} and {after.get(key)})"
                for key in {**before, **after}
                if before.get(key) != after.get(key)
            ]
            if differing or other.group.stage == source.group.stage:
                values = f" with different {', '.join(differing)}" if differing else ""
                raise StorageError(
                    f"parameter group {index} of this run holds parameters that were saved in 2 parameter "
                    f"groups{values}: {other.member} in {other.name}, {source.member} in {source.name}. Build the same "
                    "groups, or load with load_optimizer_states=False."
                )


def _check_order(sources: Sequence[Sequence[_Source]]) -> None:
    """Check that the groups of each stage come in the same order here, each in one group only."""
    last: dict[int, tuple[int, _Source]] = {}
    for index, found in enumerate(sources):
        for source in found:
            stage = source.group.stage
            if stage in last and last[stage][1].group.index >= source.group.index:
                before, other = last[stage]
                raise StorageError(
                    f"parameter {other.member}, saved in {other.name}, is in parameter group {before} of this run, and "
                    f"{source.member}, saved in {source.name}, in group {index}: groups must keep their order and stay "
                    "whole, since the state of a learning-rate scheduler goes by it. Build the same groups, or load "
                    "with load_optimizer_states=False."
                )
            last[stage] = index, source


def revived(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of a manifest with the types that they have in this run.

    Args:
        saved: as JSON holds them.
        current: those of this run; they replace a saved value that JSON could not hold.
    """
    return {key: _revived(value, current[key]) if key in current else value for key, value in saved.items()}


def _revived(value: Any, current: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(current, torch.Tensor | None):
        return value.item()
    if isinstance(current, torch.Tensor) and isinstance(value, bool | int | float | torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    only_its_repr = isinstance(value, str) and not isinstance(current, str | None)
    return current if only_its_repr else value
