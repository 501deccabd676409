# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism through the mpu of Hugging Face's and Snowflake's (ALST) integration of Ulysses.

Its model-parallel group is its sequence-parallel group, which is not tensor parallelism: all ranks of it hold the same
parameters, and ZeRO partitions over them as it does over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn

import megads_ucp
from megads_ucp.storage import read_manifest
from tests.support.models import draw_weights, initialize
from tests.support.ranks import run_ranks
from tests.support.runs import EXPORTING, LOADING, UNIVERSAL, assert_same_state, save

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

SAMPLES, LENGTH, WORDS = 6, 8, 17
SP = 2


class Llama(nn.Module):
    """A small Llama with its loss, of this rank's part of each sequence where attention is sequence-parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=WORDS,
                hidden_size=8,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                attn_implementation="sdpa",
            )
        )
        self.part = slice(None)

    def forward(self, words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH).expand_as(words)
        logits = self.model(words[:, self.part], position_ids=positions[:, self.part]).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), following[:, self.part].flatten(), reduction="sum")
        return total / following.numel()  # DeepSpeed adds up over SP and averages over DP


def batches(start: int, stop: int) -> Iterator[torch.Tensor]:
    for step in range(start, stop):
        yield torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def engine(kind: str, sp: int, *, resuming: bool = False, mpu: Any = None) -> Any:
    """On a rank. With ``sp`` above 1, attention and the mpu are those that DeepSpeed registers with transformers."""
    megads_ucp.install(EXPORTING)
    model = Llama()
    draw_weights(model, seed=int(resuming))
    if sp > 1:
        registered = UlyssesSPAttentionHF.register_with_transformers(
            model.model, "sdpa", sp, micro_batch_size=SAMPLES // (dist.get_world_size() // sp), seq_length=LENGTH
        )
        mpu = mpu or registered
        step, number = LENGTH // sp, registered.get_sequence_parallel_rank()
        model.part = slice(number * step, (number + 1) * step)
    return initialize(model, kind, mpu=mpu, config=LOADING if resuming else {})


def train(engine: Any, sp: int, start: int, stop: int) -> list[float]:
    degree = dist.get_world_size() // sp
    losses = []
    for batch in batches(start, stop):
        own = batch[dist.get_rank() // sp :: degree]
        loss = engine(own[:, :-1], own[:, 1:])
        engine.backward(loss)
        engine.step()
        total = loss.detach().double() / degree
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def exported(directory: Path, kind: str, sp: int, world: int) -> list[float]:
    """The losses of the three steps after the save."""

    def body() -> list[float]:
        trained = engine(kind, sp)
        train(trained, sp, 0, 3)
        save(trained, directory)
        return train(trained, sp, 3, 6)

    return run_ranks(body, world)[0]


def resumed(directory: Path, kind: str, sp: int, world: int, again: Path) -> list[float]:
    def body() -> list[float]:
        fresh = engine(kind, sp, resuming=True)
        fresh.load_checkpoint(str(directory))
        save(fresh, again)
        return train(fresh, sp, 3, 6)

    return run_ranks(body, world)[0]


@pytest.mark.parametrize("kind", ["fp32", "fp32_zero2"])
@pytest.mark.parametrize("degree", [1, 2])
def test_sequence_parallel_ranks_are_no_tensor_parallel_ones(tmp_path, kind, degree):
    saved = tmp_path / "saved"
    losses = exported(saved, kind, SP, SP * degree)
    manifest = read_manifest(saved / UNIVERSAL)
    assert (manifest.topology["tensor_parallel"], manifest.run["data_parallel"]) == (1, degree)
    assert [path.name for path in (saved / UNIVERSAL).glob("mp_rank_*")] == ["mp_rank_00_model_states.pt"]
    for sp, target in [(SP, 1), (1, 3), (SP, 2)]:
        again = tmp_path / f"SP{sp}xDP{target}"
        assert resumed(saved, kind, sp, sp * target, again) == pytest.approx(losses, rel=1e-5)
        assert_same_state(again / UNIVERSAL, saved / UNIVERSAL)
