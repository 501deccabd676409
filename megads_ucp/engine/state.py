# SPDX-License-Identifier: Apache-2.0
"""What an export and a resume see of a running engine: plain data and a few callables, no objects of DeepSpeed's.

:mod:`megads_ucp.engine.adapter` makes these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO

from megads_ucp.layout.partition import FlatGroup, Fragment, Partition
from megads_ucp.storage.format import MASTER

NO_VALUES = ("params", "param_names")
"""Entries of torch's ``param_groups`` that say which parameters are in a group, not how they are trained."""


@dataclass(frozen=True)
class Coordinates:
    """Where this rank stands: pipeline stage, tensor-parallel rank, and the index of its mp_rank file."""

    stage: int
    stages: int
    tp_rank: int
    tp_degree: int
    mp_rank: int


@dataclass(frozen=True)
class StateGroup:
    """One flat parameter group of the optimizer on this rank.

    Attributes:
        flat: the group's flat buffer.
        shapes: each member's TP-local shape.
        ranks: global rank of every shard rank of the group's own process group, in shard order.
        shard_rank: this rank's place in ``ranks``.
        master: returns the live flat partition of master weights, 1-D, ``flat.partition_numel`` long.
        state: returns the base optimizer's live state of that partition.
        hyperparameters: returns the group's entry of ``param_groups`` without ``NO_VALUES``.
        set_hyperparameters: updates that entry.
        whole_states: names of states that the optimizer keeps for whole parameters, even where it holds a part only.
        own_step: a saved step as this optimizer keeps one; another one may have saved it.
        state_dtype: returns the dtype that this optimizer gives a new state, from the dtypes that the state and the
            master weights had where they were saved (None: unknown).
    """

    flat: FlatGroup
    shapes: Mapping[str, tuple[int, ...]]
    ranks: tuple[int, ...]
    shard_rank: int
    master: Callable[[], torch.Tensor]
    state: Callable[[], dict[str, Any]]
    hyperparameters: Callable[[], dict[str, Any]]
    set_hyperparameters: Callable[[Mapping[str, Any]], None]
    whole_states: frozenset[str] = frozenset()
    own_step: Callable[[Any], Any] = lambda step: step
    state_dtype: Callable[[torch.dtype | None, torch.dtype | None], torch.dtype] = lambda saved, master: torch.float32

    @property
    def partition(self) -> Partition:
        return self.flat.partition(self.shard_rank)

    def placement(self, state: str) -> Partition:
        """Where parameters lie in the optimizer's tensor of a state on this rank."""
        if state not in self.whole_states:
            return self.partition
        numels = {member.name: member.numel for member in self.flat.members}
        fragments, end = [], 0
        for fragment in self.partition.fragments:
            fragments.append(Fragment(fragment.name, numels[fragment.name], 0, end))
            end += numels[fragment.name]
        return Partition(end, tuple(fragments))

    def sharded_states(self) -> dict[str, torch.Tensor]:
        """Every state, partitioned like the master weights, the master weights first, by state name.

        The test of shape is DeepSpeed's own (tensor_fragment.set_optim_state_fragment).
        """
        states = {MASTER: self.master()}
        for name, value in self.state().items():
            if self._is_sharded(name, value):
                states[name] = self._partition_of(name, value) if name in self.whole_states else value
        return states

    def other_states(self) -> dict[str, Any]:
        """Every state that is not partitioned like the master weights, the step among them, by state name."""
        return {name: value for name, value in self.state().items() if not self._is_sharded(name, value)}

    def _is_sharded(self, name: str, value: Any) -> bool:
        return name in self.whole_states or (torch.is_tensor(value) and value.shape == self.master().shape)

    def _partition_of(self, state: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's partition of a state that it keeps whole parameters of; padding is zero."""
        own = value.new_zeros(self.flat.partition_numel)
        for fragment, whole in zip(self.partition.fragments, self.placement(state).fragments, strict=True):
            start = whole.partition_start + fragment.param_start
            own[fragment.partition_start : fragment.partition_stop] = value[start : start + fragment.numel]
        return own


@dataclass(frozen=True)
class EngineState:
    """Everything of an engine that an export writes or a restore fills.

    Attributes:
        coordinates: this rank's place in the model-parallel grid.
        groups: the optimizer's flat groups.
        unowned: frozen parameters and persistent buffers, which no optimizer owns, by state-dict name.
        parameters: the module's parameters by the names DeepSpeed knows them by, aliases of tied ones included.
        module: the model.
        tied: names of the parameters that other pipeline stages have copies of, which DeepSpeed keeps equal.
        stray_states: returns the keys of the optimizer's state that are none of its partitions.
        common_optimizer_state: returns what zero/optimizer_state.pt holds.
        model_state: returns what this rank's mp_rank file holds without ``module``, given the client state and whether
            frozen parameters are excluded.
        half_precision: whether the model computes in fp16, the one precision that a loss scale is for.
        facts: topology, precision and optimizer class for the manifest, JSON-able.
    """

    coordinates: Coordinates
    groups: tuple[StateGroup, ...]
    unowned: Callable[[], dict[str, torch.Tensor]]
    parameters: Mapping[str, torch.nn.Parameter]
    module: torch.nn.Module
    tied: frozenset[str]
    stray_states: Callable[[], list[str]]
    common_optimizer_state: Callable[[], dict[str, Any]]
    model_state: Callable[[Mapping[str, Any], bool], dict[str, Any]]
    half_precision: bool
    facts: Callable[[], dict[str, Any]]

    def client_info(self) -> Mapping[str, Any] | None:
        """The model's own ``universal_checkpoint_info``: a dict (AutoTP) or a method (Megatron-DeepSpeed)."""
        info: Any = getattr(self.module, UNIVERSAL_CHECKPOINT_INFO, None)
        return info() if callable(info) else info

    @property
    def first_of_replicas(self) -> bool:
        """Whether this rank stands for its data-parallel replicas in what they all hold alike."""
        return self.groups[0].shard_rank == 0

    def frozen(self) -> list[str]:
        """Names of the parameters that are not trained."""
        unowned = self.unowned()
        return [name for name, parameter in self.parameters.items() if name in unowned and not parameter.requires_grad]
