# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models that AutoTP splits unevenly: exports and resumes across tensor-parallel degrees.

A part of what `python -m tests.matrices.autotp` goes through, and what lies beyond the stock converter: ranks that hold
nothing of a parameter, frozen parameters, parameters without a gradient, copies that drift apart.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import replicated_map
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import fused_LinearLayer
from torch import nn

import megads_ucp
from megads_ucp import storage
from tests.support import stock
from tests.support.autotp import (
    BIGCODE,
    MODELS,
    Case,
    Topology,
    assert_as_stock,
    batches,
    build,
    case,
    with_heads,
)
from tests.support.models import full_weight, train
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import EXPORTING, TAG, UNIVERSAL, states, tensors

TP1, TP2, TP2DP2, TP3, TP4 = Topology(1, 2), Topology(2, 1), Topology(2, 2), Topology(3, 1), Topology(4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "source", "targets"),
    [
        ("llama", "fp32", TP3, [TP2DP2]),
        ("llama_tied", "fp32_zero2", TP2, [TP3, TP1]),  # T5
        ("mistral", "zero2", TP2DP2, [TP4]),
        ("qwen2", "bf16_optimizer", TP2DP2, [TP3]),
        ("qwen3", "fp32", TP2DP2, [TP4]),
        ("gpt_neox", "bf16_optimizer", TP4, [TP2DP2]),
        ("opt", "fp32_zero2", TP4, [TP2DP2]),
    ],
)
def test_an_uneven_model_resumes_at_other_degrees(
    name: str, kind: str, source: Topology, targets: list[Topology], tmp_path: Path
) -> None:
    checked = case(name, kind)
    losses = checked.export(source, tmp_path / "source")
    assert_as_stock(tmp_path / "source")
    for target in targets:
        checked.assert_losses(checked.resume(target, tmp_path / "source", tmp_path / str(target)), losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_exports_of_ours_and_of_the_stock_converter_load_into_each_other(name: str, tmp_path: Path) -> None:
    """From one tool to the other; the second file of a tied parameter, which stock writes wrong, is ignored."""
    checked = case(name)
    losses = checked.export(TP3, tmp_path / "ours")
    assert_as_stock(tmp_path / "ours")
    checked.assert_losses(checked.stock_resume(TP2DP2, tmp_path / "ours"), losses)
    converted = tmp_path / "ours" / "stock"
    checked.assert_losses(checked.resume(TP2, converted, tmp_path / "again", same=tmp_path / "ours"), losses)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "bf16_optimizer"])
def test_a_rank_without_key_value_heads_as_source_and_as_target(kind: str, tmp_path: Path) -> None:
    """T3: 3 heads over TP 4. The stock converter wants something of each parameter on each rank."""
    checked = case("llama", kind)
    losses = checked.export(TP4, tmp_path / "tp4")
    with pytest.raises(RankError, match="'NoneType' object is not iterable"):
        assert_as_stock(tmp_path / "tp4")
    parameters = storage.read_manifest(tmp_path / "tp4" / UNIVERSAL).parameters
    shards = parameters["model.layers.0.self_attn.q_proj.weight"].layout.shards
    assert shards == ((16, 48), (16, 48), (16, 48), (0, 48))

    checked.assert_losses(checked.resume(TP2DP2, tmp_path / "tp4", tmp_path / "tp2"), losses)
    checked.assert_losses(checked.resume(TP4, tmp_path / "tp2", tmp_path / "back"), losses)


@pytest.mark.slow
def test_a_single_key_value_head(tmp_path: Path) -> None:
    """T3: MQA under AutoTP: the one head, and all queries with it, is the first rank's."""
    checked = with_heads("llama", query=6, key_value=1)
    losses = checked.export(TP3, tmp_path / "tp3")
    checked.assert_losses(checked.resume(TP2, tmp_path / "tp3", tmp_path / "tp2"), losses)


