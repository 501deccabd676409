# SPDX-License-Identifier: Apache-2.0
"""One resume, told once: survey the target, check the files against its layouts, read each fragment's boxes.

The target model's layouts say how a full parameter is cut; what the files say about it is only checked. Nothing live
changes before every rank has checked everything it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import PARAM_GROUPS, UNIVERSAL_CHECKPOINT_INFO, VOCAB_TENSOR

from megads_ucp import storage
from megads_ucp.errors import LayoutError, StorageError
from megads_ucp.layout.core import Box, Layout, build_layout
from megads_ucp.live import MASTER, STEP, LiveGroup, LiveState, fragment_of
from megads_ucp.partition import Fragment
from megads_ucp.plan import cut_box
from megads_ucp.survey import Surveyor, describe

_SPAN_BYTES = 32 << 20
"""Bytes read at a time where a fragment's rows hold other ranks' columns too."""


@dataclass(frozen=True)
class _Source:
    """One fragment's part of one file: where it is read from, and the boxes that cut it out."""

    group: LiveGroup
    fragment: Fragment
    state: str
    file: storage.TensorFile
    boxes: tuple[Box, ...]
    padded: bool
    """Whether some of the fragment is vocabulary padding, which no file holds."""


class Restorer:
    """Fills one engine's optimizer from a universal checkpoint, its own or the stock converter's."""

    def __init__(self, live: LiveState, surveyor: Surveyor) -> None:
        self.live, self._surveyor = live, surveyor

    def restore(self, checkpoint_dir: str) -> dict[str, Any]:
        """Fill master weights, optimizer states, steps and hyperparameters. Collective.

        Returns the content of zero/optimizer_state.pt, of which the caller takes what is neither per parameter nor per
        group.

        Raises:
            UniversalCheckpointError: a file is missing, damaged or does not fit the model; the same error on every rank,
                and nothing live has changed unless it says "reading".
        """
        channel = self._surveyor.channel
        zero = Path(checkpoint_dir) / "zero"
        with channel.agreed(f"checking {checkpoint_dir}"):
            common: dict[str, Any] = storage.read_object(zero / "optimizer_state.pt", weights_only=False)
            self._check_groups(common, zero)
        layouts = self._layouts(Path(checkpoint_dir))
        with channel.agreed(f"checking {checkpoint_dir}"):
            sources = [source for group in self.live.groups for source in _sources(group, layouts, zero, self._tp_rank)]
            steps = [_step(group, zero) for group in self.live.groups]
            states = [_state_names(group, zero) for group in self.live.groups]
        with channel.agreed(f"reading {checkpoint_dir} (the engine must not be used now)"):
            for group, names, step in zip(self.live.groups, states, steps, strict=True):
                _make_states(group, names, step)
            for source in sources:
                _read(source)
            self._take_hyperparameters(common)
        return common

    @property
    def _tp_rank(self) -> int:
        return self.live.coordinates.tp_rank

    def _layouts(self, directory: Path) -> Mapping[str, Layout]:
        """This stage's layouts in the target model; where its layers are silent, the checkpoint's own words count."""
        info = getattr(self.live.module, UNIVERSAL_CHECKPOINT_INFO, None)
        info = info() if callable(info) else info
        with self._surveyor.channel.agreed(f"checking {directory}"):
            if info is None and self.live.coordinates.tp_degree > 1:
                info = _info_of_checkpoint(directory)
            description = describe(self.live, info)
        survey = self._surveyor.survey(description, self.live.groups[0].shard_rank == 0)
        return survey.layouts[self.live.coordinates.stage]

    def _check_groups(self, common: Mapping[str, Any], zero: Path) -> None:
        saved = common[PARAM_GROUPS]
        if len(saved) != len(self.live.groups):
            raise StorageError(
                f"{zero / 'optimizer_state.pt'} has {len(saved)} parameter groups, this run has {len(self.live.groups)}: "
                "build the same groups as the run that saved it."
            )

    def _take_hyperparameters(self, common: Mapping[str, Any]) -> None:
        for group, saved in zip(self.live.groups, common[PARAM_GROUPS], strict=True):
            group.set_hyperparameters({key: value for key, value in saved.items() if key != "params"})


