# SPDX-License-Identifier: Apache-2.0
"""Writing the files of a checkpoint: each byte once, sequentially, checksummed on the way, durable on return.

The names of new files become durable with their directories, which the commit sees to (``fsync_tree`` in durable.py).
All functions raise StorageError, with the path and the reason, if the operating system refuses.
"""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

from megads_ucp.storage.checksum import BLOCK_BYTES, blocks, crc32_of_blocks
from megads_ucp.storage.durable import Buffer, descriptor, payload_view, pwrite_all, storage_errors
from megads_ucp.storage.framing import Frame
from megads_ucp.storage.records import ExtentRecord

_CREATE = os.O_WRONLY | os.O_CREAT


def write_file(path: Path, frame: Frame, payload: torch.Tensor | Buffer, *, root: Path | None = None) -> ExtentRecord:
    """Write a whole file, frame included, in one sequential pass.

    The payload's blocks are checksummed just before they are written, while the cache holds them.

    Args:
        path: of the file.
        frame: everything in the file but the payload.
        payload: contiguous CPU tensor, or bytes.
        root: checkpoint directory; the record's path is relative to it.

    Returns:
        A record of the whole payload.
    """
    view = payload_view(payload)
    _check_range(path, frame, 0, len(view), whole=True)
    checksums: list[int] = []
    with storage_errors("write", path), descriptor(path, _CREATE | os.O_TRUNC) as fd:
        pending, offset = [memoryview(frame.prefix)], 0
        for block in blocks(view):
            checksums.append(zlib.crc32(block))
            pending.append(block)
            if len(block) == BLOCK_BYTES:
                offset, pending = pwrite_all(fd, pending, offset), []
        crc32 = crc32_of_blocks(checksums, len(view))
        pwrite_all(fd, [*pending, frame.with_crc(crc32).suffix], offset)
        os.fsync(fd)
    return ExtentRecord(_relative(path, root), 0, len(view), tuple(checksums))


def write_extent(
    path: Path, frame: Frame, start: int, buffer: torch.Tensor | Buffer, *, root: Path | None = None
) -> ExtentRecord:
    """Write part of a split file, as several processes may do in any order.

    Args:
        path: of the file.
        frame: of the whole file.
        start: where ``buffer`` begins in the payload, in bytes.
        buffer: contiguous CPU tensor, or bytes.
        root: checkpoint directory; the record's path is relative to it.

    Returns:
        A record of this part.
    """
    view = payload_view(buffer)
    _check_range(path, frame, start, len(view), whole=False)
    checksums: list[int] = []
    # Never O_TRUNC: another rank may have written its extent already.
    with storage_errors("write", path), descriptor(path, _CREATE) as fd:
        offset = frame.payload_offset + start
        for block in blocks(view):
            checksums.append(zlib.crc32(block))
            offset = pwrite_all(fd, [block], offset)
        os.fsync(fd)
    return ExtentRecord(_relative(path, root), start, len(view), tuple(checksums))


def write_frame(path: Path, frame: Frame, crc32: int) -> None:
    """Write everything but the payload of a split file, before or after its extents.

    Args:
        path: of the file.
        frame: of the whole file.
        crc32: CRC-32 of the whole payload.
    """
    finished = frame.with_crc(crc32)
    with storage_errors("write", path), descriptor(path, _CREATE) as fd:
        pwrite_all(fd, [finished.prefix], 0)
        pwrite_all(fd, [finished.suffix], frame.payload_offset + frame.payload_bytes)
        os.fsync(fd)


def write_object(path: Path, obj: Any, *, root: Path | None = None) -> ExtentRecord:
    """``torch.save`` of a small object (step.pt, optimizer_state.pt, mp_rank files).

    Returns:
        A record of the whole file.
    """
    stream = io.BytesIO()
    with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
        torch.save(obj, stream)
    view = stream.getbuffer()
    with storage_errors("write", path), descriptor(path, _CREATE | os.O_TRUNC) as fd:
        pwrite_all(fd, [view], 0)
        os.fsync(fd)
    return ExtentRecord(_relative(path, root), 0, len(view), tuple(zlib.crc32(block) for block in blocks(view)))


def _check_range(path: Path, frame: Frame, start: int, nbytes: int, *, whole: bool) -> None:
    wanted = frame.payload_bytes if whole else frame.payload_bytes - start
    if start < 0 or nbytes > wanted or (whole and nbytes != wanted):
        raise ValueError(
            f"{path}: {nbytes} bytes at byte {start} do not {'fill' if whole else 'fit'} the "
            f"{frame.payload_bytes} bytes of a {frame.dtype} tensor of shape {frame.shape}"
        )


def _relative(path: Path, root: Path | None) -> str:
    return (path if root is None else path.relative_to(root)).as_posix()
