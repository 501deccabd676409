# SPDX-License-Identifier: Apache-2.0
"""The two row orders of a fused query-key-value projection, and the map from one to the other.

    blocks        all queries, then all keys, then all values: [q1 q2 | k1 k2 | v1 v2]. A rank holds its part of each.
    interleaved   one group after the other, with its queries, key and value: [q1 k1 v1 | q2 k2 v2]

Both hold the same rows, so a checkpoint written in one order can be read into a model that wants the other. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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
        order: see the module's docstring.
        groups: key-value heads, each with queries of its own.
        queries: query heads of each group.
        head_dim: rows of a head.

    Raises:
        LayoutError: the order is unknown.
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
    def from_dict(cls, entry: Mapping[str, Any] | None) -> AttentionOrder | None:
        """The inverse of :meth:`to_dict`; None where nothing was recorded."""
        if entry is None:
            return None
        return cls(entry["order"], int(entry["groups"]), int(entry["queries"]), int(entry["head_dim"]))

    def start(self, part: int, groups: int) -> int:
        """First row of the queries (``part`` 0), key (1) or value (2) of the first of ``groups`` groups."""
        before = sum(self.heads[:part]) * self.head_dim
        return before if self.order == "interleaved" else before * groups

    def stride(self, part: int) -> int:
        """Rows from one group's part to the next group's."""
        heads = self.queries + 2 if self.order == "interleaved" else self.heads[part]
        return heads * self.head_dim


def reordering_map(
    shard_order: AttentionOrder, full_order: AttentionOrder, shape: tuple[int, ...], tp_degree: int
) -> ParamAffineMap:
    """The map of shards with rows in ``shard_order`` to a full tensor of this shape with rows in ``full_order``.

    Every tensor-parallel rank holds the same number of whole groups.

    Raises:
        LayoutError: the two orders have different heads, or the groups do not divide over the ranks.
    """
    if replace(shard_order, order=full_order.order) != full_order:
        raise LayoutError(
            f"a projection of {full_order} cannot become one of {shard_order}: they have different heads."
        )
    if shape[:1] != (shard_order.rows,) or shard_order.groups % tp_degree:
        raise LayoutError(
            f"a projection of {shard_order} does not have shape {shape}, or its groups do not divide by TP."
        )
    groups, row = shard_order.groups // tp_degree, prod(shape[1:])

    def piece(rank: int, part: int) -> AffinePiece:
        """A rank's queries, keys or values: one run of rows for each of its groups."""
        full_stride = full_order.stride(part)
        full_start = full_order.start(part, full_order.groups) + rank * groups * full_stride
        return AffinePiece(
            (groups, shard_order.heads[part] * shard_order.head_dim * row),
            full_start * row,
            (full_stride * row, 1),
            shard_order.start(part, groups) * row,
            (shard_order.stride(part) * row, 1),
            (rank,),
            1.0,
        )

    pieces = {rank: [piece(rank, part) for part in range(3)] for rank in range(tp_degree)}
    shard = (shard_order.rows // tp_degree, *shape[1:])
    return ParamAffineMap(shape, dict.fromkeys(range(tp_degree), shard), pieces)
