# SPDX-License-Identifier: Apache-2.0
"""What is known about written files: extents as their writers report them, files as the manifest lists them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megads_ucp.errors import StorageError
from megads_ucp.storage.checksum import block_sizes, crc32_combine, crc32_of_blocks
from megads_ucp.storage.framing import Frame


@dataclass(frozen=True)
class ExtentRecord:
    """What one write put into one file: a byte range of its payload.

    Attributes:
        path: of the file, relative to the checkpoint directory (to ``root`` of the writing function).
        start: first byte of the range, counted from the start of the payload.
        nbytes: length of the range in bytes.
        block_crc32: CRC-32 of each :data:`~megads_ucp.storage.checksum.BLOCK_BYTES` of the range, from its start.
    """

    path: str
    start: int
    nbytes: int
    block_crc32: tuple[int, ...]

    @property
    def crc32(self) -> int:
        """CRC-32 of the whole range."""
        return crc32_of_blocks(self.block_crc32, self.nbytes)


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows about one file.

    Attributes:
        path: relative to the checkpoint directory, with slashes.
        nbytes: size of the file in bytes.
        payload_offset: byte offset of the payload: the tensor, or the whole of any other pickled file.
        payload_bytes: size of the payload in bytes.
        dtype: of the tensor, such as "float32"; None for any other pickled file.
        shape: of the tensor; None for any other pickled file.
        frame_crc32: CRC-32 of everything but the payload.
        extents: (start, nbytes, CRC-32 of each block) of the parts the payload was written in, ascending, without
            gaps. ``start`` counts from the payload's first byte, blocks count from the start of their extent.
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
        """``dtype`` as a torch.dtype.

        Raises:
            StorageError: the file does not hold a tensor.
        """
        dtype = getattr(torch, self.dtype or "", None)
        if not isinstance(dtype, torch.dtype) or self.shape is None:
            raise StorageError(f"the manifest does not record {self.path} as a tensor: its dtype is {self.dtype!r}")
        return dtype

    @classmethod
    def of_tensor(cls, frame: Frame, extents: Sequence[ExtentRecord]) -> FileRecord:
        """The record of a tensor's file, from what its writers report, in any order.

        Raises:
            StorageError: the extents belong to several files or do not cover the payload exactly.
        """
        paths = sorted({extent.path for extent in extents})
        if len(paths) != 1:
            raise StorageError(f"the extents of one file name {paths}")
        dtype = str(frame.dtype).removeprefix("torch.")
        frame_crc32 = frame.with_crc(payload_crc32(extents)).crc32
        offset, size = frame.payload_offset, frame.payload_bytes
        return cls(paths[0], frame.nbytes, offset, size, dtype, frame.shape, frame_crc32, _extents(extents))

    @classmethod
    def of_object(cls, whole: ExtentRecord) -> FileRecord:
        """The record of a file that :func:`megads_ucp.storage.write_object` has written."""
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
    """CRC-32 of a payload written in parts, for :meth:`FileWriter.complete`.

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


def split_crc32(extents: Iterable[ExtentRecord]) -> dict[str, int]:
    """CRC-32 of the payload of every file that several extents make up, by path, from the records of all ranks.

    Raises:
        StorageError: the extents of a file leave a gap or overlap.
    """
    return {path: payload_crc32(parts) for path, parts in sorted(_by_file(extents).items()) if len(parts) > 1}


def file_records(frames: Mapping[str, Frame], extents: Iterable[ExtentRecord]) -> list[FileRecord]:
    """The records of all files of a checkpoint, by ascending path.

    Args:
        frames: by path, of the files that hold a tensor; all others are pickled objects, written whole.
        extents: the records of all ranks.

    Raises:
        StorageError: the extents of a file do not cover its payload exactly.
    """
    by_file = _by_file(extents)
    files = [FileRecord.of_tensor(frame, by_file.pop(path, [])) for path, frame in frames.items()]
    files.extend(FileRecord.of_object(whole) for parts in by_file.values() for whole in parts)
    return sorted(files, key=lambda file: file.path)


def _by_file(extents: Iterable[ExtentRecord]) -> dict[str, list[ExtentRecord]]:
    by_file: dict[str, list[ExtentRecord]] = defaultdict(list)
    for extent in extents:
        by_file[extent.path].append(extent)
    return by_file


def _ascending(extents: Sequence[ExtentRecord]) -> list[ExtentRecord]:
    return sorted(extents, key=lambda extent: (extent.start, extent.nbytes))


def _extents(extents: Sequence[ExtentRecord]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    return tuple((extent.start, extent.nbytes, extent.block_crc32) for extent in _ascending(extents))
