# SPDX-License-Identifier: Apache-2.0
"""Several models of different tensor-parallel degrees in one process.

    with megads_ucp.model_scope("teacher"):
        teacher, *_ = deepspeed.initialize(model=..., config={"tensor_parallel": {"autotp_size": 4}, ...})
    with megads_ucp.model_scope("student"):
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
from deepspeed.runtime.tensor_parallel import AUTOTP_MODE, init_utils
from deepspeed.utils import groups

from megads_ucp.engine.construction import watch
from megads_ucp.engine.degrees import (
    check_degree,
)
from megads_ucp.errors import TensorParallelError

logger = logging.getLogger("megads_ucp")


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


def current_scope() -> str | None:
    """Name of the scope in force, None outside of any."""
    return _current.name


def scope_mates(engines: Iterable[Any]) -> list[Any]:
    """Those of ``engines`` that were built in the scope in force, or outside of any as the code that runs now."""
    scope = None if _current.name is None else _current
    return [engine for engine in engines if vars(engine).get(_SCOPE) is scope]


def scope_of(engine: Any) -> AbstractContextManager[None]:
    """The scope that ``engine`` was built in, to be entered; nothing for an engine built outside of any."""
    scope: Scope | None = vars(engine).get(_SCOPE)
    return nullcontext() if scope is None else scope.in_force()


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
    check_degree(engine, scope.name)
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


def _check_followed_up(scope: Scope) -> None:
    if init_utils._TP_MODEL_INIT_ARGS is not None and not scope.engines:
        raise TensorParallelError(
            f'deepspeed.tp_model_init was called in model_scope("{scope.name}"), but it only records what the next '
            "deepspeed.initialize shall do: call that one for the same model in the same block."
        )
