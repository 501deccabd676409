# SPDX-License-Identifier: Apache-2.0
"""Writing the files of a checkpoint: each byte once, sequentially, checksummed on the way, durable on return.

The names of new files become durable with their directories, which their ranks see to (:meth:`Staging.settle`).
All functions raise StorageError, with the path and the reason, if the operating system refuses.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

from megads_ucp.storage.checksum import BLOCK_BYTES, blocks, crc32
from megads_ucp.storage.durable import Buffer, descriptor, payload_view, pwrite_all, storage_errors
from megads_ucp.storage.framing import Frame
from megads_ucp.storage.records import ExtentRecord


class FileWriter:
    """One rank's part of the file of one tensor, opened once. Threads may write different ranges of it at a time.

    Args:
        path: of the file.
        frame: everything in the file but the payload. Whoever writes the first byte of the payload writes it too.
        root: checkpoint directory; the path of records is relative to it.
    """

    def __init__(self, path: Path, frame: Frame, root: Path | None = None) -> None:
        self.path, self.frame = path, frame
        self._name = _relative(path, root)
        with storage_errors("write", path):
            # Never O_TRUNC: another rank may have written its part already.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write(self, start: int, buffers: Iterable[torch.Tensor | Buffer]) -> ExtentRecord:
        """Write buffers one after the other.

        Blocks are checksummed just before they are written, while the cache holds them.

        Args:
            start: where the first one begins in the payload, in bytes.
            buffers: contiguous CPU tensors, or bytes.

        Returns:
            A record of these bytes.
        """
        views = [payload_view(buffer) for buffer in buffers]
        nbytes = sum(map(len, views))
        if start < 0 or start + nbytes > self.frame.payload_bytes:
            raise ValueError(
                f"{self.path}: {nbytes} bytes at byte {start} do not fit the {self.frame.payload_bytes} bytes of a "
                f"{self.frame.dtype} tensor of shape {self.frame.shape}"
            )
        checksums: list[int] = []
        offset = start + self.frame.payload_offset if start else 0
        pending: list[Buffer] = [] if start else [self.frame.prefix]
        with storage_errors("write", self.path):
            for block in _blocks(views):
                checksum = 0
                for view in block:
                    checksum = crc32(view, checksum)
                checksums.append(checksum)
                offset, pending = pwrite_all(self._fd, [*pending, *block], offset), []
            pwrite_all(self._fd, pending, offset)
        return ExtentRecord(self._name, start, nbytes, tuple(checksums))

    def complete(self, payload_crc32: int) -> None:
        """Write what follows the payload."""
        end = self.frame.payload_offset + self.frame.payload_bytes
        with storage_errors("write", self.path):
            pwrite_all(self._fd, [self.frame.with_crc(payload_crc32).suffix], end)

    def close(self) -> None:
        """Wait until what all ranks have written is on stable storage."""
        fd, self._fd = self._fd, -1
        with storage_errors("write", self.path):
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def abandon(self) -> None:
        """Close the file as it is, if it is open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _blocks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes of all views in blocks of :data:`BLOCK_BYTES`, the last one shorter."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for view in views:
        while view:
            block.append(view[:room])
            room -= len(block[-1])
            view = view[len(block[-1]) :]
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def write_object(path: Path, obj: Any, *, root: Path | None = None) -> ExtentRecord:
    """``torch.save`` of a small object (step.pt, optimizer_state.pt, mp_rank files).

    Returns:
        A record of the whole file.
    """
    return write_bytes(path, serialized(obj), root=root)


def serialized(obj: Any) -> memoryview:
    """What ``torch.save`` writes of an object. Not for several threads at a time: it sets an option of torch."""
    stream = io.BytesIO()
    with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
        torch.save(obj, stream)
    return stream.getbuffer()


def write_bytes(path: Path, view: memoryview, *, root: Path | None = None) -> ExtentRecord:
    """Write a whole file at once, durably.

    Returns:
        A record of the whole file.
    """
    with storage_errors("write", path), descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        pwrite_all(fd, [view], 0)
        os.fsync(fd)
    return ExtentRecord(_relative(path, root), 0, len(view), tuple(crc32(block) for block in blocks(view)))


def _relative(path: Path, root: Path | None) -> str:
    return (path if root is None else path.relative_to(root)).as_posix()
