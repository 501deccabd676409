# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that are padded: their padding rows, which the softmax trains, come back like all others.

T4 in tests/cases/test_tensor_parallel.py is about the real rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megads_ucp
from tests.support import gpt, stock
from tests.support.degrees import Case, export
from tests.support.models import GLOBAL_BATCH, Batch, train
from tests.support.ranks import run_ranks
from tests.support.runs import AFTER, BEFORE, EXPORTING, TAG, UNIVERSAL, Log, tensors

pytest.importorskip("megatron.core")

from megatron.core import tensor_parallel as megatron_core

pytestmark = pytest.mark.slow

EMBEDDING = "embedding.word_embeddings.weight"


def words(number: int) -> Callable[[int, int], Iterator[Batch]]:
    """Batches in which these many words occur."""

    def batches(start: int, stop: int) -> Iterator[Batch]:
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(zlib.crc32(f"words {step}".encode()))
            text = torch.randint(number, (GLOBAL_BATCH, gpt.SEQUENCE + 1), generator=generator)
            yield text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batches


def padded_to(rows: int, *, real: int = 48, occur: int = 48, tied: bool = True) -> Case:
    """A GPT of so many rows, that its client calls so many words; others may occur all the same."""
    info = {"universal_checkpoint_version": 0.4, "original_vocab_size": real}

    def build(tp: int) -> tuple[nn.Module, Any]:
        return gpt.build_gpt(tp, tied=tied, layers=1, vocabulary=rows)

    return Case(build, gpt.shard, words(occur), info=lambda tp: info)


def padding(universal: Path) -> dict[str, torch.Tensor]:
    """Every state of the padding rows, by '<parameter>/<state>'."""
    files = sorted((universal / "padding").glob("*/*.pt"))
    return {f"{file.parent.name}/{file.stem}": torch.load(file)["param"] for file in files}


def whole(universal: Path) -> dict[str, torch.Tensor]:
    """Every state of every parameter, padding rows included."""
    rows = padding(universal)
    return {
        name: torch.cat([real, *([rows[name]] if name in rows else [])]) for name, real in tensors(universal).items()
    }


def resume(
    case: Case, tp: int, dp: int, directory: Path, again: Path, *, before: int = BEFORE, tag: str | None = None
) -> tuple[list[float], list[list[str]]]:
    """Loads, exports what it has loaded, and trains on: the losses, and what each rank was warned of by the load."""

    def body() -> tuple[list[float], list[str]]:
        megads_ucp.install(EXPORTING)
        engine, log = case.engine(tp, resuming=True), Log()
        engine.load_checkpoint(str(directory), tag=tag)
        messages = list(log.messages)
        case.save(engine, tp, again)
        return train(engine, case.batches(before, before + AFTER)), messages

    results = run_ranks(body, tp * dp)
    return results[0][0], [messages for _, messages in results]


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_goes_on_exactly_where_it_is_padded_alike(tied: bool, tmp_path: Path) -> None:
    case = padded_to(64, tied=tied)
    losses = export(case, 2, 2, tmp_path / "0")
    rows = padding(tmp_path / "0" / UNIVERSAL)
    assert {name.rpartition("/")[0] for name in rows} == ({EMBEDDING} if tied else {EMBEDDING, "output_layer.weight"})
    assert all(value.shape == (16, 32) for value in rows.values())
    assert all(value.any(1).all() for name, value in rows.items() if tied or name.startswith("output_layer"))

    for tp, dp in ((2, 2), (4, 1), (1, 3)):
        resumed, warnings = resume(case, tp, dp, tmp_path / "0", tmp_path / f"{tp}")
        assert_equal(whole(tmp_path / f"{tp}" / UNIVERSAL), whole(tmp_path / "0" / UNIVERSAL))
        assert resumed == (losses if (tp, dp) == (2, 2) else pytest.approx(losses, rel=1e-5))
        assert warnings == [[]] * (tp * dp)


