# SPDX-License-Identifier: Apache-2.0
"""Resumes from directories that say too little, something wrong, or something else than the model does.

And what else a run keeps beside its universal checkpoint: consolidated weights, states moved out of the way.
"""

from __future__ import annotations

import argparse
import logging
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn

import megads_ucp
from megads_ucp.errors import StorageError, UniversalCheckpointError
from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.load.remarks import batch_advice
from tests.cases.test_tensor_parallel_cases import (
    Case,
    export,
    gpt_case,
    llama_case,
    resume,
    stock_resume,
)
from tests.engine.test_padding import with_groups_of
from tests.support import stock
from tests.support.models import KINDS, MLP, draw_weights, train
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import (
    EXPORTING,
    LOADING,
    TAG,
    UNIVERSAL,
    Log,
    Recipe,
    assert_resumes,
    assert_same_state,
    assert_same_tensors,
    save,
    tensors,
)
from tests.support.runs import export as export_recipe

pytest.importorskip("megatron.core")

from tests.support import gpt


def contents(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items() if torch.is_tensor(value)}


class Everything(Log):
    """Collects remarks on the global batch as well."""

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def changed(engine: Any, before: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, value in contents(engine).items() if not torch.equal(value, before[name])]


# ------------------------------------------------------------------------------------------- the target's layers decide


@pytest.mark.slow
def test_row_parallel_weights_that_a_directory_calls_column_parallel(tmp_path: Path) -> None:
    """T1: what the stock converter makes of a run at TP 1 whose client names no row-parallel weights.

    Megatron-DeepSpeed's names them at TP > 1 only. Sizes fit either way, so stock's own load puts wrong values there.
    """
    info = {**gpt.STOCK_INFO, "parameter_with_row_parallelism_patterns": []}
    case = replace(gpt_case(tied=False, layers=1), info=lambda tp: info)
    losses = export(case, 1, 2, tmp_path / "source")
    universal = stock.convert(tmp_path / "source" / TAG, tmp_path / "stock" / UNIVERSAL)
    for name in ("self_attention.linear_proj", "mlp.linear_fc2"):
        content = torch.load(universal / "zero" / f"decoder.layers.0.{name}.weight" / "fp32.pt", weights_only=False)
        assert content["cat_dim"] == 0
    with pytest.raises(RankError, match=r"linear_\w+\.weight/fp32 on TP rank . of 2"):
        stock_resume(case, 2, 1, tmp_path / "stock")

    for tp in (2, 4):
        again = tmp_path / f"tp{tp}"
        resumed = resume(case, tp, 1, tmp_path / "stock", again, same=assert_same_tensors)
        assert resumed == pytest.approx(losses, rel=1e-5)
        assert_same_state(again / UNIVERSAL, tmp_path / "source" / UNIVERSAL)


STOCK_TIED = {**gpt.STOCK_INFO, "vocabulary_parameter_patterns": [r".*word_embeddings\.weight$"]}


@pytest.mark.slow
def test_a_vocabulary_may_lose_its_padding_but_no_word(tmp_path: Path) -> None:
    """A target that is padded further takes the file; one with fewer rows is told of both shapes, on all ranks."""
    case = replace(gpt_case(layers=1), info=lambda tp: STOCK_TIED)
    export(case, 1, 1, tmp_path / "ours", after=0)
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    larger, smaller = (replace(gpt_case(layers=1, vocabulary=rows), info=case.info) for rows in (64, 32))

    for directory in (tmp_path / "ours", tmp_path / "stock"):
        for tp in (1, 2):
            again = tmp_path / f"{directory.name} at {tp}"
            resume(larger, tp, 1, directory, again, check=False, same=assert_same_tensors)
            messages = run_ranks(refusal, tp, smaller, tp, directory)
            assert len(set(messages)) == 1
            for part in ("word_embeddings.weight", f"{gpt.VOCABULARY}", f"({32 // tp}, 32)", str(directory)):
                assert part in messages[0], messages[0]


