# SPDX-License-Identifier: Apache-2.0
"""The small pickled files of an export: steps, model states, the optimizer's common state, exact values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO

from megads_ucp.engine.state import EngineState
from megads_ucp.layout.info import info_of
from megads_ucp.layout.layout import Layout
from megads_ucp.plan.types import UNOWNED, Plan
from megads_ucp.save.snapshot import Snapshot, held_whole
from megads_ucp.save.types import ExportRequest
from megads_ucp.storage.format import OPTIMIZER_STATE, STEP, exact_file, model_states_file, state_file
from megads_ucp.survey import Survey


def small_files(
    request: ExportRequest, state: EngineState, survey: Survey, plan: Plan, snapshot: Snapshot, rank: int
) -> Iterator[tuple[str, Any]]:
    """Name and content of every small file that ``rank`` writes: the steps of its parameters, and what the first of
    the data-parallel replicas writes for all."""
    for subject in plan.subjects:
        first = min(subject.holdings, key=lambda h: (h.tp_rank, h.fragment.param_start), default=None)
        if first is None or first.rank != rank or first.group == UNOWNED:
            continue
        step = state.groups[first.group].state().get(STEP)
        if step is not None:
            yield state_file(subject.name, STEP), step
    if not state.first_of_replicas:
        return
    place = state.coordinates
    yield model_states_file(place.mp_rank), _model_state(request, state, survey.layouts[place.stage])
    if place.tp_rank == 0 and (exact := _exact_values(snapshot, plan)):
        yield exact_file(place.stage), exact
    if (place.stage, place.tp_rank) == (0, 0):
        yield OPTIMIZER_STATE, state.common_optimizer_state()


def _exact_values(snapshot: Snapshot, plan: Plan) -> dict[str, torch.Tensor]:
    """What fp32 cannot hold and every tensor-parallel rank holds whole, beside its rounded copy in zero/."""
    whole = {subject.name for subject in plan.subjects if not subject.owned and held_whole(subject.layout)}
    return {name: value.cpu().clone() for name, value in snapshot.inexact.items() if name in whole}


def _model_state(request: ExportRequest, state: EngineState, layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """The mp_rank file, with a universal_checkpoint_info even if the client gave none: stock tools ask for one."""
    content = state.model_state(request.client_state, request.exclude_frozen)
    if content.get(UNIVERSAL_CHECKPOINT_INFO) is None:
        content[UNIVERSAL_CHECKPOINT_INFO] = info_of(layouts.values())
    return content
