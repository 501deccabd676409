# SPDX-License-Identifier: Apache-2.0
"""What comes back with the weights: tied names, client state, schedules; and what a run keeps beside its export.

Consolidated weights, states moved out of the way, a client's own part of a load that fails.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn

import megads_ucp
from megads_ucp.errors import UniversalCheckpointError
from tests.support import stock
from tests.support.models import draw_weights, train
from tests.support.ranks import run_ranks
from tests.support.runs import (
    EXPORTING,
    LOADING,
    TAG,
    UNIVERSAL,
    Recipe,
    assert_resumes,
    assert_same_state,
    changed,
    contents,
    export,
    save,
    tensors,
    with_groups_of,
)

# ------------------------------------------------------------------------------------------------ what else comes back


class Tied(nn.Module):
    """An input and an output layer that share their weight, unless asked not to."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
        self.between = nn.Linear(7, 7)
        if tied:
            self.last.weight = self.first.weight
        draw_weights(self)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.between(torch.tanh(self.first(inputs.to(self.first.weight.dtype)))))
        return nn.functional.mse_loss(self.last(hidden).float()[:, :5], targets)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "bf16_optimizer"])
def test_tied_weights(kind: str, tmp_path: Path) -> None:
    """Under both of their names, from either kind of directory; a model that does not tie them lacks the states."""
    recipe = Recipe(kind, Tied)
    losses = export(recipe, 2, tmp_path / "ours")
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    rel = 1e-5 if kind == "fp32" else 5e-3
    for name in ("ours", "stock"):
        assert_resumes(recipe, 3, tmp_path / name, tmp_path / f"from {name}", losses, rel=rel)

    def body() -> str:
        megads_ucp.install()
        tied = recipe.engine(resuming=True)
        tied.load_checkpoint(str(tmp_path / "ours"))
        assert tied.module.first.weight is tied.module.last.weight
        assert torch.equal(tied.module.first.weight.float(), saved.to(tied.module.first.weight.dtype).float())
        engine = replace(recipe, model=lambda: Tied(False)).engine(resuming=True)
        fresh = contents(engine)
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path / "ours"))
        assert changed(engine, fresh) == []
        return str(caught.value)

    saved = tensors(tmp_path / "ours" / UNIVERSAL)["first.weight/fp32"]
    first, *others = run_ranks(body, 3)
    assert others == [first] * 2 and "parameter last.weight" in first and "load_optimizer_states=False" in first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first.weight", "between.weight"])
def test_a_parameter_that_was_frozen_has_no_states(name: str, tmp_path: Path) -> None:
    """Whichever of its group it is: the others' states are not given up in silence."""

    def frozen() -> nn.Module:
        model = Tied(False)
        model.get_parameter(name).requires_grad_(False)
        return model

    export(Recipe("fp32", frozen), 2, tmp_path / "ours", after=0)
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    saved = tensors(tmp_path / "ours" / UNIVERSAL)

    def body() -> list[str]:
        megads_ucp.install(EXPORTING)
        messages = []
        for source in (tmp_path / "ours", tmp_path / "stock"):
            engine = Recipe("fp32", lambda: Tied(False)).engine(resuming=True)
            fresh = contents(engine)
            with pytest.raises(UniversalCheckpointError) as caught:
                engine.load_checkpoint(str(source))
            assert changed(engine, fresh) == []
            messages.append(str(caught.value))
            engine.load_checkpoint(str(source), load_optimizer_states=False)
            assert [
                key for key, value in contents(engine).items() if not torch.equal(value, saved[f"{key}/fp32"])
            ] == []
        return messages

    first, *others = run_ranks(body, 3)
    assert others == [first] * 2
    assert f"parameter {name}" in first[0] and "load_optimizer_states=False" in first[0]
    assert name in first[1] and "exp_avg" in first[1]


@pytest.mark.slow
def test_client_state_and_the_learning_rate_schedule_come_back(tmp_path: Path) -> None:
    """Whatever objects are in it, from either kind of directory, as a regular load returns it."""
    recipe = Recipe("fp32", scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    saved = {"iteration": 3, "args": argparse.Namespace(hidden=7), "random": torch.arange(3)}

    def source() -> dict[str, Any]:
        engine = recipe.saved(tmp_path / "unused")
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
        engine.save_checkpoint(str(tmp_path / "ours"), tag=TAG, client_state={**saved, **info})
        return dict(engine.lr_scheduler.state_dict())

    schedule = run_ranks(source, 2)[0]
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)

    def target(directory: Path) -> tuple[str, dict[str, Any], dict[str, Any], int]:
        engine = Recipe("fp32", scheduler=recipe.scheduler).engine(resuming=True)
        path, client = engine.load_checkpoint(str(directory))
        return path, client, dict(engine.lr_scheduler.state_dict()), engine.global_steps

    def with_the_package(directory: Path) -> tuple[str, dict[str, Any], dict[str, Any], int]:
        megads_ucp.install()
        return target(directory)

    for name in ("ours", "stock"):
        expected = run_ranks(target, 2, tmp_path / name)[0]
        for path, client, rates, steps in run_ranks(with_the_package, 3, tmp_path / name):
            assert path == expected[0] and steps == expected[3] == 3
            assert rates == expected[2] == schedule
            assert list(stock.differences(client, expected[1], "client")) == []
            assert list(stock.differences({key: client[key] for key in saved}, saved, "client")) == []


