# SPDX-License-Identifier: Apache-2.0
"""One export, told once: refuse or survey, plan, compare copies, stage, exchange and write, commit.

Every step that can fail on one rank alone ends in an agreement of all ranks, so that all of them go on or all give up.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO

from megads_ucp import storage
from megads_ucp.comm.channel import HOST
from megads_ucp.comm.exchange import Exchange
from megads_ucp.config import ExportConfig
from megads_ucp.engine.context import Surveyor
from megads_ucp.engine.state import LiveState
from megads_ucp.errors import DriftError, UniversalCheckpointError, UnsupportedError
from megads_ucp.layout.info import info_of
from megads_ucp.layout.layout import Layout
from megads_ucp.plan.save import make_plan
from megads_ucp.plan.types import Plan
from megads_ucp.save.manifest import file_records, group_facts, manifest, merged_groups, split_crc32
from megads_ucp.save.replicas import Comparison, told
from megads_ucp.save.snapshot import Snapshot
from megads_ucp.save.writer import ExtentWriter
from megads_ucp.storage.format import (
    LATEST,
    OPTIMIZER_STATE,
    STEP,
    exact_file,
    model_states_file,
    state_file,
    universal_directory,
)
from megads_ucp.survey import UNOWNED, Survey

logger = logging.getLogger("megads_ucp")


_MIB = 1 << 20


_ROUNDING = (
    "That may be rounding: three or more data-parallel ranks add up a gradient in an order that goes by its place in "
    "their buffers, and these copies have other places (uneven tensor parallelism) or buffers (pipeline stages). One "
    "copy of each is exported, and a resume gives it to all."
)


_MEND = (
    "Look for a missing all-reduce of a gradient (sequence parallelism?), or declare the parameter in "
    "parameter_to_average_patterns of universal_checkpoint_info."
)


@dataclass
class ExportReport:
    """What one export did, as this rank saw it.

    Attributes:
        directory: the universal checkpoint.
        nbytes: payload bytes of all tensors, over all ranks.
        nbytes_moved: of these, bytes that one rank sent to another.
        imbalance: payload bytes of the busiest writer over the mean.
        seconds: by step of the flow.
    """

    directory: Path
    nbytes: int = 0
    nbytes_moved: int = 0
    imbalance: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started


class Exporter:
    """Exports one engine, again and again; keeps the plan and the memory from one export to the next.

    Args:
        live: the engine's state, None if it cannot be exported.
        config: how.
        surveyor: the engine's.
        unsupported: why it cannot be exported, None if it can.
    """

    def __init__(
        self, live: LiveState | None, config: ExportConfig, surveyor: Surveyor, unsupported: str | None
    ) -> None:
        self._live, self._config, self._surveyor, self._unsupported = live, config, surveyor, unsupported
        self._survey: Survey | None = None
        self._plan: Plan | None = None
        self._comparison: Comparison | None = None
        self._writer = ExtentWriter()
        self.last_report: ExportReport | None = None

    def export(
        self, save_dir: Any, tag: str, client_state: Mapping[str, Any], *, save_latest: bool, exclude_frozen: bool
    ) -> ExportReport | None:
        """Write ``<save_dir>/<tag>_universal`` from the live state. Collective.

        Returns None after a failure, which has then been reported on every rank; training and the regular checkpoint
        are untouched.

        Raises:
            UniversalCheckpointError: the export failed, and the configuration says ``strict``.
        """
        save_dir = Path(os.path.abspath(save_dir))
        directory = universal_directory(save_dir / tag)
        self.last_report = None
        try:
            with HOST:
                self.last_report = self._export(directory, save_dir, client_state, save_latest, exclude_frozen)
        except Exception as failure:
            if not isinstance(failure, UniversalCheckpointError):
                self._surveyor.give_up(failure)  # unforeseen, so perhaps on this rank alone: nobody shall wait for it
            if self._config.strict:
                raise
            reason = str(failure).removesuffix(".")
            logger.error("no universal checkpoint %s: %s. The regular checkpoint is untouched.", directory, reason)
        return self.last_report

    def _export(
        self, directory: Path, save_dir: Path, client_state: Mapping[str, Any], save_latest: bool, exclude_frozen: bool
    ) -> ExportReport:
        channel, report = self._surveyor.connect(), ExportReport(directory)

        with channel.agreed("the universal export"):
            if self._unsupported or self._live is None:
                raise UnsupportedError(self._unsupported)
        live = self._live
        assert live is not None

        absent = live.frozen() if exclude_frozen else []
        with report.timed("plan"):
            plan = self._current_plan(live, client_state, absent)
        report.nbytes, report.nbytes_moved = sum(plan.bytes_by_writer.values()), plan.bytes_moved
        report.imbalance = plan.imbalance(channel.world)

        with report.timed("snapshot"):
            snapshot = self._snapshot(live)
        with report.timed("compare"):
            self._compare_copies(snapshot)

        staging = storage.Staging(directory, channel.broadcast(uuid.uuid4().hex, 0))
        try:
            with report.timed("stage"):
                self._stage(staging)
            with report.timed("exchange and write"):
                records = self._write_tensors(snapshot, plan, staging)
            with report.timed("small files"), channel.agreed("writing the small files"):
                records += self._write_objects(live, plan, snapshot, staging, client_state, exclude_frozen)
            with report.timed("commit"):
                self._commit(live, plan, staging, records, absent, save_dir / LATEST if save_latest else None)
        except BaseException:
            if channel.rank == 0:
                staging.discard()
            raise
        if channel.rank == 0:
            logger.info(
                "universal checkpoint %s: %.2f GB in %.1f s (%s)",
                directory,
                report.nbytes / 1e9,
                sum(report.seconds.values()),
                ", ".join(f"{step} {seconds:.1f}" for step, seconds in report.seconds.items()),
            )
        return report

    def _current_plan(self, live: LiveState, client_state: Mapping[str, Any], absent: Collection[str]) -> Plan:
        """The plan of the last export, or a new one if anything that it depends on has changed on any rank."""
        channel = self._surveyor.channel
        with channel.agreed("describing the model"):
            info = client_state.get(UNIVERSAL_CHECKPOINT_INFO) or live.client_info()
            description = self._surveyor.describe(live, info, absent)
        survey = self._surveyor.survey(description, first_of_replicas=live.groups[0].shard_rank == 0)
        if self._plan is None or survey is not self._survey:
            if channel.rank == 0:
                for warning in survey.warnings:
                    logger.warning("%s", warning)
            # Two rounds are in flight at a time.
            subjects = survey.subjects()
            self._plan = make_plan(subjects, channel.world, self._config.bucket_mb * _MIB // 2)
            self._comparison = Comparison(subjects, channel.rank)
            self._survey = survey
        return self._plan

    def _snapshot(self, live: LiveState) -> Snapshot:
        with self._surveyor.channel.agreed("reading the optimizer's state"):
            snapshot = Snapshot(live)
            stage = live.coordinates.stage
            assert self._survey is not None
            layouts = self._survey.layouts[stage]  # without what is excluded
            if cut := [name for name in snapshot.inexact if name in layouts and not _held_whole(layouts[name])]:
                logger.warning(
                    "fp32, in which the universal format keeps frozen parameters, cannot hold all values of %s, and "
                    "tensor parallelism cuts them: keep them in client_state too.",
                    ", ".join(cut),
                )
        return snapshot

    def _compare_copies(self, snapshot: Snapshot) -> None:
        """Find copies that have drifted apart, before anything is written.

        Where sound runs do that, by rounding, it is a warning, whatever the configuration says.

        Raises:
            DriftError: others have, and the configuration calls that an error; the same on every rank.
        """
        assert self._comparison is not None
        channel = self._surveyor.channel
        drifts = self._comparison.run(channel, snapshot.values, self._config.bucket_mb * _MIB // 2)
        rounding = [drift for drift in drifts if drift.rounding]
        if rounding and channel.rank == 0:
            logger.warning("%s. %s", told(rounding), _ROUNDING)
        wrong = [drift for drift in drifts if not drift.rounding]
        if wrong and self._config.on_drift == "error":
            raise DriftError(f"{told(wrong)}. {_MEND} To export one copy as it is, set on_drift to warn.")
        if wrong and channel.rank == 0:
            logger.warning("%s. One copy of each is exported. %s", told(wrong), _MEND)

    def _stage(self, staging: storage.Staging) -> None:
        channel = self._surveyor.channel
        with channel.agreed(f"preparing {staging.target}"):
            if channel.rank == 0:
                storage.Staging.create(staging.target, staging.run_id)
        with channel.agreed(f"preparing {staging.target}"):
            storage.Staging.open(staging.target, staging.run_id)

    def _write_tensors(self, snapshot: Snapshot, plan: Plan, staging: storage.Staging) -> list[storage.ExtentRecord]:
        """Move fragments to their writers and write each extent as soon as it is complete."""
        channel = self._surveyor.channel
        with channel.agreed("preparing the exchange"):
            sink = self._writer.prepare(plan, channel.rank, staging)
        with channel.agreed("writing"):
            try:
                Exchange(channel, plan, snapshot.holding, sink.lay, sink.arrived).run()
                return sink.finish()
            finally:
                sink.abandon()
        raise AssertionError("agreed() lets no failed body pass")

    def _write_objects(
        self,
        live: LiveState,
        plan: Plan,
        snapshot: Snapshot,
        staging: storage.Staging,
        client_state: Mapping[str, Any],
        exclude_frozen: bool,
    ) -> list[storage.ExtentRecord]:
        """The small pickled files: step.pt of this rank's parameters, and what the first of the replicas writes."""
        channel = self._surveyor.channel
        objects: dict[str, Any] = {}
        for subject in plan.subjects:
            first = min(subject.holdings, key=lambda h: (h.tp_rank, h.fragment.param_start), default=None)
            if first is None or first.rank != channel.rank or first.group == UNOWNED:
                continue
            step = live.groups[first.group].state().get(STEP)
            if step is not None:
                objects[state_file(subject.name, STEP)] = step
        place = live.coordinates
        if live.groups[0].shard_rank == 0:
            model_state = self._model_state(live, client_state, exclude_frozen)
            objects[model_states_file(place.mp_rank)] = model_state
            if place.tp_rank == 0 and (whole := self._exact(snapshot, plan)):
                objects[exact_file(place.stage)] = whole
            if (place.stage, place.tp_rank) == (0, 0):
                objects[OPTIMIZER_STATE] = live.common_optimizer_state()
        return [
            storage.write_object(staging.path(name), value, root=staging.directory) for name, value in objects.items()
        ]

    def _exact(self, snapshot: Snapshot, plan: Plan) -> dict[str, torch.Tensor]:
        """What fp32 cannot hold and every tensor-parallel rank holds whole, beside its rounded copy in zero/."""
        whole = {subject.name for subject in plan.subjects if not subject.owned and _held_whole(subject.layout)}
        return {name: value.cpu().clone() for name, value in snapshot.inexact.items() if name in whole}

    def _model_state(self, live: LiveState, client_state: Mapping[str, Any], exclude_frozen: bool) -> dict[str, Any]:
        """The mp_rank file, with a universal_checkpoint_info even if the client gave none: stock tools ask for one."""
        assert self._survey is not None
        state = live.model_state(client_state, exclude_frozen)
        if state.get(UNIVERSAL_CHECKPOINT_INFO) is None:
            state[UNIVERSAL_CHECKPOINT_INFO] = info_of(self._survey.layouts[live.coordinates.stage].values())
        return state

    def _commit(
        self,
        live: LiveState,
        plan: Plan,
        staging: storage.Staging,
        records: list[storage.ExtentRecord],
        absent: Collection[str],
        latest: Path | None,
    ) -> None:
        """Complete the files that several ranks wrote, write the manifest, and give the directory its name."""
        channel = self._surveyor.channel
        told = channel.gather((records, group_facts(live) if live.groups[0].shard_rank == 0 else []))
        everything = [record for theirs, _ in told or [] for record in theirs]
        split: dict[str, int] = {}
        with channel.agreed("completing the files"):
            if told is not None:
                split = split_crc32(plan, everything)
        split = channel.broadcast(split, 0)
        with channel.agreed("completing the files"):
            for name, frame in self._writer.split_frames(plan):
                storage.write_frame(staging.path(name), frame, split[name])
        with channel.agreed(f"committing {staging.target}"):
            if told is not None:
                groups = merged_groups(group for _, theirs in told for group in theirs)
                files = file_records(plan, self._writer.frame, everything)
                content = manifest(live, plan, files, groups, absent, staging.run_id)
                storage.write_manifest(staging.directory, content)
                staging.commit(latest, sizes={file.path: file.nbytes for file in files})


def _held_whole(layout: Layout) -> bool:
    return layout.tp_degree == 1 or layout.replicated
