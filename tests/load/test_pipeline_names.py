# SPDX-License-Identifier: Apache-2.0
"""A GPT of Megatron-DeepSpeed, saved with its pipeline module and resumed without it, or the other way round.

Here by the names alone; with the real models in tests/cases/test_megatron_deepspeed.py.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.models import train
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import UNIVERSAL, Recipe, export, tensors

pytestmark = pytest.mark.slow

LAYER = ("self_attention.dense.weight", "mlp.dense_h_to_4h.weight")
WITHOUT = (
    "language_model.embedding.word_embeddings.weight",
    *(f"language_model.encoder.layers.{number}.{rest}" for number in range(11) for rest in LAYER),
    "language_model.encoder.final_layernorm.weight",
)
WITH = (
    "tied_modules.embed.word_embeddings.weight",
    *(f"{2 + number}.{rest}" for number in range(11) for rest in LAYER),
    "13.weight",
)


class Named(nn.Module):
    """A model with a matrix for each name, and a loss in which each counts differently."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = []
        for name in names:
            *path, last = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(last, nn.Parameter(torch.randn(7, 5, generator=generator)))
            self.matrices.append(at.get_parameter(last))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = sum(number * inputs @ matrix for number, matrix in enumerate(self.matrices, 1))
        return nn.functional.mse_loss(torch.as_tensor(outputs), targets)


def by_last_digit(model: nn.Module) -> list[dict[str, object]]:
    """Two groups, with members all over the model."""
    assert isinstance(model, Named)
    return [{"params": model.matrices[0::2]}, {"params": model.matrices[1::2], "weight_decay": 0.5}]


def recipe(names: tuple[str, ...]) -> Recipe:
    return Recipe("fp32", functools.partial(Named, names), groups=by_last_digit)


@pytest.mark.parametrize(("source", "target"), [(WITH, WITHOUT), (WITHOUT, WITH)], ids=["with", "without"])
def test_parameters_and_groups_are_found_under_the_names_of_the_other_scheme(
    source: tuple[str, ...], target: tuple[str, ...], tmp_path: Path
):
    losses = export(recipe(source), 2, tmp_path / "save")

    def body() -> list[float]:
        here = recipe(target)
        engine = here.resumed(tmp_path / "save", again=tmp_path / "again")
        return train(engine, here.batches(3, 6))

    assert run_ranks(body, 3)[0] == pytest.approx(losses, rel=1e-5)
    saved, again = tensors(tmp_path / "save" / UNIVERSAL), tensors(tmp_path / "again" / UNIVERSAL)
    assert len(saved) == len(again) == 3 * len(WITH)
    for before, after in zip(source, target, strict=True):
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            assert torch.equal(saved[f"{before}/{state}"], again[f"{after}/{state}"])


def test_what_has_no_counterpart_is_named_with_the_scheme_of_the_checkpoint(tmp_path: Path):
    export(recipe(WITH), 2, tmp_path)
    more = (*WITHOUT, "language_model.output_layer.weight")

    with pytest.raises(RankError) as error:
        run_ranks(lambda: recipe(more).resumed(tmp_path) and None, 2)

    assert "It was saved with Megatron-DeepSpeed's pipeline module, and this run is without it" in str(error.value)
    assert "nothing there corresponds to language_model.output_layer.weight." in str(error.value)