def _info_of_checkpoint(directory: Path) -> Mapping[str, Any] | None:
    """The ``universal_checkpoint_info`` that the run which saved it had."""
    for path in sorted(directory.glob("mp_rank_*_model_states.pt")):
        # The client's own state may hold any object, so this file is as trusted as DeepSpeed's own load of it.
        info: Mapping[str, Any] | None = storage.read_object(path, weights_only=False).get(UNIVERSAL_CHECKPOINT_INFO)
        return info
    raise StorageError(f"{directory} has no mp_rank_*_model_states.pt: it is not a universal checkpoint")


def _state_names(group: LiveGroup, zero: Path) -> list[str]:
    """The states that the checkpoint has for the group's parameters, the master weights left out.

    Asked of a parameter of the group even if this rank holds none of it: a rank with nothing but padding steps with the
    others.
    """
    names = storage.state_names(zero / group.flat.members[0].name)
    return [name for name in names if name not in (MASTER, STEP)]


def _step(group: LiveGroup, zero: Path) -> Any:
    """The step of the group's parameters, None if the optimizer that saved kept none."""
    path = zero / group.flat.members[0].name / f"{STEP}.pt"
    return storage.read_object(path) if path.exists() else None


def _sources(group: LiveGroup, layouts: Mapping[str, Layout], zero: Path, tp_rank: int) -> Iterator[_Source]:
    """Everything this rank reads for one group, checked against the target's layouts."""
    names = [MASTER, *_state_names(group, zero)]
    for fragment in group.partition.fragments:
        for state in names:
            file = storage.open_tensor(zero / fragment.name / f"{state}.pt")
            layout = _fitting_layout(layouts[fragment.name], file)
            boxes = layout.runs(tp_rank, fragment.param_start, fragment.numel)
            padded = sum(box.numel for box in boxes) < fragment.numel
            yield _Source(group, fragment, state, file, boxes, padded)


def _fitting_layout(layout: Layout, file: storage.TensorFile) -> Layout:
    """The layout, with the vocabulary cut where the file has it; the target may be padded to another size.

    Raises:
        LayoutError: the file's shape is not what the target model's shards make.
    """
    if file.metadata.get(VOCAB_TENSOR) and layout.shape[1:] == file.shape[1:] and layout.rule.kind == "split":
        rule = replace(layout.rule, vocabulary_size=file.shape[0])
        layout = build_layout(layout.name, rule, layout.shard_shapes)
    if layout.shape != file.shape:
        raise LayoutError(
            f"{file.path} has shape {file.shape}, but in this model the shards {list(layout.shard_shapes)} of "
            f"{layout.name} make shape {layout.shape} (source: {layout.rule.source}). Load it into the same model."
        )
    return layout


def _make_states(group: LiveGroup, names: list[str], step: Any) -> None:
    """Give the base optimizer the states it will find after its first step; padding is zero in them."""
    state, master = group.state(), group.master()
    for name in names:
        if name not in state or not isinstance(state[name], torch.Tensor) or state[name].shape != master.shape:
            state[name] = torch.zeros_like(master, requires_grad=False)
    if step is not None:
        state[STEP] = step


def _read(source: _Source) -> None:
    """Fill one fragment of one state."""
    flat = source.group.master() if source.state == MASTER else source.group.state()[source.state]
    target = fragment_of(flat, source.fragment)
    if source.padded:
        target.zero_()
    for box in source.boxes:
        for part in cut_box(box, max(_SPAN_BYTES // source.file.dtype.itemsize, 1), spans=True):
            first, last = part.full_span
            values = source.file.read(first, last - first, torch.empty(last - first, dtype=source.file.dtype))
            view = part.shard_view(target, source.fragment.param_start)
            view.copy_(part.full_view(values, first))
            if part.scale != 1.0:
                view.mul_(part.scale)
