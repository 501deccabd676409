# SPDX-License-Identifier: Apache-2.0
"""The only module that touches DeepSpeed's classes.

One patch, of ``DeepSpeedEngine.__init__``: when an engine has been built, its optimizer has partitioned and knows its
true order, so that is when partitions are recorded. Everything else is bound to the instance.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import link_hp_params
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

from megads_ucp.config import ExportConfig
from megads_ucp.errors import UnsupportedError
from megads_ucp.export import Exporter
from megads_ucp.live import Coordinates, LiveGroup, LiveState
from megads_ucp.partition import FlatGroup, Member
from megads_ucp.restore import Restorer
from megads_ucp.survey import Surveyor

_ATTRIBUTES_USED: dict[type, tuple[str, ...]] = {
    DeepSpeedEngine: (
        "save_checkpoint", "optimizer", "module", "mpu", "checkpoint_mp_rank", "global_steps", "config",
        "zero_optimization", "zero_optimization_stage", "zero_optimization_partition_gradients",
        "zero_nvme_offload_optimizer", "use_node_local_storage", "has_moe_layers", "_common_checkpoint_state", "_config",
    ),
    BF16_Optimizer: (
        "bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition", "real_dp_process_group", "group_paddings",
        "param_names", "optimizer", "using_real_optimizer", "state_dict", "load_hp_checkpoint_state_from_checkpoint_dir",
    ),
    DeepSpeedZeroOptimizer: (
        "bit16_groups", "round_robin_bit16_groups", "round_robin_bit16_offsets", "round_robin_bit16_meta",
        "bit16_groups_flat", "single_partition_of_fp32_groups", "real_dp_process_group", "groups_padding", "param_names",
        "optimizer", "round_robin_gradients", "zenflow", "averaged_gradients", "offload_gradient_dict", "cpu_offload",
        "_link_all_hp_params", "_create_param_mapping", "_get_offload_gradient_dict", "_param_slice_mappings",
        "state_dict", "load_hp_checkpoint_state_from_checkpoint_dir",
    ),
}  # fmt: skip

_attachments: weakref.WeakKeyDictionary[DeepSpeedEngine, Attachment] = weakref.WeakKeyDictionary()
_original_init: Callable[..., None] | None = None


def install(args: Any = None) -> None:
    """Make every engine built from now on export and resume universal checkpoints.

    Call it before ``deepspeed.initialize``. Calling it again replaces the default configuration.

    Args:
        args: parsed arguments (:func:`megads_ucp.add_arguments`), or anything with such attributes; None: no flag set.
            A ``universal_checkpoint_export`` section in an engine's own DeepSpeed config decides over it.

    Raises:
        UnsupportedError: this DeepSpeed lacks something the package relies on.
    """
    global _original_init
    default = ExportConfig.from_arguments(args)
    _check_deepspeed()
    if _original_init is None:
        _original_init = DeepSpeedEngine.__init__
    original = _original_init

    @functools.wraps(original)
    def init_and_attach(engine: DeepSpeedEngine, *positional: Any, **keyword: Any) -> None:
        original(engine, *positional, **keyword)
        _attachments[engine] = Attachment(engine, default)

    DeepSpeedEngine.__init__ = init_and_attach


def uninstall() -> None:
    """Undo :func:`install`: DeepSpeed's class is as it was, and so are all engines that are alive."""
    global _original_init
    for attachment in list(_attachments.values()):
        attachment.detach()
    _attachments.clear()
    if _original_init is not None:
        DeepSpeedEngine.__init__ = _original_init
        _original_init = None


def attachment(engine: DeepSpeedEngine) -> Attachment:
    """What the package keeps about an engine."""
    return _attachments[engine]


def _check_deepspeed() -> None:
    """Raise UnsupportedError if a class lacks an attribute this module uses; instance attributes count by their mention."""
    for cls, wanted in _ATTRIBUTES_USED.items():
        known = {name for base in cls.__mro__ for name in vars(base)}
        for function in (member for base in cls.__mro__ for member in vars(base).values() if inspect.isfunction(member)):
            known.update(function.__code__.co_names)
        if missing := [name for name in wanted if name not in known]:
            import deepspeed

            raise UnsupportedError(
                f"DeepSpeed {deepspeed.__version__} has no {cls.__name__}.{missing[0]}, which megads_ucp relies on "
                f"(in all: {missing}). Versions from 0.19.7 on are known to work."
            )


