# SPDX-License-Identifier: Apache-2.0
"""What an engine remembers besides its weights and its optimizer's states survives an export and a resume.

Schedules, loss scales, frozen weights, buffers; and a load leaves alone what it is asked to.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megads_ucp
from megads_ucp.errors import UniversalCheckpointError
from tests.support import stock
from tests.support.models import MLP, decay_groups, train
from tests.support.ranks import run_ranks
from tests.support.runs import (
    AFTER,
    EXPORTING,
    UNIVERSAL,
    Log,
    Recipe,
    assert_resumes,
    assert_same_state,
    contents,
    export,
    hyperparameters,
    one_group,
    resume,
    save,
    states,
    tensors,
)

pytestmark = pytest.mark.slow

# --------------------------------------------------------------------------------------------------- S2: learning rates


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


WARMUP = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 3}}}


@pytest.mark.parametrize("recipe", [Recipe("fp32", scheduler=cosine), Recipe("bf16_optimizer", config=WARMUP)])
def test_the_learning_rate_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    """S2: 5 + 5 steps have the learning rates of 10."""

    def rates(engine: Any, start: int, stop: int) -> list[list[float]]:
        found = []
        for step in range(start, stop):
            train(engine, recipe.batches(step, step + 1))
            found.append(engine.get_lr())
        return found

    def whole() -> list[list[float]]:
        engine = recipe.saved(tmp_path / "source", before=5)
        return rates(engine, 5, 10)

    def second_half() -> list[list[float]]:
        return rates(recipe.resumed(tmp_path / "source"), 5, 10)

    expected = run_ranks(whole, 2)[0]
    assert len({tuple(rate) for rate in expected}) == 5
    assert run_ranks(second_half, 3)[0] == expected


# ------------------------------------------------------------------------------------------- S3, S9: what nobody trains


class Adapted(nn.Module):
    """A frozen base with a low-rank pair beside it, a normalization with buffers, a layer that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 5)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(7, 3, bias=False), nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())  # not contiguous
        self.unused = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inputs = inputs.to(self.base.weight.dtype)
        self.get_buffer("transposed").add_(1)
        outputs = self.base(inputs) + self.up(self.down(inputs))
        if outputs.dtype == torch.float32:  # torch has no batch normalization for bf16 with statistics in fp32
            outputs = self.norm(outputs)
        return nn.functional.mse_loss(outputs.float(), targets)


FROZEN = ["base.bias", "base.weight"]
BUFFERS = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "transposed"]


@pytest.mark.parametrize("kind", [pytest.param("fp32", marks=pytest.mark.slow), "bf16_optimizer"])
def test_frozen_weights_and_buffers_come_back(kind: str, tmp_path: Path) -> None:
    """S3, and S9 with the same model: what a save leaves out on request keeps the target's values, with one warning."""
    recipe = Recipe(kind, Adapted)

    def source() -> dict[str, torch.Tensor]:
        engine = recipe.saved(tmp_path / "source")
        save(engine, tmp_path / "excluded", exclude_frozen_parameters=True)
        return contents(engine)

    def target() -> list[Any]:
        log = Log()
        whole = contents(recipe.resumed(tmp_path / "source"))
        silent = not log.messages
        engine = recipe.engine(resuming=True)
        fresh = contents(engine)
        engine.load_checkpoint(str(tmp_path / "excluded"))
        return [whole, silent, fresh, contents(engine), log.messages]

    saved = run_ranks(source, 2)[0]  # each rank has running statistics of its own; rank 0's are saved
    assert {*FROZEN, *BUFFERS} < saved.keys()
    for whole, silent, fresh, partly, messages in (results := run_ranks(target, 3)):
        assert silent
        assert [name for name, value in saved.items() if not torch.equal(whole[name], value)] == []
        for name, value in saved.items():
            assert torch.equal(partly[name], fresh[name] if name in FROZEN else value), name
        assert not torch.equal(fresh["base.weight"], saved["base.weight"])
        assert len(messages) == (messages is results[0][-1])
    assert all(name in results[0][-1][0] for name in FROZEN)

    absent = json.loads((tmp_path / "excluded" / UNIVERSAL / "manifest.json").read_text())["absent"]
    assert absent == FROZEN


