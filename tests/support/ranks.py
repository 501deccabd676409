# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several real gloo ranks: the harness under every distributed test.

    def test_sum_over_ranks():
        def body():
            total = torch.tensor([dist.get_rank()])
            dist.all_reduce(total)
            return total.item()

        assert run_ranks(body, 4) == [6, 6, 6, 6]

What is kept from job to job is the expensive part only: the pytest process imports torch, DeepSpeed and megatron-core
once (ten seconds), and every job forks its ranks from there (a fraction of a second). The ranks themselves are always
fresh processes, so nothing that is process-wide in DeepSpeed (communication backend, process groups, mpu, AutoTP
globals) and no killed rank can leak into the next test. Forking is also why `fn` may be a closure.

The parent must stay fit for forking: it never initialises torch.distributed, never touches CUDA and runs no threads.
Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    # A machine whose host name does not resolve would otherwise keep gloo from finding its own address.
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Here and not in a fixture: torch and DeepSpeed read these when they are imported.
os.environ.update(ENVIRONMENT)

# A killed job's locks in the user's own extension cache would hang later runs, so tests build elsewhere.
# conftest.py moves this to pytest's cache, where the one slow build (DeepSpeedCPUAdam) survives the session.
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(tempfile.gettempdir()) / f"megads_ucp_extensions_{os.getuid()}")

_OUTPUT_SHOWN = 6000  # characters of each rank's output in a failure message
_POLL_SECONDS = 0.2
_FAILURE_GRACE_SECONDS = 1.0  # how long after the first failure other ranks may still report theirs
_ENDING_SECONDS = 10.0  # how long a thread that Python has joined may take to be gone, on a busy machine
_DUMP_SECONDS = 10.0  # how long a rank may take to write where it stands


class RankError(AssertionError):
    """A job failed; the message holds every failing rank's traceback and the last output of all ranks.

    `rank` is the first rank that failed (None after a timeout); `__cause__` is its exception, if that can be pickled.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Returned:
    value: Any


@dataclass(frozen=True)
class Raised:
    traceback: str
    exception: BaseException | None  # None where it cannot be pickled


@dataclass(frozen=True)
class Died:
    exitcode: int  # -n: killed by signal n

    def __str__(self) -> str:
        if self.exitcode < 0:
            return f"was killed by {signal.Signals(-self.exitcode).name}"
        return f"left without returning (exit code {self.exitcode})"


Outcome = Returned | Raised | Died


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 600,
    expect_death: Mapping[int, int] | None = None,
) -> list[Any]:
    """Calls `fn(*args)` on `world` gloo ranks and returns the ranks' results, in rank order.

    On each rank torch.distributed and deepspeed.comm are initialised, RANK, WORLD_SIZE, LOCAL_RANK and their like are
    set, random generators are seeded with 0, and output goes to a file. Results come back as plain pickles (tensors
    are copied). Output of a job that succeeds is printed, so pytest shows it beside a later failing assertion.

    expect_death: {rank: signal} for tests that kill ranks. Each of these must die by just that signal (and yields
        None); the others must return.

    timeout: in seconds; finds out what hangs. A test must never come near it, on however busy a machine.

    Raises RankError if a rank raises, dies, or does not return within `timeout`; all ranks are then killed.
    """
    __tracebackhide__ = True  # pytest then shows the test's line and the rank's traceback, not the harness
    _import_stack()
    _warn_of_threads()
    expected = dict(expect_death or {})
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        ranks: list[_Rank] = []
        try:
            for number in range(world):
                job = _Job(number, world, timeout, Path(folder) / f"rank{number}.log", listener)
                ranks.append(_Rank(job, fn, args))
            _collect(ranks, time.monotonic() + timeout, expected)
            _check(ranks, timeout, expected)
            for rank in ranks:
                print(rank.job.output(), end="")
            return [rank.outcome.value if isinstance(rank.outcome, Returned) else None for rank in ranks]
        finally:
            for rank in ranks:
                rank.end()
            _remove_shared_memory(rank.process.pid for rank in ranks)


@cache
def _import_stack() -> None:
    """Imports, once, what the ranks use. Done in the parent, so that no rank ever pays for it."""
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.checkpoint.ds_to_universal
        import deepspeed.runtime.bf16_optimizer

        with suppress(ImportError):  # an extra: tests that need it say so with pytest.importorskip
            import megatron.core.models.gpt
            import megatron.core.tensor_parallel  # noqa: F401
        # What the first engine of a process imports and torch tabulates for it: half of the time that it takes to make.
        for module in ("auto_ep_layer", "auto_ep_presets"):
            with suppress(ImportError):
                importlib.import_module(f"deepspeed.module_inject.{module}")
        with suppress(ImportError):
            import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
        from torch._dynamo import trace_rules

        trace_rules.get_torch_obj_rule_map()
    # BF16_Optimizer collects garbage several times per group (see_memory_usage). Frozen objects are neither walked
    # nor, for their marks, copied in every rank, which takes a collection from 0.3 s to nothing.
    gc.freeze()


def _warn_of_threads() -> None:
    """A lock that another thread holds at the fork stays locked in the rank for ever: name the threads, if any.

    What was joined a moment ago may still be on its way out of the kernel, and is waited for.
    """
    python, deadline = [thread.name for thread in threading.enumerate()], time.monotonic() + _ENDING_SECONDS
    while len(native := _native_threads()) > 1 and len(python) == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    if len(native) > 1:
        warnings.warn(
            f"forking ranks from a process with {len(native)} threads, which may hang them; "
            f"Python threads: {python}, all: {sorted(native)}",
            RuntimeWarning,
            stacklevel=3,
        )


def _native_threads() -> list[str]:
    """Names of all threads of this process, Python's or not."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # ended while we looked
            names.append((task / "comm").read_text().strip())
    return names


