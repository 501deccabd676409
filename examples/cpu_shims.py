# SPDX-License-Identifier: Apache-2.0
"""What megatron-core and DeepSpeed need in order to train on a machine without an accelerator.

Nothing here is part of a training script's logic: `pretrain_gpt.py` calls `install_without_accelerator()` once, scripts
without megatron-core call `use_gloo_alone()`, and on a GPU machine these calls do nothing. megatron-core asks
`torch.cuda` for the current device and for the state of its random generator wherever it allocates or draws; on CPU
both questions have perfectly good answers, given below.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def install_without_accelerator() -> None:
    """Answer megatron-core's CUDA questions from the CPU if DeepSpeed found no accelerator, or was told to see none.

    Call before `deepspeed.init_distributed()` and before megatron-core builds or seeds anything.
    """
    if get_accelerator().device_name() != "cpu":
        return
    use_gloo_alone()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    _answer_random_state_from_the_cpu()
    get_accelerator().is_fp16_supported = lambda: True  # without hardware for it, PyTorch is slow and right


def use_gloo_alone() -> None:
    """Keep DeepSpeed from compiling shared-memory collectives for the CPU: gloo is enough, and needs no C++ compiler.

    Call before `deepspeed.init_distributed()`. `deepspeed.comm.torch` is reached through `sys.modules`: as an
    attribute, that name is the real torch.
    """
    if get_accelerator().device_name() == "cpu":
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def _answer_random_state_from_the_cpu() -> None:
    """megatron-core's own RNG tracker then works unchanged: seeds per TP rank, forks around dropout."""
    from megatron.core.tensor_parallel import random as megatron_random  # here: other scripts do without megatron-core

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
