# SPDX-License-Identifier: Apache-2.0
"""Plans against a simulation of the whole exchange on tensors, and what is promised of them: balance, order, bounds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megads_ucp.errors import PlanError
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.partition import Fragment
from megads_ucp.layout.rule import Rule
from megads_ucp.plan.save import make_plan
from megads_ucp.plan.types import Extent, Plan, Transfer
from tests.support.drawn_jobs import BUCKETS, jobs
from tests.support.jobs import ADAM, Job, Values, gpt, replicated, values_of

patient = settings(deadline=None, max_examples=60)  # a busy machine is no failure


# ---- the simulation ----


def simulate(plan: Plan, extent: Extent, transfers: list[Transfer], values: Values) -> torch.Tensor:
    """What the extent's writer has once it has laid its transfers down, as writer.Sink does."""
    layout = plan.subjects[extent.subject].layout
    buffer = torch.full((extent.numel,), torch.nan, dtype=extent.state.written)
    for transfer in transfers:
        fragment = transfer.holding.fragment
        held = values.shards[transfer.holding.tp_rank][fragment.param_start : fragment.param_start + fragment.numel]
        for box in transfer.boxes:
            value, target = box.shard_view(held, fragment.param_start), box.full_view(buffer, extent.start)
            if transfer.copy_index == 0:
                assert target.isnan().all(), "laid down twice"
                target.copy_(value)
            else:
                target.add_(value)
    return buffer.div_(layout.tp_degree) if layout.averaged else buffer


def by_extent(plan: Plan) -> dict[int, list[Transfer]]:
    found: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in plan.transfers:
        found[transfer.extent].append(transfer)
    return found


# ---- any job ----


@patient
@given(jobs(), BUCKETS)
def test_every_file_comes_out_bit_equal(job, bucket):
    plan = make_plan(job.subjects(), job.world, bucket)
    arriving = by_extent(plan)

    for index, subject in enumerate(plan.subjects):
        for seed, state in enumerate(subject.states):
            values = values_of(subject, state, seed)
            mine = [(i, e) for i, e in enumerate(plan.extents) if (e.subject, e.state) == (index, state)]
            written = torch.cat([simulate(plan, extent, arriving[i], values) for i, extent in mine])
            assert torch.equal(written, values.full), (subject.name, state.name)


@patient
@given(jobs(), BUCKETS)
def test_extents_tile_each_file(job, bucket):
    plan = make_plan(job.subjects(), job.world, bucket)
    ends: dict[tuple[int, str], int] = {}
    for extent in plan.extents:
        key = (extent.subject, extent.state.name)
        assert extent.start == ends.get(key, 0)
        assert extent.numel > 0 or key not in ends
        assert 0 <= extent.writer < job.world
        ends[key] = extent.stop

    subjects = enumerate(plan.subjects)
    assert ends == {(index, state.name): s.layout.numel for index, s in subjects for state in s.states}


@patient
@given(jobs(), BUCKETS)
def test_no_rank_sends_or_receives_more_than_a_bucket_in_a_round(job, bucket):
    plan = make_plan(job.subjects(), job.world, bucket)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    for rank in range(job.world):
        for transfer in plan.outgoing(rank):
            assert transfer.holding.rank == rank and plan.writer(transfer) != rank
            itemsize = plan.extents[transfer.extent].state.live.itemsize
            assert 0 <= plan.size(transfer) - transfer.numel * itemsize < 8
            sent[rank, transfer.round] += plan.size(transfer)
            received[plan.writer(transfer), transfer.round] += plan.size(transfer)

    assert max([*sent.values(), *received.values()], default=0) <= bucket
    assert plan.bytes_moved == sum(sent.values())
    assert plan.rounds == max((transfer.round for transfer in plan.transfers), default=-1) + 1


