# SPDX-License-Identifier: Apache-2.0
"""What one rank writes in one export: extents straight from the live state where they lie there as in the file, others
put together a tile at a time."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Lock

import torch

from megads_ucp import storage
from megads_ucp.plan.save import Piece, SavePlan
from megads_ucp.plan.types import Extent, Transfer
from megads_ucp.save.frames import Frames, file_name
from megads_ucp.save.replicas import Values
from megads_ucp.storage.checksum import BLOCK_BYTES

WRITER_THREADS = 2
"""Enough that one file's fsync overlaps with another's checksum; more would make the disk seek."""

TILE_BYTES = BLOCK_BYTES
"""Of a file that are put together at a time: a block, so that every tile has a checksum of its own."""

_COMPLETED = 8
"""Files completed at a time: little is written, most of the time is spent waiting for the disk."""

_OF_DESCRIPTORS = 4
"""The part of the descriptors that the process may have which files that wait for their checksum may take."""

_TILES = 4
"""Under way at a time, from being put together to being written."""


@dataclass
class _File:
    """A file under way: how many writes are still to come, and records of those that have returned."""

    frame: storage.Frame
    pieces: list[Piece]
    missing: int = 0
    writer: storage.FileWriter | None = None
    records: list[storage.ExtentRecord] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    @property
    def begins(self) -> bool:
        """Whether this rank writes the file's frame."""
        return any(piece.extent.start == 0 for piece in self.pieces)

    @property
    def whole(self) -> bool:
        return sum(piece.extent.nbytes for piece in self.pieces) == self.frame.payload_bytes


