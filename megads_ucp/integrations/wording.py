# SPDX-License-Identifier: Apache-2.0
"""How a user says what an advice asks for: in Megatron-DeepSpeed by flags, elsewhere to DeepSpeed itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wording:
    """Parts of sentences.

    Attributes:
        load_universal: what makes a load one of a universal checkpoint.
        load_regular: what to take away for a load of a regular one.
        choose: what names the checkpoint to load, given its name.
    """

    load_universal: str
    load_regular: str
    choose: Callable[[str], str]


_MEGATRON = Wording(
    "add --universal-checkpoint",
    "drop --universal-checkpoint",
    lambda name: f"--load-tag {name}",
)
_DEEPSPEED = Wording(
    'put "checkpoint": {"load_universal": true} into the DeepSpeed config',
    "drop checkpoint.load_universal from the DeepSpeed config",
    lambda name: f"tag={name!r}",
)


def wording() -> Wording:
    """That of the code which this process runs."""
    return _DEEPSPEED if megatron_arguments() is None else _MEGATRON


def megatron_arguments() -> Any | None:
    """Megatron-DeepSpeed's parsed arguments, once it has them (megatron/global_vars.py); None in any other process."""
    arguments = getattr(sys.modules.get("megatron.global_vars"), "_GLOBAL_ARGS", None)
    return arguments if hasattr(arguments, "universal_checkpoint") else None
