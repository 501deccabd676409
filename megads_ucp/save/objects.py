# SPDX-License-Identifier: Apache-2.0
"""The small pickled files of an export: steps, model states, the optimizer's common state, exact values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.checkpoint.constants import PARAM_GROUPS, UNIVERSAL_CHECKPOINT_INFO

from megads_ucp.engine.state import NO_VALUES, EngineState
from megads_ucp.layout.info import info_of
from megads_ucp.layout.layout import Layout
from megads_ucp.plan.types import Subject
from megads_ucp.save.optimizer_values import RankValues, steps_of
from megads_ucp.save.snapshot import Snapshot, held_whole
from megads_ucp.save.types import ExportRequest
from megads_ucp.storage.format import OPTIMIZER_STATE, STEP, exact_file, model_states_file, state_file
from megads_ucp.survey import Survey


def small_files(
    request: ExportRequest,
    state: EngineState,
    survey: Survey,
    subjects: Sequence[Subject],
    snapshot: Snapshot,
    values: RankValues,
) -> Iterator[tuple[str, Any]]:
    """Name and content of every small file that this rank writes: the steps of its parameters, and what the first of
    the data-parallel replicas writes for all."""
    steps = steps_of(values)
    for subject in subjects:
        first = next((holding for shard in subject.shards[:1] for holding in shard.holdings(subject.name)), None)
        if not subject.padding and first is not None and first.rank == values.rank and first.group in steps:
            yield state_file(subject.name, STEP), steps[first.group]
    if not state.first_of_replicas:
        return
    place = state.coordinates
    yield model_states_file(place.mp_rank), _model_state(request, state, survey.layouts[place.stage])
    if place.tp_rank == 0 and (exact := _exact_values(snapshot, subjects)):
        yield exact_file(place.stage), exact
    if (place.stage, place.tp_rank) == (0, 0):
        common = state.common_optimizer_state()
        for group, portable in zip(common[PARAM_GROUPS], values.groups, strict=True):
            members = {key: group[key] for key in NO_VALUES if key in group}
            group.clear()
            group.update({**portable.hyperparameters, **members})
        yield OPTIMIZER_STATE, common


def _exact_values(snapshot: Snapshot, subjects: Sequence[Subject]) -> dict[str, torch.Tensor]:
    """What fp32 cannot hold and every tensor-parallel rank holds whole, beside its rounded copy in zero/."""
    whole = {subject.name for subject in subjects if not subject.owned and held_whole(subject.layout)}
    return {name: value.cpu().clone() for name, value in snapshot.inexact.items() if name in whole}


def _model_state(request: ExportRequest, state: EngineState, layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """The mp_rank file, with a universal_checkpoint_info even if the client gave none: stock tools ask for one."""
    content = state.model_state(request.client_state, request.exclude_frozen)
    if content.get(UNIVERSAL_CHECKPOINT_INFO) is None:
        content[UNIVERSAL_CHECKPOINT_INFO] = info_of(layouts.values())
    return content
