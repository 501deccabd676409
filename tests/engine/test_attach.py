# SPDX-License-Identifier: Apache-2.0
"""What a user calls and sets: installing, configuring, saving under any name, and what is refused."""

from __future__ import annotations

import argparse
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import megads_ucp
from megads_ucp.config import ExportConfig
from megads_ucp.engine.compat import ATTRIBUTES_USED
from megads_ucp.errors import UnsupportedError
from megads_ucp.storage import read_manifest, state_names
from tests.support.accidents import assert_complete, entries, install, reports
from tests.support.experts import Experts
from tests.support.models import MLP, initialize, mlp_batches, train
from tests.support.ranks import run_ranks

CLASSES = (DeepSpeedEngine, PipelineEngine, BF16_Optimizer, DeepSpeedZeroOptimizer)
LATEST = "latest_universal"
LOADING = {"checkpoint": {"load_universal": True}}


def untrained(kind: str, **more: Any) -> Any:
    model = MLP(scalars=(1,))
    # The scalar has a group of its own: its padding is longer than a partition at 4 ranks.
    groups = [{"params": list(model.layers.parameters())}, {"params": list(model.scalars)}]
    return initialize(model, kind, groups=groups, **more)


def trained(kind: str = "bf16_optimizer", steps: int = 1, **more: Any) -> Any:
    engine = untrained(kind, **more)
    train(engine, mlp_batches(0, steps))
    return engine


# ------------------------------------------------------------------------------------------------ install, uninstall


@pytest.fixture
def stock_deepspeed():
    """Nothing installed before, nothing left behind after."""
    yield [dict(vars(cls)) for cls in CLASSES]
    megads_ucp.uninstall()


def test_uninstall_leaves_deepspeeds_classes_as_they_were(stock_deepspeed):
    install()
    assert [dict(vars(cls)) for cls in CLASSES] != stock_deepspeed
    install(enabled=False)
    megads_ucp.uninstall()
    for cls, members in zip(CLASSES, stock_deepspeed, strict=True):
        assert dict(vars(cls)) == members  # functions are equal only to themselves
    megads_ucp.uninstall()


