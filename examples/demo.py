# SPDX-License-Identifier: Apache-2.0
"""Proof in three runs: train at TP2xDP2, export a universal checkpoint half way, resume it at TP1xDP3 and at TP4xDP1.

    python examples/demo.py [--dtype bf16|fp32] [--out demo_out] [any option of pretrain_gpt.py]

Prints the losses side by side, writes losses.json and losses.png, and exits with status 1 if the resumed runs disagree
with the uninterrupted one, 2 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

# Only the order of additions changes between topologies: 1e-7 or so in fp32. In bf16 every TP rank's partial sum is
# rounded to 8 bits before it is added.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
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


SOURCE = Topology(tp=2, dp=2)
TARGETS = (Topology(tp=1, dp=3), Topology(tp=4, dp=1))


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


# ------------------------------------------------------------------------------------------------------------- running


def train(topology: Topology, options: Sequence[str], out: Path, progress: Progress) -> Outcome:
    """Run pretrain_gpt.py under torchrun; its whole output goes to <out>/logs/<topology>.log.

    Raises RunFailed, with the last lines of that output, unless it exits with 0.
    """
    script = Path(__file__).with_name("pretrain_gpt.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={topology.ranks}"]
    command = [*launcher, str(script), f"--tensor-model-parallel-size={topology.tp}", *options]
    log = out / "logs" / f"{topology}.log"
    log.parent.mkdir(parents=True, exist_ok=True)

    outcome, tail, launcher_speaks = Outcome(), deque[str](maxlen=30), False
    with (
        subprocess.Popen(
            command, env=environment(topology, out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
        except BaseException:
            process.terminate()  # torchrun takes its ranks down with it
            raise
        finally:
            watchdog.cancel()
    if process.returncode:
        raise RunFailed(f"{topology} exited with {process.returncode}. The end of {log}:\n\n{''.join(tail)}")
    progress.finish(outcome.losses)
    return outcome


def environment(topology: Topology, out: Path) -> dict[str, str]:
    """The caller's environment, with nothing shared between runs, and CPU ranks unless every rank can have a GPU."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core's wish for TP
        "TORCH_EXTENSIONS_DIR": str((out / "torch_extensions" / str(topology)).resolve()),
    }
    if torch.cuda.device_count() < topology.ranks:
        variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return variables


