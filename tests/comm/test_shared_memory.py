# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks share: what peers see, who are peers, and that nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megads_ucp.comm.channel import Channel
from megads_ucp.comm.shared_memory import SharedMemory, available_bytes
from tests.support.ranks import run_ranks


def pattern(rank: int, nbytes: int) -> torch.Tensor:
    """Bytes that differ by rank."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


def mappings() -> int:
    return sum("memfd:megads_ucp" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("world", [2, 4])
def test_peers_read_what_a_rank_has_written_and_see_it_grow(world):
    def body() -> None:
        with closing(Channel(1.0)) as channel, closing(SharedMemory(channel)) as memory:
            assert memory.reason is None and memory.peers == set(range(world)) - {channel.rank}
            for nbytes in (1000, 100_000, 5000):
                assert memory.reserve(nbytes)
                memory.own()[:nbytes].copy_(pattern(channel.rank, nbytes))
                dist.barrier()
                for peer in memory.peers:
                    assert torch.equal(memory.of(peer)[:nbytes], pattern(peer, nbytes))
                dist.barrier()

    run_ranks(body, world)


def test_ranks_of_different_hosts_share_nothing_and_that_is_no_trouble():
    def body() -> tuple[set[int], str | None]:
        with closing(Channel(1.0)) as channel, closing(SharedMemory(channel, host=f"{channel.rank // 2}")) as memory:
            return set(memory.peers), memory.reason

    assert run_ranks(body, 3) == [({1}, None), ({0}, None), (set(), None)]


def test_nothing_is_shared_where_it_is_not_wanted():
    def body() -> tuple[set[int], str | None]:
        with closing(Channel(1.0)) as channel, closing(SharedMemory(channel, wanted=False)) as memory:
            return set(memory.peers), memory.reason

    assert run_ranks(body, 2) == [(set(), "that is what the configuration asks for")] * 2


def test_one_rank_that_cannot_open_its_peers_memory_makes_all_use_messages():
    def body() -> tuple[set[int], str | None]:
        channel = Channel(1.0)
        channel.sum_int64(torch.tensor(channel.all_gather_ints([1])).sum())  # its connections take descriptors as well
        if channel.rank == 1:  # one is left, for its own memory
            taken = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
            with suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            os.close(taken.pop())
        with closing(channel), closing(SharedMemory(channel)) as memory:
            return set(memory.peers), memory.reason

    for peers, reason in run_ranks(body, 3):
        assert peers == set()
        assert reason is not None and "cannot open each other's memory" in reason


def test_memory_that_is_not_there_is_refused_and_what_was_shared_stays():
    def body() -> None:
        with closing(Channel(1.0)) as channel, closing(SharedMemory(channel)) as memory:
            assert memory.reserve(1000)
            memory.own().copy_(pattern(channel.rank, 1000))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            assert not memory.reserve(1 << 30)
            dist.barrier()
            assert torch.equal(memory.of(1 - channel.rank)[:1000], pattern(1 - channel.rank, 1000))
            dist.barrier()

    run_ranks(body, 2)


def test_ranks_take_no_more_than_half_of_what_is_available():
    def body() -> None:
        with closing(Channel(1.0)) as channel, closing(SharedMemory(channel)) as memory:
            before = available_bytes()
            assert 0 < before <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            assert not memory.reserve(before // 3)  # two ranks: two thirds
            dist.barrier()
            assert available_bytes() > before // 2, "it was not even tried"
            dist.barrier()

    run_ranks(body, 2)


def test_opening_and_closing_leaves_no_descriptor_and_no_mapping():
    def body() -> None:
        channel = Channel(1.0)
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(20):
            memory = SharedMemory(channel)
            assert memory.reserve(1 << 16)
            memory.own().fill_(turn)
            dist.barrier()
            assert memory.of(1 - channel.rank).eq(turn).all()
            dist.barrier()
            memory.close()
            memory.close()
        assert len(os.listdir("/proc/self/fd")) == before
        assert mappings() == 0

    run_ranks(body, 2)


def test_a_killed_rank_leaves_nothing_behind():
    def body() -> list[str]:
        channel = Channel(1.0)
        memory = SharedMemory(channel)
        assert memory.reserve(1 << 16)
        memory.of(1 - channel.rank)
        dist.barrier()
        if channel.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        memory.close()
        return os.listdir("/dev/shm")

    before = set(os.listdir("/dev/shm"))
    remains = run_ranks(body, 2, expect_death={1: signal.SIGKILL})[0]
    assert not [name for name in set(remains) - before if "megads" in name]