def what_deepspeed_knows(engine: Any) -> dict[str, Any]:
    """An engine's and its optimizer's own attributes and bookkeeping that the package mends or shadows."""
    optimizer = engine.optimizer
    fragments = {
        name: (parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address)
        for name, parameter in engine.module.named_parameters()
        if getattr(parameter, "_hp_mapping", None) is not None
    }
    padding = optimizer.group_paddings if isinstance(optimizer, BF16_Optimizer) else optimizer.groups_padding
    slices = optimizer._param_slice_mappings
    return {
        "shadowed": [name for owner in (engine, optimizer) for name in vars(owner) if hasattr(type(owner), name)],
        "padding": padding,
        "slices": [{name: vars(address) for name, address in group.items()} for group in slices],
        "fragments": fragments,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16_optimizer", pytest.param("round_robin", marks=pytest.mark.slow)])
def test_uninstall_gives_living_engines_their_own_methods_and_books_back(tmp_path, kind):
    def body() -> tuple[Any, ...]:
        stock = what_deepspeed_knows(trained(kind))
        install(strict=True)
        engine = trained(kind)
        installed = what_deepspeed_knows(engine)
        engine.save_checkpoint(str(tmp_path), tag="with")
        megads_ucp.uninstall()
        engine.save_checkpoint(str(tmp_path), tag="without")
        after = what_deepspeed_knows(engine)
        assert engine.save_checkpoint.__func__ is DeepSpeedEngine.save_checkpoint
        train(engine, mlp_batches(1, 2))
        return stock, installed, after

    ranks = run_ranks(body, 4)
    for stock, installed, after in ranks:
        assert after == stock
        assert set(installed["shadowed"]) - set(stock["shadowed"]) >= {"save_checkpoint", "load_checkpoint"}
        if kind == "bf16_optimizer":
            assert (installed["padding"][1], stock["padding"][1]) in [(1, 0), (2, 0), (2, 7)]
    if kind == "round_robin":
        assert any(installed["fragments"] != stock["fragments"] for stock, installed, _ in ranks)
    assert entries(tmp_path) == sorted(["latest", LATEST, "with", "with_universal", "without"])


def test_installing_again_replaces_the_flags_for_later_engines_only(tmp_path):
    def body() -> None:
        install(enabled=False)
        quiet = trained()
        install(strict=True)
        exporting = trained()
        install(enabled=False)
        quiet.save_checkpoint(str(tmp_path / "quiet"), tag="x")
        exporting.save_checkpoint(str(tmp_path / "exporting"), tag="x")

    run_ranks(body, 2)
    assert entries(tmp_path / "quiet") == ["latest", "x"]
    assert entries(tmp_path / "exporting") == sorted(["latest", LATEST, "x", "x_universal"])


def test_without_the_flag_nothing_is_exported_but_the_paddings_are_true(tmp_path):
    def body() -> None:
        megads_ucp.install()
        trained().save_checkpoint(str(tmp_path), tag="x")

    run_ranks(body, 4)
    assert entries(tmp_path) == ["latest", "x"]
    paddings = []
    for rank in range(4):
        (file,) = (tmp_path / "x").glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        paddings.append(torch.load(file, weights_only=False)["optimizer_state_dict"]["group_paddings"])
    # 318 elements in the first group, padded to 320; 1 in the second, padded to 8. Stock writes 7 for the last rank.
    assert [padding[0] for padding in paddings] == [0, 0, 0, 2]
    assert [padding[1] for padding in paddings] == [1, 2, 2, 2]


def test_a_deepspeed_without_an_attribute_in_use_is_refused_and_left_alone(monkeypatch, stock_deepspeed):
    class Older(DeepSpeedEngine):
        pass

    monkeypatch.setitem(ATTRIBUTES_USED, Older, ("save_checkpoint", "save_universally"))
    with pytest.raises(UnsupportedError, match=r"has no Older\.save_universally.*0\.19\.8"):
        megads_ucp.install()
    assert [dict(vars(cls)) for cls in CLASSES] == stock_deepspeed


@pytest.mark.slow
def test_engines_are_not_kept_alive(tmp_path):
    def outlives(kind: str, use: bool) -> list[bool]:
        engine = trained(kind)
        if use:
            engine.save_checkpoint(str(tmp_path), tag="x")
        held = [weakref.ref(engine), weakref.ref(engine.optimizer), weakref.ref(engine.module)]
        engine.destroy()
        del engine
        gc.collect()
        return [ref() is not None for ref in held]

    def body(kind: str) -> None:
        stock = outlives(kind, True)
        for enabled in (False, True):
            install(enabled=enabled)
            assert outlives(kind, enabled) == stock, f"enabled: {enabled}"

    for kind in ("bf16_optimizer", "zero2", "round_robin"):
        run_ranks(body, 2, kind)


# ------------------------------------------------------------------------------------------------------ configuration


@pytest.mark.slow
def test_the_engines_own_section_decides_over_the_flags(tmp_path):
    section = "universal_checkpoint_export"
    sections: dict[str, Any] = {
        "by flag": {},
        "false": {section: False},
        "true": {section: True},
        "section": {section: {"bucket_mb": 1, "timeout_minutes": 3}},
        "disabled section": {section: {"enabled": False, "strict": True}},
    }

    def body(flag: bool) -> None:
        install(enabled=flag)
        engines = {name: trained(config=config) for name, config in sections.items()}  # side by side in one process
        for name, engine in engines.items():
            engine.save_checkpoint(str(tmp_path / str(flag) / name), tag="x")

    for flag in (False, True):
        run_ranks(body, 2, flag)
        exported = {name for name in sections if (tmp_path / str(flag) / name / "x_universal").exists()}
        assert exported == {"true", "section"} | ({"by flag"} if flag else set())


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"enable": True}, "must be true, false or a section of .*'enabled'.*got {'enable': True}"),
        ("yes", "must be true, false or a section"),
        ({"bucket_mb": "64"}, "bucket_mb must be int, not '64'"),
        ({"bucket_mb": 0}, "bucket_mb must be at least 1"),
        ({"timeout_minutes": 0}, "timeout_minutes must be above 0"),
        ({"strict": 1}, "strict must be bool, not 1"),
    ],
)
def test_mistakes_in_the_section_are_errors(section, error):
    with pytest.raises(ValueError, match=error):
        ExportConfig().for_engine({"universal_checkpoint_export": section})


def test_a_mistake_in_the_section_reaches_the_user():
    def body() -> None:
        megads_ucp.install()
        with pytest.raises(ValueError, match="universal_checkpoint_export"):
            trained(config={"universal_checkpoint_export": {"bucket": 1}})

    run_ranks(body, 2)


