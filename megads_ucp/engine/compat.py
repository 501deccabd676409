# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in DeepSpeed."""

from __future__ import annotations

import inspect

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megads_ucp.errors import UnsupportedError

ATTRIBUTES_USED: dict[type, tuple[str, ...]] = {
    PipelineModule: ("get_tied_weights_and_groups",),
    DeepSpeedEngine: (
        *("save_checkpoint", "load_checkpoint", "load_universal_checkpoint", "checkpoint_mp_rank", "global_steps"),
        *("optimizer", "module", "mpu", "_config", "has_moe_layers", "fp16_enabled", "use_node_local_storage"),
        *("zero_optimization", "zero_optimization_stage", "zero_optimization_partition_gradients"),
        *("zero_nvme_offload_optimizer", "_common_checkpoint_state"),
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "data_parallel_group"),
    ),
    BF16_Optimizer: (
        *("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition", "real_dp_process_group", "group_paddings"),
        *("param_names", "optimizer", "using_real_optimizer", "dp_process_group", "state_dict", "_load_global_state"),
        *("load_hp_checkpoint_state_from_checkpoint_dir", "_hp_optimizer_states_linked"),
        "_lazy_init_hp_params_optimizer_state",
    ),
    DeepSpeedZeroOptimizer: (
        *("bit16_groups", "round_robin_bit16_groups", "round_robin_bit16_offsets", "round_robin_bit16_meta"),
        *("bit16_groups_flat", "single_partition_of_fp32_groups", "real_dp_process_group", "groups_padding"),
        *("param_names", "optimizer", "dp_process_group", "round_robin_gradients", "zenflow", "averaged_gradients"),
        *("offload_gradient_dict", "cpu_offload", "_link_all_hp_params", "_create_param_mapping", "state_dict"),
        *("_get_offload_gradient_dict", "_param_slice_mappings", "_load_global_state", "_hp_optimizer_states_linked"),
        *("load_hp_checkpoint_state_from_checkpoint_dir", "_lazy_init_hp_params_optimizer_state", "offloaded_states"),
    ),
}
"""Every attribute of DeepSpeed's classes that this package reads, calls or shadows; checked by ``install``."""


def check_deepspeed() -> None:
    """Raise UnsupportedError if a class lacks an attribute in use; attributes of instances count by their mention."""
    for cls, wanted in ATTRIBUTES_USED.items():
        members = [(name, member) for base in cls.__mro__ for name, member in vars(base).items()]
        mentioned = (inspect.unwrap(member).__code__.co_names for _, member in members if inspect.isfunction(member))
        known = {name for name, _ in members}.union(*mentioned)
        if missing := [name for name in wanted if name not in known]:
            import deepspeed

            raise UnsupportedError(
                f"DeepSpeed {deepspeed.__version__} has no {cls.__name__}.{missing[0]}, which megads_ucp relies on "
                f"(in all: {missing}). Versions from 0.19.7 on are known to work."
            )