def freeze_some(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(r"embed_tokens|0\.self_attn\.[qo]_proj|1\.mlp\.(up|down)|norm", name))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "zero2"])
def test_frozen_parameters_are_exported_whole_and_restored(kind: str, tmp_path: Path) -> None:
    """The stock converter refuses a frozen one, or writes the first rank's shard of it."""
    checked = case("llama", kind, freeze=freeze_some)
    losses = checked.export(TP4, tmp_path / "tp4")

    frozen = dict(checked.model().named_parameters())
    exported = states(tmp_path / "tp4" / UNIVERSAL)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    held = [name for name in frozen if f"{name}/exp_avg" not in exported]
    assert len(held) == 1 + 2 + 2 + 5  # embedding, q and o, up and down, norms
    for name in held:
        full = full_weight(name, frozen[name].shape).to(dtype).float()
        assert torch.equal(exported[f"{name}/fp32"]["param"], full), name

    for target in (TP2, TP3):
        checked.assert_losses(checked.resume(target, tmp_path / "tp4", tmp_path / str(target)), losses)


def with_spare_layers() -> nn.Module:
    """A model of which some layers take no part in the loss."""
    model = build(MODELS["llama"])
    layer: Any = model.model.layers[1]  # type: ignore[union-attr, index]
    layer.spare = nn.ModuleDict({"mlp": type(layer.mlp)(model.config)})
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "fp32_zero2", "bf16_optimizer"])
def test_a_parameter_that_never_got_a_gradient(kind: str, tmp_path: Path) -> None:
    checked = Case(with_spare_layers, kind)
    losses = checked.export(TP3, tmp_path / "tp3")
    assert_as_stock(tmp_path / "tp3")

    name = "model.layers.1.spare.mlp.down_proj.weight"
    layout = storage.read_manifest(tmp_path / "tp3" / UNIVERSAL).parameters[name].layout
    assert layout.shards == ((48, 17), (48, 17), (48, 16))
    assert not tensors(tmp_path / "tp3" / UNIVERSAL)[f"{name}/exp_avg"].any()
    checked.assert_losses(checked.resume(TP2, tmp_path / "tp3", tmp_path / "tp2"), losses)


# ------------------------------------------------------------------------------------------------ T6 and other refusals


@pytest.mark.slow
def test_replicas_that_have_drifted_apart_stop_the_export(tmp_path: Path) -> None:
    """T6: in gpt_bigcode each rank has a copy of the one key/value head, whose gradients nobody adds up."""
    checked = Case(lambda: build(BIGCODE))
    with pytest.raises(RankError) as failure:
        checked.export(TP2, tmp_path, after=0)
    message = str(failure.value)
    pattern = r"parameter transformer\.h\.\d\.attn\.c_attn\.(weight|bias), state \w+: .*differs .*by up to (\S+), at "
    found = re.search(pattern, message)
    assert found is not None and float(found[2]) > 0
    assert "parameter_to_average_patterns" in message
    assert not (tmp_path / UNIVERSAL).exists() and (tmp_path / TAG).is_dir()


def test_what_autotp_cannot_describe_stops_the_export_with_its_own_reason(tmp_path: Path) -> None:
    name, reason = "model.layers.1.self_attn.q_proj.weight", fused_LinearLayer._unsupported_uc_reason

    def body() -> str:
        megads_ucp.install(EXPORTING)
        engine = case("llama").engine(2)
        # As fused_LinearLayer._mark_uc_metadata leaves it; the models that come to that do not train at all.
        getattr(engine.module.get_parameter(name), DS_AUTOTP_UC_META)["conversion"]["unsupported_reason"] = reason
        with pytest.raises(megads_ucp.errors.UniversalCheckpointError) as failure:
            engine.save_checkpoint(str(tmp_path), tag=TAG)
        return str(failure.value)

    for message in run_ranks(body, 2):
        assert name in message and reason in message and "regular checkpoint at the same topology" in message
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".py") == ["latest", TAG]


@pytest.mark.parametrize("name", ["opt", "gpt_neox"])
def test_row_parallel_biases_are_never_held_scaled_in_training(name: str) -> None:
    """AutoTP adds them once, after the all-reduce. DeepSpeed's affine maps could say otherwise; if AutoTP begins to use
    that, the refusals below become users' business."""

    def body() -> list[str]:
        return [
            pattern
            for pattern, affine in case(name).engine(3).module.universal_checkpoint_info["affine_map"]["params"].items()
            if any(piece.get("scale", 1.0) != 1.0 for rank in affine["ranks"].values() for piece in rank["pieces"])
        ]

    assert run_ranks(body, 3) == [[]] * 3


