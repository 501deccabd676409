# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a load is of, and what is said where it cannot be that one: what there is, and how to ask for it."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megads_ucp
from megads_ucp import storage
from megads_ucp.errors import UniversalCheckpointError, UnsupportedError
from tests.support import stock
from tests.support.experts import Experts
from tests.support.models import MLP, initialize, train
from tests.support.ranks import run_ranks
from tests.support.runs import (
    EXPORTING,
    LOADING,
    TAG,
    UNIVERSAL,
    Log,
    Recipe,
    contents,
    export,
    save,
)

pytestmark = pytest.mark.slow

PLAIN = Recipe("fp32")
FALLING_BACK = {"universal_checkpoint_export": {"enabled": False, "fallback": True}}


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    """A directory with exports of three steps, the last of which is the latest."""

    def body() -> None:
        megads_ucp.install(EXPORTING)
        engine = PLAIN.engine()
        for step in range(1, 4):
            train(engine, PLAIN.batches(step - 1, step))
            save(engine, tmp_path, f"step{step}")

    run_ranks(body, 2)
    for step in range(1, 4):  # all in one second, perhaps
        manifest = tmp_path / f"step{step}_universal" / "manifest.json"
        content = {**json.loads(manifest.read_text()), "created": f"2026-01-0{step}T00:00:00+00:00"}
        manifest.write_text(json.dumps(content))
    return tmp_path


def refusal(recipe: Recipe, directory: Path, **load: Any) -> str:
    """On a rank: what is raised, with the model as it was."""
    megads_ucp.install()
    engine = recipe.engine(resuming=True)
    fresh = contents(engine)
    with pytest.raises((UniversalCheckpointError, ValueError)) as caught:
        engine.load_checkpoint(str(directory), **load)
    assert all(torch.equal(value, fresh[name]) for name, value in contents(engine).items())
    return str(caught.value)


def loaded_steps(recipe: Recipe, directory: Path, **load: Any) -> tuple[int, list[str]]:
    log = Log()
    megads_ucp.install()
    engine = recipe.engine(resuming=True)
    engine.load_checkpoint(str(directory), **load)
    return engine.global_steps, log.messages


def empty(save_dir: Path) -> None:
    (save_dir / "latest_universal").write_text("")


def dangle(save_dir: Path) -> None:
    shutil.rmtree(save_dir / "step3_universal")


def lose(save_dir: Path) -> None:
    (save_dir / "latest_universal").unlink()


def lose_a_file(save_dir: Path) -> None:
    (save_dir / "step3_universal" / "zero" / "layers.0.weight" / "exp_avg.pt").unlink()


def cut_a_file(save_dir: Path) -> None:
    file = save_dir / "step3_universal" / "zero" / "layers.0.weight" / "exp_avg.pt"
    file.write_bytes(file.read_bytes()[:-1])


ACCIDENTS: dict[Callable[[Path], None], str] = {
    empty: "latest_universal is empty",
    dangle: "latest_universal names step3_universal, which does not exist",
    lose: "latest_universal does not exist",
    lose_a_file: "exp_avg.pt",
    cut_a_file: "exp_avg.pt",
}


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_what_is_complete_is_listed_or_taken(accident: Callable[[Path], None], exports: Path) -> None:
    """Newest first, with steps and the way to name one; with the setting, the newest is taken, and that is said."""
    accident(exports)
    shutil.rmtree(exports / "step1_universal" / "zero" / "layers.0.weight")
    broken = accident in (lose_a_file, cut_a_file, dangle)
    newest = 2 if broken else 3

    first, other = run_ranks(refusal, 2, PLAIN, exports)
    assert first == other and ACCIDENTS[accident] in first
    listed = first.split("newest first: ")[1]
    assert listed.startswith(f"step{newest}_universal (step {newest}, 2026-01-0{newest}T00:00:00+00:00)")
    assert ("step3_universal" in listed) is not broken and "step1_universal" not in listed
    assert f"tag='step{newest}_universal'" in listed and "--universal-checkpoint-fallback" in listed

    by_config = replace(PLAIN, config=FALLING_BACK)
    (steps, (warning,)), silent = run_ranks(loaded_steps, 2, by_config, exports)
    assert steps == newest and silent == (newest, [])
    assert ACCIDENTS[accident] in warning and f"newest complete export there, step{newest}_universal" in warning