def refusal(case: Case, tp: int, directory: Path) -> str:
    """On each rank: why it does not load ``directory``; nothing of the engine has changed."""
    megads_ucp.install()
    engine = case.engine(tp, resuming=True)
    fresh = contents(engine)
    with pytest.raises(UniversalCheckpointError) as caught:
        engine.load_checkpoint(str(directory))
    assert changed(engine, fresh) == []
    return str(caught.value)


def test_a_model_of_other_sizes_is_refused_on_all_ranks_with_both_shapes(tmp_path: Path) -> None:
    """Also on those that hold nothing of the parameters that differ."""
    export_recipe(Recipe("fp32"), 2, tmp_path, after=0)

    def body() -> str:
        megads_ucp.install()
        engine = Recipe("fp32", lambda: MLP((7, 13, 11, 6))).engine(resuming=True)
        fresh = contents(engine)
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path))
        assert changed(engine, fresh) == []
        return str(caught.value)

    first, *others = run_ranks(body, 3)
    assert others == [first] * 2
    assert "layers.2" in first and "(5, 11)" in first and "(6, 11)" in first


# -------------------------------------------------------------------------------- T3: targets that do not divide


ATTENTION, MLP_ROWS = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"

# name -> (query heads, key and value heads, TP of the target, rows that its ranks hold of the keys' projection)
UNEVEN = {
    "3 heads over 2": (6, 3, 2, [8, 4]),
    "one head": (4, 1, 2, [4, 0]),
    "more ranks than heads": (6, 3, 4, [4, 4, 4, 0]),
    "even heads, uneven columns": (4, 4, 4, [4, 4, 4, 4]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEVEN)
def test_a_target_whose_ranks_hold_unequal_shards_or_none(name: str, tmp_path: Path) -> None:
    """T3: from an export at TP 1, and back to it; ours and the stock converter's, which knows nothing of AutoTP."""
    heads, key_value_heads, tp, rows = UNEVEN[name]
    case = llama_case(4 * heads, 10, heads=heads, key_value_heads=key_value_heads)
    losses = export(case, 1, 1, tmp_path / "ours")
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL, inject_missing_state=True)

    def held() -> tuple[int, int]:
        parameters = dict(case.engine(tp).module.named_parameters())
        return parameters[ATTENTION].shape[0], parameters[MLP_ROWS].shape[0]

    assert run_ranks(held, tp) == list(zip(rows, {2: [5, 5], 4: [3, 3, 2, 2]}[tp], strict=True))
    for source in (tmp_path / "ours", tmp_path / "stock"):
        again, back = tmp_path / f"{source.name} again", tmp_path / f"{source.name} back"
        resumed = resume(case, tp, 4 // tp, source, again, check=False, same=assert_same_tensors)
        assert resumed == pytest.approx(losses, rel=1e-5)
        resumed = resume(case, 1, 2, again, back, check=False, same=assert_same_tensors)
        assert resumed == pytest.approx(losses, rel=1e-5)
        assert_same_state(back / UNIVERSAL, tmp_path / "ours" / UNIVERSAL)


# ------------------------------------------------------------------------------- the stock converter's directories


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bf16_optimizer", "round_robin")])
def test_a_stock_directory_of_every_kind_of_engine(kind: str, tmp_path: Path) -> None:
    """At another degree; the two kinds left out are in test_same_as_stock.py."""
    recipe = Recipe(kind)
    losses = export_recipe(recipe, 2, tmp_path / "ours")
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    rel = 1e-5 if kind in ("fp32", "fp32_zero2", "round_robin_zero1") else 5e-3
    assert_resumes(recipe, 3, tmp_path / "stock", tmp_path / "again", losses, rel=rel)
    assert_same_state(tmp_path / "again" / UNIVERSAL, tmp_path / "ours" / UNIVERSAL)


FROZEN_SHARDED = ["decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.0.self_attention.linear_qkv.weight"]
FROZEN_WHOLE = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.0.pre_mlp_layernorm.weight"


@pytest.mark.slow
def test_frozen_weights_that_a_stock_directory_has_wrong_or_not_at_all(tmp_path: Path) -> None:
    """Of sharded ones the converter writes one rank's shard, of excluded ones nothing: one warning lists them."""

    def build(tp: int) -> tuple[nn.Module, Any]:
        model, mpu = gpt.build_gpt(tp, layers=2)
        for name, parameter in model.named_parameters():
            if name in FROZEN_SHARDED or name in FROZEN_WHOLE:
                parameter.requires_grad_(False)
        model.register_buffer("seen", torch.arange(3.0))
        return model, mpu

    case = Case(build, gpt.shard, gpt.gpt_batches, info=lambda tp: STOCK_TIED)

    def source() -> dict[str, torch.Tensor]:
        megads_ucp.install(EXPORTING)
        engine = case.engine(2)
        engine.module.seen += 5
        train(engine, case.batches(0, 1))
        case.save(engine, 2, tmp_path / "ours")
        told = {"universal_checkpoint_info": STOCK_TIED}
        excluding = str(tmp_path / "excluding")
        engine.save_checkpoint(excluding, tag=TAG, client_state=told, exclude_frozen_parameters=True)
        return contents(engine)

    saved = run_ranks(source, 2)[0]
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    stock.convert(tmp_path / "excluding" / TAG, tmp_path / "stock excluding" / UNIVERSAL)

    def target(tp: int, directory: Path) -> tuple[list[str], dict[str, torch.Tensor], list[str]]:
        log = Log()
        megads_ucp.install()
        engine = case.engine(tp, resuming=True)
        fresh = contents(engine)
        engine.load_checkpoint(str(directory))
        kept = [name for name, value in contents(engine).items() if torch.equal(value, fresh[name])]
        return log.messages, contents(engine), kept

    whole = [name for name in saved if name in FROZEN_WHOLE]
    assert whole
    for tp in (2, 1):
        (messages, loaded, kept), *others = run_ranks(target, tp, tp, tmp_path / "stock")
        assert kept == sorted(FROZEN_SHARDED, key=list(saved).index)
        assert all(torch.equal(loaded[name], saved[name]) for name in [*whole, "seen"])
        (listed,) = [message for message in messages if "keep the values" in message]
        assert all(f"{name} (of which it has one tensor-parallel rank's shard)" in listed for name in FROZEN_SHARDED)
        assert all(not theirs for theirs, _, _ in others)

        (messages, loaded, kept), *others = run_ranks(target, tp, tp, tmp_path / "stock excluding")
        assert sorted(kept) == sorted([*FROZEN_SHARDED, *whole])
        assert torch.equal(loaded["seen"], saved["seen"])
        (listed,) = [message for message in messages if "keep the values" in message]
        assert all(name in listed for name in kept)

        (messages, loaded, kept), *_ = run_ranks(target, tp, tp, tmp_path / "ours")
        assert kept == [] and not [message for message in messages if "keep the values" in message]
        # What was there all along is there still, at either degree.
        for name in FROZEN_SHARDED:
            value = loaded[name] if tp == 2 else gpt.shard(name, loaded[name], 0, 2)
            assert torch.equal(value, saved[name]), name


@pytest.mark.slow
def test_a_frozen_vocabulary_keeps_its_padding_in_a_stock_directory(tmp_path: Path) -> None:
    """A target that is padded alike takes it; nobody knows which rows are real, so another is refused."""
    embedding = "embedding.word_embeddings.weight"
    told = {**gpt.STOCK_INFO, "vocabulary_parameter_patterns": [r"output_layer\.weight$"], "original_vocab_size": 40}

    def of_rows(rows: int) -> Case:
        def build(tp: int) -> tuple[nn.Module, Any]:
            model, mpu = gpt.build_gpt(tp, tied=False, layers=1, vocabulary=rows)
            model.get_parameter(embedding).requires_grad_(False)
            return model, mpu

        return Case(build, gpt.shard, gpt.gpt_batches, info=lambda tp: told)

    export(of_rows(48), 1, 1, tmp_path / "ours", after=0)
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    full = tensors(tmp_path / "stock" / UNIVERSAL)[f"{embedding}/fp32"]
    assert full.shape == (48, 32)

    def body() -> None:
        megads_ucp.install()
        engine = of_rows(48).engine(2, resuming=True)
        engine.load_checkpoint(str(tmp_path / "stock"))
        assert torch.equal(engine.module.get_parameter(embedding), full.chunk(2)[dist.get_rank()])

    run_ranks(body, 2)
    for message in run_ranks(refusal, 2, of_rows(44), 2, tmp_path / "stock"):
        assert embedding in message and "(48, 32)" in message and "(22, 32)" in message


def test_frozen_integers_that_fp32_cannot_hold_are_exact_and_cut(tmp_path: Path) -> None:
    """Packed weights, say. A run without tensor parallelism has them whole; the target's layers cut them."""
    whole = torch.arange(8, dtype=torch.int32).view(4, 2) + 2**24

    def build(tp: int) -> tuple[nn.Module, Any]:
        model, mpu = gpt.build_gpt(tp, layers=1)
        packed = nn.Parameter(torch.zeros(4 // tp, 2, dtype=torch.int32), requires_grad=False)
        packed.tensor_model_parallel, packed.partition_dim = True, 0  # type: ignore[attr-defined]
        model.register_parameter("packed", packed)
        return model, mpu

    case = Case(build, gpt.shard, gpt.gpt_batches)

    def source() -> list[str]:
        log = Log()
        megads_ucp.install(EXPORTING)
        engine = case.engine(1)
        engine.module.packed.copy_(whole)
        engine.save_checkpoint(str(tmp_path), tag=TAG)
        engine.save_checkpoint(str(tmp_path / "excluding"), tag=TAG, exclude_frozen_parameters=True)
        return log.messages

    def target() -> bool:
        megads_ucp.install()
        engine = case.engine(2, resuming=True)
        engine.load_checkpoint(str(tmp_path))
        return torch.equal(engine.module.packed, whole.chunk(2)[dist.get_rank()])

    assert run_ranks(source, 1) == [[]]
    assert not list((tmp_path / "excluding" / UNIVERSAL).glob("exact_values_*"))
    assert run_ranks(target, 2) == [True, True]


def test_a_frozen_parameter_of_another_size_is_refused(tmp_path: Path) -> None:
    """One that is larger than the model's cannot be a shard of it."""

    def frozen(sizes: tuple[int, ...]) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            model = MLP(sizes)
            model.layers[0].requires_grad_(False)
            return model

        return build

    export_recipe(Recipe("fp32", frozen((7, 13, 11, 5))), 2, tmp_path / "ours", after=0)
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)

    def body() -> list[str]:
        megads_ucp.install()
        told = []
        for source in (tmp_path / "ours", tmp_path / "stock"):
            engine = Recipe("fp32", frozen((6, 13, 11, 5))).engine(resuming=True)
            fresh = contents(engine)
            with pytest.raises(UniversalCheckpointError) as caught:
                engine.load_checkpoint(str(source))
            assert changed(engine, fresh) == []
            told.append(str(caught.value))
        return told

    first, *others = run_ranks(body, 2)
    assert others == [first]
    assert all("layers.0.weight" in told and "(13, 7)" in told and "(13, 6)" in told for told in first)


@pytest.mark.slow
@pytest.mark.parametrize("together", ["never", "always"])
def test_a_verified_resume_at_another_degree(tmp_path: Path, together: str) -> None:
    """What a rank reads of a file, row by row, is checked with what it lies among; a flipped bit stops all ranks."""
    settings = {"universal_checkpoint_verify": True, "universal_checkpoint_read_together": together}
    case = gpt_case(layers=1)
    export(case, 1, 2, tmp_path, after=0)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    file = tmp_path / UNIVERSAL / "zero" / name / "exp_avg.pt"

    def body(damaged: bool) -> str | None:
        megads_ucp.install(argparse.Namespace(**settings))
        engine = case.engine(2, resuming=True)
        if damaged:
            with pytest.raises(UniversalCheckpointError) as caught:
                engine.load_checkpoint(str(tmp_path))
            return str(caught.value)
        engine.load_checkpoint(str(tmp_path))
        case.assert_holds(engine, tmp_path / UNIVERSAL)
        return None

    assert run_ranks(body, 2, False) == [None, None]
    content = bytearray(file.read_bytes())
    # The last column of the last row, which only the last tensor-parallel rank wants.
    value = tensors(tmp_path / UNIVERSAL)[f"{name}/exp_avg"].numpy()
    content[content.index(value.tobytes()) + value.nbytes - 1] ^= 1
    file.write_bytes(content)
    first, other = run_ranks(body, 2, True)
    assert first == other and str(file) in first and "must not be used" in first


def test_a_stock_directory_cannot_be_verified_and_the_error_says_so(tmp_path: Path) -> None:
    export_recipe(Recipe("fp32"), 2, tmp_path / "ours", after=0)
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)

    def body() -> str:
        megads_ucp.install(argparse.Namespace(universal_checkpoint_verify=True))
        engine = Recipe("fp32").engine(resuming=True)
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path / "stock"))
        return str(caught.value)

    first, other = run_ranks(body, 2)
    assert first == other and "manifest.json" in first and "verified" in first


