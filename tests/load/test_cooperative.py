# SPDX-License-Identifier: Apache-2.0
"""Reading together: every byte once, by somebody who needs some of it; the same bits."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megads_ucp
from megads_ucp.engine.adapter import engine_state
from megads_ucp.layout.boxes import Box
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.load.cooperative import on_several_hosts
from megads_ucp.plan.load import make_read_plan, reads_more_than_it_holds
from megads_ucp.survey import build_survey
from tests.support.degrees import export, gpt_case, llama_case, resume
from tests.support.descriptions import of_all_tp_ranks
from tests.support.jobs import ADAM, Job, gpt, replicated
from tests.support.ranks import run_ranks
from tests.support.reads import payload_counted

# ------------------------------------------------------------------------------------------------------------ the plan


def uneven(widths: tuple[int, ...], rows: int, degree: int) -> Job:
    """Two matrices cut along dim 1, one of them in three dimensions."""
    rule = Rule("split", "test", dim=1)
    return Job(
        (
            build_layout("rows", rule, [(rows, width) for width in widths]),
            build_layout("deep", rule, [(rows, width, 3) for width in widths]),
        ),
        (),
        ADAM,
        len(widths),
        degree,
    )


@pytest.mark.slow
@given(
    widths=st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any).map(tuple),
    rows=st.integers(1, 9),
    degree=st.integers(1, 3),
    extent_bytes=st.sampled_from([8, 64, 1 << 20]),
)
def test_every_element_is_read_once_and_reaches_each_of_its_holders(widths, rows, degree, extent_bytes):
    job = uneven(widths, rows, degree)
    subjects = job.subjects()
    plans = [make_read_plan(subjects, rank, extent_bytes) for rank in range(job.world)]

    reading: dict[tuple[int, str, int, int], set[int]] = defaultdict(set)
    held: set[tuple[int, str, int, int]] = set()  # by who reads it
    arrived: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for transfer in plan.transfers:
            extent = transfer.extent
            assert extent.nbytes <= extent_bytes and rank in (transfer.sender, transfer.receiver)
            key = extent.subject, extent.state.name, extent.start, extent.stop
            reading[key].add(extent.writer)
            held |= {key} if transfer.holding.rank == extent.writer else set()
            for box in transfer.boxes:
                assert extent.start <= box.full_span[0] and box.full_span[1] <= extent.stop
                if transfer.receiver == rank:
                    arrived[extent.subject, extent.state.name, rank].extend(elements(box))
        for other, theirs in enumerate(plans[:rank]):
            between = [t for t in plan.transfers if {t.sender, t.receiver} == {rank, other}]
            assert between == [t for t in theirs.transfers if {t.sender, t.receiver} == {rank, other}]

    read: dict[tuple[int, str], list[int]] = defaultdict(list)
    for (index, name, start, stop), readers in sorted(reading.items()):
        (reader,) = readers
        assert (index, name, start, stop) in held, f"rank {reader} reads it and holds none of it"
        read[index, name].extend(range(start, stop))
    for index, subject in enumerate(subjects):
        for state in subject.states:
            assert read[index, state.name] == list(range(subject.layout.numel))
            for holding in subject.holdings:
                start = holding.fragment.param_start
                wanted = list(range(start, start + holding.fragment.numel))
                assert sorted(arrived[index, state.name, holding.rank]) == wanted


def elements(box: Box) -> list[int]:
    """The shard's elements that the box covers."""
    length = box.shard_span[1]
    return box.shard_view(torch.arange(length), 0).reshape(-1).tolist()


def test_reading_is_shared_evenly():
    job = gpt(layers=2, hidden=64, ffn=256, vocabulary=100, tp_degree=4, degree=1)
    subjects = [subject for subject in job.subjects() if reads_more_than_it_holds(subject)]
    transfers = [make_read_plan(subjects, rank, 1 << 12).transfers for rank in range(job.world)]
    extents = [{t.extent for t in of_rank if t.sender == rank} for rank, of_rank in enumerate(transfers)]
    read = [sum(extent.nbytes for extent in of_rank) for of_rank in extents]
    total = sum(subject.layout.numel for subject in subjects) * 3 * 4
    assert sum(read) == total and max(read) * job.world < 1.1 * total
    moved = sum(t.nbytes for rank, of_rank in enumerate(transfers) for t in of_rank if t.sender == rank != t.receiver)
    assert moved == total * 3 // 4, "each reader keeps its own columns"


def test_only_what_is_cut_between_rows_is_read_together():
    job = gpt(layers=1, hidden=8, ffn=16, vocabulary=12, tp_degree=2, degree=1)
    found = [subject.name for subject in job.subjects() if reads_more_than_it_holds(subject)]
    assert found == ["0.proj", "0.fc2"]
    one = Job((replicated("norm", 8, 1), build_layout("rows", Rule("split", "test", dim=1), [(3, 4)])), (), ADAM, 1, 2)
    assert not any(map(reads_more_than_it_holds, one.subjects()))


# ---------------------------------------------------------------------------------------------------------- the resume

TOGETHER = {"universal_checkpoint_export": {"strict": True, "read_together": "always"}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A GPT with biases exported at TP 1 x DP 2, and its next losses."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, export(gpt_case(tied=False, biases=True), 1, 2, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2), (4, 1)])
def test_a_gpt_has_the_same_bits_and_losses(tmp_path, saved, tp, dp):
    directory, losses = saved
    case = replace(gpt_case(tied=False, biases=True), config=TOGETHER)
    assert resume(case, tp, dp, directory, tmp_path / "again") == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_a_llama_of_uneven_shards_has_the_same_bits_and_losses(tmp_path):
    case = llama_case(24, 20, heads=6, key_value_heads=3)
    losses = export(case, 2, 1, tmp_path / "source")
    again = resume(replace(case, config=TOGETHER), 4, 1, tmp_path / "source", tmp_path / "again", check=False)
    assert again == pytest.approx(losses, rel=1e-5)


@dataclass(frozen=True)
class Counts:
    asked: int
    needed: int


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (4, 1)])
def test_no_byte_is_read_twice(saved, tp, dp):
    """Replicated parameters are needed by every rank; beside them, the ranks together read each tensor once."""
    directory, _ = saved

    def body(read_together: str) -> Counts:
        megads_ucp.install(argparse.Namespace(universal_checkpoint_read_together=read_together))
        engine = gpt_case(tied=False, biases=True).engine(tp, resuming=True)
        with payload_counted() as asked:
            engine.load_checkpoint(str(directory))
        fragments = [f for group in engine_state(engine).groups for f in group.partition.fragments]
        return Counts(asked(), 3 * 4 * sum(fragment.numel for fragment in fragments))

    together = run_ranks(body, tp * dp, "always")
    assert sum(count.asked for count in together) == sum(count.needed for count in together)
    alone = run_ranks(body, tp * dp, "never")
    assert sum(count.asked for count in alone) > 1.1 * sum(count.needed for count in alone)


def test_ranks_of_one_host_find_each_others_rows_in_its_cache():
    survey = build_survey(of_all_tp_ranks())
    assert not on_several_hosts(survey, [7] * 4)
    assert not on_several_hosts(survey, [7, 7, 8, 8]), "data-parallel replicas may be anywhere"
    assert on_several_hosts(survey, [7, 8, 7, 8])
