# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of one host share: one mapping per rank, made once and grown when needed.

It is a memfd, an anonymous file in memory, which peers open through /proc. So it does not depend on the size of
/dev/shm (64 MB in many containers), counts as shared memory of the rank's cgroup, and is gone when the last process
that uses it is, however that ends.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import secrets
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from megads_ucp.comm.channel import Channel

_BITS = 62
"""Of the integers that ranks tell each other."""

_TOKEN_BYTES = 8


class SharedMemory:
    """The memory of this rank, and that of its peers. Making one is collective.

    Args:
        channel: connects all ranks.
        wanted: whether ranks share memory at all; equal on all ranks.
        host: what ranks of one host have in common, and those of different ones have not.

    Attributes:
        rank: this one.
        peers: the other ranks of this host; none if nothing is shared.
        reason: why nothing is shared, for a message; None if memory is shared, or no two ranks are on one host.
    """

    def __init__(self, channel: Channel, wanted: bool = True, host: str | None = None) -> None:
        self.rank = channel.rank
        self._fd, self._own, self._mapped = -1, _NOTHING, dict[int, torch.Tensor]()
        self.reason = None if wanted else "that is what the configuration asks for"
        own, token = _digest(host_identity() if host is None else host), secrets.randbits(_BITS)
        if wanted and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("megads_ucp", os.MFD_CLOEXEC)
            os.write(self._fd, token.to_bytes(_TOKEN_BYTES, "little"))
        places = channel.all_gather_ints([own, os.getpid(), self._fd, token])
        near = [rank for rank, place in enumerate(places) if place[0] == own and rank != self.rank]
        self._fds = self._opened(near, places) if wanted else {}
        missing = torch.tensor([len(near) - len(self._fds), len(near)])
        failed, neighbours = channel.sum_int64(missing).tolist()
        if failed and wanted:
            self.reason = "they cannot open each other's memory (/proc is hidden, or they run as different users)"
        elif not neighbours:
            self.reason = None
        if failed or not wanted:
            self.close()
        self.peers = frozenset(self._fds)

    def _opened(self, near: Sequence[int], places: Sequence[Sequence[int]]) -> dict[int, int]:
        """Descriptors of those ranks' memory that this rank can open, by rank."""
        found = {}
        for rank in near:
            _, pid, number, token = places[rank]
            try:
                fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            if os.pread(fd, _TOKEN_BYTES, 0) == token.to_bytes(_TOKEN_BYTES, "little"):
                found[rank] = fd
            else:  # another process has that number in this rank's view
                os.close(fd)
        return found

    def reserve(self, nbytes: int) -> bool:
        """Make this rank's memory at least so large; False if there is not so much. It never shrinks.

        The ranks of a host take no more than half of what is available there: a cgroup that runs out of memory is not
        told so, but killed.
        """
        more = nbytes - self._own.numel()
        if more <= 0 or not self.peers:
            return True
        if more * (1 + len(self.peers)) > available_bytes() // 2:
            return False
        try:
            os.posix_fallocate(self._fd, 0, nbytes)  # now, as a write to what is not there would be a SIGBUS
        except OSError:
            return False
        self._own = _mapping(self._fd, nbytes, writable=True)
        return True

    def own(self) -> torch.Tensor:
        """This rank's memory, uint8, to be written."""
        return self._own

    def of(self, rank: int) -> torch.Tensor:
        """A peer's memory, uint8, to be read."""
        size = os.fstat(self._fds[rank]).st_size
        if rank not in self._mapped or self._mapped[rank].numel() < size:
            self._mapped[rank] = _mapping(self._fds[rank], size, writable=False)
        return self._mapped[rank]

    def close(self) -> None:
        """Give back descriptors and mappings. Local."""
        for fd in [*self._fds.values(), *([self._fd] if self._fd >= 0 else [])]:
            os.close(fd)
        self._fds, self._fd, self._own = {}, -1, _NOTHING
        self._mapped.clear()
        self.peers = frozenset()


_NOTHING = torch.empty(0, dtype=torch.uint8)


def host_identity() -> str:
    """What processes have in common that see each other's /proc/<pid>: a boot of a kernel, and namespaces."""
    try:
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces])
    except OSError:  # no Linux, or no /proc
        return platform.node()


def available_bytes() -> int:
    """Memory that this process could still take: of the machine, and of its cgroups, whose file cache gives way."""
    free = _fields("/proc/meminfo").get("MemAvailable:", sys.maxsize)
    path = next((line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), "/")
    for group in (Path("/sys/fs/cgroup", path.lstrip("/")), *Path("/sys/fs/cgroup", path.lstrip("/")).parents):
        limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
        if limit and used and limit[0].isdigit():
            cache = _fields(group / "memory.stat").get("file", 0)
            free = min(free, int(limit[0]) - int(used[0]) + cache)
    return max(free, 0)


def _fields(path: str | Path) -> dict[str, int]:
    """Numbers in bytes of a file of the kernel's that has a name and a number, in bytes or kB, in each line."""
    words = (line.split() for line in _lines(path))
    return {name: int(number) * (1024 if unit else 1) for name, number, *unit in words}


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _BITS)


def _mapping(fd: int, nbytes: int, *, writable: bool) -> torch.Tensor:
    """The first bytes of a file as a tensor, which keeps the mapping alive."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    pages = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, access)
    if writable:
        return torch.frombuffer(pages, dtype=torch.uint8)
    with warnings.catch_warnings():  # torch has no tensors that cannot be written, and says so
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(pages, dtype=torch.uint8)