class TensorWriter:
    """Writes this rank's extents.

    Args:
        plan: of this rank.
        frames: of the same subjects.
        staging: where the files go; their directories are there.
        values: of this rank's holdings.
        turn: in [0, 1): where in its list of files the rank begins, so that ranks do not queue for the same file.
    """

    def __init__(
        self, plan: SavePlan, frames: Frames, staging: storage.Staging, values: Values, turn: float = 0.0
    ) -> None:
        self._plan, self._staging, self._values = plan, staging, values
        self._files: dict[str, _File] = {}
        for piece in plan.writes:
            name = file_name(plan.subjects, piece.extent)
            self._files.setdefault(name, _File(frames.of(piece.extent), [])).pieces.append(piece)
        self._in_place = {id(piece) for piece in plan.writes if self._lies_in_place(piece)}
        self._turn = turn
        self._threads = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="megads_ucp-writer")
        self._writes: list[Future[None]] = []
        self._tile: tuple[Extent, torch.Tensor, torch.Tensor] | None = None
        self._spare: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._tiles_made = 0
        self._kept_open = 0

    def _lies_in_place(self, piece: Piece) -> bool:
        """Whether the extent lies in host memory as in the file."""
        state = piece.extent.state
        sources = (self._values(part.holding, state) for part in piece.parts)
        return piece.in_place and all(v.device.type == "cpu" and v.dtype == state.written for v in sources)

    def start(self) -> None:
        """Begin to write what lies in memory as in the file."""
        for file in self._files.values():
            for piece in file.pieces:
                nbytes = piece.extent.nbytes
                file.missing += 1 if id(piece) in self._in_place else -(-nbytes // TILE_BYTES)
        names = list(self._files)
        first = int(len(names) * self._turn)
        for name in [*names[first:], *names[:first]]:
            for piece in self._files[name].pieces:
                if id(piece) in self._in_place:
                    self._writes.append(self._threads.submit(self._write_in_place, name, piece))

    def transfers(self) -> Iterator[Transfer]:
        """What this rank sends, and what it puts together, in the order that all ranks share."""
        for piece in self._plan.pieces:
            if id(piece) not in self._in_place:
                yield from piece.transfers(TILE_BYTES)

    def lay(self, transfer: Transfer, values: list[torch.Tensor]) -> None:
        """Put one transfer's boxes into their tile; the transfers of a tile come one after the other."""
        extent = transfer.extent
        if self._tile is None or self._tile[0] is not extent:
            self._write_tile()
            memory = self._spare_memory()
            self._tile = extent, memory, memory[: extent.nbytes].view(extent.state.written)
        for box, value in zip(transfer.boxes, values, strict=True):
            if box.scale != 1.0:  # of master weights only, see check_unscaled
                value = value.to(extent.state.written) / box.scale
            target = box.full_view(self._tile[2], extent.start)
            if transfer.copy_index == 0:
                target.copy_(value)
            else:
                target.add_(value)

    def finish(self) -> list[storage.ExtentRecord]:
        """Wait for all writes but those of :meth:`complete`.

        Raises:
            StorageError: a write failed.
        """
        self._write_tile()
        for write in self._writes:
            write.result()
        return [record for file in self._files.values() for record in _joined(file)]

    def complete(self, payload_crc32: Mapping[str, int]) -> None:
        """Write the rest of those files that this rank has begun and others have written parts of.

        Args:
            payload_crc32: of these files' whole payloads, by name.

        Raises:
            StorageError: a write failed.
        """
        begun = [name for name, file in self._files.items() if file.begins and not file.whole]
        with ThreadPoolExecutor(_COMPLETED, thread_name_prefix="megads_ucp-completing") as threads:
            for done in [threads.submit(self._complete, name, payload_crc32[name]) for name in begun]:
                done.result()

    def sizes(self) -> dict[str, int]:
        """Of the files that this rank has begun, in bytes, by name."""
        return {name: file.frame.nbytes for name, file in self._files.items() if file.begins}

    def close(self) -> None:
        """Stop writing: writes that have not begun never will."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            if file.writer is not None:
                file.writer.abandon()

    def _spare_memory(self) -> torch.Tensor:
        if self._tiles_made == _TILES or not self._spare.empty():
            return self._spare.get()
        self._tiles_made += 1
        return torch.empty(TILE_BYTES, dtype=torch.uint8)

    def _write_tile(self) -> None:
        """Hand over the tile that has been put together."""
        if self._tile is None:
            return
        (extent, memory, values), self._tile = self._tile, None
        layout = self._plan.subjects[extent.subject].layout
        if layout.averaged:
            values.div_(layout.tp_degree)
        self._writes.append(self._threads.submit(self._write_and_spare, extent, memory, values))

    def _write_and_spare(self, extent: Extent, memory: torch.Tensor, values: torch.Tensor) -> None:
        try:
            self._write(file_name(self._plan.subjects, extent), extent, [values])
        finally:
            self._spare.put(memory)

    def _write_in_place(self, name: str, piece: Piece) -> None:
        runs: dict[int, torch.Tensor] = {}
        for holding, boxes, _, _ in piece.parts:
            values = self._values(holding, piece.extent.state)
            runs.update((box.full_offset, box.shard_view(values, holding.fragment.param_start)) for box in boxes)
        self._write(name, piece.extent, [runs[offset] for offset in sorted(runs)])

    def _write(self, name: str, extent: Extent, runs: Sequence[torch.Tensor]) -> None:
        file = self._files[name]
        with file.lock:
            if file.writer is None:
                file.writer = storage.FileWriter(self._staging.path(name), file.frame, self._staging.directory)
        record = file.writer.write(extent.start * extent.state.written.itemsize, runs)
        with file.lock:
            file.records.append(record)
            file.missing -= 1
            last = not file.missing
        if last:
            self._settle(file)

    def _settle(self, file: _File) -> None:
        """What follows the last write to a file."""
        assert file.writer is not None
        if file.whole:
            file.writer.complete(storage.payload_crc32(file.records))
        elif file.begins and self._kept_open < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OF_DESCRIPTORS:
            self._kept_open += 1
            return
        file.writer.close()
        file.writer = None

    def _complete(self, name: str, payload_crc32: int) -> None:
        file = self._files[name]
        writer = file.writer or storage.FileWriter(self._staging.path(name), file.frame, self._staging.directory)
        file.writer = writer
        writer.complete(payload_crc32)
        writer.close()


def _joined(file: _File) -> Iterator[storage.ExtentRecord]:
    """One record per piece, from those of its tiles."""
    records = sorted(file.records, key=lambda record: record.start)
    for piece in sorted(file.pieces, key=lambda piece: piece.extent.start):
        start, stop = (
            element * piece.extent.state.written.itemsize for element in (piece.extent.start, piece.extent.stop)
        )
        own = [record for record in records if start <= record.start < max(stop, start + 1)]
        yield replace(
            own[0], nbytes=stop - start, block_crc32=tuple(crc for record in own for crc in record.block_crc32)
        )