# ------------------------------------------------------------------------------------------------ what else comes back


class Tied(nn.Module):
    """An input and an output layer that share their weight, unless they are told not to."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
        self.between = nn.Linear(7, 7)
        if tied:
            self.last.weight = self.first.weight
        draw_weights(self)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.between(torch.tanh(self.first(inputs.to(self.first.weight.dtype)))))
        return nn.functional.mse_loss(self.last(hidden).float()[:, :5], targets)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "bf16_optimizer"])
def test_tied_weights(kind: str, tmp_path: Path) -> None:
    """Under both of their names, from either kind of directory; a model that does not tie them lacks the states."""
    recipe = Recipe(kind, Tied)
    losses = export_recipe(recipe, 2, tmp_path / "ours")
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    rel = 1e-5 if kind == "fp32" else 5e-3
    for name in ("ours", "stock"):
        assert_resumes(recipe, 3, tmp_path / name, tmp_path / f"from {name}", losses, rel=rel)

    def body() -> str:
        megads_ucp.install()
        tied = recipe.engine(resuming=True)
        tied.load_checkpoint(str(tmp_path / "ours"))
        assert tied.module.first.weight is tied.module.last.weight
        assert torch.equal(tied.module.first.weight.float(), saved.to(tied.module.first.weight.dtype).float())
        engine = replace(recipe, model=lambda: Tied(False)).engine(resuming=True)
        fresh = contents(engine)
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path / "ours"))
        assert changed(engine, fresh) == []
        return str(caught.value)

    saved = tensors(tmp_path / "ours" / UNIVERSAL)["first.weight/fp32"]
    first, *others = run_ranks(body, 3)
    assert others == [first] * 2 and "parameter last.weight" in first and "load_optimizer_states=False" in first


@pytest.mark.parametrize("name", ["first.weight", "between.weight"])
def test_a_parameter_that_was_frozen_has_no_states(name: str, tmp_path: Path) -> None:
    """Whichever of its group it is: the others' states are not given up in silence."""

    def frozen() -> nn.Module:
        model = Tied(False)
        model.get_parameter(name).requires_grad_(False)
        return model

    export_recipe(Recipe("fp32", frozen), 2, tmp_path / "ours", after=0)
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    saved = tensors(tmp_path / "ours" / UNIVERSAL)

    def body() -> list[str]:
        megads_ucp.install(EXPORTING)
        told = []
        for source in (tmp_path / "ours", tmp_path / "stock"):
            engine = Recipe("fp32", lambda: Tied(False)).engine(resuming=True)
            fresh = contents(engine)
            with pytest.raises(UniversalCheckpointError) as caught:
                engine.load_checkpoint(str(source))
            assert changed(engine, fresh) == []
            told.append(str(caught.value))
            engine.load_checkpoint(str(source), load_optimizer_states=False)
            assert [
                key for key, value in contents(engine).items() if not torch.equal(value, saved[f"{key}/fp32"])
            ] == []
        return told

    first, *others = run_ranks(body, 3)
    assert others == [first] * 2
    assert f"parameter {name}" in first[0] and "load_optimizer_states=False" in first[0]
    assert name in first[1] and "exp_avg" in first[1]


