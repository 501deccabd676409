# SPDX-License-Identifier: Apache-2.0
"""The exchange on real gloo ranks, down to the files: bits, failures of one rank, and its death."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.affine import segmented_map

from megads_ucp import storage
from megads_ucp.comm.channel import Channel
from megads_ucp.comm.exchange import Exchange
from megads_ucp.errors import ChannelError, Disagreement, UniversalCheckpointError
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.plan.save import make_plan
from megads_ucp.plan.types import Extent, Plan, Transfer
from megads_ucp.save.writer import ExtentWriter, file_name
from tests.support.jobs import ADAM, MIXED, Job, replicated, values_of
from tests.support.ranks import run_ranks

Source = Callable[[Transfer, Extent], torch.Tensor]

PATIENT = 60.0  # minutes; longer than a job may take, so that one that waits for it fails


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


def true_source(plan: Plan) -> Source:
    def source(transfer: Transfer, extent: Extent) -> torch.Tensor:
        subject, fragment = plan.subjects[extent.subject], transfer.holding.fragment
        shard = values_of(subject, extent.state, seed=extent.subject).shards[transfer.holding.tp_rank]
        return shard[fragment.param_start : fragment.param_start + fragment.numel]

    return source


def export(channel: Channel, plan: Plan, target: Path, source: Source) -> list[storage.ExtentRecord]:
    """What the exporter does between the plan and the manifest."""
    with channel.agreed("preparing"):
        if channel.rank == 0:
            storage.Staging.create(target, "run")
    staging, writer = storage.Staging.join(target, "run"), ExtentWriter()
    sink = writer.prepare(plan, channel.rank, staging)
    with channel.agreed("writing"):
        try:
            Exchange(channel, plan, source, sink.lay, sink.arrived).run()
            records = sink.finish()
        finally:
            sink.abandon()
    gathered = channel.gather(records)
    split = {} if gathered is None else storage.split_crc32(itertools.chain.from_iterable(gathered))
    split = channel.broadcast(split, 0)
    for name, frame in writer.split_frames(plan):
        storage.write_frame(staging.path(name), frame, split[name])
    channel.agree(None, "completing")
    return records


@dataclass(frozen=True)
class Failure:
    """How an export failed on a rank."""

    error: type[BaseException]
    message: str


def failing_export(
    target: Path, job: Job, wrap: Callable[[Plan, Source, int], Source], timeout_minutes: float = PATIENT
) -> Failure:
    channel, plan = Channel(timeout_minutes), make_plan(job.subjects(), job.world, 256)
    source = wrap(plan, true_source(plan), channel.rank)
    with pytest.raises(UniversalCheckpointError) as failure:
        export(channel, plan, target, source)
    return Failure(failure.type, str(failure.value))


# ---- what arrives ----


@pytest.mark.parametrize(("tp_degree", "degree"), [(1, 3), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize(("bucket", "least_rounds"), [(64, 15), (1 << 20, 1)])
def test_every_file_holds_the_values_of_the_ranks(tmp_path, tp_degree, degree, bucket, least_rounds):
    job = model(tp_degree, degree)
    target = tmp_path / "checkpoint"
    plan = make_plan(job.subjects(), job.world, bucket)
    assert plan.rounds >= least_rounds

    def body() -> int:
        records = export(Channel(PATIENT), plan, target, true_source(plan))
        return sum(record.nbytes for record in records)

    written = run_ranks(body, job.world)

    assert sum(written) == sum(extent.nbytes for extent in plan.extents)
    assert any(extent.start for extent in plan.extents) == (job.world > 2), "the embedding should have several writers"
    for extent in plan.extents:
        if extent.start == 0:
            subject = plan.subjects[extent.subject]
            values = values_of(subject, extent.state, seed=extent.subject)
            path = storage.Staging(target, "run").path(file_name(plan, extent))
            loaded = torch.load(path, weights_only=False)["param"]
            assert loaded.dtype == extent.state.written
            assert torch.equal(loaded, values.full.view(subject.layout.shape)), path


def test_an_engine_can_export_again_over_the_same_channel(tmp_path):
    job = model(2, 1)

    def body() -> list[int]:
        channel, plan = Channel(PATIENT), make_plan(job.subjects(), job.world, 128)
        return [len(export(channel, plan, tmp_path / name, true_source(plan))) for name in ("first", "second")]

    for first, second in run_ranks(body, 2):
        assert first == second > 0


# ---- failures ----


def test_a_source_that_fails_on_one_rank_fails_the_export_on_all_and_nobody_hangs(tmp_path):
    def broken(plan: Plan, source: Source, rank: int) -> Source:
        def failing(transfer: Transfer, extent: Extent) -> torch.Tensor:
            if rank == 1 and plan.subjects[extent.subject].name == "embedding":
                raise KeyError("the optimizer was replaced")
            return source(transfer, extent)

        return failing

    for failure in run_ranks(lambda: failing_export(tmp_path / "checkpoint", model(2, 2), broken), 4):
        assert failure.error is Disagreement
        assert "writing failed" in failure.message
        assert "rank 1: KeyError: 'the optimizer was replaced'" in failure.message


def test_a_lay_that_fails_on_one_rank_fails_the_export_on_all_and_nobody_hangs():
    job = model(2, 2)

    def body() -> str:
        channel, plan = Channel(PATIENT), make_plan(job.subjects(), job.world, 64)

        def lay(transfer: Transfer, values: list[torch.Tensor]) -> None:
            if channel.rank == 3:
                raise MemoryError("no room")

        with pytest.raises(Disagreement) as failure, channel.agreed("writing"):
            Exchange(channel, plan, true_source(plan), lay, lambda extent: None).run()
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
    def deadly(plan: Plan, source: Source, rank: int) -> Source:
        calls = 0

        def killing(transfer: Transfer, extent: Extent) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if rank == 2 and calls == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            return source(transfer, extent)

        return killing

    body = lambda: failing_export(tmp_path / "checkpoint", model(2, 2), deadly)  # noqa: E731
    failures = run_ranks(body, 4, expect_death={2: signal.SIGKILL})

    for survivor in (failures[0], failures[1], failures[3]):
        assert survivor.error is ChannelError
        assert "rank 2" in survivor.message


@pytest.mark.slow
def test_a_rank_that_is_stuck_fails_the_others_when_the_timeout_has_passed(tmp_path):
    failed = [tmp_path / "0", tmp_path / "2"]

    def stuck(plan: Plan, source: Source, rank: int) -> Source:
        def waiting(transfer: Transfer, extent: Extent) -> torch.Tensor:
            while rank == 1 and not all(file.exists() for file in failed):
                time.sleep(0.01)
            return source(transfer, extent)

        return waiting

    def body() -> Failure:
        # A time that nothing else here comes near.
        failure = failing_export(tmp_path / "checkpoint", model(3, 1, ADAM[:1]), stuck, timeout_minutes=0.5)
        (tmp_path / str(dist.get_rank())).touch()
        return failure

    failures = run_ranks(body, 3)

    for rank in (0, 2):
        assert failures[rank].error is ChannelError
        assert "rank 1" in failures[rank].message
