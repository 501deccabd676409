# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's tensor parallelism is what its configuration asks for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed import comm as ds_comm
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.utils import groups

from megads_ucp.errors import TensorParallelError

logger = logging.getLogger("megads_ucp")


def check_degree(engine: Any, scope: str | None) -> None:
    """Check that a newly built engine has the tensor parallelism that its configuration asks for.

    Actual are the layers' own groups, and those the engine has taken from ``deepspeed.utils.groups``.

    Args:
        engine: a training or inference engine.
        scope: name of the model scope it was built in, None outside of any.

    Raises:
        TensorParallelError: it has another one.
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
        _refuse(type(engine).__name__, engine.module, wanted, found - {wanted}, scope)


def refuse_inherited_groups(engine: Any, arguments: Mapping[str, Any], scope: str | None) -> None:
    """Refuse to build an engine without tensor parallelism that would take an earlier engine's groups.

    DeepSpeed 0.19.8 then stops halfway: ``'NoneType' object has no attribute 'get_model_parallel_rank'``.

    Raises:
        TensorParallelError: it would.
    """
    config = getattr(arguments.get("config_class"), "tensor_parallel_config", None)
    if not isinstance(engine, DeepSpeedEngine) or config is None or arguments.get("mpu") is not None:
        return
    if config.autotp_size <= 1 and groups.mpu is groups and groups._get_model_parallel_world_size() > 1:
        model = arguments.get("model")
        _refuse(type(engine).__name__, model, 1, {groups._get_model_parallel_world_size()}, scope)


def warn_of_recorded_degree(engine: Any, scope_mates: Iterable[Any]) -> None:
    """Warn if ``engine`` is not the first of its scope of the degree that a ``tp_model_init`` has recorded there.

    ``init_utils.merge_tp_model_init_into_config`` writes that into the configuration of every later model, so that
    nobody can tell any more whether it was asked for.
    """
    if _has_recorded_degree(engine) and any(map(_has_recorded_degree, scope_mates)):
        logger.warning(
            "the %s of %s has TP %d, which an earlier deepspeed.tp_model_init asks of every later model. If this one's "
            "own configuration does not ask for it, build the other one inside "
            '`with megads_ucp.model_scope("<name>"):`',
            type(engine).__name__,
            type(engine.module).__name__,
            engine.autotp_size(),
        )


def _has_recorded_degree(engine: Any) -> bool:
    recorded = init_utils._TP_MODEL_INIT_ARGS
    return recorded is not None and engine.autotp_size() == recorded["tp_size"]


def _wanted_degree(engine: Any) -> int | None:
    """None if somebody else than AutoTP splits the model."""
    if isinstance(engine, InferenceEngine):
        return None if engine.mpu is not None else engine._config.tensor_parallel.tp_size
    if engine.mpu is not None and engine.mpu is not groups:
        return None
    return max(1, engine.autotp_size())


def _refuse(engine: str, model: Any, wanted: int, found: set[int], scope: str | None) -> None:
    rank = ds_comm.get_rank() if ds_comm.is_initialized() else 0
    actual = " and ".join(f"TP {degree}" if degree > 0 else "no group at all" for degree in sorted(found))
    if scope is None:
        cause = (
            "an earlier model of this process decides, because DeepSpeed keeps tensor-parallel groups and settings "
            "once per process. Build each model in a scope of its own: "
            '`with megads_ucp.model_scope("student"):` around its initialize or init_inference, and "teacher" '
            "for the other one"
        )
    else:
        cause = (
            f'model_scope("{scope}") has groups of another size already, or the model was split before. '
            "Build it, anew, in a scope of another name"
        )
    raise TensorParallelError(
        f"rank {rank}: the {engine} of {type(model).__name__} is configured for TP {wanted} but got {actual}: {cause}."
    )
