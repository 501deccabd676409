# SPDX-License-Identifier: Apache-2.0
"""Layouts for property tests, with a slow reference: torch cuts of a tensor in which every element is its own index."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from deepspeed.checkpoint.affine import (
    AffinePiece,
    ParamAffineMap,
    block_gather_map,
    replicated_map,
    segmented_map,
)
from hypothesis import strategies as st

from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.rule import Kind, Rule, Style

PADDING = -1


@dataclass(frozen=True)
class Case:
    """A layout, and for every element of every shard (flattened) its index in the exported full tensor, or PADDING."""

    layout: Layout
    indices: tuple[torch.Tensor, ...]

    @property
    def ndim(self) -> int:
        return max(len(self.layout.shape), 2)  # AutoTP's maps may see a vector as a matrix


def widths(tp_degree: int) -> st.SearchStrategy[tuple[int, ...]]:
    """What each rank holds of a dimension: uneven, and often nothing."""
    return st.lists(st.integers(0, 5), min_size=tp_degree, max_size=tp_degree).map(tuple)


@st.composite
def described(draw: st.DrawFn) -> tuple[Rule, list[tuple[int, ...]], list[torch.Tensor]]:
    """A rule, the shard shapes, and the shards of arange(full tensor), cut by torch or by DeepSpeed's maps."""
    tp_degree = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    kinds: list[Kind | Style] = ["replicated", "averaged", "plain", "n_sub_params", "sub_param_shape", "affine"]
    kind = draw(st.sampled_from(kinds))

    if kind == "replicated" or kind == "averaged":
        full = torch.arange(prod(shape)).view(shape)
        return Rule(kind, "test"), [tuple(shape)] * tp_degree, [full] * tp_degree
    if kind == "affine":
        affine = draw(affine_maps(tp_degree, shape, dim))
        full = torch.arange(affine.numel).view(affine.logical_shape)
        shards = [unscaled(affine).extract(full, rank) for rank in range(tp_degree)]
        return Rule("affine", "test", affine=affine.to_dict()), [tuple(s.shape) for s in shards], shards

    by_sub: tuple[tuple[int, ...], ...]
    if kind == "n_sub_params":
        by_sub = (draw(widths(tp_degree)),) * 2
        rule = Rule("split", "test", dim=dim, style="n_sub_params")
    elif kind == "plain":
        by_sub = (draw(widths(tp_degree)),)
        rule = Rule("split", "test", dim=dim)
    else:
        by_sub = tuple(draw(st.lists(widths(tp_degree), min_size=1, max_size=3)))
        rule = Rule("split", "test", dim=dim, shard_widths=by_sub, style="sub_param_shape")
    sizes = [sum(row) for row in by_sub]
    shape[dim] = sum(sizes)
    full = torch.arange(prod(shape)).view(shape)
    rows = [sub.split(row, dim) for sub, row in zip(full.split(sizes, dim), by_sub, strict=True)]
    shards = [torch.cat(parts, dim) for parts in zip(*rows, strict=True)]
    return rule, [tuple(shard.shape) for shard in shards], shards


@st.composite
def affine_maps(draw: st.DrawFn, tp_degree: int, shape: list[int], dim: int) -> ParamAffineMap:
    form = draw(st.sampled_from(["scaled", "segmented", "gathered", "interleaved", "transposed"]))
    if form == "scaled":
        return replicated_map(shape, tp_degree, scale=0.25)
    if form == "segmented":  # split and replicated blocks, alternating
        by_segment = draw(st.lists(widths(tp_degree), min_size=1, max_size=2))
        copied = draw(st.lists(st.integers(1, 3), min_size=len(by_segment), max_size=len(by_segment)))
        segments = [s for row, size in zip(by_segment, copied, strict=True) for s in ((sum(row), False), (size, True))]
        shape = [*shape[:dim], sum(size for size, _ in segments), *shape[dim + 1 :]]
        return segmented_map(shape, segments, dim, tp_degree, by_segment)
    if form == "gathered":  # blocks dealt out in any order
        blocks = draw(st.permutations(range(draw(st.integers(tp_degree, 8)))))
        size = draw(st.integers(1, 3))
        shape = [*shape[:dim], size * len(blocks), *shape[dim + 1 :]]
        return block_gather_map(shape, {rank: blocks[rank::tp_degree] for rank in range(tp_degree)}, size, dim)
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if form == "interleaved":  # as Megatron's QKV: (group, q k v, row) in memory, each rank holds [q; k; v]
        pieces = [
            AffinePiece((rows, columns), part * columns, (3 * columns, 1), part * rows * columns, (columns, 1), [0])
            for part in range(3)
        ]
        shard: tuple[int, ...] = (3 * rows, columns)
    else:
        pieces, shard = [AffinePiece((rows, columns), 0, (columns, 1), 0, (1, rows), [0])], (columns, rows)
    empty = dict.fromkeys(range(1, tp_degree), (0, columns))
    full = (3 * rows, columns) if form == "interleaved" else (rows, columns)
    return ParamAffineMap(full, {0: shard, **empty}, {0: pieces, **{rank: [] for rank in empty}})


def unscaled(affine: ParamAffineMap) -> ParamAffineMap:
    entry = affine.to_dict()
    for rank in entry["ranks"].values():
        for piece in rank["pieces"]:
            piece.pop("scale", None)
    return ParamAffineMap.from_dict(entry)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rule, shapes, shards = draw(described())
    padded = build_layout("w", rule, shapes).shape
    if padded[0] > 0 and draw(st.booleans()):
        rows = draw(st.integers(1, padded[0]))
        rule = Rule(**{**rule.__dict__, "vocabulary_size": rows})
        real = rows * prod(padded[1:])
        shards = [torch.where(shard < real, shard, PADDING) for shard in shards]
    return Case(build_layout("w", rule, shapes), tuple(shard.flatten() for shard in shards))