@pytest.mark.slow
def test_client_state_and_the_learning_rate_schedule_come_back(tmp_path: Path) -> None:
    """Whatever objects are in it, from either kind of directory, as a regular load returns it."""
    recipe = Recipe("fp32", scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    told = {"iteration": 3, "args": argparse.Namespace(hidden=7), "random": torch.arange(3)}

    def source() -> dict[str, Any]:
        engine = recipe.saved(tmp_path / "unused")
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
        engine.save_checkpoint(str(tmp_path / "ours"), tag=TAG, client_state={**told, **info})
        return dict(engine.lr_scheduler.state_dict())

    schedule = run_ranks(source, 2)[0]
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)

    def target(directory: Path) -> tuple[str, dict[str, Any], dict[str, Any], int]:
        engine = Recipe("fp32", scheduler=recipe.scheduler).engine(resuming=True)
        path, client = engine.load_checkpoint(str(directory))
        return path, client, dict(engine.lr_scheduler.state_dict()), engine.global_steps

    def with_the_package(directory: Path) -> tuple[str, dict[str, Any], dict[str, Any], int]:
        megads_ucp.install()
        return target(directory)

    for name in ("ours", "stock"):
        expected = run_ranks(target, 2, tmp_path / name)[0]
        for path, client, rates, steps in run_ranks(with_the_package, 3, tmp_path / name):
            assert path == expected[0] and steps == expected[3] == 3
            assert rates == expected[2] == schedule
            assert list(stock.differences(client, expected[1], "client")) == []
            assert list(stock.differences({key: client[key] for key in told}, told, "client")) == []


