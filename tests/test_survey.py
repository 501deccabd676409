# SPDX-License-Identifier: Apache-2.0
"""What all ranks make of each other's descriptions: layouts, holdings, and every way in which ranks can disagree."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.affine import replicated_map

from megads_ucp.config import ExportConfig
from megads_ucp.engine.context import EngineContext
from megads_ucp.errors import LayoutError, PlanError
from megads_ucp.layout.rule import Rule
from megads_ucp.plan.save import make_plan
from megads_ucp.plan.shares import Dealing
from megads_ucp.plan.types import UNOWNED, StateSpec
from megads_ucp.survey import RankDescription, build_survey
from tests.support.descriptions import RULES, SHAPES, STATES, Shapes, description, of_all_tp_ranks
from tests.support.ranks import run_ranks

# ---- subjects ----


def test_subjects_know_layout_states_and_every_holder():
    survey = build_survey(of_all_tp_ranks())
    column, norm = survey.subjects()

    assert (column.name, column.layout.shape) == ("column", (8, 6))
    assert (norm.name, norm.layout.shape, norm.layout.replicated) == ("norm", (6,), True)
    # Master weights are written in fp32, other states as they live.
    fp32, bf16 = torch.float32, torch.bfloat16
    assert column.states == (StateSpec("fp32", fp32, fp32), StateSpec("exp_avg", bf16, bf16))
    # 30 elements and 2 of padding over 2 shard ranks: the first holds 16 of the column's 24.
    held = [(h.rank, h.tp_rank, h.group, h.fragment.param_start, h.fragment.numel) for h in column.holdings]
    assert held == [(0, 0, 0, 0, 16), (2, 0, 0, 16, 8), (1, 1, 0, 0, 16), (3, 1, 0, 16, 8)]
    assert {holding.rank for holding in norm.holdings} == {2, 3}
    assert make_plan(survey.subjects(), 3, Dealing(8)).subjects == survey.subjects()


def test_a_parameter_may_be_in_different_groups_on_different_tensor_parallel_ranks():
    first = description(0, groups=({"column": (4, 6)}, {"norm": (6,)}))
    second = description(1, groups=({"norm": (6,)}, {"column": (4, 6)}))
    column, norm = build_survey((first, second)).subjects()

    assert {(holding.tp_rank, holding.group) for holding in column.holdings} == {(0, 0), (1, 1)}
    assert {(holding.tp_rank, holding.group) for holding in norm.holdings} == {(0, 1), (1, 0)}


def test_frozen_parameters_are_dealt_out_over_replicas_and_buffers_are_those_of_the_first():
    rules = {**RULES, "frozen": Rule("split", "layers", dim=1)}
    options = {"unowned": {"frozen": (2, 3), "scale": (4,), "nothing": (0,)}, "buffers": ("scale", "nothing")}
    subjects = {s.name: s for s in build_survey(of_all_tp_ranks(rules=rules, **options)).subjects()}

    frozen, scale = subjects["frozen"], subjects["scale"]
    assert not frozen.owned and frozen.metadata() == {} and frozen.layout.shape == (2, 6)
    assert [(h.rank, h.tp_rank, h.group, h.fragment.numel) for h in frozen.holdings] == [
        (0, 0, UNOWNED, 3),
        (2, 0, UNOWNED, 3),
        (1, 1, UNOWNED, 3),
        (3, 1, UNOWNED, 3),
    ]
    assert scale.layout.replicated and scale.layout.shape == (4,)
    assert [(h.rank, h.fragment.numel) for h in scale.holdings] == [(0, 4), (1, 4)]
    assert subjects["nothing"].holdings == ()
    assert subjects["column"].owned


def with_an_empty_shard_on(tp_rank: int) -> tuple[RankDescription, ...]:
    """Three tensor-parallel ranks, the given one with no row of `column`, which DeepSpeed then leaves out of its group
    and which so is among what no optimizer owns there."""
    empty: Shapes = {"column": (0, 6)}
    some: Shapes = {"column": (4, 6), "norm": (6,)}
    return tuple(
        description(rank, tp_degree=3, groups=({"norm": (6,)},), unowned=empty)
        if rank == tp_rank
        else description(rank, tp_degree=3, groups=(some,))
        for rank in range(3)
    )


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_shard_is_held_by_nobody(empty):
    subjects = build_survey(with_an_empty_shard_on(empty)).subjects()
    column = {subject.name: subject for subject in subjects}["column"]

    assert sorted(subject.name for subject in subjects) == ["column", "norm"]
    assert column.owned and column.layout.shape == (8, 6)
    assert [state.name for state in column.states] == ["fp32", "exp_avg"]
    assert {holding.tp_rank for holding in column.holdings} == {0, 1, 2} - {empty}
    for rank in range(6):
        make_plan(subjects, rank, Dealing(8))


def test_an_empty_shard_of_a_frozen_parameter_is_held_by_nobody():
    ranks = [
        description(rank, groups=({"norm": (6,)},), unowned={"column": (0 if rank == 0 else 4, 6)}) for rank in (0, 1)
    ]
    norm, column = build_survey(tuple(ranks)).subjects()

    assert not column.owned and column.layout.shape == (4, 6)
    assert [(holding.rank, holding.tp_rank) for holding in column.holdings] == [(1, 1), (3, 1)]
    assert norm.owned


def test_a_parameter_without_elements_anywhere_is_one_empty_file():
    ranks = [description(rank, groups=({"norm": (6,)},), unowned={"column": (0, 6)}) for rank in (0, 1)]
    subjects = build_survey(tuple(ranks)).subjects()
    assert [(subject.name, subject.holdings, subject.layout.shape) for subject in subjects[1:]] == [
        ("column", (), (0, 6))
    ]


def test_of_a_tied_parameter_the_first_stage_is_exported_and_the_others_hold_copies():
    module = {"tied": (4, 6), "spare": (3,)}
    split, replicated = Rule("split", "layers", dim=0), Rule("replicated", "layers")
    options = {
        "stages": 3,
        "rules": {**RULES, "tied": split, "spare": replicated, "head": replicated},
        "tied": ("tied",),
    }
    survey = build_survey(
        (
            *of_all_tp_ranks(stage=0, groups=({**module, **SHAPES},), **options),
            *of_all_tp_ranks(stage=1, groups=(module,), **options),
            *of_all_tp_ranks(stage=2, groups=({"head": (5,), **module},), **options),
        )
    )
    subjects = {subject.name: subject for subject in survey.subjects()}

    assert list(subjects) == ["tied", "spare", "column", "norm", "head"]
    assert {holding.rank for holding in subjects["tied"].holdings} <= {0, 1, 2, 3}
    assert {holding.rank for holding in subjects["head"].holdings} <= {8, 9, 10, 11}
    middle, last = subjects["tied"].tied_holdings
    assert {holding.rank for holding in middle} <= {4, 5, 6, 7} and {holding.rank for holding in last} <= {8, 9, 10, 11}
    assert [name for name, subject in subjects.items() if subject.tied_holdings] == ["tied"]


def test_different_parameters_of_one_name_on_two_stages_are_an_error():
    survey = build_survey(
        (
            *of_all_tp_ranks(stage=0, stages=2),
            *of_all_tp_ranks(stage=1, stages=2, groups=({**SHAPES, "column": (2, 6)},)),
        )
    )
    with pytest.raises(LayoutError, match=r"column is on pipeline stages 0 and 1.*\(4, 6\).*\(2, 6\)"):
        survey.subjects()


# ---- disagreement of tensor-parallel ranks ----


def test_a_parameter_that_one_tensor_parallel_rank_lacks_is_named():
    other = description(1, groups=({"column": (4, 6)},))
    with pytest.raises(LayoutError, match=r"norm is missing on tensor-parallel ranks \[1\]"):
        build_survey((description(0), other))


def test_parameters_of_unknown_layout_are_listed_for_all_stages_at_once():
    """And not four of ten, then three more once those have been seen to."""
    stages: list[Shapes] = [{f"{stage}.{number}": (4, 6) for number in range(3)} for stage in range(3)]
    described = tuple(
        description(tp_rank, stage=stage, stages=3, groups=(shapes,), rules={})
        for stage, shapes in enumerate(stages)
        for tp_rank in range(2)
    )
    with pytest.raises(LayoutError) as caught:
        build_survey(described)

    assert "How 9 parameters are cut" in str(caught.value)
    assert all(f"\n  {name}, shape (4, 6)" in str(caught.value) for shapes in stages for name in shapes)


def test_rules_that_differ_between_tensor_parallel_ranks_are_named():
    other = description(1, rules={**RULES, "norm": Rule("averaged", "layers")})
    with pytest.raises(LayoutError, match=r"ranks 0 and 1 disagree on the layout of norm \(source: layers\)"):
        build_survey((description(0), other))


@pytest.mark.parametrize("trained_on", [0, 1])
def test_a_parameter_frozen_on_one_tensor_parallel_rank_only_is_named(trained_on):
    frozen = description(1 - trained_on, groups=({"column": (4, 6)},), unowned={"norm": (6,)})
    ranks = sorted([description(trained_on), frozen], key=lambda d: d.coordinates.tp_rank)
    expected = f"norm is trained on tensor-parallel rank {trained_on} but not on rank {1 - trained_on}"
    with pytest.raises(LayoutError, match=expected):
        build_survey(tuple(ranks)).subjects()


@pytest.mark.parametrize("states", [STATES[:1], (STATES[0], ("exp_avg", torch.float32))])
def test_optimizer_states_that_differ_between_tensor_parallel_ranks_are_named(states):
    survey = build_survey((description(0), description(1, states=states)))
    with pytest.raises(PlanError, match=r"column has optimizer states .* on tensor-parallel rank 0 and .* on rank 1"):
        survey.subjects()


@pytest.mark.parametrize("states", [STATES, STATES[:1]])
def test_moments_of_a_scaled_parameter_are_refused_before_anything_is_written(states):
    rules = {**RULES, "norm": Rule("affine", "layers", affine=replicated_map([6], 2, scale=0.5).to_dict())}
    survey = build_survey(of_all_tp_ranks(rules=rules, states=states))
    if states == STATES[:1]:  # master weights can be scaled
        assert [subject.name for subject in survey.subjects()] == ["column", "norm"]
        return
    with pytest.raises(LayoutError, match=r"norm is held scaled .*optimizer state \(exp_avg\).*Hold it unscaled"):
        survey.subjects()


def test_a_missing_tensor_parallel_rank_is_an_error():
    with pytest.raises(PlanError, match=r"ranks \[1\], but the model-parallel unit says there are 2"):
        build_survey((description(1),))


# ---- digests ----


@dataclass
class Custom:
    """A client's own object in its universal_checkpoint_info, without a repr of its own."""

    patterns: list[str]
    __repr__ = object.__repr__