def test_the_flag_sets_the_fallback(exports: Path) -> None:
    empty(exports)

    def body() -> int:
        megads_ucp.install(argparse.Namespace(universal_checkpoint_fallback=True))
        engine = PLAIN.engine(resuming=True)
        engine.load_checkpoint(str(exports))
        return int(engine.global_steps)

    assert run_ranks(body, 2) == [3, 3]


def test_a_tag_that_does_not_exist(exports: Path) -> None:
    """It is named, and so is what there is; nothing else is taken in its place, whatever is set."""
    by_config = replace(PLAIN, config=FALLING_BACK)
    for recipe in (PLAIN, by_config):
        first, other = run_ranks(lambda recipe=recipe: refusal(recipe, exports, tag="step9_universal"), 2)
        assert first == other and f"{exports}/step9_universal does not exist" in first
        assert "directory zero" not in first and "step3_universal (step 3, " in first


def test_a_load_changes_nothing_where_it_looks(exports: Path) -> None:
    empty(exports)
    before = sorted(path.relative_to(exports) for path in exports.rglob("*"))
    run_ranks(refusal, 2, PLAIN, exports)
    assert sorted(path.relative_to(exports) for path in exports.rglob("*")) == before


# ------------------------------------------------------------------------------------- a load of the other kind


def test_a_regular_load_of_universal_checkpoints_says_what_to_add(exports: Path, tmp_path: Path) -> None:
    """Named by a tag, by the file ``latest``, or the only ones there are, which would be a start from scratch."""
    regular = replace(PLAIN, config={})

    def body(directory: Path, tag: str | None) -> str:
        megads_ucp.install()
        engine = regular.engine()
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(directory), tag=tag)
        return str(caught.value)

    only = tmp_path / "only"
    only.mkdir()
    shutil.copytree(exports / "step3_universal", only / "step3_universal")
    (only / "latest_universal").write_text("step3_universal")
    for directory, tag in ((exports, "step3_universal"), (only, None)):
        for message in run_ranks(body, 2, directory, tag):
            assert "step3_universal" in message and '"checkpoint": {"load_universal": true}' in message
    (only / "latest").write_text("step3_universal")
    assert "step3_universal is a universal checkpoint" in run_ranks(body, 1, only, None)[0]


def test_a_regular_load_at_another_topology_says_that_a_universal_one_would_do(exports: Path) -> None:
    def body() -> list[str]:
        log = Log()
        megads_ucp.install()
        engine = PLAIN.engine()
        with pytest.raises(Exception, match="DP world size"):
            engine.load_checkpoint(str(exports))
        return log.messages

    (message,), *others = run_ranks(body, 3)
    assert others == [[], []]
    assert "step3_universal loads at any topology" in message and "load_universal" in message


def test_regular_loads_are_what_they_were(exports: Path, tmp_path: Path) -> None:
    def body() -> tuple[int, Any]:
        megads_ucp.install()
        engine = PLAIN.engine()
        engine.load_checkpoint(str(exports))
        return engine.global_steps, engine.load_checkpoint(str(tmp_path / "nowhere"))

    assert run_ranks(body, 2) == [(3, (None, None))] * 2


# ----------------------------------------------------------------------------------- engines that cannot load one


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("there", [True, False])
def test_an_engine_of_another_stage_says_so_in_one_sentence(stage: int, there: bool, exports: Path) -> None:
    """Before DeepSpeed's bare assertion, or its word that ``latest_universal`` does not exist."""
    if not there:
        lose(exports)

    def body() -> str:
        megads_ucp.install()
        engine = replace(PLAIN, config={**LOADING, "zero_optimization": {"stage": stage}}).engine()
        with pytest.raises(UnsupportedError) as caught:
            engine.load_checkpoint(str(exports))
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert "cannot be loaded into this engine" in message and f"ZeRO stage {stage}" in message


