# SPDX-License-Identifier: Apache-2.0
"""Which saved parameter group each group of this run continues: told by the names of its members, not by its place.

A pipeline stage has the groups that its own parameters make. Clients leave out those that would be empty (Megatron's
get_param_groups does), so the same group may have another index on each stage, and another one after a change of the
number of stages. Pure: names and numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megads_ucp.errors import StorageError


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group of one pipeline stage, as the manifest has it.

    Attributes:
        hyperparameters: as JSON holds them; see :func:`revived`.
        alone: whether the run that saved had no other stages.
    """

    stage: int
    index: int
    parameters: frozenset[str]
    hyperparameters: Mapping[str, Any]
    alone: bool

    def __str__(self) -> str:
        return f"group {self.index}" if self.alone else f"group {self.index} of stage {self.stage}"


def saved_groups(entries: Iterable[Mapping[str, Any]]) -> tuple[SavedGroup, ...]:
    """The groups of a manifest, by stage and index."""
    entries = sorted(entries, key=lambda entry: (entry["stage"], entry["index"]))
    alone = len({entry["stage"] for entry in entries}) == 1
    return tuple(
        SavedGroup(e["stage"], e["index"], frozenset(e["parameters"]), e["hyperparameters"], alone) for e in entries
    )


def match_groups(mine: Sequence[Sequence[str]], saved: Sequence[SavedGroup]) -> list[SavedGroup | None]:
    """The saved group that each of this rank's groups, given by its members' names, continues.

    Members may come from several stages' groups, if these have the same hyperparameters. A group without known members
    (a stage may have none of some group) continues the one at its place where the numbers of groups are equal, and
    nothing otherwise.

    Groups that are merged, split or swapped are refused even where names would tell the hyperparameters: the state of
    a learning-rate scheduler goes by their order.

    Raises:
        StorageError: they are, or two sources of a group have different hyperparameters.
    """
    of_member: dict[str, list[SavedGroup]] = defaultdict(list)
    for group in saved:
        for name in group.parameters:
            of_member[name].append(group)
    sources: list[dict[SavedGroupKey, tuple[SavedGroup, str]]] = []
    for members in mine:
        found: dict[SavedGroupKey, tuple[SavedGroup, str]] = {}
        for name in members:
            for group in of_member.get(name, ()):
                found.setdefault((group.stage, group.index), (group, name))
        sources.append(found)
    for index, found in enumerate(sources):
        _check_alike(index, list(found.values()))
    _check_order(sources)
    by_place = _by_place(len(mine), saved)
    return [found[min(found)][0] if found else place for found, place in zip(sources, by_place, strict=True)]


SavedGroupKey = tuple[int, int]
"""Stage and index."""


def _by_place(count: int, saved: Sequence[SavedGroup]) -> Sequence[SavedGroup | None]:
    first = [group for group in saved if group.stage == saved[0].stage]
    return first if len(first) == count else [None] * count


def _check_alike(index: int, sources: Sequence[tuple[SavedGroup, str]]) -> None:
    """Check that a group of this run continues one group of each stage, and that these have the same values."""
    for number, (group, name) in enumerate(sources):
        for other, its_name in sources[:number]:
            differing = [
                f"{key} ({other.hyperparameters.get(key)} and {group.hyperparameters.get(key)})"
                for key in {**other.hyperparameters, **group.hyperparameters}
                if other.hyperparameters.get(key) != group.hyperparameters.get(key)
            ]
            if differing or other.stage == group.stage:
                values = f" with different {', '.join(differing)}" if differing else ""
                raise StorageError(
                    f"parameter group {index} of this run holds parameters that were saved in 2 parameter "
                    f"groups{values}: {its_name} in {other}, {name} in {group}. Build the same groups, or load with "
                    "load_optimizer_states=False."
                )


def _check_order(sources: Sequence[Mapping[SavedGroupKey, tuple[SavedGroup, str]]]) -> None:
    """Check that the groups of each stage come in the same order here, each in one group only."""
    last: dict[int, tuple[int, SavedGroup, str]] = {}
    for index, found in enumerate(sources):
        for group, name in found.values():
            if group.stage in last and last[group.stage][1].index >= group.index:
                before, other, its_name = last[group.stage]
                raise StorageError(
                    f"parameter {its_name}, saved in {other}, is in parameter group {before} of this run, and {name}, "
                    f"saved in {group}, in group {index}: groups must keep their order and stay whole, since the state "
                    "of a learning-rate scheduler goes by it. Build the same groups, or load with "
                    "load_optimizer_states=False."
                )
            last[group.stage] = index, group, name


def revived(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters from a manifest, as what they are in this run; what JSON could not hold keeps its value here."""
    return {key: _revived(value, current[key]) if key in current else value for key, value in saved.items()}


def _revived(value: Any, current: Any) -> Any:
    if isinstance(current, torch.Tensor) and isinstance(value, bool | int | float):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    told_by_repr = isinstance(value, str) and not isinstance(current, str | None)
    return current if told_by_repr else value