# ------------------------------------------------------------------------------------------ a fixed global batch


@pytest.mark.parametrize(
    ("batch", "degree", "micro_batch", "advice"),
    [
        (12, 3, 2, "To keep 12, set gradient_accumulation_steps to 2."),
        (1024, 64, 1, "To keep 1024, set gradient_accumulation_steps to 16."),
        (12, 2, 4, "one of ['1 x 6', '2 x 3', '3 x 2', '6 x 1']."),
        (12, 5, 1, "12 samples do not divide over DP 5; degrees near it that fit: [3, 4, 6]."),
        (7, 3, 1, "degrees near it that fit: none."),
    ],
)
def test_advice_on_the_global_batch(batch: int, degree: int, micro_batch: int, advice: str) -> None:
    assert batch_advice(batch, degree, micro_batch).endswith(advice)


def test_a_resume_says_how_to_keep_the_global_batch(tmp_path: Path) -> None:
    """On one rank; and nothing where it is kept."""
    of_twelve = Recipe("fp32", config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
    run_ranks(lambda: of_twelve.saved(tmp_path) and None, 2)

    def body(accumulation: int) -> list[str]:
        log = Everything()
        replace(of_twelve, config={**of_twelve.config, "gradient_accumulation_steps": accumulation}).resumed(tmp_path)
        return log.messages

    ((message,), *others) = run_ranks(body, 3, 3)
    assert others == [[], []]
    assert "global batch of 12, this run has one of 18" in message
    assert message.endswith("set gradient_accumulation_steps to 2.")
    assert run_ranks(body, 3, 2) == [[], [], []]


@pytest.mark.parametrize(
    ("micro_batch", "advice"),
    [(2, "set gradient_accumulation_steps to 2."), (3, "must be one of ['1 x 4', '2 x 2', '4 x 1'].")],
)
def test_a_global_batch_that_no_longer_divides(micro_batch: int, advice: str) -> None:
    """Point 7 of a resume at another DP: DeepSpeed's own refusal, from which no accumulation can be read."""
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 5}

    def body(installed: bool) -> str:
        if installed:
            megads_ucp.install()
            megads_ucp.uninstall()
            megads_ucp.install()
        with pytest.raises(AssertionError, match="Check batch related parameters") as caught:
            Recipe("fp32", config=config).engine()
        return str(caught.value)

    (stock,) = run_ranks(body, 1, False)
    ours = run_ranks(body, 3, True)
    assert "gradient_accumulation_steps to" not in stock and "1 x" not in stock
    assert len(set(ours)) == 1 and advice in ours[0]


