# SPDX-License-Identifier: Apache-2.0
"""Exports and resumes of DeepSpeed pipelines of megatron-core layers, between any PP x TP x DP of up to four ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

import megads_ucp
from tests import stock
from tests.ranks import run_ranks
from tests.runs import AFTER, BEFORE, EXPORTING, TAG, UNIVERSAL, Log, assert_same_state

pytest.importorskip("megatron.core")

from tests import gpt
from tests.pipeline import SPARE, Grid, Pipeline, train

ONE, PP2, PP4 = Grid(1, 1, 1), Grid(2, 1, 1), Grid(4, 1, 1)
PP2TP2, PP2DP2, TP2DP2 = Grid(2, 2, 1), Grid(2, 1, 2), Grid(1, 2, 2)


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


def resume(pipeline: Pipeline, grid: Grid, directory: Path, again: Path, *, after: int = AFTER) -> list[float]:
    """Loads `directory`, silently, exports what was loaded to `again`, which must hold the same, and trains on."""

    def body() -> tuple[list[float], list[str]]:
        megads_ucp.install(EXPORTING)
        log = Log()
        engine = pipeline.engine(grid, resuming=True)
        engine.load_checkpoint(str(directory))
        pipeline.assert_holds(engine, directory / UNIVERSAL)
        pipeline.save(engine, again)
        return train(engine, gpt.gpt_batches(BEFORE, BEFORE + after)), log.messages

    results = run_ranks(body, grid.world)
    assert [message for _, messages in results for message in messages] == []
    assert_same_state(again / UNIVERSAL, directory / UNIVERSAL)
    return results[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "source", "targets"),
    [
        (Pipeline(), PP2TP2, [TP2DP2, PP4, ONE]),
        (Pipeline(), PP2DP2, [PP2TP2, PP2]),
        (Pipeline(tied=False), PP4, [PP2DP2, TP2DP2]),
        (Pipeline(tied=False), TP2DP2, [PP4]),
        (Pipeline("bf16_optimizer"), PP2DP2, [PP2TP2, PP4]),
        (Pipeline("bf16_optimizer"), TP2DP2, [PP2DP2]),
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

    for grid in (PP2TP2, PP4, TP2DP2, ONE):
        assert run_ranks(body, grid.world, grid)[0] == pytest.approx(losses, rel=5e-3 if kind != "fp32" else 1e-5)
