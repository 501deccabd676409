# SPDX-License-Identifier: Apache-2.0
"""What stands in for an engine's own ``save_checkpoint`` and ``load_checkpoint``."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.engine import DeepSpeedEngine

from megads_ucp.comm.channel import HOST
from megads_ucp.engine.adapter import data_parallel_degree, why_not_loadable
from megads_ucp.engine.context import EngineContext
from megads_ucp.engine.patches import bound
from megads_ucp.engine.scopes import scope_of
from megads_ucp.errors import UniversalCheckpointError, UnsupportedError
from megads_ucp.integrations.megatron_rng import grow_rng_states
from megads_ucp.load.find import check_is_regular, find, is_stock_made, universal_beside, with_others
from megads_ucp.load.prepare import prepare
from megads_ucp.load.resume import LoadRequest, Resume
from megads_ucp.save.exporter import Exporter
from megads_ucp.save.types import ExportRequest

logger = logging.getLogger("megads_ucp")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _outside_inference_mode(method: _Method) -> _Method:
    """Tensors that are made in inference mode stay inference tensors, which the next training step could not change."""

    @functools.wraps(method)
    def outside(*arguments: Any, **keyword: Any) -> Any:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            return method(*arguments, **keyword)

    return outside  # type: ignore[return-value]


@_outside_inference_mode
def save_checkpoint(
    engine_ref: weakref.ref[DeepSpeedEngine],
    exporter: Exporter,
    save_dir: Any,
    tag: Any = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """``DeepSpeedEngine.save_checkpoint``, followed by the export."""
    engine = _alive(engine_ref)
    client_state = {} if client_state is None else client_state
    with exporter.turn, scope_of(engine):
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        exporter.check_tag(save_dir, name)
        done: bool = type(engine).save_checkpoint(
            engine,
            save_dir,
            tag=tag,
            client_state=client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        exporter.export(ExportRequest.of_save(save_dir, name, client_state, save_latest, exclude_frozen_parameters))
    return done


@_outside_inference_mode
def load_checkpoint(
    engine_ref: weakref.ref[DeepSpeedEngine],
    context: EngineContext,
    load_dir: Any,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> Any:
    """``DeepSpeedEngine.load_checkpoint``; a universal one is checked before anything changes, and loaded whole."""
    engine = _alive(engine_ref)
    stock = functools.partial(
        type(engine).load_checkpoint,
        engine,
        load_dir,
        load_module_strict=load_module_strict,
        load_optimizer_states=load_optimizer_states,
        load_lr_scheduler_states=load_lr_scheduler_states,
        load_module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )
    if not engine.load_universal_checkpoint():
        return _load_regular(Path(load_dir), tag, stock)
    if context.unsupported is not None:
        _check_loadable(engine, Path(load_dir), tag)
        return stock(tag=tag)
    with context.turn, scope_of(engine):
        tag = find(context, Path(load_dir), tag)
        if tag is None:
            return None, None
        states = load_optimizer_states and not load_module_only
        scheduled = engine.lr_scheduler is not None
        request = LoadRequest(states, load_module_strict, context.config.verify, scheduled)
        path, client_state = _load(engine, context, Path(load_dir) / tag, request, functools.partial(stock, tag=tag))
    grow_rng_states(client_state, data_parallel_degree(engine))
    return path, client_state


def destroy(engine: DeepSpeedEngine, engine_ref: weakref.ref[DeepSpeedEngine], context: EngineContext) -> None:
    """``DeepSpeedEngine.destroy``, which also gives back what the package holds for the engine.

    ``DeepSpeedEngine.__del__`` calls it too. The garbage collector has then cleared weak references; it may run amid a
    collective, and so closes nothing itself.
    """
    try:
        type(engine).destroy(engine)
    finally:
        if engine_ref() is not None:
            context.close()


def _alive(engine_ref: weakref.ref[DeepSpeedEngine]) -> DeepSpeedEngine:
    engine = engine_ref()
    assert engine is not None
    return engine


def _load_regular(load_dir: Path, tag: Any, stock: Callable[..., Any]) -> Any:
    """DeepSpeed's own load of a regular checkpoint, with advice where a universal one would have done."""
    check_is_regular(load_dir, tag)
    try:
        return stock(tag=tag)
    except Exception as error:
        advice = universal_beside(load_dir) if ds_comm.get_rank() == 0 else None
        if advice is not None:
            logger.error("the regular checkpoint could not be loaded (%s). %s", error, advice)
        raise


def _check_loadable(engine: DeepSpeedEngine, load_dir: Path, tag: Any) -> None:
    """What only DeepSpeed can load is left to it: a directory that its converter made of a run of the same kind.

    Raises:
        UnsupportedError: the engine cannot load a universal checkpoint.
    """
    reason = why_not_loadable(engine)
    if reason is not None and (engine.zero_optimization_stage() == 0 or not is_stock_made(load_dir, tag)):
        raise UnsupportedError(f"a universal checkpoint cannot be loaded into this engine: {reason}")


def _load(engine: DeepSpeedEngine, context: EngineContext, directory: Path, request: LoadRequest, stock: Any) -> Any:
    """Check the directory on all ranks, then have DeepSpeed load it, with our filling of the optimizer in its place.

    Raises:
        UniversalCheckpointError: a file is missing, damaged or does not fit the model; the same error on every rank,
            and nothing live has changed unless it says that the engine must not be used.
    """
    with HOST, context.connect().agreed(f"loading {directory}"):
        _check_nothing_offloaded(engine)
    try:
        resume = _prepared(context, directory, request)
        fill = functools.partial(_fill_optimizer, weakref.ref(engine), resume)
        with bound(engine.optimizer, "load_hp_checkpoint_state_from_checkpoint_dir", fill):
            loaded = stock()
        resume.fill_unowned()
    except UniversalCheckpointError:
        raise
    except Exception as failure:
        # Of DeepSpeed or the client, in between, and so perhaps on this rank alone: nobody shall wait for it.
        context.give_up(failure)
        raise
    return loaded


def _prepared(context: EngineContext, directory: Path, request: LoadRequest) -> Resume:
    try:
        return prepare(context, directory, request)
    except UniversalCheckpointError as error:
        raise with_others(context, directory, error) from error


def _check_nothing_offloaded(engine: DeepSpeedEngine) -> None:
    """update_lp_params copies into partitions, which offload_states() has cleared."""
    if offloaded := getattr(engine.optimizer, "offloaded_states", None):
        names = sorted(state.value for state in offloaded)
        raise UnsupportedError(f"nothing can be loaded while {names} are offloaded: call engine.reload_states() first")


def _fill_optimizer(
    engine_ref: weakref.ref[DeepSpeedEngine], resume: Resume, lp_groups_name: str, checkpoint_dir: str
) -> None:
    """``ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir``."""
    optimizer = _alive(engine_ref).optimizer
    common = resume.fill_optimizer()
    if common is None:
        return
    optimizer._load_global_state(common)
    # Link the parameters' fragments to the states just filled, as DeepSpeed does after the first step; or at that step.
    optimizer._hp_optimizer_states_linked = False
    if all(group.state() for group in resume.state.groups):
        optimizer._lazy_init_hp_params_optimizer_state()
