# SPDX-License-Identifier: Apache-2.0
"""Exports and resumes of DeepSpeed pipelines of megatron-core layers, between any PP x TP x DP of up to four ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

import megads_ucp
from megads_ucp.storage import read_manifest
from tests.support import stock
from tests.support.ranks import run_ranks
from tests.support.runs import AFTER, BEFORE, EXPORTING, TAG, UNIVERSAL, Log, assert_same_state, assert_same_tensors

pytest.importorskip("megatron.core")

from tests.support import gpt
from tests.support.pipeline import SPARE, Grid, Pipeline, train

ONE, PP2, PP4 = Grid(1, 1, 1), Grid(2, 1, 1), Grid(4, 1, 1)
PP2TP2, PP2DP2, TP2DP2 = Grid(2, 2, 1), Grid(2, 1, 2), Grid(1, 2, 2)
DP2PP2 = Grid(2, 1, 2, axes=("data", "pipe", "model"))  # a stage's ranks are no neighbours


def export(pipeline: Pipeline, grid: Grid, directory: Path, *, after: int = AFTER) -> list[float]:
    """Trains, saves and exports to `directory`, and trains on: the losses of the steps after the save."""

    def body() -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = pipeline.engine(grid)
        train(engine, gpt.gpt_batches(0, BEFORE))
        pipeline.save(engine, directory)
        pipeline.assert_holds(engine, directory / UNIVERSAL, but=SPARE if engine.stage_id else "")
        return train(engine, gpt.gpt_batches(BEFORE, BEFORE + after))

    return run_ranks(body, grid.world)[0]


def resume(
    pipeline: Pipeline,
    grid: Grid,
    directory: Path,
    again: Path,
    *,
    after: int = AFTER,
    same: Callable[[Path, Path], None] = assert_same_state,
    remark: str | None = None,
) -> list[float]:
    """Loads `directory`, silently or with one remark, exports it to `again`, which holds the same, and trains on."""

    def body() -> tuple[list[float], list[str]]:
        megads_ucp.install(EXPORTING)
        log = Log()
        engine = pipeline.engine(grid, resuming=True)
        engine.load_checkpoint(str(directory))
        pipeline.assert_holds(engine, directory / UNIVERSAL)
        pipeline.save(engine, again)
        return train(engine, gpt.gpt_batches(BEFORE, BEFORE + after)), log.messages

    results = run_ranks(body, grid.world)
    said = [message for _, messages in results for message in messages]
    assert [remark in message for message in said] == [True] if remark is not None else said == []
    same(again / UNIVERSAL, directory / UNIVERSAL)
    return results[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "source", "targets"),
    [
        (Pipeline(), PP2TP2, [TP2DP2, DP2PP2]),
        (Pipeline(tied=False), TP2DP2, [PP4]),
        (Pipeline("bf16_optimizer"), DP2PP2, [PP2TP2, TP2DP2]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_a_pipeline_resumes_on_any_grid(
    pipeline: Pipeline, source: Grid, targets: Sequence[Grid], tmp_path: Path
) -> None:
    """T5, and all that a stage has: the same bits everywhere, the losses of the run that went on."""
    losses = export(pipeline, source, tmp_path / "source")
    for target in targets:
        resumed = resume(pipeline, target, tmp_path / "source", tmp_path / str(target))
        assert resumed == pytest.approx(losses, rel=5e-3 if pipeline.kind == "bf16_optimizer" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "bf16_optimizer"])
def test_the_stock_converter_and_the_stock_load_of_a_pipeline(kind: str, tmp_path: Path) -> None:
    """Stock reads neither the `module` of mp_rank files nor layer files under load_universal, so it needs none."""
    pipeline = Pipeline(kind, gated=False)
    losses = export(pipeline, PP2TP2, tmp_path / "ours")
    converted = stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    stock.assert_same_universal(tmp_path / "ours" / UNIVERSAL, converted)

    def body(grid: Grid) -> list[float]:
        assert DeepSpeedEngine.__init__.__module__ == "deepspeed.runtime.engine"
        engine = pipeline.engine(grid, resuming=True)
        engine.load_checkpoint(str(tmp_path / "ours"))
        pipeline.assert_holds(engine, tmp_path / "ours" / UNIVERSAL)
        return train(engine, gpt.gpt_batches(BEFORE, BEFORE + AFTER))

    for grid in (PP4, TP2DP2, ONE):
        assert run_ranks(body, grid.world, grid)[0] == pytest.approx(losses, rel=5e-3 if kind != "fp32" else 1e-5)


@pytest.mark.slow
def test_a_tied_copy_that_has_drifted_is_warned_of_and_the_first_one_exported(tmp_path: Path) -> None:
    """Of what is tied, and of nothing else that the module holds: the spare positions differ all the time."""

    def body() -> list[str]:
        megads_ucp.install(EXPORTING)
        log = Log()
        engine = Pipeline().engine(PP2DP2)
        train(engine, gpt.gpt_batches(0, 1))
        Pipeline().save(engine, tmp_path / "agreeing")
        assert log.messages == []
        if engine.stage_id == 1 and engine.grid.data_parallel_id == 0:
            weight = engine.module.tied_modules["embed"].word_embeddings.weight
            weight._hp_mapping.get_hp_fragment().detach()[5] += 0.25
        Pipeline().save(engine, tmp_path / "drifted")
        return log.messages

    (message,), *others = run_ranks(body, PP2DP2.world)
    assert others == [[]] * 3
    expected = "copies have drifted apart: parameter tied_modules.embed.word_embeddings.weight, state fp32: "
    assert message.startswith(expected) and message.count(" state ") == 1
    assert "on later pipeline stages differs" in message and " in 1 element, by up to 0.25, at [0, 5]: " in message
    assert_same_tensors(tmp_path / "drifted" / UNIVERSAL, tmp_path / "agreeing" / UNIVERSAL)


def kinds_of_parameters(module: nn.Module) -> list[dict[str, Any]]:
    """Four groups with values of their own. DeepSpeed drops those of which a stage has no parameter."""

    def kind(name: str, parameter: nn.Parameter) -> str:
        if "word_embeddings" in name or "output_layer" in name:
            return "words"
        return "positions" if "positions" in name else "matrices" if parameter.ndim > 1 else "vectors"

    rates = {"words": 2e-3, "positions": 3e-3, "matrices": 1e-2, "vectors": 5e-3}
    members: dict[str, list[nn.Parameter]] = {name: [] for name in rates}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            members[kind(name, parameter)].append(parameter)
    return [{"params": members[name], "name": name, "lr": rate, "weight_decay": rate} for name, rate in rates.items()]


def values_of_parameters(universal: Path) -> dict[str, dict[str, Any]]:
    """The hyperparameters that every parameter was trained with."""
    groups = read_manifest(universal).groups
    return {name: dict(group.hyperparameters) for group in groups for name in group.parameters}


@pytest.mark.slow
def test_hyperparameters_of_groups_that_not_every_stage_has(tmp_path: Path) -> None:
    """By the names of the members. (DeepSpeedZeroOptimizer hangs in its first step if stages have not the same number
    of groups; BF16_Optimizer does not.)"""
    pipeline = Pipeline("bf16_optimizer", tied=False, groups=kinds_of_parameters)

    def source() -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = pipeline.engine(PP4)
        train(engine, gpt.gpt_batches(0, BEFORE))
        for group in engine.optimizer.param_groups:  # as a schedule of the client's own would
            group.update(lr=group["lr"] / 2, weight_decay=group["weight_decay"] * 3, betas=(0.85, 0.97))
        pipeline.save(engine, tmp_path / "source")
        return train(engine, gpt.gpt_batches(BEFORE, BEFORE + AFTER))

    losses = run_ranks(source, 4)[0]
    values = values_of_parameters(tmp_path / "source" / UNIVERSAL)
    places: dict[str, set[int]] = {}
    for group in read_manifest(tmp_path / "source" / UNIVERSAL).groups:
        places.setdefault(group.hyperparameters["name"], set()).add(group.index)
    assert places["matrices"] == {0, 2}
    for target in (PP2, TP2DP2):
        again = tmp_path / str(target)
        resumed = resume(
            pipeline, target, tmp_path / "source", again, same=assert_same_tensors, remark="the saved ones win"
        )
        assert values_of_parameters(again / UNIVERSAL) == values
        assert resumed == pytest.approx(losses, rel=5e-3)
