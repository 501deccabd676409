# SPDX-License-Identifier: Apache-2.0
"""The names of everything in a universal checkpoint directory (format 0.4), and of what lies beside it."""

from __future__ import annotations

from pathlib import Path

LATEST = "latest_universal"
"""File in a save directory that names the latest universal checkpoint there."""

SUFFIX = "_universal"
"""What the name of a universal checkpoint adds to the tag of the regular one."""

MANIFEST = "manifest.json"

ZERO = "zero"
"""Directory of parameters and optimizer states: a directory for each parameter, a file for each of its states."""

PADDING = "padding"
"""Directory, ours alone, of the rows that pad vocabularies, arranged like ``ZERO``, which stock reads whole."""

MASTER = "fp32"
"""State name of the master weights, and so of their file (deepspeed.checkpoint.constants.FP32_WEIGHT_KEY)."""

STEP = "step"
"""The one state that is a scalar per parameter, written bare to step.pt."""

OPTIMIZER_VALUES = "optimizer_values.pt"
"""File, ours alone, of what the optimizer keeps beside states that are cut like its partition (storage/values.py)."""

OPTIMIZER_STATE = f"{ZERO}/optimizer_state.pt"


def state_file(parameter: str, state: str) -> str:
    """File of one state of a parameter, relative to the checkpoint directory."""
    return f"{ZERO}/{parameter}/{state}.pt"


def padding_file(parameter: str, state: str) -> str:
    """File of one state of the rows that pad a vocabulary, relative to the checkpoint directory."""
    return f"{PADDING}/{parameter}/{state}.pt"


def model_states_file(mp_rank: int) -> str:
    """File of a model-parallel rank's model states, client state included."""
    return f"mp_rank_{mp_rank:02d}_model_states.pt"


MODEL_STATES_FILES = "mp_rank_*_model_states.pt"
"""Pattern of the files that :func:`model_states_file` names."""


def exact_file(stage: int) -> str:
    """File, unknown to stock DeepSpeed, of the buffers and frozen values of a stage that fp32 cannot hold, by name."""
    return f"exact_values_{stage:02d}.pt"


EXACT_FILES = "exact_values_*.pt"
"""Pattern of the files that :func:`exact_file` names."""


def universal_directory(regular: Path) -> Path:
    """Directory of the universal checkpoint that belongs to the regular one in ``regular``."""
    return regular.with_name(regular.name + SUFFIX)
