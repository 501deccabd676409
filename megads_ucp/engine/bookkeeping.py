# SPDX-License-Identifier: Apache-2.0
"""Where the optimizers keep their groups, and what is mended there."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import link_hp_params

from megads_ucp.engine.patches import Patches
from megads_ucp.engine.state import StateGroup


@dataclass(frozen=True)
class Bookkeeping:
    """Where one optimizer class keeps its groups: the same facts under each class's own names."""

    flat: list[torch.Tensor]
    members: list[list[tuple[torch.nn.Parameter, tuple[int, ...], int]]]
    """Per group, in flat order: the parameter, its TP-local shape, its offset."""
    masters: list[torch.Tensor]
    paddings: str
    """Name of the list that the optimizer writes as ``group_paddings``."""


def bookkeeping(optimizer: Any) -> Bookkeeping:
    """Of a ``BF16_Optimizer`` or ``DeepSpeedZeroOptimizer``."""
    if isinstance(optimizer, BF16_Optimizer):
        members = []
        for group in optimizer.bf16_groups:
            offset, placed = 0, []
            for parameter in group:  # end to end, see BF16_Optimizer._flatten_dense_tensors_aligned
                placed.append((parameter, tuple(parameter.shape), offset))
                offset += parameter.numel()
            members.append(placed)
        return Bookkeeping(optimizer.bf16_groups_flat, members, optimizer.fp32_groups_flat_partition, "group_paddings")
    # The meta tensors keep their shapes while offload_states() holds the parameters' memory elsewhere.
    members = [
        [(parameter, tuple(meta.shape), offset) for parameter, meta, offset in zip(*group, strict=True)]
        for group in zip(
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_meta,
            optimizer.round_robin_bit16_offsets,
            strict=True,
        )
    ]
    return Bookkeeping(
        optimizer.bit16_groups_flat, members, optimizer.single_partition_of_fp32_groups, "groups_padding"
    )


def mend(optimizer: Any, groups: Sequence[StateGroup], patches: Patches) -> None:
    """Make what the optimizer itself knows about its partition true; it goes into the regular checkpoint as well.

    ``BF16_Optimizer`` books the whole alignment tail on the last rank, even where it is longer than a partition.
    ``DeepSpeedZeroOptimizer`` lays parameters out in round-robin order but links them to their master fragments in
    the original order (``_link_all_hp_params`` passes offsets only where it pads between parameters).

    Args:
        optimizer: partitioned.
        groups: its groups.
        patches: takes the changes.
    """
    true_paddings = [group.flat.group_padding(group.shard_rank) for group in groups]
    patches.set(optimizer, bookkeeping(optimizer).paddings, true_paddings)
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.round_robin_gradients:
        patches.at_undo(optimizer, DeepSpeedZeroOptimizer._link_all_hp_params)
        patches.bind(optimizer, "_link_all_hp_params", functools.partial(_link_in_flat_order, weakref.ref(optimizer)))
        optimizer._link_all_hp_params()
        patches.set(optimizer, "_param_slice_mappings", optimizer._create_param_mapping())


def _link_in_flat_order(optimizer_ref: weakref.ref[Any]) -> None:
    """``DeepSpeedZeroOptimizer._link_all_hp_params``, always with the true offsets."""
    optimizer = optimizer_ref()
    assert optimizer is not None
    if optimizer.cpu_offload:
        optimizer._get_offload_gradient_dict()
    for index, group in enumerate(optimizer.bit16_groups):
        offset_of = {
            id(parameter): offset
            for parameter, offset in zip(
                optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index], strict=True
            )
        }
        process_group = optimizer.real_dp_process_group[index]
        size = optimizer.bit16_groups_flat[index].numel() // ds_comm.get_world_size(group=process_group)
        link_hp_params(
            lp_param_list=group,
            flat_hp_partition=optimizer.single_partition_of_fp32_groups[index],
            gradient_dict=optimizer.averaged_gradients,
            offload_gradient_dict=optimizer.offload_gradient_dict,
            use_offload=optimizer.cpu_offload,
            param_group_index=index,
            partition_start=ds_comm.get_rank(group=process_group) * size,
            partition_size=size,
            dp_group=process_group,
            param_offsets=[offset_of[id(parameter)] for parameter in group],
        )
