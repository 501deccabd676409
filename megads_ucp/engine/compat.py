# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in DeepSpeed: every class, attribute and global that it touches; versions tried."""

from __future__ import annotations

import inspect
from types import ModuleType

import deepspeed
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject import layers
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from megads_ucp.errors import UnsupportedError

VERSIONS_TRIED = ("0.19.8",)

PICKLED_CLASSES: tuple[type, ...] = (LossScaler, DynamicLossScaler, ZeroStageEnum)
"""Classes of DeepSpeed's that it pickles into zero/optimizer_state.pt."""

ATTRIBUTES_USED: dict[type | ModuleType, tuple[str, ...]] = {
    PipelineModule: ("get_tied_weights_and_groups",),
    DeepSpeedConfig: (
        *("_batch_assertion", "_param_dict", "train_batch_size", "train_micro_batch_size_per_gpu", "world_size"),
        "tensor_parallel_config",
    ),
    DeepSpeedEngine: (
        *("save_checkpoint", "load_checkpoint", "load_universal_checkpoint", "checkpoint_mp_rank", "global_steps"),
        *("optimizer", "module", "mpu", "_config", "has_moe_layers", "fp16_enabled", "use_node_local_storage"),
        *("zero_optimization", "zero_optimization_stage", "zero_optimization_partition_gradients"),
        *("zero_nvme_offload_optimizer", "_common_checkpoint_state"),
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "data_parallel_group"),
        *("seq_data_parallel_group", "seq_dp_world_size", "sequence_parallel_size"),
        *("mp_world_size", "autotp_size", "destroy", "_save_moe_checkpoint"),
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
    InferenceEngine: (
        *("_create_model_parallel_group", "inference_mp_group", "inference_ep_group", "expert_mp_group"),
        *("_config", "_generate", "module", "mpu"),
    ),
    TensorParallel_Layer: ("tp_overlap_comm", "keep_module_on_host", "tp_world_size"),
    layers: ("DEEPSPEED_AUTOTP_MODE",),
    init_utils: ("_TP_MODEL_INIT_ARGS", "merge_tp_model_init_into_config"),
    groups: (
        *("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mesh_device", "mpu"),
        *(
            "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
            "_MPU_TENSOR_MODEL_PARALLEL_RANK",
            "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
        ),
        *("expert_tensor_parallel_world_size", "_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS"),
        *("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS", "_init_tp_mesh_device"),
        *("get_tensor_model_parallel_group", "_get_model_parallel_world_size"),
    ),
}
"""What the package reads, calls, replaces or shadows of DeepSpeed's classes and modules."""


def check_deepspeed() -> None:
    """Check that this DeepSpeed has everything in use. Attributes of instances count by their mention in a method.

    Raises:
        UnsupportedError: it has not.
    """
    missing = [f"{owner.__name__}.{name}" for owner in ATTRIBUTES_USED for name in _missing(owner)]
    if missing:
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__} has no {missing[0]}, which megads_ucp relies on (in all: {missing}). "
            f"Versions tried: {', '.join(VERSIONS_TRIED)}. Install one of these, or a newer megads_ucp."
        )


def _missing(owner: type | ModuleType) -> list[str]:
    bases = owner.__mro__ if isinstance(owner, type) else (owner,)
    members = [(name, member) for base in bases for name, member in vars(base).items()]
    functions = [inspect.unwrap(member) for _, member in members if inspect.isfunction(member)]
    mentioned = (function.__code__.co_names for function in functions) if isinstance(owner, type) else ()
    annotated = (name for base in bases for name in vars(base).get("__annotations__", {}))
    known = {name for name, _ in members}.union(annotated, *mentioned)
    return [name for name in ATTRIBUTES_USED[owner] if name not in known]
