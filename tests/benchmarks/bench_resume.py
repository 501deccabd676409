# SPDX-License-Identifier: Apache-2.0
"""What a resume costs, DeepSpeed's own universal load beside this package's, from one checkpoint in one run.

    python -m tests.benchmarks.bench_resume [--size small] [--dir DIR] [--rounds N] [--target TP2DP2 ...]

One universal checkpoint, exported at TP 2 x DP 2, is loaded at each target through the ordinary
`engine.load_checkpoint`, by turns without the plugin, with it, and with it reading together ("always"), from a warm
page cache and then from a cold one (the files' pages are given up with posix_fadvise before each load). Ours starts
from nothing each time: its process group, its survey of the model, the headers of the files.

    s         from when all ranks have come until all have finished
    cpu s     processor seconds of all ranks together, warm: what is left of the comparison on a busy machine
    asked     bytes asked of the files, over all ranks: ranges of tensors, and whole files where torch.load reads one
    needed    bytes of this target's own fragments in all states, over all ranks
    floor     the same in whole rows: from the first to the last element of each strided run
    memory    the most that any rank held beyond what it held before
    gather    what both end with, DeepSpeed's all-gather of the weights just loaded, on its own
    alone     one rank reads its part from a cold cache while the others wait: the kernel's count of bytes it fetched
              from storage for this process (read-ahead included), over the bytes asked
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.instruments import (
    MB,
    PeakMemory,
    bytes_from_disk,
    evict,
    load_average,
    loads_counted,
    on_ranks,
    seconds_of,
    table,
)

TARGETS = {"TP2DP2": (2, 2), "TP4DP1": (4, 1), "TP1DP4": (1, 4), "TP2DP1": (2, 1)}
TAG = "bench"


@dataclass
class Loads:
    """All loads of one way: seconds by temperature, and the counts of each load on this rank."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    asked: int = 0
    memory: int = 0


@dataclass
class Measured:
    """One rank's view of one target."""

    stock: Loads
    ours: Loads
    together: Loads
    gather: Loads
    needed: int = 0
    floor: int = 0
    alone_asked: int = 0
    alone_fetched: int = 0


def export(directory: Path, size_name: str) -> int:
    """Writes the checkpoint; returns the number of parameters. Runs on every rank."""
    import megads_ucp
    from tests.benchmarks.subject import SIZES, build_engine, client_state, train_one_step

    size = SIZES[size_name]
    megads_ucp.install(argparse.Namespace(universal_checkpoint_export=True, universal_checkpoint_export_strict=True))
    engine = build_engine(size, 2)
    train_one_step(engine, size)
    engine.save_checkpoint(str(directory), tag=TAG, client_state=client_state(size))
    if dist.get_rank() == 0:
        shutil.rmtree(directory / TAG)  # the regular checkpoint has done its duty
    universal = directory / f"{TAG}_universal" / "zero"
    return sum(path.stat().st_size for path in universal.glob("*/fp32.pt")) // 4


def measure(directory: Path, size_name: str, tp: int, rounds: int) -> Measured:
    """Loads the checkpoint at one target, again and again. Runs on every rank."""
    from tests.benchmarks.subject import SIZES, build_engine
    from tests.support.reads import payload_counted

    engine = build_engine(SIZES[size_name], tp, {"checkpoint": {"load_universal": True}})
    measured = Measured(Loads(), Loads(), Loads(), Loads())

    def load() -> None:
        path, _ = engine.load_checkpoint(str(directory))
        assert path is not None

    def timed(work: Callable[[], None], loads: Loads, temperature: str) -> None:
        busy = time.process_time()
        with PeakMemory() as memory, loads_counted() as loaded, payload_counted() as read:
            loads.seconds[temperature].append(seconds_of(work))
        loads.cpu[temperature].append(time.process_time() - busy)
        loads.asked = read() + loaded()
        loads.memory = max(loads.memory, memory.extra)

    for temperature in ("first", *["warm"] * rounds, *["cold"] * rounds):
        states = []
        for loads, how in ((measured.stock, None), (measured.ours, "never"), (measured.together, "always")):
            _spoil(engine)
            if temperature == "cold":
                _evict_together(directory)
            with _plugin(engine, how):
                timed(load, loads, temperature)
            states.append(_digest(engine))
        timed(engine.optimizer.update_lp_params, measured.gather, temperature)
        assert states == states[:1] * 3, f"the ways disagree on rank {dist.get_rank()}"

    _read_alone(engine, directory, measured)
    return measured


