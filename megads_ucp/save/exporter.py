# SPDX-License-Identifier: Apache-2.0
"""One export: survey, plan, compare replicas, stage, exchange and write, commit.

Every step that can fail on one rank alone ends in an agreement of all ranks, so that all of them go on or all give up.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO

from megads_ucp import storage
from megads_ucp.comm.agreement import check_equal
from megads_ucp.comm.channel import HOST, Channel
from megads_ucp.comm.exchange import Exchange
from megads_ucp.engine.compat import PICKLED_CLASSES
from megads_ucp.engine.context import EngineContext
from megads_ucp.engine.state import EngineState
from megads_ucp.errors import StorageError, UniversalCheckpointError
from megads_ucp.plan.save import make_plan
from megads_ucp.plan.types import Plan
from megads_ucp.save.announce import announce
from megads_ucp.save.manifest import group_records, manifest, merge_groups
from megads_ucp.save.objects import small_files
from megads_ucp.save.optimizer_values import (
    ONLY_WEIGHTS,
    RankValues,
    check_nothing_left_out,
    collect,
    drift_of,
    left_out_message,
    listed,
    merge,
)
from megads_ucp.save.replicas import Comparison, judge
from megads_ucp.save.snapshot import Snapshot
from megads_ucp.save.types import ExportReport, ExportRequest
from megads_ucp.save.vocabulary import words_beyond
from megads_ucp.save.writer import ExtentWriter
from megads_ucp.storage.format import OPTIMIZER_STATE, OPTIMIZER_VALUES
from megads_ucp.storage.values import from_file, to_file
from megads_ucp.survey import Survey

logger = logging.getLogger("megads_ucp")

_MIB = 1 << 20


@dataclass(frozen=True)
class _Prepared:
    """What follows from a survey alone, and is used again as long as the survey is the same."""

    survey: Survey
    plan: Plan
    comparison: Comparison


class Exporter:
    """Exports one engine, again and again; keeps the plan and the memory from one export to the next."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self.turn = context.turn
        self._prepared: _Prepared | None = None
        self._writer = ExtentWriter()
        self._warned: set[str] = set()
        self.last_report: ExportReport | None = None

    def check_tag(self, save_dir: Any, tag: str) -> None:
        """Refuse to save a regular checkpoint into a universal one, before any of it is written. Collective.

        Raises:
            StorageError: the tag leads into one, whether or not the configuration says ``strict``.
        """
        with HOST:
            try:
                channel = self._context.connect()
                with channel.agreed(f"saving {Path(save_dir) / tag}"):
                    if channel.rank == 0:
                        storage.check_tag(save_dir, tag)
            except StorageError:
                raise
            except Exception:  # the regular checkpoint comes first; the export meets the same, and reports it
                return

    def export(self, request: ExportRequest) -> ExportReport | None:
        """Write the universal checkpoint from the live state. Collective.

        Returns:
            None after a failure, which has then been logged: on rank 0 and where it happened, or, if each rank has a
            failure of its own, on every rank. Training and the regular checkpoint are untouched.

        Raises:
            UniversalCheckpointError: the export failed, and the configuration says ``strict``.
        """
        self.last_report = None
        try:
            with HOST:
                self.last_report = self._export(request)
        except Exception as failure:
            if not isinstance(failure, UniversalCheckpointError):
                self._context.give_up(failure)  # unforeseen, so perhaps on this rank alone: nobody shall wait for it
            if self._context.config.strict:
                raise
            if self._context.speaks_of(failure):
                reason = str(failure).removesuffix(".")
                logger.error(
                    "no universal checkpoint %s: %s. The regular checkpoint is untouched.", request.directory, reason
                )
        return self.last_report

    def _export(self, request: ExportRequest) -> ExportReport:
        channel, report = self._context.connect(), ExportReport(request.directory)
        check_equal(channel, "arguments of save_checkpoint", request.arguments, "the same ones, rank 0's for example")
        with channel.agreed("the universal export"):
            state = self._context.state
        absent = state.frozen() if request.exclude_frozen else []
        with report.timed("plan"):
            prepared = self._current(request, absent)
        plan = prepared.plan
        report.nbytes, report.nbytes_moved = sum(plan.bytes_by_writer.values()), plan.bytes_moved
        report.imbalance = plan.imbalance(channel.world)
        with report.timed("snapshot"), channel.agreed("reading the optimizer's state"):
            snapshot = Snapshot(state)
            snapshot.warn_of_rounding(prepared.survey.layouts[state.coordinates.stage])
            values = collect(state, channel.rank)
            if self._context.config.strict:
                check_nothing_left_out(values.left_out, state.facts()["base_optimizer"])
        with report.timed("compare"):
            drifts = prepared.comparison.run(channel, snapshot.values, self._bucket_bytes)
            judge(drifts, self._context.config.on_drift, speaks=channel.rank == 0)
            beyond = words_beyond(channel, plan.subjects, snapshot.values)
            if beyond is not None and channel.rank == 0:
                self._warn(beyond)
        with _staged(channel, request, plan, report) as staging:
            with report.timed("exchange and write"):
                records = self._write_tensors(channel, plan, snapshot, staging)
            with report.timed("small files"), channel.agreed("writing the small files"):
                for name, value in small_files(request, state, prepared.survey, plan, snapshot, values):
                    records.append(storage.write_object(staging.path(name), value, root=staging.directory))
                    if name == OPTIMIZER_STATE:  # a resume must be able to read it without running code
                        storage.read_object(staging.path(name), PICKLED_CLASSES)
            with report.timed("commit"):
                self._commit(channel, state, plan, values, staging, records, absent, request.latest)
        if channel.rank == 0:
            announce(logger, f"universal checkpoint {report}")
        return report

    @property
    def _bucket_bytes(self) -> int:
        """Bytes that one round of an exchange may move: two rounds are in flight at a time."""
        return self._context.config.bucket_mb * _MIB // 2

    def _current(self, request: ExportRequest, absent: Collection[str]) -> _Prepared:
        """What the last export prepared, or anew if anything that it depends on has changed on any rank."""
        context, channel = self._context, self._context.channel
        with channel.agreed("describing the model"):
            info = request.client_state.get(UNIVERSAL_CHECKPOINT_INFO) or context.state.client_info()
            description = context.describe(info, absent)
        survey = context.survey(description, context.state.first_of_replicas)
        if self._prepared is None or survey is not self._prepared.survey:
            if channel.rank == 0:
                for warning in survey.warnings:
                    logger.warning("%s", warning)
            subjects = survey.subjects()
            plan = make_plan(subjects, channel.world, self._bucket_bytes)
            self._prepared = _Prepared(survey, plan, Comparison(subjects, channel.rank))
        return self._prepared

    def _write_tensors(
        self, channel: Channel, plan: Plan, snapshot: Snapshot, staging: storage.Staging
    ) -> list[storage.ExtentRecord]:
        """Move fragments to their writers and write each extent as soon as it is complete."""
        with channel.agreed("preparing the exchange"):
            sink = self._writer.prepare(plan, channel.rank, staging)
        with channel.agreed("writing"):
            try:
                Exchange(channel, plan, snapshot.holding, sink.lay, sink.arrived).run()
                return sink.finish()
            finally:
                sink.abandon()
        raise AssertionError("agreed() lets no failed body pass")

    def _commit(
        self,
        channel: Channel,
        state: EngineState,
        plan: Plan,
        values: RankValues,
        staging: storage.Staging,
        records: list[storage.ExtentRecord],
        absent: Collection[str],
        latest: Path | None,
    ) -> None:
        """Complete the files that several ranks wrote, write the manifest, and give the directory its name."""
        speaks = self._speaks(channel, state, values)
        gathered = channel.gather(
            (records, group_records(state) if state.first_of_replicas else [], values if speaks else None)
        )
        extents = [record for by_rank, _, _ in gathered or [] for record in by_rank]
        split: dict[str, int] = {}
        with channel.agreed("completing the files"):
            if gathered is not None:
                split = storage.split_crc32(extents)
                extents.append(self._write_values([own for _, _, own in gathered if own is not None], state, staging))
        split = channel.broadcast(split, 0)
        with channel.agreed("completing the files"):
            for name, frame in self._writer.split_frames(plan):
                storage.write_frame(staging.path(name), frame, split[name])
        with channel.agreed(f"committing {staging.target}"):
            if gathered is not None:
                groups = merge_groups(group for _, by_rank, _ in gathered for group in by_rank)
                files = storage.file_records(self._writer.frames(plan), extents)
                content = manifest(state, plan, files, groups, absent, staging.run_id, channel.world)
                storage.write_manifest(staging.directory, content)
                staging.commit(latest, sizes={file.path: file.nbytes for file in files})

    def _speaks(self, channel: Channel, state: EngineState, values: RankValues) -> bool:
        """Whether rank 0 needs this rank's values: the first of the replicas speaks for all that have the same."""
        place = state.coordinates
        own = [place.stage, place.tp_rank, int(state.first_of_replicas), values.digest()]
        digests = {(stage, tp): digest for stage, tp, first, digest in channel.all_gather_ints(own) if first}
        return state.first_of_replicas or digests[place.stage, place.tp_rank] != own[-1]

    def _write_values(
        self, ranks: list[RankValues], state: EngineState, staging: storage.Staging
    ) -> storage.ExtentRecord:
        """Write what the optimizer keeps beside its tensors; warn of what is left out, and of what differs by rank."""
        groups = merge(ranks)
        left_out = list(dict.fromkeys(entry for group in groups for entry in group.left_out))
        if left_out:
            self._warn(f"{left_out_message(left_out, state.facts()['base_optimizer'])} {ONLY_WEIGHTS}")
        if drift := drift_of(groups):
            names = sorted({name for group in groups for name in group.differing_names()})
            self._warn(
                f"values of the optimizer that differ between ranks: {listed(drift)}. A resume at the same topology "
                "gives each rank its own back, another one gives all of them the first rank's.",
                key=", ".join(names),
            )
        record = storage.write_object(staging.path(OPTIMIZER_VALUES), to_file(groups), root=staging.directory)
        from_file(storage.read_object(staging.path(OPTIMIZER_VALUES)))
        return record

    def _warn(self, text: str, key: str | None = None) -> None:
        """Warn once for a key, by default the text."""
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            logger.warning("%s", text)


@contextmanager
def _staged(channel: Channel, request: ExportRequest, plan: Plan, report: ExportReport) -> Iterator[storage.Staging]:
    """A staging directory that rank 0 makes, once all names are known to do, and that every rank has seen.

    It is gone when the body is left, by the commit or because something failed.
    """
    target, run_id = request.directory, channel.broadcast(uuid.uuid4().hex, 0)
    staging: storage.Staging | None = None
    try:
        with report.timed("stage"), channel.agreed(f"preparing {target}"):
            if channel.rank == 0:
                names = {subject.name: [state.name for state in subject.states] for subject in plan.subjects}
                storage.check_names(storage.Staging(target, run_id).directory, names)
                staging = storage.Staging.create(target, run_id, request.latest)
        with report.timed("stage"), channel.agreed(f"preparing {target}"):
            joined = storage.Staging.join(target, run_id)
        yield staging or joined
    except BaseException:
        if staging is not None:
            staging.discard()
        raise