def test_tensor_parallel_ranks_of_autotp_share_a_batch(tmp_path: Path) -> None:
    """DeepSpeed's train_batch_size counts them as if each had samples of its own."""
    case = llama_case(16, 10, heads=4, key_value_heads=2)

    def body(tp: int) -> list[str]:
        log = Everything()
        megads_ucp.install(EXPORTING)
        engine = case.engine(tp, resuming=tp > 1)
        if tp > 1:
            engine.load_checkpoint(str(tmp_path))
            assert engine.train_batch_size() == 2
        else:
            case.save(engine, tp, tmp_path)
        return log.messages

    assert run_ranks(body, 1, 1) == [[]]
    assert [message for messages in run_ranks(body, 2, 2) for message in messages if "global batch" in message] == []


# ------------------------------------------------------------------------------------- what else a run keeps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero1", "zero2", "round_robin", "fp16", "cpu_offload"])
def test_consolidated_weights_are_what_they_are_without_the_package(kind: str, tmp_path: Path) -> None:
    """zero_to_fp32.py, as it lies in the checkpoint's directory, and engine.save_16bit_model.

    Of a run that resumed from a universal checkpoint, too; with groups that are mostly padding.
    """
    recipe = with_groups_of((1, 9), kind)

    def source(installed: bool) -> None:
        if installed:
            megads_ucp.install(EXPORTING)
        engine = recipe.engine()
        train(engine, recipe.batches(0, 3))
        keep(engine, tmp_path / str(installed))

    def resumed() -> None:
        keep(recipe.resumed(tmp_path / "True"), tmp_path / "resumed")

    def keep(engine: Any, directory: Path) -> None:
        save(engine, directory)
        engine.save_16bit_model(str(directory), "model.bin")

    def consolidate(directory: Path) -> None:
        sys.argv = ["zero_to_fp32.py", str(directory), str(directory / "consolidated"), "-t", TAG]
        runpy.run_path(str(directory / "zero_to_fp32.py"), run_name="__main__")

    def found(directory: Path, world: int, body: Callable[..., None], *args: Any) -> dict[str, Any]:
        run_ranks(body, world, *args)
        run_ranks(consolidate, 1, directory)
        files = [directory / "model.bin", *sorted((directory / "consolidated").iterdir())]
        assert len(files) == 2
        return {path.name: torch.load(path, weights_only=False) for path in files}

    expected = found(tmp_path / "False", 2, source, False)
    assert all(len(weights) == 8 for weights in expected.values())
    assert list(stock.differences(found(tmp_path / "True", 2, source, True), expected, "")) == []
    assert list(stock.differences(found(tmp_path / "resumed", 3, resumed), expected, "")) == []


