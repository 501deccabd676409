# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints for DeepSpeed, written during training.

import megads_ucp
megads_ucp.add_arguments(parser)
megads_ucp.install(args)  # before deepspeed.initialize
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megads_ucp.arguments import add_arguments
from megads_ucp.errors import (
    ChannelError,
    Disagreement,
    DriftError,
    LayoutError,
    PlanError,
    StorageError,
    TensorParallelError,
    UniversalCheckpointError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from megads_ucp.engine.attach import install, uninstall
    from megads_ucp.engine.scopes import model_scope

__all__ = [
    "ChannelError",
    "Disagreement",
    "DriftError",
    "LayoutError",
    "PlanError",
    "StorageError",
    "TensorParallelError",
    "UniversalCheckpointError",
    "UnsupportedError",
    "add_arguments",
    "install",
    "model_scope",
    "uninstall",
]
__version__ = "0.1.0"

_ENGINE = {"install": "attach", "uninstall": "attach", "model_scope": "scopes"}
"""What needs DeepSpeed's internals, by module of megads_ucp.engine: imported at its first use, not with the package."""


def __getattr__(name: str) -> Any:
    if name not in _ENGINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"megads_ucp.engine.{_ENGINE[name]}")
    except ImportError as error:
        if not (error.name or "").startswith("deepspeed"):
            raise
        raise UnsupportedError(
            f"this DeepSpeed lacks something that megads_ucp relies on ({error}). Versions from 0.19.7 on are known to "
            "work: pip install 'deepspeed>=0.19.7'."
        ) from error
    return getattr(module, name)
