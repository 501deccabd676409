# SPDX-License-Identifier: Apache-2.0
"""Exports and resumes across tensor-parallel degrees: real layers, real engines, real files.

The values of every shard are checked against tests.support.degrees, which cuts tensors without the library's layouts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import nn

import megads_ucp
from megads_ucp import storage
from tests.support import gpt, stock
from tests.support.degrees import VERSION_ONLY, Case, Info, export, gpt_case, llama_case, resume, stock_resume
from tests.support.models import Batch, full_weight, train
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import (
    BEFORE,
    EXPORTING,
    TAG,
    UNIVERSAL,
    Log,
    assert_same_state,
    assert_same_tensors,
    shards,
    states,
    tensors,
)

FORGIVING = argparse.Namespace(universal_checkpoint_export=True)


# ------------------------------------------------------------------------------------------------ T1: megatron-core GPT


@pytest.mark.slow
def test_a_gpt_saved_without_tensor_parallelism_resumes_with_it(tmp_path: Path) -> None:
    """T1: row-parallel weights, biases, fused QKV of grouped queries, SwiGLU, an output layer of its own."""
    case = gpt_case(tied=False, biases=True)
    losses = export(case, 1, 2, tmp_path / "tp1", check=True)

    row_parallel = [name for name in states(tmp_path / "tp1" / UNIVERSAL) if "proj.weight" in name or "fc2.w" in name]
    assert len(row_parallel) == 2 * 2 * 4  # layers, weights, states and step
    for name, content in states(tmp_path / "tp1" / UNIVERSAL).items():
        if not name.endswith("/step"):
            cut = gpt.cut_dim(name.rpartition("/")[0])
            assert content.get("cat_dim") == cut, name
            assert content.get("param_n_sub_params") == (2 if ".linear_fc1." in name else None), name

    for tp, dp in ((2, 1), (4, 1)):
        assert resume(case, tp, dp, tmp_path / "tp1", tmp_path / f"tp{tp}") == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_a_gpt_goes_through_a_chain_of_degrees(tmp_path: Path) -> None:
    """T1: TP 4 -> 2 -> 1, each hop from the export of the one before. The stock converter agrees on the first."""
    case = replace(gpt_case(biases=True), info=lambda tp: with_biases(gpt.STOCK_INFO))
    losses = export(case, 4, 1, tmp_path / "tp4", check=True)
    converted = stock.convert(tmp_path / "tp4" / TAG, tmp_path / "stock" / UNIVERSAL)
    stock.assert_same_universal(tmp_path / "tp4" / UNIVERSAL, converted)

    assert resume(case, 2, 2, tmp_path / "tp4", tmp_path / "tp2") == pytest.approx(losses, rel=1e-5)
    assert resume(case, 1, 1, tmp_path / "tp2", tmp_path / "tp1") == pytest.approx(losses, rel=1e-5)


def with_biases(info: Info) -> Info:
    """The info of a tied GPT without biases, for one with them. The stock converter wants each pattern to match."""
    more = {
        "tp_replicated_parameter_patterns": [r".*\.(linear_proj|linear_fc2)\.bias$"],
        "parameter_with_2_sub_params_cat_dim_0": [r".*linear_fc1\.bias$"],
    }
    less = {"vocabulary_parameter_patterns": [r".*word_embeddings\.weight$"]}
    return {**info, **{key: [*info[key], *patterns] for key, patterns in more.items()}, **less}


# ------------------------------------------------------------- one parameter of every rule, sharded by hand and by name

WIDTH = 3
VOCABULARY = 250
PADDED = {1: 250, 2: 256, 4: 252}  # rows of the vocabulary by TP degree
# Full shapes. What each is cut like, `sub_widths` and `shard` say.
SHAPES: dict[str, tuple[int, ...]] = {
    "replicated": (5,),
    "averaged": (3,),
    "row": (6, 8),
    "column": (8, WIDTH),
    "bias": (4,),
    "vocabulary": (VOCABULARY, WIDTH),
    "halves": (16, WIDTH),
    "fused": (16, WIDTH),
    "uneven": (9, WIDTH),
}
EVERY_RULE = tuple(SHAPES)
# What name patterns tell without shard widths, and so at any TP degree.
WITHOUT_WIDTHS = tuple(name for name in SHAPES if name not in ("fused", "uneven"))
STOCK_RESUMES = tuple(name for name in SHAPES if name != "uneven")  # stock's loader splits evenly


def sub_widths(name: str, tp: int) -> list[list[int]]:
    """Per sub-parameter along dim 0, the width of each TP rank's part."""
    sizes = {"column": [8], "bias": [4], "vocabulary": [PADDED[tp]], "halves": [8, 8], "fused": [8, 4, 4]}
    if name == "uneven":
        return {1: [[5], [4]], 2: [[3, 2], [1, 3]]}[tp]
    return [[size // tp] * tp for size in sizes[name]]


def shard_by_hand(name: str, full: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    name = name.removeprefix("weights.")
    if name in ("replicated", "averaged"):
        return full
    if name == "row":
        return full.chunk(tp, 1)[rank]
    if name == "vocabulary":
        full = nn.functional.pad(full, (0, 0, 0, PADDED[tp] - len(full)), value=torch.nan)
    widths = sub_widths(name, tp)
    blocks = full.split([sum(row) for row in widths])
    return torch.cat([block.split(row)[rank] for block, row in zip(blocks, widths, strict=True)])


class Sheet(nn.Module):
    """Parameters sharded by hand, each element of which is drawn to a value of its own: what a TP rank holds of a
    parameter trains without the rest. The loss means nothing beyond that.

    attributes: mark the parameters as Megatron's layers do.
    """

    def __init__(self, names: Sequence[str], tp: int, *, attributes: bool = False) -> None:
        super().__init__()
        rank = parallel_state.get_tensor_model_parallel_rank()
        self.weights, self.goals = nn.ParameterDict(), {}
        for name in names:
            shape = (PADDED[tp], WIDTH) if name == "vocabulary" else SHAPES[name]
            own = f"{name} of rank {rank}" if name == "averaged" else name
            values = [full_weight(f"{own} {what}", shape) for what in ("starts", "is drawn to")]
            start, self.goals[name] = (shard_by_hand(name, value, rank, tp).clone() for value in values)
            self.weights[name] = parameter = nn.Parameter(start)
            # By this older attribute BF16_Optimizer knows what counts towards the gradient norm on every TP rank.
            parameter.model_parallel = name not in ("replicated", "averaged")  # type: ignore[attr-defined]
            if attributes:
                parameter.tensor_model_parallel = name not in ("replicated", "averaged")  # type: ignore[attr-defined]
                parameter.partition_dim = int(name == "row")  # type: ignore[attr-defined]

    def forward(self, strength: torch.Tensor) -> torch.Tensor:
        distances = [(self.weights[name].float() - goal).square().sum() for name, goal in self.goals.items()]
        return torch.stack(distances).sum() * strength.mean()


def sheet_batches(start: int, stop: int) -> Iterator[Batch]:
    for step in range(start, stop):
        yield (full_weight(f"strength {step}", (4,)).abs() + 0.5,)


def info_by_name(names: Sequence[str], tp: int) -> Info:
    def patterns(*wanted: str) -> list[str]:
        return [rf"weights\.{name}$" for name in wanted if name in names]

    info: dict[str, Any] = {
        **VERSION_ONLY,
        "tp_replicated_parameter_patterns": patterns("replicated"),
        "parameter_to_average_patterns": patterns("averaged"),
        "parameter_with_row_parallelism_patterns": patterns("row"),
        "parameter_with_2_sub_params_cat_dim_0": patterns("halves"),
        "vocabulary_parameter_patterns": patterns("vocabulary"),
        "original_vocab_size": VOCABULARY,
        "parameter_with_sub_params": [],
        "sub_param_shard_widths": {},
    }
    for name in ("fused", "uneven"):
        for pattern in patterns(name):
            widths = sub_widths(name, tp)
            shape = (tuple(sum(row) for row in widths), WIDTH)
            info["parameter_with_sub_params"].append({"patterns": [pattern], "shape": shape, "partition_dim": 0})
            info["sub_param_shard_widths"][pattern] = widths
    return info


def sheet_case(names: Sequence[str] = EVERY_RULE, *, attributes: bool = False, **more: Any) -> Case:
    def build(tp: int) -> tuple[nn.Module, Any]:
        parallel_state.initialize_model_parallel(tp)
        return Sheet(names, tp, attributes=attributes), gpt.ModelParallelUnit()

    more.setdefault("info", lambda tp: info_by_name(names, tp))
    return Case(build, shard_by_hand, sheet_batches, **more)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 1])
@pytest.mark.parametrize("kind", ["bf16_optimizer", "zero1"])
def test_every_rule_is_exported_as_by_the_stock_converter_and_read_by_stock(kind: str, tp: int, tmp_path: Path) -> None:
    export(sheet_case(kind=kind), tp, 2, tmp_path, after=0)
    converted = stock.convert(tmp_path / TAG, tmp_path / "stock" / UNIVERSAL)
    stock.assert_same_universal(tmp_path / UNIVERSAL, converted)
    for target, dp in ((2, 2), (1, 1)):
        stock_resume(sheet_case(STOCK_RESUMES, kind=kind), target, dp, tmp_path)


@pytest.mark.slow
def test_halves_and_a_padded_vocabulary_go_through_a_chain_of_degrees(tmp_path: Path) -> None:
    """T2, T4: TP 2 -> 4 -> 1, by name patterns that only the checkpoint knows. The values are those put in, not only
    those that went out."""
    case = sheet_case(WITHOUT_WIDTHS)

    def first() -> dict[str, torch.Tensor]:
        megads_ucp.install(EXPORTING)
        engine = case.engine(2)
        train(engine, case.batches(0, BEFORE))
        case.save(engine, 2, tmp_path / "0")
        return shards(engine)

    one, other = run_ranks(first, 2)
    exported = tensors(tmp_path / "0" / UNIVERSAL)
    for state in ("fp32", "exp_avg"):
        name = f"weights.halves/{state}"
        gate, up = exported[name].chunk(2)
        assert torch.equal(gate, torch.cat([one[name][:4], other[name][:4]]))
        assert torch.equal(up, torch.cat([one[name][4:], other[name][4:]]))
        assert not torch.equal(gate, up)
        name = f"weights.vocabulary/{state}"
        assert torch.equal(exported[name], torch.cat([one[name], other[name]])[:VOCABULARY])
        assert other[name][VOCABULARY - 128 :].ne(0).all()  # it had padding to lose
        name = f"weights.averaged/{state}"
        assert not torch.equal(one[name], other[name])
        assert torch.equal(exported[name], (one[name] + other[name]) / 2)

    resume(case, 4, 1, tmp_path / "0", tmp_path / "1", after=1)
    resume(case, 1, 2, tmp_path / "1", tmp_path / "2", after=1)


@pytest.mark.slow
def test_shard_widths_at_another_degree_are_the_resuming_models_to_tell(tmp_path: Path) -> None:
    case = sheet_case(["fused", "column"])
    export(case, 2, 1, tmp_path / "tp2", after=0)
    resume(case, 4, 1, tmp_path / "tp2", tmp_path / "tp4", tells=True, after=0)
    with pytest.raises(RankError, match=r"weights\.fused.*shard widths .* at TP degree 4"):
        resume(case, 4, 1, tmp_path / "tp2", tmp_path / "never", after=0)


@pytest.mark.slow
def test_patterns_say_more_than_attributes_without_a_warning(tmp_path: Path) -> None:
    """Sub-parameters of what attributes call one block, and an average of what they call replicated."""

    def body(attributes: bool) -> list[str]:
        case, log = sheet_case(attributes=attributes), Log()
        megads_ucp.install(EXPORTING)
        engine = case.engine(2)
        train(engine, case.batches(0, 1))
        case.save(engine, 2, tmp_path / str(attributes))
        return log.messages

    assert run_ranks(body, 2, True) == run_ranks(body, 2, False) == [[], []]
    stock.assert_same_universal(tmp_path / "True" / UNIVERSAL, tmp_path / "False" / UNIVERSAL)


# ---------------------------------------------------------------------------- T7: metadata from before shard widths


def legacy_info(version: float, names: Sequence[str]) -> Info:
    """Sub-parameters as formats before 0.4 tell them: by their sizes or their count, without shard widths."""
    shapes = {"fused": ((8, 4, 4), WIDTH), "halves": (2, -1), "uneven": ((5, 4), WIDTH)}
    entries = [{"patterns": [rf"weights\.{name}$"], "shape": shapes[name], "partition_dim": 0} for name in names]
    return {"universal_checkpoint_version": version, "parameter_with_sub_params": entries}


@pytest.mark.slow
@pytest.mark.parametrize("version", [0.2, 0.3])
def test_even_sub_parameters_of_an_older_format_load(version: float, tmp_path: Path) -> None:
    names = ["fused", "halves"]
    case = sheet_case(names, info=lambda tp: legacy_info(version, names))
    export(case, 2, 2, tmp_path / "tp2", after=0)
    stock.convert(tmp_path / "tp2" / TAG, tmp_path / "stock" / UNIVERSAL)
    for tp, dp in ((4, 1), (1, 2)):
        resume(case, tp, dp, tmp_path / "stock", tmp_path / f"tp{tp}", after=0, same=assert_same_tensors)


@pytest.mark.slow
@pytest.mark.parametrize("version", [0.2, 0.3])
def test_uneven_sub_parameters_of_an_older_format_are_refused(version: float, tmp_path: Path) -> None:
    refusal = rf"weights\.uneven.*records no shard widths \(version {version}\).*\[5\] do not divide over 2 TP ranks"
    older = sheet_case(["uneven"], info=lambda tp: legacy_info(version, ["uneven"]))
    with pytest.raises(RankError, match=refusal):
        export(older, 2, 1, tmp_path / "never", after=0)

    export(sheet_case(["uneven"]), 2, 1, tmp_path / "tp2", after=0)
    for path in (tmp_path / "tp2" / UNIVERSAL).glob("mp_rank_*"):
        content = torch.load(path, weights_only=False)
        torch.save({**content, "universal_checkpoint_info": older.info(2)}, path)
    (tmp_path / "tp2" / UNIVERSAL / storage.MANIFEST).unlink()  # older converters write none
    with pytest.raises(RankError, match=refusal):
        resume(older, 2, 1, tmp_path / "tp2", tmp_path / "again", after=0)


# -------------------------------------------------------------------------------------------------- T4: the vocabulary


@pytest.mark.slow
def test_layers_know_their_vocabulary_and_the_client_its_size(tmp_path: Path) -> None:
    """T4: 250 rows, padded to 256 at TP 2 and to 252 at TP 1, with no name pattern at all."""
    padded = {1: 252, 2: 256}

    def shard(name: str, full: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            full = nn.functional.pad(full, (0, 0, 0, padded[tp] - len(full)), value=torch.nan)
        return gpt.shard(name, full, rank, tp)

    case = Case(
        lambda tp: gpt.build_gpt(tp, tied=False, vocabulary=padded[tp], layers=1),
        shard,
        gpt.gpt_batches,
        info=lambda tp: {**VERSION_ONLY, "original_vocab_size": VOCABULARY},
    )
    export(case, 2, 1, tmp_path / "0", after=0)
    for name, content in states(tmp_path / "0" / UNIVERSAL).items():
        if not name.endswith("/step"):
            vocabulary = "embeddings" in name or "output_layer" in name
            assert content.get("vocab_tensor", False) == vocabulary, name
            assert (content["param"].shape[0] == VOCABULARY) == vocabulary, name
    resume(case, 1, 2, tmp_path / "0", tmp_path / "1", after=1)
    resume(case, 2, 1, tmp_path / "1", tmp_path / "2", after=1)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_an_odd_vocabulary_under_autotp(tied: bool, tmp_path: Path) -> None:
    """T4: 101 rows, 51 and 50 of them at TP 2."""
    case = llama_case(16, 20, heads=4, key_value_heads=2, tie_word_embeddings=tied)
    losses = export(case, 2, 1, tmp_path / "0")
    vocabulary = "model.embed_tokens.weight" if tied else "lm_head.weight"
    content = states(tmp_path / "0" / UNIVERSAL)[f"{vocabulary}/exp_avg"]
    assert (content["param"].shape, content["vocab_tensor"]) == ((101, 16), True)
    converted = stock.convert(tmp_path / "0" / TAG, tmp_path / "stock" / UNIVERSAL)
    # At TP > 1 what stock writes for a tied parameter's other name is one rank's shard.
    ignored = ["lm_head.weight"] if tied else []
    stock.assert_same_universal(tmp_path / "0" / UNIVERSAL, converted, ignore=ignored)

    # At TP 1 nobody tells the model's layouts, and no metadata but the stock converter's default is written.
    for tp, dp, same in ((1, 1, assert_same_tensors), (2, 2, assert_same_state)):
        resumed = resume(case, tp, dp, tmp_path / "0", tmp_path / f"tp{tp}", check=False, same=same)
        assert resumed == pytest.approx(losses, rel=1e-5)
    # Nor is it missed: AutoTP knows its layouts when it is there again.
    resumed = resume(case, 2, 1, tmp_path / "tp1", tmp_path / "back", check=False, same=assert_same_tensors)
    assert resumed == pytest.approx(losses, rel=1e-5)
    assert_same_state(tmp_path / "back" / UNIVERSAL, tmp_path / "0" / UNIVERSAL)


# ------------------------------------------------------------------------------------- T8: patterns that are not enough


def by_name(**lists: list[str]) -> Info:
    return {**VERSION_ONLY, **lists}


# name -> (what the client says, the parameter it is not enough for, why)
NOT_ENOUGH: dict[str, tuple[Info, str, str]] = {
    "two rules": (
        by_name(
            tp_replicated_parameter_patterns=[r"weights\..*"], parameter_with_row_parallelism_patterns=[r"weights\.row"]
        ),
        "weights.row",
        "it is matched by several rules",
    ),
    "a longer name": (
        by_name(
            tp_replicated_parameter_patterns=[r"weights\.replicated$", r"weights\.col"],
            parameter_with_row_parallelism_patterns=[r"weights\.row$"],
        ),
        "weights.column",
        "only up to the middle of a word",
    ),
    "a mistyped name": (
        by_name(
            tp_replicated_parameter_patterns=[r"weights\.replicated$"],
            parameter_with_row_parallelism_patterns=[r"weights\.wor$"],
        ),
        "weights.row",
        "no pattern matches it",
    ),
    "nothing": ({}, "weights.column", "no source describes it"),
}


@pytest.mark.parametrize("what", NOT_ENOUGH)
def test_a_parameter_without_a_sure_layout_stops_the_export_and_nothing_else(what: str, tmp_path: Path) -> None:
    info, name, why = NOT_ENOUGH[what]
    case = sheet_case(["replicated", "row", "column"], info=lambda tp: info)

    def body() -> list[str]:
        log = Log()
        megads_ucp.install(FORGIVING)
        engine = case.engine(2)
        case.save(engine, 2, tmp_path)
        train(engine, case.batches(0, 1))
        return log.messages

    (message,), others = run_ranks(body, 2)
    assert not others  # both ranks are refused for the same reason
    assert f"{name}, shape" in message and why in message
    for way_out in ("partition_dim", "universal_checkpoint_info", "AutoTP", "The regular checkpoint is untouched"):
        assert way_out in message
    assert (tmp_path / "latest").read_text() == TAG
    assert torch.load(tmp_path / TAG / "mp_rank_01_model_states.pt", weights_only=False)["module"]
    assert len(list((tmp_path / TAG).glob("*optim_states.pt"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".py") == ["latest", TAG]


def test_layers_override_patterns_with_one_warning(tmp_path: Path) -> None:
    wrong = [r".*linear_qkv\.weight$", r".*word_embeddings\.weight$"]
    info = {**gpt.STOCK_INFO, "vocabulary_parameter_patterns": []}
    info["parameter_with_row_parallelism_patterns"] = [*info["parameter_with_row_parallelism_patterns"], *wrong]
    case = replace(gpt_case(layers=1), info=lambda tp: info)

    def body() -> list[str]:
        log = Log()
        megads_ucp.install(EXPORTING)
        engine = case.engine(2)
        train(engine, case.batches(0, 1))
        for tag in (TAG, "again"):
            case.save(engine, 2, tmp_path, tag)
        case.assert_holds(engine, tmp_path / UNIVERSAL)
        return log.messages

    first, *others = run_ranks(body, 2)
    assert others == [[]]
    (warning,) = first
    assert "layouts of 2 parameters" in warning
    assert "linear_qkv" in warning and "word_embeddings" in warning
