# SPDX-License-Identifier: Apache-2.0
"""Proof in three runs: train at TP2xDP2, export a universal checkpoint half way, resume it at TP1xDP3 and at TP4xDP1.

    python examples/demo.py [--dtype bf16|fp32] [--out demo_out] [any option of pretrain_gpt.py]

Prints the losses side by side, writes losses.json and losses.png, and exits with status 1 if the resumed runs disagree
with the uninterrupted one, 2 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from curves import largest_differences, plot, table
from launch import Losses, Progress, RunFailed, Topology, expect_steps, megabytes, train

# Only the order of additions changes between topologies: 1e-7 or so in fp32. In bf16 every TP rank's partial sum is
# rounded to 8 bits before it is added.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}

SCRIPT = "pretrain_gpt.py"
SOURCE = Topology(tp=2, dp=2)
TARGETS = (Topology(tp=1, dp=3), Topology(tp=4, dp=1))


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
    source = train(SCRIPT, SOURCE, [tp(SOURCE), *common, *exporting], args.out, progress)

    tag = f"global_step{half}"
    universal = f"{tag}_universal"
    sizes = {name: megabytes(checkpoints / name) for name in (tag, universal)}
    seconds = source.save_seconds[tag]
    print(f"      saved {tag} ({sizes[tag]:.1f} MB) and {universal} ({sizes[universal]:.1f} MB) in {seconds:.1f} s")

    loading = [f"--load={checkpoints}", f"--load-tag={universal}"]
    resumed = {}
    for index, target in enumerate(TARGETS, start=2):
        progress = Progress(f"[{index}/3] {target}  {f'resumes at {half}':<18}", half, args.steps)
        resumed[str(target)] = train(SCRIPT, target, [tp(target), *common, *loading], args.out, progress).losses
    return report(args, source.losses, resumed, half, sizes)


def tp(topology: Topology) -> str:
    return f"--tensor-model-parallel-size={topology.tp}"


def report(
    args: argparse.Namespace, reference: Losses, resumed: Mapping[str, Losses], half: int, sizes: Mapping[str, float]
) -> int:
    """Print the table and the verdict, write the two files; returns the exit status."""
    for name, losses in resumed.items():
        expect_steps(name, losses, half + 1, args.steps)

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
    plot(
        args.out / "losses.png",
        f"One training run, resumed at other topologies ({args.dtype}, ZeRO-1)",
        f"{SOURCE}, uninterrupted",
        reference,
        {f"{name}, resumed": losses for name, losses in resumed.items()},
        events={half: "universal checkpoint"},
        tolerance=tolerance,
    )

    agree = largest <= tolerance
    print(f"\n{table(str(SOURCE), reference, resumed)}\n")
    print(
        f"{'PASS' if agree else 'FAIL: the resumed runs disagree'}: largest relative difference {largest:.1e} over "
        f"{args.steps - half} steps, {tolerance:.0e} allowed in {args.dtype}."
    )
    print(f"See {args.out / 'losses.png'} and {args.out / 'losses.json'}.")
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as failure:
        print(f"\n\nFAIL: {failure}", file=sys.stderr)
        sys.exit(2)
