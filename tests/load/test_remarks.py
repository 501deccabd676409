# SPDX-License-Identifier: Apache-2.0
"""What a resume remarks on: a global batch that is no longer the same, another optimizer."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megads_ucp
from megads_ucp.load.remarks import batch_advice
from tests.support.degrees import llama_case
from tests.support.ranks import run_ranks
from tests.support.runs import (
    EXPORTING,
    Log,
    Recipe,
    export,
)


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
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    export(Recipe("fp32"), 2, tmp_path, after=0)

    def body(recipe: Recipe) -> list[str]:
        log = Log()
        recipe.resumed(tmp_path)
        return log.messages

    (message,) = run_ranks(body, 1, Recipe("fp32", optimizer=with_momentum))[0]
    assert "AdamW" in message and "SGD" in message and "load_optimizer_states=False" in message
    assert run_ranks(body, 1, Recipe("fp32", optimizer=torch.optim.Adam))[0] == []
