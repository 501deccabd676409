# SPDX-License-Identifier: Apache-2.0
"""What the package does to an engine when it has been built.

That is when its optimizer has partitioned and knows its true order, so that is when partitions are recorded. Classes
are left alone but for the one patch of :mod:`megads_ucp.engine.construction`; everything else is bound to the instance.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed import comm as ds_comm
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from megads_ucp.config import CONFIG_SECTION, ExportConfig
from megads_ucp.engine.adapter import engine_state, why_unsupported
from megads_ucp.engine.bookkeeping import mend
from megads_ucp.engine.compat import check_deepspeed
from megads_ucp.engine.construction import watch
from megads_ucp.engine.context import EngineContext
from megads_ucp.engine.degrees import check_degree, refuse_inherited_groups, warn_of_recorded_degree
from megads_ucp.engine.experts import mend_save_of_experts
from megads_ucp.engine.methods import destroy, load_checkpoint, save_checkpoint
from megads_ucp.engine.patches import Patches
from megads_ucp.engine.scopes import current_scope, scope_mates
from megads_ucp.errors import UnsupportedError
from megads_ucp.load.remarks import batch_advice
from megads_ucp.save.exporter import Exporter

logger = logging.getLogger("megads_ucp")

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


def _trains(engine: DeepSpeedEngine) -> bool:
    """Whether it has an optimizer: a model that is only evaluated is under nobody's flags for what is saved."""
    return bool(getattr(engine.optimizer, "using_real_optimizer", engine.optimizer is not None))


def _say_early(engine: DeepSpeedEngine, unsupported: str, strict: bool) -> None:
    """Say of an engine that is to be exported why it cannot be, hours before its first save.

    Raises:
        UnsupportedError: if ``strict``.
    """
    text = (
        f"the {type(engine).__name__} of {type(engine.module).__name__} cannot export universal checkpoints: "
        f"{unsupported}. To train it without, set "
        f'"{CONFIG_SECTION}": false in its DeepSpeed config.'
    )
    if strict:
        raise UnsupportedError(f"rank {ds_comm.get_rank()}: {text}")
    if ds_comm.get_rank() == 0:
        logger.warning("%s", text)


class Attachment:
    """The package's hold on one engine: partitions recorded, bookkeeping mended, methods bound to the instance."""

    def __init__(self, engine: DeepSpeedEngine, default: ExportConfig) -> None:
        config = default.for_engine(engine._config._param_dict)
        unsupported, engine_ref = why_unsupported(engine), weakref.ref(engine)
        if unsupported and config.enabled and _trains(engine):
            _say_early(engine, unsupported, config.strict)
        self._patches = Patches()
        self.context = EngineContext(unsupported or engine_state(engine), config)
        self.exporter = Exporter(self.context) if config.enabled else None
        mend_save_of_experts(engine, self._patches)
        if not unsupported:
            mend(engine.optimizer, self.context.state.groups, self._patches)
        loading = functools.partial(load_checkpoint, engine_ref, self.context)
        self._patches.bind(engine, "load_checkpoint", loading)
        if self.exporter is not None:
            saving = functools.partial(save_checkpoint, engine_ref, self.exporter)
            self._patches.bind(engine, "save_checkpoint", saving)
        # DeepSpeed's hooks make every engine part of a cycle, so one more reference to it prolongs no life.
        self._patches.bind(engine, "destroy", functools.partial(destroy, engine, engine_ref, self.context))

    def detach(self) -> None:
        """Give the engine its own methods and bookkeeping back, and close its channel."""
        self._patches.undo()
        self.context.close()
