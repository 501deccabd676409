# SPDX-License-Identifier: Apache-2.0
"""Jobs on a checkout of Megatron-DeepSpeed: its own pretrain_gpt.py, its own command line, tiny models.

    with Host(checkout) as host:
        traces = host.run(Job(Topology(tp=2, dp=2), save=folder))

The checkout stays as it is; what a machine without an accelerator lacks comes from :mod:`tests.support.mds_shims`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from tests.support.ranks import RankError

CHECKOUT, ARGONNE = "MEGATRON_DEEPSPEED_PATH", "MEGATRON_DEEPSPEED_ARGONNE_PATH"
"""Environment variables with the paths of checkouts: deepspeedai/Megatron-DeepSpeed, and a fork that interleaves."""

SAVED, STEPS = 5, 10
"""A source saves after so many steps, and goes on to so many."""

TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
"""How far losses may differ between topologies, relative, by the kind of engine."""

BATCH, SEQUENCE, VOCABULARY, SEED = 8, 16, 127, 1234  # NullTokenizer adds one: 128 rows, which divide at every TP


@dataclass(frozen=True)
class Topology:
    """Degrees; ``sp`` is DeepSpeed's (Ulysses) sequence parallelism."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    sp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp * self.sp

    def __str__(self) -> str:
        more = (f"PP{self.pp}" if self.pp > 1 else "") + (f"SP{self.sp}" if self.sp > 1 else "")
        return f"TP{self.tp}{more}DP{self.dp}"


@dataclass(frozen=True)
class Model:
    """A model's flags: 2 layers (4 under the pipeline module), hidden 32, 4 heads; biases, LayerNorm, GELU, learned
    positions and tied embeddings unless ``flags`` say otherwise."""

    flags: tuple[str, ...] = ()
    pipe: bool = False
    layers: int = 2

    def arguments(self) -> list[str]:
        sizes = {"num-layers": self.layers, "hidden-size": 32, "num-attention-heads": 4, "max-position-embeddings": 16}
        return [
            *_flags(sizes),
            *self.flags,
            *([] if self.pipe else ["--no-pipeline-parallel"]),
        ]


SWIGLU = ("--swiglu", "--ffn-hidden-size", "48")
UNTIED = ("--untie-embeddings-and-output-weights",)
LLAMA = ("--normalization", "rmsnorm", "--use-rotary-position-embeddings", "--disable-bias-linear")
GQA = ("--num-key-value-heads", "2")


@dataclass(frozen=True)
class Job:
    """One run of pretrain_gpt.py.

    Attributes:
        kind: "fp32" or "bf16" (``BF16_Optimizer``).
        plugin: run by megads_ucp.run with the export on; otherwise by Python alone.
        save: where it saves at SAVED and at STEPS.
        load: where it resumes from, at SAVED, from a universal checkpoint.
        again: where it saves, once more, what it has loaded, before it trains.
        config: laid over the DeepSpeed config.
    """

    topology: Topology
    model: Model = Model()
    kind: str = "fp32"
    plugin: bool = True
    zero: int = 1
    save: Path | None = None
    load: Path | None = None
    again: Path | None = None
    tag: str = f"global_step{SAVED}_universal"
    steps: int = STEPS
    more: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.topology.world

    def arguments(self, folder: Path) -> list[str]:
        """The command line; the DeepSpeed config and the data lie in ``folder``."""
        run = {
            "tensor-model-parallel-size": self.topology.tp,
            "pipeline-model-parallel-size": self.topology.pp,
            "ds-sequence-parallel-size": self.topology.sp,
            "seq-length": SEQUENCE,
            "micro-batch-size": 1,
            "global-batch-size": BATCH,
            "train-iters": self.steps,
            "lr": 3e-3,
            "min-lr": 3e-4,
            "lr-decay-iters": STEPS,
            "lr-decay-style": "cosine",
            "clip-grad": 1.0,
            "weight-decay": 0.1,
            "data-path": folder / "data",
            "data-cache-path": folder / "cache",
            "tokenizer-type": "NullTokenizer",
            "vocab-size": VOCABULARY,
            "make-vocab-size-divisible-by": 8,
            "seed": SEED,
            "split": "100,0,0",
            "distributed-backend": "gloo",
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "log-interval": 100,
            "eval-iters": 0,
            "num-workers": 0,
            "deepspeed_config": folder / f"{self.kind}{self.zero}.json",
            "zero-stage": self.zero,
        }
        switches = "deepspeed no-gradient-accumulation-fusion no-masked-softmax-fusion"
        where = {"save": self.save, "save-interval": SAVED, "load": self.load, "load-tag": self.load and self.tag}
        return [
            *_flags(run),
            *(f"--{switch}" for switch in switches.split()),
            *_flags({name: value for name, value in where.items() if value is not None}),
            *(["--universal-checkpoint"] if self.load else []),
            *(["--bf16"] if self.kind == "bf16" else []),
            *(["--universal-checkpoint-export", "--universal-checkpoint-export-strict"] if self.plugin else []),
            *self.model.arguments(),
            *self.more,
        ]

    def deepspeed_config(self) -> dict[str, Any]:
        low = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} if self.kind == "bf16" else {}
        return {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.zero},
            "steps_per_print": 1000,
            **low,
            **self.config,
        }


