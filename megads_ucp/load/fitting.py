# SPDX-License-Identifier: Apache-2.0
"""The layout by which a target's shards are read from a file: its own, with the file's vocabulary and order of rows."""

from __future__ import annotations

from dataclasses import replace

from megads_ucp.errors import LayoutError
from megads_ucp.layout.attention import reordering_map
from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.padding import with_padding
from megads_ucp.layout.rule import Rule
from megads_ucp.load.reads import File


def fitting_layout(layout: Layout, file: File) -> Layout:
    """The layout, with the vocabulary cut where the file has it; padding is another file, see :meth:`Read.padding`.

    Queries, keys and values are taken from where the code that saved them had them.
    Of a vocabulary that is frozen the stock converter keeps the padding, which fits a target that is padded alike.

    Raises:
        LayoutError: the file's shape is not what the target model's shards make.
    """
    shape, whole = file.tensor.shape, with_padding(layout)
    if file.vocabulary and whole.shape[1:] == shape[1:] and whole.shape[:1] >= shape[:1]:
        layout = build_layout(layout.name, replace(layout.rule, vocabulary_size=shape[0]), layout.shard_shapes)
    elif whole.shape == shape:
        layout = whole
    layout = _in_order_of(layout, file)
    if layout.shape != shape:
        raise LayoutError(
            f"{file.tensor.path} has shape {shape}, but in this model the shards {list(layout.shard_shapes)} of "
            f"{layout.name} make shape {layout.shape} (source: {layout.rule.source}). Load it into the same model."
        )
    return layout


def _in_order_of(layout: Layout, file: File) -> Layout:
    """The layout of a query-key-value projection with its rows as the file orders them."""
    target, saved = layout.rule.attention, file.attention
    if target is None or saved is None or saved == target:
        return layout
    try:
        affine = reordering_map(target, saved, file.tensor.shape, layout.tp_degree)
    except LayoutError as error:
        raise LayoutError(f"{file.tensor.path}: {error} Load it into the same model.") from error
    rule = Rule("affine", f"{layout.rule.source}, from the order of {file.tensor.path}", affine=affine.to_dict())
    return build_layout(layout.name, rule, layout.shard_shapes)


def may_be_shard(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` can be a part, and no more than a part, of one of shape ``full``."""
    return len(shape) == len(full) and shape != full and all(map(int.__le__, shape, full))