@pytest.mark.slow
def test_moments_of_a_bias_held_scaled_are_not_moved(tmp_path: Path) -> None:
    """Neither out of such a model nor into it; what stock DeepSpeed refuses halfway is refused before all else."""
    name = "model.decoder.layers.0.fc2.bias"

    def body() -> list[str]:
        megads_ucp.install(EXPORTING)
        engine = case("opt").engine(2, resuming=True)
        bias = engine.module.get_parameter(name)
        before = bias.detach().clone()
        scaled = replicated_map(tuple(bias.shape), 2, scale=0.5).to_dict()
        getattr(bias, DS_AUTOTP_UC_META)["conversion"]["affine_map"] = scaled
        refusals = []
        with pytest.raises(megads_ucp.errors.UniversalCheckpointError) as failure:
            engine.load_checkpoint(str(tmp_path))
        refusals.append(str(failure.value))
        assert torch.equal(bias, before)
        train(engine, batches(0, 1))
        with pytest.raises(megads_ucp.errors.UniversalCheckpointError) as failure:
            engine.save_checkpoint(str(tmp_path / "never"), tag=TAG)
        assert not list((tmp_path / "never").glob(f"*{UNIVERSAL}*"))
        return [*refusals, str(failure.value)]

    case("opt").export(TP3, tmp_path, after=0)
    for messages in run_ranks(body, 2):
        for message in messages:
            assert f"parameter {name} is held scaled (source: AutoTP affine map)" in message and "lr and eps" in message


# -------------------------------------------------------------------------------- each model carries its own metadata


def test_the_exported_info_is_all_that_autotp_knows(tmp_path: Path) -> None:
    def body() -> tuple[dict[str, Any], list[str]]:
        megads_ucp.install(EXPORTING)
        engine = case("qwen3").engine(2)
        engine.save_checkpoint(str(tmp_path), tag=TAG)
        return engine.module.universal_checkpoint_info, [name for name, _ in engine.module.named_parameters()]

    (info, names), _ = run_ranks(body, 2)
    for rank in range(2):
        path = tmp_path / UNIVERSAL / f"mp_rank_{rank:02d}_model_states.pt"
        assert torch.load(path, weights_only=False)["universal_checkpoint_info"] == info
    assert info["universal_checkpoint_version"] == 0.4
    assert info["autotp_unsupported_parameter_patterns"] == {}
    assert sorted(info["affine_map"]["params"]) == sorted(rf"^{re.escape(name)}$" for name in names)


@pytest.mark.slow
def test_two_engines_in_a_process_never_see_each_other(tmp_path: Path) -> None:
    """Teacher and student of other head counts at one TP degree: each export is what it is without the other."""
    teacher, student = case("llama"), with_heads("qwen2", query=4, key_value=2)

    def alone(which: Case, directory: Path) -> None:
        megads_ucp.install(EXPORTING)
        engine = which.engine(2)
        train(engine, batches(0, 2))
        engine.save_checkpoint(str(directory), tag=TAG)

    def together() -> None:
        megads_ucp.install(EXPORTING)
        engines = [teacher.engine(2), student.engine(2)]
        for batch in batches(0, 2):
            for engine in engines:
                train(engine, [batch])
        for engine, name in zip(engines, ("teacher", "student"), strict=True):
            engine.save_checkpoint(str(tmp_path / "both" / name), tag=TAG)

    run_ranks(together, 4)
    for which, name in ((teacher, "teacher"), (student, "student")):
        run_ranks(alone, 4, which, tmp_path / name)
        stock.assert_same_universal(tmp_path / "both" / name / UNIVERSAL, tmp_path / name / UNIVERSAL)
        manifests = [storage.read_manifest(folder / name / UNIVERSAL) for folder in (tmp_path / "both", tmp_path)]
        assert manifests[0].parameters == manifests[1].parameters
        assert manifests[0].groups == manifests[1].groups
    student.resume(TP3, tmp_path / "both" / "student", tmp_path / "again", after=1)