def test_flags_are_parsed_into_the_configuration():
    parser = megads_ucp.add_arguments(argparse.ArgumentParser())  # as Megatron's extra_args_provider is called
    assert ExportConfig.from_arguments(parser.parse_args([])) == ExportConfig()
    given = ["--universal-checkpoint-export", "--universal-checkpoint-export-strict", "--universal-checkpoint-verify"]
    given += ["--universal-checkpoint-export-bucket-mb=8", "--universal-checkpoint-export-timeout-minutes=0.5"]
    given += ["--universal-checkpoint-export-on-drift=warn"]
    assert ExportConfig.from_arguments(parser.parse_args(given)) == ExportConfig(
        enabled=True, strict=True, bucket_mb=8, timeout_minutes=0.5, on_drift="warn", verify=True
    )
    assert ExportConfig.from_arguments(None) == ExportConfig()


def test_flags_are_shown_by_help(capsys):
    with pytest.raises(SystemExit):
        megads_ucp.add_arguments(argparse.ArgumentParser()).parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "universal checkpoint export (megads_ucp)" in shown
    for flag in ("export", "export-strict", "export-bucket-mb", "export-timeout-minutes", "export-on-drift", "verify"):
        assert f"--universal-checkpoint-{flag}" in shown


# ------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.slow
def test_tags_and_directories_are_those_of_the_regular_checkpoint(tmp_path):
    def body() -> None:
        os.chdir(tmp_path)
        install(strict=True)
        engine = trained()
        assert engine.save_checkpoint("relative") is True  # tag: None
        assert entries(Path("relative")) == sorted(["latest", LATEST, "global_step1", "global_step1_universal"])
        dist.barrier()
        engine.save_checkpoint(tmp_path / "path", 7, {"seen": 3}, True)  # pathlib, an int, all by position
        engine.save_checkpoint(Path("nested/more"), "eval/best")
        engine.save_checkpoint(".", "here")

    run_ranks(body, 2)
    for save, tag in [("relative", "global_step1"), ("path", "7"), ("nested/more", "eval/best"), (".", "here")]:
        assert (tmp_path / save / "latest").read_text() == tag
        assert (tmp_path / save / LATEST).read_text() == f"{tag}_universal"
        assert_complete(tmp_path / save / f"{tag}_universal")
    state = torch.load(tmp_path / "path" / "7_universal" / "mp_rank_00_model_states.pt", weights_only=False)
    assert state["seen"] == 3


def test_save_latest_false_neither_creates_nor_moves_the_latest_file(tmp_path):
    def body() -> None:
        install(strict=True)
        engine = trained()
        engine.save_checkpoint(str(tmp_path), tag="aside", save_latest=False)
        assert not (tmp_path / LATEST).exists()
        dist.barrier()
        engine.save_checkpoint(str(tmp_path), tag="latest one")
        engine.save_checkpoint(str(tmp_path), tag="aside", save_latest=False)

    run_ranks(body, 2)
    assert (tmp_path / LATEST).read_text() == "latest one_universal"
    assert_complete(tmp_path / "aside_universal")


def test_the_same_tag_again_replaces_the_export(tmp_path):
    def body() -> dict[str, torch.Tensor]:
        install(strict=True)
        engine = trained("fp32")
        engine.save_checkpoint(str(tmp_path), tag="x")
        run_id = read_manifest(tmp_path / "x_universal").run_id
        dist.barrier()
        train(engine, mlp_batches(1, 2))
        engine.save_checkpoint(str(tmp_path), tag="x")
        assert read_manifest(tmp_path / "x_universal").run_id != run_id
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}

    parameters = run_ranks(body, 2)[0]
    assert_complete(tmp_path / "x_universal")
    for name, value in parameters.items():
        assert torch.equal(torch.load(tmp_path / "x_universal" / "zero" / name / "fp32.pt")["param"], value)


@pytest.mark.slow
def test_states_that_appear_or_go_between_exports_are_noticed(tmp_path):
    def body() -> None:
        install(strict=True)
        engine = initialize(MLP(), "fp32")
        engine.save_checkpoint(str(tmp_path), tag="before the first step")
        train(engine, mlp_batches(0, 1))
        engine.save_checkpoint(str(tmp_path), tag="trained")
        for group in engine.optimizer.optimizer.param_groups:
            group["lr"] = 0.125
        engine.optimizer.optimizer.state.clear()  # as a client that starts its optimizer anew may do
        engine.save_checkpoint(str(tmp_path), tag="cleared")
        train(engine, mlp_batches(1, 2))
        engine.save_checkpoint(str(tmp_path), tag="trained again")

    run_ranks(body, 2)
    adam = ["exp_avg", "exp_avg_sq", "fp32", "step"]
    states = {"before the first step": ["fp32"], "trained": adam, "cleared": ["fp32"], "trained again": adam}
    for tag, names in states.items():
        assert_complete(tmp_path / f"{tag}_universal")
        assert state_names(tmp_path / f"{tag}_universal" / "zero" / "layers.0.weight") == names, tag
    groups = read_manifest(tmp_path / "cleared_universal").groups
    assert [group.hyperparameters["lr"] for group in groups] == [0.125, 0.125]