# ------------------------------------------------------------------------------------------------- S4, S8: precision


def scaler(engine: Any) -> dict[str, Any]:
    kept = {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_window"}
    return {name: value for name, value in vars(engine.optimizer.loss_scaler).items() if name in kept}


def test_loss_scale_and_skipped_steps_survive(tmp_path: Path) -> None:
    """S4: the first scales overflow, so steps are skipped before the save; one window later the scale grows again."""
    recipe = Recipe("fp16", config={"fp16": {"initial_scale_power": 26, "hysteresis": 1, "loss_scale_window": 3}})

    def source() -> tuple[Any, ...]:
        engine = recipe.saved(tmp_path / "source", before=12)
        kept = scaler(engine), engine.skipped_steps, engine.global_steps
        return *kept, train(engine, recipe.batches(12, 16)), engine.skipped_steps

    def target() -> tuple[Any, ...]:
        engine = recipe.resumed(tmp_path / "source")
        kept = scaler(engine), engine.skipped_steps, engine.global_steps
        return *kept, train(engine, recipe.batches(12, 16)), engine.skipped_steps

    expected = run_ranks(source, 2)[0]
    scales, skipped, steps = expected[:3]
    assert 0 < skipped < steps == 12
    assert 1 < scales["cur_scale"] < 2**26
    assert run_ranks(target, 2)[0] == expected
    assert run_ranks(target, 3)[0][:3] == expected[:3]


@pytest.mark.slow
def test_any_kind_of_engine_to_any_other(tmp_path: Path) -> None:
    """S8, S4: through every kind of engine and back the state keeps its bits; each keeps a loss scaler of its kind."""
    chain = ["fp16", "bf16_optimizer", "cpu_offload", "round_robin", "parameter_alignment", "zero2", "fp16"]

    def hop(index: int) -> tuple[str, float]:
        engine = Recipe(chain[index]).resumed(tmp_path / str(index - 1), again=tmp_path / str(index))
        loss_scaler = getattr(engine.optimizer, "loss_scaler", None)
        return type(loss_scaler).__name__, getattr(loss_scaler, "cur_scale", 1)

    export(Recipe(chain[0]), 3, tmp_path / "0", after=0)
    for index in range(1, len(chain)):
        found = run_ranks(hop, 2 + index % 2, index)[0]
        fresh = {"fp16": ("DynamicLossScaler", 2**8), "bf16_optimizer": ("NoneType", 1)}
        assert found == fresh.get(chain[index], ("LossScaler", 1)), chain[index]
        assert_same_state(tmp_path / str(index) / UNIVERSAL, tmp_path / "0" / UNIVERSAL)


LOW_PRECISION = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


@pytest.mark.slow
def test_low_precision_masters(tmp_path: Path) -> None:
    """S8: fp32.pt is fp32 whatever the run has, the manifest says what it had, and either can resume from the other."""
    low, high = Recipe("zero2", config=LOW_PRECISION), Recipe("zero2")
    losses = export(low, 2, tmp_path / "low")
    exported = tensors(tmp_path / "low" / UNIVERSAL)
    for name, value in exported.items():
        assert value.dtype == (torch.float32 if name.endswith("/fp32") else torch.bfloat16)
    manifest = json.loads((tmp_path / "low" / UNIVERSAL / "manifest.json").read_text())
    assert all(parameter["states"]["fp32"] == "bfloat16" for parameter in manifest["parameters"].values())

    assert_resumes(low, 2, tmp_path / "low", tmp_path / "low2", losses, rel=0)
    resume(high, 3, tmp_path / "low", again=tmp_path / "high", after=1)
    for name, value in tensors(tmp_path / "high" / UNIVERSAL).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, exported[name].float()), name

    export(high, 2, tmp_path / "high2", after=0)
    resume(low, 3, tmp_path / "high2", again=tmp_path / "low3", after=1)
    exact = tensors(tmp_path / "high2" / UNIVERSAL)
    for name, value in tensors(tmp_path / "low3" / UNIVERSAL).items():
        assert torch.equal(value.bfloat16(), exact[name].bfloat16()), name


