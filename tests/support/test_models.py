# SPDX-License-Identifier: Apache-2.0
"""The models and engines that later tests stand on: every kind trains, and equally at every topology."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import stock
from tests.support.models import KINDS, MLP, initialize, mlp_batches, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow


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


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_trains_alike_at_every_topology(tied: bool) -> None:
    gpt = pytest.importorskip("tests.support.gpt")

    def body(tp: int) -> list[float]:
        model, mpu = gpt.build_gpt(tp, tied=tied)
        return train(initialize(model, "fp32", mpu=mpu), gpt.gpt_batches(0, 3))

    alone = run_ranks(body, 1, 1)[0]
    assert run_ranks(body, 4, 2) == [pytest.approx(alone, rel=1e-5)] * 4
    assert run_ranks(body, 4, 4) == [pytest.approx(alone, rel=1e-5)] * 4


def save_mlp(directory: Path) -> None:
    """On each rank: trains an MLP for two steps and saves the regular checkpoint `directory`/step."""
    engine = initialize(MLP(), "bf16_optimizer")
    train(engine, mlp_batches(0, 2))
    engine.save_checkpoint(str(directory), tag="step", client_state={"universal_checkpoint_info": {}})


def test_the_stock_converter_agrees_with_itself_and_only_with_itself(tmp_path: Path) -> None:
    run_ranks(save_mlp, 2, tmp_path)
    first = stock.convert(tmp_path / "step", tmp_path / "one" / "universal")
    second = stock.convert(tmp_path / "step", tmp_path / "two" / "universal")
    stock.assert_same_universal(first, second)

    weight = "zero/layers.0.weight/fp32.pt"
    content = torch.load(first / weight, weights_only=False)
    content["param"].detach()[3, 2] += 1
    content["cat_dim"] = 1
    torch.save(content, first / weight)
    shutil.rmtree(first / "zero" / "layers.1.bias")
    differences = list(stock.universal_differences(first, second))

    assert "zero/layers.1.bias/exp_avg.pt: missing" in differences
    assert f"{weight}['cat_dim']: 1 instead of 0" in differences
    assert any(f"{weight}['param']: 1 of 91 elements differ, the first at (3, 2)" in line for line in differences)
    assert len(differences) == 2 + len(list((second / "zero" / "layers.1.bias").iterdir()))
    with pytest.raises(AssertionError, match="cat_dim"):
        stock.assert_same_universal(first, second, ignore=["layers.1.bias"])


def test_the_stock_converter_rebuilds_the_full_weights_of_a_gpt(tmp_path: Path) -> None:
    gpt = pytest.importorskip("tests.support.gpt")

    def body() -> dict[str, torch.Tensor]:
        model, mpu = gpt.build_gpt(2, tied=False)
        engine = initialize(model, "fp32", mpu=mpu)
        train(engine, gpt.gpt_batches(0, 1))
        engine.save_checkpoint(str(tmp_path), tag="step", client_state={"universal_checkpoint_info": gpt.STOCK_INFO})
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    shards = run_ranks(body, 2)
    universal = stock.convert(tmp_path / "step", tmp_path / "universal")
    for name in shards[0]:
        full = torch.load(universal / "zero" / name / "fp32.pt", weights_only=False)["param"]
        for rank in range(2):
            assert torch.equal(gpt.shard(name, full, rank, 2), shards[rank][name]), name


@pytest.mark.slow  # builds a C++ extension, once per pytest cache
def test_offload_with_deepspeeds_own_cpu_optimizer_trains(build_op: Callable[[str], None]) -> None:
    build_op("CPUAdamBuilder")

    def body() -> tuple[str, list[float]]:
        adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine = initialize(MLP(), "cpu_offload", config=adam)
        return type(engine.optimizer.optimizer).__name__, train(engine, mlp_batches(0, 3))

    (name, losses), _ = run_ranks(body, 2)
    assert name == "DeepSpeedCPUAdam"
    assert all(math.isfinite(loss) for loss in losses)
