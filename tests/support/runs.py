# SPDX-License-Identifier: Apache-2.0
"""Training runs with the package installed: one that trains, exports and trains on, and others that resume from it.

What is compared is bits wherever bits can be had: a resumed run exports what it has loaded at once, before it trains,
and the two directories must hold the same state.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

import megads_ucp
from tests.support.models import MLP, Batch, Optimizers, decay_groups, draw_weights, initialize, mlp_batches, train
from tests.support.ranks import run_ranks
from tests.support.stock import differences

TAG = "step"
UNIVERSAL = f"{TAG}_universal"
BEFORE, AFTER = 3, 3  # optimizer steps before a save, and after it

EXPORTING = argparse.Namespace(universal_checkpoint_export=True, universal_checkpoint_export_strict=True)
LOADING = {"checkpoint": {"load_universal": True}}


@dataclass(frozen=True)
class Recipe:
    """What an engine is built of, on whatever ranks.

    Attributes:
        kind: a key of tests.support.models.KINDS.
        model: builds the model; weights are drawn anew in a run that resumes.
        groups: parameter groups of a model.
        samples: size of the global batch.
        config: laid over the kind's DeepSpeed config.
    """

    kind: str
    model: Callable[[], nn.Module] = MLP
    optimizer: Optimizers | None = None
    groups: Callable[[nn.Module], list[dict[str, Any]]] = decay_groups
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 12

    def engine(self, *, resuming: bool = False) -> Any:
        model = self.model()
        if resuming:
            draw_weights(model, seed=1)
        return initialize(
            model,
            self.kind,
            optimizer=self.optimizer,
            groups=self.groups(model),
            scheduler=self.scheduler,
            config={**self.config, **LOADING} if resuming else self.config,
        )

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        return mlp_batches(start, stop, samples=self.samples)

    def saved(self, directory: Path, *, before: int = BEFORE) -> Any:
        """On a rank: an engine that has trained, saved ``directory``/step and exported beside it."""
        megads_ucp.install(EXPORTING)
        engine = self.engine()
        train(engine, self.batches(0, before))
        save(engine, directory)
        return engine

    def resumed(self, directory: Path, *, again: Path | None = None, **load: Any) -> Any:
        """On a rank: an engine that has loaded ``directory``, and exported what it loaded to ``again``."""
        megads_ucp.install(EXPORTING)
        engine = self.engine(resuming=True)
        engine.load_checkpoint(str(directory), **load)
        if again is not None:
            save(engine, again)
        return engine


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def group_per_scalar(model: nn.Module) -> list[dict[str, Any]]:
    """The layers in one group, and each extra parameter in one of its own."""
    assert isinstance(model, MLP)
    groups: list[dict[str, Any]] = [{"params": list(model.layers.parameters()), "weight_decay": 0.1}]
    return groups + [{"params": [scalar], "weight_decay": 0.0} for scalar in model.scalars]


def with_groups_of(numels: tuple[int, ...], kind: str, samples: int = 12) -> Recipe:
    """An MLP with an extra parameter group of each of these many elements."""
    return Recipe(kind, functools.partial(MLP, scalars=numels), groups=group_per_scalar, samples=samples)


def save(engine: Any, directory: Path, tag: str = TAG, **more: Any) -> None:
    # The stock converter, which exports are compared to, wants an info; only the client can put one in a regular file.
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
    engine.save_checkpoint(str(directory), tag=tag, client_state=info, **more)


def export(recipe: Recipe, world: int, directory: Path, *, before: int = BEFORE, after: int = AFTER) -> list[float]:
    """Trains, saves and exports to ``directory``, and trains on: the losses of the steps after the save."""

    def body() -> list[float]:
        return train(recipe.saved(directory, before=before), recipe.batches(before, before + after))

    return run_ranks(body, world)[0]


def resume(
    recipe: Recipe, world: int, directory: Path, *, again: Path, before: int = BEFORE, after: int = AFTER
) -> list[float]:
    """Resumes from ``directory``, exports to ``again``, and trains on: the losses of the steps after the load."""

    def body() -> list[float]:
        return train(recipe.resumed(directory, again=again), recipe.batches(before, before + after))

    return run_ranks(body, world)[0]


def assert_resumes(
    recipe: Recipe, world: int, directory: Path, again: Path, losses: list[float], *, rel: float = 1e-5
) -> None:
    """The state loaded at ``world`` ranks has the saved bits, and training goes on with the losses given."""
    resumed = resume(recipe, world, directory, again=again, after=len(losses))
    assert_same_state(again / UNIVERSAL, directory / UNIVERSAL)
    assert resumed == pytest.approx(losses, rel=rel)


def assert_same_state(left: Path, right: Path) -> None:
    """Two universal checkpoints, of whatever topologies and precisions, hold the same state of the same parameters."""
    one, other = states(left), states(right)
    assert one and one.keys() == other.keys()
    found = [line for name in one for line in differences(one[name], other[name], name)]
    found += differences(hyperparameters(left), hyperparameters(right), "param_groups")
    assert not found, f"{left} differs from {right}:\n" + "\n".join(found[:20])


def same_bits(left: Path, right: Path) -> bool:
    one, other = states(left), states(right)
    return one.keys() == other.keys() and not any(
        line for name in one for line in differences(one[name], other[name], name)
    )


def assert_same_tensors(left: Path, right: Path) -> None:
    one, other = tensors(left), tensors(right)
    assert one and one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def states(universal: Path) -> dict[str, Any]:
    """Content of every file of every parameter, by '<parameter>/<state>'."""
    return {
        f"{path.parent.name}/{path.stem}": torch.load(path, weights_only=False)
        for path in sorted((universal / "zero").glob("*/*.pt"))
    }


def tensors(universal: Path) -> dict[str, torch.Tensor]:
    """The full tensor of every state of every parameter but ``step``, by '<parameter>/<state>'."""
    return {name: content["param"] for name, content in states(universal).items() if not name.endswith("/step")}


def hyperparameters(universal: Path) -> list[dict[str, Any]]:
    groups = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)["param_groups"]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def shards(engine: Any) -> dict[str, torch.Tensor]:
    """On a rank: all states of its TP rank's shards, by '<parameter>/<state>', put together from all DP ranks."""
    # ZeRO links parameters to the states of all groups once the first group has stepped, when others have none yet.
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        found[f"{name}/fp32"] = safe_get_full_fp32_param(parameter)
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{state}"] = safe_get_full_optimizer_state(parameter, state)
    return found


def contents(engine: Any) -> dict[str, torch.Tensor]:
    """On a rank: copies of the parameters and buffers of its module."""
    return {name: value.clone() for name, value in engine.module.state_dict().items() if torch.is_tensor(value)}


def changed(engine: Any, before: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the parameters and buffers that no longer have the values of ``before``."""
    return [name for name, value in contents(engine).items() if not torch.equal(value, before[name])]


class Log(logging.Handler):
    """Collects what the package logs on this rank at WARNING and above.

    All but the remark that the global batch has changed: DeepSpeed derives it from DP here, and train() splits one of
    its own.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("megads_ucp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "global batch" not in record.getMessage():
            self.messages.append(record.getMessage())
