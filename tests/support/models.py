# SPDX-License-Identifier: Apache-2.0
"""Small models, DeepSpeed engines of every kind under test, and training that does not depend on the topology.

To be used on a rank (inside run_ranks). Weights are drawn parameter by parameter from generators seeded with the
parameter's name and then cut, batches are global and then cut, losses are averaged over the global batch: so two runs
at different TP and DP start equal and, in exact arithmetic, stay equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

GLOBAL_BATCH = 12  # samples; divides over DP 1, 2, 3, 4, 6 and 12

Batch = tuple[torch.Tensor, ...]
Optimizers = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# ------------------------------------------------------------------------------------------------------------- engines

# What makes DeepSpeed 0.19.8 choose the optimizer class or the code path that the key names.
KINDS: dict[str, dict[str, Any]] = {
    "bf16_optimizer": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    },
    "zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "zero2": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 1}},
    "fp32": {"zero_optimization": {"stage": 1}},
    "fp32_zero2": {"zero_optimization": {"stage": 2}},
    "cpu_offload": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "round_robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "round_robin_zero1": {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
    "parameter_alignment": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "parameter_alignment": True},
    },
}


def initialize(
    model: nn.Module,
    kind: str,
    *,
    optimizer: Optimizers | None = None,
    groups: list[dict[str, Any]] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    mpu: Any = None,
    config: Mapping[str, Any] | None = None,
) -> deepspeed.DeepSpeedEngine:
    """A DeepSpeed engine of the kind (a key of KINDS).

    optimizer: makes the client's optimizer of parameter groups; torch's AdamW if None. To have DeepSpeed make it, name
        it in `config["optimizer"]`.
    groups: parameter groups of a client's optimizer; decay_groups(model) if None.
    config: laid over the kind's DeepSpeed config, section by section; {"checkpoint": {"load_universal": True}}, say.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # what the data really holds is train()'s business
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
    }
    settings = _overlaid(_overlaid(settings, KINDS[kind]), config or {})
    if settings.get("fp16", {}).get("enabled"):
        _let_any_cpu_do_fp16()
    groups = decay_groups(model) if groups is None else groups
    if "optimizer" in settings:
        client: dict[str, Any] = {"model_parameters": groups}
    else:
        client = {"optimizer": (optimizer or adamw)(groups)}
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, mpu=mpu, lr_scheduler=scheduler, dist_init_required=False, **client
    )
    return engine


def _let_any_cpu_do_fp16() -> None:
    """DeepSpeed refuses fp16 where oneDNN has no fast kernels for it; torch's slow ones are fast enough for tests."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.float16]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without: the two groups of nearly every training script."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def _overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = deepcopy(dict(base))
    for key, value in over.items():
        section = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _overlaid(merged[key], value) if section else value
    return merged


# ------------------------------------------------------------------------------------------------------------ training


def train(engine: deepspeed.DeepSpeedEngine, batches: Iterable[Batch]) -> list[float]:
    """One optimizer step per global batch; returns the loss of each, averaged over the batch (equal on all ranks).

    The model is called with the tensors of the batch and returns its mean loss. Each DP rank takes its own samples,
    split over the engine's gradient accumulation steps.
    """
    group = engine.seq_data_parallel_group
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for batch in batches:
        if len(batch[0]) % (degree * accumulation):
            raise ValueError(f"{len(batch[0])} samples do not divide over DP {degree} x accumulation {accumulation}")
        total = torch.zeros((), dtype=torch.float64)
        for step in range(accumulation):
            part = slice(rank * accumulation + step, None, degree * accumulation)
            loss = engine(*(tensor[part] for tensor in batch))
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / accumulation / degree
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    return losses


# -------------------------------------------------------------------------------------------------------- plain models


class MLP(nn.Module):
    """Linear layers with odd sizes; called with (inputs, targets), returns the loss.

    sizes: widths, from the input's to the output's.
    scalars: extra parameters of these many elements each (none by default), which scale the output and so get
        gradients: small groups are where partitions are mostly padding.
    """

    def __init__(self, sizes: Sequence[int] = (7, 13, 11, 5), scalars: Sequence[int] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.scalars = nn.ParameterList(nn.Parameter(torch.empty(numel)) for numel in scalars)
        draw_weights(self)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = inputs.to(next(self.parameters()).dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        for scalar in self.scalars:
            hidden = hidden * (1 + scalar.mean())
        return nn.functional.mse_loss(hidden.float(), targets)


def mlp_batches(
    start: int, stop: int, sizes: Sequence[int] = (7, 13, 11, 5), samples: int = GLOBAL_BATCH
) -> Iterator[Batch]:
    """The global batches of steps [start, stop): the same for a step whichever run asks for it."""
    for step in range(start, stop):
        generator = _generator(f"batch {step}")
        yield torch.randn(samples, sizes[0], generator=generator), torch.rand(samples, sizes[-1], generator=generator)


def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Fills each parameter, in place, from its own generator; see full_weight."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(full_weight(name, parameter.shape, seed))


def full_weight(name: str, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """The initial value of a parameter before any cut: fp32, depends on name, shape and seed only."""
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
    return torch.randn(*shape, generator=_generator(f"{seed} {name}")) * scale


def _generator(words: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(words.encode()))
