# SPDX-License-Identifier: Apache-2.0
"""The exchange on real gloo ranks, down to the files: bits, failures of one rank, and its death."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.affine import segmented_map

from megads_ucp import storage
from megads_ucp.comm.channel import Channel
from megads_ucp.comm.exchange import Exchange
from megads_ucp.comm.shared_memory import SharedMemory
from megads_ucp.errors import ChannelError, Disagreement, UniversalCheckpointError
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.plan.save import SavePlan, make_plan, total_bytes
from megads_ucp.plan.shares import Dealing
from megads_ucp.plan.types import Holding, StateSpec, Subject, Transfer
from megads_ucp.save.frames import Frames, file_name
from megads_ucp.save.replicas import Values, source_of
from megads_ucp.save.shared_rows import SharedRows
from megads_ucp.save.writer import TensorWriter
from megads_ucp.storage.format import state_file
from tests.support.jobs import ADAM, MIXED, Job, replicated, values_of
from tests.support.ranks import run_ranks

PATIENT = 60.0  # minutes; longer than a job may take, so that one that waits for it fails

SMALL = Dealing(grain_bytes=40)


def model(tp_degree: int, degree: int, states=MIXED) -> Job:
    """One parameter of each kind; the embedding is larger than a rank's share, and "empty" has no elements."""
    fused = segmented_map([3 * tp_degree + 2, 5], [(3 * tp_degree, False), (2, True)], 0, tp_degree, [[3] * tp_degree])
    owned = (
        build_layout("embedding", Rule("split", "test", dim=0, vocabulary_size=61), [(64 // tp_degree, 9)] * tp_degree),
        build_layout("row", Rule("split", "test", dim=1), [(6, 4)] * tp_degree),
        build_layout("halves", Rule("split", "test", dim=0, style="n_sub_params"), [(6, 5)] * tp_degree),
        replicated("norm", 13, tp_degree),
        build_layout("router", Rule("averaged", "test"), [(3, 4)] * tp_degree),
        build_layout("fused", Rule("affine", "test", affine=fused.to_dict()), [(5, 5)] * tp_degree),
        build_layout("empty", Rule("split", "test", dim=0), [(0, 3)] * tp_degree),
    )
    unowned = (replicated("buffer", 7, tp_degree), build_layout("frozen", Rule("averaged", "test"), [(5,)] * tp_degree))
    return Job(owned, unowned, states, tp_degree, degree)


def true_values(subjects: tuple[Subject, ...]) -> Values:
    """What a rank holds."""
    of_name = {subject.name: (number, subject) for number, subject in enumerate(subjects)}

    def values(holding: Holding, state: StateSpec) -> torch.Tensor:
        number, subject = of_name[holding.fragment.name]
        shard = values_of(subject, state, seed=number).shards[holding.tp_rank]
        return shard[holding.fragment.param_start :][: holding.fragment.numel]

    return values


def export(
    channel: Channel, plan: SavePlan, target: Path, values: Values, window_bytes: int = 1 << 20, shared: bool = False
) -> list[storage.ExtentRecord]:
    """What the exporter does between the plan and the manifest."""
    rows = SharedRows(plan, SharedMemory(channel, shared))
    with channel.agreed("preparing"):
        if channel.rank == 0:
            storage.Staging.create(target, "run")
        assert rows.reserve()
        rows.publish(values)
    staging = storage.Staging.join(target, "run")
    staging.make_directories(file_name(plan.subjects, piece.extent) for piece in plan.writes)
    writer = TensorWriter(plan, Frames(plan.subjects), staging, values, turn=channel.rank / channel.world)

    def source(transfer: Transfer) -> tuple[torch.Tensor, int]:
        if transfer.sender != channel.rank:
            return rows.find(transfer)
        return values(transfer.holding, transfer.extent.state), transfer.holding.fragment.param_start

    with closing(writer):
        with channel.agreed("writing"):
            writer.start()
            Exchange(channel, source, writer.lay, rows.peers, window_bytes).run(writer.transfers())
            records = writer.finish()
        gathered = channel.gather(records)
        split = {} if gathered is None else storage.split_crc32(itertools.chain.from_iterable(gathered))
        writer.complete(channel.broadcast(split, 0))
        channel.agree(None, "completing")
    return records


@dataclass(frozen=True)
class Failure:
    """How an export failed on a rank."""

    error: type[BaseException]
    message: str


def failing_export(
    target: Path, job: Job, wrap: Callable[[Values, int], Values], timeout_minutes: float = PATIENT
) -> Failure:
    channel = Channel(timeout_minutes)
    plan = make_plan(job.subjects(), channel.rank, SMALL)
    with pytest.raises(UniversalCheckpointError) as failure:
        export(channel, plan, target, wrap(true_values(plan.subjects), channel.rank), window_bytes=64)
    return Failure(failure.type, str(failure.value))


# ---- what arrives ----


@pytest.mark.parametrize(("tp_degree", "degree"), [(1, 3), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize(("window", "shared"), [(8, False), (1 << 20, False), (8, True)])
def test_every_file_holds_the_values_of_the_ranks(tmp_path, tp_degree, degree, window, shared):
    job = model(tp_degree, degree)
    target = tmp_path / "checkpoint"
    subjects = job.subjects()

    def body() -> tuple[int, int]:
        channel = Channel(PATIENT)
        plan = make_plan(subjects, channel.rank, SMALL)
        records = export(channel, plan, target, true_values(subjects), window, shared)
        return sum(record.nbytes for record in records), sum(bool(piece.extent.start) for piece in plan.writes)

    written, later = zip(*run_ranks(body, job.world), strict=True)

    assert sum(written) == total_bytes(subjects)
    assert sum(later) > 3, "some files should have several writers"
    for number, subject in enumerate(subjects):
        for state in subject.states:
            values = values_of(subject, state, seed=number)
            path = storage.Staging(target, "run").path(state_file(subject.name, state.name))
            assert zipfile.ZipFile(path).testzip() is None
            loaded = torch.load(path, weights_only=False)["param"]
            assert loaded.dtype == state.written
            assert torch.equal(loaded, values.full.view(subject.layout.shape)), path


@pytest.mark.parametrize("shared", [False, True])
def test_an_engine_can_export_again_over_the_same_channel(tmp_path, shared):
    job = model(2, 1)

    def body() -> list[int]:
        channel = Channel(PATIENT)
        plan = make_plan(job.subjects(), channel.rank, SMALL)
        values = true_values(plan.subjects)
        return [len(export(channel, plan, tmp_path / name, values, shared=shared)) for name in ("first", "second")]

    for first, second in run_ranks(body, 2):
        assert first == second > 0


def test_files_that_wait_for_their_checksum_take_no_more_descriptors_than_there_are(tmp_path):
    layouts = tuple(build_layout(f"column{index}", Rule("split", "test", dim=0), [(6, 5)] * 2) for index in range(40))
    job = Job(layouts, (), ADAM, tp_degree=2, degree=1)

    def body() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40,) * 2)
        channel = Channel(PATIENT)
        plan = make_plan(job.subjects(), channel.rank, SMALL)
        export(channel, plan, tmp_path / "checkpoint", true_values(plan.subjects))

    run_ranks(body, 2)
    for number, subject in enumerate(job.subjects()):
        path = storage.Staging(tmp_path / "checkpoint", "run").path(state_file(subject.name, "exp_avg"))
        values = values_of(subject, ADAM[1], seed=number)
        assert torch.equal(torch.load(path)["param"], values.full.view(subject.layout.shape))


# ---- failures ----


def test_a_source_that_fails_on_one_rank_fails_the_export_on_all_and_nobody_hangs(tmp_path):
    def broken(values: Values, rank: int) -> Values:
        def failing(holding: Holding, state: StateSpec) -> torch.Tensor:
            if rank == 1 and sys._getframe(1).f_code.co_name == "source":
                raise KeyError("the optimizer was replaced")
            return values(holding, state)

        return failing

    for failure in run_ranks(lambda: failing_export(tmp_path / "checkpoint", model(2, 2), broken), 4):
        assert failure.error is Disagreement
        assert "writing failed" in failure.message
        assert "rank 1: KeyError: 'the optimizer was replaced'" in failure.message


def test_a_lay_that_fails_on_one_rank_fails_the_export_on_all_and_nobody_hangs():
    job = model(2, 2)

    def body() -> str:
        channel = Channel(PATIENT)
        plan = make_plan(job.subjects(), channel.rank, SMALL)
        values = true_values(plan.subjects)

        def lay(transfer: Transfer, boxes: list[torch.Tensor]) -> None:
            if channel.rank == 3:
                raise MemoryError("no room")

        transfers = [transfer for piece in plan.pieces for transfer in piece.transfers(64)]
        with pytest.raises(Disagreement) as failure, channel.agreed("writing"):
            Exchange(channel, source_of(values), lay).run(transfers)
        assert isinstance(failure.value.__cause__, MemoryError) == (channel.rank == 3)
        channel.agree(None, "the next step")  # the channel is still good
        return str(failure.value)

    assert run_ranks(body, 4) == ["writing failed. rank 3: MemoryError: no room"] * 4


def test_agreement_names_every_failed_rank():
    def body() -> str:
        channel = Channel(PATIENT)
        with channel.agreed("a step without failures"):
            pass
        with pytest.raises(Disagreement) as failure, channel.agreed("opening"):
            if channel.rank:
                raise OSError(f"disk {channel.rank} is full")
        return str(failure.value)

    assert (
        run_ranks(body, 3) == ["opening failed. rank 1: OSError: disk 1 is full; rank 2: OSError: disk 2 is full"] * 3
    )


@pytest.mark.slow
def test_a_rank_killed_during_the_exchange_fails_the_others_at_once(tmp_path):
    def deadly(values: Values, rank: int) -> Values:
        calls = 0

        def killing(holding: Holding, state: StateSpec) -> torch.Tensor:
            nonlocal calls
            calls += sys._getframe(1).f_code.co_name == "source"
            if rank == 2 and calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return values(holding, state)

        return killing

    body = lambda: failing_export(tmp_path / "checkpoint", model(2, 2), deadly)  # noqa: E731
    failures = run_ranks(body, 4, expect_death={2: signal.SIGKILL})

    for survivor in (failures[0], failures[1], failures[3]):
        assert survivor.error is ChannelError
        assert "rank 2" in survivor.message


@pytest.mark.slow
def test_a_rank_that_is_stuck_fails_the_others_when_the_timeout_has_passed(tmp_path):
    failed = [tmp_path / "0", tmp_path / "2"]

    def stuck(values: Values, rank: int) -> Values:
        def waiting(holding: Holding, state: StateSpec) -> torch.Tensor:
            in_exchange = sys._getframe(1).f_code.co_name == "source"
            while rank == 1 and in_exchange and not all(file.exists() for file in failed):
                time.sleep(0.01)
            return values(holding, state)

        return waiting

    def body() -> Failure:
        # A time that nothing else here comes near.
        failure = failing_export(tmp_path / "checkpoint", model(3, 1, ADAM[:1]), stuck, timeout_minutes=0.2)
        (tmp_path / str(dist.get_rank())).touch()
        return failure

    failures = run_ranks(body, 3)

    for rank in (0, 2):
        assert failures[rank].error is ChannelError
        assert "rank 1" in failures[rank].message