def test_other_padding_keeps_what_it_has_room_for_and_repeats_the_rest(tmp_path: Path) -> None:
    export(padded_to(64), 2, 2, tmp_path / "0", after=0)
    saved, rows_of = whole(tmp_path / "0" / UNIVERSAL), padding(tmp_path / "0" / UNIVERSAL)

    for rows, tp, dp in ((48, 1, 2), (52, 2, 1), (68, 4, 1), (100, 2, 2)):
        again = tmp_path / f"{rows}"
        _, warnings = resume(padded_to(rows), tp, dp, tmp_path / "0", again)
        for name, value in whole(again / UNIVERSAL).items():
            assert torch.equal(value, expected_rows(saved[name], rows) if name in rows_of else saved[name]), name
        assert warnings == [[]] * (tp * dp)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_losses_hardly_notice_other_padding_once_it_has_become_unlikely(tied: bool, tmp_path: Path) -> None:
    steps = 300
    losses = export(padded_to(64, tied=tied), 2, 1, tmp_path / "0", before=steps)

    for rows, tp in ((48, 1), (68, 4)):
        resumed, _ = resume(padded_to(rows, tied=tied), tp, 1, tmp_path / "0", tmp_path / f"{rows}", before=steps)
        assert resumed == pytest.approx(losses, rel=1e-3)


