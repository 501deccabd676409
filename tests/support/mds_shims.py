# SPDX-License-Identifier: Apache-2.0
"""What Megatron-DeepSpeed needs from outside in order to train on a machine without an accelerator.

Nothing in a checkout is changed: modules that are gone, or that need one, are stood in for before it is imported.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import torch


class _Stub(ModuleType):
    """A module with the attributes given, found by ``import`` as if it were installed."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        vars(self).update(attributes)
        sys.modules[name] = self


def stand_in_for_missing_modules() -> None:
    """Before ``megatron`` is imported."""
    # Gone from DeepSpeed 0.19; imported at the top of megatron/training.py, called for compression only.
    _Stub("deepspeed.compression.compress", init_compression=None, redundancy_clean=None)
    # Needs torchvision; called for vision models only.
    _Stub("megatron.model.vision.knn_monitor", compute_feature_bank=None)
    _Stub("six")  # for the BERT tokenizer
    # Imported for logging to the web; its client would start threads, and ranks are forked.
    _Stub("wandb", run=None)
    _stand_in_for_argonne()


def _stand_in_for_argonne() -> None:
    """What the Argonne fork imports at its top: a helper library of its own, MPI, and a tracer."""

    def timed(*_: Any, **__: Any) -> Any:
        return lambda function: function

    def one() -> int:
        return 1

    def zero() -> int:
        return 0

    def cpu() -> str:
        return "cpu"

    def logger(name: str) -> Any:
        import logging

        return logging.getLogger(name)

    dist = _Stub("ezpz.dist", timeitlogit=timed, synchronize=lambda: None, get_torch_device_type=cpu)
    profile = _Stub("ezpz.profile", get_context_manager=lambda **_: contextlib.nullcontext())
    _Stub(
        "ezpz",
        dist=dist,
        profile=profile,
        get_rank=zero,
        get_local_rank=zero,
        get_world_size=one,
        get_torch_device=cpu,
        get_torch_device_type=cpu,
        get_hostname=lambda: "localhost",
        get_logger=logger,
    )
    _Stub("mpi4py", MPI=None)
    _Stub("tensorboard")
    _Stub("tensorboard.summary", Writer=None)


def patch_megatron() -> None:
    """After ``megatron.training`` is imported."""
    # The C++ helper would be compiled inside the checkout; Megatron has the same function in Python.
    helpers = _Stub("megatron.data.helpers")
    import megatron.data.dataset_utils as dataset_utils
    import megatron.data.gpt_dataset as gpt_dataset

    dataset_utils.compile_helper = lambda: None
    # A fork passes one more argument: whether to talk.
    vars(helpers)["build_sample_idx"] = lambda *arguments: gpt_dataset._build_sample_idx(*arguments[:5])
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    _keep_heads_apart()
    _gather_flat()


def _gather_flat() -> None:
    """Ulysses' cross entropy gathers vectors into a matrix, at which gloo, unlike NCCL, looks."""
    original = torch.distributed.all_gather_into_tensor

    def gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *more: Any, **keyword: Any) -> Any:
        return original(output_tensor.view(-1), input_tensor.contiguous().view(-1), *more, **keyword)

    torch.distributed.all_gather_into_tensor = gather


def _keep_heads_apart() -> None:
    """Ulysses without flash attention, as Megatron writes it for an older DeepSpeed.

    It passes the mask where DeepSpeed 0.19 wants the batch's dimension, and its core attention joins the heads, which
    DeepSpeed's all-to-all wants apart.
    """
    from deepspeed.sequence.layer import DistributedAttention

    original = DistributedAttention.forward

    def apart(core: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.unflatten(-1, (-1, inputs[0].shape[-1]))

    def forward(layer: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        if not layer.local_attn._forward_hooks:
            layer.local_attn.register_forward_hook(apart)
        return original(layer, query, key, value, 1, None, mask).flatten(2)

    DistributedAttention.forward = forward
