# SPDX-License-Identifier: Apache-2.0
"""What a resume remarks on: a global batch that is no longer the same, another optimizer."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megads_ucp
from megads_ucp.load.remarks import batch_advice
from tests.support.degrees import llama_case
from tests.support.models import decay_groups, mlp_batches, train
from tests.support.ranks import run_ranks
from tests.support.runs import (
    EXPORTING,
    Log,
    Recipe,
    export,
    save,
)

pytestmark = pytest.mark.slow


class Everything(Log):
    """Collects remarks on the global batch as well."""

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize(
    ("batch", "degree", "micro_batch", "advice"),
    [
        (12, 3, 2, "To keep 12, set gradient_accumulation_steps to 2."),
        (1024, 64, 1, "To keep 1024, set gradient_accumulation_steps to 16."),
        (12, 2, 4, "one of ['1 x 6', '2 x 3', '3 x 2', '6 x 1']."),
        (12, 5, 1, "12 samples do not divide over DP 5; degrees near it that fit: [3, 4, 6]."),
        (7, 3, 1, "degrees near it that fit: none."),
    ],
)
def test_advice_on_the_global_batch(batch: int, degree: int, micro_batch: int, advice: str) -> None:
    assert batch_advice(batch, degree, micro_batch).endswith(advice)


def test_a_resume_says_how_to_keep_the_global_batch(tmp_path: Path) -> None:
    """On one rank; and nothing where it is kept."""
    of_twelve = Recipe("fp32", config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
    run_ranks(lambda: of_twelve.saved(tmp_path) and None, 2)

    def body(accumulation: int) -> list[str]:
        log = Everything()
        replace(of_twelve, config={**of_twelve.config, "gradient_accumulation_steps": accumulation}).resumed(tmp_path)
        return log.messages

    ((message,), *others) = run_ranks(body, 3, 3)
    assert others == [[], []]
    assert "global batch of 12, this run has one of 18" in message
    assert message.endswith("set gradient_accumulation_steps to 2.")
    assert run_ranks(body, 3, 2) == [[], [], []]


@pytest.mark.parametrize(
    ("micro_batch", "advice"),
    [(2, "set gradient_accumulation_steps to 2."), (3, "must be one of ['1 x 4', '2 x 2', '4 x 1'].")],
)
def test_a_global_batch_that_no_longer_divides(micro_batch: int, advice: str) -> None:
    """Point 7 of a resume at another DP: DeepSpeed's own refusal, from which no accumulation can be read."""
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 5}

    def body(installed: bool) -> str:
        if installed:
            megads_ucp.install()
            megads_ucp.uninstall()
            megads_ucp.install()
        with pytest.raises(AssertionError, match="Check batch related parameters") as caught:
            Recipe("fp32", config=config).engine()
        return str(caught.value)

    (stock,) = run_ranks(body, 1, False)
    ours = run_ranks(body, 3, True)
    assert "gradient_accumulation_steps to" not in stock and "1 x" not in stock
    assert len(set(ours)) == 1 and advice in ours[0]


def test_tensor_parallel_ranks_of_autotp_share_a_batch(tmp_path: Path) -> None:
    """DeepSpeed's train_batch_size counts them as if each had samples of its own."""
    case = llama_case(16, 10, heads=4, key_value_heads=2)

    def body(tp: int) -> list[str]:
        log = Everything()
        megads_ucp.install(EXPORTING)
        engine = case.engine(tp, resuming=tp > 1)
        if tp > 1:
            engine.load_checkpoint(str(tmp_path))
            assert engine.train_batch_size() == 2
        else:
            case.save(engine, tp, tmp_path)
        return log.messages

    assert run_ranks(body, 1, 1) == [[]]
    assert [message for messages in run_ranks(body, 2, 2) for message in messages if "global batch" in message] == []


