# SPDX-License-Identifier: Apache-2.0
"""Serves jobs on a Megatron-DeepSpeed checkout: started by :mod:`tests.support.mds`, one process per checkout.

Its ``megatron`` shadows megatron-core's, so it cannot live in the process of the other tests. Like theirs, this process
imports everything once and forks the ranks of every job.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from megads_ucp import run as launcher
from tests.support.mds import Conversion, Job, Trace
from tests.support.mds_shims import patch_megatron, stand_in_for_missing_modules
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import Log
from tests.support.stock import convert


def main(checkout: Path, folder: Path) -> None:
    """Answer pickled jobs from standard input until it is closed, by a list of traces or by a failure's text."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Megatron prints a lot
    sys.path.insert(0, str(checkout))
    stand_in_for_missing_modules()
    launcher.add_flags_to_megatron()
    import megatron.training  # noqa: F401

    patch_megatron()
    _write_data(folder / "data")
    while True:
        try:
            request: Job | Conversion = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any = None
        try:
            if isinstance(request, Conversion):
                convert(request.regular, request.universal)
            else:
                train = functools.partial(_train, checkout, folder, request)
                answer = run_ranks(train, request.world)
        except RankError as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()


def _write_data(prefix: Path) -> None:
    """Megatron's own indexed dataset, of tokens with something to learn."""
    from megatron.data import indexed_dataset

    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=128)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        steps = torch.randint(1, 4, (60,), generator=generator)
        builder.add_item((steps.cumsum(0) * 7) % 127)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def _train(checkout: Path, folder: Path, job: Job) -> Trace:
    """On a rank: the script, as the user would run it; what its steps yield is noted on the way."""
    trace, log = Trace(), Log()
    _watch(trace, job)
    script = str(checkout / "pretrain_gpt.py")
    arguments = job.arguments(folder)
    if job.plugin:
        launcher.main([script, *arguments])
    else:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
    trace.warnings = log.messages
    return trace


def _watch(trace: Trace, job: Job) -> None:
    """Have Megatron's own train_step and data loader fill the trace."""
    import megatron.training as training
    from megatron import get_args
    from megatron.checkpointing import save_checkpoint
    from megatron.core import tensor_parallel
    from megatron.data.gpt_dataset import GPTDataset

    step, get = training.train_step, GPTDataset.__getitem__

    def noting_step(forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any) -> Any:
        if not trace.losses:
            args = get_args()
            trace.iteration, trace.consumed = args.iteration, args.consumed_train_samples
            trace.tokens = args.consumed_train_tokens
            with torch.random.fork_rng(), tensor_parallel.get_cuda_rng_tracker().fork():
                trace.draws = tuple(torch.rand(3).tolist())
            if job.again is not None:
                args.save = str(job.again)
                save_checkpoint(args.iteration, model, optimizer, scheduler)
                args.save = job.save and str(job.save)
        trace.rates.append(float(model[0].optimizer.param_groups[0]["lr"]))
        trace.samples.append([])
        done = step(forward, data, model, optimizer, scheduler, config)
        trace.losses.append(float(done[0]["lm loss"]))
        return done

    def noting_get(dataset: Any, index: int) -> Any:
        sample = get(dataset, index)
        if trace.samples:
            trace.samples[-1].append(hashlib.sha256(sample["text"].tobytes()).hexdigest()[:12])
        return sample

    training.train_step = noting_step
    GPTDataset.__getitem__ = noting_get


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
