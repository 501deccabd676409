# SPDX-License-Identifier: Apache-2.0
"""What the manifest of a universal checkpoint says beyond its files: parameters, groups, topology, versions."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import deepspeed
import torch

from megads_ucp import __version__, storage
from megads_ucp.engine.state import LiveState
from megads_ucp.layout.attention import QKV_ORDER
from megads_ucp.plan.types import Extent, Plan, Subject
from megads_ucp.save.writer import file_name, records_by_file


def group_facts(live: LiveState) -> list[dict[str, Any]]:
    """This rank's parameter groups: member names in flat order, and hyperparameters."""
    return [
        {
            "stage": live.coordinates.stage,
            "index": index,
            "parameters": [member.name for member in group.flat.members],
            "hyperparameters": {key: _plain(value) for key, value in group.hyperparameters().items()},
        }
        for index, group in enumerate(live.groups)
    ]


def merged_groups(told: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of each stage, from the facts of all its tensor-parallel ranks: one whose shard of a parameter is
    empty does not know the parameter (``filter_empty_parameters`` in deepspeed/runtime/utils.py)."""
    merged: dict[tuple[int, int], dict[str, Any]] = {}
    for group in told:
        first = merged.setdefault((group["stage"], group["index"]), group)
        first["parameters"] = list(dict.fromkeys([*first["parameters"], *group["parameters"]]))
    return [merged[place] for place in sorted(merged)]


def split_crc32(plan: Plan, records: list[storage.ExtentRecord]) -> dict[str, int]:
    """CRC-32 of the payload of every file that has several writers, from all ranks' records."""
    by_file = records_by_file(records)
    split = {file_name(plan, extent) for extent in plan.extents if extent.start}
    return {name: storage.payload_crc32(by_file[name]) for name in sorted(split)}


def file_records(
    plan: Plan, frame: Callable[[Plan, Extent], storage.Frame], records: list[storage.ExtentRecord]
) -> list[storage.FileRecord]:
    """The record of every file of the checkpoint, from all ranks' records; ``frame`` gives an extent's file's."""
    by_file = records_by_file(records)
    files = []
    for extent in plan.extents:
        if extent.start == 0:
            files.append(storage.FileRecord.of_tensor(frame(plan, extent), by_file.pop(file_name(plan, extent))))
    files.extend(storage.FileRecord.of_object(whole) for parts in by_file.values() for whole in parts)
    return sorted(files, key=lambda file: file.path)


def manifest(
    live: LiveState,
    plan: Plan,
    files: Iterable[storage.FileRecord],
    groups: list[dict[str, Any]],
    absent: Iterable[str],
    run_id: str,
) -> dict[str, Any]:
    """The whole content, JSON-able. ``absent``: parameters that were left out on request."""
    place = live.coordinates
    return {
        "run_id": run_id,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "megads_ucp": __version__,
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "topology": {
            "pipeline_stages": place.stages,
            "tensor_parallel": place.tp_degree,
            "shard_group": len(live.groups[0].ranks),
            "world": torch.distributed.get_world_size(),
        },
        "run": live.facts(),
        "parameters": {subject.name: _parameter(subject) for subject in plan.subjects},
        "absent": sorted(absent),
        "groups": groups,
        "files": [file.to_json() for file in files],
    }


def _parameter(subject: Subject) -> dict[str, Any]:
    layout = subject.layout
    return {
        "shape": list(layout.shape),
        "owned": subject.owned,
        "states": {state.name: str(state.live).removeprefix("torch.") for state in subject.states},
        "layout": {
            "kind": layout.rule.kind,
            "dim": layout.rule.dim,
            "sub_sizes": layout.rule.sub_sizes,
            "vocabulary_size": layout.rule.vocabulary_size,
            QKV_ORDER: layout.rule.attention and layout.rule.attention.to_dict(),
            "source": layout.rule.source,
            "shards": [list(shape) for shape in layout.shard_shapes],
        },
    }


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; what it cannot is told by its repr."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
