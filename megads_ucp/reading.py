# SPDX-License-Identifier: Apache-2.0
"""A universal checkpoint as a resume sees it, and the reading of one fragment from one file."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO, VOCAB_TENSOR

from megads_ucp import storage
from megads_ucp.errors import LayoutError, StorageError
from megads_ucp.grouping import SavedGroup, saved_groups
from megads_ucp.layout.attention import QKV_ORDER, AttentionOrder, reordering_map
from megads_ucp.layout.core import Box, Layout, build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.live import MASTER, STEP
from megads_ucp.plan import cut_box

SPAN_BYTES = 4 << 20
"""Bytes read at a time: enough to keep a disk busy, few enough to be still in the cache when columns are picked."""


def exact_file(stage: int) -> str:
    """Name of the file, ours alone, of a stage's buffers and frozen values that fp32 cannot hold, by name."""
    return f"exact_values_{stage:02d}.pt"


@dataclass(frozen=True)
class File:
    """A parameter's file, checked but for its tensor.

    Attributes:
        tensor: its header.
        record: what the manifest knows about it, None without a manifest.
        vocabulary: whether a vocabulary's padding was cut off, so that the target may be padded to another size.
        attention: the order of queries, keys and values in it, where that was recorded.
    """

    tensor: storage.TensorFile
    record: storage.FileRecord | None
    vocabulary: bool
    attention: AttentionOrder | None = None

    def read(self, start: int, out: torch.Tensor, verify: bool) -> torch.Tensor:
        """Elements from ``start`` on into ``out``, 1-D and of the file's dtype; returns it.

        Raises:
            StorageError: the file is shorter than it was, or (``verify``) differs from its record.
        """
        if verify and self.record is not None:
            itemsize = out.itemsize
            storage.verify_range(self.tensor.path, self.record, start * itemsize, (start + out.numel()) * itemsize)
        return self.tensor.read(start, out.numel(), out)


