# SPDX-License-Identifier: Apache-2.0
"""Rules from megatron-core's layers, which describe their own sharding (``sharded_state_dict``).

In such a description (megatron/core/dist_checkpointing/mapping.py) a ``ShardedTensor`` locates this rank's tensor in
the global one; a ``ShardedTensorFactory`` does so for the parts of a fused parameter, such as the two halves of SwiGLU.
Nothing is guessed from names: there is no better source.

A description distinguishes dimensions only where something is split. At TP 1 a row-parallel weight looks replicated,
and a checkpoint that recorded it so would be cut along the wrong dimension by a later run at TP 2. So at TP 1 the
layers describe themselves as they would at a larger degree (:func:`_as_if_split`).

megatron-core is optional, and imported only when a module can describe itself. All of this is local to one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from megads_ucp.errors import LayoutError
from megads_ucp.layout.rule import Rule
from megads_ucp.sources.attributes import partition_dim

SHARDED_STATE_DICT = "megatron-core sharded_state_dict"

_TP_GROUP_ATTRIBUTES = ("tp_group", "_tp_group")
"""Where layers keep their TP group: megatron-core's own, and its wrappers of Transformer Engine."""


@dataclass(frozen=True)
class LayerRules:
    """What a model's layers say of themselves.

    Attributes:
        rules: by parameter name.
        vocabulary: names of parameters whose dim 0 is a vocabulary that Megatron pads (``allow_shape_mismatch``).
            Only the tokenizer knows how many of the rows are real.
        warnings: modules that could not describe themselves, and why.
    """

    rules: Mapping[str, Rule]
    vocabulary: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def rules_from_sharded_state_dict(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> LayerRules:
    """Rules of all tensors (by DeepSpeed's names, several for tied ones) that some megatron-core module describes.

    A module that fails to describe itself (for example because ``parallel_state`` is not initialised) yields a warning
    and no rules.

    Raises:
        LayoutError: a description contradicts itself, or no Rule can express it.
    """
    names = _Names(tensors)
    rules: dict[str, Rule] = {}
    vocabulary: dict[str, None] = {}
    warnings: list[str] = []
    with _as_if_split(module) as as_if_split:
        described = [
            entry for prefix, root in _describing_modules(module) for entry in _entries(root, prefix, warnings)
        ]
    for entry in described:
        for name in names.of(entry):
            rule = _rule(name, tensors[name], entry.pieces, as_if_split)
            # An outer module describes everything in a plain container (ModuleList) as replicated
            # (sharded_state_dict_default in megatron/core/transformer/utils.py). A split layer in it knows better.
            if rule is not None and (name not in rules or rules[name].kind == "replicated"):
                rules[name] = rule
            if any(piece.allow_shape_mismatch for piece in entry.pieces):
                vocabulary[name] = None
    return LayerRules(rules, tuple(vocabulary), tuple(warnings))


def _describing_modules(module: nn.Module, prefix: str = "", asked: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """(name prefix, module) of each module that can describe itself and whose parent cannot, outermost first."""
    describes = callable(getattr(module, "sharded_state_dict", None))
    if describes and not asked:
        yield prefix, module
    for name, child in module.named_children():
        yield from _describing_modules(child, f"{prefix}{name}.", describes)


@dataclass(frozen=True)
class _Group:
    """What ``sharded_state_dict`` asks of a process group (get_pg_size and get_pg_rank in megatron/core/utils.py)."""

    degree: int
    number: int

    def size(self) -> int:
        return self.degree

    def rank(self) -> int:
        return self.number


@contextmanager
def _as_if_split(module: nn.Module) -> Iterator[bool]:
    """If no layer is split, have all of them describe themselves as rank 1 of 2. Yields whether they do.

    ``sharded_state_dict`` calls only ``size()`` and ``rank()`` of the group; no tensor and no collective is involved,
    and the layers get their own groups back at the end.
    """
    groups = [(m, key, vars(m)[key]) for m in module.modules() for key in _TP_GROUP_ATTRIBUTES if key in vars(m)]
    if not groups or any(group is not None and group.size() != 1 for _, _, group in groups):
        yield False
        return
    try:
        for owner, key, _ in groups:
            setattr(owner, key, _Group(2, 1))
        # megatron-core ignores groups while torch.distributed is not initialised.
        yield torch.distributed.is_initialized()
    finally:
        for owner, key, group in groups:
            setattr(owner, key, group)


@dataclass(frozen=True)
class _Entry:
    """One tensor of a sharded state dict: the local tensor, and the ShardedTensors that locate its parts."""

    key: str
    data: torch.Tensor
    pieces: tuple[Any, ...]


def _entries(root: nn.Module, prefix: str, warnings: list[str]) -> list[_Entry]:
    """How one module describes its tensors; nothing, and a warning, if it fails to."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    try:
        # The data-parallel group only decides which replica writes; a stand-in makes parallel_state unnecessary.
        described = root.sharded_state_dict(prefix=prefix, metadata={"dp_cp_group": _Group(1, 0)})  # type: ignore[operator]
    # A third party's method may fail in any way, and other sources may still suffice.
    except Exception as error:
        warnings.append(
            f"{type(root).__name__} {prefix.rstrip('.')} failed to describe its sharding, so its parameters rest on "
            f"Megatron's attributes or on name patterns. {type(error).__name__}: {error}"
        )
        return []
    entries = []
    for key, value in _leaves(described):
        if isinstance(value, ShardedTensorFactory):
            entries.append(_Entry(key, value.data, tuple(piece for _, piece in _leaves(value.build()))))
        elif isinstance(value, ShardedTensor) and value.data is not None:
            entries.append(_Entry(key, value.data, (value,)))
    return entries


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested dicts and lists, each with the innermost dict key it lies under."""
    if isinstance(tree, Mapping):
        for inner, value in tree.items():
            yield from _leaves(value, str(inner))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value, key)
    else:
        yield key, tree


class _Names:
    """Finds the names of the tensor that an entry of a sharded state dict describes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._by_id: dict[int, list[str]] = {}
        self._by_memory: dict[Any, list[str]] = {}
        for name, tensor in tensors.items():
            self._by_id.setdefault(id(tensor), []).append(name)
            if tensor.data_ptr():  # neither empty nor, as under DeepSpeed's offload_states(), elsewhere
                self._by_memory.setdefault(_memory(tensor), []).append(name)

    def of(self, entry: _Entry) -> Sequence[str]:
        """Names found by identity or memory: state-dict names of tied or wrapped parameters differ from DeepSpeed's."""
        names = self._by_id.get(id(entry.data)) or self._by_memory.get(_memory(entry.data))
        if names is None and entry.key in self._tensors:
            # A copy, as of a quantised weight: only name and shape are left to go by.
            names = [entry.key] if self._tensors[entry.key].shape == entry.data.shape else None
        return names or ()


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _rule(name: str, tensor: torch.Tensor, pieces: tuple[Any, ...], as_if_split: bool) -> Rule | None:
    cut = _cut(name, tuple(tensor.shape), pieces)
    if cut is None:
        # At TP 1 some layers (mamba_mixer.py) ignore the stand-in group, and then their attributes know more.
        return Rule("replicated", SHARDED_STATE_DICT) if partition_dim(tensor) is None else None
    degree = 1 if as_if_split else cut.degree
    sizes = tuple(width * degree for width in cut.widths)
    if len(sizes) == 1:
        return Rule("split", SHARDED_STATE_DICT, dim=cut.dim)
    if len(set(sizes)) == 1:
        return Rule("split", SHARDED_STATE_DICT, dim=cut.dim, sub_sizes=sizes, style="n_sub_params")
    return Rule(
        "split",
        SHARDED_STATE_DICT,
        dim=cut.dim,
        sub_sizes=sizes,
        style="sub_param_shape",
        sub_param_patterns=(f"^{re.escape(name)}$",),
    )


@dataclass(frozen=True)
class _Cut:
    """Pieces side by side along ``dim``, with these widths on this rank, each split over ``degree`` ranks."""

    dim: int
    widths: tuple[int, ...]
    degree: int


def _cut(name: str, shape: tuple[int, ...], pieces: tuple[Any, ...]) -> _Cut | None:
    """The cut that the pieces' global offsets describe, checked against every one of them; None: nothing is cut."""

    def refuse(reason: str) -> LayoutError:
        described = [(p.key, tuple(p.local_shape), tuple(p.global_offset), tuple(p.global_shape)) for p in pieces]
        return LayoutError(
            f"{name}: megatron-core describes its shard of shape {shape} by {described} (key, local shape, global "
            f"offset, global shape), which megads_ucp cannot express: {reason}. Please report this model."
        )

    dims = sorted({dim for piece in pieces for dim in _split_dims(piece)})
    tiled = [] if len(pieces) == 1 else _tiled_dims(shape, pieces)
    if len(pieces) > 1 and not tiled:
        raise refuse("its parts do not lie side by side along one dimension")
    if not tiled and not dims:
        return None
    dim = (tiled or dims)[0]
    if any(other != dim for other in dims):
        raise refuse("it is split along more than one dimension")
    degrees = {_degree(dim, list(part), refuse) for _, part in groupby(pieces, key=lambda piece: piece.key)}
    if len(degrees) != 1:
        raise refuse(f"its parts are split over different numbers of ranks, {sorted(degrees)}")
    return _Cut(dim, tuple(piece.local_shape[dim] for piece in pieces), degrees.pop())


def _split_dims(piece: Any) -> list[int]:
    """Dimensions in which the local tensor is smaller than the global one; prepended ones (layers) do not count."""
    global_shape = piece.global_shape[piece.prepend_axis_num :]
    return [dim for dim, size in enumerate(piece.local_shape) if global_shape[dim] != size]


def _tiled_dims(shape: tuple[int, ...], pieces: tuple[Any, ...]) -> list[int]:
    """Dimensions along which the pieces are views of consecutive parts of a tensor of this shape."""
    if any(len(piece.local_shape) != len(shape) for piece in pieces):
        return []

    def tiles(dim: int) -> bool:
        rest = (shape[:dim], shape[dim + 1 :])
        if any((tuple(p.local_shape[:dim]), tuple(p.local_shape[dim + 1 :])) != rest for p in pieces):
            return False
        if sum(piece.local_shape[dim] for piece in pieces) != shape[dim]:
            return False
        start = pieces[0].data.storage_offset()
        for piece in pieces:
            if piece.data.storage_offset() != start or piece.data.stride() != pieces[0].data.stride():
                return False
            start += piece.local_shape[dim] * piece.data.stride(dim)
        return True

    return [dim for dim in range(len(shape)) if tiles(dim)]


def _degree(dim: int, pieces: Iterable[Any], refuse: Callable[[str], LayoutError]) -> int:
    """The number of ranks over which the pieces of one global tensor, in order, are evenly split.

    In the global tensor the first sub-parameter of all ranks comes first, then the second, and so on; this rank's part
    of each lies at the same multiple of its width.
    """
    pieces = list(pieces)
    axis = dim + pieces[0].prepend_axis_num
    widths = [piece.local_shape[dim] for piece in pieces]
    full = pieces[0].global_shape[axis]
    if 0 in widths or full % sum(widths) or any(piece.global_shape[axis] != full for piece in pieces):
        raise refuse(f"widths {widths} do not divide the global width {full}")
    degree = full // sum(widths)
    rank, remainder = divmod(pieces[0].global_offset[axis], widths[0])
    expected = [degree * sum(widths[:index]) + rank * width for index, width in enumerate(widths)]
    if remainder or rank >= degree or [piece.global_offset[axis] for piece in pieces] != expected:
        raise refuse(f"rank {rank} of {degree} would lie at {expected} along dimension {dim}")
    return degree