@patient
@given(jobs(), BUCKETS)
def test_a_writer_takes_rounds_and_copies_in_order_and_peers_agree_on_the_order(job, bucket):
    plan = make_plan(job.subjects(), job.world, bucket)
    for writer in range(job.world):
        incoming = plan.incoming(writer)
        assert [t.round for t in incoming] == sorted(t.round for t in incoming)
        for extent in {transfer.extent for transfer in incoming}:
            copies = [transfer.copy_index for transfer in incoming if transfer.extent == extent]
            assert copies == sorted(copies)
        for sender in range(job.world):
            expected = [t for t in incoming if t.holding.rank == sender and sender != writer]
            assert [t for t in plan.outgoing(sender) if plan.writer(t) == writer] == expected


@patient
@given(jobs(), BUCKETS)
def test_an_element_arrives_once_and_of_averaged_ones_every_copy_in_rank_order(job, bucket):
    plan = make_plan(job.subjects(), job.world, bucket)
    arriving = by_extent(plan)
    for index, extent in enumerate(plan.extents):
        subject = plan.subjects[extent.subject]
        layout = subject.layout
        copies = torch.zeros(extent.numel, dtype=torch.int64)
        for transfer in arriving[index]:
            assert transfer.numel == sum(box.numel for box in transfer.boxes) > 0
            for box in transfer.boxes:
                view = box.full_view(copies, extent.start)
                assert (view == transfer.copy_index).all()  # copy n finds n copies there
                view += 1
                if layout.averaged:
                    assert transfer.holding.tp_rank == transfer.copy_index
        assert (copies == (layout.tp_degree if layout.averaged else 1)).all()
        if not subject.owned and not layout.averaged:
            assert all(t.holding.tp_rank == box.holders[0] for t in arriving[index] for box in t.boxes)


@patient
@given(jobs(), BUCKETS)
def test_writers_are_balanced_as_far_as_elements_can_be_cut(job, bucket):
    plan = make_plan(job.subjects(), job.world, bucket)
    total = sum(extent.nbytes for extent in plan.extents)
    assert sum(plan.bytes_by_writer.values()) == total
    mean = total / job.world
    largest_element = max(state.written.itemsize for state in job.states)
    assert max(plan.bytes_by_writer.values(), default=0) <= max(1.2 * mean, mean + largest_element)
    assert plan.imbalance(job.world) == pytest.approx(max(plan.bytes_by_writer.values()) / mean if total else 1.0)


@patient
@given(jobs(), BUCKETS)
def test_the_same_job_has_the_same_plan(job, bucket):
    assert make_plan(job.subjects(), job.world, bucket) == make_plan(job.subjects(), job.world, bucket)


@patient
@given(jobs(), st.data())
def test_an_element_that_nobody_holds_is_an_error_that_names_it(job, data):
    subjects = list(job.subjects())
    held = [index for index, subject in enumerate(subjects) if subject.holdings]
    assume(held)
    index = data.draw(st.sampled_from(held))
    subject = subjects[index]
    lost = data.draw(st.sampled_from(subject.holdings))
    subjects[index] = replace(subject, holdings=tuple(h for h in subject.holdings if h is not lost))

    with pytest.raises(PlanError, match=rf"{subject.name}: .*tensor-parallel rank {lost.tp_rank}'s shard .*by no rank"):
        make_plan(subjects, job.world, 1 << 20)


# ---- one job ----


def test_a_missing_fragment_is_named_with_its_neighbours():
    job = Job((replicated("norm.weight", 12, 1),), (), ADAM, tp_degree=1, degree=3)
    (subject,) = job.subjects()

    holed = replace(subject, holdings=(subject.holdings[0], subject.holdings[2]))
    with pytest.raises(PlanError, match=r"norm\.weight: elements \[4, 8\) .*rank 0's fragment and rank 2's fragment"):
        make_plan([holed], 3, 64)
    short = replace(subject, holdings=subject.holdings[:2])
    with pytest.raises(PlanError, match=r"\[8, 12\) .* held by no rank, between rank 1's fragment and the end"):
        make_plan([short], 3, 64)