@contextmanager
def _plugin(engine: Any, read_together: str | None = "never") -> Iterator[None]:
    """Attaches the plugin to an engine that was built without it, for one load; None: does not."""
    from megads_ucp.config import ExportConfig
    from megads_ucp.engine.attach import Attachment

    if read_together is None:
        yield
        return
    attachment = Attachment(engine, ExportConfig(read_together=read_together))
    try:
        yield
    finally:
        attachment.detach()


def _states(engine: Any) -> list[torch.Tensor]:
    masters = engine.optimizer.fp32_groups_flat_partition
    states = [value for master in masters for value in engine.optimizer.optimizer.state[master].values()]
    return [*masters, *(state for state in states if torch.is_tensor(state) and state.ndim)]


def _spoil(engine: Any) -> None:
    """So that a load which did nothing would show."""
    for state in _states(engine):
        state.detach().fill_(-1)


def _digest(engine: Any) -> list[float]:
    """Sums that two equal states share, and hardly any others."""
    return [float(state.detach().double().sum()) for state in _states(engine)]


def _evict_together(directory: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        evict(directory)
    dist.barrier()


def _read_alone(engine: Any, directory: Path, measured: Measured) -> None:
    """Rank 0 prepares with all others, then checks and reads its part again, from a cold cache and alone."""
    from megads_ucp.config import ExportConfig
    from megads_ucp.engine.adapter import engine_state
    from megads_ucp.engine.context import EngineContext
    from megads_ucp.load.checkpoint import Checkpoint
    from megads_ucp.load.prepare import prepare
    from megads_ucp.load.resume import LoadRequest
    from tests.support.reads import payload_counted

    universal = directory / f"{TAG}_universal"
    with _plugin(engine):
        context = EngineContext(engine_state(engine), ExportConfig(read_together="never"))
        resume = prepare(context, universal, LoadRequest())
        reads = [*resume.reads.values(), *resume.unowned.reads]
        for read in reads:
            itemsize = read.file.tensor.dtype.itemsize
            measured.needed += read.numel * itemsize
            measured.floor += sum(box.full_span[1] - box.full_span[0] for box in read.boxes) * itemsize
        _evict_together(directory)
        if dist.get_rank() == 0:
            before = bytes_from_disk()
            with loads_counted() as loaded, payload_counted() as asked:
                checkpoint = Checkpoint(universal)
                checkpoint.common_state()
                for read in reads:
                    checkpoint.file(read.file.tensor.path.parent.name, read.file.tensor.path.stem)
                    read.run(False)
            measured.alone_asked = asked() + loaded()
            measured.alone_fetched = bytes_from_disk() - before
        dist.barrier()


def report(by_target: dict[str, list[Measured]]) -> str:
    rows = []
    for target, ranks in by_target.items():
        needed, floor = (sum(getattr(rank, what) for rank in ranks) for what in ("needed", "floor"))
        for way in ("stock", "ours", "together", "gather"):
            loads: list[Loads] = [getattr(rank, way) for rank in ranks]
            asked = sum(load.asked for load in loads)
            row = [target if way == "stock" else "", way]
            for temperature in ("warm", "cold"):
                seconds = median(loads[0].seconds[temperature])
                base = median(ranks[0].stock.seconds[temperature])
                row += [f"{seconds:.2f}", f"{seconds / base:.2f}"]
            row += [f"{sum(median(load.cpu['warm']) for load in loads):.2f}"]
            of_files = f"{asked / MB:.1f}", f"{needed / MB:.1f}", f"{asked / needed:.2f}", f"{asked / floor:.3f}"
            row += of_files if asked else ("", "", "", "")
            row += [f"{max(load.memory for load in loads) / MB:.1f}"]
            first = ranks[0]
            row += [f"{first.alone_fetched / first.alone_asked:.3f}" if way == "ours" else ""]
            rows.append(row)
    header = ("", "", "warm s", "/ stock", "cold s", "/ stock", "cpu s", "asked MB", "needed MB", "/ needed", "/ floor")
    return table((*header, "memory MB", "alone"), rows)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", choices=TARGETS, nargs="+", default=list(TARGETS))
    args: Any = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-resume-") as folder:
        directory = Path(folder)
        parameters = on_ranks(export, 4, directory, args.size)[0]
        print(f"{args.dir}: {parameters / 1e6:.1f}M parameters, exported at TP 2 x DP 2", flush=True)
        by_target = {}
        for target in args.target:
            tp, dp = TARGETS[target]
            by_target[target] = on_ranks(measure, tp * dp, directory, args.size, tp, args.rounds)
            print(f"{target} done, load {load_average()}", flush=True)
        print(f"\nmedians of {args.rounds}\n{report(by_target)}", flush=True)


if __name__ == "__main__":
    main()