# ------------------------------------------------------------------------------------------------ S5, S6: when to save


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16_optimizer", "cpu_offload"])
def test_an_export_holds_the_values_of_its_moment(kind: str, tmp_path: Path) -> None:
    """S5: training on changes nothing in it, a second one holds other values, and so does one of the same tag (S6)."""
    recipe = Recipe(kind)

    def body() -> tuple[dict[str, Any], list[float], list[float]]:
        engine = recipe.saved(tmp_path)
        at_once = states(tmp_path / UNIVERSAL)
        first = train(engine, recipe.batches(3, 5))
        save(engine, tmp_path, "later")
        save(engine, tmp_path / "again")
        train(engine, recipe.batches(5, 6))
        save(engine, tmp_path / "again")
        return at_once, first, train(engine, recipe.batches(6, 8))

    at_once, first, last = run_ranks(body, 2)[0]
    finally_there, later = states(tmp_path / UNIVERSAL), states(tmp_path / "later_universal")
    assert list(stock.differences(finally_there, at_once, "first export")) == []
    assert later.keys() == at_once.keys()
    assert all(list(stock.differences(later[name], at_once[name], name)) for name in at_once)
    assert (tmp_path / "latest_universal").read_text().strip() == "later_universal"

    assert resume(recipe, 2, tmp_path / "again", again=tmp_path / "resumed", before=6, after=2) == last

    def from_the_first() -> list[float]:
        return train(recipe.resumed(tmp_path, tag=UNIVERSAL), recipe.batches(3, 5))

    assert run_ranks(from_the_first, 2)[0] == first


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16_optimizer", "fp32_zero2", "fp32"])
def test_a_save_in_the_middle_of_gradient_accumulation(kind: str, tmp_path: Path) -> None:
    """S6: it holds the state after the last whole step, and disturbs nothing."""
    recipe = Recipe(kind, config={"gradient_accumulation_steps": 2})

    def uninterrupted() -> list[float]:
        return train(recipe.saved(tmp_path / "whole"), recipe.batches(3, 5))

    def interrupted() -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = recipe.engine()
        train(engine, recipe.batches(0, 3))
        step = engine.step

        def save_between() -> None:
            step()
            if engine.micro_steps % 2:
                save(engine, tmp_path / "middle")

        engine.step = save_between
        losses = train(engine, recipe.batches(3, 4))
        engine.step = step
        return losses + train(engine, recipe.batches(4, 5))

    losses = run_ranks(uninterrupted, 2)[0]
    assert run_ranks(interrupted, 2)[0] == losses
    assert_same_state(tmp_path / "middle" / UNIVERSAL, tmp_path / "whole" / UNIVERSAL)
    assert_resumes(recipe, 2, tmp_path / "middle", tmp_path / "again", losses, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16_optimizer", "fp32", "zero2"])
def test_a_save_before_the_first_step(kind: str, tmp_path: Path) -> None:
    """S6: no states are made up, and a load takes those away that an engine has by then."""
    recipe = Recipe(kind)
    losses = export(recipe, 2, tmp_path / "source", before=0)
    exported = tensors(tmp_path / "source" / UNIVERSAL)
    for name, parameter in MLP().named_parameters():
        value = exported[f"{name}/fp32"]
        assert torch.equal(value, parameter if kind == "fp32" else parameter.bfloat16().float())
    assert all(name.endswith("/fp32") for name in exported)

    assert resume(recipe, 2, tmp_path / "source", again=tmp_path / "again", before=0) == losses
    assert_same_state(tmp_path / "again" / UNIVERSAL, tmp_path / "source" / UNIVERSAL)

    def from_a_trained_engine() -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = recipe.engine(resuming=True)
        train(engine, recipe.batches(0, 2))
        engine.load_checkpoint(str(tmp_path / "source"))
        return train(engine, recipe.batches(0, AFTER))

    assert run_ranks(from_a_trained_engine, 2)[0] == losses


# ------------------------------------------------------------------------------------- S7: what a load leaves alone


def test_what_a_load_leaves_alone_on_request(tmp_path: Path) -> None:
    """S7: each flag, on an engine that has trained a little itself."""
    recipe = Recipe("fp32", scheduler=cosine)
    run_ranks(lambda: recipe.saved(tmp_path / "source", before=4) and None, 2)

    loads: dict[str, dict[str, Any]] = {
        "nothing": {},
        "module_only": {"load_module_only": True},
        "no_states": {"load_optimizer_states": False},
        "no_scheduler": {"load_lr_scheduler_states": False},
    }

    def target() -> dict[str, Any]:
        megads_ucp.install(EXPORTING)
        found = {}
        for name, load in loads.items():
            engine = recipe.engine(resuming=True)
            train(engine, recipe.batches(0, 1))
            save(engine, tmp_path / name, "before")
            engine.load_checkpoint(str(tmp_path / "source"), **load)
            save(engine, tmp_path / name)
            found[name] = (engine.global_steps, engine.lr_scheduler.last_epoch, train(engine, recipe.batches(4, 5)))
        return found

    found = run_ranks(target, 2)[0]
    saved = tensors(tmp_path / "source" / UNIVERSAL)
    assert {name: entry[:2] for name, entry in found.items()} == {
        "nothing": (4, 4),
        "module_only": (1, 1),
        "no_states": (4, 4),
        "no_scheduler": (4, 1),
    }
    for name in loads:
        before, after = states(tmp_path / name / "before_universal"), states(tmp_path / name / UNIVERSAL)
        kept = name in ("module_only", "no_states")
        for file in after:
            expected = before[file] if kept and not file.endswith("/fp32") else None
            if expected is not None:
                assert list(stock.differences(after[file], expected, file)) == [], name
            elif not file.endswith("/step"):
                assert torch.equal(after[file]["param"], saved[file]), (name, file)
        source = tmp_path / name / "before_universal" if kept else tmp_path / "source" / UNIVERSAL
        rates = [[group["lr"] for group in hyperparameters(root)] for root in (tmp_path / name / UNIVERSAL, source)]
        if name != "no_states":  # the scheduler, which was loaded, has not set its rate yet
            assert rates[0] == rates[1], name
    assert len({entry[2][0] for entry in found.values()}) == 1  # of the same weights


def test_a_parameter_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    """S7: an error on every rank that names it, with nothing changed; without strictness it keeps its value."""

    def scalars_first(model: nn.Module) -> list[dict[str, Any]]:
        vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        return [{"params": vectors[::-1]}, {"params": matrices}]

    export(Recipe("fp32", groups=scalars_first), 2, tmp_path / "source", after=0)
    larger = Recipe("fp32", functools.partial(MLP, scalars=(3,)), groups=scalars_first)

    def target() -> tuple[str, bool, bool, bool, list[str]]:
        megads_ucp.install(EXPORTING)
        log = Log()
        engine = larger.engine(resuming=True)
        fresh = contents(engine)
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path / "source"))
        unchanged = all(torch.equal(value, fresh[name]) for name, value in contents(engine).items())
        engine.load_checkpoint(str(tmp_path / "source"), load_module_strict=False)
        loaded = contents(engine)
        kept = torch.equal(loaded.pop("scalars.0"), fresh.pop("scalars.0"))
        changed = all(not torch.equal(loaded[name], fresh[name]) for name in loaded)
        save(engine, tmp_path / "loaded")
        assert math.isfinite(train(engine, larger.batches(3, 4))[0])
        return str(caught.value), unchanged, kept, changed, log.messages

    results = run_ranks(target, 3)
    for message, unchanged, kept, changed, messages in results:
        assert "scalars.0" in message and str(tmp_path) in message
        assert unchanged and kept and changed
        assert len(messages) == (messages is results[0][-1])
    assert "scalars.0" in results[0][-1][0]
    loaded, saved = tensors(tmp_path / "loaded" / UNIVERSAL), tensors(tmp_path / "source" / UNIVERSAL)
    assert [name for name in saved if not torch.equal(loaded[name], saved[name])] == []


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    """Hyperparameters go by the names of a group's members; nothing changes in a run that has them elsewhere."""
    export(Recipe("fp32"), 2, tmp_path, after=0)

    def body(groups: Callable[[nn.Module], list[dict[str, Any]]]) -> tuple[str, bool]:
        megads_ucp.install()
        engine = Recipe("fp32", groups=groups).engine(resuming=True)
        fresh = contents(engine)
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path))
        return str(caught.value), all(torch.equal(value, fresh[name]) for name, value in contents(engine).items())

    for message, unchanged in run_ranks(body, 2, lambda model: decay_groups(model)[::-1]):
        assert "layers.0.bias" in message and "group 0" in message and "group 1" in message and unchanged
    for message, unchanged in run_ranks(body, 2, one_group):
        assert "2 parameter groups" in message and unchanged