OFFLOADED = [
    *(("zero2", [state]) for state in OffloadStateTypeEnum if state is not OffloadStateTypeEnum.contiguous_grad_buffer),
    ("zero2", None),
    ("zero1", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "include"), OFFLOADED)
def test_states_that_are_offloaded_meanwhile(
    kind: str, include: list[OffloadStateTypeEnum] | None, tmp_path: Path
) -> None:
    """engine.offload_states(), of all there is or of one part: it may be saved; for a load it has to be undone."""
    recipe = Recipe(kind)

    def body(offloading: bool) -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = replace(recipe, config=LOADING).engine()
        train(engine, recipe.batches(0, 3))
        if offloading:
            engine.offload_states(include)
        save(engine, tmp_path / str(offloading))
        if offloading:
            with pytest.raises(UniversalCheckpointError, match=r"offloaded: call engine\.reload_states\(\) first"):
                engine.load_checkpoint(str(tmp_path / "True"))
            engine.reload_states()
            losses = train(engine, recipe.batches(3, 5))
            engine.load_checkpoint(str(tmp_path / "True"))
            assert train(engine, recipe.batches(3, 5)) == losses
            return losses
        return train(engine, recipe.batches(3, 5))

    assert run_ranks(body, 2, True) == run_ranks(body, 2, False)
    assert_same_state(tmp_path / "True" / UNIVERSAL, tmp_path / "False" / UNIVERSAL)


