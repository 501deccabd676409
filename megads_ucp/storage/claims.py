# SPDX-License-Identifier: Apache-2.0
"""Who writes an export, and whether that writer still lives.

A claim is the file ``.<name>.writer-<run id>`` beside the export's target. It is there before anything else of the
export and until everything of it is done, so whatever lies there without a claim belongs to nobody. While its writer
lives, the claim is locked (``flock``), and it says which process of which machine that is. Another writer takes it so:

- The lock is held: the writer lives, unless it was a process of this machine that has ended (a process that it forked
  keeps the lock).
- The lock is free and was taken on this machine, since its last boot: the writer is gone.
- The lock is free and was taken on another machine, or the file system has no locks: on this machine the process
  decides. Elsewhere nobody knows, since some file systems keep locks to one machine (Lustre with ``localflock``). The
  writer counts as gone once nothing that it was writing has changed for an hour, by the file system's own clock; until
  then what it has left is let alone.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

SILENT_SECONDS = 3600.0
"""After how long without a change the writer on another machine counts as gone."""

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)


class Standing(enum.Enum):
    """What is known about a writer."""

    LIVES = "lives"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Writer:
    """A process that writes an export.

    Attributes:
        host: its name.
        boot: Linux's id of the machine's current boot.
        processes: the name space that ``pid`` is of.
        pid: process id.
        started: when the process started, in clock ticks after the boot; 0 if that cannot be found out.
        since: when the export began, in seconds since 1970 by the host's clock.
        locked: whether the claim is locked while the writer lives.
    """

    host: str
    boot: str
    processes: str
    pid: int
    started: int
    since: float
    locked: bool

    @classmethod
    def this_process(cls) -> Writer:
        """The calling process, which has locked nothing yet."""
        pid = os.getpid()
        return cls(os.uname().nodename, _boot(), _processes(), pid, _started(pid) or 0, time.time(), False)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"host {self.host}, process {self.pid}, since {since}"

    def has_ended(self) -> bool | None:
        """Whether its process is there no more; None if that cannot be seen from this process."""
        if (self.boot, self.processes) != (_boot(), _processes()):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # of another user, but there
        started = _started(self.pid)
        return started is not None and started != self.started


@dataclass(frozen=True)
class Claim:
    """This process's claim, from :meth:`take` to :meth:`release`."""

    path: Path
    writer: Writer
    _file: IO[bytes]

    @classmethod
    def take(cls, path: Path) -> Claim:
        """
        Raises:
            OSError: the operating system refuses.
        """
        writer = Writer.this_process()
        file = open(path, "x+b", buffering=0)  # noqa: SIM115  # it stays open: closing it unlocks it
        try:
            writer = replace(writer, locked=_lock(file.fileno(), fcntl.LOCK_EX) is not None)
            file.write(json.dumps(asdict(writer)).encode())
        except OSError:
            path.unlink(missing_ok=True)
            file.close()
            raise
        return cls(path, writer, file)

    @property
    def now(self) -> float:
        """When it was written, by the clock of the file system."""
        return os.fstat(self._file.fileno()).st_mtime

    def release(self) -> None:
        """Delete and unlock it. Never raises."""
        with suppress(OSError):  # what stays is unlocked, so it stands for nobody
            self.path.unlink(missing_ok=True)
        self._file.close()


def read_claim(path: Path) -> Writer | None:
    """The writer that a claim names; None if it is gone or being written."""
    try:
        return Writer(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def standing(claim: Path, belongings: Sequence[Path], now: float) -> Standing:
    """What is known about the writer of a claim.

    Args:
        claim: of another writer.
        belongings: what that writer has written.
        now: the time, by the file system's clock.
    """
    writer, held = read_claim(claim), _is_held(claim)
    ended = None if writer is None else writer.has_ended()
    if ended:
        return Standing.GONE
    if held:
        return Standing.LIVES
    if writer is not None and writer.locked and held is not None and writer.boot == _boot():
        return Standing.GONE
    if ended is False:
        return Standing.LIVES
    silent = now - max((_changed(path) for path in (claim, *belongings)), default=0.0)
    return Standing.GONE if silent > SILENT_SECONDS else Standing.UNKNOWN


def _is_held(path: Path) -> bool | None:
    """Whether another open file holds the lock of ``path``; None if the file system cannot say."""
    try:
        with open(path, "rb", buffering=0) as file:
            # Shared, so that two that look at the same time do not take each other for the writer.
            locked = _lock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None if locked is None else not locked
    except OSError:
        return None


def _lock(fd: int, how: int) -> bool | None:
    """Lock an open file; False if another holds the lock, None if the file system has none."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _changed(path: Path) -> float:
    """When anything in a tree last changed."""
    found = 0.0
    for each in (path, *path.rglob("*")):
        try:
            found = max(found, each.lstat().st_mtime)
        except OSError:
            continue  # being deleted
    return found


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _processes() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process started, 0 once it has ended and only waits to be collected; None if that cannot be seen."""
    try:
        # proc(5): the fields from the third on stand behind the command's name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in "ZX" else int(fields[19])