class Checkpoint:
    """A universal checkpoint directory, written by us or by the stock converter (then without a manifest).

    Raises:
        StorageError: on construction, if the directory is not one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._zero = directory / "zero"
        if not self._zero.is_dir():
            universal = directory.with_name(f"{directory.name}_universal")
            hint = f" The one exported beside it is {universal.name}." if universal.is_dir() else ""
            raise StorageError(f"{directory} has no directory zero: it is not a universal checkpoint.{hint}")
        self.manifest = storage.read_manifest(directory) if (directory / storage.MANIFEST).exists() else None

    @cached_property
    def _entries(self) -> dict[str, dict[str, Any]]:
        """The manifest's entries of files, by path; a rank makes records of the few that it reads."""
        return {entry["path"]: entry for entry in self.manifest["files"]} if self.manifest is not None else {}

    @cached_property
    def _recorded_states(self) -> dict[str, list[str]]:
        """The manifest's names of states, by folder."""
        found: dict[str, list[str]] = {}
        for path in sorted(self._entries):
            folder, _, name = path.rpartition("/")
            found.setdefault(folder, []).append(name.removesuffix(".pt"))
        return found

    def has(self, parameter: str) -> bool:
        """By the manifest, where there is one: a directory that was deleted is damage, not a parameter never saved."""
        if self.manifest is None:
            return (self._zero / parameter).is_dir()
        return f"zero/{parameter}/{MASTER}.pt" in self._entries

    def states(self, parameter: str) -> list[str]:
        """Names of the states the checkpoint has for a parameter, ``step`` included.

        By the manifest, where there is one: a file that was deleted is missing, not a state the optimizer never had.
        """
        if self.manifest is None:
            return storage.state_names(self._zero / parameter)
        return self._recorded_states.get(f"zero/{parameter}", [])

    def file(self, parameter: str, state: str) -> File:
        """The file of one state, checked as far as that goes without reading its tensor.

        Raises:
            StorageError: missing, truncated, or not the file that the manifest describes.
        """
        name = f"zero/{parameter}/{state}.pt"
        if self.manifest is None:
            tensor = storage.open_tensor(self.directory / name)
            order = AttentionOrder.from_dict(tensor.metadata.get(QKV_ORDER))
            return File(tensor, None, bool(tensor.metadata.get(VOCAB_TENSOR)), order)
        record = self._record(name)
        layout = self.manifest["parameters"][parameter]["layout"]
        tensor = storage.open_recorded(self.directory / name, record)
        order = AttentionOrder.from_dict(layout.get(QKV_ORDER))
        return File(tensor, record, layout["vocabulary_size"] is not None, order)

    def has_whole(self, parameter: str, shape: tuple[int, ...]) -> bool:
        """Whether the manifest lists the parameter in this shape, with no vocabulary cut to its real rows."""
        known = self._described(parameter)
        return known is not None and tuple(known["shape"]) == shape and known["layout"]["vocabulary_size"] is None

    def tells_order(self, parameter: str) -> bool:
        """Whether the manifest says how a fused query-key-value projection orders its rows."""
        known = self._described(parameter)
        return known is not None and known["layout"].get(QKV_ORDER) is not None

    def _described(self, parameter: str) -> Mapping[str, Any] | None:
        """What the manifest says of a parameter, None if it or the manifest is not there."""
        known: Mapping[str, Any] | None = self.manifest["parameters"].get(parameter) if self.manifest else None
        return known

    def dtype(self, parameter: str, state: str) -> torch.dtype:
        """By the manifest, without a look at the file."""
        return self._record(f"zero/{parameter}/{state}.pt").tensor_dtype

    def step(self, parameter: str) -> Any:
        """The step of a parameter, None if the optimizer that saved kept none."""
        if STEP not in self.states(parameter):
            return None
        self._check_object(f"zero/{parameter}/{STEP}.pt")
        return storage.read_object(self._zero / parameter / f"{STEP}.pt")

    def common_state(self) -> dict[str, Any]:
        """Content of zero/optimizer_state.pt."""
        self._check_object("zero/optimizer_state.pt")
        state: dict[str, Any] = storage.read_object(self._zero / "optimizer_state.pt")
        return state

    def exact_values(self) -> dict[str, torch.Tensor]:
        """What fp32 could not hold of buffers and frozen parameters, of all stages, by name.

        Raises:
            StorageError: a file of them is missing, damaged or of another export.
        """
        values: dict[str, torch.Tensor] = {}
        for name in sorted(fnmatch.filter(self._entries, "exact_values_*.pt"), reverse=True):  # as in zero/, the first
            self._check_object(name)
            values.update(storage.read_object(self.directory / name))
        return values

    def check_model_states(self, rank: int, world: int) -> None:
        """Check this rank's part of the mp_rank files, which DeepSpeed reads itself, by their number and place.

        Raises:
            StorageError: one is missing, damaged or of another export.
        """
        names = sorted(path for path in self._entries if path.startswith("mp_rank_"))
        for name in names[rank::world]:
            self._check_object(name)

    def info(self) -> Mapping[str, Any] | None:
        """The ``universal_checkpoint_info`` of the run that saved it."""
        for path in sorted(self.directory.glob("mp_rank_*_model_states.pt")):
            # Client state may hold any object, so this file is trusted as far as DeepSpeed's own load of it trusts it.
            state: dict[str, Any] = storage.read_object(path, weights_only=False)
            return state.get(UNIVERSAL_CHECKPOINT_INFO)
        raise StorageError(f"{self.directory} has no mp_rank_*_model_states.pt: it is not a universal checkpoint.")

    def groups(self) -> tuple[SavedGroup, ...]:
        """The parameter groups of every stage; none without a manifest."""
        return saved_groups(self.manifest["groups"]) if self.manifest is not None else ()

    def _record(self, path: str) -> storage.FileRecord:
        if path not in self._entries:
            raise StorageError(f"{self.directory / path} is not in the manifest of {self.directory}.")
        return storage.FileRecord.from_json(self._entries[path])

    def _check_object(self, path: str) -> None:
        """Compare a small pickled file, as a whole, with the manifest if there is one."""
        if self.manifest is not None:
            storage.verify_file(self.directory / path, self._record(path))


