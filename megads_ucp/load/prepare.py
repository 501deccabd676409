# SPDX-License-Identifier: Apache-2.0
"""What comes before anything live changes: survey the target, check the files against its layouts, plan every read.

The target model's layouts say how a full parameter is cut; what the files say about it is only checked.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.checkpoint.constants import ORIGINAL_VOCAB_SIZE, VOCABULARY_PARAMETER_PATTERNS

from megads_ucp import storage
from megads_ucp.comm.channel import HOST
from megads_ucp.engine.context import EngineContext
from megads_ucp.engine.state import EngineState, StateGroup
from megads_ucp.errors import LayoutError, StorageError
from megads_ucp.layout.layout import Layout
from megads_ucp.layout.padding import padding_boxes, with_padding
from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.load.cooperative import on_several_hosts, plan_together
from megads_ucp.load.fitting import fitting_layout, may_be_shard
from megads_ucp.load.groups import saved_groups_of
from megads_ucp.load.names import under_own_names
from megads_ucp.load.reads import Read
from megads_ucp.load.remarks import (
    Unpadded,
    order_taken_for_granted,
    other_hyperparameters,
    padding_missing,
    remarks,
)
from megads_ucp.load.resume import LoadRequest, Resume, Unowned
from megads_ucp.load.states import GroupState, state_getter
from megads_ucp.plan.load import ReadPlan
from megads_ucp.storage.format import MASTER
from megads_ucp.survey import Survey

logger = logging.getLogger("megads_ucp")


def prepare(context: EngineContext, directory: Path, request: LoadRequest) -> Resume:
    """Check everything this rank needs, and agree with all ranks that it is there. Collective.

    Raises:
        UniversalCheckpointError: a file is missing, damaged or does not fit the model; the same on every rank.
    """
    with HOST:
        return _prepare(context, directory, request)


def _prepare(context: EngineContext, directory: Path, request: LoadRequest) -> Resume:
    channel, state = context.connect(), context.state
    with channel.agreed(f"checking {directory}"):
        checkpoint = Checkpoint(directory)
        checkpoint.check_model_states(channel.rank, channel.world)
        if request.verify and checkpoint.manifest is None:
            raise StorageError(f"{directory} has no {storage.MANIFEST}, so nothing can be verified: drop the flag.")
        common = checkpoint.common_state()
    survey = _survey(context, checkpoint)
    checkpoint = under_own_names(channel, checkpoint, survey, request.strict)
    groups: tuple[GroupState, ...] = (GroupState(),) * len(state.groups)
    with channel.agreed(f"checking {directory}"):
        if request.optimizer_states:
            groups = saved_groups_of(state, common, checkpoint, request.strict)
    layouts = survey.layouts[state.coordinates.stage]
    if channel.rank == 0:
        _remark(checkpoint, state, groups, layouts, request)
    with channel.agreed(f"checking {directory}"):
        planner = _Planner(checkpoint, layouts, state, request)
        reads = {
            key: read
            for group, saved in zip(state.groups, groups, strict=True)
            for key, read in planner.fragments(group, saved)
        }
        unowned = planner.unowned()
    if unpadded := {name: entry for found in channel.gather(planner.unpadded) or [] for name, entry in found.items()}:
        logger.warning("%s %s", checkpoint.directory, padding_missing(list(unpadded.values())))
    together = _plan_together(context, survey, checkpoint, request)
    return Resume(channel, state, directory, request, common, groups, reads, together, unowned, tuple(planner.kept))


def _remark(
    checkpoint: Checkpoint,
    state: EngineState,
    groups: Sequence[GroupState],
    layouts: Mapping[str, Layout],
    request: LoadRequest,
) -> None:
    found = list(remarks(checkpoint, state)) if request.optimizer_states else []
    if other := other_hyperparameters(state.groups, groups, request.scheduled):
        found.append(other)
    if order := order_taken_for_granted(checkpoint, layouts.values()):
        found.append(order)
    for remark in found:
        logger.warning("%s %s", checkpoint.directory, remark)


class _Planner:
    """Plans the reads of one rank, and collects what the checkpoint lacks: names, and rows that pad vocabularies."""

    def __init__(
        self, checkpoint: Checkpoint, layouts: Mapping[str, Layout], state: EngineState, request: LoadRequest
    ) -> None:
        self._checkpoint, self._layouts, self._state, self._request = checkpoint, layouts, state, request
        self._tp_rank = state.coordinates.tp_rank
        self.kept: list[str] = []
        self.unpadded: dict[str, Unpadded] = {}

    def fragments(self, group: StateGroup, saved: GroupState) -> Iterator[tuple[tuple[str, str], Read]]:
        """(parameter, state) and read of everything that one group's fragments on this rank get."""
        wanted = {fragment.name for fragment in group.partition.fragments}
        if not self._request.strict:
            lacking = {name for name in wanted if not self._checkpoint.has(name)}
            self.kept.extend(sorted(lacking))
            wanted -= lacking
        for state in (MASTER, *saved.states):
            target = group.master if state == MASTER else state_getter(group, state)
            for fragment in group.placement(state).fragments:
                if fragment.name in wanted:
                    span = fragment.param_start, fragment.partition_start, fragment.numel
                    yield (fragment.name, state), self._read(fragment.name, state, *span, target)

    def _read(
        self, name: str, state: str, start: int, target_start: int, numel: int, target: Callable[[], torch.Tensor]
    ) -> Read:
        """The read of elements [start, start + numel) of this tensor-parallel rank's shard of a state."""
        file, target_layout = self._checkpoint.file(name, state), self._layouts[name]
        layout = fitting_layout(target_layout, file)
        if state != MASTER:
            layout.check_unscaled(state)
        read = Read(file, layout.runs(self._tp_rank, start, numel), start, target_start, numel, target)
        whole, real = with_padding(target_layout), layout.shape[0] if layout.shape else 0
        if whole.numel == layout.numel:
            return read
        padding = self._checkpoint.padding(name, state)
        if padding is None:
            self.unpadded[name] = Unpadded(name, real, whole.shape[0], self._checkpoint.padded_rows(name))
            return read
        boxes = padding_boxes(target_layout, real, padding.tensor.shape[0], self._tp_rank, start, numel)
        return replace(read, padding=(padding, tuple(boxes)))

    def unowned(self) -> Unowned:
        """Frozen parameters and buffers, whole shards; second names of trained parameters are filled with those."""
        live = self._state.unowned()
        trained = {self._state.parameters[m.name].data_ptr() for g in self._state.groups for m in g.flat.members}
        reads, detours = [], []
        for name, value in live.items():
            if not value.numel() or value.data_ptr() in trained or not self._provides(name):
                continue
            flat = value.view(-1) if value.is_contiguous() else torch.empty(value.numel(), dtype=value.dtype)
            if not value.is_contiguous():  # channels_last, for one: read aside, then copied into its place
                detours.append((value, flat))
            reads.append(self._read(name, MASTER, 0, 0, value.numel(), functools.partial(torch.Tensor.detach, flat)))
        exact = dict(_exact_shards(self._checkpoint, self._layouts, live, self._tp_rank))
        return Unowned(tuple(reads), tuple(detours), exact)

    def _provides(self, name: str) -> bool:
        """Whether the checkpoint has a tensor that no optimizer owns; if not, that is noted."""
        checkpoint = self._checkpoint
        if not checkpoint.has(name):
            self.kept.append(name)
            return False
        if checkpoint.manifest is not None:
            return True
        # The stock converter writes one tensor-parallel rank's shard as if it were the whole.
        is_shard = may_be_shard(checkpoint.file(name, MASTER).tensor.shape, self._layouts[name].shape)
        if is_shard:
            self.kept.append(f"{name} (there is only one tensor-parallel rank's shard of it)")
        return not is_shard


