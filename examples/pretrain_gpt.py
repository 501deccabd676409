# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small GPT of megatron-core under DeepSpeed ZeRO-1, and resume it at any other tensor and data parallelism.

    torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 \
        --save checkpoints --save-interval 20 --universal-checkpoint-export
    torchrun --standalone --nproc-per-node 3 pretrain_gpt.py --tensor-model-parallel-size 1 \
        --load checkpoints --train-steps 80

The plugin is the three lines that name `megads_ucp`. Everything else is an ordinary training script, written so that
its losses do not depend on the topology (see training.py).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import cpu_shims
import deepspeed
import deepspeed.comm as dist
import torch
import training
from deepspeed.accelerator import get_accelerator
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import megads_ucp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Dimensions of the model. TP 1, 2 and 4 divide heads, groups, feed-forward and vocabulary without padding."""

    layers: int = 2
    hidden: int = 128
    heads: int = 8
    query_groups: int = 4
    feed_forward: int = 352
    vocabulary: int = 256  # bytes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    training.add_arguments(parser)
    megads_ucp.add_arguments(parser)
    return parser.parse_args()


class ModelParallelUnit:
    """The `mpu` that DeepSpeed asks for ranks and groups: megatron-core's `parallel_state` and two names it dropped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(parallel_state.get_model_parallel_group())

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(parallel_state.get_model_parallel_group())


# --------------------------------------------------------------------------------------------------- model and engine


def build_model(args: argparse.Namespace, shape: Shape) -> GPTModel:
    """A GPT with SwiGLU, grouped queries, RMSNorm and rotary positions, sharded over the tensor parallel group."""
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        ffn_hidden_size=shape.feed_forward,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,  # its kernels come with apex
        use_cpu_initialization=True,  # draws whole matrices, then cuts them: the same weights at every TP
        params_dtype=DTYPES[args.dtype],
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocabulary,
        max_sequence_length=args.seq_length,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
    )


def build_engine(args: argparse.Namespace, model: GPTModel) -> deepspeed.DeepSpeedEngine:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    undecayed = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, partial(training.learning_rate_ratio, args=args)),
        mpu=ModelParallelUnit(),
        config=deepspeed_config(args),
        dist_init_required=False,
    )
    return engine


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """ZeRO-1; in bf16 with gradients accumulated in fp32, which is what makes DeepSpeed choose its `BF16_Optimizer`."""
    return {
        "train_batch_size": args.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size(
            args, parallel_state.get_data_parallel_world_size()
        ),
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 12},
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"load_universal": args.load is not None},
        "steps_per_print": 2**31,
    }


# ------------------------------------------------------------------------------------------------------------ training


def loss_of(engine: deepspeed.DeepSpeedEngine, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of a micro batch (samples, seq_length + 1)."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.shape[1]
    positions = torch.arange(length, device=engine.device).expand_as(inputs)
    hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool, device=engine.device).triu(1)  # True: not attended
    return engine(inputs, positions, hidden_from, labels=labels).float().mean()


def main() -> None:
    args = parse_arguments()
    cpu_shims.install_without_accelerator()
    megads_ucp.install(args)

    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)

    engine = build_engine(args, build_model(args, Shape()))
    corpus = training.Corpus(training.standard_library(), args.seq_length, args.seed)
    training.run(engine, corpus, partial(loss_of, engine), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