def expected_rows(saved: torch.Tensor, rows: int) -> torch.Tensor:
    """Further rows repeat the last of the 16 padding rows."""
    further = max(rows - len(saved), 0)
    block = min(further, 16)
    repeated = saved[len(saved) - block :].repeat(-(-further // max(block, 1)), 1)[:further]
    return torch.cat([saved[:rows], repeated])


def test_words_beyond_the_number_come_back_and_are_named_at_the_save(tmp_path: Path) -> None:
    """A tokenizer of 50 words, 3 more added to it, padded to 64."""
    case = padded_to(64, real=50, occur=53, tied=False)

    def body() -> tuple[list[str], list[float]]:
        megads_ucp.install(EXPORTING)
        log, engine = Log(), case.engine(2)
        train(engine, case.batches(0, BEFORE))
        for tag in (TAG, "once more"):
            case.save(engine, 2, tmp_path / "0", tag)
        return log.messages, train(engine, case.batches(BEFORE, BEFORE + AFTER))

    (messages, losses), *others = run_ranks(body, 4)
    (message,) = messages
    assert f"{EMBEDDING} has 50 real rows by original_vocab_size, but rows 50, 51, 52 are words" in message
    assert "output_layer" not in message and all(found == [] for found, _ in others)

    rows = padding(tmp_path / "0" / UNIVERSAL)[f"{EMBEDDING}/exp_avg_sq"]
    assert rows[:3].any(1).all() and not rows[3:].any()
    for real in (50, 48, 53):  # what the resuming run's client says takes no part
        resumed, _ = resume(
            replace_info(case, real), 2, 2, tmp_path / "0", tmp_path / f"{real}", tag="once more_universal"
        )
        assert_equal(whole(tmp_path / f"{real}" / UNIVERSAL), whole(tmp_path / "0" / UNIVERSAL))
        assert resumed == losses


def replace_info(case: Case, real: int) -> Case:
    return replace(case, info=lambda tp: {"universal_checkpoint_version": 0.4, "original_vocab_size": real})


@pytest.mark.parametrize("tied", [True, False])
def test_a_right_number_is_no_reason_to_warn(tied: bool, tmp_path: Path) -> None:
    def body() -> list[str]:
        megads_ucp.install(EXPORTING)
        case, log = padded_to(64, tied=tied), Log()
        engine = case.engine(2)
        train(engine, case.batches(0, BEFORE))
        case.save(engine, 2, tmp_path)
        return log.messages

    assert run_ranks(body, 2) == [[], []]


def test_without_padding_rows_to_take_they_are_zero_and_one_warning_says_so(tmp_path: Path) -> None:
    export(padded_to(48, tied=False), 1, 2, tmp_path / "0", after=0)
    assert not (tmp_path / "0" / UNIVERSAL / "padding").exists()

    _, (first, *others) = resume(padded_to(56, tied=False), 2, 2, tmp_path / "0", tmp_path / "1")

    (warning,) = first
    for part in (EMBEDDING, "padded its 48 rows to 48", "pads them to 56", "--make-vocab-size-divisible-by"):
        assert part in warning, warning
    assert others == [[]] * 3
    assert all(value.shape == (8, 32) and not value.any() for value in padding(tmp_path / "1" / UNIVERSAL).values())


@pytest.mark.slow
def test_a_directory_of_the_stock_converter_has_none_and_is_warned_of(tmp_path: Path) -> None:
    info = {**gpt.STOCK_INFO, "vocabulary_parameter_patterns": [r".*word_embeddings\.weight$"]}
    case = replace(padded_to(64), info=lambda tp: info)
    export(case, 2, 1, tmp_path / "ours", after=0)
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)
    stock.assert_same_universal(tmp_path / "ours" / UNIVERSAL, tmp_path / "stock" / UNIVERSAL)

    _, (first, *others) = resume(case, 2, 1, tmp_path / "stock", tmp_path / "again")

    (warning,) = [message for message in first if "softmax" in message]
    assert "the stock converter drops the others" in warning and others == [[]]


def test_a_frozen_vocabulary_keeps_its_padding(tmp_path: Path) -> None:
    case = padded_to(64, tied=False)

    def build(tp: int) -> tuple[nn.Module, Any]:
        model, mpu = gpt.build_gpt(tp, tied=False, layers=1, vocabulary=64)
        model.get_parameter(EMBEDDING).requires_grad_(False)
        return model, mpu

    frozen = replace(case, build=build)
    losses = export(frozen, 2, 1, tmp_path / "0")
    assert padding(tmp_path / "0" / UNIVERSAL)[f"{EMBEDDING}/fp32"].any(1).all()

    resumed, _ = resume(frozen, 2, 1, tmp_path / "0", tmp_path / "1")

    assert_equal(whole(tmp_path / "1" / UNIVERSAL), whole(tmp_path / "0" / UNIVERSAL))
    assert resumed == losses


# ------------------------------------------------------------------------------- BERT: layers without names or patterns

WORDS, BERT_ROWS = 130, {1: 130, 2: 132}


class VocabParallelEmbedding(megatron_core.VocabParallelEmbedding):
    """Megatron-DeepSpeed's, which cannot describe itself."""

    sharded_state_dict = None


class BertLMHead(nn.Module):
    """Of Megatron-DeepSpeed (megatron/model/bert_model.py): the embedding once more, with a bias of its own."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(rows))
        self.bias.tensor_model_parallel, self.bias.partition_dim = True, 0  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            megatron_core.mappings.copy_to_tensor_model_parallel_region(hidden), weight, self.bias
        )


class Bert(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        config = gpt.configure(tp)
        self.embedding = VocabParallelEmbedding(
            BERT_ROWS[tp], config.hidden_size, init_method=config.init_method, config=config
        )
        self.dense = nn.LayerNorm(config.hidden_size)
        self.lm_head = BertLMHead(BERT_ROWS[tp] // tp)
        gpt.draw_shards(self, tp)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.dense(self.embedding(tokens)), self.embedding.weight)
        return megatron_core.vocab_parallel_cross_entropy(logits, labels).mean()


def test_layers_without_patterns_say_what_is_a_vocabulary(tmp_path: Path) -> None:
    """BERT: 130 words at TP 1 and 132 rows at TP 2, where the client says but their number."""

    def build(tp: int) -> tuple[nn.Module, Any]:
        return Bert(tp), gpt.ModelParallelUnit()

    info = {"universal_checkpoint_version": 0.4, "original_vocab_size": WORDS}
    case = Case(build, gpt.shard, words(WORDS), info=lambda tp: info)
    export(case, 1, 1, tmp_path / "0", after=0)

    _, (warnings, _) = resume(case, 2, 1, tmp_path / "0", tmp_path / "1")
    losses = export(case, 2, 1, tmp_path / "2")
    resumed, _ = resume(case, 2, 1, tmp_path / "2", tmp_path / "3")
    resume(case, 1, 1, tmp_path / "2", tmp_path / "4")

    assert len(warnings) == 1 and "embedding.weight (and 1 more)" in warnings[0] and "pads them to 132" in warnings[0]
    assert_equal(tensors(tmp_path / "1" / UNIVERSAL), tensors(tmp_path / "0" / UNIVERSAL))
    assert padding(tmp_path / "2" / UNIVERSAL)["lm_head.bias/exp_avg_sq"].shape == (2,)
    assert_equal(whole(tmp_path / "3" / UNIVERSAL), whole(tmp_path / "2" / UNIVERSAL))
    assert resumed == losses
    assert_equal(tensors(tmp_path / "4" / UNIVERSAL), tensors(tmp_path / "2" / UNIVERSAL))
