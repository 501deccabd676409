# SPDX-License-Identifier: Apache-2.0
"""Builds a Layout from a Rule and the shapes of the shards that the ranks really hold."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from deepspeed.checkpoint.affine import ParamAffineMap, contiguous_split_map, replicated_map, sub_param_map

from megads_ucp.errors import LayoutError
from megads_ucp.layout.boxes import Box, Ints, clip
from megads_ucp.layout.coverage import check_coverage
from megads_ucp.layout.layout import Layout
from megads_ucp.layout.rule import Rule


def build_layout(name: str, rule: Rule, shard_shapes: Sequence[Sequence[int]]) -> Layout:
    """Build the Layout of one parameter.

    Args:
        name: the parameter.
        rule: how a source says it is cut.
        shard_shapes: shapes of the shards that the TP ranks hold, in rank order.

    Raises:
        LayoutError: rule and shards contradict each other; the message shows both.
    """
    shards = tuple(tuple(int(size) for size in shape) for shape in shard_shapes)
    if not shards:
        raise LayoutError(f"{name}: no shard shapes were given, so its layout cannot be known.")
    if rule.kind == "affine":
        affine = _described_map(name, rule, shards)
    elif rule.kind == "split":
        affine = _split_map(name, rule, shards)
    else:
        if any(shape != shards[0] for shape in shards):
            raise _mismatch(name, rule, "every TP rank holds the whole tensor", shards)
        affine = replicated_map(shards[0], len(shards))
    if rule.vocabulary_size is not None:
        affine = _cut_vocabulary(name, rule, affine, shards)
    layout = Layout(name, rule, len(shards), affine.logical_shape, shards, affine)
    if rule.kind == "affine":
        # The other maps were built here from checked widths; this one came from outside.
        check_coverage(layout)
    return layout


def _split_map(name: str, rule: Rule, shards: tuple[Ints, ...]) -> ParamAffineMap:
    dim = rule.dim
    assert dim is not None  # Rule.__post_init__
    if any(dim >= len(shape) for shape in shards):
        raise _mismatch(name, rule, f"it is split along dimension {dim}", shards)
    if len({(shape[:dim], shape[dim + 1 :]) for shape in shards}) > 1:
        raise _mismatch(name, rule, f"it is split along dimension {dim}, so all others must agree", shards)
    held = tuple(shape[dim] for shape in shards)
    full = (*shards[0][:dim], sum(held), *shards[0][dim + 1 :])
    if rule.style == "n_sub_params":
        sub_sizes, widths = _equal_parts(name, rule, held, shards)
    elif rule.sub_sizes is None:
        return contiguous_split_map(full, held, dim)
    else:
        sub_sizes, widths = rule.sub_sizes, rule.shard_widths or _even_widths(name, rule, shards)
    if sum(sub_sizes) != sum(held) or tuple(map(sum, zip(*widths, strict=True))) != held:
        claim = f"dimension {dim} is made of sub-parameters {sub_sizes}, held by the TP ranks in widths {widths}"
        raise _mismatch(name, rule, claim, shards)
    return sub_param_map(full, sub_sizes, widths, dim)


def _even_widths(name: str, rule: Rule, shards: tuple[Ints, ...]) -> tuple[Ints, ...]:
    assert rule.sub_sizes is not None
    degree = len(shards)
    if any(size % degree for size in rule.sub_sizes):
        claim = f"sub-parameters {rule.sub_sizes}, given without shard widths, divide evenly by {degree} TP ranks"
        raise _mismatch(name, rule, claim, shards)
    return tuple((size // degree,) * degree for size in rule.sub_sizes)


def _equal_parts(name: str, rule: Rule, held: Ints, shards: tuple[Ints, ...]) -> tuple[Ints, tuple[Ints, ...]]:
    """Sizes and shard widths of equal sub-parameters, equally cut on every rank: all param_n_sub_params can express."""
    count = len(rule.sub_sizes) if rule.sub_sizes else 2
    sub_sizes = (sum(held) // count,) * count
    widths = (tuple(size // count for size in held),) * count
    if (
        any(size % count for size in held)
        or (rule.sub_sizes or sub_sizes) != sub_sizes
        or (rule.shard_widths or widths) != widths
    ):
        claim = f"each shard is {count} equal parts (sub_sizes {rule.sub_sizes}, shard_widths {rule.shard_widths})"
        raise _mismatch(name, rule, claim, shards)
    return sub_sizes, widths


def _described_map(name: str, rule: Rule, shards: tuple[Ints, ...]) -> ParamAffineMap:
    try:
        affine = ParamAffineMap.from_dict(rule.affine)
    except (KeyError, TypeError, ValueError) as error:
        raise LayoutError(f"{name}: {rule.source} gives an affine map that cannot be read: {error!r}.") from error
    described = affine.shard_shapes
    # An empty shard may have any shape: torch.empty(0) as well as (0, hidden).
    if sorted(described) != list(range(len(shards))) or not all(
        described[rank] == held or prod(described[rank]) == prod(held) == 0 for rank, held in enumerate(shards)
    ):
        raise _mismatch(name, rule, f"the shard shapes by TP rank are {described}", shards)
    for piece in (piece for pieces in affine.pieces_by_rank.values() for piece in pieces if piece.numel):
        # torch.as_strided takes no negative strides, and a copy's target may not have a stride of zero.
        moving = [axis for axis, size in enumerate(piece.shape) if size > 1]
        if any(min(piece.source_strides[axis], piece.dest_strides[axis]) < 1 for axis in moving):
            raise LayoutError(f"{name}: {rule.source} gives an affine map with a stride below 1: {piece!r}.")
    return affine


def _cut_vocabulary(name: str, rule: Rule, affine: ParamAffineMap, shards: tuple[Ints, ...]) -> ParamAffineMap:
    """The map without the full tensor's padding rows; dim 0 is outermost, so these are a range of flat offsets."""
    rows = rule.vocabulary_size
    padded = affine.logical_shape
    assert rows is not None
    if not padded or padded[0] < rows:
        raise _mismatch(name, rule, f"its vocabulary has {rows} rows and the full tensor has shape {padded}", shards)
    shape = (rows, *padded[1:])
    boxes = {rank: map(Box.from_piece, pieces) for rank, pieces in affine.pieces_by_rank.items()}
    pieces = {
        rank: [part.to_piece() for box in held if box.numel for part in clip(box, 0, prod(shape))]
        for rank, held in boxes.items()
    }
    return ParamAffineMap(shape, affine.shard_shapes, pieces)


def _mismatch(name: str, rule: Rule, claim: str, shards: tuple[Ints, ...]) -> LayoutError:
    return LayoutError(
        f"{name}: {rule.source} says that {claim}, but the TP ranks hold shards of shapes {list(shards)}. "
        "Correct that source, or describe the parameter with another one."
    )
