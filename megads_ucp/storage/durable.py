# SPDX-License-Identifier: Apache-2.0
"""Writing that survives a power cut, and operating-system errors in words. Nothing here knows of checkpoints."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from megads_ucp.errors import StorageError

Buffer: TypeAlias = "bytes | memoryview"


_WAY_OUT = {
    errno.ENOSPC: "free space there or save elsewhere",
    errno.EDQUOT: "the quota is used up: free space there or save elsewhere",
    errno.EFBIG: "the file system or a process limit (ulimit -f) does not allow a file this large",
    errno.ENOENT: "it does not exist or was deleted meanwhile, by a rotation policy for example",
    errno.ENOTDIR: "a file stands where a directory is needed: move it away",
    errno.EEXIST: "something of that name is in the way: move it away",
    errno.EISDIR: "a directory stands where a file is needed: move it away",
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "give this user permission",
    errno.EPERM: "give this user permission",
}


@contextmanager
def storage_errors(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an OSError of the enclosed block into a StorageError: "cannot <action> <path>: <reason> (<way out>)"."""
    try:
        yield
    except OSError as error:
        hint = _WAY_OUT.get(error.errno or 0)
        reason = f"{error.strerror or error}" + (f" ({hint})" if hint else "")
        raise StorageError(f"cannot {action} {os.fspath(path)}: {reason}") from error


@contextmanager
def descriptor(path: Path, flags: int) -> Iterator[int]:
    """An open file descriptor; a file it creates gets mode 0666 less the umask, as those of DeepSpeed do."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def ranges(path: Path) -> Iterator[int]:
    """An open file descriptor for reading ranges, of which the kernel fetches just what is asked for.

    Its read-ahead, often 8 MB per file, would fetch what lies between a header and a range, or behind a range, and is
    for other ranks or for nobody. Reads of a few MB keep a disk as busy without it.
    """
    with descriptor(path, os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield fd


def pwrite_all(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Writes ``buffers`` one after the other at byte ``offset``; returns the offset after the last byte."""
    remaining = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while remaining:
        written = os.pwritev(fd, remaining, offset)
        offset += written
        while remaining and written >= len(remaining[0]):
            written -= len(remaining.pop(0))
        if written:
            remaining[0] = remaining[0][written:]
    return offset


def pread_all(fd: int, buffer: memoryview, offset: int) -> int:
    """Fills ``buffer`` from byte ``offset``; returns how many bytes there were, fewer only at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_durably(path: Path, data: Buffer) -> None:
    """Creates or replaces the content of one file and waits until it is on stable storage (the file, not its name)."""
    with descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        pwrite_all(fd, [data], 0)
        os.fsync(fd)


def fsync_directories(paths: Iterable[Path]) -> None:
    """Makes the names inside each directory durable.

    Raises:
        StorageError: a directory is gone or the disk reports an error.
    """
    for path in paths:
        with storage_errors("make durable", path), descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            try:
                os.fsync(fd)
            except OSError as error:
                # Some network and FUSE file systems have no notion of syncing a directory: names are durable there
                # by the server's own rules, and there is nothing more to ask for.
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise


def fsync_tree(root: Path, shard: int = 0, of: int = 1) -> None:
    """Makes durable every ``of``-th directory of a tree (``root`` included), from the ``shard``-th on, in path order.

    Ranks that pass their own ``shard`` share the work: a large model has thousands of directories, one per parameter.

    Raises:
        StorageError: the tree is gone or changed meanwhile, or the disk reports an error.
    """

    def fail(error: OSError) -> None:
        raise error

    with storage_errors("list", root):
        directories = sorted(Path(path) for path, _, _ in os.walk(root, onerror=fail))
    fsync_directories(directories[shard::of])


def write_latest(path: Path, name: str) -> None:
    """Atomically and durably makes the one-line file ``path`` hold ``name``, as DeepSpeed's loader reads it.

    Until the replacement the old content stays readable. The new content is prepared in one file with a fixed name
    beside it, so that a killed writer leaves at most that one, which the next one overwrites.

    Raises:
        StorageError: it could not be written; ``path`` is as before.
    """
    prepared = latest_preparation(path)
    with storage_errors("write", path):
        write_durably(prepared, name.encode())
        try:
            os.replace(prepared, path)
        except OSError:
            prepared.unlink(missing_ok=True)
            raise
    fsync_directories([path.parent])


def latest_preparation(path: Path) -> Path:
    """Where :func:`write_latest` prepares the content of ``path``."""
    return path.with_name(f".{path.name}.new")
