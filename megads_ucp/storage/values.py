# SPDX-License-Identifier: Apache-2.0
"""The file of what the optimizer keeps beside the tensors that are cut like its partition, ours alone.

Hyperparameters of parameter groups, and states that are one value for all parameters of a group, as Python and torch
have them; the manifest has the hyperparameters too, as JSON holds them. Where ranks differ in a value, the file has
that of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megads_ucp.errors import StorageError

Place = tuple[int, int]
"""Tensor-parallel rank and shard rank."""


@dataclass(frozen=True)
class GroupValues:
    """What ranks keep for one parameter group.

    Attributes:
        stage, index: the pipeline stage, and the group's place among the groups there.
        degree: number of shard ranks of the group.
        hyperparameters: the group's entry of ``param_groups``, without its parameters.
        scalars: states of the whole group by name, the step among them; tensors in host memory.
        on_device: names of the scalars that the optimizer keeps on the accelerator.
        differing: by place, the hyperparameters and scalars of ranks that differ from the first one's, given above.
        left_out: what the optimizer has and no resume could bring back: entries in words.
    """

    stage: int
    index: int
    degree: int
    hyperparameters: Mapping[str, Any]
    scalars: Mapping[str, Any]
    on_device: tuple[str, ...] = ()
    differing: Mapping[Place, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def of(self, place: Place) -> GroupValues:
        """As the rank at this place had them."""
        own = self.differing.get(place, {})
        return GroupValues(
            self.stage,
            self.index,
            self.degree,
            {**self.hyperparameters, **own.get("hyperparameters", {})},
            {**self.scalars, **own.get("scalars", {})},
            self.on_device,
        )

    def differing_names(self) -> list[str]:
        """Names of the values that are not the same on all ranks."""
        return sorted({name for kinds in self.differing.values() for values in kinds.values() for name in values})


def to_file(groups: Iterable[GroupValues]) -> dict[str, Any]:
    """As ``torch.save`` takes it and weights-only loading gives it back."""
    return {"groups": [asdict(group) for group in groups]}


def from_file(content: Any) -> tuple[GroupValues, ...]:
    """Inverse of :func:`to_file`.

    Raises:
        StorageError: the content is something else.
    """
    try:
        return tuple(GroupValues(**group) for group in content["groups"])
    except (KeyError, TypeError) as error:
        raise StorageError(f"the values of the optimizer's groups are malformed: {error!r}") from error
