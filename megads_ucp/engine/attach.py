# SPDX-License-Identifier: Apache-2.0
"""What the package does to an engine when it has been built.

That is when its optimizer has partitioned and knows its true order, so that is when partitions are recorded. Classes
are left alone but for the one patch of :mod:`megads_ucp.engine.construction`; everything else is bound to the instance.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed import comm as ds_comm
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megads_ucp.config import ExportConfig
from megads_ucp.engine.adapter import live_state, why_unsupported
from megads_ucp.engine.bookkeeping import bookkeeping, link_in_flat_order
from megads_ucp.engine.compat import check_deepspeed
from megads_ucp.engine.construction import watch
from megads_ucp.engine.context import Surveyor
from megads_ucp.engine.degrees import check_degree, refuse_inherited_groups, warn_of_recorded_degree
from megads_ucp.engine.scopes import current_scope, scope_mates, scope_of
from megads_ucp.engine.state import LiveGroup, LiveState
from megads_ucp.integrations.megatron_rng import grow_rng_states
from megads_ucp.load.remarks import batch_advice
from megads_ucp.load.restorer import Restorer
from megads_ucp.save.exporter import Exporter
from megads_ucp.storage.format import LATEST

# Attachments hang off their engines: in a dictionary here they would keep alive all that refers back to the engine.
_ATTACHMENT = "_megads_ucp_attachment"


_engines: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


_end_watch: Callable[[], None] | None = None


_stock_batch_assertion = DeepSpeedConfig._batch_assertion


def install(args: Any = None) -> None:
    """Make every engine built from now on export and resume universal checkpoints.

    Call it before ``deepspeed.initialize``. Calling it again replaces the default configuration. From then on DeepSpeed
    also refuses, with TensorParallelError, to build an engine of another tensor parallelism than it is configured for.

    Args:
        args: parsed arguments (:func:`megads_ucp.add_arguments`), or anything with such attributes. None: each engine
            goes by the ``args`` that ``deepspeed.initialize`` was given for it. A ``universal_checkpoint_export``
            section in an engine's own DeepSpeed config decides over both.

    Raises:
        UnsupportedError: this DeepSpeed lacks something the package relies on.
    """
    global _end_watch
    given = None if args is None else ExportConfig.from_arguments(args)
    check_deepspeed()
    if _end_watch is not None:
        _end_watch()
    _end_watch = watch(functools.partial(_attach, given))
    DeepSpeedConfig._batch_assertion = _batch_assertion


@contextmanager
def _attach(given: ExportConfig | None, engine: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    refuse_inherited_groups(engine, arguments, current_scope())
    yield
    check_degree(engine, current_scope())
    if isinstance(engine, DeepSpeedEngine):
        default = ExportConfig.from_arguments(arguments.get("args")) if given is None else given
        warn_of_recorded_degree(engine, scope_mates(_engines))
        setattr(engine, _ATTACHMENT, Attachment(engine, default))
        _engines.add(engine)


def uninstall() -> None:
    """Undo :func:`install`: DeepSpeed's class is as it was, and so are all engines that are alive."""
    global _end_watch
    for engine in list(_engines):
        attachment(engine).detach()
        delattr(engine, _ATTACHMENT)
    _engines.clear()
    DeepSpeedConfig._batch_assertion = _stock_batch_assertion
    if _end_watch is not None:
        _end_watch()
        _end_watch = None


def _batch_assertion(config: DeepSpeedConfig) -> None:
    """DeepSpeed's own, which comes before there is an engine, with the accumulation steps that would do.

    Raises:
        AssertionError: the global batch is not what the micro batches of all ranks and steps make.
    """
    try:
        _stock_batch_assertion(config)
    except AssertionError as error:
        batch, micro_batch = config.train_batch_size, config.train_micro_batch_size_per_gpu
        advice = batch_advice(batch, int(config.world_size), max(micro_batch, 1)) if batch > 0 else ""
        raise AssertionError(f"{error}. {advice}") from error


def attachment(engine: DeepSpeedEngine) -> Attachment:
    """What the package keeps about an engine."""
    kept: Attachment = getattr(engine, _ATTACHMENT)
    return kept