class PickySchedule(torch.optim.lr_scheduler.ConstantLR):
    """Of the client's own code, which a load runs as well; fails on one rank."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such schedule")
        super().load_state_dict(state_dict)


def test_nobody_waits_for_a_rank_whose_own_part_of_a_load_fails(tmp_path: Path) -> None:
    recipe = Recipe("fp32", scheduler=PickySchedule)
    run_ranks(lambda: recipe.saved(tmp_path) and None, 2)

    def body() -> str:
        with pytest.raises((ValueError, UniversalCheckpointError)) as caught:
            recipe.resumed(tmp_path)
        return str(caught.value)

    other, failed = run_ranks(body, 2, timeout=30)
    assert failed == "no such schedule"
    assert "rank 1: ValueError: no such schedule" in other and "must not be used" in other


def test_a_checkpoint_that_one_rank_does_not_see_is_refused_on_all(tmp_path: Path) -> None:
    """As a directory of some node's own."""
    recipe = Recipe("fp32")
    run_ranks(lambda: recipe.saved(tmp_path) and None, 2)

    def body() -> str:
        with pytest.raises(ValueError, match=r"nowhere/latest_universal does not exist: no .* has been exported there"):
            recipe.resumed(tmp_path / "nowhere")
        with pytest.raises(UniversalCheckpointError) as caught:
            recipe.resumed(tmp_path if dist.get_rank() == 0 else tmp_path / "elsewhere")
        return str(caught.value)

    for message in run_ranks(body, 2, timeout=30):
        assert "rank 1: " in message and str(tmp_path / "elsewhere" / UNIVERSAL) in message


def test_a_regular_checkpoint_is_refused_with_the_name_of_the_export_beside_it(tmp_path: Path) -> None:
    (tmp_path / "step5").mkdir()
    with pytest.raises(StorageError, match=r"not a universal checkpoint\.$"):
        Checkpoint(tmp_path / "step5")
    (tmp_path / "step5_universal").mkdir()
    with pytest.raises(StorageError, match="The one exported beside it is step5_universal"):
        Checkpoint(tmp_path / "step5")


def test_states_that_are_offloaded_on_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    recipe = Recipe("zero2")

    def body() -> str:
        megads_ucp.install(EXPORTING)
        engine = replace(recipe, config=LOADING).engine()
        train(engine, recipe.batches(0, 1))
        save(engine, tmp_path)
        if dist.get_rank() == 1:
            engine.offload_states()
        with pytest.raises(UniversalCheckpointError, match="rank 1: nothing can be loaded while") as caught:
            engine.load_checkpoint(str(tmp_path))
        return str(caught.value)

    first, other = run_ranks(body, 2)
    assert first == other
