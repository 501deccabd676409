# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps beside tensors shaped like its parameters: brought back, or refused by name at the save."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from prodigyopt import Prodigy
from torch.optim.lr_scheduler import LambdaLR

import megads_ucp
from megads_ucp.storage.format import MANIFEST, OPTIMIZER_VALUES
from tests.support.models import train
from tests.support.ranks import run_ranks
from tests.support.runs import EXPORTING, TAG, UNIVERSAL, Log, Recipe, assert_resumes, export, one_group, save

pytestmark = pytest.mark.slow

OPTIONAL = EXPORTING.__class__(universal_checkpoint_export=True)
"""An export that is not strict."""


class Plain(torch.optim.Optimizer):
    """Gradient descent that may keep whatever a test gives it beside its parameters."""

    def __init__(self, groups: Any, lr: Any = 1e-2, **more: Any) -> None:
        super().__init__(groups, {"lr": lr, **more})

    def keep(self, state: dict[Any, Any], group: dict[str, Any], parameter: torch.Tensor) -> float:
        """Updates the state; returns what the step is multiplied by."""
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = self.keep(self.state[parameter], group, parameter)
                    parameter.sub_(parameter.grad, alpha=float(group["lr"]) * scale)


class Scaled(Plain):
    """Keeps one number, which an optimizer that lost it would take for 1."""

    def keep(self, state: dict[Any, Any], group: dict[str, Any], parameter: torch.Tensor) -> float:
        state["scale"] = state.get("scale", 1.0) * 1.5
        state["flag"], state["nothing"] = True, None
        state["tensor"] = state.get("tensor", torch.ones((), dtype=torch.float64)) * 0.75
        return state["scale"] * float(state["tensor"])


def test_scalars_of_an_optimizer_come_back_at_any_topology(tmp_path: Path) -> None:
    """It keeps no tensor at all, and would start again at 1.0 without a word."""
    recipe = Recipe("fp32", optimizer=Scaled)
    losses = export(recipe, 2, tmp_path / "source")
    assert_resumes(recipe, 2, tmp_path / "source", tmp_path / "dp2", losses, rel=0)
    assert_resumes(recipe, 3, tmp_path / "source", tmp_path / "dp3", losses)


class PerRank(Plain):
    """Estimates a factor from the gradients of its own partition, as Prodigy does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, d=1.0)

    def keep(self, state: dict[Any, Any], group: dict[str, Any], parameter: torch.Tensor) -> float:
        assert parameter.grad is not None
        group["d"] = group["d"] * (1 + dist.get_rank()) * float(1 + parameter.grad.norm())
        state["rms"] = float(parameter.grad.norm())
        return float(group["d"])


def test_values_that_differ_by_rank_are_named_and_come_back_to_their_own_ranks(tmp_path: Path) -> None:
    """Another topology gets the first rank's, and is told."""
    recipe = Recipe("fp32", optimizer=PerRank, groups=one_group)

    def kept(engine: Any) -> tuple[Any, Any]:
        base = engine.optimizer.optimizer
        return base.param_groups[0]["d"], [state["rms"] for state in base.state.values()]

    def source() -> tuple[Any, list[float], list[str]]:
        log = Log()
        engine = recipe.saved(tmp_path / "source")
        values = kept(engine)
        save(engine, tmp_path / "source", tag="second")
        return values, train(engine, recipe.batches(3, 6)), log.messages

    def resumed() -> tuple[Any, list[float], list[str]]:
        log = Log()
        engine = recipe.resumed(tmp_path / "source", tag=UNIVERSAL)
        return kept(engine), train(engine, recipe.batches(3, 6)), log.messages

    ranks = run_ranks(source, 2)
    assert ranks[0][0] != ranks[1][0]
    drift = [text for text in ranks[0][2] if "differ between ranks" in text]
    assert len(drift) == 1 and "d of group 0" in drift[0] and "rms of group 0" in drift[0]

    again = run_ranks(resumed, 2)
    assert [(values, losses) for values, losses, _ in again] == [(values, losses) for values, losses, _ in ranks]
    assert not [text for text in again[0][2] if "first one's" in text]

    elsewhere = run_ranks(resumed, 3)
    assert all(values == (ranks[0][0][0], [ranks[0][0][1][0]]) for values, _, _ in elsewhere)
    assert len([text for text in elsewhere[0][2] if "d, rms (group 0)" in text and "first one's" in text]) == 1


