# SPDX-License-Identifier: Apache-2.0
"""Parameters that the run that saved them called otherwise: bridged where that is known, and explained where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import megads_ucp
from megads_ucp.errors import UniversalCheckpointError
from megads_ucp.load.names import saved_names
from tests.support import stock
from tests.support.models import MLP, draw_weights
from tests.support.ranks import run_ranks
from tests.support.runs import TAG, UNIVERSAL, Log, Recipe, contents, export, resume, tensors

pytestmark = pytest.mark.slow


class Holding(nn.Module):
    """An MLP with a frozen layer and a buffer, or a part of it compiled."""

    def __init__(self, part: bool = False) -> None:
        super().__init__()
        self.inner = MLP()
        self.frozen = nn.Linear(5, 5)
        self.register_buffer("seen", torch.tensor([2**24 + 1], dtype=torch.int64))
        draw_weights(self)
        self.frozen.requires_grad_(False)
        if part:
            self.inner.layers[1] = torch.compile(self.inner.layers[1], backend="eager")  # type: ignore[assignment]

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs, self.frozen(targets.to(self.frozen.weight.dtype)).float())


def compiled() -> nn.Module:
    return torch.compile(Holding(), backend="eager")  # type: ignore[return-value]


MODELS = {"plain": Holding, "whole": compiled, "part": lambda: Holding(True)}


@pytest.mark.parametrize(("source", "target"), [("plain", "whole"), ("whole", "plain"), ("part", "whole")])
@pytest.mark.parametrize("made", ["ours", "stock"])
def test_a_model_that_is_compiled_in_one_run_only(source: str, target: str, made: str, tmp_path: Path) -> None:
    """The same tensors, hyperparameters of the same groups, frozen parameters, buffers, next losses."""
    before, after = Recipe("fp32", MODELS[source]), Recipe("fp32", MODELS[target])
    losses = export(before, 2, tmp_path / "ours")
    if made == "stock":
        stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)

    assert resume(after, 3, tmp_path / made, again=tmp_path / "again") == pytest.approx(losses, rel=1e-5)

    one, other = (
        {name.replace("_orig_mod.", ""): value for name, value in tensors(directory / UNIVERSAL).items()}
        for directory in (tmp_path / "ours", tmp_path / "again")
    )
    if made == "stock":  # the stock converter does not write what is frozen
        one, other = ({n: v for n, v in found.items() if "inner" in n} for found in (one, other))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_integers_that_fp32_cannot_hold_come_back_under_another_name(tmp_path: Path) -> None:
    export(Recipe("fp32", compiled), 2, tmp_path, after=0)

    def target() -> int:
        megads_ucp.install()
        engine = Recipe("fp32", Holding).engine(resuming=True)
        engine.module.seen.zero_()
        engine.load_checkpoint(str(tmp_path))
        return int(engine.module.seen.item())

    assert run_ranks(target, 2) == [2**24 + 1] * 2


class Wrapped(nn.Module):
    """What DistributedDataParallel does to names (``module``), or PEFT (``base_model.model``)."""

    def __init__(self, prefix: str, model: nn.Module) -> None:
        super().__init__()
        outer, _, inner = prefix.partition(".")
        self.path = prefix
        self.add_module(outer, Wrapped(inner, model) if inner else model)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return next(iter(self.children()))(*inputs)


@pytest.mark.parametrize(
    ("prefix", "wrapper"), [("module", "DistributedDataParallel"), ("base_model.model", "PEFT"), ("student", "")]
)
@pytest.mark.parametrize("at_save", [True, False])
def test_a_wrapped_model_is_recognised(prefix: str, wrapper: str, at_save: bool, tmp_path: Path) -> None:
    """In one run only, whether it asks for all parameters or for those that are there."""
    plain, wrapped = Recipe("fp32"), Recipe("fp32", lambda: Wrapped(prefix, MLP()))
    source, target = (wrapped, plain) if at_save else (plain, wrapped)
    export(source, 2, tmp_path, after=0)

    def body(strict: bool) -> str:
        megads_ucp.install()
        engine = target.engine(resuming=True)
        fresh = contents(engine)
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path), load_module_strict=strict)
        assert all(torch.equal(value, fresh[name]) for name, value in contents(engine).items())
        return str(caught.value)

    for strict in (True, False):
        first, other = run_ranks(body, 2, strict)
        assert first == other and f'"{prefix}."' in first and wrapper in first
        assert ("The names in the checkpoint begin" in first) is at_save


def test_a_parameter_that_is_lacking_is_named_with_what_comes_nearest(tmp_path: Path) -> None:
    export(Recipe("fp32"), 2, tmp_path, after=0)
    more = Recipe("fp32", lambda: MLP((7, 13, 11, 5, 5)))

    def body() -> str:
        megads_ucp.install()
        with pytest.raises(UniversalCheckpointError) as caught:
            more.engine(resuming=True).load_checkpoint(str(tmp_path))
        return str(caught.value)

    first, other = run_ranks(body, 2)
    assert first == other and "lacks 2 of the 8 parameters" in first
    assert "layers.3.weight (it has layers.2.weight, " in first
    assert "load_module_strict=False" in first and "manifest" not in first

    def skipping() -> list[str]:
        log = Log()
        megads_ucp.install()
        more.engine(resuming=True).load_checkpoint(str(tmp_path), load_module_strict=False)
        return log.messages

    assert "lacks layers.3.bias, layers.3.weight" in run_ranks(skipping, 2)[0][0]


def test_names_that_are_saved_are_left_alone() -> None:
    assert saved_names(["a", "_orig_mod.b"], ["a", "_orig_mod.b", "_orig_mod.a"]) == {}
    assert saved_names(["_orig_mod.a", "c._orig_mod.d"], ["a", "c.d", "e"]) == {
        "_orig_mod.a": "a",
        "c._orig_mod.d": "c.d",
    }
