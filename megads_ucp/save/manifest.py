# SPDX-License-Identifier: Apache-2.0
"""What an export knows for its manifest (schema: storage/manifest.py): parameters, groups, topology, versions."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import deepspeed
import torch

from megads_ucp import __version__
from megads_ucp.engine.state import EngineState
from megads_ucp.plan.types import Subject
from megads_ucp.storage import FileRecord, GroupRecord, LayoutRecord, Manifest, ParameterRecord

_VERSIONS = {"megads_ucp": __version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__}


def group_records(state: EngineState) -> list[GroupRecord]:
    """This rank's parameter groups."""
    return [
        GroupRecord(
            stage=state.coordinates.stage,
            index=index,
            parameters=tuple(member.name for member in group.flat.members),
            hyperparameters={key: _plain(value) for key, value in group.hyperparameters().items()},
        )
        for index, group in enumerate(state.groups)
    ]


def merge_groups(groups: Iterable[GroupRecord]) -> tuple[GroupRecord, ...]:
    """The groups of each stage, from those of all its tensor-parallel ranks, by stage and index.

    A rank with an empty shard of a parameter does not know the parameter (``filter_empty_parameters`` in
    deepspeed/runtime/utils.py).
    """
    merged: dict[tuple[int, int], GroupRecord] = {}
    for group in groups:
        first = merged.setdefault((group.stage, group.index), group)
        members = tuple(dict.fromkeys([*first.parameters, *group.parameters]))
        merged[group.stage, group.index] = dataclasses.replace(first, parameters=members)
    return tuple(merged[place] for place in sorted(merged))


def manifest(
    state: EngineState,
    subjects: Sequence[Subject],
    files: Iterable[FileRecord],
    groups: tuple[GroupRecord, ...],
    absent: Iterable[str],
    run_id: str,
    world: int,
) -> Manifest:
    """The whole manifest.

    Args:
        state: of the engine, on the rank that writes the manifest.
        subjects: every parameter that is exported.
        files: records of all files.
        groups: of all stages.
        absent: names of parameters that were left out on request.
        run_id: of the export.
        world: number of ranks.
    """
    place = state.coordinates
    return Manifest(
        run_id=run_id,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={**_VERSIONS, "python": platform.python_version()},
        topology={
            "pipeline_stages": place.stages,
            "tensor_parallel": place.tp_degree,
            "shard_group": len(state.groups[0].ranks),
            "world": world,
        },
        run=state.facts(),
        parameters=_parameters(subjects),
        absent=tuple(sorted(absent)),
        groups=groups,
        files={file.path: file for file in files},
    )


def _parameters(subjects: Sequence[Subject]) -> dict[str, ParameterRecord]:
    padding = {subject.name: subject.layout.shape[0] for subject in subjects if subject.padding}
    whole = [subject for subject in subjects if not subject.padding]
    return {subject.name: _parameter(subject, padding.get(subject.name, 0)) for subject in whole}


def _parameter(subject: Subject, padding: int) -> ParameterRecord:
    """The record of a parameter, which has so many rows more if it is a vocabulary."""
    layout, rule = subject.layout, subject.layout.rule
    return ParameterRecord(
        shape=tuple(layout.shape),
        owned=subject.owned,
        states={state.name: str(state.live).removeprefix("torch.") for state in subject.states},
        layout=LayoutRecord(
            kind=rule.kind,
            dim=rule.dim,
            sub_sizes=rule.sub_sizes,
            vocabulary_size=rule.vocabulary_size,
            padded_rows=None if rule.vocabulary_size is None else rule.vocabulary_size + padding,
            qkv_order=None if rule.attention is None else rule.attention.to_dict(),
            source=rule.source,
            shards=tuple(map(tuple, layout.shard_shapes)),
        ),
    )


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; any other is represented by its repr."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
