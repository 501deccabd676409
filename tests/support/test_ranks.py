# SPDX-License-Identifier: Apache-2.0
"""The harness itself: results come back in order, and every kind of failure is reported, quickly and by name."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import RankError, run_ranks


def test_ranks_communicate_and_return_in_rank_order() -> None:
    def body(base: int) -> tuple[int, int, torch.Tensor]:
        total = torch.tensor([base + dist.get_rank()])
        dist.all_reduce(total)
        deepspeed.comm.barrier()
        return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), total

    results = run_ranks(body, 4, 10)

    assert [result[:2] for result in results] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert all(torch.equal(result[2], torch.tensor([46])) for result in results)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_an_exception_reaches_the_parent_while_other_ranks_wait(tmp_path: Path) -> None:
    def body() -> None:
        print(f"rank {dist.get_rank()} was here", flush=True)
        (tmp_path / str(dist.get_rank())).touch()
        while len(list(tmp_path.iterdir())) < 3:  # else one would be killed before it has said so
            time.sleep(0.01)
        if dist.get_rank() == 1:
            raise KeyError("a name nobody knows")
        if dist.get_rank() == 2:
            time.sleep(300)  # half of what a job may take
            (tmp_path / "waited in vain").touch()
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 of 3 raised") as failure:
        run_ranks(body, 3)

    assert not (tmp_path / "waited in vain").exists()
    assert failure.value.rank == 1
    assert isinstance(failure.value.__cause__, KeyError)
    message = str(failure.value)
    assert 'raise KeyError("a name nobody knows")' in message
    assert all(f"rank {rank} was here" in message for rank in range(3))


def test_an_exception_that_cannot_be_pickled_is_reported_as_text() -> None:
    class Local(Exception):
        pass

    def body() -> None:
        raise Local("only known on the rank")

    with pytest.raises(RankError, match="only known on the rank"):
        run_ranks(body, 1)


@pytest.mark.slow
def test_a_timeout_shows_where_each_rank_stands() -> None:
    def waits_in_vain() -> None:
        time.sleep(600)

    def body() -> None:
        print("before the wait")
        if dist.get_rank() == 1:
            waits_in_vain()
        dist.barrier()

    with pytest.raises(RankError, match=r"no result within 8 s from ranks \[0, 1\] of 2") as failure:
        run_ranks(body, 2, timeout=8)  # enough for two ranks to start on a busy machine

    message = str(failure.value)
    assert message.count("before the wait") == 2
    assert "in waits_in_vain" in message
    assert "in barrier" in message


def test_a_killed_rank_is_reported_ahead_of_its_consequences() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match=r"^rank 1 of 2 was killed by SIGKILL") as failure:
        run_ranks(body, 2)
    assert failure.value.rank == 1


def test_a_rank_that_exits_on_its_own_is_reported() -> None:
    with pytest.raises(RankError, match=r"left without returning \(exit code 3\)"):
        run_ranks(lambda: os._exit(3), 1)


def test_survivors_of_an_expected_death_return() -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            dist.barrier()
        return "survived"

    assert run_ranks(body, 2, expect_death={1: signal.SIGKILL}) == ["survived", None]


def test_an_expected_death_that_does_not_happen_is_a_failure() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 should have been killed by SIGKILL"):
        run_ranks(lambda: None, 1, expect_death={0: signal.SIGKILL})


def test_shared_memory_of_killed_ranks_is_removed(tmp_path: Path) -> None:
    def body() -> None:
        segment = Path(f"/dev/shm/torch_{os.getpid()}_left")
        segment.write_bytes(b"x")
        (tmp_path / segment.name).touch()
        while len(list(tmp_path.iterdir())) < 2:  # else one would die while the other is still connecting to it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(body, 2, expect_death={0: signal.SIGKILL, 1: signal.SIGKILL})
    made = [path.name for path in tmp_path.iterdir()]
    assert len(made) == 2
    assert not [name for name in made if Path("/dev/shm", name).exists()]


def test_what_a_killed_rank_started_ends_with_it(tmp_path: Path) -> None:
    def body() -> None:
        # In a process group of its own, as ninja starts compilers.
        child = subprocess.Popen(["sh", "-c", "set -m; sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        (tmp_path / "pid").write_text(child.stdout.readline().strip())
        raise ValueError("time to go")

    with pytest.raises(RankError, match="time to go"):
        run_ranks(body, 1)
    pid = (tmp_path / "pid").read_text()
    assert pid.isdigit()
    assert not Path("/proc", pid, "exe").exists()


def test_threads_in_the_parent_are_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    try:
        with pytest.warns(RuntimeWarning, match="left-over"):
            run_ranks(lambda: None, 1)
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def native_thread() -> Iterator[Callable[[str, object], None]]:
    """Starts a thread that Python knows nothing of, which calls a function of the C library and ends."""
    libc = ctypes.CDLL(None)
    started = []  # with their arguments, which must live as long as they do

    def start(function: str, argument: object) -> None:
        thread = ctypes.c_ulong()
        assert libc.pthread_create(ctypes.byref(thread), None, getattr(libc, function), argument) == 0
        started.append((thread, argument))

    yield start
    for thread, _ in started:
        libc.pthread_join(thread, None)


@pytest.mark.slow
def test_a_native_thread_that_is_ending_is_waited_for(native_thread: Callable[[str, object], None]) -> None:
    native_thread("usleep", ctypes.c_void_p(700_000))
    run_ranks(lambda: None, 1)  # a warning would be an error here: see pyproject.toml


def test_a_native_thread_that_stays_is_counted(
    native_thread: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_ENDING_SECONDS", 0.1)
    libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # at least sizeof(sem_t)
    libc.sem_init(semaphore, 0, 0)
    native_thread("sem_wait", semaphore)
    try:
        with pytest.warns(RuntimeWarning, match=r"a process with 2 threads.*Python threads: \['MainThread'\]"):
            run_ranks(lambda: None, 1)
    finally:
        libc.sem_post(semaphore)


def test_ranks_import_nothing_anew() -> None:
    run_ranks(lambda: None, 1)

    def packages() -> set[str]:
        return {name.partition(".")[0] for name in sys.modules}

    before = packages()
    assert run_ranks(lambda: packages() - before, 2) == [set(), set()]


@pytest.mark.slow
def test_jobs_in_a_row_start_alike() -> None:
    draws = [run_ranks(lambda: torch.rand(1).item(), 2) for _ in range(5)]
    assert {value for draw in draws for value in draw} == {draws[0][0]}