def test_elements_held_twice_or_beyond_the_shard_are_an_error():
    job = Job((replicated("norm.weight", 12, 1),), (), ADAM, tp_degree=1, degree=3)
    (subject,) = job.subjects()
    moved = replace(subject.holdings[1], fragment=Fragment("norm.weight", 4, 3, 0))
    long = replace(subject.holdings[2], fragment=Fragment("norm.weight", 5, 8, 0))

    with pytest.raises(PlanError, match=r"elements \[3, 4\) .* held twice or outside"):
        make_plan([replace(subject, holdings=(subject.holdings[0], moved, subject.holdings[2]))], 3, 64)
    with pytest.raises(PlanError, match=r"elements \[12, 13\) .* held twice or outside"):
        make_plan([replace(subject, holdings=(*subject.holdings[:2], long))], 3, 64)


def test_a_bucket_that_holds_no_element_is_an_error():
    job = Job((replicated("norm.weight", 12, 1),), (), ADAM, tp_degree=1, degree=3)
    with pytest.raises(PlanError, match="bucket of 7 bytes"):
        make_plan(job.subjects(), job.world, 7)


def test_a_writers_own_copy_of_a_replica_is_taken_and_nothing_travels():
    job = Job((replicated("norm.weight", 8, 2),), (), ADAM[:1], tp_degree=2, degree=1)
    plan = make_plan(job.subjects(), job.world, 64)

    for extent in plan.extents:
        first = next(t for t in plan.transfers if plan.extents[t.extent] is extent and t.copy_index == 0)
        assert first.holding.rank == extent.writer
    assert plan.bytes_moved == 0


def test_what_stays_on_its_rank_takes_no_room_in_a_bucket():
    plan = make_plan(Job((replicated("norm.weight", 1000, 1),), (), ADAM, tp_degree=1, degree=1).subjects(), 1, 64)
    assert len(plan.transfers) > 100 and plan.rounds == 1 and plan.bytes_moved == 0


def test_a_file_goes_to_the_rank_that_holds_most_of_it_while_that_has_room():
    layouts = tuple(replicated(name, numel, 1) for name, numel in [("a", 11), ("b", 4), ("c", 9)])
    plan = make_plan(Job(layouts, (), ADAM, tp_degree=1, degree=2).subjects(), 2, 64)  # rank 0 holds a and 1 of b's 4

    writers = {(plan.subjects[extent.subject].name, extent.writer) for extent in plan.extents}
    assert writers == {("a", 0), ("b", 1), ("c", 1)}
    assert plan.bytes_moved == 3 * 8  # one element of each state of b, rounded up


def test_a_frozen_parameter_that_is_averaged_gets_all_copies():
    layout = build_layout("frozen", Rule("averaged", "test"), [(6,)] * 3)
    job = Job((replicated("norm.weight", 8, 3),), (layout,), ADAM, tp_degree=3, degree=2)
    plan = make_plan(job.subjects(), job.world, 64)

    copies = {
        index: [(t.copy_index, t.holding.tp_rank) for t in transfers]
        for index, transfers in by_extent(plan).items()
        if plan.subjects[plan.extents[index].subject].name == "frozen"
    }
    assert copies and all(order == [(0, 0), (1, 1), (2, 2)] for order in copies.values())


def test_a_parameter_without_elements_has_one_extent_and_no_transfers():
    layout = build_layout("empty", Rule("split", "test", dim=0), [(0, 4)] * 2)
    plan = make_plan(Job((layout,), (), ADAM, tp_degree=2, degree=2).subjects(), 4, 64)

    assert [(extent.start, extent.stop) for extent in plan.extents] == [(0, 0)] * 3
    assert plan.transfers == () and plan.rounds == 0 and plan.bytes_moved == 0 and plan.imbalance(4) == 1.0


