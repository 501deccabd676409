# SPDX-License-Identifier: Apache-2.0
"""One export: survey, plan, compare replicas, stage, exchange and write, commit.

Every step that can fail on one rank alone ends in an agreement of all ranks, so that all of them go on or all give up.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO

from megads_ucp import storage
from megads_ucp.comm.agreement import check_equal
from megads_ucp.comm.channel import HOST, Channel
from megads_ucp.comm.exchange import Exchange
from megads_ucp.comm.shared_memory import SharedMemory
from megads_ucp.engine.compat import PICKLED_CLASSES
from megads_ucp.engine.context import EngineContext
from megads_ucp.errors import StorageError, UniversalCheckpointError
from megads_ucp.plan.save import SavePlan, make_plan, total_bytes
from megads_ucp.plan.shares import Dealing
from megads_ucp.plan.types import Subject, Transfer
from megads_ucp.save.announce import announce
from megads_ucp.save.commit import Commit
from megads_ucp.save.frames import Frames, one_file_of_each
from megads_ucp.save.objects import small_files
from megads_ucp.save.optimizer_values import check_nothing_left_out, collect
from megads_ucp.save.replicas import Comparison, judge, source_of
from megads_ucp.save.shared_rows import SharedRows
from megads_ucp.save.snapshot import Snapshot
from megads_ucp.save.types import ExportReport, ExportRequest
from megads_ucp.save.vocabulary import words_beyond
from megads_ucp.save.writer import TensorWriter
from megads_ucp.storage.format import OPTIMIZER_STATE
from megads_ucp.survey import Survey

logger = logging.getLogger("megads_ucp")

_MIB = 1 << 20

_SMALL_FILES = 8
"""Under way at a time."""


Remark = Callable[[str], None]
"""Says something once, on rank 0."""


@dataclass(frozen=True)
class _Prepared:
    """Used again by every export with the same survey and the same choice of files' writers.

    Attributes:
        survey: of all ranks.
        dealing: of files to writers.
        plan: of this rank.
        frames: of all files.
        comparison: of the copies that ranks hold.
        rows: what writers on one host get from shared memory, None where they send it.
        written, sent: payload bytes that each rank writes, and bytes that it gives to others, by rank.
    """

    survey: Survey
    dealing: Dealing
    plan: SavePlan
    frames: Frames
    comparison: Comparison
    rows: SharedRows | None
    written: tuple[int, ...]
    sent: tuple[int, ...]

    @property
    def near(self) -> tuple[int, ...]:
        """The other ranks that share memory with this one."""
        return tuple(sorted(self.rows.peers)) if self.rows is not None else ()


class Exporter:
    """Exports one engine, again and again; keeps the plan and the memory from one export to the next."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self.turn = context.turn
        self._prepared: _Prepared | None = None
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
        report.nbytes, report.nbytes_moved = sum(prepared.written), sum(prepared.sent)
        report.imbalance = max(prepared.written) * channel.world / report.nbytes if report.nbytes else 1.0
        with report.timed("snapshot"), channel.agreed("reading the optimizer's state"):
            snapshot = Snapshot(state)
            snapshot.warn_of_rounding(prepared.survey.layouts[state.coordinates.stage])
            values = collect(state, channel.rank)
            if self._context.config.strict:
                check_nothing_left_out(values.left_out, state.facts()["base_optimizer"])
        with report.timed("compare"):
            self._compare(channel, prepared, snapshot)
        with (
            _staged(channel, request, prepared.plan.subjects, report) as staging,
            closing(self._writer(channel, prepared, snapshot, staging)) as writer,
        ):
            with report.timed("write"):
                records = self._write_tensors(channel, prepared, snapshot, writer)
            with report.timed("small files"), channel.agreed("writing the small files"):
                files = small_files(request, state, prepared.survey, prepared.plan.subjects, snapshot, values)
                small = _write_small_files(staging, files)
            with report.timed("commit"):
                commit = Commit(channel, state, prepared.plan.subjects, prepared.frames, staging, self._warn)
                written = commit.gather(records + small, values)
                checksums = commit.checksums(written)
                with channel.agreed("completing the files"):
                    writer.complete(checksums)
                sizes = {**writer.sizes(), **{record.path: record.nbytes for record in small}}
                commit.take_name(sizes, written, absent, request.latest)
        if channel.rank == 0:
            announce(logger, f"universal checkpoint {report}")
        return report

    def _compare(self, channel: Channel, prepared: _Prepared, snapshot: Snapshot) -> None:
        """Judge copies that have drifted apart, and padding rows that are words."""
        drifts = prepared.comparison.run(channel, snapshot.values, self._window_bytes)
        judge(drifts, self._context.config.on_drift, speaks=channel.rank == 0)
        beyond = words_beyond(channel, prepared.plan.subjects, snapshot.values)
        if beyond is not None and channel.rank == 0:
            self._warn(beyond)

    @property
    def _window_bytes(self) -> int:
        return self._context.config.bucket_mb * _MIB

    def _current(self, request: ExportRequest, absent: Collection[str]) -> _Prepared:
        """What the last export prepared, or anew if anything that it depends on has changed on any rank."""
        context, channel = self._context, self._context.channel
        with channel.agreed("describing the model"):
            info = request.client_state.get(UNIVERSAL_CHECKPOINT_INFO) or context.state.client_info()
            description = context.describe(info, absent)
        survey = context.survey(description, context.state.first_of_replicas)
        shared_files = _files_may_be_shared(
            channel, context.config.shared_files, request.directory.parent, self._remark
        )
        last = self._prepared
        if last is None or survey is not last.survey or shared_files != last.dealing.shared_files:
            if channel.rank == 0:
                for warning in survey.warnings:
                    logger.warning("%s", warning)
            self._prepared = _prepare(channel, context.shared_memory(), survey, shared_files, self._remark)
        assert self._prepared is not None
        return self._prepared

    def _writer(
        self, channel: Channel, prepared: _Prepared, snapshot: Snapshot, staging: storage.Staging
    ) -> TensorWriter:
        near = sorted({channel.rank, *prepared.near})
        with channel.agreed("preparing to write"):
            turn = near.index(channel.rank) / len(near)
            writer = TensorWriter(prepared.plan, prepared.frames, staging, snapshot.values, turn)
            if prepared.rows is not None:
                prepared.rows.publish(snapshot.values)
        return writer

    def _write_tensors(
        self, channel: Channel, prepared: _Prepared, snapshot: Snapshot, writer: TensorWriter
    ) -> list[storage.ExtentRecord]:
        """Write in place what can be, and meanwhile put the rest together."""
        rows, own = prepared.rows, source_of(snapshot.values)

        def source(transfer: Transfer) -> tuple[torch.Tensor, int]:
            if transfer.sender == channel.rank:
                return own(transfer)
            assert rows is not None
            return rows.find(transfer)

        with channel.agreed("writing"):
            writer.start()
            Exchange(channel, source, writer.lay, prepared.near, self._window_bytes).run(writer.transfers())
            return writer.finish()
        raise AssertionError("agreed() lets no failed body pass")

    def _remark(self, text: str) -> None:
        """Say something once, on rank 0."""
        if self._context.channel.rank == 0 and text not in self._warned:
            self._warned.add(text)
            announce(logger, text)

    def _warn(self, text: str, key: str | None = None) -> None:
        """Warn once for a key, by default the text."""
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            logger.warning("%s", text)