def megabytes(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6


# ----------------------------------------------------------------------------------------------------------- comparing


def relative_differences(reference: Losses, resumed: Losses) -> dict[int, float]:
    """|resumed - reference| / |reference| per step that the resumed run took; infinite where either is not a number."""
    quotients = {step: abs(loss - reference[step]) / abs(reference[step]) for step, loss in resumed.items()}
    return {step: math.inf if math.isnan(value) else value for step, value in quotients.items()}


def largest_differences(reference: Losses, resumed: Mapping[str, Losses]) -> dict[int, float]:
    """The worst of all resumed runs, per step."""
    by_run = [relative_differences(reference, losses) for losses in resumed.values()]
    return {step: max(run[step] for run in by_run) for step in by_run[0]}


def table(reference: Losses, resumed: Mapping[str, Losses], rows: int = 10) -> str:
    """Side by side, about `rows` evenly spaced steps and always the last one."""
    worst = largest_differences(reference, resumed)
    steps = sorted(worst, reverse=True)
    shown = sorted(steps[:: max(1, len(steps) // rows)])
    names = "".join(name.rjust(12) for name in (str(SOURCE), *resumed))
    header = f"{'step':>6}{names}   largest relative difference"
    lines = [header, "─" * len(header)]
    for step in shown:
        losses = (reference[step], *(run[step] for run in resumed.values()))
        lines.append(f"{step:>6}" + "".join(f"{loss:>12.6f}" for loss in losses) + f"{worst[step]:>30.1e}")
    return "\n".join(lines)


def plot(path: Path, reference: Losses, resumed: Mapping[str, Losses], export_step: int, dtype: str) -> None:
    """Losses above (a line, and markers on it), relative differences below against the tolerance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    above.plot(list(reference), list(reference.values()), color="0.35", linewidth=1.5, label=f"{SOURCE}, uninterrupted")
    for (name, losses), marker, color in zip(resumed.items(), ("o", "x"), ("tab:blue", "tab:orange"), strict=True):
        style = {"marker": marker, "color": color, "linestyle": "none", "markerfacecolor": "none"}
        size = 8 if marker == "o" else 5  # the cross fits into the circle
        above.plot(list(losses), list(losses.values()), markersize=size, label=f"{name}, resumed", **style)
        differences = relative_differences(reference, losses)
        below.plot(list(differences), [max(value, 1e-9) for value in differences.values()], markersize=4, **style)
    for axis in (above, below):
        axis.axvline(export_step, color="0.6", linestyle=":", linewidth=1)
        axis.spines[["top", "right"]].set_visible(False)
    above.annotate(
        "universal checkpoint", (export_step, above.get_ylim()[1]), (-4, -2), textcoords="offset points",
        color="0.4", ha="right", va="top", fontsize=9,
    )  # fmt: skip
    above.set_title(f"One training run, resumed at other topologies ({dtype}, ZeRO-1)", loc="left", fontsize=11)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    below.axhline(TOLERANCE[dtype], color="tab:red", linewidth=1)
    below.annotate(
        "tolerance", (1, TOLERANCE[dtype]), (0, -3), textcoords="offset points",
        color="tab:red", ha="left", va="top", fontsize=9,
    )  # fmt: skip
    below.set(yscale="log", ylim=(5e-10, TOLERANCE[dtype] * 4), xlabel="step", ylabel="relative difference")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# --------------------------------------------------------------------------------------------------------------- story


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", choices=TOLERANCE, default="bf16")
    parser.add_argument("--steps", type=int, default=40, help="steps of the uninterrupted run; it exports half way")
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    args, passed_on = parser.parse_known_args()
    if args.steps < 4:
        parser.error("--steps must be at least 4")
    return args, passed_on


def main() -> int:
    args, passed_on = parse_arguments()
    half = args.steps // 2
    checkpoints = args.out / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)

    print(f"A small GPT in {args.dtype}, trained at {SOURCE} and resumed at {TARGETS[0]} and {TARGETS[1]}.\n")
    common = [f"--dtype={args.dtype}", f"--train-steps={args.steps}", *passed_on]
    exporting = [
        f"--save={checkpoints}",
        f"--save-interval={half}",
        "--universal-checkpoint-export",
        "--universal-checkpoint-export-strict",  # a failed export fails the demo, with its reason
    ]
    progress = Progress(f"[1/3] {SOURCE}  trains and exports", 0, args.steps)
    source = train(SOURCE, [*common, *exporting], args.out, progress)

    tag = f"global_step{half}"
    universal = f"{tag}_universal"
    sizes = {name: megabytes(checkpoints / name) for name in (tag, universal)}
    seconds = source.save_seconds[tag]
    print(f"      saved {tag} ({sizes[tag]:.1f} MB) and {universal} ({sizes[universal]:.1f} MB) in {seconds:.1f} s")

    loading = [f"--load={checkpoints}", f"--load-tag={universal}"]
    resumed = {}
    for index, target in enumerate(TARGETS, start=2):
        progress = Progress(f"[{index}/3] {target}  {f'resumes at {half}':<18}", half, args.steps)
        resumed[str(target)] = train(target, [*common, *loading], args.out, progress).losses
    return report(args, source.losses, resumed, half, sizes)


def report(
    args: argparse.Namespace, reference: Losses, resumed: Mapping[str, Losses], half: int, sizes: Mapping[str, float]
) -> int:
    """Print the table and the verdict, write the two files; returns the exit status."""
    expected = list(range(half + 1, args.steps + 1))
    for name, losses in resumed.items():
        if (taken := list(losses)) != expected:
            raise RunFailed(f"{name} was to take steps {expected[0]} to {expected[-1]} and took {taken or 'none'}")

    largest = max(largest_differences(reference, resumed).values())
    tolerance = TOLERANCE[args.dtype]
    record = {
        "dtype": args.dtype,
        "export_step": half,
        "losses": {str(SOURCE): reference, **resumed},
        "largest_relative_difference": largest,
        "tolerance": tolerance,
        "megabytes": sizes,
    }
    (args.out / "losses.json").write_text(json.dumps(record, indent=2) + "\n")
    plot(args.out / "losses.png", reference, resumed, half, args.dtype)

    agree = largest <= tolerance
    print(f"\n{table(reference, resumed)}\n")
    print(
        f"{'PASS' if agree else 'FAIL: the resumed runs disagree'}: largest relative difference {largest:.1e} over "
        f"{len(expected)} steps, {tolerance:.0e} allowed in {args.dtype}."
    )
    print(f"See {args.out / 'losses.png'} and {args.out / 'losses.json'}.")
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as failure:
        print(f"\n\nFAIL: {failure}", file=sys.stderr)
        sys.exit(2)
