# SPDX-License-Identifier: Apache-2.0
"""Whoever holds it writes it: how the elements of a file are dealt out to the ranks that hold them.

A *band* is a range of the full tensor that the same ranks hold. Each of them may hold all of it (one rank, or several
with copies), or some columns of every row: they share it equally, in whole rows. So a run that is contiguous in the
full tensor is written in place by a rank that holds it, and rows are put together by the very ranks that hold their
columns.

Everything follows from one parameter's holdings, so ranks need not plan what does not concern them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from megads_ucp.layout.boxes import Box
from megads_ucp.layout.layout import Layout
from megads_ucp.plan.holders import Holders, Part

GRAIN_BYTES = 1 << 20
"""A smaller piece is not worth a write of its own: the rank that writes the next piece of the file writes it too."""

_LEAST_GRAIN_BYTES = 64 << 10
_GRAINS = 64
"""A rank's share of the whole checkpoint is many grains, or else one piece more or less would unbalance the writers."""

_HEADER_BYTES = 5 * 4096
"""Of a large file, before its tensor: torch's small records, each padded to a page (storage/framing.py)."""

_PAGE_BYTES = 4096
_STRIPE_BYTES = 1 << 20
"""Where a band is cut freely, files are cut at multiples of this, as parallel file systems hand out their locks."""


@dataclass(frozen=True)
class Dealing:
    """How files are dealt out.

    Attributes:
        grain_bytes: see :data:`GRAIN_BYTES`.
        shared_files: whether several ranks may write one file. Otherwise one of its holders writes all of it.
    """

    grain_bytes: int = GRAIN_BYTES
    shared_files: bool = True

    @classmethod
    def of(cls, nbytes: int, world: int, shared_files: bool) -> Dealing:
        """For a checkpoint of so many bytes."""
        grain = nbytes // world // _GRAINS
        return cls(min(max(grain, _LEAST_GRAIN_BYTES), GRAIN_BYTES), shared_files)


_GOLDEN_RATIO = 0x9E3779B9
"""Its fractional part, times 2**32."""


