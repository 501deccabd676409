# SPDX-License-Identifier: Apache-2.0
"""Several models of different tensor-parallel degrees in one process.

    with megads_ucp.autotp.model_scope("teacher"):
        teacher, *_ = deepspeed.initialize(model=..., config={"tensor_parallel": {"autotp_size": 4}, ...})
    with megads_ucp.autotp.model_scope("student"):
        student, *_ = deepspeed.initialize(model=..., config={"tensor_parallel": {"autotp_size": 2}, ...})

DeepSpeed 0.19.8 keeps what belongs to a model in globals of the process (``SETTINGS``), where the first model built
decides for all later ones. A scope has values of its own for them. They are in place inside the ``with`` block, and
whenever a method of an engine built there runs (forward, backward, step, save_checkpoint ...), so training loops stay
as they are. What is not an engine's method, such as ``engine.module(...)`` or ``engine.mpu``, can be put into a block
of the same name. As with all that makes process groups, every rank enters the scopes in the same order.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject import layers
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel import AUTOTP_MODE, init_utils
from deepspeed.utils import groups

from megads_ucp.construction import watch
from megads_ucp.errors import TensorParallelError

logger = logging.getLogger("megads_ucp")

# ---------------------------------------------------------------------------------------------- what a scope is made of


@dataclass(frozen=True)
class Setting:
    """An attribute of a module or class that DeepSpeed uses as if there were one model in a process.

    Attributes:
        fresh: makes the value it has before any model is built.
    """

    owner: Any
    name: str
    fresh: Callable[[], Any]


def _nothing() -> None:
    return None


SETTINGS: tuple[Setting, ...] = (
    # The groups: _init_tp_mesh_device returns early if there are any, of whatever size.
    Setting(groups, "_TENSOR_MODEL_PARALLEL_GROUP", _nothing),
    Setting(groups, "_MODEL_PARALLEL_GROUP", _nothing),
    Setting(groups, "_DATA_PARALLEL_GROUP", _nothing),
    Setting(groups, "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", _nothing),
    Setting(groups, "_MPU_TENSOR_MODEL_PARALLEL_RANK", _nothing),
    Setting(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", _nothing),
    Setting(groups, "mesh_device", _nothing),
    # DeepSpeedEngine._configure_distributed_model sets it and no model without one resets it.
    Setting(groups, "mpu", _nothing),
    # Expert groups lie across tensor-parallel ones.
    Setting(groups, "expert_tensor_parallel_world_size", lambda: 1),
    Setting(groups, "_EXPERT_PARALLEL_GROUP", dict),
    Setting(groups, "_EXPERT_PARALLEL_GROUP_RANKS", dict),
    Setting(groups, "_EXPERT_DATA_PARALLEL_GROUP", dict),
    Setting(groups, "_EXPERT_DATA_PARALLEL_GROUP_RANKS", dict),
    # InferenceEngine._create_model_parallel_group keeps the first one's group for all.
    Setting(InferenceEngine, "inference_mp_group", _nothing),
    Setting(InferenceEngine, "inference_ep_group", _nothing),
    Setting(InferenceEngine, "expert_mp_group", _nothing),
    # deepspeed.tp_model_init records it for the next initialize, and for all that follow.
    Setting(init_utils, "_TP_MODEL_INIT_ARGS", _nothing),
    # deepspeed.initialize sets TRAINING, nobody sets INFERENCE; layers ask for it in every forward.
    Setting(layers, "DEEPSPEED_AUTOTP_MODE", lambda: AUTOTP_MODE.INFERENCE),
    # Set on the base class of all layers for every model that is built, read when they run and when they are cut.
    Setting(TensorParallel_Layer, "tp_overlap_comm", lambda: False),
    Setting(TensorParallel_Layer, "keep_module_on_host", lambda: False),
)
"""What scopes keep apart. Groups that are the same for all models (_WORLD_GROUP, _ALL_TO_ALL_GROUP) they share."""


def _current_values() -> list[Any]:
    return [getattr(setting.owner, setting.name) for setting in SETTINGS]


class Scope:
    """The values of :data:`SETTINGS` that belong to one name; ``values`` is stale while the scope is in force."""

    def __init__(self, name: str | None, values: list[Any]) -> None:
        self.name = name
        self.values = values
        self.engines = 0
        self.world: Any = None  # the world its groups are of, once there are any

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Put the scope's values in place, and those of the scope around it back afterwards."""
        global _current
        outer = _current
        if outer is self:
            yield
            return
        outer.values = _current_values()
        self._put()
        _current = self
        try:
            yield
        finally:
            self.values = _current_values()
            outer._put()
            _current = outer

    def start_anew_in_another_world(self) -> None:
        """Process groups die with their world (``destroy_process_group``)."""
        world = torch.distributed.group.WORLD
        if self.world is not None and self.world is not world:
            self.values, self.engines = [setting.fresh() for setting in SETTINGS], 0
        self.world = world

    def _put(self) -> None:
        for setting, value in zip(SETTINGS, self.values, strict=True):
            setattr(setting.owner, setting.name, value)


