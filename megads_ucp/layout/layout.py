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

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.checkpoint.constants import CAT_DIM, PARAM_N_SUB_PARAMS, SUB_PARAM_SHAPE, VOCAB_TENSOR
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from megads_ucp.errors import LayoutError
from megads_ucp.layout.attention import QKV_ORDER
from megads_ucp.layout.boxes import Box, Ints, clip_shard, joined

if TYPE_CHECKING:
    from megads_ucp.layout.rule import Rule


@dataclass(frozen=True)
class Layout:
    """How one parameter's shards make the exported full tensor; see :func:`megads_ucp.layout.build.build_layout`.

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
