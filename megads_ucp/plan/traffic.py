# SPDX-License-Identifier: Apache-2.0
"""What travels to the writer of an extent, as which copy, and in which round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megads_ucp.plan.types import MESSAGE_ALIGNMENT, Extent, Transfer, message_bytes

if TYPE_CHECKING:
    from megads_ucp.layout.boxes import Box
    from megads_ucp.plan.holders import Holders


def transfers_of(index: int, extent: Extent, holders: Holders, bucket_bytes: int) -> list[Transfer]:
    """All transfers of extent number ``index``, none larger than a bucket, in the order of their copies."""
    subject = holders.subject
    averaged = subject.layout.averaged
    preferred = None if averaged or not subject.owned else holders.tp_rank_of.get(extent.writer)
    limit = transfer_limit(bucket_bytes, extent)
    transfers: list[Transfer] = []
    for holding, boxes, numel in holders.parts(extent.start, extent.stop):
        copies = [_copy_index(box, holding.tp_rank, preferred) for box in boxes]
        if numel <= limit and not any(copies):  # nearly all of them, at scale
            transfers.append(Transfer(index, holding, boxes, numel, 0))
            continue
        # One copy is enough, unless they are averaged: whether copies agree is checked before the export.
        for copy_index in sorted(set(copies)) if averaged else [0]:
            chosen = [box for box, copy in zip(boxes, copies, strict=True) if copy == copy_index]
            transfers.extend(Transfer(index, holding, *chunk, copy_index) for chunk in chunks(chosen, limit))
    return sorted(transfers, key=lambda transfer: transfer.copy_index)


def transfer_limit(bucket_bytes: int, extent: Extent) -> int:
    """Most elements of the extent's state that fit in a bucket."""
    return bucket_bytes // MESSAGE_ALIGNMENT * MESSAGE_ALIGNMENT // extent.state.live.itemsize


def _copy_index(box: Box, tp_rank: int, preferred: int | None) -> int:
    """Which of the copies that tensor-parallel ranks hold of a box is that of ``tp_rank``.

    Copies are counted from that of ``preferred``, the writer's own tensor-parallel rank, if it has one: local data need
    not travel. It is None for copies that are averaged, which are added in rank order, as in the stock converter
    (ds_to_universal.merge_tp_slices): floating-point addition is not associative to the last bit.
    """
    copies = len(box.holders)
    if copies <= 1:
        return 0
    first = box.holders.index(preferred) if preferred in box.holders else 0
    return (box.holders.index(tp_rank) - first) % copies


def chunks(boxes: Iterable[Box], limit: int) -> Iterator[tuple[tuple[Box, ...], int]]:
    """The boxes in order, in bundles of at most ``limit`` elements, each with that number; boxes are cut to fit."""
    bundle: list[Box] = []
    room = limit
    for box in boxes:
        for part in cut_box(box, limit):
            if part.numel > room:
                yield tuple(bundle), limit - room
                bundle, room = [], limit
            bundle.append(part)
            room -= part.numel
    if bundle:
        yield tuple(bundle), limit - room


def cut_box(box: Box, limit: int, *, spans: bool = False) -> Iterator[Box]:
    """The box in parts of at most ``limit`` elements, in order.

    With ``spans``, all elements of the full tensor between a part's first and last one count, not only its own.
    """
    size = box.full_span[1] - box.full_span[0] if spans else box.numel
    if size <= limit or not box.shape:
        yield box
        return
    row = replace(box, shape=box.shape[1:], full_strides=box.full_strides[1:], shard_strides=box.shard_strides[1:])
    row_size = max(box.full_strides[0] if spans else row.numel, 1)
    step = max(limit // row_size, 1)
    for start in range(0, box.shape[0], step):
        full = box.full_offset + start * box.full_strides[0]
        shard = box.shard_offset + start * box.shard_strides[0]
        if step > 1 or row_size <= limit:
            count = min(step, box.shape[0] - start)
            yield replace(box, shape=(count, *box.shape[1:]), full_offset=full, shard_offset=shard)
        else:  # one row is more than fits: cut along the next axis
            yield from cut_box(replace(row, full_offset=full, shard_offset=shard), limit, spans=spans)


def schedule(extents: Sequence[Extent], transfers: Iterable[Transfer], bucket_bytes: int) -> Iterator[Transfer]:
    """Put every transfer into the first round in which its sender and its writer still have room for it.

    A writer takes its transfers in order. Extents with several copies come last, so that the others can be written
    while these still travel. Writers are served one transfer each, over and over, so that none hogs the early rounds.
    """
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    reached: dict[int, int] = defaultdict(int)
    for writer, transfer in _interleaved(_streams(extents, transfers)):
        sender, number = transfer.holding.rank, reached[writer]
        if sender != writer:
            size = message_bytes(transfer.numel, extents[transfer.extent].state.live.itemsize)
            while sent[sender, number] + size > bucket_bytes or received[writer, number] + size > bucket_bytes:
                number += 1
            sent[sender, number] += size
            received[writer, number] += size
        reached[writer] = number
        yield Transfer(transfer.extent, transfer.holding, transfer.boxes, transfer.numel, transfer.copy_index, number)


def _streams(extents: Sequence[Extent], transfers: Iterable[Transfer]) -> dict[int, list[Transfer]]:
    """Each writer's transfers in the order in which it takes them."""
    by_extent: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_extent[transfer.extent].append(transfer)
    streams: dict[int, list[Transfer]] = defaultdict(list)
    for index in sorted(by_extent, key=lambda index: by_extent[index][-1].copy_index > 0):
        streams[extents[index].writer].extend(by_extent[index])
    return streams


def _interleaved(streams: dict[int, list[Transfer]]) -> Iterator[tuple[int, Transfer]]:
    """One transfer of each writer, then the next of each, and so on."""
    waiting = sorted(streams)
    position = 0
    while waiting:
        for writer in waiting:
            yield writer, streams[writer][position]
        position += 1
        waiting = [writer for writer in waiting if position < len(streams[writer])]
