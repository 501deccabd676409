# SPDX-License-Identifier: Apache-2.0
"""Rules from DeepSpeed's ``SubparamShape``, a view of a parameter that is made of several sub-parameters.

The view need not have the parameter's own dimensions, it may have a placeholder (-1), and before version 0.4 of the
information its partition dimension may hold the number of equal sub-parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from deepspeed.checkpoint.constants import SUB_PARAM_SHARD_WIDTHS
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from megads_ucp.errors import LayoutError
from megads_ucp.layout.rule import Rule, Shapes


def sub_param_rule(
    source: str, spec: SubparamShape, widths: Sequence[Sequence[int]] | None, version: float, shapes: Shapes
) -> Rule:
    """The Rule that one SubparamShape gives for a parameter.

    Args:
        source: name of the source, for messages.
        spec: the SubparamShape.
        widths: its entry in sub_param_shard_widths, if any: per sub-parameter, the width of each TP rank.
        version: universal_checkpoint_version of the information.
        shapes: shapes of the parameter's shards, by TP rank.

    Raises:
        LayoutError: the description does not fit the shards, or lacks the widths that its version demands.
    """
    view_dim = spec.partition_dim
    sizes = _sub_sizes(spec, shapes, version, source)
    held = _shard_widths(sizes, widths, len(shapes), version, source)
    given = [sum(size) if isinstance(size, list | tuple) else size for size in spec.shape]
    given[view_dim] = sum(sizes)
    view = _without_placeholder(given, sum(prod(shape) for shape in shapes), source)
    dim, scale = _dim_of_view(view, view_dim, held, shapes, source)
    as_given = (*spec.shape[:view_dim], sizes, *spec.shape[view_dim + 1 :])
    same_dims = dim == view_dim and scale == 1 and len(view) == len(shapes[0])
    return Rule(
        "split",
        source,
        dim=dim,
        sub_sizes=tuple(size * scale for size in sizes),
        shard_widths=tuple(tuple(width * scale for width in row) for row in held),
        style="sub_param_shape",
        sub_param_shape=as_given if same_dims else None,
        sub_param_patterns=tuple(spec.patterns),
    )


def _sub_sizes(spec: SubparamShape, shapes: Shapes, version: float, source: str) -> tuple[int, ...]:
    """Widths of the sub-parameters along the view's partition dim."""
    given = spec.shape[spec.partition_dim]
    if isinstance(given, list | tuple):
        return tuple(given)
    if version >= 0.4:
        raise LayoutError(f"{source} gives {given} at its partition dim, where version {version} has one width each")
    # Before version 0.4 a scalar was the number of equal sub-parameters, as in (3, -1) for a fused QKV.
    if any(len(shape) <= spec.partition_dim for shape in shapes):
        raise LayoutError(f"{source} names partition dim {spec.partition_dim}, but the shards are {list(shapes)}")
    full = sum(shape[spec.partition_dim] for shape in shapes)
    if given < 1 or full % given:
        raise LayoutError(f"{source} says {given} sub-parameters, which do not divide its width {full}")
    return (full // given,) * given


def _shard_widths(
    sizes: tuple[int, ...], widths: Sequence[Sequence[int]] | None, tp_degree: int, version: float, source: str
) -> tuple[tuple[int, ...], ...]:
    """Per sub-parameter, the width that each TP rank holds."""
    if version < 0.4:
        # No widths were recorded then, so only an even split is certain. Anything else would shift every later row.
        uneven = [size for size in sizes if size % tp_degree]
        if uneven:
            raise LayoutError(
                f"{source} records no shard widths (version {version}), and sub-parameters of {uneven} do not divide "
                f"over {tp_degree} TP ranks; give {SUB_PARAM_SHARD_WIDTHS} and version 0.4"
            )
        return tuple((size // tp_degree,) * tp_degree for size in sizes)
    if widths is None:
        raise LayoutError(f"{source} needs its {SUB_PARAM_SHARD_WIDTHS} (version {version})")
    held = tuple(tuple(row) for row in widths)
    if tuple(map(sum, held)) != sizes or any(len(row) != tp_degree for row in held):
        raise LayoutError(f"{source} has sub-parameters {sizes}, but shard widths {held} at TP degree {tp_degree}")
    return held


def _without_placeholder(view: Sequence[int], numel: int, source: str) -> tuple[int, ...]:
    """The view's shape with its one -1, if any, resolved."""
    known = prod(size for size in view if size >= 0)
    placeholders = sum(size < 0 for size in view)
    if placeholders > 1 or not known or numel % known or (not placeholders and numel != known):
        raise LayoutError(f"{source} gives the shape {list(view)}, which {numel} elements do not fill")
    return tuple(numel // known if size < 0 else size for size in view)


def _dim_of_view(
    view: tuple[int, ...], view_dim: int, held: Sequence[Sequence[int]], shapes: Shapes, source: str
) -> tuple[int, int]:
    """The parameter's dimension that contains the view's partition dim, and how many of its rows one view row has.

    A view (heads, head_dim, hidden), partition dim 0, is dim 0 of a (heads * head_dim, hidden) weight, scale head_dim.
    """
    # Dimensions of size 1 all fit; of these, the one that the view names.
    for dim in sorted(range(len(shapes[0])), key=lambda dim: dim != view_dim):
        outer, inner = prod(shapes[0][:dim]), prod(shapes[0][dim + 1 :])
        scale, remainder = divmod(prod(view[view_dim + 1 :]), inner or 1)
        widths = [sum(row[rank] for row in held) * scale for rank in range(len(shapes))]
        if not remainder and outer == prod(view[:view_dim]) and widths == [shape[dim] for shape in shapes]:
            return dim, scale
    raise LayoutError(f"{source} gives the shape {view}, split as {list(held)}, but the shards are {list(shapes)}")
