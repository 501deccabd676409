# SPDX-License-Identifier: Apache-2.0
"""Layout: where every element of a parameter's tensor-parallel shards lies in the full tensor, and back.

A Layout is a :class:`~megads_ucp.layout.rule.Rule` confronted with the shards the ranks hold. Its geometry is
DeepSpeed's ``ParamAffineMap``: a few strided pieces per rank. What a writer or reader needs on top is
:meth:`Layout.runs`: ZeRO hands each rank an arbitrary flat range of its shard, and that range has to become a few
strided copies.

Example. A row-parallel weight of shape (4, 6), cut along dim 1 over two ranks; rank 1 holds columns 3, 4, 5::

    full tensor (flat offsets)            rank 1's shard (flat offsets)
     0  1  2 |  3  4  5                    0  1  2
     6  7  8 |  9 10 11                    3  4  5
    12 13 14 | 15 16 17                    6  7  8
    18 19 20 | 21 22 23                    9 10 11

The map says this in one piece: shape (4, 3), full offset 3 with strides (6, 1), shard offset 0 with strides (3, 1).
Say a data-parallel rank's fragment is shard elements [2, 10): it starts late in row 0 and ends early in row 3. Then
``layout.runs(1, start=2, length=8)`` is three boxes, each with ``holders=(1,)``::

    Box(shape=(),     full_offset=5,  full_strides=(),     shard_offset=2, shard_strides=())        # ragged first row
    Box(shape=(2, 3), full_offset=9,  full_strides=(6, 1), shard_offset=3, shard_strides=(3, 1))    # whole rows
    Box(shape=(),     full_offset=21, full_strides=(),     shard_offset=9, shard_strides=())        # ragged last row

An export copies ``box.shard_view(fragment, 2)`` into ``box.full_view(extent, extent_start)``; a resume copies the other
way. If the extent covers only part of the full tensor, :func:`clip` cuts each box on that side first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from deepspeed.checkpoint.affine import (
    AffinePiece,
    ParamAffineMap,
)
from deepspeed.checkpoint.constants import CAT_DIM, PARAM_N_SUB_PARAMS, SUB_PARAM_SHAPE, VOCAB_TENSOR
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from megads_ucp.errors import LayoutError
from megads_ucp.layout.attention import QKV_ORDER
from megads_ucp.layout.boxes import Box, clip_shard, joined
from megads_ucp.layout.coverage import Defect, Side, first_defect
from megads_ucp.layout.rule import Rule

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How one parameter's shards make the exported full tensor. Made by :func:`build_layout`.

    name          the parameter's name.
    rule          the claim it was made from.
    tp_degree     number of tensor-parallel ranks.
    shape         the exported full tensor, vocabulary padding already cut.
    shard_shapes  per TP rank, as the model holds it (padding included).
    affine        pieces that cover exactly ``shape``. Where a vocabulary was cut, the elements of a shard that no piece
                  covers are padding (so ``affine.rebuild``, which demands that all are covered, does not apply there).
    """

    name: str
    rule: Rule
    tp_degree: int
    shape: Shape
    shard_shapes: tuple[Shape, ...]
    affine: ParamAffineMap = field(compare=False, repr=False)  # follows from the other fields

    @cached_property
    def numel(self) -> int:
        """Elements of the exported full tensor."""
        return prod(self.shape)

    @cached_property
    def replicated(self) -> bool:
        """Whether every TP rank holds all of it: copies that should agree, and that are worth comparing."""
        if self.rule.kind == "affine":
            everyone = tuple(range(self.tp_degree))
            return all(box.holders == everyone for boxes in self._boxes for box in boxes)
        return self.rule.kind == "replicated"

    @property
    def averaged(self) -> bool:
        """Whether every TP rank holds a whole tensor of its own, of which the full one is the mean."""
        return self.rule.kind == "averaged"

    @cached_property
    def _boxes(self) -> tuple[tuple[Box, ...], ...]:
        return tuple(joined(map(box_of, self._pieces(rank))) for rank in range(self.tp_degree))

    def _pieces(self, tp_rank: int) -> list[AffinePiece]:
        return [piece for piece in self.affine.pieces_by_rank.get(tp_rank, ()) if piece.numel]

    def runs(self, tp_rank: int, start: int, length: int) -> tuple[Box, ...]:
        """Elements ``[start, start + length)`` of that rank's flattened shard as strided boxes.

        At most ``2 * ndim - 1`` boxes per piece of the map, usually one to three in all. Vocabulary padding is in none.
        Raises LayoutError for a range outside the shard.
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
        """The keys that accompany "param" in the .pt files.

        As written by the stock converter (``merge_tp_slices`` in deepspeed/checkpoint/ds_to_universal.py): the stock
        loader cuts the tensor again by them. The order of a query-key-value projection is an addition.
        """
        keys: dict[str, Any] = {}
        rule = self.rule
        if rule.kind == "split":
            if rule.style == "sub_param_shape":
                shape = rule.sub_param_shape
                if shape is None:
                    shape = tuple(rule.sub_sizes if dim == rule.dim else size for dim, size in enumerate(self.shape))
                keys[SUB_PARAM_SHAPE] = SubparamShape(list(rule.sub_param_patterns), shape, rule.dim)
            else:
                keys[CAT_DIM] = rule.dim
            if rule.style == "n_sub_params":
                keys[PARAM_N_SUB_PARAMS] = len(rule.sub_sizes) if rule.sub_sizes else 2
        if rule.vocabulary_size is not None:
            keys[VOCAB_TENSOR] = True
        if rule.attention is not None:
            keys[QKV_ORDER] = rule.attention.to_dict()  # ours: stock looks for the keys it knows
        return keys

    def check_coverage(self) -> None:
        """Check box by box that shards and full tensor account for each other exactly.

        Every element of the full tensor is held by exactly the TP ranks its piece names, and every element of a shard
        is in exactly one piece (or, after a vocabulary cut, is padding). Raises LayoutError, naming the first that is
        not.
        """
        for tp_rank, shape in enumerate(self.shard_shapes):
            sides = [Side(piece.shape, piece.dest_offset, piece.dest_strides) for piece in self._pieces(tp_rank)]
            padded = self.rule.vocabulary_size is not None
            defect = first_defect(sides, prod(shape), holes_allowed=padded)
            if defect is not None:
                raise self._not_covered(defect, shape, f"the shard of TP rank {tp_rank}")
        for sides, whose in self._tilings():
            defect = first_defect(sides, self.numel)
            if defect is not None:
                raise self._not_covered(defect, self.shape, f"the full tensor, as held by {whose}")

    def _tilings(self) -> list[tuple[list[Side], str]]:
        """Sets of pieces that must each tile the full tensor.

        Where ranks share elements one of them stands for all, and each other one that describes its copy differently
        must fill the same place.
        """
        shares: dict[frozenset[int], dict[int, set[Side]]] = {}
        for rank in range(self.tp_degree):
            for piece in self._pieces(rank):
                if rank not in piece.locations or max(piece.locations) >= self.tp_degree:
                    raise LayoutError(
                        f"{self.name}: the layout from {self.rule.source} gives TP rank {rank} of {self.tp_degree} "
                        f"a piece (shape {piece.shape}, full offset {piece.source_offset}) that it says TP ranks "
                        f"{sorted(piece.locations)} hold. Correct that source, or use another one."
                    )
                sides = shares.setdefault(piece.locations, {}).setdefault(rank, set())
                side = Side(piece.shape, piece.source_offset, piece.source_strides)
                if side in sides:
                    raise self._not_covered(Defect("overlap", side.offset), self.shape, f"TP rank {rank}")
                sides.add(side)
        first = {holders: by_rank.get(min(holders), set()) for holders, by_rank in shares.items()}
        tilings = [([side for sides in first.values() for side in sides], "all TP ranks")]
        for holders, by_rank in shares.items():
            for rank in holders:
                copy = by_rank.get(rank, set())
                if copy != first[holders]:
                    others = [side for key, sides in first.items() if key != holders for side in sides]
                    tilings.append(([*others, *copy], f"TP rank {rank} and those it shares nothing with"))
        return tilings

    def _not_covered(self, defect: Defect, shape: Shape, where: str) -> LayoutError:
        what = {
            "outside": "a piece reaches beyond it, to",
            "overlap": "two pieces hold",
            "hole": "no piece holds",
        }[defect.kind]
        index = f" (index {index_of(defect.address, shape)})" if defect.kind != "outside" else ""
        return LayoutError(
            f"{self.name}: the layout from {self.rule.source} does not fit {where} (shape {shape}): "
            f"{what} element {defect.address}{index}. Correct that source, or describe the parameter with another one."
        )


def check_unscaled(layout: Layout, state: str) -> None:
    """Raise LayoutError if a shard of that optimizer state would have to be scaled to become the full one's, or back.

    ``ParamAffineMap._reject_scaled_optimizer_state``: the moments could be, but not lr and eps, which act on them.
    """
    if any(box.scale != 1.0 for boxes in layout._boxes for box in boxes):
        raise LayoutError(
            f"parameter {layout.name} is held scaled (source: {layout.rule.source}); DeepSpeed refuses to move an "
            f"optimizer state ({state}) to another tensor-parallel degree then, since lr and eps would stay in the old "
            "scale. Hold it unscaled, or use an optimizer without such states."
        )


def index_of(address: int, shape: Shape) -> Shape:
    """The index of element number ``address`` of a row-major tensor."""
    index = []
    for size in reversed(shape):
        address, position = divmod(address, size)
        index.append(position)
    return tuple(reversed(index))


def box_of(piece: AffinePiece) -> Box:
    return Box(
        piece.shape,
        piece.source_offset,
        piece.source_strides,
        piece.dest_offset,
        piece.dest_strides,
        piece.scale,
        tuple(sorted(piece.locations)),
    )