def test_a_model_with_experts_says_so_in_one_sentence(exports: Path) -> None:
    def body() -> str:
        megads_ucp.install()
        model = Experts()
        engine = initialize(model, "zero2", groups=model.groups(), config=LOADING)
        with pytest.raises(UnsupportedError) as caught:
            engine.load_checkpoint(str(exports))
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert "cannot be loaded into this engine: expert-parallel groups are not supported" in message


# --------------------------------------------------------------------------------------------- in inference mode


@pytest.mark.parametrize("kind", ["fp32", "bf16_optimizer", "zero2"])
def test_a_load_and_a_save_in_inference_mode_leave_a_run_that_trains_on(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(kind)
    losses = export(recipe, 2, tmp_path)

    def body(inference: bool) -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = recipe.engine(resuming=True)
        with torch.inference_mode(inference):
            engine.load_checkpoint(str(tmp_path))
            save(engine, tmp_path / f"again {inference}")
        return train(engine, recipe.batches(3, 6))

    assert run_ranks(body, 2, True) == run_ranks(body, 2, False)
    assert run_ranks(body, 2, True)[0] == pytest.approx(losses, rel=1e-5)
    stock_names = sorted(path.name for path in (tmp_path / "again True" / UNIVERSAL).iterdir())
    assert stock_names == sorted(path.name for path in (tmp_path / "again False" / UNIVERSAL).iterdir())


def test_a_run_in_inference_mode_saves_regular_checkpoints_that_load(tmp_path: Path) -> None:
    def body() -> None:
        megads_ucp.install(EXPORTING)
        engine = PLAIN.engine()
        train(engine, PLAIN.batches(0, 2))
        with torch.inference_mode():
            save(engine, tmp_path)
            engine.load_checkpoint(str(tmp_path), tag=TAG)
        train(engine, PLAIN.batches(2, 4))

    run_ranks(body, 2)


# -------------------------------------------------------------------------------------------------- enough of a model


def of_sizes(*sizes: int) -> Callable[[], nn.Module]:
    return lambda: MLP(sizes)


def test_a_load_that_would_leave_most_of_a_model_as_it_is_is_refused(tmp_path: Path) -> None:
    """Whatever is skipped: nobody wants his initialisation back. Half of the elements suffice."""

    class Other(MLP):
        """The same layers under other names, but for one bias."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(self.layers[1:])
            self.layers = nn.ModuleList(self.layers[:1])

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            hidden = inputs
            for layer in (*self.layers, *self.blocks):
                hidden = torch.tanh(layer(hidden))
            return nn.functional.mse_loss(hidden, targets)

    export(PLAIN, 2, tmp_path, after=0)
    stock.convert(tmp_path / TAG, tmp_path / "stock" / UNIVERSAL)
    for directory in (tmp_path, tmp_path / "stock"):
        recipe = replace(PLAIN, model=Other)
        first, other = run_ranks(
            lambda recipe=recipe, directory=directory: refusal(recipe, directory, load_module_strict=False), 2
        )
        assert first == other and "2 of the 6 parameters that this run trains" in first and "blocks.0.weight" in first

    def body() -> list[str]:
        log = Log()
        megads_ucp.install()
        engine = replace(PLAIN, model=lambda: MLP(scalars=(9,))).engine(resuming=True)
        engine.load_checkpoint(str(tmp_path), load_module_strict=False)
        return log.messages

    ((message,), silent) = run_ranks(body, 2)
    assert "lacks scalars.0" in message and silent == []


def test_the_listing_leaves_out_what_is_not_complete(exports: Path) -> None:
    (exports / ".step4_universal.staging-x").mkdir()
    (exports / "step5_universal").mkdir()
    (exports / "step2_universal" / "manifest.json").write_text("{")
    assert [export.step for export in storage.complete_exports(exports)] == [3, 1]
    assert storage.complete_exports(exports / "nowhere") == ()
