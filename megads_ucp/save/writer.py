# SPDX-License-Identifier: Apache-2.0
"""Between "moved" and "written": where fragments come from, how they are laid down, and who puts extents on disk."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megads_ucp import storage
from megads_ucp.errors import PlanError
from megads_ucp.plan.types import Extent, Plan, Transfer
from megads_ucp.storage.format import padding_file, state_file

WRITER_THREADS = 2
"""Enough that one file's fsync overlaps with another's checksum; more would make the disk seek."""


_EXTENT_ALIGNMENT = 64


def file_name(plan: Plan, extent: Extent) -> str:
    """The extent's file, relative to the checkpoint directory."""
    subject = plan.subjects[extent.subject]
    return (padding_file if subject.padding else state_file)(subject.name, extent.state.name)


class ExtentWriter:
    """What a rank keeps between exports: the memory of its extents and the frames of their files."""

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._plan: Plan | None = None
        self._mine: dict[int, Extent] = {}
        self._frames: dict[tuple[int, torch.dtype], storage.Frame] = {}

    def frame(self, plan: Plan, extent: Extent) -> storage.Frame:
        """The frame of the extent's file: made once per plan, and one for all states of a parameter in one dtype."""
        if plan is not self._plan:
            self._plan, self._frames = plan, {}
        key = extent.subject, extent.state.written
        if key not in self._frames:
            subject = plan.subjects[extent.subject]
            self._frames[key] = storage.frame(subject.layout.shape, extent.state.written, subject.metadata())
        return self._frames[key]

    def prepare(self, plan: Plan, rank: int, staging: storage.Staging) -> Sink:
        """A sink for this rank's extents."""
        mine = {index: extent for index, extent in enumerate(plan.extents) if extent.writer == rank}
        frames = {index: self.frame(plan, extent) for index, extent in mine.items()}
        sizes = {i: -(-extent.nbytes // _EXTENT_ALIGNMENT) * _EXTENT_ALIGNMENT for i, extent in mine.items()}
        if self._arena.numel() < sum(sizes.values()):
            self._arena = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is asked for
            self._arena = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        buffers, offset = {}, 0
        for index, extent in mine.items():
            buffers[index] = self._arena[offset : offset + extent.nbytes].view(extent.state.written)
            offset += sizes[index]
        self._mine = mine
        return Sink(plan, staging, buffers, frames)

    def frames(self, plan: Plan) -> dict[str, storage.Frame]:
        """The frame of every tensor's file of the checkpoint, by the file's name."""
        return {file_name(plan, extent): self.frame(plan, extent) for extent in plan.extents if extent.start == 0}

    def split_frames(self, plan: Plan) -> Iterator[tuple[str, storage.Frame]]:
        """Name and frame of every split file whose first extent this rank writes, as last prepared."""
        for extent in self._mine.values():
            if extent.start == 0 and extent.stop < plan.subjects[extent.subject].layout.numel:
                yield file_name(plan, extent), self.frame(plan, extent)


class Sink:
    """Takes the values of a rank's extents, and writes each extent as soon as it is complete."""

    def __init__(
        self, plan: Plan, staging: storage.Staging, buffers: dict[int, torch.Tensor], frames: dict[int, storage.Frame]
    ) -> None:
        self._plan, self._staging = plan, staging
        self._buffers, self._frames = buffers, frames
        self._threads = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="megads_ucp-writer")
        self._writes: dict[int, Future[storage.ExtentRecord]] = {}

    def lay(self, transfer: Transfer, values: list[torch.Tensor]) -> None:
        """Put one transfer's boxes into their extent's buffer."""
        extent = self._plan.extents[transfer.extent]
        for box, value in zip(transfer.boxes, values, strict=True):
            if box.scale != 1.0:  # of master weights only, see check_unscaled
                value = value.to(extent.state.written) / box.scale
            target = box.full_view(self._buffers[transfer.extent], extent.start)
            if transfer.copy_index == 0:
                target.copy_(value)
            else:
                target.add_(value)

    def arrived(self, index: int) -> None:
        """Write an extent whose values are all there."""
        extent = self._plan.extents[index]
        layout = self._plan.subjects[extent.subject].layout
        buffer = self._buffers[index]
        if layout.averaged:
            buffer.div_(layout.tp_degree)
        self._writes[index] = self._threads.submit(self._write, extent, buffer, self._frames[index])

    def _write(self, extent: Extent, buffer: torch.Tensor, frame: storage.Frame) -> storage.ExtentRecord:
        path, root = self._staging.path(file_name(self._plan, extent)), self._staging.directory
        if extent.numel == self._plan.subjects[extent.subject].layout.numel:
            return storage.write_file(path, frame, buffer, root=root)
        start = extent.start * extent.state.written.itemsize
        return storage.write_extent(path, frame, start, buffer, root=root)

    def finish(self) -> list[storage.ExtentRecord]:
        """Wait for all writes.

        Raises:
            PlanError: nothing arrived for some extent.
            StorageError: a write failed.
        """
        for index, buffer in self._buffers.items():
            if not buffer.numel():  # nothing travels for it
                self.arrived(index)
        self._threads.shutdown(wait=True)
        if absent := [index for index in self._buffers if index not in self._writes]:
            raise PlanError(f"nobody sent {file_name(self._plan, self._plan.extents[absent[0]])}.")
        return [write.result() for write in self._writes.values()]

    def abandon(self) -> None:
        """Stop writing; writes that have not begun never will."""
        self._threads.shutdown(wait=True, cancel_futures=True)
