# SPDX-License-Identifier: Apache-2.0
"""The bytes around the tensor in a file of ``torch.save``, made without the tensor.

``torch.save`` writes a zip archive: the pickle (``data.pkl``) and some small records, then the tensor's bytes,
uncompressed and aligned (record ``data/0``), then the directory. Everything before the payload depends on shape, dtype
and metadata only; what follows holds the payload's CRC-32 in two places, where it is filled in once it is known. So a
tensor can be streamed into its file, or written by several ranks, and the result is an ordinary file of ``torch.save``.

A large payload begins on a page, so that writers who cut it at multiples of a page share no page of the file.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.serialization import config

PAYLOAD_ALIGNMENT = 4096
"""What the offset of a large payload in its file is a multiple of, in bytes: a page.

It is torch's own ``save.storage_alignment`` (torch 2.7, torch/utils/serialization/config.py), which torch writes into
the file, too, and pads every record to (torch/csrc: PyTorchStreamWriter). A file is some 30 kB larger for it.
"""

ALIGNED_FROM = 4 << 20
"""Bytes from which on a payload is large: the 30 kB are less than a hundredth of it."""

_PAYLOAD_RECORD = b"archive/data/0"  # PyTorchFileWriter names the archive "archive" when it writes to a Python object
_DESCRIPTOR = b"PK\x07\x08"  # zip data descriptor: signature, CRC-32, sizes
_DIRECTORY_ENTRY = b"PK\x01\x02"
_DIRECTORY_ENTRY_CRC = 16  # offset of the CRC-32 in a directory entry
_DIRECTORY_ENTRY_NAME = 46
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python's mmap since 3.13; asm-generic/mman.h


@dataclass(frozen=True)
class Frame:
    """A file of one tensor without the tensor: ``prefix`` + payload + ``suffix``.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        prefix: the bytes before the payload.
        suffix: the bytes after the payload.
        payload_bytes: size of the payload, which lies between the two.
        crc_positions: byte offsets in ``suffix`` of the payload's CRC-32; none for a tensor without elements, which
            has nothing to protect.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    prefix: bytes
    suffix: bytes
    payload_bytes: int
    crc_positions: tuple[int, ...]

    @property
    def payload_offset(self) -> int:
        """Byte offset in the file of the tensor's first element."""
        return len(self.prefix)

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.prefix) + self.payload_bytes + len(self.suffix)

    @property
    def crc32(self) -> int:
        """CRC-32 of prefix + suffix as they are."""
        return zlib.crc32(self.suffix, zlib.crc32(self.prefix))

    def with_crc(self, payload_crc32: int) -> Frame:
        """The same frame with the payload's CRC-32 filled in."""
        suffix = bytearray(self.suffix)
        for position in self.crc_positions:
            struct.pack_into("<I", suffix, position, payload_crc32)
        return replace(self, suffix=bytes(suffix))


class _HoledSink:
    """A file for ``torch.save`` to write to; it keeps the bytes around the hole that ``skip_data`` leaves.

    PyTorchFileWriter steps over a skipped record with ``seek(nbytes, SEEK_CUR)`` (torch/csrc/jit/python/init.cpp,
    "Note: write_record_metadata"). A BytesIO would fill the hole with zeros; this costs nothing however large it is.
    """

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[]]
        self.holes: list[int] = []

    def write(self, data: bytes) -> int:
        self.parts[-1].append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        self.parts.append([])
        self.holes.append(offset)

    def flush(self) -> None:
        pass


def frame(shape: tuple[int, ...], dtype: torch.dtype, metadata: Mapping[str, Any]) -> Frame:
    """The frame of ``torch.save({"param": tensor, **metadata}, file)`` for a contiguous CPU tensor.

    Takes a fraction of a millisecond and no memory, whatever the size of the tensor. Equals what ``torch.save`` writes
    to a file object at this alignment but for ``.data/serialization_id``, a hash that leaves the payload out here.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        metadata: small picklable values, no tensors.

    Returns:
        A frame with zero for the payload's CRC-32; see :meth:`Frame.with_crc`.

    Raises:
        TypeError: ``metadata`` holds a tensor.
    """
    tensor = _untouched_tensor(shape, dtype)
    sink = _HoledSink()
    # CRCs of the small records: a program may have switched them off for its own files, where testzip then fails.
    options: dict[str, Any] = {"save.compute_crc32": True}
    if tensor.untyped_storage().nbytes() >= ALIGNED_FROM:
        options["save.storage_alignment"] = PAYLOAD_ALIGNMENT
    with torch.serialization.skip_data(), config.patch(options):  # type: ignore[attr-defined]
        torch.save({"param": tensor, **metadata}, sink)  # type: ignore[arg-type]
    payload_bytes = tensor.untyped_storage().nbytes()
    if sink.holes != ([payload_bytes] if payload_bytes else []):
        raise TypeError(f"metadata beside a tensor must not hold tensors itself: {sorted(metadata)}")
    if not payload_bytes:
        return Frame(tuple(shape), dtype, b"".join(sink.parts[0]), b"", 0, ())
    prefix, suffix = (b"".join(part) for part in sink.parts)
    return Frame(tuple(shape), dtype, prefix, suffix, payload_bytes, _crc_positions(suffix))


def _untouched_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor, however large, that takes up addresses but no memory until its elements are touched.

    Not ``torch.empty``: that fills the memory under ``torch.use_deterministic_algorithms``, and refuses a tensor larger
    than the machine's memory, though this rank may have to write but one extent of it.
    """
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    like = torch.empty(shape, dtype=dtype, device="meta")
    storage = tensor.untyped_storage()
    if like.numel():
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        storage = torch.frombuffer(mmap.mmap(-1, like.nbytes, flags), dtype=torch.uint8).untyped_storage()
    return tensor.set_(storage, 0, like.shape, like.stride())


def _crc_positions(suffix: bytes) -> tuple[int, int]:
    """Offsets of the payload's CRC-32: in the data descriptor that follows the payload, and in its directory entry."""
    entry = suffix.index(_PAYLOAD_RECORD) - _DIRECTORY_ENTRY_NAME
    if not suffix.startswith(_DESCRIPTOR) or suffix[entry : entry + 4] != _DIRECTORY_ENTRY:
        raise RuntimeError(f"torch {torch.__version__} writes its files in a layout that this megads_ucp does not know")
    return len(_DESCRIPTOR), entry + _DIRECTORY_ENTRY_CRC
