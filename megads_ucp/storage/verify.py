# SPDX-License-Identifier: Apache-2.0
"""Comparing files with their records in the manifest, so that damage is found and named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megads_ucp.errors import StorageError
from megads_ucp.storage.checksum import BLOCK_BYTES, block_sizes, crc32
from megads_ucp.storage.durable import descriptor, pread_all, ranges, storage_errors
from megads_ucp.storage.records import FileRecord


def verify_file(path: Path, record: FileRecord) -> None:
    """Read a file completely and compare it with its record.

    Raises:
        StorageError: missing, of another size, or different; names the file and the bytes concerned.
    """
    with storage_errors("read", path), descriptor(path, os.O_RDONLY) as fd:
        _check_size(path, fd, record)
        for start, stop, expected in _block_ranges(record):
            _check_block(path, fd, start, stop, expected)
        _check_frame(path, fd, record)


def check_frame(path: Path, record: FileRecord) -> None:
    """Compare the size of a file, and everything in it but the payload, with its record.

    The zip directory holds the payload's CRC-32, so a file of another export does not pass either.

    Raises:
        StorageError: missing, of another size, damaged or foreign.
    """
    with storage_errors("read", path), ranges(path) as fd:
        _check_size(path, fd, record)
        _check_frame(path, fd, record)


def verify_range(path: Path, record: FileRecord, start: int, stop: int) -> None:
    """Compare every block that holds some of the payload bytes [start, stop) with its record.

    Raises:
        StorageError: missing, of another size, or different; names the file and the bytes concerned.
    """
    start, stop = record.payload_offset + start, record.payload_offset + stop
    with storage_errors("read", path), ranges(path) as fd:
        _check_size(path, fd, record)
        for first, last, expected in _block_ranges(record):
            if first < stop and start < last:
                _check_block(path, fd, first, last, expected)


def _check_size(path: Path, fd: int, record: FileRecord) -> None:
    size = os.fstat(fd).st_size
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
        for size, expected in zip(block_sizes(nbytes), block_crc32, strict=True):
            yield begin, begin + size, expected
            begin += size


def _crc32_of_range(fd: int, start: int, stop: int, value: int = 0) -> int:
    """CRC-32 of bytes [start, stop) of a file, continuing ``value``."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, stop - start)))
    while start < stop:
        piece = buffer[: stop - start]
        count = pread_all(fd, piece, start)
        if not count:
            raise OSError(f"the file ends at byte {start} while it is being read")
        value = crc32(piece[:count], value)
        start += count
    return value
