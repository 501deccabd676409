# SPDX-License-Identifier: Apache-2.0
"""Distill SmolLM2-135M into a small llama, kill the run, and resume it at another topology: the curve goes on.

    python examples/distill.py [--teacher PATH] [--steps 100] [--out distill_out] [any option of distill_student.py]

Teacher: 9 query and 3 key/value heads, frozen, under AutoTP at TP 2: 6 + 3 heads. Student: 10 and 5 heads, under AutoTP
and ZeRO-1, first at TP 2, where it exports universal checkpoints and is killed between two of them, then at DP 2 from
the latest. Prints the losses of the steps that both runs took, writes losses.json and losses.png, and exits with
status 1 if these differ or the loss has not gone down, 2 if a run failed or there is no teacher.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import teachers
from curves import plot, relative_differences, table
from launch import Losses, Progress, RunFailed, Topology, expect_steps, train

SCRIPT = "distill_student.py"
SOURCE, TARGET = Topology(tp=2, dp=1), Topology(tp=1, dp=2)  # of the student
TEACHER_TP = 2
TOLERANCE = 1e-4  # as in uneven_tp_equivalence.py


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--teacher", type=Path, help="a directory of Hugging Face's format, or a GGUF file")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=55, help="the step after which every process gets SIGKILL")
    parser.add_argument("--out", type=Path, default=Path("distill_out"))
    args, passed_on = parser.parse_known_args()
    exported = args.kill_at // args.save_interval * args.save_interval
    if not 0 < exported < args.kill_at < args.steps:
        parser.error("--kill-at must lie after an export, and before --steps")
    args.exported = exported
    return args, passed_on


def main() -> int:
    args, passed_on = parse_arguments()
    teacher = teachers.find(args.teacher)
    checkpoints = args.out / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    print(f"Teacher {teacher.path.name} at TP {TEACHER_TP}, frozen. A student of 10 heads, in fp32.\n")
    common = [
        f"--teacher={teacher.path.resolve()}",
        f"--teacher-tp={TEACHER_TP}",
        f"--train-steps={args.steps}",
        "--global-batch-size=4",
        *passed_on,
    ]
    saving = [
        f"--save={checkpoints}",
        f"--save-interval={args.save_interval}",
        "--universal-checkpoint-export",
        "--universal-checkpoint-export-strict",  # a failed export fails this proof, with its reason
    ]
    start = time.monotonic()
    progress = Progress(f"[1/2] student {SOURCE}  killed at {args.kill_at}", 0, args.steps)
    options = [f"--tp={SOURCE.tp}", *common, *saving]
    killed = train(SCRIPT, SOURCE, options, args.out, progress, name="killed", kill_at=args.kill_at).losses
    killed = {step: loss for step, loss in killed.items() if step <= args.kill_at}  # it may have got a little further
    expect_steps("the killed run", killed, 1, args.kill_at)

    # Without a tag: what latest_universal names is complete, whatever the killed run was doing.
    options = [f"--tp={TARGET.tp}", *common, f"--load={checkpoints}"]
    progress = Progress(f"[2/2] student {TARGET}  resumes  ", args.exported, args.steps)
    resumed = train(SCRIPT, TARGET, options, args.out, progress, name="resumed").losses
    expect_steps("the resumed run", resumed, args.exported + 1, args.steps)
    return report(args, killed, resumed, time.monotonic() - start)


def report(args: argparse.Namespace, killed: Losses, resumed: Losses, seconds: float) -> int:
    """Print the table and the verdict, write the two files; returns the exit status."""
    names = f"{SOURCE}, killed", f"{TARGET}, resumed"
    largest = max(relative_differences(killed, resumed).values())
    record = {
        "losses": dict(zip(names, (killed, resumed), strict=True)),
        "largest_relative_difference": largest,
        "tolerance": TOLERANCE,
        "seconds": round(seconds, 1),
    }
    (args.out / "losses.json").write_text(json.dumps(record, indent=2) + "\n")
    plot(
        args.out / "losses.png",
        f"A student distilled from a teacher at TP {TEACHER_TP} (fp32, ZeRO-1): KL divergence per token",
        names[0],
        killed,
        {names[1]: resumed},
        events={args.exported: "universal checkpoint", args.kill_at: "kill -9"},
        tolerance=TOLERANCE,
        dpi=100,
    )
    first, last = killed[1], resumed[args.steps]
    agree, learned = largest <= TOLERANCE, last < first
    print(f"\n{table(names[0], killed, {names[1]: resumed})}\n")
    verdict = "PASS" if agree and learned else "FAIL"
    print(
        f"{verdict}: largest relative difference {largest:.1e} over the {args.kill_at - args.exported} steps that both "
        f"took, {TOLERANCE:.0e} allowed; loss {first:.3f} at step 1, {last:.3f} at step {args.steps}. {seconds:.0f} s."
    )
    print(f"See {args.out / 'losses.png'} and {args.out / 'losses.json'}.")
    return 0 if agree and learned else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RunFailed, teachers.NoTeacher) as failure:
        print(f"\n\nFAIL: {failure}", file=sys.stderr)
        sys.exit(2)
