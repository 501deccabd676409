# SPDX-License-Identifier: Apache-2.0
"""What stands in for an engine's own ``save_checkpoint`` and ``load_checkpoint``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from megads_ucp.comm.channel import HOST
from megads_ucp.engine.adapter import data_parallel_degree
from megads_ucp.engine.context import EngineContext
from megads_ucp.engine.patches import bound
from megads_ucp.engine.scopes import scope_of
from megads_ucp.errors import UniversalCheckpointError, UnsupportedError
from megads_ucp.integrations.megatron_rng import grow_rng_states
from megads_ucp.load.prepare import latest, prepare
from megads_ucp.load.resume import LoadRequest, Resume
from megads_ucp.save.exporter import Exporter
from megads_ucp.save.types import ExportRequest
from megads_ucp.storage.format import LATEST


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
    with scope_of(engine):
        done: bool = type(engine).save_checkpoint(
            engine,
            save_dir,
            tag=tag,
            client_state=client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        exporter.export(ExportRequest.of_save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters))
    return done


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
        return stock(tag=tag)
    with scope_of(engine):
        tag = _named(context, Path(load_dir), tag)
        states = load_optimizer_states and not load_module_only
        request = LoadRequest(states, load_module_strict, context.config.verify)
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


def _named(context: EngineContext, load_dir: Path, tag: Any) -> str:
    """The tag that is asked for, or that ``latest_universal`` names."""
    name = latest(context, load_dir / LATEST) if tag is None else str(tag)
    if name is None:  # an error of the same kind is DeepSpeed's own answer
        raise ValueError(
            f"{load_dir / LATEST} does not exist: no universal checkpoint has been exported there. Save with "
            "--universal-checkpoint-export, name one by tag=, or load the regular checkpoint without "
            "checkpoint.load_universal."
        )
    return name


def _load(engine: DeepSpeedEngine, context: EngineContext, directory: Path, request: LoadRequest, stock: Any) -> Any:
    """Check the directory on all ranks, then have DeepSpeed load it, with our filling of the optimizer in its place.

    Raises:
        UniversalCheckpointError: a file is missing, damaged or does not fit the model; the same error on every rank,
            and nothing live has changed unless it says that the engine must not be used.
    """
    with HOST, context.connect().agreed(f"loading {directory}"):
        _check_nothing_offloaded(engine)
    try:
        resume = prepare(context, directory, request)
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