def test_another_optimizer_than_the_one_that_saved_is_remarked_on(tmp_path: Path) -> None:
    def with_momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)

    export(Recipe("fp32"), 2, tmp_path, after=0)

    def body(recipe: Recipe) -> list[str]:
        log = Log()
        recipe.resumed(tmp_path)
        return log.messages

    (message,) = run_ranks(body, 1, Recipe("fp32", optimizer=with_momentum))[0]
    assert "AdamW" in message and "SGD" in message and "load_optimizer_states=False" in message
    (message,) = run_ranks(body, 1, Recipe("fp32", optimizer=functools.partial(torch.optim.Adam, lr=1e-2)))[0]
    assert message.count("this run:") == 1 and "decoupled_weight_decay True (this run: False)" in message


@pytest.mark.slow
def test_hyperparameters_of_this_run_that_give_way_to_the_saved_ones(tmp_path: Path) -> None:
    """Once, in one line on one rank; not those of a schedule, nor what has been the same all along."""

    def of(lr: float, decay: float, schedule: bool = False) -> Recipe:
        def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
            first, second = decay_groups(model)
            return [{**first, "weight_decay": decay}, second]

        def build(given: list[dict[str, Any]]) -> torch.optim.Optimizer:
            return torch.optim.AdamW(given, lr=lr)

        halved = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1) if schedule else None
        return Recipe("fp32", optimizer=build, groups=groups, scheduler=halved)

    export(of(1e-2, 0.1), 2, tmp_path / "constant", after=0)
    export(of(1e-2, 0.1, schedule=True), 2, tmp_path / "scheduled", after=0)

    def body(recipe: Recipe, name: str) -> tuple[list[str], float]:
        log = Log()
        engine = recipe.resumed(tmp_path / name)
        return log.messages, engine.optimizer.param_groups[0]["weight_decay"]

    ((message,), decay), silent = run_ranks(body, 2, of(3e-2, 0.2), "constant")
    assert decay == 0.1 and silent == ([], 0.1)
    assert (
        "the saved ones win: lr 0.01 (this run: 0.03) in group 0, 1; weight_decay 0.1 (this run: 0.2) in group 0."
        in message
    )
    for name, recipe in (("constant", of(1e-2, 0.1)), ("scheduled", of(1e-2, 0.1, schedule=True))):
        assert run_ranks(body, 2, recipe, name) == [([], 0.1)] * 2
    (message,), _ = run_ranks(body, 1, of(3e-2, 0.1, schedule=True), "scheduled")[0]
    assert "win: initial_lr 0.01 (this run: 0.03) in group 0, 1." in message


@pytest.mark.slow
def test_a_global_batch_that_is_ramped_up_is_none_to_keep(tmp_path: Path) -> None:
    """It starts small in every run, and the client sets it from step to step."""
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    ramping = Recipe("fp32", config=config)

    def source() -> None:
        megads_ucp.install(EXPORTING)
        engine = ramping.engine()
        for samples in (4, 8, 12):
            engine.set_train_batch_size(samples)
            train(engine, mlp_batches(0, 1, samples=samples))
        save(engine, tmp_path)

    run_ranks(source, 2)

    def body(samples: int) -> list[str]:
        log = Everything()
        engine = replace(ramping, config={**config, "train_batch_size": samples}).resumed(tmp_path)
        engine.set_train_batch_size(12)
        train(engine, mlp_batches(1, 2, samples=12))
        return log.messages

    assert run_ranks(body, 4, 4) == [[]] * 4  # ramped up again
    assert run_ranks(body, 4, 12) == [[]] * 4  # its end, constant from now on
    (message,), *_ = run_ranks(body, 1, 6)
    assert "global batch of 12, this run has one of 6" in message

    def of_megatron() -> list[str]:
        """With a ramp that starts elsewhere at this DP: its arguments are where Megatron-DeepSpeed keeps them."""
        arguments = argparse.Namespace(universal_checkpoint=True, rampup_batch_size=["6", "6", "24"])
        sys.modules["megatron.global_vars"] = SimpleNamespace(_GLOBAL_ARGS=arguments)  # type: ignore[assignment]
        return body(6)

    assert run_ranks(of_megatron, 1) == [[]]
