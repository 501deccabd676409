# SPDX-License-Identifier: Apache-2.0
"""Plans of all ranks against a simulation of the whole export on tensors, and what is promised of them: bits, balance,
that ranks agree, and that nothing travels which need not."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megads_ucp.errors import PlanError
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.partition import FlatGroup, Member
from megads_ucp.layout.rule import Rule
from megads_ucp.plan.save import Piece, SavePlan, make_plan, total_bytes
from megads_ucp.plan.shares import Dealing
from megads_ucp.plan.types import ShardGroup, Subject, Transfer
from tests.support.drawn_jobs import jobs
from tests.support.jobs import ADAM, Job, Values, gpt, replicated, values_of

patient = settings(deadline=None, max_examples=40)  # a busy machine is no failure

DEALINGS = st.builds(Dealing, st.sampled_from([1, 8, 40, 1 << 20]), st.sampled_from([True, True, True, False]))
TILES = st.sampled_from([8, 24, 1 << 20])


def plans_of(job: Job, dealing: Dealing) -> list[SavePlan]:
    return [make_plan(job.subjects(), rank, dealing) for rank in range(job.world)]


def pieces_by_file(plans: list[SavePlan]) -> dict[tuple[int, str], list[Piece]]:
    """What all ranks write, by file, in the order of its elements."""
    found: dict[tuple[int, str], list[Piece]] = defaultdict(list)
    for piece in sorted((p for plan in plans for p in plan.writes), key=lambda piece: piece.extent.start):
        found[piece.extent.subject, piece.extent.state.name].append(piece)
    return found


# ---- the simulation ----


def written(subject: Subject, piece: Piece, values: Values, tile_bytes: int) -> torch.Tensor:
    """What the writer of a piece puts into the file, as TensorWriter does."""
    extent, layout = piece.extent, subject.layout
    buffer = torch.full((extent.numel,), torch.nan, dtype=extent.state.written)
    for transfer in piece.transfers(tile_bytes):
        fragment = transfer.holding.fragment
        held = values.shards[transfer.holding.tp_rank][fragment.param_start : fragment.param_start + fragment.numel]
        for box in transfer.boxes:
            assert transfer.extent.start <= box.full_span[0] and box.full_span[1] <= transfer.extent.stop
            value, target = box.shard_view(held, fragment.param_start), box.full_view(buffer, extent.start)
            if transfer.copy_index == 0:
                assert target.isnan().all(), "laid down twice"
                target.copy_(value)
            else:
                target.add_(value)
    if piece.in_place:
        boxes = sorted((box for part in piece.parts for box in part.boxes), key=lambda box: box.full_offset)
        spans = [box.full_span for box in boxes]
        assert [extent.start, *(stop for _, stop in spans)] == [*(start for start, _ in spans), extent.stop]
    return buffer.div_(layout.tp_degree) if layout.averaged else buffer


# ---- any job ----


@patient
@given(jobs(), DEALINGS, TILES)
def test_every_file_comes_out_bit_equal(job, dealing, tile_bytes):
    pieces = pieces_by_file(plans_of(job, dealing))
    for index, subject in enumerate(job.subjects()):
        for seed, state in enumerate(subject.states):
            values = values_of(subject, state, seed)
            parts = [written(subject, piece, values, tile_bytes) for piece in pieces[index, state.name]]
            assert torch.equal(torch.cat(parts), values.full), (subject.name, state.name)


@patient
@given(jobs(), DEALINGS)
def test_extents_tile_each_file_and_their_writers_hold_something_of_it(job, dealing):
    pieces = pieces_by_file(plans_of(job, dealing))
    for index, subject in enumerate(job.subjects()):
        for state in subject.states:
            extents = [piece.extent for piece in pieces[index, state.name]]
            assert extents[0].start == 0 and extents[-1].stop == subject.layout.numel
            assert all(one.stop == other.start for one, other in pairwise(extents))
            assert dealing.shared_files or len(extents) == 1
            holders = {holding.rank for holding in subject.holdings} or {0}
            assert {extent.writer for extent in extents} <= holders


@settings(deadline=None, max_examples=20)
@given(jobs(), DEALINGS, TILES)
def test_any_two_ranks_find_the_same_transfers_between_them_in_the_same_order(job, dealing, tile_bytes):
    plans = plans_of(job, dealing)
    by_rank: list[dict[tuple[int, int], list[Transfer]]] = [defaultdict(list) for _ in plans]
    for plan, between in zip(plans, by_rank, strict=True):
        for transfer in (t for piece in plan.pieces for t in piece.transfers(tile_bytes)):
            between[transfer.sender, transfer.receiver].append(transfer)
    for one, other in permutations(range(job.world), 2):
        assert by_rank[one][one, other] == by_rank[other][one, other]
    assert sum(plan.bytes_sent for plan in plans) == sum(
        transfer.nbytes
        for plan in plans
        for piece in plan.writes
        for transfer in piece.transfers(tile_bytes)
        if transfer.sender != plan.rank
    )


@patient
@given(jobs(), DEALINGS)
def test_an_element_arrives_once_and_of_averaged_ones_every_copy_in_rank_order(job, dealing):
    for plan in plans_of(job, dealing):
        for piece in plan.writes:
            subject, extent = plan.subjects[piece.extent.subject], piece.extent
            copies = torch.zeros(extent.numel, dtype=torch.int64)
            for part in piece.parts:
                assert part.numel == sum(box.numel for box in part.boxes) > 0
                for box in part.boxes:
                    view = box.full_view(copies, extent.start)
                    assert (view == part.copy_index).all()  # copy n finds n copies there
                    view += 1
                    if subject.layout.averaged:
                        assert part.holding.tp_rank == part.copy_index
                    elif not subject.owned:
                        assert part.holding.tp_rank == box.holders[0]
            assert (copies == (subject.layout.tp_degree if subject.layout.averaged else 1)).all()


@patient
@given(jobs(), DEALINGS)
def test_what_every_writer_holds_it_takes_from_itself(job, dealing):
    for plan in plans_of(job, dealing):
        for piece in plan.writes:
            subject = plan.subjects[piece.extent.subject]
            if not subject.owned or subject.layout.averaged or not piece.parts:
                continue
            own = subject.holding(plan.rank)
            assert own is not None
            held = torch.zeros(subject.layout.numel, dtype=torch.bool)
            for box in subject.layout.runs(own.tp_rank, own.fragment.param_start, own.fragment.numel):
                box.full_view(held, 0).fill_(True)
            for part in piece.parts:
                for box in part.boxes:
                    assert (box.full_view(held, 0) == (part.holding.rank == plan.rank)).all()


@patient
@given(jobs(), st.data())
def test_an_element_that_nobody_holds_is_an_error_that_names_it(job, data):
    subjects = list(job.subjects())
    held = [index for index, subject in enumerate(subjects) if subject.holdings]
    assume(held)
    index = data.draw(st.sampled_from(held))
    subject = subjects[index]
    lost = data.draw(st.sampled_from(subject.shards))
    others = tuple(shard for shard in subject.shards if shard is not lost)
    subjects[index] = replace(subject, shards=others)
    assume(others)

    with pytest.raises(PlanError, match=rf"{subject.name}: .*tensor-parallel rank {lost.tp_rank}'s shard .*by no rank"):
        plans_of_subjects(subjects, job.world)


def plans_of_subjects(subjects: list[Subject], world: int) -> list[SavePlan]:
    return [make_plan(subjects, rank, Dealing(8)) for rank in range(world)]


# ---- one job ----


def held_as(*numels: int) -> Subject:
    """norm.weight of 12 elements, of which so many are in the flat buffer of each of some ranks."""
    flat = FlatGroup((Member("norm.weight", sum(numels), 0),), sum(numels), len(numels))
    return Subject(replicated("norm.weight", 12, 1), ADAM, (ShardGroup(0, 0, flat, tuple(range(len(numels)))),))


def test_a_shard_that_is_not_held_to_its_end_or_beyond_it_is_an_error():
    with pytest.raises(
        PlanError, match=r"norm\.weight: elements \[8, 12\) .* by no rank, between rank 1's fragment and"
    ):
        plans_of_subjects([held_as(4, 4)], 2)
    with pytest.raises(PlanError, match=r"elements \[12, 15\) .* held twice or outside"):
        plans_of_subjects([held_as(5, 5, 5)], 3)


def test_copies_are_dealt_out_to_all_who_hold_one_and_nothing_travels():
    job = Job((replicated("norm.weight", 8, 2),), (), ADAM[:1], tp_degree=2, degree=1)
    plans = plans_of(job, Dealing(8))
    assert [plan.bytes_written for plan in plans] == [16, 16]
    assert [plan.bytes_sent for plan in plans] == [0, 0]


def test_a_small_file_has_one_writer_and_copies_of_small_ones_take_turns():
    layouts = tuple(replicated(f"norm{index}", 16, 2) for index in range(40))
    plans = plans_of(Job(layouts, (), ADAM[:1], tp_degree=2, degree=1), Dealing(1 << 10))
    assert sum(len(plan.writes) for plan in plans) == 40
    assert sorted(len(plan.writes) for plan in plans) == [19, 21]


def test_a_small_piece_goes_to_the_rank_that_writes_the_next_one_and_the_last_to_the_one_before():
    layouts = tuple(replicated(name, numel, 1) for name, numel in [("a", 11), ("b", 40), ("c", 9)])
    plans = plans_of(Job(layouts, (), ADAM[:1], tp_degree=1, degree=5), Dealing(4 * 4))  # partitions of 12 elements
    extents = [piece.extent for piece in pieces_by_file(plans)[1, "fp32"]]
    assert [(e.start, e.stop, e.writer) for e in extents] == [(0, 13, 1), (13, 25, 2), (25, 40, 3)]


def test_a_column_parallel_weight_is_written_where_it_lies():
    layout = build_layout("column", Rule("split", "test", dim=0), [(6, 10)] * 2)
    plans = plans_of(Job((layout,), (), ADAM, tp_degree=2, degree=3), Dealing(8))
    assert all(piece.in_place for plan in plans for piece in plan.writes)
    assert [plan.bytes_sent for plan in plans] == [0] * 6
    assert [plan.bytes_written for plan in plans] == [3 * 80] * 6


def test_rows_are_swapped_between_the_ranks_that_hold_their_columns():
    layout = build_layout("row", Rule("split", "test", dim=1), [(12, 5)] * 2)
    plans = plans_of(Job((layout,), (), ADAM[:1], tp_degree=2, degree=2), Dealing(4 * 8))  # ranks 0, 1 hold rows 0..5
    extents = {plan.rank: [(p.extent.start, p.extent.stop) for p in plan.writes] for plan in plans}
    assert extents == {0: [(0, 30)], 1: [(30, 60)], 2: [(60, 90)], 3: [(90, 120)]}
    assert [plan.bytes_sent for plan in plans] == [60] * 4  # half of the elements of each
    peers = {plan.rank: {piece.extent.writer for piece in plan.sends} for plan in plans}
    assert peers == {0: {1}, 1: {0}, 2: {3}, 3: {2}}


def test_long_runs_are_no_rows_to_be_swapped():
    layout = build_layout("row", Rule("split", "test", dim=1), [(3, 64)] * 2)
    plans = plans_of(Job((layout,), (), ADAM[:1], tp_degree=2, degree=1), Dealing(4 * 64))
    assert [plan.bytes_sent for plan in plans] == [0, 0]
    assert [len(plan.writes) for plan in plans] == [3, 3]


def test_files_are_cut_at_stripes_where_that_is_free():
    job = Job((replicated("large", 9 << 20, 3),), (), ADAM[:1], tp_degree=3, degree=1)
    starts = sorted(piece.extent.start for plan in plans_of(job, Dealing()) for piece in plan.writes)
    assert len(starts) == 3 and all((5 * 4096 + 4 * start) % (1 << 20) == 0 for start in starts[1:])


def test_frozen_parameters_are_dealt_out_over_replicas():
    layout = build_layout("frozen", Rule("split", "test", dim=0), [(6, 4)] * 2)
    job = Job((replicated("norm.weight", 8, 2),), (layout,), ADAM, tp_degree=2, degree=3)
    frozen = [[p.extent.nbytes for p in plan.writes if p.extent.subject == 1] for plan in plans_of(job, Dealing(8))]
    assert frozen == [[32]] * 6


def test_a_frozen_parameter_that_is_averaged_gets_all_copies():
    layout = build_layout("frozen", Rule("averaged", "test"), [(6,)] * 3)
    job = Job((replicated("norm.weight", 8, 3),), (layout,), ADAM, tp_degree=3, degree=2)
    copies = [
        [(part.copy_index, part.holding.tp_rank) for part in piece.parts]
        for plan in plans_of(job, Dealing(8))
        for piece in plan.writes
        if plan.subjects[piece.extent.subject].name == "frozen"
    ]
    assert copies and all(order == [(0, 0), (1, 1), (2, 2)] for order in copies)


def test_a_parameter_without_elements_has_one_extent_and_no_transfers():
    layout = build_layout("empty", Rule("split", "test", dim=0), [(0, 4)] * 2)
    plans = plans_of(Job((layout,), (), ADAM, tp_degree=2, degree=2), Dealing())
    assert [(p.extent.start, p.extent.stop, p.parts) for p in plans[0].pieces] == [(0, 0, ())] * 3
    assert all(plan.pieces == () for plan in plans[1:])


# ---- models ----


@dataclass(frozen=True)
class Figures:
    """What there is to say of the plans of all ranks at a glance."""

    imbalance: float
    sent: float  # of all bytes written
    strayed: float  # of all bytes written: what leaves the tensor-parallel ranks of one shard rank


def figures(job: Job, every: int = 1) -> Figures:
    """Of all ranks, or of those of every so manyth shard rank."""
    subjects = job.subjects()
    total = total_bytes(subjects)
    dealing = Dealing.of(total, job.world, True)
    most = sent = strayed = 0
    ranks = [rank for rank in range(job.world) if rank // job.tp_degree % every == 0]
    for rank in ranks:
        plan = make_plan(subjects, rank, dealing)
        most, sent = max(most, plan.bytes_written), sent + plan.bytes_sent
        strayed += sum(
            part.numel * piece.extent.state.live.itemsize
            for piece in plan.sends
            for part in piece.parts
            if piece.extent.writer // job.tp_degree != rank // job.tp_degree
        )
    written = total * len(ranks) / job.world
    found = Figures(most * job.world / total, sent / written, strayed / written)
    print(job.world, found)
    return found


@pytest.mark.parametrize(("tp_degree", "degree"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 16)])
def test_a_small_gpt(tp_degree, degree):
    found = figures(gpt(12, 768, 2048, 32000, tp_degree, degree))
    assert found.imbalance <= 1.2
    assert found.strayed <= 0.01
    assert found.sent <= 0.2  # row-parallel weights are a third


@pytest.mark.slow
def test_768_ranks():
    found = figures(gpt(8, 6144, 16384, 50304, 8, 96), every=7)
    assert found.imbalance <= 1.2
    assert found.strayed <= 0.01
    assert found.sent <= 7 / 8 * 0.33 + 0.01


@pytest.mark.parametrize("degree", [8, 64, 512])
def test_the_memory_that_a_rank_plans_with_does_not_grow_with_their_number(degree):
    """Eight layers of a 405B model at TP 8: a pipeline stage of 1,024, 8,192 and 65,536 ranks at PP 16."""
    job = gpt(8, 16384, 53248, 128256, 8, degree)
    subjects, middle = job.subjects(), job.world // 2
    tracemalloc.start()
    plan = make_plan(subjects, middle, Dealing())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20
    assert plan.bytes_written == pytest.approx(total_bytes(subjects) / job.world, rel=0.2)


@pytest.mark.slow
def test_65536_ranks_of_which_most_hold_only_padding_or_a_sliver():
    job = gpt(1, 64, 128, 512, 1, 65536)
    subjects = job.subjects()
    dealing = Dealing.of(total_bytes(subjects), job.world, True)
    held = {holding.rank for subject in subjects for holding in subject.holdings}
    plans = [make_plan(subjects, rank, dealing) for rank in range(0, job.world, 6007)]
    assert all(not plan.pieces for plan in plans if plan.rank not in held)
    extents = [piece.extent for plan in plans for piece in plan.writes]
    assert all(extent.nbytes for extent in extents)
