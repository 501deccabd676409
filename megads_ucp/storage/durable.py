# SPDX-License-Identifier: Apache-2.0
"""Writing that survives a power cut, and the operating system's errors in words. Knows nothing of checkpoints."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

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
    """Turn an OSError of the enclosed block into a StorageError: "cannot <action> <path>: <reason> (<way out>)"."""
    try:
        yield
    except OSError as error:
        hint = _WAY_OUT.get(error.errno or 0)
        reason = f"{error.strerror or error}" + (f" ({hint})" if hint else "")
        raise StorageError(f"cannot {action} {os.fspath(path)}: {reason}") from error


@contextmanager
def descriptor(path: Path, flags: int) -> Iterator[int]:
    """An open file descriptor; a file it creates gets mode 0666 less the umask, as DeepSpeed's files do."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def ranges(path: Path) -> Iterator[int]:
    """An open file descriptor for reading ranges: the kernel fetches just what is asked for.

    Its read-ahead, often 8 MB per file, would fetch what lies between a header and a range, or after a range, which
    other ranks need or nobody does. Reads of a few MB keep a disk as busy without it.
    """
    with descriptor(path, os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield fd


def payload_view(buffer: torch.Tensor | Buffer) -> memoryview:
    """The bytes of a contiguous CPU tensor (any dtype) or of a bytes-like object, without a copy."""
    if not isinstance(buffer, torch.Tensor):
        return memoryview(buffer).cast("B")
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ValueError(f"only contiguous CPU tensors are written, not {buffer.device} with strides {buffer.stride()}")
    return buffer.detach().view(-1).view(torch.uint8).numpy().data


_MOST_BUFFERS = 1024
"""That one call of pwritev(2) takes (IOV_MAX in linux/uio.h)."""


def pwrite_all(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write ``buffers`` one after the other at byte ``offset``; return the offset after the last byte."""
    remaining = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while remaining:
        written = os.pwritev(fd, remaining[:_MOST_BUFFERS], offset)
        offset += written
        while remaining and written >= len(remaining[0]):
            written -= len(remaining.pop(0))
        if written:
            remaining[0] = remaining[0][written:]
    return offset


def pread_all(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from byte ``offset``; return how many bytes there were: fewer only at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_durably(path: Path, data: Buffer) -> None:
    """Create a file or replace its content, and wait until it is on stable storage (the content, not the name)."""
    with descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        pwrite_all(fd, [data], 0)
        os.fsync(fd)


def fsync_directories(paths: Iterable[Path]) -> None:
    """Make the names inside each directory durable.

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


def write_latest(path: Path, name: str, run_id: str) -> None:
    """Make the one-line file ``path`` hold ``name``, atomically and durably, as DeepSpeed's loader reads it.

    The old content stays readable until it is replaced.

    Args:
        path: of the file.
        name: what it is to hold.
        run_id: of the export: each prepares the new content in a file of its own.

    Raises:
        StorageError: it could not be written; ``path`` is as before.
    """
    prepared = preparation_of_latest(path, run_id)
    with storage_errors("write", path):
        try:
            write_durably(prepared, os.fsencode(name))
            os.replace(prepared, path)
        except OSError:
            prepared.unlink(missing_ok=True)
            raise
    fsync_directories([path.parent])


def read_latest(path: Path) -> str | None:
    """The name that :func:`write_latest` (or DeepSpeed) put into ``path``; None if there is no such file.

    Raises:
        StorageError: the operating system refuses.
    """
    if not path.is_file():
        return None
    with storage_errors("read", path):
        return path.read_text().strip()


def preparation_of_latest(path: Path, run_id: str) -> Path:
    """Where :func:`write_latest` prepares the content of ``path``."""
    return path.with_name(f".{path.name}.new-{run_id}")
