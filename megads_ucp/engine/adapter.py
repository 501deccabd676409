# SPDX-License-Identifier: Apache-2.0
"""How a DeepSpeed engine is read: its optimizer's own bookkeeping as a :class:`megads_ucp.live.EngineState`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    PARAM_GROUPS,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

from megads_ucp.engine.bookkeeping import Bookkeeping, bookkeeping
from megads_ucp.engine.state import NO_VALUES, Coordinates, EngineState, StateGroup
from megads_ucp.layout.partition import FlatGroup, Member


def why_unsupported(engine: DeepSpeedEngine) -> str | None:
    """One sentence that says why this engine cannot be exported and what to do; None if it can."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 0:
        return "ZeRO stage 0 keeps no partitioned master weights: set zero_optimization.stage to 1"
    if stage == 3:
        return "ZeRO stage 3 is not supported: set zero_optimization.stage to 1 or 2, or convert with ds_to_universal"
    if engine.has_moe_layers:
        return "expert-parallel groups are not supported yet: use the stock converter (ds_to_universal) for MoE models"
    if engine.zero_nvme_offload_optimizer():
        return 'NVMe offload is not supported: set zero_optimization.offload_optimizer.device to "cpu" or "none"'
    if getattr(optimizer, "zenflow", False):
        return "ZenFlow is not supported: remove zero_optimization.zenflow"
    if not isinstance(optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer):
        return f"optimizer class {type(optimizer).__name__} is not supported: use ZeRO stage 1 or 2"
    if not getattr(optimizer, "using_real_optimizer", True):
        return "the engine has no optimizer: give deepspeed.initialize one"
    if engine.use_node_local_storage():
        return (
            "checkpoint.use_node_local_storage gives every node a save_dir of its own, but a universal checkpoint is "
            "one directory: save to a file system all ranks share"
        )
    return None


def why_not_loadable(engine: DeepSpeedEngine) -> str | None:
    """:func:`why_unsupported`, of engines that DeepSpeed cannot load an export into either; None of any other."""
    if engine.zero_optimization_stage() in (0, 3) or engine.has_moe_layers:
        return why_unsupported(engine)
    return None


def _coordinates(engine: DeepSpeedEngine) -> Coordinates:
    mpu = engine.mpu
    for name in ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank"):
        if hasattr(mpu, name):
            stage = getattr(mpu, name)()
            break
    else:
        stage = 0
    tp_rank, tp_degree = _tensor_parallel(engine)
    return Coordinates(
        stage=stage,
        stages=bwc_pipeline_parallel_world_size(mpu),
        tp_rank=tp_rank,
        tp_degree=tp_degree,
        mp_rank=engine.checkpoint_mp_rank,
    )


def _tensor_parallel(engine: DeepSpeedEngine) -> tuple[int, int]:
    """This rank's number among those that cut parameters between them, and how many they are.

    An mpu may call its sequence-parallel group model-parallel as well (parallel_state_sp in deepspeed/runtime/
    sequence_parallel, which Hugging Face and ALST pass). Those ranks hold the same parameters, and ZeRO partitions over
    them: then the degrees multiply to more than all ranks. DeepSpeed's own view is TP 1, too
    (``_get_model_parallel_world_size`` in deepspeed/utils/groups.py).
    """
    mpu = engine.mpu
    degree = bwc_tensor_model_parallel_world_size(mpu)
    if degree > 1 and degree == engine.sequence_parallel_size:
        shards = ds_comm.get_world_size(group=engine.seq_data_parallel_group)
        if degree * bwc_pipeline_parallel_world_size(mpu) * shards > ds_comm.get_world_size():
            return 0, 1
    return bwc_tensor_model_parallel_rank(mpu), degree


