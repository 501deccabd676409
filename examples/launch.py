# SPDX-License-Identifier: Apache-2.0
"""Runs a training script under torchrun and reads its losses while it trains: what all demonstrations here share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # DeepSpeed requires it
import torch

RUN_LIMIT_S = 900  # a run that takes longer than this hangs
STEP_LINE = re.compile(r"^step (\d+)/\d+ \| loss (\S+)")
SAVED_LINE = re.compile(r"^saved (\S+) in (\S+) s")

Losses = Mapping[int, float]  # step -> loss


class RunFailed(RuntimeError):
    """A training run ended early; the message holds the end of its output."""


@dataclass(frozen=True)
class Topology:
    tp: int
    dp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"TP{self.tp}xDP{self.dp}"


@dataclass
class Outcome:
    """What a run printed: its loss per step, and how long each checkpoint took, by tag."""

    losses: dict[int, float] = field(default_factory=dict)
    save_seconds: dict[str, float] = field(default_factory=dict)

    def read(self, line: str) -> None:
        if match := STEP_LINE.match(line):
            self.losses[int(match[1])] = float(match[2])
        elif match := SAVED_LINE.match(line):
            self.save_seconds[match[1]] = float(match[2])


class Progress:
    """One line per run: redrawn on a terminal, and growing where there is none."""

    WIDTH = 20

    def __init__(self, title: str, first: int, last: int) -> None:
        self.title, self.first, self.last = title, first, last
        self.start = time.monotonic()
        self.drawn = 0
        self.redraws = sys.stdout.isatty()
        print(f"{title}  ", end="", flush=True)

    def show(self, losses: Losses) -> None:
        filled = self.WIDTH * (max(losses, default=self.first) - self.first) // (self.last - self.first)
        bar = "█" * filled
        if self.redraws:
            print(f"\r{self.title}  {bar:░<{self.WIDTH}}  {self._state(losses)}", end="", flush=True)
        else:
            print(bar[self.drawn :], end="", flush=True)
        self.drawn = filled

    def finish(self, losses: Losses) -> None:
        self.show(losses)
        print("" if self.redraws else f"  {self._state(losses)}", flush=True)

    def _state(self, losses: Losses) -> str:
        step = max(losses, default=self.first)
        loss = f"loss {losses[step]:.4f}" if losses else "starting"
        return f"step {step:>3}/{self.last}  {loss:<11}  {time.monotonic() - self.start:3.0f} s"


def train(
    script: str,
    topology: Topology,
    options: Sequence[str],
    out: Path,
    progress: Progress,
    *,
    name: str | None = None,
    kill_at: int | None = None,
) -> Outcome:
    """Run a script of this directory under torchrun; its whole output goes to <out>/logs/<name>.log.

    name: of the run; the topology's, if None.
    kill_at: once this step's loss is printed, every process of the run gets SIGKILL, as from a node that is lost.

    Raises RunFailed, with the last lines of that output, unless the run exits with 0, or is killed as it was to be.
    """
    name = name or str(topology)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={topology.ranks}"]
    command = [*launcher, str(Path(__file__).parent / script), *options]
    log = out / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)

    outcome, tail, launcher_speaks, killed = Outcome(), deque[str](maxlen=30), False, False
    environment = environment_of(topology, (out / "torch_extensions" / name).resolve())
    with (
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        log.open("w") as file,
    ):
        watchdog = threading.Timer(RUN_LIMIT_S, process.terminate)
        watchdog.start()
        try:
            for line in process.stdout or ():
                file.write(line)
                launcher_speaks = launcher_speaks or "torch/distributed/elastic/" in line
                if not launcher_speaks:  # its account of who died hides the reason why
                    tail.append(line)
                outcome.read(line)
                progress.show(outcome.losses)
                if not killed and kill_at in outcome.losses:
                    killed = True
                    kill_all(process.pid)
        except BaseException:
            process.terminate()  # torchrun takes its ranks down with it
            raise
        finally:
            watchdog.cancel()
            watchdog.join()
    if process.returncode and not killed:
        raise RunFailed(f"{name} exited with {process.returncode}. The end of {log}:\n\n{''.join(tail)}")
    progress.finish(outcome.losses)
    return outcome


def kill_all(launcher: int) -> None:
    """SIGKILL to torchrun and its ranks: nobody is left the time to write or to say anything."""
    root = psutil.Process(launcher)
    for process in (root, *root.children(recursive=True)):
        process.kill()


def environment_of(topology: Topology, extensions: Path) -> dict[str, str]:
    """The caller's environment, with nothing shared between runs, and CPU ranks unless every rank can have a GPU."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core's wish for TP
        "TORCH_EXTENSIONS_DIR": str(extensions),
    }
    if torch.cuda.device_count() < topology.ranks:
        variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return variables


def expect_steps(name: str, losses: Losses, first: int, last: int) -> None:
    """Raises RunFailed unless the run took the steps from `first` to `last`, each once."""
    if (taken := list(losses)) != list(range(first, last + 1)):
        raise RunFailed(f"{name} was to take steps {first} to {last} and took {taken or 'none'}")


def megabytes(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6