class Attachment:
    """The package's hold on one engine: partitions recorded, bookkeeping mended, methods bound to the instance."""

    def __init__(self, engine: DeepSpeedEngine, default: ExportConfig) -> None:
        self.config = default.for_engine(engine._config._param_dict)
        self.exporter: Exporter | None = None
        self._undo: list[Callable[[], None]] = []
        surveyor = Surveyor(self.config.timeout_minutes)
        unsupported = why_unsupported(engine)
        state = None if unsupported else live_state(engine)
        if state is not None:
            self._mend(engine.optimizer, state.groups)
            restorer = Restorer(state, surveyor, self.config)
            engine_ref = weakref.ref(engine)
            self._bind(engine, "load_checkpoint", functools.partial(_load_checkpoint, engine_ref, restorer))
            self._bind(
                engine.optimizer,
                "load_hp_checkpoint_state_from_checkpoint_dir",
                functools.partial(_load_optimizer, engine_ref, state, restorer),
            )
        if self.config.enabled:
            self.exporter = Exporter(state, self.config, surveyor, unsupported)
            saving = functools.partial(_save_checkpoint, weakref.ref(engine), self.exporter)
            self._bind(engine, "save_checkpoint", saving)

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
        self._set(optimizer, bookkeeping(optimizer).paddings, true_paddings)
        if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.round_robin_gradients:
            link = DeepSpeedZeroOptimizer._link_all_hp_params
            self._undo.append(functools.partial(_if_alive, weakref.ref(optimizer), link))
            self._bind(optimizer, "_link_all_hp_params", functools.partial(link_in_flat_order, weakref.ref(optimizer)))
            optimizer._link_all_hp_params()
            self._set(optimizer, "_param_slice_mappings", optimizer._create_param_mapping())


def _if_alive(ref: weakref.ref[Any], act: Callable[[Any], None]) -> None:
    owner = ref()
    if owner is not None:
        act(owner)


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
    with scope_of(engine):
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


def _load_checkpoint(
    engine_ref: weakref.ref[DeepSpeedEngine],
    restorer: Restorer,
    load_dir: Any,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> Any:
    """``DeepSpeedEngine.load_checkpoint``; a universal one is checked before anything changes, and loaded whole."""
    engine = engine_ref()
    assert engine is not None
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
    tag = restorer.latest(Path(load_dir) / LATEST) if tag is None else str(tag)
    if tag is None:  # an error of the same kind is DeepSpeed's own answer
        raise ValueError(
            f"{Path(load_dir) / LATEST} does not exist: no universal checkpoint has been exported there. Save with "
            "--universal-checkpoint-export, name one by tag=, or load the regular checkpoint without "
            "checkpoint.load_universal."
        )
    states = load_optimizer_states and not load_module_only
    directory, why_not = Path(load_dir) / tag, _why_not_now(engine)
    with (
        scope_of(engine),
        restorer.loading(directory, optimizer_states=states, strict=load_module_strict, why_not=why_not),
    ):
        path, client_state = stock(tag=tag)
    grow_rng_states(client_state, ds_comm.get_world_size(engine.data_parallel_group))
    return path, client_state


def _why_not_now(engine: DeepSpeedEngine) -> str | None:
    """Why this rank cannot load at the moment: update_lp_params copies into partitions that offloading has cleared."""
    offloaded = getattr(engine.optimizer, "offloaded_states", None)
    if not offloaded:
        return None
    names = sorted(state.value for state in offloaded)
    return f"nothing can be loaded while {names} are offloaded: call engine.reload_states() first"


def _load_optimizer(
    engine_ref: weakref.ref[DeepSpeedEngine],
    live: LiveState,
    restorer: Restorer,
    lp_groups_name: str,
    checkpoint_dir: str,
) -> None:
    """``ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir``."""
    engine = engine_ref()
    assert engine is not None
    common = restorer.fill(checkpoint_dir)
    if common is None:
        return
    engine.optimizer._load_global_state(common)
    # Link the parameters' fragments to the states just filled, as DeepSpeed does after the first step; or at that step.
    engine.optimizer._hp_optimizer_states_linked = False
    if all(group.state() for group in live.groups):
        engine.optimizer._lazy_init_hp_params_optimizer_state()
