# SPDX-License-Identifier: Apache-2.0
"""A source's claim about one parameter: how its tensor-parallel shards make the full tensor.

A :class:`Rule` is such a claim in the terms of the field ("split along dim 1", "two halves", "replicated"). It knows no
shapes of its own; :func:`megads_ucp.layout.layout.build_layout` checks it against the shards that ranks really hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION
from deepspeed.checkpoint.constants import AFFINE_MAP, AFFINE_MAP_VERSION

from megads_ucp.errors import LayoutError

if TYPE_CHECKING:
    from megads_ucp.layout.attention import AttentionOrder

Kind = Literal["replicated", "averaged", "split", "affine"]
Style = Literal["plain", "n_sub_params", "sub_param_shape"]

Shapes = Sequence[tuple[int, ...]]
"""Shapes of one parameter's shards, by TP rank."""

_KINDS, _STYLES = get_args(Kind), get_args(Style)


@dataclass(frozen=True)
class Rule:
    """How one parameter is cut over tensor-parallel (TP) ranks.

    Two rules are equal when they describe the same cut and the same metadata: ``source`` takes no part.

    Attributes:
        kind: ``replicated``: every rank holds the same whole tensor. ``averaged``: every rank holds a whole tensor of
            its own, and the full one is their mean. ``split``: cut along ``dim``. ``affine``: see ``affine``.
        source: name of the source, for error messages.
        dim: split: the partition dimension.
        sub_sizes: split: widths of the concatenated sub-parameters along ``dim`` in the full tensor, for example
            ``(gate, up)``. A rank's shard is its part of the first, then its part of the second, and so on. None: one
            block.
        shard_widths: split: per sub-parameter, the width each TP rank holds. None: every sub-parameter is split evenly
            (with ``sub_sizes`` None too: whatever widths the shards have).
        style: the keys by which the stock loader cuts the tensor again: ``plain`` (cat_dim), ``n_sub_params`` (cat_dim
            and param_n_sub_params: equal parts), ``sub_param_shape`` (a SubparamShape).
        sub_param_shape: SubparamShape.shape to write. None: the full shape with ``sub_sizes`` at ``dim``.
        sub_param_patterns: SubparamShape.patterns to write.
        vocabulary_size: real rows of dim 0. The rows after them are padding and are not exported.
        attention: split along dim 0: the row order of a fused query-key-value projection, where it is known.
        affine: ``ParamAffineMap.to_dict()`` form (deepspeed/checkpoint/affine.py). Compared, but not hashed.

    Raises:
        LayoutError: the claim contradicts itself.
    """

    kind: Kind
    source: str = field(compare=False)
    dim: int | None = None
    sub_sizes: tuple[int, ...] | None = None
    shard_widths: tuple[tuple[int, ...], ...] | None = None
    style: Style = "plain"
    sub_param_shape: tuple[Any, ...] | None = None
    sub_param_patterns: tuple[str, ...] = ()
    vocabulary_size: int | None = None
    attention: AttentionOrder | None = None
    affine: dict[str, Any] | None = field(default=None, hash=False, repr=False)

    def __post_init__(self) -> None:
        # Sources read these from JSON, pickles and client code, where they are lists as often as tuples.
        for name in ("sub_sizes", "shard_widths", "sub_param_shape", "sub_param_patterns"):
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        if self.shard_widths is not None and self.sub_sizes is None:
            object.__setattr__(self, "sub_sizes", tuple(sum(widths) for widths in self.shard_widths))
        if self.kind not in _KINDS:
            raise self._contradiction(f"kind must be one of {_KINDS}")
        if self.style not in _STYLES:
            raise self._contradiction(f"style must be one of {_STYLES}")
        if (self.affine is not None) != (self.kind == "affine"):
            raise self._contradiction("kind 'affine' and an affine map go together")
        if self.vocabulary_size is not None and self.vocabulary_size < 1:
            raise self._contradiction("vocabulary_size must be positive")
        if self.kind == "split":
            self._check_split()
        elif self.dim is not None or self.sub_sizes is not None or self.style != "plain":
            raise self._contradiction("dim, sub_sizes, shard_widths and style belong to kind 'split'")

    def _check_split(self) -> None:
        if self.dim is None or self.dim < 0:
            raise self._contradiction("kind 'split' needs dim, the partition dimension, counted from 0")
        sub_sizes = self.sub_sizes
        if sub_sizes is not None and (not sub_sizes or min(sub_sizes) < 0):
            raise self._contradiction("sub_sizes must be a non-empty list of widths")
        if sub_sizes is not None and self.shard_widths is not None:
            if tuple(sum(widths) for widths in self.shard_widths) != sub_sizes:
                raise self._contradiction("shard_widths must hold one row per sub-parameter, summing to its sub_sizes")
            if len({len(widths) for widths in self.shard_widths}) != 1:
                raise self._contradiction("every row of shard_widths must have one width per TP rank")
        if self.style == "plain" and sub_sizes is not None and len(sub_sizes) > 1:
            # With cat_dim alone in the file, the stock loader would cut straight through the sub-parameters.
            raise self._contradiction("several sub-parameters need style 'n_sub_params' or 'sub_param_shape'")
        if self.style == "sub_param_shape":
            if sub_sizes is None:
                raise self._contradiction("style 'sub_param_shape' needs sub_sizes")
            self._check_sub_param_shape(self.dim, sub_sizes)

    def _check_sub_param_shape(self, dim: int, sub_sizes: tuple[int, ...]) -> None:
        if self.sub_param_shape is None:
            return
        entry = self.sub_param_shape[dim] if dim < len(self.sub_param_shape) else None
        if entry != sub_sizes and not (len(sub_sizes) == 1 and entry == sub_sizes[0]):
            raise self._contradiction(f"sub_param_shape must hold the widths {sub_sizes} at dimension {dim}")

    def _contradiction(self, reason: str) -> LayoutError:
        return LayoutError(f"{self!r} contradicts itself: {reason}.")


def _tuples(value: Any) -> Any:
    """``value`` with every list or tuple in it turned into a tuple."""
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def check_affine_version(info: Mapping[str, Any]) -> None:
    """Refuse affine maps of a later format than this DeepSpeed knows, which could be misread.

    Raises:
        LayoutError: the information has such maps.
    """
    version = info.get(AFFINE_MAP, {}).get(AFFINE_MAP_VERSION, AFFINE_MAP_FORMAT_VERSION)
    if version > AFFINE_MAP_FORMAT_VERSION:
        raise LayoutError(
            f"universal_checkpoint_info holds affine maps of version {version}, but this DeepSpeed knows none after "
            f"{AFFINE_MAP_FORMAT_VERSION}. Update DeepSpeed."
        )