# ------------------------------------------------------------------------------------- what else a run keeps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero1", "zero2", "round_robin", "fp16", "cpu_offload"])
def test_consolidated_weights_are_what_they_are_without_the_package(kind: str, tmp_path: Path) -> None:
    """zero_to_fp32.py, as it lies in the checkpoint's directory, and engine.save_16bit_model.

    Of a run that resumed from a universal checkpoint, too; with groups that are mostly padding.
    """
    recipe = with_groups_of((1, 9), kind)

    def source(installed: bool) -> None:
        if installed:
            megads_ucp.install(EXPORTING)
        engine = recipe.engine()
        train(engine, recipe.batches(0, 3))
        keep(engine, tmp_path / str(installed))

    def resumed() -> None:
        keep(recipe.resumed(tmp_path / "True"), tmp_path / "resumed")

    def keep(engine: Any, directory: Path) -> None:
        save(engine, directory)
        engine.save_16bit_model(str(directory), "model.bin")

    def consolidate(directory: Path) -> None:
        sys.argv = ["zero_to_fp32.py", str(directory), str(directory / "consolidated"), "-t", TAG]
        runpy.run_path(str(directory / "zero_to_fp32.py"), run_name="__main__")

    def found(directory: Path, world: int, body: Callable[..., None], *args: Any) -> dict[str, Any]:
        run_ranks(body, world, *args)
        run_ranks(consolidate, 1, directory)
        files = [directory / "model.bin", *sorted((directory / "consolidated").iterdir())]
        assert len(files) == 2
        return {path.name: torch.load(path, weights_only=False) for path in files}

    expected = found(tmp_path / "False", 2, source, False)
    assert all(len(weights) == 8 for weights in expected.values())
    assert list(stock.differences(found(tmp_path / "True", 2, source, True), expected, "")) == []
    assert list(stock.differences(found(tmp_path / "resumed", 3, resumed), expected, "")) == []


OFFLOADED = [
    *(("zero2", [state]) for state in OffloadStateTypeEnum if state is not OffloadStateTypeEnum.contiguous_grad_buffer),
    ("zero2", None),
    ("zero1", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "include"), OFFLOADED)
def test_states_that_are_offloaded_meanwhile(
    kind: str, include: list[OffloadStateTypeEnum] | None, tmp_path: Path
) -> None:
    """engine.offload_states(), of all there is or of one part: it may be saved; for a load it has to be undone."""
    recipe = Recipe(kind)

    def body(offloading: bool) -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = replace(recipe, config=LOADING).engine()
        train(engine, recipe.batches(0, 3))
        if offloading:
            engine.offload_states(include)
        save(engine, tmp_path / str(offloading))
        if offloading:
            with pytest.raises(UniversalCheckpointError, match=r"offloaded: call engine\.reload_states\(\) first"):
                engine.load_checkpoint(str(tmp_path / "True"))
            engine.reload_states()
            losses = train(engine, recipe.batches(3, 5))
            engine.load_checkpoint(str(tmp_path / "True"))
            assert train(engine, recipe.batches(3, 5)) == losses
            return losses
        return train(engine, recipe.batches(3, 5))

    assert run_ranks(body, 2, True) == run_ranks(body, 2, False)
    assert_same_state(tmp_path / "True" / UNIVERSAL, tmp_path / "False" / UNIVERSAL)


class PickySchedule(torch.optim.lr_scheduler.ConstantLR):
    """Of the client's own code, which a load runs as well; fails on one rank."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such schedule")
        super().load_state_dict(state_dict)


@pytest.mark.slow
def test_nobody_waits_for_a_rank_whose_own_part_of_a_load_fails(tmp_path: Path) -> None:
    recipe = Recipe("fp32", scheduler=PickySchedule)
    run_ranks(lambda: recipe.saved(tmp_path) and None, 2)

    def body() -> str:
        with pytest.raises((ValueError, UniversalCheckpointError)) as caught:
            recipe.resumed(tmp_path)
        return str(caught.value)

    other, failed = run_ranks(body, 2)
    assert failed == "no such schedule"
    assert "rank 1: ValueError: no such schedule" in other and "must not be used" in other


def test_states_that_are_offloaded_on_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    recipe = Recipe("zero2")

    def body() -> str:
        megads_ucp.install(EXPORTING)
        engine = replace(recipe, config=LOADING).engine()
        train(engine, recipe.batches(0, 1))
        save(engine, tmp_path)
        if dist.get_rank() == 1:
            engine.offload_states()
        with pytest.raises(UniversalCheckpointError, match="rank 1: nothing can be loaded while") as caught:
            engine.load_checkpoint(str(tmp_path))
        return str(caught.value)

    first, other = run_ranks(body, 2)
    assert first == other
