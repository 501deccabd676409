# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small GPT of megatron-core under DeepSpeed ZeRO-1, and resume it at any other tensor and data parallelism.

    torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 \
        --save checkpoints --save-interval 20 --universal-checkpoint-export
    torchrun --standalone --nproc-per-node 3 pretrain_gpt.py --tensor-model-parallel-size 1 --load checkpoints

The plugin is the three lines that name `megads_ucp`. Everything else is an ordinary training script, written so that
its losses do not depend on the topology: sample i of the corpus is the same everywhere, step s trains on samples
[s * batch, (s + 1) * batch) everywhere, and the printed loss is the mean over all tokens of that global batch.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_shims
import deepspeed
import deepspeed.comm as dist
import torch
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
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--global-batch-size", type=int, default=12, help="samples per step, at every topology")
    parser.add_argument("--max-micro-batch-size", type=int, default=4, help="samples a rank runs at once, at most")
    parser.add_argument("--train-steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", type=Path, help="directory to save checkpoints in")
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--load", type=Path, help="directory to resume from, out of a universal checkpoint")
    parser.add_argument("--load-tag", help="which checkpoint in it; default: what latest_universal names")
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


# ---------------------------------------------------------------------------------------------------------------- data


def standard_library(nbytes: int = 2 << 20) -> torch.Tensor:
    """The source code of Python's standard library, byte by byte, in the order of file names: (nbytes,), uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text[:nbytes]), dtype=torch.uint8)


@functools.lru_cache(maxsize=2)
def shuffled(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Corpus:
    """An endless sequence of samples, cut from `text` and shuffled anew in each epoch."""

    text: torch.Tensor  # (bytes,), uint8
    seq_length: int
    seed: int

    def samples(self, first: int, count: int) -> torch.Tensor:
        """Samples [first, first + count): (count, seq_length + 1), int64.

        They depend on the seed alone, so a resumed run needs to know one number: how many samples were consumed.
        """
        windows = (len(self.text) - 1) // self.seq_length
        rows = []
        for index in range(first, first + count):
            epoch, position = divmod(index, windows)
            start = int(shuffled(windows, self.seed + epoch)[position]) * self.seq_length
            rows.append(self.text[start : start + self.seq_length + 1])
        return torch.stack(rows).long()


def micro_batches(corpus: Corpus, consumed: int, engine: deepspeed.DeepSpeedEngine) -> Iterator[torch.Tensor]:
    """This rank's part of the global batch that starts at sample `consumed`, one micro batch after the other."""
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    first = consumed + parallel_state.get_data_parallel_rank() * micro * accumulation
    for index in range(accumulation):
        yield corpus.samples(first + index * micro, micro).to(engine.device)


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
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_ratio(step, args)),
        mpu=ModelParallelUnit(),
        config=deepspeed_config(args),
        dist_init_required=False,
    )
    return engine


def learning_rate_ratio(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first tenth of the run, then a cosine down to a tenth of the peak."""
    warmup = max(1, args.train_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, args.train_steps - warmup))
    return 0.55 + 0.45 * math.cos(math.pi * progress)


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """ZeRO-1; in bf16 with gradients accumulated in fp32, which is what makes DeepSpeed choose its `BF16_Optimizer`."""
    dp = parallel_state.get_data_parallel_world_size()
    samples_per_rank, remainder = divmod(args.global_batch_size, dp)
    if remainder:
        raise ValueError(f"--global-batch-size {args.global_batch_size} must be a multiple of DP {dp}")
    micro = max(size for size in range(1, args.max_micro_batch_size + 1) if samples_per_rank % size == 0)
    return {
        "train_batch_size": args.global_batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 12},
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"load_universal": args.load is not None},
        "steps_per_print": 2**31,
    }


# ------------------------------------------------------------------------------------------------------------ training


def train_step(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, consumed: int) -> float:
    """One optimizer step; returns the mean loss over every token of the global batch."""
    length = corpus.seq_length
    positions = torch.arange(length, device=engine.device).unsqueeze(0)
    hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool, device=engine.device).triu(1)  # True: not attended
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for tokens in micro_batches(corpus, consumed, engine):
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = engine(inputs, positions.expand_as(inputs), hidden_from, labels=labels).float().mean()
        engine.backward(loss)
        engine.step()
        total += loss.detach().double()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.item() / engine.gradient_accumulation_steps() / parallel_state.get_data_parallel_world_size()


def save(engine: deepspeed.DeepSpeedEngine, directory: Path, consumed: int) -> None:
    """An ordinary `save_checkpoint`; under --universal-checkpoint-export it writes the universal checkpoint too."""
    start = time.perf_counter()
    engine.save_checkpoint(str(directory), client_state={"consumed_samples": consumed})
    log(f"saved global_step{engine.global_steps} in {time.perf_counter() - start:.2f} s")


def resume(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> int:
    """Load a universal checkpoint, whatever topology wrote it; returns how many samples that run had consumed."""
    path, client_state = engine.load_checkpoint(str(args.load), tag=args.load_tag)
    log(f"resumed from {path} at step {engine.global_steps}")
    return int(client_state["consumed_samples"])


def log(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


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
    corpus = Corpus(standard_library(), args.seq_length, args.seed)
    consumed = resume(engine, args) if args.load else 0

    while engine.global_steps < args.train_steps:
        start = time.perf_counter()
        learning_rate = engine.get_lr()[0]
        loss = train_step(engine, corpus, consumed)
        consumed += args.global_batch_size
        log(
            f"step {engine.global_steps}/{args.train_steps} | loss {loss:.8f} | lr {learning_rate:.3e} "
            f"| gradient norm {float(engine.get_global_grad_norm()):.4f} | {time.perf_counter() - start:.2f} s"
        )
        if args.save and engine.global_steps % args.save_interval == 0:
            save(engine, args.save, consumed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
