# SPDX-License-Identifier: Apache-2.0
"""The stock tools and this package on each other's checkpoints, for every kind of engine.

Our export is what the stock converter makes of the same regular checkpoint, stock DeepSpeed resumes from it as from its
own, and this package resumes from the converter's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import megads_ucp
from tests.support import stock
from tests.support.models import KINDS, train
from tests.support.ranks import run_ranks
from tests.support.runs import TAG, UNIVERSAL, Log, Recipe, assert_same_state, export, tensors


def stock_resume(recipe: Recipe, world: int, directory: Path) -> list[float]:
    """The losses of a run that resumes from `directory` without this package."""

    def body() -> list[float]:
        assert DeepSpeedEngine.__init__.__module__ == "deepspeed.runtime.engine"
        engine = recipe.engine(resuming=True)
        engine.load_checkpoint(str(directory))
        assert "load_checkpoint" not in vars(engine)
        return train(engine, recipe.batches(3, 6))

    return run_ranks(body, world)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_stock_converter_and_the_stock_load(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(kind)
    losses = export(recipe, 2, tmp_path / "ours")
    converted = stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    stock.assert_same_universal(tmp_path / "ours" / UNIVERSAL, converted)

    # Stock DeepSpeed loads any universal checkpoint wrongly into a round-robin engine, its own ones too.
    target = Recipe("fp32_zero2") if kind.startswith("round_robin") else recipe
    rel = 0 if target is recipe else 1e-5
    assert stock_resume(target, 2, tmp_path / "ours") == pytest.approx(losses, rel=rel)
    stock_losses = stock_resume(target, 3, tmp_path / "stock")
    assert stock_resume(target, 3, tmp_path / "ours") == stock_losses
    assert stock_losses == pytest.approx(losses, rel=5e-3)

    if kind != "bf16_optimizer":  # whose checkpoints zero_to_fp32 does not know
        assert_consolidates(tmp_path / "ours")


def assert_consolidates(directory: Path) -> None:
    """zero_to_fp32, which ships inside of every regular checkpoint, gives what the export has."""

    def body() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in get_fp32_state_dict_from_zero_checkpoint(directory, TAG).items()}

    consolidated, exported = run_ranks(body, 1)[0], tensors(directory / UNIVERSAL)
    assert [name for name in consolidated if not torch.equal(consolidated[name], exported[f"{name}/fp32"])] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16_optimizer", "round_robin"])
def test_a_resume_from_the_stock_converters_directory(kind: str, tmp_path: Path) -> None:
    """Parameter groups, which it does not name, are matched by position; a run with several is warned of it, once."""
    recipe = Recipe(kind)
    losses = export(recipe, 2, tmp_path / "ours")
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)

    def body() -> tuple[list[float], list[str]]:
        log = Log()
        engine = recipe.resumed(tmp_path / "stock", tag=UNIVERSAL, again=tmp_path / "again")
        return train(engine, recipe.batches(3, 6)), log.messages

    results = run_ranks(body, 3)
    assert_same_state(tmp_path / "again" / UNIVERSAL, tmp_path / "ours" / UNIVERSAL)
    assert results[0][0] == pytest.approx(losses, rel=5e-3 if kind == "bf16_optimizer" else 1e-5)
    assert [len(messages) for _, messages in results] == [1, 0, 0]
    assert "position" in results[0][1][0]


def test_a_regular_checkpoint_made_with_the_package_resumes_without_it(tmp_path: Path) -> None:
    """True paddings and slice mappings in it trouble nobody; round-robin engines are where they differ from stock."""
    recipe = Recipe("round_robin")
    losses = export(recipe, 2, tmp_path)

    def body(installed: bool) -> list[float]:
        if installed:
            megads_ucp.install()
        engine = recipe.engine()
        engine.load_checkpoint(str(tmp_path), tag=TAG)
        return train(engine, recipe.batches(3, 6))

    assert run_ranks(body, 2, False)[0] == losses
    assert run_ranks(body, 2, True)[0] == losses
