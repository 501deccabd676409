# SPDX-License-Identifier: Apache-2.0
"""Copies that ought to agree and do not: found by their checksums, described by their values, an error or a warning."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megads_ucp
from megads_ucp.comm.channel import Channel
from megads_ucp.engine.adapter import engine_state
from megads_ucp.errors import DriftError
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.plan.replicas import BLOCK, inspection, replica_blocks
from megads_ucp.plan.types import Holding, StateSpec, Subject
from megads_ucp.save.replicas import Comparison, Drift, Values
from tests.support.autotp import Topology, batches, case
from tests.support.drawn_jobs import jobs
from tests.support.jobs import ADAM, MIXED, Job, replicated, values_of
from tests.support.models import initialize, train
from tests.support.ranks import run_ranks
from tests.support.runs import EXPORTING, TAG, UNIVERSAL, Log, tensors

Shards = dict[tuple[str, str], list[torch.Tensor]]


def shards_of(job: Job) -> Shards:
    """What the tensor-parallel ranks hold, by parameter and state; copies agree."""
    return {
        (subject.name, state.name): list(values_of(subject, state, seed).shards)
        for seed, subject in enumerate(job.subjects())
        for state in subject.states
    }


def values_in(shards: Shards) -> Values:
    def values(holding: Holding, state: StateSpec) -> torch.Tensor:
        fragment = holding.fragment
        whole = shards[fragment.name, state.name][holding.tp_rank]
        return whole[fragment.param_start : fragment.param_start + fragment.numel]

    return values


# ---------------------------------------------------------------------------------------------------------- checksums


@settings(max_examples=60, deadline=None)
@given(jobs(), st.data())
def test_copies_however_they_are_cut_have_one_checksum_and_one_flipped_bit_is_seen(job: Job, data: Any) -> None:
    subjects, shards = job.subjects(), shards_of(job)
    blocks = replica_blocks(subjects)
    comparisons = [Comparison(subjects, rank) for rank in range(job.world)]

    def block_sums() -> list[list[int]]:
        parts = [comparison.checksums(values_in(shards)) for comparison in comparisons]
        sums = torch.stack(parts).sum(0).tolist()
        return [sums[block.slots] for block in blocks]

    if not blocks:
        return
    assert all(len(set(sums)) == 1 for sums in block_sums())

    block = data.draw(st.sampled_from(blocks))
    tp_rank = data.draw(st.sampled_from(block.tp_ranks))
    subject = subjects[block.subject]
    shard = shards[subject.name, block.state.name][tp_rank]
    boxes = [box for box in subject.layout.runs(tp_rank, 0, shard.numel()) if box.holders == block.tp_ranks]
    box = data.draw(st.sampled_from(boxes))
    bits = shard.view({2: torch.int16, 4: torch.int32}[shard.element_size()])
    bits[box.shard_offset] ^= 1 << data.draw(st.integers(0, 8 * shard.element_size() - 2))
    assert [len(set(sums)) for sums in block_sums()] == [1 + (other is block) for other in blocks]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_swapped_elements_and_a_shifted_copy_are_seen_and_equal_bits_never_are(dtype: torch.dtype) -> None:
    numel = BLOCK + 300  # the last block is a short one
    state = StateSpec("fp32", dtype, torch.float32)
    subjects = Job((replicated("norm", numel, 2),), (), (state,), tp_degree=2, degree=1).subjects()
    # Of bf16's precision, as weights are after training in it: the lower half of their bits is zero.
    base = torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16().to(dtype)
    base[:3] = torch.tensor([torch.nan, torch.inf, -0.0])

    def blocks_that_differ(other: torch.Tensor) -> list[int]:
        values = values_in({("norm", "fp32"): [base, other]})
        parts = [Comparison(subjects, rank).checksums(values) for rank in range(2)]
        one, two = torch.stack(parts).sum(0).view(2, 2).unbind(1)
        return (one != two).nonzero().flatten().tolist()

    swapped = base.clone()
    swapped[[100, 65000]] = base[[65000, 100]]
    assert blocks_that_differ(base.clone()) == []
    assert blocks_that_differ(swapped) == [0]
    two_signs = base.clone()
    two_signs[[5, 9]] *= -1
    assert blocks_that_differ(two_signs) == [0]
    all_bits_of_one = base.clone()
    bits = all_bits_of_one[7:8].view(torch.uint8)
    bits.bitwise_not_()
    assert blocks_that_differ(all_bits_of_one) == [0]
    assert blocks_that_differ(base.roll(1)) == [0, 1]
    assert blocks_that_differ(-base) == [0, 1]
    assert blocks_that_differ(torch.zeros_like(base)) == [0, 1]


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_an_inspection_brings_every_copy_of_every_element_of_a_block_once(job: Job) -> None:
    subjects = job.subjects()
    blocks = replica_blocks(subjects)
    place = {block.slot: index for index, block in enumerate(blocks)}
    arrived = [torch.zeros(len(block.tp_ranks), block.stop - block.start, dtype=torch.int64) for block in blocks]
    by_rank = [inspection(subjects, blocks, rank) for rank in range(job.world)]
    meeting = {(block.slot, transfer.receiver) for inspected in by_rank for block, transfer in inspected}
    assert len(meeting) == len(blocks), "the copies of a block meet on one rank"
    for rank, inspected in enumerate(by_rank):
        for block, transfer in inspected:
            assert rank in (transfer.sender, transfer.receiver)
            assert transfer.holding.tp_rank == block.tp_ranks[transfer.copy_index]
            for box in transfer.boxes if transfer.receiver == rank else ():
                assert box.holders == block.tp_ranks
                box.full_view(arrived[place[block.slot]][transfer.copy_index], block.start).add_(1)
        for other, theirs in enumerate(by_rank[:rank]):
            between = [t for _, t in inspected if {t.sender, t.receiver} == {rank, other}]
            assert between == [t for _, t in theirs if {t.sender, t.receiver} == {rank, other}]
    for block, copies in zip(blocks, arrived, strict=True):
        assert copies.max() == 1 and (copies == copies[0]).all(), block
    for index, subject in enumerate(subjects):
        if subject.owned and subject.layout.replicated and subject.layout.tp_degree > 1:
            assert sum(int(c[0].sum()) for block, c in zip(blocks, arrived, strict=True) if block.subject == index) == (
                len(subject.states) * subject.layout.numel
            )


def test_what_is_averaged_or_belongs_to_no_optimizer_is_not_compared() -> None:
    averaged = build_layout("router", Rule("averaged", "test"), [(6,)] * 2)
    cut = build_layout("column", Rule("split", "test", dim=0), [(6,)] * 2)
    job = Job((averaged, cut), (replicated("buffer", 4, 2),), ADAM, tp_degree=2, degree=2)
    assert replica_blocks(job.subjects()) == ()


# ------------------------------------------------------------------------------------------------ what ranks find out


def compared(subjects: tuple[Subject, ...], shards: Shards) -> tuple[Drift, ...]:
    """On a rank: the drifts that all ranks get."""
    channel = Channel(1.0)
    return Comparison(subjects, channel.rank).run(channel, values_in(shards), window_bytes=256)


def test_all_ranks_learn_the_largest_of_all_differences_and_who_holds_it() -> None:
    job = Job((replicated("norm", 13, 2), replicated("bias", 4, 2)), (), MIXED, tp_degree=2, degree=2)
    shards = shards_of(job)
    one, other = shards["norm", "exp_avg_sq"]
    one[1], other[1] = 1.0, 1.5
    one[11], other[11] = -3.0, 1.0

    for drifts in run_ranks(lambda: compared(job.subjects(), shards), 4):
        (drift,) = drifts
        assert (drift.parameter, drift.state, drift.count, drift.largest) == ("norm", "exp_avg_sq", 2, 4.0)
        assert drift.index == (11,) and drift.values == (-3.0, 1.0)
        # 17 elements on 2 ranks are 9 and 8 (with padding: 10): the second of each tensor-parallel rank's has them.
        assert drift.ranks == (2, 3)
        assert "the copy of tensor-parallel rank 1 differs from that of rank 0" in str(drift)


@pytest.mark.slow
def test_stages_are_compared_however_each_is_cut_and_distinguished_from_ranks_of_one() -> None:
    cut = build_layout("words", Rule("split", "test", dim=0), [(9,)] * 2)
    layouts = (replicated("norm", 5, 2), cut)
    first = Job(layouts, (), ADAM[:1], tp_degree=2, degree=1).subjects()
    later = Job((*layouts, replicated("head", 8, 2)), (), ADAM[:1], tp_degree=2, degree=2).subjects()
    subjects = tuple(
        replace(one, tied_shards=(tuple(replace(s, ranks=tuple(2 + rank for rank in s.ranks)) for s in other.shards),))
        for one, other in zip(first, later, strict=False)
    )

    def body() -> list[tuple[Drift, ...]]:
        channel, shards = Channel(1.0), shards_of(Job(layouts, (), ADAM[:1], tp_degree=2, degree=1))
        found = [compared(subjects, shards)]
        if channel.rank >= 2:
            shards["words", "fp32"][0][4], shards["words", "fp32"][1][8] = 5.0, 100.0
        found.append(compared(subjects, shards))
        shards["norm", "fp32"][1][2] += 1.0  # on both stages
        return [*found, compared(subjects, shards)]

    for agreeing, words, both in run_ranks(body, 6):
        assert agreeing == ()
        (drift,) = words
        assert drift.rounding and not both[0].rounding
        assert (drift.parameter, drift.elsewhere, drift.tp_ranks, drift.count) == ("words", True, (0, 1), 2)
        assert drift.index == (17,) and drift.ranks == (1, 5) and drift.values[1] == 100.0
        assert "ranks 0, 1 on later pipeline stages differ from the first stage's" in str(drift)
        assert [(d.parameter, d.elsewhere, d.tp_ranks, d.ranks[0]) for d in both] == [
            ("norm", False, (1,), 0),
            ("norm", True, (1,), 0),
            ("words", True, (0, 1), 1),
        ]


def test_copies_whose_sums_round_differently_may_be_sound() -> None:
    job = Job((replicated("norm", 5, 2),), (), ADAM[:1], tp_degree=2, degree=1)
    subjects = tuple(replace(subject, rounds_alike=False) for subject in job.subjects())

    def body() -> list[bool]:
        shards = shards_of(job)
        shards["norm", "fp32"][1][2] += 1.0
        return [drift.rounding for drift in (*compared(job.subjects(), shards), *compared(subjects, shards))]

    assert run_ranks(body, 2) == [[False, True]] * 2


def test_bits_that_mean_the_same_are_no_drift_and_a_nan_beside_a_number_is() -> None:
    subjects = Job((replicated("norm", 6, 2),), (), ADAM[:1], tp_degree=2, degree=1).subjects()
    quiet, negative = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    nan, inf = float("nan"), float("inf")
    pairs = [(nan, nan), (inf, inf), (0.0, -0.0), (quiet, negative), (nan, 0.0), (inf, 3e38), (-inf, inf)]

    def body() -> list[list[float]]:
        found = []
        for pair in pairs:
            shards = [torch.zeros(6), torch.zeros(6)]
            for shard, value in zip(shards, pair, strict=True):
                shard[3] = value
            held = {("norm", "fp32"): shards}
            found.append([drift.largest for drift in compared(subjects, held)])
        return found

    for same, infinite, zeros, nans, one_nan, finite, signs in run_ranks(body, 2):
        assert same == infinite == zeros == nans == []
        assert len(one_nan) == 1 and one_nan[0] != one_nan[0]
        assert finite == signs == [inf]


# -------------------------------------------------------------------------------------------------------- real engines

NORM = "model.layers.1.post_attention_layernorm.weight"


@contextmanager
def nudged(engine: Any, name: str, state: str, element: int, tp_rank: int) -> Iterator[tuple[float, float] | None]:
    """One element of one tensor-parallel rank's copy is one unit in the last place off.

    Yields (true, off) on ranks that hold the element of some copy, None on others.
    """
    live = engine_state(engine)
    here = [
        group.sharded_states()[state].detach().narrow(0, fragment.partition_start + element - fragment.param_start, 1)
        for group in live.groups
        for fragment in group.partition.fragments
        if fragment.name == name and 0 <= element - fragment.param_start < fragment.numel
    ]
    if not here:
        yield None
        return
    true = here[0].clone()
    off = torch.nextafter(true, torch.tensor(torch.inf))
    if live.coordinates.tp_rank == tp_rank:
        here[0].copy_(off)
    yield true.item(), off.item()
    here[0].copy_(true)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "topology", "tp_rank"),
    [
        ("bf16_optimizer", Topology(2, 1), 1),
        ("fp32", Topology(2, 2), 0),
        ("fp32_zero2", Topology(4, 1), 3),  # which holds no key/value head
    ],
    ids=str,
)
def test_one_unit_in_the_last_place_of_one_copy_refuses_the_export(
    kind: str, topology: Topology, tp_rank: int, tmp_path: Path
) -> None:
    def body() -> list[tuple[str, tuple[float, float] | None]]:
        megads_ucp.install(EXPORTING)
        log = Log()
        engine = case("llama", kind).engine(topology.tp)
        train(engine, batches(0, 1))
        engine.save_checkpoint(str(tmp_path), tag="agreeing")
        assert log.messages == []
        found = []
        for state in ("fp32", "exp_avg"):
            with nudged(engine, NORM, state, 17, tp_rank) as pair, pytest.raises(DriftError) as failure:
                engine.save_checkpoint(str(tmp_path), tag=state)
            found.append((str(failure.value), pair))
            train(engine, batches(1, 2))
        engine.save_checkpoint(str(tmp_path), tag="again")
        return found

    ranks = run_ranks(body, topology.world)
    for state, of_ranks in zip(("fp32", "exp_avg"), zip(*ranks, strict=True), strict=True):
        (message,) = {text for text, _ in of_ranks}
        true, off = next(pair for _, pair in of_ranks if pair is not None)
        assert f"parameter {NORM}, state {state}: " in message and message.count("parameter model.") == 1
        assert f" in 1 element, by up to {off - true:.3g}, at [17]: " in message
        assert f"{true:.9g} on rank " in message and f"{off:.9g} on rank " in message
        assert "of tensor-parallel rank" in message and " from that of rank 0 in 1 element" in message
        assert "parameter_to_average_patterns" in message and "on_drift" in message
        assert not (tmp_path / f"{state}_universal").exists() and (tmp_path / state).is_dir()
    assert (tmp_path / "agreeing_universal").is_dir() and (tmp_path / "again_universal").is_dir()


def test_drift_is_logged_without_strict_and_warned_of_once_where_a_warning_is_asked_for(tmp_path: Path) -> None:
    def body() -> list[list[str]]:
        found = []
        for name, section in (("error", {}), ("warn", {"on_drift": "warn", "strict": True})):
            megads_ucp.install(argparse.Namespace(universal_checkpoint_export=True))
            log = Log()
            engine = case("llama", config={"universal_checkpoint_export": section}).engine(2)
            train(engine, batches(0, 1))
            with nudged(engine, NORM, "fp32", 5, tp_rank=1):
                engine.save_checkpoint(str(tmp_path / name), tag=TAG)
            found.append(log.messages)
            logging.getLogger("megads_ucp").removeHandler(log)
        return found

    (refused, warned), (refused_there, silent) = run_ranks(body, 2)
    assert len(refused) == 1 and refused_there == [] and "The regular checkpoint is untouched" in refused[0]
    assert not (tmp_path / "error" / UNIVERSAL).exists() and (tmp_path / "error" / TAG).is_dir()
    assert len(warned) == 1 and silent == []
    assert f"parameter {NORM}, state fp32" in warned[0] and "One copy of each is exported" in warned[0]
    assert f"{NORM}/fp32" in tensors(tmp_path / "warn" / UNIVERSAL)


@pytest.mark.slow
def test_parameters_declared_averaged_may_differ(tmp_path: Path) -> None:
    gpt = pytest.importorskip("tests.support.gpt")
    norm, other = "decoder.layers.0.pre_mlp_layernorm.weight", "decoder.final_layernorm.weight"
    info = {
        **gpt.STOCK_INFO,
        "tp_replicated_parameter_patterns": [r".*(input|final)_layernorm\.weight$"],
        "parameter_to_average_patterns": [r".*pre_mlp_layernorm\.weight$"],
    }

    def body() -> tuple[float, float] | None:
        megads_ucp.install(EXPORTING)
        model, mpu = gpt.build_gpt(2)
        engine = initialize(model, "fp32", mpu=mpu)
        train(engine, gpt.gpt_batches(0, 1))
        state = {"universal_checkpoint_info": info}
        with nudged(engine, norm, "fp32", 3, tp_rank=1) as pair:
            engine.save_checkpoint(str(tmp_path), tag=TAG, client_state=state)
        refused = pytest.raises(DriftError, match=rf"apart: parameter {re.escape(other)}, state exp_avg_sq: ")
        with nudged(engine, other, "exp_avg_sq", 3, tp_rank=1), refused:
            engine.save_checkpoint(str(tmp_path), tag="drifted", client_state=state)
        return pair

    true, off = map(torch.tensor, run_ranks(body, 2)[0])
    assert tensors(tmp_path / UNIVERSAL)[f"{norm}/fp32"][3] == (true + off) / 2
