# SPDX-License-Identifier: Apache-2.0
"""S1: whatever states an optimizer keeps are exported and resumed, by whatever names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree
from transformers import Adafactor

from tests.support.models import MLP
from tests.support.runs import (
    UNIVERSAL,
    Recipe,
    assert_resumes,
    assert_same_state,
    export,
    one_group,
    resume,
    states,
)


def deepspeeds(name: str, **parameters: Any) -> dict[str, Any]:
    return {"config": {"optimizer": {"type": name, "params": {"lr": 1e-2, **parameters}}}}


def torchs(kind: Callable[..., torch.optim.Optimizer], **parameters: Any) -> dict[str, Any]:
    return {"optimizer": lambda groups: kind(groups, lr=1e-2, **parameters)}


def in_training(kind: Any) -> Callable[..., torch.optim.Optimizer]:
    """A schedule-free optimizer as its users make it: it refuses to step before it is told that it trains."""

    def make(groups: Any, **parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(groups, **parameters)
        for group in optimizer.param_groups:  # train() would leave a state of each parameter, before ZeRO takes over
            group["train_mode"] = True
        return optimizer

    return make


class Lion(torch.optim.Optimizer):
    """One state, by a name that Adam has too, and no step (Chen et al. 2023); DeepSpeed's need a GPU or a compiler."""

    def __init__(self, groups: Any, lr: float = 1e-3) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (fast, slow), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.sub_(average.lerp(parameter.grad, 1 - fast).sign(), alpha=lr)
                average.lerp_(parameter.grad, 1 - slow)


def tagged_for_muon() -> MLP:
    torch._dynamo.config.disable = True  # DeepSpeed compiles Muon's kernels, which takes longer than the test
    model = MLP()
    for parameter in model.parameters():
        parameter.use_muon = parameter.ndim > 1  # type: ignore[attr-defined]
    return model


ADAM = {"exp_avg", "exp_avg_sq", "step"}

# name -> (kind, what the recipe says beyond it, the states each parameter has)
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "adamw": ("fp32", {}, ADAM),
    "amsgrad": (
        "fp32_zero2",
        {"optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)},
        ADAM | {"max_exp_avg_sq"},
    ),
    "deepspeeds_adam": ("fp32", deepspeeds("Adam", torch_adam=True), ADAM),
    "sgd": ("fp32_zero2", {"optimizer": lambda groups: torch.optim.SGD(groups, lr=1e-2)}, set()),
    "momentum": (
        "fp32",
        {"optimizer": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9)},
        {"momentum_buffer"},
    ),
    "momentum_bf16": (
        "bf16_optimizer",
        {"optimizer": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9)},
        {"momentum_buffer"},
    ),
    "lion": ("fp32", {"optimizer": Lion}, {"exp_avg"}),
    # DeepSpeed puts all of Adagrad's partitions into one group, and then fails itself if there were more.
    "adagrad": ("fp32", {"optimizer": torch.optim.Adagrad, "groups": one_group}, {"sum", "step"}),
    "muon": ("fp32", {"model": tagged_for_muon, **deepspeeds("Muon", torch_adam=True)}, set()),
    "muon_bf16": ("bf16_optimizer", {"model": tagged_for_muon, **deepspeeds("Muon", torch_adam=True)}, set()),
    "nadam": ("fp32", torchs(torch.optim.NAdam), ADAM),  # and mu_product, of the whole partition
    "asgd": ("fp32", torchs(torch.optim.ASGD), {"ax", "step"}),  # and eta and mu
    "radam": ("fp32", torchs(torch.optim.RAdam), ADAM),
    "adamax": ("fp32", torchs(torch.optim.Adamax), {"exp_avg", "exp_inf", "step"}),
    "rmsprop": ("fp32", torchs(torch.optim.RMSprop, momentum=0.9), {"square_avg", "momentum_buffer", "step"}),
    "rprop": ("fp32", torchs(torch.optim.Rprop), {"prev", "step_size", "step"}),
    "adadelta": ("fp32", torchs(torch.optim.Adadelta), {"square_avg", "acc_delta", "step"}),
    "adafactor": ("fp32", torchs(torch.optim.Adafactor), {"variance", "step"}),
    "hugging_face_adafactor": (
        "fp32",
        torchs(Adafactor, scale_parameter=False, relative_step=False),
        {"exp_avg_sq", "step"},  # and RMS, of each rank's partition
    ),
    "schedule_free_adamw": ("fp32", torchs(in_training(AdamWScheduleFree)), {"z", "exp_avg_sq"}),
    "schedule_free_sgd": ("fp32", torchs(in_training(SGDScheduleFree)), {"z"}),
    "schedule_free_radam": ("fp32", torchs(in_training(RAdamScheduleFree)), {"z", "exp_avg_sq"}),
    # These two keep `step` in places of their own. They compile C++ extensions, once per pytest cache.
    "deepspeeds_fused_adam": ("fp32", deepspeeds("Adam"), ADAM),
    "deepspeed_cpu_adam": ("cpu_offload", deepspeeds("AdamW"), ADAM),
}
EXTENSIONS = {"deepspeeds_fused_adam": "FusedAdamBuilder", "deepspeed_cpu_adam": "CPUAdamBuilder"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_state_of_every_optimizer(name: str, tmp_path: Path, build_op: Callable[[str], None]) -> None:
    """S1: and `step`; nothing assumes exp_avg."""
    if name in EXTENSIONS:
        build_op(EXTENSIONS[name])
    kind, more, expected = OPTIMIZERS[name]
    recipe = Recipe(kind, **more)
    losses = export(recipe, 2, tmp_path / "source")

    found: dict[str, set[str]] = {}
    for file in states(tmp_path / "source" / UNIVERSAL):
        parameter, state = file.split("/")
        found.setdefault(parameter, set()).add(state)
    assert len(found) == 6
    for parameter, has in found.items():
        if name.startswith("muon"):
            expected = {"momentum_buffer"} if parameter.endswith("weight") else ADAM
        assert has == {"fp32"} | expected, parameter

    rel = 1e-5 if kind.startswith("fp32") else 5e-3
    assert_resumes(recipe, 2, tmp_path / "source", tmp_path / "dp2", losses, rel=0)
    if "adafactor" in name:  # it clips the update of each partition by its norm: losses depend on where ZeRO cuts
        resume(recipe, 3, tmp_path / "source", again=tmp_path / "dp3")
        assert_same_state(tmp_path / "dp3" / UNIVERSAL, tmp_path / "source" / UNIVERSAL)
        return
    assert_resumes(recipe, 3, tmp_path / "source", tmp_path / "dp3", losses, rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("offloaded_first", [True, False])
def test_a_step_that_one_adam_counts_and_the_other_keeps_in_a_tensor(
    offloaded_first: bool, tmp_path: Path, build_op: Callable[[str], None]
) -> None:
    """DeepSpeedCPUAdam and torch's AdamW, which are one algorithm, continue each other."""
    build_op(EXTENSIONS["deepspeed_cpu_adam"])
    offloaded, plain = Recipe("cpu_offload", **deepspeeds("AdamW", weight_decay=0.1)), Recipe("zero2")
    source, target = (offloaded, plain) if offloaded_first else (plain, offloaded)
    losses = export(source, 2, tmp_path / "source")
    assert resume(target, 2, tmp_path / "source", again=tmp_path / "again") == pytest.approx(losses, rel=5e-3)
    steps = {float(value) for name, value in states(tmp_path / "again" / UNIVERSAL).items() if name.endswith("step")}
    assert steps == {3.0}