def _survey(context: EngineContext, checkpoint: Checkpoint) -> Survey:
    """The target model's layouts and holders; where its layers are silent, the checkpoint's own info counts."""
    state = context.state
    with context.channel.agreed(f"checking {checkpoint.directory}"):
        info = state.client_info()
        if info is None and state.coordinates.tp_degree > 1:
            info = checkpoint.info()
        elif info is not None and ORIGINAL_VOCAB_SIZE not in info:
            # Megatron-DeepSpeed adds the size when it saves. Here each file shows how many rows are real.
            info = {key: value for key, value in info.items() if key != VOCABULARY_PARAMETER_PATTERNS}
        description = context.describe(info)
    try:
        return context.survey(description, state.first_of_replicas)
    except LayoutError as error:  # on every rank alike
        raise LayoutError(f"{checkpoint.directory} cannot be loaded into this model: {error}") from error


def _exact_shards(
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


def _plan_together(
    context: EngineContext, survey: Survey, checkpoint: Checkpoint, request: LoadRequest
) -> ReadPlan | None:
    """What is not read by each rank alone, if anything. Collective."""
    config, channel = context.config, context.channel
    if config.read_together == "never":
        return None
    host = int.from_bytes(hashlib.sha256(platform.node().encode()).digest()[:7], "big")
    # Nobody may need more of a state than lies in its own partition.
    gathered = channel.all_gather_ints([host, any(group.whole_states for group in context.state.groups)])
    hosts, whole = zip(*gathered, strict=True)
    if any(whole) or (config.read_together == "auto" and not on_several_hosts(survey, hosts)):
        return None
    with channel.agreed(f"planning how to read {checkpoint.directory}"):
        return plan_together(survey, checkpoint, request.optimizer_states, channel.rank)
    raise AssertionError("agreed() lets no failed body pass")
