# SPDX-License-Identifier: Apache-2.0
"""One resume, told once: survey the target, check the files against its layouts, read each fragment's boxes.

The target model's layouts say how a full parameter is cut; what the files say about it is only checked. Nothing live
changes before every rank has checked everything it needs.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    LOSS_SCALER,
    ORIGINAL_VOCAB_SIZE,
    VOCABULARY_PARAMETER_PATTERNS,
)

from megads_ucp import storage
from megads_ucp.comm.channel import HOST
from megads_ucp.config import ExportConfig
from megads_ucp.engine.context import Surveyor
from megads_ucp.engine.state import LiveGroup, LiveState
from megads_ucp.errors import LayoutError, StorageError, UniversalCheckpointError, UnsupportedError
from megads_ucp.layout.layout import Layout, check_unscaled
from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.load.cooperative import ReadingTogether, on_several_hosts, plan_together, read_together
from megads_ucp.load.reads import Read, exact_shards, fitting_layout, may_be_shard
from megads_ucp.load.remarks import order_taken_for_granted, remarks
from megads_ucp.load.states import hyperparameters_of, make_states, saved_states, state_getter
from megads_ucp.plan.types import Plan
from megads_ucp.storage.format import MASTER
from megads_ucp.survey import Survey

logger = logging.getLogger("megads_ucp")


_SHOWN = 10


@dataclass(frozen=True)
class LoadRequest:
    """What of a checkpoint is wanted.

    Attributes:
        optimizer_states: states, steps, hyperparameters and loss scale; otherwise only what the model computes with.
        strict: a parameter that the checkpoint lacks is an error; otherwise it keeps its value, with a warning.
        verify: check everything that is read against the manifest's checksums.
    """

    optimizer_states: bool = True
    strict: bool = True
    verify: bool = False


@dataclass
class _Prepared:
    """Everything that was checked and is about to be read into this rank."""

    checkpoint: Checkpoint
    request: LoadRequest
    common: dict[str, Any]
    reads: dict[tuple[str, str], Read] = field(default_factory=dict)
    """By parameter and state."""
    together: Plan | None = None
    """Of those of the reads that are not done alone."""
    unowned: list[Read] = field(default_factory=list)
    states: list[list[str]] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    hyperparameters: list[dict[str, Any]] = field(default_factory=list)
    """Of each group, empty where the checkpoint has none for it."""
    exact: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of buffers and frozen parameters, this rank's shards of those whose values fp32 cannot hold, flat, by name."""
    aside: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Live tensors that are not contiguous, each with the memory that its values are read into."""
    kept: list[str] = field(default_factory=list)
    """What the checkpoint lacks, and so keeps the value it has."""


class Restorer:
    """Fills one engine from a universal checkpoint, its own or the stock converter's."""

    def __init__(self, live: LiveState, surveyor: Surveyor, config: ExportConfig) -> None:
        self._live, self._surveyor, self._config = live, surveyor, config
        self._prepared: _Prepared | None = None

    def latest(self, file: Path) -> str | None:
        """What the file that names a checkpoint says on rank 0, None if it is not there. Collective.

        To every rank: others may not see it, or not yet, and must neither wait for those that do nor load another one.

        Raises:
            UniversalCheckpointError: it cannot be read.
        """
        with HOST:
            channel, found = self._surveyor.connect(), None
            with channel.agreed(f"reading {file}"):
                if channel.rank == 0 and file.is_file():
                    found = file.read_text().strip()
            told: str | None = channel.broadcast(found, 0)
            return told

    @contextmanager
    def loading(
        self, directory: Path, *, optimizer_states: bool = True, strict: bool = True, why_not: str | None = None
    ) -> Iterator[None]:
        """Check ``directory`` on entry, on all ranks; fill what no optimizer owns on leaving. Collective.

        Between the two, :meth:`fill` does what DeepSpeed's load of the optimizer would.

        Args:
            directory: the universal checkpoint.
            optimizer_states, strict: see :class:`LoadRequest`.
            why_not: why this rank cannot take anything at the moment, None if it can.

        Raises:
            UniversalCheckpointError: a file is missing, damaged or does not fit the model; the same error on every
                rank, and nothing live has changed unless it says that the engine must not be used.
        """
        with HOST, self._surveyor.connect().agreed(f"loading {directory}"):
            if why_not is not None:
                raise UnsupportedError(why_not)
        try:
            with HOST:
                self._prepared = self._prepare(directory, LoadRequest(optimizer_states, strict, self._config.verify))
            yield
            with HOST:
                self._fill_unowned(self._prepared)
        except UniversalCheckpointError:
            raise
        except Exception as failure:
            # Of DeepSpeed or the client, in between, and so perhaps on this rank alone: nobody shall wait for it.
            self._surveyor.give_up(failure)
            raise
        finally:
            self._prepared = None

    def fill(self, checkpoint_dir: str) -> dict[str, Any] | None:
        """Fill master weights and, where they are wanted, optimizer states, steps and hyperparameters. Collective.

        Returns what zero/optimizer_state.pt says beyond groups, None if optimizer states are not wanted.

        Raises:
            UniversalCheckpointError: reading failed; the engine must not be used.
        """
        with HOST:
            return self._fill(checkpoint_dir)

    def _fill(self, checkpoint_dir: str) -> dict[str, Any] | None:
        prepared = self._prepared or self._prepare(Path(checkpoint_dir), LoadRequest(verify=self._config.verify))
        channel = self._surveyor.channel
        with channel.agreed(f"reading {checkpoint_dir} (the engine must not be used now)"):
            if prepared.request.optimizer_states:
                # Hyperparameters first: by them an optimizer has its step on a device or not.
                for group, values in zip(self._live.groups, prepared.hyperparameters, strict=True):
                    group.set_hyperparameters(values)
                for group, names, step in zip(self._live.groups, prepared.states, prepared.steps, strict=True):
                    make_states(group, names, step)
            shared = read_together(prepared.together)
            for key, read in prepared.reads.items():
                if key not in shared:
                    read.run(prepared.request.verify)
        if prepared.together is not None:
            with channel.agreed(f"reading {checkpoint_dir} (the engine must not be used now)"):
                ReadingTogether(prepared.together, prepared.reads, prepared.request.verify).run(channel)
        return self._common_state(prepared.common) if prepared.request.optimizer_states else None

    def _common_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The saved state without a loss scaler of another kind than this run's: the target's precision decides."""
        current = self._live.common_optimizer_state()
        if type(saved.get(LOSS_SCALER)) is type(current.get(LOSS_SCALER)) and self._live.half_precision:
            return dict(saved)
        of_scaler = (LOSS_SCALER, "dynamic_loss_scale", "overflow")
        return {key: value for key, value in saved.items() if key not in of_scaler}

    def _fill_unowned(self, prepared: _Prepared) -> None:
        channel = self._surveyor.channel
        with channel.agreed(f"reading {prepared.checkpoint.directory} (the engine must not be used now)"):
            for read in prepared.unowned:
                read.run(prepared.request.verify)
            for value, flat in prepared.aside:
                value.copy_(flat.view(value.shape))
            unowned = self._live.unowned()
            for name, exact in prepared.exact.items():
                unowned[name].copy_(exact.view(unowned[name].shape))
        # Each rank knows of its own fragments only.
        kept = sorted({name for theirs in channel.gather(prepared.kept) or [] for name in theirs})
        if kept:
            logger.warning(
                "%s lacks %s%s: they keep the values this run gave them.",
                prepared.checkpoint.directory,
                ", ".join(kept[:_SHOWN]),
                f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else "",
            )

    def _prepare(self, directory: Path, request: LoadRequest) -> _Prepared:
        """Check everything this rank needs, and agree with all ranks that it is there."""
        channel, live = self._surveyor.connect(), self._live
        with channel.agreed(f"checking {directory}"):
            if channel.rank == 0 and not directory.exists():
                storage.repair(directory)  # a killed export may have left the older checkpoint set aside
        with channel.agreed(f"checking {directory}"):
            checkpoint = Checkpoint(directory)
            checkpoint.check_model_states(channel.rank, channel.world)
            if request.verify and checkpoint.manifest is None:
                raise StorageError(f"{directory} has no {storage.MANIFEST}, so nothing can be verified: drop the flag.")
            prepared = _Prepared(checkpoint, request, checkpoint.common_state())
            if request.optimizer_states:
                prepared.hyperparameters.extend(hyperparameters_of(live.groups, prepared.common, checkpoint))
        if channel.rank == 0 and request.optimizer_states:
            for warning in remarks(checkpoint, live):
                logger.warning("%s %s", directory, warning)
        survey = self._survey(checkpoint)
        layouts = survey.layouts[live.coordinates.stage]
        if channel.rank == 0 and (remark := order_taken_for_granted(checkpoint, layouts.values())):
            logger.warning("%s %s", directory, remark)
        with channel.agreed(f"checking {directory}"):
            for group in live.groups:
                names, step = (
                    saved_states(group, checkpoint, request.strict) if request.optimizer_states else ([], None)
                )
                prepared.states.append(names)
                prepared.steps.append(step)
                prepared.reads.update(self._reads(group, layouts, prepared))
            prepared.unowned.extend(self._unowned_reads(layouts, prepared))
            prepared.exact.update(exact_shards(checkpoint, layouts, live.unowned(), live.coordinates.tp_rank))
        prepared.together = self._plan_together(survey, checkpoint, request)
        return prepared

    def _reads(
        self, group: LiveGroup, layouts: Mapping[str, Layout], prepared: _Prepared
    ) -> Iterator[tuple[tuple[str, str], Read]]:
        """Everything to be read for one group's fragments on this rank."""
        checkpoint, tp_rank = prepared.checkpoint, self._live.coordinates.tp_rank
        wanted = {fragment.name for fragment in group.partition.fragments}
        if not prepared.request.strict:
            lacking = {name for name in wanted if not checkpoint.has(name)}
            prepared.kept.extend(sorted(lacking))
            wanted -= lacking
        for state in (MASTER, *prepared.states[-1]):
            target = group.master if state == MASTER else state_getter(group, state)
            for fragment in group.placement(state).fragments:
                if fragment.name in wanted:
                    file = checkpoint.file(fragment.name, state)
                    layout = fitting_layout(layouts[fragment.name], file)
                    if state != MASTER:
                        check_unscaled(layout, state)
                    boxes = layout.runs(tp_rank, fragment.param_start, fragment.numel)
                    span = fragment.param_start, fragment.partition_start, fragment.numel
                    yield (fragment.name, state), Read(file, boxes, *span, target)

    def _unowned_reads(self, layouts: Mapping[str, Layout], prepared: _Prepared) -> Iterator[Read]:
        """Frozen parameters and buffers, whole shards; other names of trained parameters get theirs with those."""
        checkpoint, tp_rank = prepared.checkpoint, self._live.coordinates.tp_rank
        trained = {self._live.parameters[m.name].data_ptr() for g in self._live.groups for m in g.flat.members}
        for name, value in self._live.unowned().items():
            if not value.numel() or value.data_ptr() in trained:
                continue
            if not checkpoint.has(name):
                prepared.kept.append(name)
                continue
            file = checkpoint.file(name, MASTER)
            if checkpoint.manifest is None and may_be_shard(file.tensor.shape, layouts[name].shape):
                # The stock converter writes one tensor-parallel rank's shard as if it were the whole.
                prepared.kept.append(f"{name} (of which it has one tensor-parallel rank's shard)")
                continue
            boxes = fitting_layout(layouts[name], file).runs(tp_rank, 0, value.numel())
            flat = value.view(-1) if value.is_contiguous() else torch.empty(value.numel(), dtype=value.dtype)
            if not value.is_contiguous():  # channels_last, for one: read aside, then copied into its place
                prepared.aside.append((value, flat))
            yield Read(file, boxes, 0, 0, value.numel(), functools.partial(torch.Tensor.detach, flat))

    def _survey(self, checkpoint: Checkpoint) -> Survey:
        """The target model's layouts and holders; where its layers are silent, the checkpoint's own words count."""
        with self._surveyor.channel.agreed(f"checking {checkpoint.directory}"):
            info = self._live.client_info()
            if info is None and self._live.coordinates.tp_degree > 1:
                info = checkpoint.info()
            elif info is not None and ORIGINAL_VOCAB_SIZE not in info:
                # Megatron-DeepSpeed adds the size when it saves. Here each file shows how many rows are real.
                info = {key: value for key, value in info.items() if key != VOCABULARY_PARAMETER_PATTERNS}
            description = self._surveyor.describe(self._live, info)
        try:
            return self._surveyor.survey(description, self._live.groups[0].shard_rank == 0)
        except LayoutError as error:  # on every rank alike
            raise LayoutError(f"{checkpoint.directory} cannot be loaded into this model: {error}") from error

    def _plan_together(self, survey: Survey, checkpoint: Checkpoint, request: LoadRequest) -> Plan | None:
        """What is not read by each rank alone, if anything. Collective."""
        if self._config.read_together == "never":
            return None
        channel = self._surveyor.channel
        host = int.from_bytes(hashlib.sha256(platform.node().encode()).digest()[:7], "big")
        # Nobody may need more of a state than lies in its own partition.
        told = channel.all_gather_ints([host, any(group.whole_states for group in self._live.groups)])
        hosts, whole = zip(*told, strict=True)
        if any(whole) or (self._config.read_together == "auto" and not on_several_hosts(survey, hosts)):
            return None
        with channel.agreed(f"planning how to read {checkpoint.directory}"):
            return plan_together(survey, checkpoint, request.optimizer_states, self._config.bucket_mb << 20)
        raise AssertionError("agreed() lets no failed body pass")