class Blocks(Plain):
    """Keeps 8-bit codes, with a scale for every 64 of them."""

    def keep(self, state: dict[Any, Any], group: dict[str, Any], parameter: torch.Tensor) -> float:
        state["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
        state["scales"] = torch.ones(-(-parameter.numel() // 64))
        return 1.0


class Stray(Plain):
    """Keeps something under a name instead of a parameter."""

    def keep(self, state: dict[Any, Any], group: dict[str, Any], parameter: torch.Tensor) -> float:
        self.state["memory"] = {"step": 1}  # type: ignore[index]
        return 1.0


class Decay(enum.Enum):
    DECOUPLED = "decoupled"


class Schedule:
    """A class that weights-only loading does not know."""


def with_group_value(value: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda groups: Plain(groups, extra=value)


REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "quantized": (Blocks, r"Blocks keeps .*state of group 0, scales: a tensor of shape \(\d+,\) and dtype float32"),
    "sliced": (
        lambda groups: Prodigy(groups, slice_p=11),
        r"Prodigy keeps .*state of group 0, (s|p0): a tensor of shape",
    ),
    "stray": (Stray, r"Stray keeps .*optimizer.state\['memory'\]"),
    "enum": (
        with_group_value(Decay.DECOUPLED),
        r"param_groups\[0\] extra: a tests\.cases\.\w+\.Decay",
    ),
    "class": (
        with_group_value(Schedule()),
        r"param_groups\[0\] extra: a tests\.cases\.\w+\.Schedule",
    ),
    "array": (
        with_group_value(numpy.zeros(3)),
        r"param_groups\[0\] extra: a numpy array of shape \(3,\) and dtype",
    ),
    "nested": (with_group_value([1, {"a": Schedule()}]), r"param_groups\[0\] extra: a .*Schedule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_resume_brings_back_is_refused_by_name(name: str, tmp_path: Path) -> None:
    optimizer, pattern = REFUSED[name]

    def body() -> None:
        megads_ucp.install(EXPORTING)
        engine = Recipe("fp32", optimizer=optimizer).engine()
        train(engine, Recipe("fp32").batches(0, 2))
        with pytest.raises(megads_ucp.UniversalCheckpointError, match=pattern):
            save(engine, tmp_path)

    run_ranks(body, 2)
    assert (tmp_path / TAG).is_dir()
    assert not (tmp_path / UNIVERSAL).exists()


def test_without_strict_the_weights_are_exported_and_a_resume_of_the_states_is_refused(tmp_path: Path) -> None:
    def source() -> tuple[list[str], list[torch.Tensor]]:
        megads_ucp.install(OPTIONAL)
        engine = Recipe("fp32", optimizer=Blocks).engine()
        train(engine, Recipe("fp32").batches(0, 2))
        log = Log()
        save(engine, tmp_path)
        save(engine, tmp_path)
        return log.messages, [parameter.detach().clone() for parameter in engine.module.parameters()]

    def target() -> list[torch.Tensor]:
        megads_ucp.install(OPTIONAL)
        engine = Recipe("fp32", optimizer=Blocks).engine(resuming=True)
        with pytest.raises(megads_ucp.UniversalCheckpointError, match=r"scales.*load_optimizer_states=False"):
            engine.load_checkpoint(str(tmp_path))
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
        return [parameter.detach().clone() for parameter in engine.module.parameters()]

    (warnings, weights), _ = run_ranks(source, 2)
    assert len([text for text in warnings if "scales" in text and "Only weights can be resumed" in text]) == 1
    for loaded in run_ranks(target, 3):
        assert all(map(torch.equal, loaded, weights))


class CountsInNumpy(Plain):
    """Keeps its step as a numpy integer."""

    def keep(self, state: dict[Any, Any], group: dict[str, Any], parameter: torch.Tensor) -> float:
        state["step"] = numpy.int64(state.get("step", 0) + 1)
        state.setdefault("momentum", torch.zeros_like(parameter)).add_(parameter)
        return float(state["step"])


def test_numbers_of_numpy_travel_as_pythons(tmp_path: Path) -> None:
    """A learning rate, a schedule that returns one, and a step."""
    recipe = Recipe(
        "fp32",
        optimizer=lambda groups: CountsInNumpy(groups, lr=numpy.float64(3e-3), extra=numpy.float32(0.5)),
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: numpy.float64(0.9**step)),
    )
    losses = export(recipe, 2, tmp_path / "source")
    assert_resumes(recipe, 3, tmp_path / "source", tmp_path / "dp3", losses)
    groups = torch.load(tmp_path / "source" / UNIVERSAL / "optimizer_values.pt", weights_only=True)["groups"]
    assert type(groups[0]["hyperparameters"]["lr"]) is float
    assert type(groups[0]["hyperparameters"]["extra"]) is float
    assert type(groups[0]["scalars"]["step"]) is int


def dtypes(engine: Any) -> Iterator[tuple[str, torch.dtype]]:
    for state in engine.optimizer.optimizer.state.values():
        yield from ((name, value.dtype) for name, value in state.items() if torch.is_tensor(value) and value.ndim)


@pytest.mark.parametrize("fp32_states", [True, False])
def test_moments_keep_the_dtype_that_the_optimizer_gives_them(
    fp32_states: bool, tmp_path: Path, build_op: Callable[[str], None]
) -> None:
    """DeepSpeedCPUAdam has moments in fp32 beside bf16 masters, or in bf16 if it is asked to."""
    build_op("CPUAdamBuilder")
    precision = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": not fp32_states}
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    recipe = Recipe("cpu_offload", config={"bf16": {"enabled": True, **precision}, "optimizer": adam})
    expected = torch.float32 if fp32_states else torch.bfloat16

    def source() -> set[tuple[str, torch.dtype]]:
        return set(dtypes(recipe.saved(tmp_path / "source")))

    def target() -> set[tuple[str, torch.dtype]]:
        engine = recipe.resumed(tmp_path / "source", again=tmp_path / "again")
        return set(dtypes(engine))

    for world, body in ((2, source), (2, target), (3, target)):
        for found in run_ranks(body, world):
            assert found == {("exp_avg", expected), ("exp_avg_sq", expected)}
    assert math.isfinite(sum(losses_after(recipe, tmp_path / "source")))


def losses_after(recipe: Recipe, directory: Path) -> list[float]:
    return run_ranks(lambda: train(recipe.resumed(directory), recipe.batches(3, 5)), 2)[0]


def test_an_export_of_version_0_1_which_has_no_such_file_resumes(tmp_path: Path) -> None:
    recipe = Recipe("bf16_optimizer")
    losses = export(recipe, 2, tmp_path / "source")
    universal = tmp_path / "source" / UNIVERSAL
    manifest = json.loads((universal / MANIFEST).read_text())
    manifest["files"] = [entry for entry in manifest["files"] if entry["path"] != OPTIMIZER_VALUES]
    (universal / MANIFEST).write_text(json.dumps(manifest))
    (universal / OPTIMIZER_VALUES).unlink()
    assert_resumes(recipe, 2, tmp_path / "source", tmp_path / "dp2", losses, rel=0)