def test_equal_descriptions_have_equal_digests():
    def info(patterns: list[str]) -> dict[str, Any]:
        return {"custom": Custom(patterns), "names": {"a", "b"}, "more": [re.compile("x"), (1, 2.0, None)]}

    one, same = description(info=info(["a"])), description(info=info(["a"]))
    assert one.digest() == same.digest() < 1 << 62
    assert one.digest() != description(info=info(["b"])).digest()
    assert description(info={"a": 1, "b": 2}).digest() == description(info={"b": 2, "a": 1}).digest()


def test_whatever_a_plan_depends_on_changes_the_digest():
    def affine(scale: float) -> Rule:
        return Rule("affine", "layers", affine=replicated_map([6], 2, scale=scale).to_dict())

    one = description()
    others = [
        description(1),
        description(groups=({**SHAPES, "column": (6, 4)},)),
        description(groups=({"norm": (6,), "column": (4, 6)},)),
        description(degree=1),
        description(states=STATES[:1]),
        description(unowned={"scale": ()}),
        description(unowned={"scale": ()}, buffers=("scale",)),
        description(rules={**RULES, "norm": affine(1.0)}),
        description(rules={**RULES, "norm": affine(0.5)}),
        description(info={}),
        description(info={"original_vocab_size": 7}),
        description(info={"original_vocab_size": 8}),
        replace(one, coordinates=replace(one.coordinates, stage=1)),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 1 + len(others)


# ---- on real ranks ----


def a_context() -> EngineContext:
    return EngineContext("these ranks describe themselves without an engine", ExportConfig())


def test_ranks_share_one_survey_and_renew_it_when_one_of_them_has_changed():
    def body() -> tuple[list[str], bool, list[str]]:
        context, rank = a_context(), dist.get_rank()
        context.connect()

        def survey(**options: Any):
            return context.survey(description(rank % 2, **options), first_of_replicas=rank < 2)

        first, again = survey(), survey()
        renewed = survey(states=STATES[:1])
        names = [f"{subject.name} {len(subject.holdings)}" for subject in first.subjects()]
        return names, first is again, [state.name for state in renewed.subjects()[0].states]

    assert run_ranks(body, 4) == [(["column 4", "norm 2"], True, ["fp32"])] * 4


def test_data_parallel_replicas_that_disagree_are_named_on_all_ranks():
    def body() -> str:
        context, rank = a_context(), dist.get_rank()
        channel = context.connect()
        shapes = {**SHAPES, "norm": (7,)} if rank == 3 else SHAPES
        with pytest.raises(PlanError) as failure:
            context.survey(description(rank % 2, groups=(shapes,)), first_of_replicas=rank < 2)
        channel.agree(None, "what comes next")
        return str(failure.value)

    for message in run_ranks(body, 4):
        assert "rank 3 (pipeline stage 0, tensor-parallel rank 1)" in message
        assert "differently from rank 1, its data-parallel replica" in message


def test_a_failure_to_describe_reaches_all_ranks():
    def body() -> str:
        channel = a_context().connect()
        with pytest.raises(LayoutError) as failure, channel.agreed("describing the model"):
            if channel.rank == 1:
                raise LayoutError("norm: its layer says two things")
        return str(failure.value)

    assert run_ranks(body, 2) == ["describing the model failed. rank 1: norm: its layer says two things"] * 2


@pytest.mark.parametrize(
    ("degree", "widths", "alike"), [(4, (4, 4), True), (2, (4, 3), True), (3, (4, 3), False), (4, (4, 0), False)]
)
def test_where_sums_over_data_parallel_ranks_round_alike(degree, widths, alike):
    """Two numbers have one sum; the order of more goes by their place in buffers, which uneven shards make differ."""
    peers = tuple(
        description(
            tp_rank,
            degree=degree,
            groups=({**({"column": (width, 6)} if width else {}), "norm": (6,)},),
            unowned={} if width else {"column": (0, 6)},
        )
        for tp_rank, width in enumerate(widths)
    )
    assert {subject.rounds_alike for subject in build_survey(peers).subjects()} == {alike}