_current = Scope(None, [])  # the process as it is outside of any scope
_scopes: dict[str, Scope] = {}


@contextmanager
def model_scope(name: str) -> Iterator[None]:
    """Give the model that is built inside the block groups, AutoTP mode and class settings of its own.

    Works around ``deepspeed.initialize``, ``tp_model_init`` (with the ``initialize`` that follows it) and
    ``init_inference``, nests, and does not need :func:`megads_ucp.install`. The same name is the same scope, for as
    long as the process lives; a block that fails before it has built an engine leaves nothing behind in it.

    Raises:
        TensorParallelError: an engine's actual tensor parallelism is not what its configuration asks for, for example
            because the scope already holds a model of another degree (raised where the engine is built); or
            ``tp_model_init`` was called without an ``initialize`` to follow (raised at the end of the block).
    """
    scope = _scopes.get(name)
    if scope is None:
        scope = _scopes[name] = Scope(name, [setting.fresh() for setting in SETTINGS])
    if scope is not _current:
        scope.start_anew_in_another_world()
    engines = scope.engines
    end = watch(functools.partial(_adopt, scope))
    try:
        with scope.in_force():
            before = [copy(value) if isinstance(value, dict) else value for value in _current_values()]
            try:
                yield
                _check_followed_up(scope)
            except BaseException:
                if scope.engines == engines:
                    for setting, value in zip(SETTINGS, before, strict=True):
                        setattr(setting.owner, setting.name, value)
                raise
    finally:
        end()


def scope_of(engine: Any) -> AbstractContextManager[None]:
    """The scope that ``engine`` was built in, to be entered; nothing for an engine built outside of any."""
    scope: Scope | None = vars(engine).get(_SCOPE)
    return nullcontext() if scope is None else scope.in_force()


# ----------------------------------------------------------------------------------------------- engines in their scope

_SCOPE = "_megads_ucp_scope"


@contextmanager
def _adopt(scope: Scope, engine: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Around the construction of ``engine`` inside the block: its methods will run in ``scope``."""
    if scope is not _current:  # built in a block inside the scope's
        yield
        return
    if isinstance(engine, InferenceEngine):
        _make_inference_group(arguments["config"].tensor_parallel)
    yield
    if _SCOPE in vars(engine):  # a block of the same name inside this one was first
        return
    check_degree(engine)
    setattr(engine, _SCOPE, scope)
    engine.__class__ = _in_scope(engine.__class__)
    if "generate" in vars(engine):  # InferenceEngine.__init__ has bound the class's own
        engine.generate = engine._generate
    scope.engines += 1


def _make_inference_group(wanted: Any) -> None:
    """The group of an inference engine: InferenceEngine would make one of the first ``tp_size`` ranks of the world, and
    leave the others without. ``_create_model_parallel_group`` takes this one instead."""
    degree, world = wanted.tp_size, ds_comm.get_world_size() if ds_comm.is_initialized() else 1
    if degree > 1 and wanted.mpu is None and world > degree:
        if world % degree:
            raise TensorParallelError(
                f"init_inference is asked for TP {degree}, which does not divide the {world} ranks of this run"
            )
        groups._init_tp_mesh_device(degree)
        InferenceEngine.inference_mp_group = groups.get_tensor_model_parallel_group()


@functools.cache
def _in_scope(cls: type) -> type:
    """``cls`` with every public method of DeepSpeed's running in the scope of its engine."""
    names = {
        name
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == "deepspeed"
        for name, member in vars(base).items()
        # Not destroy: the garbage collector calls it, at any moment. It reads none of the settings.
        if inspect.isfunction(member) and (not name.startswith("_") or name == "_generate") and name != "destroy"
    }
    kept = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**kept, **{name: _entering(getattr(cls, name)) for name in sorted(names)}})


