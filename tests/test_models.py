# SPDX-License-Identifier: Apache-2.0
"""The models and engines that later tests stand on: every kind trains, and equally at every topology."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models import KINDS, MLP, initialize, mlp_batches, train
from tests.ranks import run_ranks


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_engine_trains(kind: str) -> None:
    def body() -> tuple[str, list[float]]:
        engine = initialize(MLP(scalars=(1, 9)), kind)
        return type(engine.optimizer).__name__, train(engine, mlp_batches(0, 3))

    (name, losses), other = run_ranks(body, 2)
    assert (name, losses) == other
    assert name == ("BF16_Optimizer" if kind == "bf16_optimizer" else "DeepSpeedZeroOptimizer")
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[2] != losses[0]


def test_the_loss_does_not_depend_on_the_number_of_ranks() -> None:
    def body(accumulation: int) -> list[float]:
        engine = initialize(MLP(), "fp32", config={"gradient_accumulation_steps": accumulation})
        return train(engine, mlp_batches(0, 4))

    alone = run_ranks(body, 1, 1)[0]
    assert run_ranks(body, 3, 1)[0] == pytest.approx(alone, rel=1e-5)
    assert run_ranks(body, 2, 2)[0] == pytest.approx(alone, rel=1e-5)