class Share(NamedTuple):
    """Elements [start, stop) of a file, and the rank that writes them."""

    start: int
    stop: int
    writer: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def shares(holders: Holders, number: int, itemsize: int, dealing: Dealing) -> list[Share]:
    """Who writes what of a file, in the order of its elements.

    Args:
        holders: of the parameter.
        number: of the parameter among all; ranks that hold the same take turns in writing what is not worth cutting.
        itemsize: bytes of an element in the file.
    """
    layout = holders.subject.layout
    parts = [part for part in holders.parts if any(_may_write(holders, part, box) for box in part.boxes)]
    if not parts:
        return [Share(0, layout.numel, 0)]
    if not dealing.shared_files:
        return [Share(0, layout.numel, parts[_turn(number, len(parts))].holding.rank)]
    grain = max(dealing.grain_bytes // itemsize, 1)
    row = _row(layout, grain)
    found = [
        share
        for start, stop, ranks in _bands(holders, row, grain)
        for share in _dealt(start, stop, ranks, number, grain, row, itemsize)
    ]
    return [_together(small, number) for small in _grains(found, grain)]


def _may_write(holders: Holders, part: Part, box: Box) -> bool:
    """Of what no optimizer owns, copies may differ, and the first one is the one to be written."""
    return holders.subject.owned or box.holders[:1] in ((), (part.holding.tp_rank,))


def _row(layout: Layout, grain: int) -> int:
    """Elements of the full tensor in a row that ranks hold interleaved; 1 if runs are long enough to stand alone."""
    shards = (layout.runs(tp_rank, 0, prod(shape)) for tp_rank, shape in enumerate(layout.shard_shapes))
    return max((max(box.full_strides) for boxes in shards for box in boxes if _interleaved(box, grain)), default=1)


def _run_length(box: Box) -> int:
    """Neighbouring elements of a box that are neighbours in the full tensor as well."""
    return next((size for size, stride in zip(box.shape, box.full_strides, strict=True) if stride == 1), 1)


def _interleaved(box: Box, grain: int) -> bool:
    return _run_length(box) < min(grain, box.numel)


def _spans(box: Box, grain: int) -> Iterator[tuple[int, int]]:
    """The ranges of the full tensor in which a box lies: its runs, or, where these are short, one from its first
    element to its last."""
    if _interleaved(box, grain) or _run_length(box) == box.numel:
        yield box.full_span
        return
    axes = [(size, stride) for size, stride in zip(box.shape, box.full_strides, strict=True) if stride != 1]
    for index in product(*(range(size) for size, _ in axes)):
        start = box.full_offset + sum(i * stride for i, (_, stride) in zip(index, axes, strict=True))
        yield start, start + _run_length(box)


def _bands(holders: Holders, row: int, grain: int) -> Iterator[tuple[int, int, list[int]]]:
    """Start and stop of every band, in whole rows, with the ranks that may write it, by tensor-parallel rank."""
    numel = holders.subject.layout.numel
    spans = (
        (index, start, stop)
        for index, part in enumerate(holders.parts)
        for box in part.boxes
        if _may_write(holders, part, box)
        for start, stop in _spans(box, grain)
    )
    counts: dict[int, int] = defaultdict(int)
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, start, stop in spans:
        changes[start // row * row].append((index, 1))
        changes[min(-(-stop // row) * row, numel)].append((index, -1))
    for start, stop in pairwise(sorted(changes)):
        for index, change in changes[start]:
            counts[index] += change
            if not counts[index]:
                del counts[index]
        yield start, stop, [holders.parts[index].holding.rank for index in sorted(counts)]


def _dealt(
    start: int, stop: int, ranks: Sequence[int], number: int, grain: int, row: int, itemsize: int
) -> Iterator[Share]:
    """A band in equal shares, as many as there are ranks if they are worth it."""
    size = stop - start
    count = min(len(ranks), max(size // grain, 1))
    inner = (_aligned(start + size * n // count, row, size // count, itemsize) for n in range(1, count))
    for n, (first, last) in enumerate(pairwise([start, *(max(cut, start) for cut in inner), stop])):
        if first < last:
            yield Share(first, last, ranks[(_turn(number, len(ranks)) + n * len(ranks) // count) % len(ranks)])


def _aligned(element: int, row: int, size: int, itemsize: int) -> int:
    """The last element not above ``element`` at which a row begins, or else a page or stripe of the file, if shares of
    ``size`` elements span several of these."""
    if row > 1:
        return element // row * row
    unit = next((unit for unit in (_STRIPE_BYTES, _PAGE_BYTES) if size * itemsize >= 4 * unit), itemsize)
    return max(((element * itemsize + _HEADER_BYTES) // unit * unit - _HEADER_BYTES) // itemsize, 0)


def _grains(found: Sequence[Share], grain: int) -> list[list[Share]]:
    """The shares, bundled where they are small: each goes with the next one, the last with the one before."""
    bundles: list[list[Share]] = []
    room = 0
    for share in found:
        if bundles and (room > 0 or bundles[-1][-1].writer == share.writer):
            bundles[-1].append(share)
        else:
            bundles.append([share])
            room = grain
        room -= share.numel
    if len(bundles) > 1 and room > 0:
        last = bundles.pop()
        bundles[-1].extend(last)
    return bundles


def _together(bundle: Sequence[Share], number: int) -> Share:
    """A bundle as the share of one rank, of those with the larger parts of it."""
    least = max(share.numel for share in bundle) / 2
    writers = [share.writer for share in bundle if share.numel >= least]
    return Share(bundle[0].start, bundle[-1].stop, writers[_turn(number, len(writers))])


def _turn(number: int, choices: int) -> int:
    """Which of so many choices is that of parameter ``number``: all about equally often, also of every n-th parameter.

    Multiples of the golden ratio, modulo 1, spread evenly, as do those of its multiples (Knuth, The Art of Computer
    Programming 3, 6.4, theorem S).
    """
    return (number * _GOLDEN_RATIO & 0xFFFFFFFF) * choices >> 32
