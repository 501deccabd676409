# SPDX-License-Identifier: Apache-2.0
"""What travels to the writer of an extent, in which turn, and in which round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megads_ucp.layout.boxes import Box
from megads_ucp.plan.holders import Holders
from megads_ucp.plan.types import MESSAGE_ALIGNMENT, Extent, Transfer, message_bytes


def transfers_of(index: int, extent: Extent, holders: Holders, bucket_bytes: int) -> list[Transfer]:
    """All transfers of extent number ``index``, none larger than a bucket, in the order of their turns."""
    subject = holders.subject
    averaged = subject.layout.averaged
    near = None if averaged or not subject.owned else holders.tp_rank_of.get(extent.writer)
    limit = bucket_bytes // MESSAGE_ALIGNMENT * MESSAGE_ALIGNMENT // extent.state.live.itemsize
    transfers: list[Transfer] = []
    for holding, boxes, numel in holders.parts(extent.start, extent.stop):
        turns = [_turn(box, holding.tp_rank, near) for box in boxes]
        if numel <= limit and not any(turns):  # nearly all of them, at scale
            transfers.append(Transfer(index, holding, boxes, numel, 0))
            continue
        for turn in sorted(set(turns)):
            if turn == 0 or averaged:  # one copy will do: that they agree is found out otherwise
                copies = [box for box, its_turn in zip(boxes, turns, strict=True) if its_turn == turn]
                transfers.extend(Transfer(index, holding, *chunk, turn) for chunk in chunks(copies, limit))
    return sorted(transfers, key=lambda transfer: transfer.turn)


def _turn(box: Box, tp_rank: int, near: int | None) -> int:
    """Which copy this is of elements that several tensor-parallel ranks hold.

    ``near``, the writer's own tensor-parallel rank, comes first where it has a copy: what is on the spot need not
    travel. It is None for copies that are averaged, which are added in rank order, as the stock converter does
    (ds_to_universal.merge_tp_slices): floating-point addition is not associative to the last bit.
    """
    copies = len(box.holders)
    if copies <= 1:
        return 0
    first = box.holders.index(near) if near in box.holders else 0
    return (box.holders.index(tp_rank) - first) % copies


def chunks(boxes: Iterable[Box], limit: int) -> Iterator[tuple[tuple[Box, ...], int]]:
    """The boxes in order, in bundles, each with its number of elements, at most ``limit``; boxes are cut to fit."""
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
    """The box in parts of at most ``limit`` elements, in order; with ``spans``, elements of the full tensor that a part
    reaches over count, not only those it takes."""
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

    A writer takes its transfers in order. Extents with several turns come last, so that the others can be written while
    these still travel. Writers are served in turn, one transfer each, so that none hogs the early rounds.
    """
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    reached: dict[int, int] = defaultdict(int)
    for writer, transfer in _in_turn(_streams(extents, transfers)):
        sender, turn = transfer.holding.rank, reached[writer]
        if sender != writer:
            size = message_bytes(transfer.numel, extents[transfer.extent].state.live.itemsize)
            while sent[sender, turn] + size > bucket_bytes or received[writer, turn] + size > bucket_bytes:
                turn += 1
            sent[sender, turn] += size
            received[writer, turn] += size
        reached[writer] = turn
        yield Transfer(transfer.extent, transfer.holding, transfer.boxes, transfer.numel, transfer.turn, turn)


def _streams(extents: Sequence[Extent], transfers: Iterable[Transfer]) -> dict[int, list[Transfer]]:
    """Each writer's transfers in the order in which it takes them."""
    by_extent: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_extent[transfer.extent].append(transfer)
    streams: dict[int, list[Transfer]] = defaultdict(list)
    for index in sorted(by_extent, key=lambda index: by_extent[index][-1].turn > 0):
        streams[extents[index].writer].extend(by_extent[index])
    return streams


def _in_turn(streams: dict[int, list[Transfer]]) -> Iterator[tuple[int, Transfer]]:
    """One transfer of each writer, then the next of each, and so on."""
    waiting = sorted(streams)
    position = 0
    while waiting:
        for writer in waiting:
            yield writer, streams[writer][position]
        position += 1
        waiting = [writer for writer in waiting if position < len(streams[writer])]