def _prepare(channel: Channel, memory: SharedMemory, survey: Survey, shared_files: bool, remark: Remark) -> _Prepared:
    """Plan anew. Collective.

    Args:
        channel: connects all ranks.
        memory: that ranks of one host share.
        survey: of all ranks.
        shared_files: whether several ranks may write parts of one file.
        remark: takes why ranks of one host cannot share memory.

    Raises:
        PlanError: no rank holds some element of a parameter.
    """
    with channel.agreed("planning the export"):
        subjects = survey.subjects()
        dealing = Dealing.of(total_bytes(subjects), channel.world, shared_files)
        plan = make_plan(subjects, channel.rank, dealing)
        comparison = Comparison(subjects, channel.rank)
        rows = SharedRows(plan, memory)
    reason = memory.reason
    if channel.sum_int64(torch.tensor(int(not rows.reserve()))).item():
        reason = "there is too little memory that they could share"
    if reason is not None:
        remark(f"what ranks of one host need of each other travels as messages: {reason}.")
    written, sent = zip(*channel.all_gather_ints([plan.bytes_written, plan.bytes_sent]), strict=True)
    shared = rows if reason is None else None
    return _Prepared(survey, dealing, plan, Frames(subjects), comparison, shared, written, sent)


def _files_may_be_shared(channel: Channel, choice: str, directory: Path, remark: Remark) -> bool:
    """Whether several ranks may write parts of one file. Collective.

    Args:
        channel: connects all ranks.
        choice: of the configuration, see ``ExportConfig.shared_files``.
        directory: in which the files will be.
        remark: takes why not.
    """
    if choice != "auto":
        return choice == "always"
    reason: str | None = None
    with channel.agreed(f"looking at {directory}"):
        if channel.rank == 0:
            reason = storage.one_writer_reason(directory)
    reason = channel.broadcast(reason, 0)
    if reason is not None:
        remark(f"every file is written by one rank: {reason}.")
    return reason is None


def _write_small_files(staging: storage.Staging, files: Iterable[tuple[str, Any]]) -> list[storage.ExtentRecord]:
    """Write files, by name and content, several at a time: most of that time is spent waiting for the disk."""
    writes, made = [], dict[int, tuple[Any, memoryview]]()  # the steps of a group's parameters are one object
    with ThreadPoolExecutor(_SMALL_FILES, thread_name_prefix="megads_ucp-small") as threads:
        for name, value in files:
            if id(value) not in made:
                made[id(value)] = value, storage.serialized(value)
            data = made[id(value)][1]
            writes.append(threads.submit(storage.write_bytes, staging.path(name), data, root=staging.directory))
    records = [write.result() for write in writes]
    for record in records:
        if record.path == OPTIMIZER_STATE:  # a resume must be able to read it without running code
            storage.read_object(staging.path(record.path), PICKLED_CLASSES)
    return records


@contextmanager
def _staged(
    channel: Channel, request: ExportRequest, subjects: Sequence[Subject], report: ExportReport
) -> Iterator[storage.Staging]:
    """A staging directory with all directories in it, made once all names are known to do, that every rank has seen.

    It is gone when the body is left, by the commit or because something failed.
    """
    target, run_id = request.directory, channel.broadcast(uuid.uuid4().hex, 0)
    staging: storage.Staging | None = None
    try:
        with report.timed("stage"), channel.agreed(f"preparing {target}"):
            if channel.rank == 0:
                names = {subject.name: [state.name for state in subject.states] for subject in subjects}
                storage.check_names(storage.Staging(target, run_id).directory, names)
                staging = storage.Staging.create(target, run_id, request.latest)
        with report.timed("stage"), channel.agreed(f"preparing {target}"):
            joined = storage.Staging.join(target, run_id)
            joined.make_directories(storage.share(one_file_of_each(subjects), channel.rank, channel.world))
        yield staging or joined
    except BaseException:
        if staging is not None:
            staging.discard()
        raise
