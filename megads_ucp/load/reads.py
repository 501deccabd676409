# SPDX-License-Identifier: Apache-2.0
"""The reading of one fragment from one file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megads_ucp.layout.attention import AttentionOrder
from megads_ucp.layout.boxes import Box, cut_box
from megads_ucp.storage.read import TensorFile
from megads_ucp.storage.records import FileRecord
from megads_ucp.storage.verify import verify_range

SPAN_BYTES = 4 << 20
"""Bytes read at a time: enough to keep a disk busy, few enough to be still in the cache when columns are picked."""


@dataclass(frozen=True)
class File:
    """A parameter's file, checked but for its tensor.

    Attributes:
        tensor: its header.
        record: what the manifest knows about it, None without a manifest.
        vocabulary: whether a vocabulary's padding was cut off, so that the target may be padded to another size.
        attention: the order of queries, keys and values in it, where that was recorded.
    """

    tensor: TensorFile
    record: FileRecord | None
    vocabulary: bool
    attention: AttentionOrder | None = None

    def read(self, start: int, out: torch.Tensor, verify: bool) -> torch.Tensor:
        """Elements from ``start`` on into ``out``, 1-D and of the file's dtype; returns it.

        Raises:
            StorageError: the file is shorter than it was, or (``verify``) differs from its record.
        """
        if verify and self.record is not None:
            itemsize = out.itemsize
            verify_range(self.tensor.path, self.record, start * itemsize, (start + out.numel()) * itemsize)
        return self.tensor.read(start, out.numel(), out)


@dataclass(frozen=True)
class Read:
    """Part of one file on its way into a 1-D live tensor.

    Attributes:
        file: where it comes from.
        boxes: what of the full tensor is wanted, in shard coordinates that start at ``shard_start``.
        target_start, numel: the elements of the live tensor that it fills; those in no box become zero.
        target: returns the live tensor.
        padding: of a vocabulary: the file of the rows that pad it, and what of it is wanted, as ``boxes``.
    """

    file: File
    boxes: tuple[Box, ...]
    shard_start: int
    target_start: int
    numel: int
    target: Callable[[], torch.Tensor]
    padding: tuple[File, tuple[Box, ...]] | None = None

    def run(self, verify: bool) -> None:
        """Read it, at most ``SPAN_BYTES`` at a time.

        Raises:
            StorageError: as :meth:`File.read`.
        """
        live = self.clear()
        for file, boxes in self._sources():
            dtype = file.tensor.dtype
            for part in (p for box in boxes for p in cut_box(box, max(SPAN_BYTES // dtype.itemsize, 1))):
                first, last = part.full_span
                view = part.shard_view(live, self.shard_start)
                dense = part.numel == last - first and view.is_contiguous() and part.scale == 1.0
                if dense and live.device.type == "cpu" and live.dtype == dtype:
                    file.read(first, view.view(-1), verify)
                    continue
                values = file.read(first, torch.empty(last - first, dtype=dtype), verify)
                _lay(view, part, part.full_view(values, first))

    def clear(self) -> torch.Tensor:
        """The part of the live tensor to be filled, with zeros where no box will fill it."""
        live = self.target().detach().narrow(0, self.target_start, self.numel)
        if sum(box.numel for _, boxes in self._sources() for box in boxes) < self.numel:
            live.zero_()
        return live

    def _sources(self) -> list[tuple[File, tuple[Box, ...]]]:
        return [(self.file, self.boxes), *([self.padding] if self.padding is not None else [])]

    def lay(self, box: Box, values: torch.Tensor) -> None:
        """Put the values of one box, or of a part of one, where they belong."""
        live = self.target().detach().narrow(0, self.target_start, self.numel)
        _lay(box.shard_view(live, self.shard_start), box, values)


def _lay(view: torch.Tensor, box: Box, values: torch.Tensor) -> None:
    view.copy_(values)
    if box.scale != 1.0:
        view.mul_(box.scale)
