# SPDX-License-Identifier: Apache-2.0
"""Every uneven model under AutoTP, exported at every topology and resumed at every other one: prints what was checked.

    python -m tests.matrices.autotp [--models llama,opt] [--kinds fp32,bf16_optimizer]

A line per source: whether the export has the bits of the stock converter's, and for each target whether the state it
has loaded, exported again, has the bits of the source, with the largest relative difference of the next losses.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.autotp import MODELS, TOPOLOGIES, Case, Topology, assert_as_stock, case
from tests.support.ranks import RankError

KINDS = ("fp32", "fp32_zero2", "bf16_optimizer", "zero2")
WITHOUT_AUTOTP = Topology(1, 2)  # a target only: the models' parameters are as Hugging Face has them


def cells(checked: Case, source: Topology, folder: Path) -> Iterator[str]:
    """What was checked of the export made at `source`, one cell at a time."""
    directory = folder / str(source)
    losses = checked.export(source, directory)
    yield stock_cell(directory)
    for target in (WITHOUT_AUTOTP, *TOPOLOGIES):
        if target != source:
            resumed = checked.resume(target, directory, folder / f"{source}-{target}")
            checked.assert_losses(resumed, losses)
            largest = max(abs(one - other) / other for one, other in zip(resumed, losses, strict=True))
            yield f"{target} {largest:.0e}"


def stock_cell(directory: Path) -> str:
    try:
        assert_as_stock(directory)
    except RankError as failure:
        if "'NoneType' object is not iterable" in str(failure):  # it wants every parameter on every rank
            return "stock dies of an empty shard"
        raise
    return "same as stock"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    chosen = parser.parse_args()
    failed, started = 0, time.monotonic()
    print(
        "| model | engine | exported at | against the stock converter | resumed with the same bits at, losses within |"
    )
    print("|---|---|---|---|---|", flush=True)
    for kind in chosen.kinds.split(","):
        for name in chosen.models.split(","):
            for source in TOPOLOGIES:
                done, said = [], io.StringIO()
                try:
                    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
                        for cell in cells(case(name, kind), source, Path(folder)):
                            done.append(cell)
                except AssertionError as failure:  # RankError is one
                    failed += 1
                    done.append(f"FAILED: {' '.join(str(failure).split())[:2000]}")
                print(f"| {name} | {kind} | {source} | {done[0]} | {', '.join(done[1:])} |", flush=True)
    print(f"\n{failed} sources failed; {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
