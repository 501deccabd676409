# SPDX-License-Identifier: Apache-2.0
"""Resumes from directories that say too little, something wrong, or something else than the model does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megads_ucp
from megads_ucp.errors import UniversalCheckpointError
from tests.support import gpt, stock
from tests.support.degrees import Case, export, gpt_case, llama_case, resume, stock_resume
from tests.support.models import KINDS, MLP, train
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import (
    EXPORTING,
    TAG,
    UNIVERSAL,
    Log,
    Recipe,
    assert_resumes,
    assert_same_state,
    assert_same_tensors,
    changed,
    contents,
    tensors,
)
from tests.support.runs import export as export_recipe

pytestmark = pytest.mark.slow

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
    """A target that is padded further takes the file; one with fewer rows is refused with both shapes, on all ranks."""
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
        client_state = {"universal_checkpoint_info": STOCK_TIED}
        excluding = str(tmp_path / "excluding")
        engine.save_checkpoint(excluding, tag=TAG, client_state=client_state, exclude_frozen_parameters=True)
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
        shards = [f"{name} (there is only one tensor-parallel rank's shard of it)" for name in FROZEN_SHARDED]
        assert all(shard in listed for shard in shards)
        assert all(not logged for logged, _, _ in others)

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
    info = {**gpt.STOCK_INFO, "vocabulary_parameter_patterns": [r"output_layer\.weight$"], "original_vocab_size": 40}

    def of_rows(rows: int) -> Case:
        def build(tp: int) -> tuple[nn.Module, Any]:
            model, mpu = gpt.build_gpt(tp, tied=False, layers=1, vocabulary=rows)
            model.get_parameter(embedding).requires_grad_(False)
            return model, mpu

        return Case(build, gpt.shard, gpt.gpt_batches, info=lambda tp: info)

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
        messages = []
        for source in (tmp_path / "ours", tmp_path / "stock"):
            engine = Recipe("fp32", frozen((6, 13, 11, 5))).engine(resuming=True)
            fresh = contents(engine)
            with pytest.raises(UniversalCheckpointError) as caught:
                engine.load_checkpoint(str(source))
            assert changed(engine, fresh) == []
            messages.append(str(caught.value))
        return messages

    first, *others = run_ranks(body, 2)
    assert others == [first]
    assert all("layers.0.weight" in message and "(13, 7)" in message and "(13, 6)" in message for message in first)