@pytest.mark.parametrize("kind", [pytest.param("fp32", marks=pytest.mark.slow), "bf16_optimizer"])
def test_groups_that_hold_frozen_parameters(kind: str, tmp_path: Path) -> None:
    """As Hugging Face's trainers make them: all parameters in them, trained or not."""
    recipe = Recipe(kind, Adapted, groups=one_group)
    losses = export(recipe, 2, tmp_path / "source")
    assert_resumes(recipe, 2, tmp_path / "source", tmp_path / "again", losses, rel=0)


def test_buffers_that_fp32_cannot_hold_come_back_exactly(tmp_path: Path) -> None:
    """In zero/ they are rounded, as the stock converter rounds them: 2**24 + 1 is, small counters are not."""
    saved = {
        "seen": torch.tensor([2**24 + 1]),
        "counter": torch.tensor([7]),
        "third": torch.tensor(1 / 3, dtype=torch.float64),
        "phase": torch.tensor([1 + 2j, torch.inf]),
        "eighths": torch.tensor([0.125, -2.0]).to(torch.float8_e4m3fn),  # fp32 can; torch can do little with it
    }

    def with_buffers(values: Mapping[str, torch.Tensor]) -> MLP:
        model = MLP()
        for name, value in values.items():
            model.register_buffer(name, value)
        return model

    def bits(value: torch.Tensor) -> list[int]:  # torch.equal knows no float8
        values: list[int] = value.reshape(-1).view(torch.uint8).tolist()
        return values

    def exporting() -> list[str]:
        log = Log()
        megads_ucp.install(EXPORTING)
        save(Recipe("fp32", lambda: with_buffers(saved)).engine(), tmp_path)
        return log.messages

    assert run_ranks(exporting, 2) == [[], []]
    assert torch.load(tmp_path / UNIVERSAL / "zero" / "seen" / "fp32.pt")["param"] == 2**24
    assert torch.load(tmp_path / UNIVERSAL / "exact_values_00.pt").keys() == {"seen", "third", "phase"}

    def resuming() -> bool:
        fresh = {name: torch.zeros_like(value) for name, value in saved.items()}
        engine = Recipe("fp32", lambda: with_buffers(fresh)).resumed(tmp_path)
        buffers = dict(engine.module.named_buffers())
        return all(bits(buffers[name]) == bits(value) for name, value in saved.items())

    assert run_ranks(resuming, 3) == [True] * 3