@pytest.mark.slow
def test_stock_deepspeed_finds_and_loads_the_latest_export(tmp_path):
    def save() -> list[float]:
        install(strict=True)
        engine = initialize(MLP(), "fp32")  # every rank holds a part of each group, which stock DeepSpeed needs
        train(engine, mlp_batches(0, 2))
        engine.save_checkpoint(str(tmp_path), tag="x")
        return train(engine, mlp_batches(2, 4))

    def load() -> list[float]:
        engine = initialize(MLP(), "fp32", config=LOADING)
        path, _ = engine.load_checkpoint(str(tmp_path))
        assert Path(path).parent == tmp_path / "x_universal"
        return train(engine, mlp_batches(2, 4))

    losses = run_ranks(save, 2)[0]
    assert run_ranks(load, 2)[0] == losses


WRITERS = [
    {"type": "python"},
    {"type": "mock"},
    {"type": "python", "decoupled": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: " ".join(map(str, writer.values())))
def test_exports_do_not_mind_how_deepspeed_writes_the_regular_checkpoint(tmp_path, writer):
    def body() -> str:
        install(strict=True)
        os.environ.update(CROSS_RANK="0", CROSS_SIZE="1")  # which DeepSpeed's launcher sets, and its writers want
        config = {"checkpoint": {"writer": {"data_parallel": "replica", **writer}}}
        engine = initialize(MLP(), "bf16_optimizer", config=config)
        for step in range(2):
            train(engine, mlp_batches(step, step + 1))
            engine.save_checkpoint(str(tmp_path), tag=f"{step}")
        train(engine, mlp_batches(2, 3))
        name = type(engine.checkpoint_engine).__name__
        engine.destroy()
        return name

    names = run_ranks(body, 2)
    assert names[0] == ("DecoupledCheckpointEngine" if writer.get("decoupled") else "FastCheckpointEngine")
    assert (tmp_path / LATEST).read_text() == "1_universal"
    for tag in ("0", "1"):
        assert_complete(tmp_path / f"{tag}_universal")


# ------------------------------------------------------------------------------------------------------------ refusals


def refused_engine(kind: str) -> Any:
    if kind == "experts":
        model = Experts()
        return initialize(model, "fp32", groups=model.groups(), config={"zero_optimization": {"stage": 2}})
    stages = {"ZeRO-0": 0, "ZeRO-3": 3}
    config: dict[str, Any] = {"checkpoint": {"use_node_local_storage": True}}
    if kind in stages:
        config = {"zero_optimization": {"stage": stages[kind]}}
    if kind == "ZeRO-0 in bf16":
        config = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}
    return initialize(MLP(), "fp32", config=config)


REFUSALS = {
    "ZeRO-0": "ZeRO stage 0 keeps no partitioned master weights: set zero_optimization.stage to 1",
    "ZeRO-0 in bf16": "ZeRO stage 0 keeps no partitioned master weights: set zero_optimization.stage to 1",
    "ZeRO-3": "ZeRO stage 3 is not supported: set zero_optimization.stage to 1 or 2",
    "experts": "expert-parallel groups are not supported yet",
    "use_node_local_storage": "use_node_local_storage gives every node a save_dir of its own",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_not_supported_is_refused_in_a_sentence_and_the_regular_checkpoint_is_written(tmp_path, kind):
    def body() -> tuple[list[str], list[str]]:
        install()
        with reports() as early:
            engine = refused_engine(kind)
        train(engine, mlp_batches(0, 1))
        with reports() as messages:
            engine.save_checkpoint(str(tmp_path), tag="x")
        train(engine, mlp_batches(1, 2))
        return early, messages

    ((early,), (message,)), silent = run_ranks(body, 2)
    assert silent == ([], [])
    assert early.count(REFUSALS[kind]) == message.count(REFUSALS[kind]) == 1
    assert entries(tmp_path) == ["latest", "x"]
    for file in (tmp_path / "x").glob("*.pt"):
        torch.load(file, weights_only=False)
