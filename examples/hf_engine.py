# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model under DeepSpeed's AutoTP and ZeRO-1, set up so that it is the same model at every TP."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import deepspeed
import torch
import training
from torch import nn


def build_engine(args: argparse.Namespace, model: nn.Module, tp: int) -> deepspeed.DeepSpeedEngine:
    """An engine that trains `model`, which every rank has drawn whole from the same seed: AutoTP cuts it.

    DeepSpeed makes the optimizer: one made before would hold on to the memory of the uncut parameters.
    """
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    undecayed = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}],
        lr_scheduler=partial(
            torch.optim.lr_scheduler.LambdaLR, lr_lambda=partial(training.learning_rate_ratio, args=args)
        ),
        config=deepspeed_config(args, tp),
        dist_init_required=False,
    )
    # In a config it would be refused: that is read before AutoTP makes its groups, and takes every rank for a DP rank.
    engine.set_train_batch_size(args.global_batch_size)
    return engine


def deepspeed_config(args: argparse.Namespace, tp: int) -> dict[str, Any]:
    """ZeRO-1 in fp32, in which curves of different topologies can be compared to the last digits."""
    dp = torch.distributed.get_world_size() // tp
    micro = training.micro_batch_size(args, dp)
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": args.global_batch_size // (micro * dp),
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "torch_adam": True}},
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": args.load is not None},
        "steps_per_print": 2**31,
        **tensor_parallel(tp),
    }


def tensor_parallel(tp: int) -> dict[str, Any]:
    """The section of a DeepSpeed config that asks for AutoTP; nothing at TP 1, where the model stays as it is.

    The head is cut over the vocabulary, tied or not, and logits stay where they are computed.
    """
    return {"tensor_parallel": {"autotp_size": tp, "vocab_parallel_lm_head": True}} if tp > 1 else {}
