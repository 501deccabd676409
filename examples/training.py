# SPDX-License-Identifier: Apache-2.0
"""What the training scripts here have in common: a corpus, its global batches, saving, resuming, printing.

Written so that losses do not depend on the topology: sample i of the corpus is the same everywhere, step s trains on
samples [s * batch, (s + 1) * batch) everywhere, and the printed loss is the mean over all tokens of that global batch.
"""

from __future__ import annotations

import argparse
import functools
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch

# ----------------------------------------------------------------------------------------------------------- arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every training script here knows."""
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


def micro_batch_size(args: argparse.Namespace, dp: int) -> int:
    """The largest that is allowed and divides a rank's part of the global batch."""
    samples_per_rank, remainder = divmod(args.global_batch_size, dp)
    if remainder:
        raise ValueError(f"--global-batch-size {args.global_batch_size} must be a multiple of DP {dp}")
    return max(size for size in range(1, args.max_micro_batch_size + 1) if samples_per_rank % size == 0)


def learning_rate_ratio(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first tenth of the run, then a cosine down to a tenth of the peak."""
    warmup = max(1, args.train_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, args.train_steps - warmup))
    return 0.55 + 0.45 * math.cos(math.pi * progress)


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

    text: torch.Tensor  # (tokens,), any integers
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
    """This rank's part of the global batch that starts at sample `consumed`, one micro batch after the other.

    The same on all ranks of a tensor parallel group, as Megatron and AutoTP both want it.
    """
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    first = consumed + dist.get_rank(engine.data_parallel_group) * micro * accumulation
    for index in range(accumulation):
        yield corpus.samples(first + index * micro, micro).to(engine.device)


# ------------------------------------------------------------------------------------------------------------ training


def train_step(
    engine: deepspeed.DeepSpeedEngine, batches: Iterator[torch.Tensor], loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """One optimizer step; returns the mean loss over every token of the global batch.

    loss_of: the mean loss over a micro batch of this rank.
    """
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for tokens in batches:
        loss = loss_of(tokens)
        engine.backward(loss)
        engine.step()
        total += loss.detach().double()
    dist.all_reduce(total, group=engine.data_parallel_group)
    return total.item() / engine.gradient_accumulation_steps() / dist.get_world_size(engine.data_parallel_group)


def run(
    engine: deepspeed.DeepSpeedEngine,
    corpus: Corpus,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    args: argparse.Namespace,
) -> None:
    """Resumes if that was asked for, trains to the last step, and saves on the way."""
    consumed = resume(engine, args) if args.load else 0
    while engine.global_steps < args.train_steps:
        start = time.perf_counter()
        learning_rate = engine.get_lr()[0]
        loss = train_step(engine, micro_batches(corpus, consumed, engine), loss_of)
        consumed += args.global_batch_size
        log(
            f"step {engine.global_steps}/{args.train_steps} | loss {loss:.8f} | lr {learning_rate:.3e} "
            f"| gradient norm {float(engine.get_global_grad_norm()):.4f} | {time.perf_counter() - start:.2f} s"
        )
        if args.save and engine.global_steps % args.save_interval == 0:
            save(engine, args.save, consumed)


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