def data_parallel_degree(engine: DeepSpeedEngine) -> int:
    """How many ranks or groups of ranks have samples of their own; sequence-parallel ranks share theirs."""
    if engine.data_parallel_group is None:  # of an mpu for sequence parallelism alone: None would mean all ranks
        return int(engine.seq_dp_world_size // engine.sequence_parallel_size)
    return int(ds_comm.get_world_size(group=engine.data_parallel_group))


def engine_state(engine: DeepSpeedEngine) -> EngineState:
    optimizer = engine.optimizer
    books = bookkeeping(optimizer)
    groups = tuple(_state_group(optimizer, books, index) for index in range(len(books.members)))
    return EngineState(
        coordinates=_coordinates(engine),
        groups=groups,
        unowned=functools.partial(_unowned, engine.module, {m.name for g in groups for m in g.flat.members}),
        parameters=dict(engine.module.named_parameters(remove_duplicate=False)),
        module=engine.module,
        tied=_tied(engine.module),
        stray_states=functools.partial(_stray_states, optimizer, books.masters),
        common_optimizer_state=functools.partial(_common_optimizer_state, optimizer),
        model_state=functools.partial(_model_state, weakref.ref(engine)),
        half_precision=engine.fp16_enabled(),
        facts=functools.partial(_facts, weakref.ref(engine), _batch_size(engine)),
    )


def _state_group(optimizer: Any, books: Bookkeeping, index: int) -> StateGroup:
    placed = [(optimizer.param_names[parameter], shape, offset) for parameter, shape, offset in books.members[index]]
    process_group = optimizer.real_dp_process_group[index]
    ranks = tuple(ds_comm.get_all_ranks_from_group(process_group))
    members = tuple(Member(name, torch.Size(shape).numel(), offset) for name, shape, offset in placed)
    masters = books.masters
    return StateGroup(
        flat=FlatGroup(members, books.flat[index].numel(), len(ranks)),
        shapes={name: shape for name, shape, _ in placed},
        ranks=ranks,
        shard_rank=ds_comm.get_rank(group=process_group),
        master=lambda: masters[index],
        # Through the optimizer each time: DeepSpeed replaces Adagrad after it has partitioned.
        state=lambda: optimizer.optimizer.state[masters[index]],
        hyperparameters=lambda: {
            key: value for key, value in optimizer.optimizer.param_groups[index].items() if key not in NO_VALUES
        },
        set_hyperparameters=lambda values: optimizer.optimizer.param_groups[index].update(values),
        whole_states=_whole_states(optimizer, index),
        state_dtype=lambda saved, master: _state_dtype(optimizer.optimizer, masters[index].dtype, saved, master),
        own_step=lambda step: _own_step(optimizer.optimizer, index, masters[index].device, step),
    )


def _whole_states(optimizer: Any, index: int) -> frozenset[str]:
    """DeepSpeedZeroOptimizer orthogonalizes whole matrices on every rank that holds a part of them, from momentum that
    it keeps there whole (_muon_momentum_buffer); with CPU offload, it gathers them from partitions instead."""
    muon = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.optimizer.param_groups[index].get("use_muon")
    return frozenset({"momentum_buffer"} if muon and not optimizer.cpu_offload else ())


def _tied(module: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters that a ``TiedLayerSpec`` names in ``tied_weight_attr``.

    Of these alone, and not of all that a tied module holds, stages start with equal values and add up their gradients
    (``_synchronize_tied_weights`` in deepspeed/runtime/pipe/module.py, ``_exec_reduce_tied_grads`` in engine.py).
    """
    if not isinstance(module, PipelineModule):
        return frozenset()
    weights = {id(weight) for weight, _ in module.get_tied_weights_and_groups()}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in weights)


def _own_step(optimizer: torch.optim.Optimizer, index: int, device: torch.device, step: Any) -> Any:
    """torch's optimizers keep a float32 tensor, beside the parameter if a kernel is to read it there (_init_group in
    torch/optim/adam.py), and refuse a number; DeepSpeed's DeepSpeedCPUAdam and FusedAdam keep a number."""
    bases = (base for base in type(optimizer).__mro__ if base is not torch.optim.Optimizer)
    if not any(base.__module__.startswith("torch.optim.") for base in bases):
        return step
    group = optimizer.param_groups[index]
    beside = group.get("fused") or group.get("capturable")
    return torch.as_tensor(step, dtype=torch.float32, device=device if beside else "cpu").clone()


def _state_dtype(
    optimizer: torch.optim.Optimizer, master: torch.dtype, saved: torch.dtype | None, saved_master: torch.dtype | None
) -> torch.dtype:
    """The dtype of a state that the optimizer has yet to make.

    DeepSpeedCPUAdam says so itself (``fp32_optimizer_states`` in deepspeed/ops/adam/cpu_adam.py). Others make states
    like their parameter (``zeros_like``) or in a dtype of their own, which shows in what was saved.
    """
    fp32_states: bool | None = getattr(optimizer, "fp32_optimizer_states", None)
    if fp32_states is not None:
        return torch.float32 if fp32_states else master
    return master if saved is None or saved == saved_master else saved


def _stray_states(optimizer: Any, masters: list[torch.Tensor]) -> list[str]:
    """Keys of ``optimizer.state`` beside the partitions; empty entries, which a look-up may have made, do not count."""
    known = {id(master) for master in masters}
    return [
        str(key) if isinstance(key, str | int) else f"{type(key).__name__} of shape {tuple(getattr(key, 'shape', ()))}"
        for key, value in optimizer.optimizer.state.items()
        if id(key) not in known and value
    ]


def _unowned(module: torch.nn.Module, owned: set[str]) -> dict[str, torch.Tensor]:
    """The tensors of the module's state dict that no optimizer owns; a tied parameter's other names are among them."""
    found = {
        name: parameter.detach()
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name not in owned
    }
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if name not in submodule._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer.detach()
    return found


def _common_optimizer_state(optimizer: Any) -> dict[str, Any]:
    """What zero/optimizer_state.pt holds: ds_to_universal._save_optimizer_state, without its detour over files.

    The converter reads through ZeROCheckpoint.get_state_for_rank, which clears the paddings it has stripped and sets
    the partition count to the degree of the file grid; so do we.
    """
    sharded = (BASE_OPTIMIZER_STATE, PARAM_SLICE_MAPPINGS, SINGLE_PARTITION_OF_FP32_GROUPS)
    state = {key: value for key, value in optimizer.state_dict().items() if key not in sharded}
    state[GROUP_PADDINGS] = [0] * len(state[GROUP_PADDINGS])
    degree = ds_comm.get_world_size(group=optimizer.dp_process_group)
    state[PARTITION_COUNT] = [degree] * len(state[PARTITION_COUNT])
    state[PARAM_GROUPS] = optimizer.optimizer.state_dict()[PARAM_GROUPS]
    return state


def _model_state(
    engine_ref: weakref.ref[DeepSpeedEngine], client_state: Mapping[str, Any], exclude_frozen: bool
) -> dict[str, Any]:
    """What DeepSpeedEngine._save_checkpoint writes to this rank's mp_rank file, without ``module``."""
    engine = engine_ref()
    assert engine is not None
    save_frozen = engine.zero_optimization_partition_gradients() and not exclude_frozen
    state: dict[str, Any] = engine._common_checkpoint_state(None, engine.zero_optimization(), save_frozen)
    info = getattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, None)
    if info is not None:
        state[UNIVERSAL_CHECKPOINT_INFO] = info
    state.update(client_state)
    del state["module"]
    return state


def _batch_size(engine: DeepSpeedEngine) -> int:
    """Samples of a step. engine.train_batch_size() counts AutoTP's tensor-parallel ranks as if each had its own."""
    micro_batch, degree = engine.train_micro_batch_size_per_gpu(), data_parallel_degree(engine)
    return int(micro_batch * engine.gradient_accumulation_steps() * degree)


def _facts(engine_ref: weakref.ref[DeepSpeedEngine], configured_batch_size: int) -> dict[str, Any]:
    engine = engine_ref()
    assert engine is not None
    return {
        "global_steps": engine.global_steps,
        "train_batch_size": _batch_size(engine),
        "configured_batch_size": configured_batch_size,  # before anybody has called set_train_batch_size
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "data_parallel": data_parallel_degree(engine),
        "zero_stage": int(engine.zero_optimization_stage()),
        "zero_optimizer": type(engine.optimizer).__name__,
        "base_optimizer": type(engine.optimizer.optimizer).__name__,
        "model_dtype": str(next(engine.module.parameters()).dtype).removeprefix("torch."),
    }