# ---- models ----


@dataclass(frozen=True)
class Figures:
    """What there is to say of a plan at a glance."""

    imbalance: float
    moved: float  # of all bytes written
    least: float  # the same, were each file written whole by whoever holds most of it
    chance: float  # the same, were each file written whole by a rank drawn by lot, on average
    small_and_split: int  # files of less than a tenth of the mean share with several writers


def figures(plan: Plan, world: int) -> Figures:
    total = sum(plan.bytes_by_writer.values())
    mean = total / world
    least = chance = 0.0
    for subject in plan.subjects:
        held: dict[int, int] = defaultdict(int)
        for holding in subject.holdings:
            held[holding.rank] += holding.fragment.numel
        nbytes = sum(state.live.itemsize for state in subject.states)
        least += (subject.layout.numel - max(held.values())) * nbytes
        chance += (subject.layout.numel - sum(held.values()) / world) * nbytes
    split = {(e.subject, e.state.name) for e in plan.extents if e.start}
    small = [s for s, state in split if plan.subjects[s].layout.numel * 4 < mean / 10]
    return Figures(plan.imbalance(world), plan.bytes_moved / total, least / total, chance / total, len(small))


def check_scale(job: Job, bucket: int = 32 << 20) -> tuple[Plan, Figures]:
    plan = make_plan(job.subjects(), job.world, bucket)
    found = figures(plan, job.world)
    print(found, len(plan.extents), "extents", len(plan.transfers), "transfers", plan.rounds, "rounds")
    elements = {(i, s.name): subject.layout.numel for i, subject in enumerate(plan.subjects) for s in subject.states}
    for extent in plan.extents:
        elements[extent.subject, extent.state.name] -= extent.numel
    assert not any(elements.values())
    assert found.imbalance <= 1.2
    assert found.moved <= found.chance
    assert found.small_and_split == 0
    return plan, found


@pytest.mark.parametrize(("tp_degree", "degree"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_small_clusters(tp_degree, degree):
    plan, found = check_scale(gpt(12, 768, 2048, 32000, tp_degree, degree))
    assert all(extent.start == 0 for extent in plan.extents), "no file is as large as a share, so none is cut"
    assert found.moved == found.least, "no plan with one writer per file moves less"


def test_a_file_larger_than_a_share_has_several_writers_and_others_have_one():
    plan, _ = check_scale(gpt(2, 256, 512, 32000, 2, 16))
    writers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for extent in plan.extents:
        writers[plan.subjects[extent.subject].name, extent.state.name].add(extent.writer)
        assert extent.start * extent.state.written.itemsize % 4096 == 0
    assert all(len(ranks) > 1 for (name, _), ranks in writers.items() if name == "embedding")
    assert sum(len(ranks) > 1 for (name, _), ranks in writers.items() if "norm" in name) == 0


@pytest.mark.slow
def test_768_ranks():
    check_scale(gpt(48, 6144, 16384, 50304, 8, 96))


@pytest.mark.slow
def test_8192_ranks():
    plan, _ = check_scale(gpt(80, 8192, 28672, 128256, 8, 1024))
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for transfer in plan.transfers:
        if transfer.holding.rank != plan.writer(transfer):
            sent[transfer.round, transfer.holding.rank] += plan.size(transfer)
    assert max(sent.values()) <= 32 << 20


@pytest.mark.slow
def test_65536_ranks_of_which_most_hold_only_padding_or_a_sliver():
    job = gpt(1, 64, 128, 512, 1, 65536)
    plan = make_plan(job.subjects(), job.world, 32 << 20)
    total = sum(plan.bytes_by_writer.values())
    assert total == 4 * 3 * sum(subject.layout.numel for subject in plan.subjects)
    assert max(plan.bytes_by_writer.values()) <= total / job.world + 4
    assert max(h.rank for subject in plan.subjects for h in subject.holdings) < job.world