@dataclass(frozen=True)
class _Bookkeeping:
    """Where one optimizer class keeps its groups: the same facts under each class's own names."""

    flat: list[torch.Tensor]
    members: list[list[tuple[torch.nn.Parameter, tuple[int, ...], int]]]
    """Per group, in flat order: the parameter, its TP-local shape, its offset."""
    masters: list[torch.Tensor]
    paddings: str
    """Name of the list that the optimizer writes as ``group_paddings``."""


def _bookkeeping(optimizer: Any) -> _Bookkeeping:
    if isinstance(optimizer, BF16_Optimizer):
        members = []
        for group in optimizer.bf16_groups:
            offset, placed = 0, []
            for parameter in group:  # end to end, see BF16_Optimizer._flatten_dense_tensors_aligned
                placed.append((parameter, tuple(parameter.shape), offset))
                offset += parameter.numel()
            members.append(placed)
        return _Bookkeeping(
            optimizer.bf16_groups_flat, members, optimizer.fp32_groups_flat_partition, "group_paddings"
        )
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
    return _Bookkeeping(
        optimizer.bit16_groups_flat, members, optimizer.single_partition_of_fp32_groups, "groups_padding"
    )


class Attachment:
    """The package's hold on one engine: partitions recorded, bookkeeping mended, methods bound to the instance."""

    def __init__(self, engine: DeepSpeedEngine, default: ExportConfig) -> None:
        self.config = default.for_engine(engine._config._param_dict)
        self.exporter: Exporter | None = None
        self._undo: list[Callable[[], None]] = []
        surveyor = Surveyor(self.config.timeout_minutes)
        unsupported = _why_unsupported(engine)
        state = None if unsupported else _live_state(engine)
        if state is not None:
            self._mend(engine.optimizer, state.groups)
            restorer = Restorer(state, surveyor)
            self._bind(
                engine.optimizer,
                "load_hp_checkpoint_state_from_checkpoint_dir",
                functools.partial(_restore, weakref.ref(engine), restorer),
            )
        if self.config.enabled:
            self.exporter = Exporter(state, self.config, surveyor, unsupported)
            self._bind(engine, "save_checkpoint", functools.partial(_save_checkpoint, weakref.ref(engine), self.exporter))

    def detach(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _bind(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Shadow a method of ``owner``'s class on the instance."""
        setattr(owner, name, functools.update_wrapper(function, getattr(type(owner), name)))
        self._undo.append(functools.partial(_if_alive, weakref.ref(owner), lambda alive: delattr(alive, name)))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(functools.partial(_if_alive, weakref.ref(owner), lambda alive: setattr(alive, name, before)))

    def _mend(self, optimizer: Any, groups: tuple[LiveGroup, ...]) -> None:
        """Make what the optimizer itself knows about its partition true; it goes into the regular checkpoint as well.

        ``BF16_Optimizer`` books the whole alignment tail on the last rank, even where it is longer than a partition.
        ``DeepSpeedZeroOptimizer`` lays parameters out in round-robin order but links them to their master fragments in
        the original order (``_link_all_hp_params`` passes offsets only where it pads between parameters).
        """
        true_paddings = [group.flat.group_padding(group.shard_rank) for group in groups]
        self._set(optimizer, _bookkeeping(optimizer).paddings, true_paddings)
        if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.round_robin_gradients:
            self._bind(optimizer, "_link_all_hp_params", functools.partial(_link_in_flat_order, weakref.ref(optimizer)))
            optimizer._link_all_hp_params()
            self._set(optimizer, "_param_slice_mappings", optimizer._create_param_mapping())


def _if_alive(ref: weakref.ref[Any], act: Callable[[Any], None]) -> None:
    owner = ref()
    if owner is not None:
        act(owner)


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


def _save_checkpoint(
    engine_ref: weakref.ref[DeepSpeedEngine],
    exporter: Exporter,
    save_dir: Any,
    tag: Any = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """``DeepSpeedEngine.save_checkpoint``, followed by the export."""
    engine = engine_ref()
    assert engine is not None
    client_state = {} if client_state is None else client_state
    done: bool = type(engine).save_checkpoint(
        engine,
        save_dir,
        tag=tag,
        client_state=client_state,
        save_latest=save_latest,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )
    exporter.export(
        save_dir,
        f"global_step{engine.global_steps}" if tag is None else str(tag),
        client_state,
        save_latest=save_latest,
        exclude_frozen=exclude_frozen_parameters,
    )
    return done


def _restore(
    engine_ref: weakref.ref[DeepSpeedEngine], restorer: Restorer, lp_groups_name: str, checkpoint_dir: str
) -> None:
    """``ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir``."""
    engine = engine_ref()
    assert engine is not None
    optimizer = engine.optimizer
    optimizer._load_global_state(restorer.restore(checkpoint_dir))
    # Link the fragments to the states that have just been filled, as DeepSpeed does after the first step.
    optimizer._hp_optimizer_states_linked = False
    if all(group.state() for group in restorer.live.groups):
        optimizer._lazy_init_hp_params_optimizer_state()


def _why_unsupported(engine: DeepSpeedEngine) -> str | None:
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


def _coordinates(engine: DeepSpeedEngine) -> Coordinates:
    mpu = engine.mpu
    for name in ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank"):
        if hasattr(mpu, name):
            stage = getattr(mpu, name)()
            break
    else:
        stage = 0
    return Coordinates(
        stage=stage,
        stages=bwc_pipeline_parallel_world_size(mpu),
        tp_rank=bwc_tensor_model_parallel_rank(mpu),
        tp_degree=bwc_tensor_model_parallel_world_size(mpu),
        mp_rank=engine.checkpoint_mp_rank,
    )


def _live_state(engine: DeepSpeedEngine) -> LiveState:
    optimizer = engine.optimizer
    books = _bookkeeping(optimizer)
    groups = tuple(_live_group(optimizer, books, index) for index in range(len(books.members)))
    return LiveState(
        coordinates=_coordinates(engine),
        groups=groups,
        unowned=functools.partial(_unowned, engine.module, {m.name for g in groups for m in g.flat.members}),
        parameters=dict(engine.module.named_parameters(remove_duplicate=False)),
        module=engine.module,
        common_optimizer_state=functools.partial(_common_optimizer_state, optimizer),
        model_state=functools.partial(_model_state, weakref.ref(engine)),
        facts=functools.partial(_facts, weakref.ref(engine)),
    )


def _live_group(optimizer: Any, books: _Bookkeeping, index: int) -> LiveGroup:
    placed = [(optimizer.param_names[parameter], shape, offset) for parameter, shape, offset in books.members[index]]
    process_group = optimizer.real_dp_process_group[index]
    ranks = tuple(ds_comm.get_all_ranks_from_group(process_group))
    members = tuple(Member(name, torch.Size(shape).numel(), offset) for name, shape, offset in placed)
    masters = books.masters
    return LiveGroup(
        flat=FlatGroup(members, books.flat[index].numel(), len(ranks)),
        shapes={name: shape for name, shape, _ in placed},
        ranks=ranks,
        shard_rank=ds_comm.get_rank(group=process_group),
        master=lambda: masters[index],
        # Through the optimizer each time: DeepSpeed replaces Adagrad after it has partitioned.
        state=lambda: optimizer.optimizer.state[masters[index]],
        hyperparameters=lambda: {k: v for k, v in optimizer.optimizer.param_groups[index].items() if k != "params"},
        set_hyperparameters=lambda values: optimizer.optimizer.param_groups[index].update(values),
    )


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


def _facts(engine_ref: weakref.ref[DeepSpeedEngine]) -> dict[str, Any]:
    engine = engine_ref()
    assert engine is not None
    return {
        "global_steps": engine.global_steps,
        "zero_stage": int(engine.zero_optimization_stage()),
        "zero_optimizer": type(engine.optimizer).__name__,
        "base_optimizer": type(engine.optimizer.optimizer).__name__,
        "model_dtype": str(next(engine.module.parameters()).dtype).removeprefix("torch."),
    }