@dataclass(frozen=True)
class _Job:
    """What one rank needs to know."""

    rank: int
    world: int
    timeout: float
    log: Path
    listener: socket.socket  # bound before the fork and served by rank 0: no port can be lost in a race

    def output(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text if len(text) <= _OUTPUT_SHOWN else "[...]\n" + text[-_OUTPUT_SHOWN:]


class _Rank:
    """The parent's side of one rank."""

    def __init__(self, job: _Job, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.job = job
        self.outcome: Outcome | None = None
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_rank_main, args=(job, far_end, fn, args), name=f"rank {job.rank}")
        self.process.start()
        far_end.close()

    def poll(self) -> None:
        """Fills `outcome` if the rank has reported or died."""
        # Asked before the pipe is looked at: what a rank sent before it died counts.
        dead = self.process.exitcode is not None
        try:
            if self.pipe.poll():
                self.outcome = pickle.loads(self.pipe.recv_bytes())
                return
        except (EOFError, ConnectionResetError):
            self.process.join()
            dead = True
        if dead:
            assert self.process.exitcode is not None
            self.outcome = Died(self.process.exitcode)

    def end(self) -> None:
        """Lets a rank that has returned go; kills any other, with the processes it may have started."""
        if isinstance(self.outcome, Returned):
            with suppress(OSError):
                self.pipe.send_bytes(b"leave")
            self.process.join(_POLL_SECONDS * 10)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        assert self.process.pid is not None
        while pids := list(_session(self.process.pid)):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _session(leader: int) -> Iterator[int]:
    """Living processes of a rank's session: what it started, orphans and own process groups (compilers) included."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended while we looked
            state, _, _, session = status.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                yield int(status.parent.name)


def _collect(ranks: Sequence[_Rank], deadline: float, expected: Mapping[int, int]) -> None:
    """Waits until each rank has an outcome, the deadline passes, or a rank has failed and the grace is over."""
    failed = False
    while (waiting := [rank for rank in ranks if rank.outcome is None]) and time.monotonic() < deadline:
        # In slices, since a dead rank's pipe stays open while a process that it started lives.
        connection.wait([rank.pipe for rank in waiting], min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        for rank in waiting:
            rank.poll()
        if not failed and any(_failure(rank, expected) for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)


def _failure(rank: _Rank, expected: Mapping[int, int]) -> str | None:
    """What is wrong with the rank's outcome, in words that follow 'rank n'; None while it has none."""
    wanted = expected.get(rank.job.rank)
    if wanted is None:
        if isinstance(rank.outcome, Raised):
            return f"raised\n{rank.outcome.traceback.rstrip()}"
        return str(rank.outcome) if isinstance(rank.outcome, Died) else None
    if rank.outcome is None or rank.outcome == Died(-wanted):
        return None
    instead = rank.outcome.traceback if isinstance(rank.outcome, Raised) else str(rank.outcome)
    return f"should have been killed by {signal.Signals(wanted).name}, but: {instead}"


def _check(ranks: Sequence[_Rank], timeout: float, expected: Mapping[int, int]) -> None:
    """Raises RankError unless every rank did what is expected of it."""
    __tracebackhide__ = True
    failures = {rank: text for rank in ranks if (text := _failure(rank, expected))}
    late = [rank for rank in ranks if rank.outcome is None]
    if not failures and not late:
        return
    # A rank that was killed makes the others' collectives fail: the cause first, then its consequences.
    first = min(failures, key=lambda rank: not isinstance(rank.outcome, Died), default=None)
    lines = [
        f"rank {rank.job.rank} of {len(ranks)} {failures[rank]}"
        for rank in sorted(failures, key=lambda r: r is not first)
    ]
    if not failures:
        lines.append(f"no result within {timeout:g} s from ranks {[rank.job.rank for rank in late]} of {len(ranks)}")
        _dump_stacks(late)
    for rank in ranks:
        lines.append(f"---------- last output of rank {rank.job.rank} ----------\n{rank.job.output().rstrip()}")
    error = RankError("\n".join(lines), None if first is None else first.job.rank)
    raise error from (first.outcome.exception if first and isinstance(first.outcome, Raised) else None)


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    """Has each rank write the Python stacks of its threads to its output, the main thread's last."""
    for rank in ranks:
        assert rank.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _DUMP_SECONDS
    logs = [rank.job.log for rank in ranks if rank.job.log.exists()]
    while time.monotonic() < deadline and not all(b"in _rank_main" in log.read_bytes() for log in logs):
        time.sleep(0.05)


def _remove_shared_memory(pids: Iterable[int | None]) -> None:
    """Unlinks what killed ranks left in /dev/shm; segments carry the id of the process that made them."""
    ours = {str(pid) for pid in pids}
    with suppress(FileNotFoundError):
        for segment in Path("/dev/shm").iterdir():
            if ours & set(re.findall(r"\d+", segment.name)):
                with suppress(OSError):
                    segment.unlink()


def _rank_main(job: _Job, pipe: connection.Connection, fn: Callable[..., Any], args: Sequence[Any]) -> NoReturn:
    """The life of one rank, from the fork to its exit. Nothing of the parent's (pytest, atexit) runs after it."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed pytest leaves no ranks behind
    try:
        _redirect_output(job.log)
        _initialise(job)
        report = pickle.dumps(Returned(fn(*args)))
    except BaseException as error:  # pytest.fail and SystemExit are not Exceptions, and they count too
        report = _pickled_failure(error)
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(EOFError, OSError):
        pipe.send_bytes(report)
        # Staying until all have reported keeps this rank's sockets open: no other rank fails as a mere consequence.
        pipe.recv_bytes()
    os._exit(0)


def _pickled_failure(error: BaseException) -> bytes:
    below = error.__traceback__ and error.__traceback__.tb_next  # without the frame of _rank_main
    text = "".join(traceback.format_exception(type(error), error, below))
    try:
        report = pickle.dumps(Raised(text, error))
        pickle.loads(report)  # some exceptions can be written but not read
        return report
    except Exception:
        return pickle.dumps(Raised(text, None))


def _redirect_output(log: Path) -> None:
    """Sends both file descriptors to the log, and with them whatever holds on to pytest's streams."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (both live as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stdout)


def _initialise(job: _Job) -> None:
    """What torchrun and deepspeed.init_distributed do for a training script."""
    import deepspeed
    import numpy
    import torch
    import torch.distributed as dist

    host, port = job.listener.getsockname()
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world),
        LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(job.world),
        LOCAL_SIZE=str(job.world),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    # Longer than the job's own timeout, which shows where each rank stands and should come first.
    patience = timedelta(seconds=job.timeout + 30)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        job.world,
        is_master=job.rank == 0,
        timeout=patience,
        master_listen_fd=os.dup(job.listener.fileno()) if job.rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=patience)
    # DeepSpeed compiles a shared-memory backend here, whose segments (69 MB) outlive a killed rank. By sys.modules,
    # because `import deepspeed.comm.torch` hands out the real torch.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
