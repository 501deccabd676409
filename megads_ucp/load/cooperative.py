# SPDX-License-Identifier: Apache-2.0
"""Reading together: what several ranks need interleaved parts of is read once, by one of them, and travels to the rest.

Alone, a rank that holds some columns of a matrix reads its rows whole, and so the columns of all other tensor-parallel
ranks with them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.load.reads import SPAN_BYTES
from megads_ucp.plan.load import ReadPlan, make_read_plan, reads_more_than_it_holds
from megads_ucp.plan.types import StateSpec, Subject
from megads_ucp.storage.format import MASTER, STEP
from megads_ucp.survey import Survey


def on_several_hosts(survey: Survey, hosts: Sequence[int]) -> bool:
    """Whether ranks that read the same rows of the same matrices are on several hosts.

    Args:
        survey: of the target.
        hosts: a number for the host of each rank.
    """
    peers: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for description in survey.descriptions:
        for index, group in enumerate(description.groups):
            for shard_rank, rank in enumerate(group.ranks):
                peers[description.coordinates.stage, index, shard_rank].add(hosts[rank])
    return any(len(on_hosts) > 1 for on_hosts in peers.values())


def plan_together(survey: Survey, checkpoint: Checkpoint, optimizer_states: bool, rank: int) -> ReadPlan | None:
    """What this rank reads for whom, None if no file is worth it. Pure.

    Args:
        survey: of the target.
        checkpoint: with a manifest, which every rank knows alike; without one, nothing is read together.
        optimizer_states: whether more than the master weights is wanted.
        rank: this one.
    """
    subjects = list(_subjects(survey, checkpoint, optimizer_states)) if checkpoint.manifest is not None else []
    return make_read_plan(subjects, rank, SPAN_BYTES) if subjects else None


def _subjects(survey: Survey, checkpoint: Checkpoint, optimizer_states: bool) -> Iterator[Subject]:
    """The target's parameters that are worth it, each with the states that the checkpoint has of it.

    Left out are those of several pipeline stages, since a survey lists the first stage's holders only; vocabularies,
    which files may hold cut to other sizes; and projections of an attention, which files may hold in another order.
    """
    stages = Counter(name for layouts in survey.layouts for name in layouts)
    for subject in survey.subjects():
        name, layout = subject.name, subject.layout
        same_everywhere = layout.rule.vocabulary_size is None and layout.rule.attention is None
        if not (subject.owned and stages[name] == 1 and same_everywhere):
            continue
        if reads_more_than_it_holds(subject) and checkpoint.has_whole(name, layout.shape):
            states = [state for state in checkpoint.states(name) if state != STEP]
            wanted = states if optimizer_states else [MASTER]
            yield replace(subject, states=tuple(StateSpec(s, *[checkpoint.dtype(name, s)] * 2) for s in wanted))