def test_a_frozen_parameter_whose_directory_is_gone_is_damage(tmp_path: Path) -> None:
    """Not one that the checkpoint never had, whether parameters may be missing or not."""
    recipe = Recipe("fp32", Adapted)
    run_ranks(lambda: recipe.saved(tmp_path) and None, 1)
    shutil.rmtree(tmp_path / UNIVERSAL / "zero" / "base.weight")

    def body(strict: bool) -> None:
        with pytest.raises(UniversalCheckpointError, match=r"base\.weight/fp32\.pt: No such file"):
            recipe.resumed(tmp_path, load_module_strict=strict)

    for strict in (True, False):
        run_ranks(body, 2, strict)


def test_a_default_device_of_the_clients_is_left_alone(tmp_path: Path) -> None:
    """As of a script that begins with torch.set_default_device("cuda"); here, one on which nothing has values."""
    recipe = Recipe("fp32")

    def body() -> list[float]:
        engine = recipe.saved(tmp_path / "host")
        torch.set_default_device("meta")
        save(engine, tmp_path / "elsewhere")
        assert torch.empty(1).is_meta
        torch.set_default_device(None)
        engine = recipe.engine(resuming=True)
        torch.set_default_device("meta")
        engine.load_checkpoint(str(tmp_path / "elsewhere"))
        torch.set_default_device(None)
        save(engine, tmp_path / "again")
        return train(engine, recipe.batches(3, 4))

    run_ranks(body, 2)
    for again in ("elsewhere", "again"):
        assert_same_state(tmp_path / again / UNIVERSAL, tmp_path / "host" / UNIVERSAL)