@dataclass(frozen=True)
class Conversion:
    """DeepSpeed's own converter, where the classes in Megatron's checkpoints can be imported."""

    regular: Path
    universal: Path


def _flags(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"--{name}"
        yield str(value)


@dataclass
class Trace:
    """What one rank saw of a run.

    Attributes:
        losses, rates, samples: of each step: the loss, the learning rate it was made with, the samples (their tokens'
            digests) that this rank was fed.
        iteration, consumed, tokens: where Megatron says that it stands when training starts.
        draws: what the tensor-parallel random generator yields next when training starts.
        warnings: what the package logged.
    """

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    samples: list[list[str]] = field(default_factory=list)
    iteration: int = 0
    consumed: int = 0
    tokens: int = 0
    draws: tuple[float, ...] = ()
    warnings: list[str] = field(default_factory=list)


class Host:
    """A process that has imported a checkout once and forks the ranks of every job (:mod:`tests.support.mds_host`).

    It is started by the first job.
    """

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.checkout, self._folder = checkout, folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            cast(IO[bytes], self._process.stdin).close()
            self._process.wait(300)

    def run(self, job: Job) -> list[Trace]:
        """The traces of all ranks.

        Raises:
            RankError: a rank failed.
        """
        return cast(list[Trace], self._ask(job))

    def convert(self, regular: Path, universal: Path) -> None:
        """Run stock's converter.

        Raises:
            RankError: it failed.
        """
        self._ask(Conversion(regular, universal))

    def log(self) -> str:
        """All that its ranks have printed so far."""
        return (self._folder / "host.log").read_text(errors="replace")

    def _ask(self, request: Job | Conversion) -> Any:
        if isinstance(request, Job):
            config = json.dumps(request.deepspeed_config())
            (self._folder / f"{request.kind}{request.zero}.json").write_text(config)
        if self._process is None:
            command = [sys.executable, "-m", "tests.support.mds_host", str(self.checkout), str(self._folder)]
            log = (self._folder / "host.log").open("wb")
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([".", "examples"])},
            )
        pipes = self._process
        pickle.dump(request, cast(IO[bytes], pipes.stdin))
        cast(IO[bytes], pipes.stdin).flush()
        try:
            answer = pickle.load(cast(IO[bytes], pipes.stdout))
        except EOFError:
            raise RankError(self.log()[-6000:]) from None
        if isinstance(answer, str):
            raise RankError(answer)
        return answer


def losses(traces: list[Trace]) -> list[float]:
    """The losses of all steps, which the ranks agree on."""
    assert len({tuple(trace.losses) for trace in traces}) == 1, "ranks report different losses"
    return traces[0].losses
