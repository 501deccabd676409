# SPDX-License-Identifier: Apache-2.0
"""The two orders in which a fused query-key-value projection keeps its rows, and the way from one to the other.

    blocks        all queries, then all keys, then all values: [q1 q2 | k1 k2 | v1 v2]. A rank holds its part of each.
    interleaved   one group after the other, its queries, its key, its value: [q1 k1 v1 | q2 k2 v2]

Both hold the same rows, so a checkpoint written in one order can be read into a model that wants the other. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, get_args

from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap

from megads_ucp.errors import LayoutError

QKV_ORDER = "qkv_order"
"""Key, beside "param" in a .pt file and in the manifest's layouts, of :meth:`AttentionOrder.to_dict`."""


Order = Literal["blocks", "interleaved"]


@dataclass(frozen=True)
class AttentionOrder:
    """How the rows (dim 0) of a whole fused projection are ordered.

    Attributes:
        order: see the module.
        groups: key-value heads, each with queries of its own.
        queries: query heads of each group.
        head_dim: rows of a head.

    Raises LayoutError for an order that it does not know.
    """

    order: Order
    groups: int
    queries: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise LayoutError(f"{QKV_ORDER} {self.order!r} is none of {get_args(Order)}: update megads_ucp.")

    @property
    def rows(self) -> int:
        return self.groups * (self.queries + 2) * self.head_dim

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads of a group's queries, key and value."""
        return self.queries, 1, 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any] | None) -> AttentionOrder | None:
        """What :meth:`to_dict` made; None of None, where nothing was recorded."""
        if told is None:
            return None
        return cls(told["order"], int(told["groups"]), int(told["queries"]), int(told["head_dim"]))

    def start(self, part: int, groups: int) -> int:
        """Row at which the first of ``groups`` groups has its queries (``part`` 0), key (1) or value (2)."""
        before = sum(self.heads[:part]) * self.head_dim
        return before if self.order == "interleaved" else before * groups

    def stride(self, part: int) -> int:
        """Rows from there to the next group's."""
        heads = self.queries + 2 if self.order == "interleaved" else self.heads[part]
        return heads * self.head_dim


def reordering_map(
    mine: AttentionOrder, theirs: AttentionOrder, shape: tuple[int, ...], tp_degree: int
) -> ParamAffineMap:
    """Where the elements of shards in ``mine`` lie in a full tensor of this shape in the order ``theirs``.

    Every tensor-parallel rank holds whole groups, the same number.

    Raises LayoutError where the two are not of the same heads, or the groups do not divide over the ranks.
    """
    if (mine.groups, mine.queries, mine.head_dim) != (theirs.groups, theirs.queries, theirs.head_dim):
        raise LayoutError(f"a projection of {theirs} cannot become one of {mine}: they have different heads.")
    if shape[:1] != (mine.rows,) or mine.groups % tp_degree:
        raise LayoutError(f"a projection of {mine} does not have shape {shape}, or its groups do not divide by TP.")
    held, row = mine.groups // tp_degree, prod(shape[1:])
    pieces = {rank: [_piece(mine, theirs, rank, held, part, row) for part in range(3)] for rank in range(tp_degree)}
    shard = (mine.rows // tp_degree, *shape[1:])
    return ParamAffineMap(shape, dict.fromkeys(range(tp_degree), shard), pieces)


def _piece(mine: AttentionOrder, theirs: AttentionOrder, rank: int, held: int, part: int, row: int) -> AffinePiece:
    """A rank's queries, keys or values: one run of rows for each of the ``held`` groups."""
    return AffinePiece(
        (held, mine.heads[part] * mine.head_dim * row),
        (theirs.start(part, theirs.groups) + rank * held * theirs.stride(part)) * row,
        (theirs.stride(part) * row, 1),
        mine.start(part, held) * row,
        (mine.stride(part) * row, 1),
        (rank,),
        1.0,
    )
