# SPDX-License-Identifier: Apache-2.0
"""Between "moved" and "written": where fragments come from, how they are laid down, and who puts extents on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megads_ucp import storage
from megads_ucp.errors import PlanError
from megads_ucp.live import LiveState
from megads_ucp.plan import Extent, Holding, Plan, StateSpec, Transfer
from megads_ucp.survey import UNOWNED

WRITER_THREADS = 2
"""Enough that one file's fsync overlaps with another's checksum; more would make the disk seek."""

_EXTENT_ALIGNMENT = 64


class Snapshot:
    """The values one export sends: views of the live state where it is in host memory, one copy of it elsewhere."""

    def __init__(self, live: LiveState) -> None:
        self._groups = [
            {name: state.detach().to("cpu") for name, state in group.sharded_states().items()} for group in live.groups
        ]
        unowned = live.unowned() if live.groups[0].shard_rank == 0 else {}
        # Flat views, which cost nothing: a frozen model is large, and is asked for a bucket at a time.
        self._unowned = {name: value.detach().reshape(-1) for name, value in unowned.items()}
        self.inexact = {name: value.detach() for name, value in unowned.items() if not _fp32_holds(value)}
        """Of buffers and frozen parameters, those with values that fp32, and so the format, cannot hold, by name."""

    def holding(self, transfer: Transfer, extent: Extent) -> torch.Tensor:
        """The values of one transfer's holding; see :meth:`values`."""
        return self.values(transfer.holding, extent.state)

    def values(self, holding: Holding, state: StateSpec) -> torch.Tensor:
        """The 1-D values of one of this rank's own holdings in a state.

        What no optimizer owns comes as the model has it, on its device and in its dtype; copying it into a message or
        an extent makes it fp32, as the stock converter writes it (ds_to_universal.main, "fp32_path").

        Raises:
            PlanError: the optimizer no longer has the state.
        """
        group, fragment = holding.group, holding.fragment
        if group == UNOWNED:
            return self._unowned[fragment.name]
        states = self._groups[group]
        if state.name not in states:
            raise PlanError(f"the optimizer has no state {state.name} for parameter {fragment.name} any more.")
        return states[state.name].narrow(0, fragment.partition_start, fragment.numel)


def _fp32_holds(value: torch.Tensor) -> bool:
    if value.itemsize <= 2 or value.dtype == torch.float32:  # also those whose values torch can hardly compare
        return True
    return not value.is_complex() and torch.equal(value.float().to(value.dtype).nan_to_num(), value.nan_to_num())


def file_name(plan: Plan, extent: Extent) -> str:
    """The extent's file, relative to the checkpoint directory."""
    return f"zero/{plan.subjects[extent.subject].name}/{extent.state.name}.pt"


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
            if transfer.turn == 0:
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


def records_by_file(records: list[storage.ExtentRecord]) -> dict[str, list[storage.ExtentRecord]]:
    """All ranks' records, by the file they are of."""
    by_file: dict[str, list[storage.ExtentRecord]] = defaultdict(list)
    for record in records:
        by_file[record.path].append(record)
    return by_file
