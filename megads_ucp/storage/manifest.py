# SPDX-License-Identifier: Apache-2.0
"""The manifest: what every file of a universal checkpoint must contain, so that damage is found and named."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megads_ucp.errors import StorageError
from megads_ucp.storage.checksum import BLOCK_BYTES, block_sizes, crc32_combine
from megads_ucp.storage.durable import descriptor, pread_all, ranges, storage_errors, write_durably
from megads_ucp.storage.format import MANIFEST
from megads_ucp.storage.framing import Frame
from megads_ucp.storage.write import ExtentRecord

_FORMAT = {"format": "megads_ucp manifest", "format_version": 1}


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows about one file.

    path: relative to the checkpoint directory, with slashes.
    nbytes: of the file. payload_offset, payload_bytes: where in it the tensor lies.
    dtype, shape: of the tensor ("float32"); None for other pickled files, whose payload is the whole file.
    frame_crc32: CRC-32 of all that is not payload.
    extents: (start, nbytes, CRC-32 of each block) for the parts the payload was written in, ascending, without gaps;
        start counts from the payload's first byte and blocks count from the extent's start.
    """

    path: str
    nbytes: int
    payload_offset: int
    payload_bytes: int
    dtype: str | None
    shape: tuple[int, ...] | None
    frame_crc32: int
    extents: tuple[tuple[int, int, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        end = 0
        for start, nbytes, block_crc32 in self.extents:
            if start != end or len(block_crc32) != sum(1 for _ in block_sizes(nbytes)):
                raise StorageError(f"{self.path}: the record of {nbytes} bytes at {start} does not continue at {end}")
            end = start + nbytes
        if end != self.payload_bytes or self.payload_offset + end > self.nbytes:
            raise StorageError(f"{self.path}: the records cover {end} of {self.payload_bytes} payload bytes")

    @property
    def tensor_dtype(self) -> torch.dtype:
        """``dtype`` as torch's.

        Raises:
            StorageError: the file is not a tensor's.
        """
        dtype = getattr(torch, self.dtype or "", None)
        if not isinstance(dtype, torch.dtype) or self.shape is None:
            raise StorageError(f"the manifest's record of {self.path} is not that of a tensor: dtype {self.dtype!r}")
        return dtype

    @classmethod
    def of_tensor(cls, frame: Frame, extents: Sequence[ExtentRecord]) -> FileRecord:
        """The record of a tensor's file, from what its writers report, in any order.

        Raises:
            StorageError: the extents are of several files or do not cover the payload exactly.
        """
        paths = sorted({extent.path for extent in extents})
        if len(paths) != 1:
            raise StorageError(f"extents of one file name {paths}")
        dtype = str(frame.dtype).removeprefix("torch.")
        frame_crc32 = frame.with_crc(payload_crc32(extents)).crc32
        offset, size = frame.payload_offset, frame.payload_bytes
        return cls(paths[0], frame.nbytes, offset, size, dtype, frame.shape, frame_crc32, _extents(extents))

    @classmethod
    def of_object(cls, whole: ExtentRecord) -> FileRecord:
        """The record of a file that was written by :func:`megads_ucp.storage.write_object`."""
        return cls(whole.path, whole.nbytes, 0, whole.nbytes, None, None, 0, _extents([whole]))

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it: numbers, strings and tuples of them. Not ``asdict``, which copies every checksum."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FileRecord:
        """Inverse of :meth:`to_json`, also after a passage through JSON.

        Raises:
            StorageError: a field is missing or makes no sense.
        """
        try:
            fields = dict(content)
            fields["shape"] = None if content["shape"] is None else tuple(content["shape"])
            fields["extents"] = tuple((start, nbytes, tuple(crcs)) for start, nbytes, crcs in content["extents"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"the manifest's record of {content.get('path')!r} is malformed: {error!r}") from error


def payload_crc32(extents: Sequence[ExtentRecord]) -> int:
    """CRC-32 of a payload written in parts, for :func:`megads_ucp.storage.write_frame`.

    Raises:
        StorageError: the parts leave a gap or overlap.
    """
    crc32 = end = 0
    for extent in _ascending(extents):
        if extent.start != end:
            raise StorageError(f"{extent.path}: an extent starts at byte {extent.start}, the last one ends at {end}")
        crc32 = crc32_combine(crc32, extent.crc32, extent.nbytes)
        end += extent.nbytes
    return crc32


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes ``manifest.json``, durably but for its name (which the commit's fsync of directories sees to)."""
    text = json.dumps({**_FORMAT, **content}, separators=(",", ":"))
    with storage_errors("write", directory / MANIFEST):
        write_durably(directory / MANIFEST, text.encode())


def read_manifest(directory: Path) -> dict[str, Any]:
    """The content given to :func:`write_manifest`, with its format and version.

    Raises:
        StorageError: missing, damaged, foreign or of a newer version.
    """
    path = directory / MANIFEST
    with storage_errors("read", path):
        data = path.read_bytes()
    try:
        content = json.loads(data)
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise StorageError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT["format"]:
        raise StorageError(f"{path} is not a manifest of megads_ucp: {directory} was written by something else")
    if content.get("format_version") != _FORMAT["format_version"]:
        raise StorageError(
            f"{path} has format version {content.get('format_version')}, this megads_ucp reads version "
            f"{_FORMAT['format_version']}: install a newer one"
        )
    return content


def verify_file(path: Path, record: FileRecord) -> None:
    """Reads a file completely and compares it with its record.

    Raises:
        StorageError: missing, of another size, or different; names the file and the bytes concerned.
    """
    with storage_errors("read", path), descriptor(path, os.O_RDONLY) as fd:
        _check_size(path, os.fstat(fd).st_size, record)
        for start, stop, expected in _block_ranges(record):
            _check_block(path, fd, start, stop, expected)
        _check_frame(path, fd, record)


def check_frame(path: Path, record: FileRecord) -> None:
    """Compares a file with its record as far as its size and all that is not payload go.

    The zip directory holds the payload's CRC-32, so a file of another export does not pass either.

    Raises:
        StorageError: missing, of another size, damaged or foreign.
    """
    with storage_errors("read", path), ranges(path) as fd:
        _check_size(path, os.fstat(fd).st_size, record)
        _check_frame(path, fd, record)


def verify_range(path: Path, record: FileRecord, start: int, stop: int) -> None:
    """Compares every block that holds some of the payload bytes [start, stop) with its record.

    Raises:
        StorageError: missing, of another size, or different; names the file and the bytes concerned.
    """
    start, stop = record.payload_offset + start, record.payload_offset + stop
    with storage_errors("read", path), ranges(path) as fd:
        _check_size(path, os.fstat(fd).st_size, record)
        for first, last, expected in _block_ranges(record):
            if first < stop and start < last:
                _check_block(path, fd, first, last, expected)


def _check_size(path: Path, size: int, record: FileRecord) -> None:
    if size != record.nbytes:
        what = "truncated" if size < record.nbytes else "too long"
        raise StorageError(f"{path} is {what}: {size} bytes instead of {record.nbytes}")


def _check_block(path: Path, fd: int, start: int, stop: int, expected: int) -> None:
    if _crc32_of_range(fd, start, stop) != expected:
        raise StorageError(
            f"{path} is damaged: the checksum of bytes [{start}, {stop}) is not the recorded one. Restore it from a "
            "copy, or load another tag"
        )


def _check_frame(path: Path, fd: int, record: FileRecord) -> None:
    payload_stop = record.payload_offset + record.payload_bytes
    head = _crc32_of_range(fd, 0, record.payload_offset)
    if _crc32_of_range(fd, payload_stop, record.nbytes, head) != record.frame_crc32:
        where = f"outside bytes [{record.payload_offset}, {payload_stop})"
        raise StorageError(
            f"{path} is damaged or of another export: its zip header or directory, {where}, is not the recorded one"
        )


def _block_ranges(record: FileRecord) -> Iterator[tuple[int, int, int]]:
    """(first byte in the file, byte after the last, recorded CRC-32) of every block of the payload."""
    for start, nbytes, block_crc32 in record.extents:
        begin = record.payload_offset + start
        for size, crc32 in zip(block_sizes(nbytes), block_crc32, strict=True):
            yield begin, begin + size, crc32
            begin += size


def _crc32_of_range(fd: int, start: int, stop: int, crc32: int = 0) -> int:
    """CRC-32 of bytes [start, stop) of a file, continuing ``crc32``."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, stop - start)))
    while start < stop:
        piece = buffer[: stop - start]
        count = pread_all(fd, piece, start)
        if not count:
            raise OSError(f"the file ends at byte {start} while it is being read")
        crc32 = zlib.crc32(piece[:count], crc32)
        start += count
    return crc32


def _ascending(extents: Sequence[ExtentRecord]) -> list[ExtentRecord]:
    return sorted(extents, key=lambda extent: (extent.start, extent.nbytes))


def _extents(extents: Sequence[ExtentRecord]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    return tuple((extent.start, extent.nbytes, extent.block_crc32) for extent in _ascending(extents))
