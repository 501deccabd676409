# SPDX-License-Identifier: Apache-2.0
"""Layout: where every element of a parameter's tensor-parallel shards lies in the full tensor, and back.

Its geometry is DeepSpeed's ``ParamAffineMap``: a few strided pieces per rank. What a writer or reader needs on top is
:meth:`Layout.runs`: ZeRO hands each rank an arbitrary flat range of its shard, and that range has to become a few
strided copies.

Example. A row-parallel weight of shape (4, 6), cut along dim 1 over two ranks; rank 1 holds columns 3, 4, 5::

    full tensor (flat offsets)            rank 1's shard (flat offsets)
     0  1  2 |  3  4  5                    0  1  2
     6  7  8 |  9 10 11                    3  4  5
    12 13 14 | 15 16 17                    6  7  8
    18 19 20 | 21 22 23                    9 10 11

The map has one piece: shape (4, 3), full offset 3 with strides (6, 1), shard offset 0 with strides (3, 1). Suppose a
data-parallel rank's fragment is shard elements [2, 10): it starts late in row 0 and ends early in row 3. Then
``layout.runs(1, start=2, length=8)`` is three boxes, each with ``holders=(1,)``::

    Box(shape=(),     full_offset=5,  full_strides=(),     shard_offset=2, shard_strides=())        # ragged first row
    Box(shape=(2, 3), full_offset=9,  full_strides=(6, 1), shard_offset=3, shard_strides=(3, 1))    # whole rows
    Box(shape=(),     full_offset=21, full_strides=(),     shard_offset=9, shard_strides=())        # ragged last row

An export copies ``box.shard_view(fragment, 2)`` into ``box.full_view(extent, extent_start)``; a resume copies the other
way. If the extent covers only part of the full tensor, :func:`~megads_ucp.layout.boxes.clip` cuts each box first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap, contiguous_split_map, replicated_map, sub_param_map
from deepspeed.checkpoint.constants import CAT_DIM, PARAM_N_SUB_PARAMS, SUB_PARAM_SHAPE, VOCAB_TENSOR
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from megads_ucp.errors import LayoutError
from megads_ucp.layout.attention import QKV_ORDER
from megads_ucp.layout.boxes import Box, clip, clip_shard, joined
from megads_ucp.layout.coverage import check_coverage
from megads_ucp.layout.rule import Rule
from megads_ucp.layout.strides import Ints


@dataclass(frozen=True)
class Layout:
    """How one parameter's shards make the exported full tensor; see :func:`build_layout`.

    Attributes:
        name: the parameter's name.
        rule: the claim it was built from.
        tp_degree: number of tensor-parallel (TP) ranks.
        shape: shape of the exported full tensor, without vocabulary padding.
        shard_shapes: per TP rank, the shape of its shard in the model, vocabulary padding included.
        affine: pieces that cover exactly ``shape``. Where a vocabulary was cut, elements of a shard in no piece are
            padding, so ``affine.rebuild``, which demands full coverage of the shards, does not apply.
    """

    name: str
    rule: Rule
    tp_degree: int
    shape: Ints
    shard_shapes: tuple[Ints, ...]
    affine: ParamAffineMap = field(compare=False, repr=False)  # follows from the other fields

    @cached_property
    def numel(self) -> int:
        """Elements of the exported full tensor."""
        return prod(self.shape)

    @cached_property
    def replicated(self) -> bool:
        """Whether every TP rank holds the whole tensor, in copies that should agree and are worth comparing."""
        if self.rule.kind == "affine":
            all_ranks = tuple(range(self.tp_degree))
            return all(box.holders == all_ranks for boxes in self._boxes for box in boxes)
        return self.rule.kind == "replicated"

    @property
    def averaged(self) -> bool:
        """Whether every TP rank holds a whole tensor of its own, and the full tensor is their mean."""
        return self.rule.kind == "averaged"

    @cached_property
    def _boxes(self) -> tuple[tuple[Box, ...], ...]:
        return tuple(joined(map(Box.from_piece, self.pieces(rank))) for rank in range(self.tp_degree))

    def pieces(self, tp_rank: int) -> list[AffinePiece]:
        """The non-empty pieces of a TP rank's shard."""
        return [piece for piece in self.affine.pieces_by_rank.get(tp_rank, ()) if piece.numel]

    def runs(self, tp_rank: int, start: int, length: int) -> tuple[Box, ...]:
        """Elements ``[start, start + length)`` of a TP rank's flattened shard as strided boxes.

        At most ``2 * ndim - 1`` boxes per piece of the map, usually one to three in all, none of them with vocabulary
        padding.

        Raises:
            LayoutError: the range is outside the shard.
        """
        if not 0 <= tp_rank < self.tp_degree:
            raise LayoutError(f"{self.name}: there is no TP rank {tp_rank}; the TP degree is {self.tp_degree}.")
        stop = start + length
        if not 0 <= start <= stop <= prod(self.shard_shapes[tp_rank]):
            raise LayoutError(
                f"{self.name}: elements [{start}, {stop}) are not in the shard of TP rank {tp_rank}, "
                f"whose shape is {self.shard_shapes[tp_rank]}."
            )
        return tuple(part for box in self._boxes[tp_rank] for part in clip_shard(box, start, stop))

    def metadata(self) -> dict[str, Any]:
        """The keys that accompany "param" in the .pt files, by which the stock loader cuts the tensor again.

        As ``merge_tp_slices`` (deepspeed/checkpoint/ds_to_universal.py) writes them, plus our own ``QKV_ORDER``, which
        the stock loader ignores.
        """
        keys: dict[str, Any] = {}
        rule = self.rule
        if rule.style == "sub_param_shape":
            shape = rule.sub_param_shape
            if shape is None:
                shape = tuple(rule.sub_sizes if dim == rule.dim else size for dim, size in enumerate(self.shape))
            keys[SUB_PARAM_SHAPE] = SubparamShape(list(rule.sub_param_patterns), shape, rule.dim)
        elif rule.kind == "split":
            keys[CAT_DIM] = rule.dim
        if rule.style == "n_sub_params":
            keys[PARAM_N_SUB_PARAMS] = len(rule.sub_sizes) if rule.sub_sizes else 2
        if rule.vocabulary_size is not None:
            keys[VOCAB_TENSOR] = True
        if rule.attention is not None:
            keys[QKV_ORDER] = rule.attention.to_dict()
        return keys

    def check_unscaled(self, state: str) -> None:
        """Check that shards of an optimizer state need no scaling on their way to the full tensor.

        As ``ParamAffineMap._reject_scaled_optimizer_state``: the moments could be scaled, but not lr and eps.

        Raises:
            LayoutError: some shard is held scaled.
        """
        if any(box.scale != 1.0 for boxes in self._boxes for box in boxes):
            raise LayoutError(
                f"parameter {self.name} is held scaled (source: {self.rule.source}); DeepSpeed refuses to move an "
                f"optimizer state ({state}) to another tensor-parallel degree then, since lr and eps would stay in the "
                "old scale. Hold it unscaled, or use an optimizer without such states."
            )


def build_layout(name: str, rule: Rule, shard_shapes: Sequence[Sequence[int]]) -> Layout:
    """Build the Layout of parameter ``name`` from a source's claim and the TP ranks' shard shapes, in rank order.

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
