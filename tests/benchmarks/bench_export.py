# SPDX-License-Identifier: Apache-2.0
"""What an export costs, beside a raw write of the same bytes and DeepSpeed's own save, in one run.

    python -m tests.benchmarks.bench_export [--size small] [--dir DIR ...] [--rounds N] [--converter]

4 gloo ranks, TP 2 x DP 2, BF16_Optimizer with AdamW. In each round, one after the other:

    raw     each rank writes its share of files of just the sizes that the export has, and fsyncs each of them
    export  this package's export alone; durable when it returns
    stock   DeepSpeed's save_checkpoint alone, which never fsyncs; then the time with an fsync of its files

Beside the seconds on the clock stand processor seconds, over all ranks: a busy machine stretches the former.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from tests.benchmarks.instruments import (
    MB,
    PeakMemory,
    files_below,
    fsync_files,
    load_average,
    on_ranks,
    seconds_of,
    table,
)
from tests.support.ranks import ENVIRONMENT

WORLD, TP = 4, 2


@dataclass
class Measured:
    """Seconds of every round, by what was timed (cpu: this rank's processor), and what the exports report."""

    parameters: int
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    files: int = 0
    nbytes: int = 0
    nbytes_moved: int = 0
    imbalance: float = 0.0
    stock_nbytes: int = 0
    extra_memory: int = 0


def measure(directory: Path, size_name: str, rounds: int, keep: bool) -> Measured:
    """Runs on every rank; each returns its own processor seconds, the rest is everybody's.

    keep: leave the last regular checkpoint in place.
    """
    import megads_ucp
    from megads_ucp.engine.attach import attachment
    from megads_ucp.save.types import ExportRequest
    from tests.benchmarks.subject import SIZES, build_engine, client_state, train_one_step

    size = SIZES[size_name]
    megads_ucp.install(argparse.Namespace(universal_checkpoint_export=True, universal_checkpoint_export_strict=True))
    engine = build_engine(size, TP)
    train_one_step(engine, size)
    exporter = attachment(engine).exporter
    assert exporter is not None
    measured = Measured(parameters=0)
    state = client_state(size)

    def export() -> None:
        exporter.export(ExportRequest.of_save(directory, "bench", state, save_latest=True, exclude_frozen=False))

    def stock() -> None:
        type(engine).save_checkpoint(engine, str(directory), tag="bench", client_state=state)

    def write_raw() -> None:
        _write_share(raw, names, content)

    universal, regular, raw = directory / "bench_universal", directory / "bench", directory / "raw"

    def timed(name: str, work: Callable[[], Any]) -> None:
        busy = time.process_time()
        measured.seconds[name].append(seconds_of(work))
        measured.cpu[name].append(time.process_time() - busy)

    with PeakMemory() as peak:
        timed("first export", export)
    measured.extra_memory = peak.extra
    names = {path.relative_to(universal): path.stat().st_size for path in files_below(universal)}
    content = os.urandom(max(names.values()))
    measured.files, measured.parameters = len(names), _parameters(names)
    for turn in range(rounds):
        _remove(universal)
        timed("raw", write_raw)
        _remove(raw)

        timed("export", export)
        report = exporter.last_report
        assert report is not None
        for phase, seconds in report.seconds.items():
            measured.phases[phase].append(seconds)
        measured.nbytes, measured.nbytes_moved = report.nbytes, report.nbytes_moved
        measured.imbalance = report.imbalance

        timed("stock", stock)
        synced = seconds_of(lambda: fsync_files(regular) if dist.get_rank() == 0 else None)
        measured.seconds["stock, fsynced"].append(measured.seconds["stock"][-1] + synced)
        measured.stock_nbytes = sum(path.stat().st_size for path in files_below(regular))
        if not (keep and turn == rounds - 1):
            _remove(regular)
    return measured


def _parameters(names: dict[Path, int]) -> int:
    """To the three digits that are printed: the frames of the files count as well."""
    return sum(size for path, size in names.items() if path.name == "fp32.pt") // 4


def _write_share(root: Path, names: dict[Path, int], content: bytes) -> None:
    """Writes this rank's share of files of these sizes, one after the other, with an fsync of each."""
    load = [0] * dist.get_world_size()
    mine = []
    for path, nbytes in sorted(names.items(), key=lambda item: -item[1]):
        rank = load.index(min(load))
        load[rank] += nbytes
        if rank == dist.get_rank():
            mine.append((path, nbytes))
    for path, nbytes in mine:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        rest = memoryview(content)[:nbytes]
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
        os.close(fd)


def _remove(root: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    dist.barrier()


def convert(directory: Path) -> float:
    """Seconds of the stock converter, with its default workers, on the regular checkpoint; a process of its own."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(directory / "bench"), "--output_folder", str(directory / "converted")]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **ENVIRONMENT})
    seconds = time.perf_counter() - started
    shutil.rmtree(directory / "converted")
    return seconds


def report(where: Path, ranks: list[Measured]) -> str:
    measured = ranks[0]
    medians = {name: median(values) for name, values in measured.seconds.items()}
    raw, stock = medians["raw"], medians["stock"]
    title = {
        "raw": "raw write, fsynced",
        "export": "export",
        "first export": "first export (plans, takes its memory)",
        "stock": "stock save_checkpoint",
        "stock, fsynced": "stock save_checkpoint, then fsync",
        "converter": "stock converter, 4+2 workers",
    }
    rows = []
    for name, label in title.items():
        if name in medians:
            seconds, spread = medians[name], measured.seconds[name]
            ratios = f"{seconds / raw:.2f}", f"{seconds / stock:.2f}"
            cpu = f"{sum(median(rank.cpu[name]) for rank in ranks):.2f}" if measured.cpu[name] else ""
            rows.append((label, f"{seconds:.2f}", f"{min(spread):.2f}-{max(spread):.2f}", *ratios, cpu))
    phases = ", ".join(f"{phase} {median(values):.2f}" for phase, values in measured.phases.items())
    rounds = len(measured.seconds["export"])
    return "\n".join(
        [
            "",
            f"{where}: {measured.parameters / 1e6:.1f}M parameters, TP {TP} x DP {WORLD // TP}, medians of {rounds}; "
            f"load {load_average()}",
            table(("", "s", "min-max", "/ raw", "/ stock", "cpu s"), rows),
            f"export: {measured.nbytes / MB:.0f} MB in {measured.files} files "
            f"(stock save: {measured.stock_nbytes / MB:.0f} MB); moved between ranks {measured.nbytes_moved / MB:.0f} "
            f"MB = {measured.nbytes_moved / measured.nbytes:.2f} of it; busiest writer / mean {measured.imbalance:.3f}",
            f"export, seconds of rank 0: {phases}",
            f"extra host memory of a rank, with shared rows: {max(rank.extra_memory for rank in ranks) / MB:.0f} MB",
        ]
    )


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--dir", type=Path, nargs="+", default=[Path(tempfile.gettempdir()), Path("/dev/shm")])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--converter", action="store_true", help="also time the stock converter, once")
    args: Any = parser.parse_args(arguments)
    for where in args.dir:
        with tempfile.TemporaryDirectory(dir=where, prefix="bench-export-") as folder:
            directory = Path(folder)
            ranks = on_ranks(measure, WORLD, directory, args.size, args.rounds, args.converter)
            if args.converter:
                ranks[0].seconds["converter"].append(convert(directory))
            print(report(where, ranks), flush=True)


if __name__ == "__main__":
    main()