def _entering(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(engine: Any, *positional: Any, **keyword: Any) -> Any:
        scope: Scope = engine.__dict__[_SCOPE]
        if scope is _current:  # DeepSpeed's own calls of many small methods
            return method(engine, *positional, **keyword)
        with scope.in_force():
            return method(engine, *positional, **keyword)

    return call


# ---------------------------------------------------------------------------------------------- requested and actual TP


def check_degree(engine: Any) -> None:
    """Raise TensorParallelError if a newly built engine's tensor parallelism is not what its configuration asks for.

    Actual are the layers' own groups, and those the engine has taken from ``deepspeed.utils.groups``.
    """
    wanted = _wanted_degree(engine)
    if wanted is None:
        return
    found = {layer.tp_world_size for layer in engine.module.modules() if isinstance(layer, TensorParallel_Layer)}
    if isinstance(engine, DeepSpeedEngine):
        found.add(engine.mp_world_size)
    elif wanted > 1 and not found and not engine._config.replace_with_kernel_inject:
        found.add(1)
    if found - {wanted}:
        _refuse(type(engine).__name__, engine.module, wanted, found - {wanted})


def refuse_inherited_groups(engine: Any, arguments: Mapping[str, Any]) -> None:
    """Raise TensorParallelError if an engine without tensor parallelism is about to take an earlier one's groups.

    DeepSpeed 0.19.8 then stops halfway: ``'NoneType' object has no attribute 'get_model_parallel_rank'``.
    """
    config = getattr(arguments.get("config_class"), "tensor_parallel_config", None)
    if not isinstance(engine, DeepSpeedEngine) or config is None or arguments.get("mpu") is not None:
        return
    if config.autotp_size <= 1 and groups.mpu is groups and groups._get_model_parallel_world_size() > 1:
        model = arguments.get("model")
        _refuse(type(engine).__name__, model, 1, {groups._get_model_parallel_world_size()})


def warn_of_recorded_degree(engine: Any, others: Iterable[Any]) -> None:
    """Say so if ``engine`` is not the first of its scope of the degree that a ``tp_model_init`` has recorded there.

    ``init_utils.merge_tp_model_init_into_config`` writes that into the configuration of every later model, so that
    nobody can tell any more whether it was asked for.
    """
    scope = None if _current.name is None else _current
    beside = [other for other in others if vars(other).get(_SCOPE) is scope]
    if _has_recorded_degree(engine) and any(map(_has_recorded_degree, beside)):
        logger.warning(
            "the %s of %s has TP %d, which an earlier deepspeed.tp_model_init asks of every later model. If this one's "
            "own configuration does not ask for it, build the other one inside "
            '`with megads_ucp.autotp.model_scope("<name>"):`',
            type(engine).__name__,
            type(engine.module).__name__,
            engine.autotp_size(),
        )


def _has_recorded_degree(engine: Any) -> bool:
    recorded = init_utils._TP_MODEL_INIT_ARGS
    return recorded is not None and engine.autotp_size() == recorded["tp_size"]


def _check_followed_up(scope: Scope) -> None:
    if init_utils._TP_MODEL_INIT_ARGS is not None and not scope.engines:
        raise TensorParallelError(
            f'deepspeed.tp_model_init was called in model_scope("{scope.name}"), but it only records what the next '
            "deepspeed.initialize shall do: call that one for the same model in the same block."
        )


def _wanted_degree(engine: Any) -> int | None:
    """None if somebody else than AutoTP splits the model."""
    if isinstance(engine, InferenceEngine):
        return None if engine.mpu is not None else engine._config.tensor_parallel.tp_size
    if engine.mpu is not None and engine.mpu is not groups:
        return None
    return max(1, engine.autotp_size())


def _refuse(engine: str, model: Any, wanted: int, found: set[int]) -> None:
    rank = ds_comm.get_rank() if ds_comm.is_initialized() else 0
    actual = " and ".join(f"TP {degree}" if degree > 0 else "no group at all" for degree in sorted(found))
    if _current.name is None:
        cause = (
            "an earlier model of this process decides, because DeepSpeed keeps tensor-parallel groups and settings "
            "once per process. Build each model in a scope of its own: "
            '`with megads_ucp.autotp.model_scope("student"):` around its initialize or init_inference, and "teacher" '
            "for the other one"
        )
    else:
        cause = (
            f'model_scope("{_current.name}") has groups of another size already, or the model was split before. '
            "Build it, anew, in a scope of another name"
        )
    raise TensorParallelError(
        f"rank {rank}: the {engine} of {type(model).__name__} is configured for TP {wanted} but got {actual}: {cause}."
    )