@dataclass(frozen=True)
class Read:
    """Part of one file on its way into a 1-D live tensor.

    Attributes:
        file: where it comes from.
        boxes: what of the full tensor is wanted, in shard coordinates that start at ``shard_start``.
        target_start, numel: the elements of the live tensor that it fills; those in no box become zero.
        target: returns the live tensor.
    """

    file: File
    boxes: tuple[Box, ...]
    shard_start: int
    target_start: int
    numel: int
    target: Callable[[], torch.Tensor]

    def run(self, verify: bool) -> None:
        """Read it, at most ``SPAN_BYTES`` at a time.

        Raises:
            StorageError: as :meth:`File.read`.
        """
        live, dtype = self.clear(), self.file.tensor.dtype
        for box in self.boxes:
            for part in cut_box(box, max(SPAN_BYTES // dtype.itemsize, 1), spans=True):
                first, last = part.full_span
                view = part.shard_view(live, self.shard_start)
                dense = part.numel == last - first and view.is_contiguous() and part.scale == 1.0
                if dense and live.device.type == "cpu" and live.dtype == dtype:
                    self.file.read(first, view.view(-1), verify)
                    continue
                values = self.file.read(first, torch.empty(last - first, dtype=dtype), verify)
                _lay(view, part, part.full_view(values, first))

    def clear(self) -> torch.Tensor:
        """The part of the live tensor to be filled, with zeros where no box will fill it."""
        live = self.target().detach().narrow(0, self.target_start, self.numel)
        if sum(box.numel for box in self.boxes) < self.numel:
            live.zero_()
        return live

    def lay(self, box: Box, values: torch.Tensor) -> None:
        """Put the values of one box, or of a part of one, where they belong."""
        live = self.target().detach().narrow(0, self.target_start, self.numel)
        _lay(box.shard_view(live, self.shard_start), box, values)


def _lay(view: torch.Tensor, box: Box, values: torch.Tensor) -> None:
    view.copy_(values)
    if box.scale != 1.0:
        view.mul_(box.scale)


def exact_shards(
    checkpoint: Checkpoint, layouts: Mapping[str, Layout], unowned: Mapping[str, torch.Tensor], tp_rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of what fp32 could not hold, a tensor-parallel rank's shards, flat, by name.

    Args:
        layouts: of the target, by name.
        unowned: live tensors; others are left out.

    Raises:
        StorageError: as :meth:`Checkpoint.exact_values`.
    """
    for name, whole in checkpoint.exact_values().items():
        if name in unowned and layouts[name].shape == whole.shape:
            shard = torch.empty(unowned[name].numel(), dtype=whole.dtype)
            for box in layouts[name].runs(tp_rank, 0, shard.numel()):
                box.shard_view(shard, 0).copy_(box.full_view(whole.reshape(-1), 0))
            yield name, shard


def fitting_layout(layout: Layout, file: File) -> Layout:
    """The layout, with the vocabulary cut where the file has it; the target may be padded to another size.

    Queries, keys and values are taken from where the code that saved them had them.
    Of a vocabulary that is frozen the stock converter keeps the padding, which fits a target that is padded alike.

    Raises:
        LayoutError: the file's shape is not what the target model's shards make.
    """
    shape = file.tensor.shape
    rows = sum(shard[0] for shard in layout.shard_shapes if shard)
    fits = shape[:1] <= (rows,) if file.vocabulary else shape[:1] == (rows,)
    if fits and layout.shape[1:] == shape[1:] and layout.rule.kind == "split":
        rule = replace(layout.rule, vocabulary_size=shape[0] if file.vocabulary else None)
        layout = build_layout(layout.name, rule, layout.shard_shapes)
    layout = _in_order_of(layout, file)
    if layout.shape != shape:
        raise LayoutError(
            f"{file.tensor.path} has shape {shape}, but in this model the shards {list(layout.shard_shapes)} of "
            f"{layout.name} make shape {layout.shape} (source: {layout.rule.source}). Load it into the same model."
        )
    return layout


def _in_order_of(layout: Layout, file: File) -> Layout:
    """The layout of a query-key-value projection whose rows lie in the file in another order than in this model."""
    mine, theirs = layout.rule.attention, file.attention
    if mine is None or theirs is None or theirs == mine:
        return layout
    try:
        affine = reordering_map(mine, theirs, file.tensor.shape, layout.tp_degree)
    except LayoutError as error:
        raise LayoutError(f"{file.tensor.path}: {error} Load it into the same model.") from error
    rule = Rule("affine", f"{layout.rule.source}, from the order of {file.tensor.path}", affine=affine.to_dict())
    return build_layout(layout.name, rule, layout.shard_shapes)


def may_be_shard(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` can be a part, and no more than a part, of one of shape ``full``."""
    return len(shape) == len(full) and shape != full and all(map(int.__le__, shape, full))
