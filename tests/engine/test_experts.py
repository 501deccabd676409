# SPDX-License-Identifier: Apache-2.0
"""Models with experts are not exported, but their regular checkpoints are written, as Megatron-DeepSpeed's are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megads_ucp
from tests.support.accidents import entries, install, reports
from tests.support.experts import Experts
from tests.support.models import initialize, mlp_batches, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

INFO = "universal_checkpoint_info"


class WithMethod(Experts):
    """Megatron's models have a method where DeepSpeed takes a dict."""

    def universal_checkpoint_info(self) -> dict[str, Any]:
        return {"vocabulary_parameter_patterns": ["inner.weight"]}


class WithDict(Experts):
    """As AutoTP's models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.universal_checkpoint_info = {"vocabulary_parameter_patterns": ["inner.weight"]}


def trained(model: Experts) -> Any:
    engine = initialize(model, "fp32", groups=model.groups(), config={"zero_optimization": {"stage": 2}})
    train(engine, mlp_batches(0, 1))
    return engine


@pytest.mark.parametrize("model", [WithMethod, WithDict, Experts], ids=["method", "dict", "without"])
@pytest.mark.parametrize("given", [{}, {INFO: {"original_vocab_size": 7}}], ids=["", "in the client state"])
def test_the_regular_checkpoint_of_a_model_with_experts_is_written(
    model: type[Experts], given: dict[str, Any], tmp_path: Path
):
    def body() -> list[str]:
        install()
        engine = trained(model())
        before = getattr(engine.module, INFO, None)
        with reports() as messages:
            engine.save_checkpoint(str(tmp_path), tag="x", client_state={"iteration": 3, **given})
        assert getattr(engine.module, INFO, None) == before
        assert (INFO in vars(engine.module)) == (model is WithDict)
        return messages

    (message,) = run_ranks(body, 2)[0]

    assert "expert-parallel groups are not supported yet" in message
    assert entries(tmp_path) == ["latest", "x"]
    state = torch.load(tmp_path / "x/mp_rank_00_model_states.pt", weights_only=False)
    own = None if model is Experts else {"vocabulary_parameter_patterns": ["inner.weight"]}
    assert state["iteration"] == 3 and state.get(INFO) == (given.get(INFO) or own)
    assert len(list((tmp_path / "x").glob("layer_*_expert_*_model_states.pt"))) == 2


def test_uninstall_gives_the_engine_its_own_save_of_experts_back():
    def body() -> None:
        install()
        engine = trained(WithMethod())
        assert "_save_moe_checkpoint" in vars(engine)
        megads_ucp.uninstall()
        assert "_save_moe_checkpoint" not in vars(engine)

    run_ranks(body, 2)
