# SPDX-License-Identifier: Apache-2.0
"""Clocks, counters and tables."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

MB = 1e6


def on_ranks(body: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """`run_ranks` with patience, and without the ranks' output: here the table is the point."""
    with contextlib.redirect_stdout(io.StringIO()):
        return run_ranks(body, world, *args, timeout=3600)


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds from when all ranks have come until all have finished. Collective, equal to the slowest rank's."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def load_average() -> str:
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def fsync_files(root: Path) -> None:
    for path in files_below(root):
        with _opened(path, os.O_RDONLY) as fd:
            os.fsync(fd)


def evict(root: Path) -> None:
    """Makes the page cache forget the files. Pages that were never written to disk stay, and so does all of tmpfs."""
    fsync_files(root)
    for path in files_below(root):
        with _opened(path, os.O_RDONLY) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def bytes_from_disk() -> int:
    """What this process has made the kernel fetch from storage so far, read-ahead included (proc_pid_io(5))."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


class PeakMemory:
    """The most memory this process held in a block beyond what it held on entry, in bytes, as the kernel counts it.

    Neither `ru_maxrss`, which cannot be reset, nor tracemalloc, which does not see torch, would do.
    """

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc_pid_clear_refs(5))
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra = max(_status("VmHWM") - self._before, 0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


@contextlib.contextmanager
def loads_counted() -> Iterator[Callable[[], int]]:
    """Yields a function that says how many bytes the files had that `torch.load` was asked to read whole."""
    total = 0
    original = torch.load

    def load(file: Any, *args: Any, **keywords: Any) -> Any:
        nonlocal total
        if keywords.get("map_location") != "meta":  # which reads the header only
            total += os.fstat(file.fileno()).st_size if hasattr(file, "fileno") else os.path.getsize(file)
        return original(file, *args, **keywords)

    torch.load = load  # type: ignore[assignment]
    try:
        yield lambda: total
    finally:
        torch.load = original


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first one to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return "  ".join([f"{cells[0]:<{widths[0]}}" if first else "", *others]).rstrip()

    return "\n".join([line(header), "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, rows)])
