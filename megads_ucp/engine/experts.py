# SPDX-License-Identifier: Apache-2.0
"""Regular checkpoints of models with experts, which are not exported, but saved."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.engine import DeepSpeedEngine

from megads_ucp.engine.patches import Patches


def mend_save_of_experts(engine: DeepSpeedEngine, patches: Patches) -> None:
    """Let a client's ``universal_checkpoint_info`` be what it is without experts too: a method, or in the client state.

    ``DeepSpeedEngine._save_moe_checkpoint`` calls ``dict()`` on that attribute of the model, which Megatron-DeepSpeed
    has as a method, and refuses the key in the client state, where Megatron-DeepSpeed puts it as well.
    """
    if engine.has_moe_layers:
        patches.bind(engine, "_save_moe_checkpoint", functools.partial(_save_moe_checkpoint, weakref.ref(engine)))


def _save_moe_checkpoint(
    engine_ref: weakref.ref[DeepSpeedEngine],
    save_dir: Any,
    tag: Any,
    client_state: Mapping[str, Any] | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """``DeepSpeedEngine._save_moe_checkpoint`` of a model that has its info as a dict, if anybody gives one."""
    engine = engine_ref()
    assert engine is not None
    stock = functools.partial(type(engine)._save_moe_checkpoint, engine, save_dir, tag)
    rest = dict(client_state or {})
    info: Any = rest.pop(UNIVERSAL_CHECKPOINT_INFO, None) or getattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, None)
    if info is None:
        stock(rest, exclude_frozen_parameters=exclude_frozen_parameters)
        return
    own = vars(engine.module)
    before = {key: own[key] for key in (UNIVERSAL_CHECKPOINT_INFO,) if key in own}
    own[UNIVERSAL_CHECKPOINT_INFO] = dict(info() if callable(info) else info)
    try:
        stock(rest, exclude_frozen_parameters=exclude_frozen_parameters)
    finally:
        del own[UNIVERSAL_CHECKPOINT_INFO]
        own.update(before)
