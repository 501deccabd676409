# SPDX-License-Identifier: Apache-2.0
"""Small Hugging Face models that no tensor-parallel degree divides, under DeepSpeed's AutoTP.

6 query heads, 3 key/value heads, 50 intermediate columns and 101 words: at TP 4, one rank holds no key/value head, and
so nothing at all of the attention's weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import megads_ucp
from tests.support import stock
from tests.support.models import GLOBAL_BATCH, Batch, decay_groups, draw_weights, initialize, train
from tests.support.ranks import run_ranks
from tests.support.runs import (
    AFTER,
    BEFORE,
    EXPORTING,
    LOADING,
    TAG,
    UNIVERSAL,
    assert_same_state,
    assert_same_tensors,
    states,
)

pytest.importorskip("transformers")

import transformers  # here, so that no rank has to
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.opt.modeling_opt import OPTForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

VOCABULARY, HIDDEN, HEADS, KEY_VALUE_HEADS, INTERMEDIATE, LAYERS, SEQUENCE = 101, 48, 6, 3, 50, 2, 8

_GROUPED = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
_OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "ffn_dim": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_GPT_NEOX = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
_BIGCODE = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_inner": INTERMEDIATE,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 32,
    "multi_query": True,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}

# name -> (class, its config)
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, transformers.LlamaConfig(**_GROUPED)),
    "llama_tied": (LlamaForCausalLM, transformers.LlamaConfig(**{**_GROUPED, "tie_word_embeddings": True})),
    "mistral": (MistralForCausalLM, transformers.MistralConfig(**_GROUPED)),
    "qwen2": (Qwen2ForCausalLM, transformers.Qwen2Config(**_GROUPED)),
    "qwen3": (Qwen3ForCausalLM, transformers.Qwen3Config(**_GROUPED)),
    "gpt_neox": (GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**_GPT_NEOX)),
    "opt": (OPTForCausalLM, transformers.OPTConfig(**_OPT)),
}
BIGCODE = (GPTBigCodeForCausalLM, transformers.GPTBigCodeConfig(**_BIGCODE))


class Topology(NamedTuple):
    tp: int
    dp: int

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.dp}"

    @property
    def world(self) -> int:
        return self.tp * self.dp


TOPOLOGIES = (Topology(2, 1), Topology(2, 2), Topology(3, 1), Topology(4, 1))


def build(model: tuple[Any, Any]) -> nn.Module:
    """The model as a function of (tokens, labels) that returns its mean loss, with weights drawn by name."""
    cls, config = model

    class WithLoss(cls):  # type: ignore[valid-type, misc]
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids=tokens, labels=labels).loss

    # AutoTP and the loss function go by the class's name.
    WithLoss.__name__ = WithLoss.__qualname__ = cls.__name__
    built = WithLoss(config)
    draw_weights(built)
    return built


def batches(start: int, stop: int) -> Iterator[Batch]:
    """The global batches (tokens, labels) of steps [start, stop), the same for a step whichever run asks."""
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(zlib.crc32(f"text {step}".encode()))
        text = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=generator)
        yield text, text


def freeze_nothing(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A model, an engine's kind, and what is peculiar to it.

    Attributes:
        model: builds the model; see `build`.
        kind: a key of tests.support.models.KINDS.
        freeze: takes parameters out of training before AutoTP splits them.
        config: laid over the kind's DeepSpeed config.
    """

    model: Callable[[], nn.Module]
    kind: str = "fp32"
    freeze: Callable[[nn.Module], None] = freeze_nothing
    config: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, tp: int, *, resuming: bool = False, model: nn.Module | None = None) -> Any:
        model = self.model() if model is None else model
        if resuming:
            draw_weights(model, seed=1)
        self.freeze(model)
        # DeepSpeed's own optimizer: a client's would hold the parameters' memory from before they were split.
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
        config = {"optimizer": optimizer, **self.config, **(LOADING if resuming else {})}
        if tp > 1:
            config["tensor_parallel"] = {"autotp_size": tp}
        return initialize(model, self.kind, groups=decay_groups(model), config=config)

    def export(self, topology: Topology, directory: Path, *, after: int = AFTER) -> list[float]:
        """Trains, exports beside the regular checkpoint, and trains on: the losses of the steps after the save."""

        def body() -> list[float]:
            megads_ucp.install(EXPORTING)
            engine = self.engine(topology.tp)
            train(engine, batches(0, BEFORE))
            engine.save_checkpoint(str(directory), tag=TAG)
            return train(engine, batches(BEFORE, BEFORE + after))

        return run_ranks(body, topology.world)[0]

    def resume(
        self, topology: Topology, directory: Path, again: Path, *, same: Path | None = None, after: int = AFTER
    ) -> list[float]:
        """Loads `directory`, exports what it has loaded to `again`, which must hold the bits of it (of `same`, where
        that is given), and trains on."""

        def body() -> list[float]:
            megads_ucp.install(EXPORTING)
            engine = self.engine(topology.tp, resuming=True)
            engine.load_checkpoint(str(directory))
            engine.save_checkpoint(str(again), tag=TAG)
            return train(engine, batches(BEFORE, BEFORE + after))

        losses = run_ranks(body, topology.world)[0]
        # Without AutoTP, nobody says which parameters are a vocabulary.
        compare = assert_same_state if topology.tp > 1 else assert_same_tensors
        compare(again / UNIVERSAL, (same or directory) / UNIVERSAL)
        return losses

    def stock_resume(self, topology: Topology, directory: Path, *, after: int = AFTER) -> list[float]:
        """DeepSpeed alone loads `directory` and trains on."""

        def body() -> list[float]:
            engine = self.engine(topology.tp, resuming=True)
            engine.load_checkpoint(str(directory))
            assert "load_checkpoint" not in vars(engine)  # nothing of ours is here
            return train(engine, batches(BEFORE, BEFORE + after))

        return run_ranks(body, topology.world)[0]

    def assert_losses(self, resumed: list[float], losses: list[float]) -> None:
        # Another topology adds up in another order: in bf16 that shows in the third digit.
        assert resumed == pytest.approx(losses, rel=1e-5 if self.kind.startswith("fp32") else 5e-3)


def case(name: str, kind: str = "fp32", **more: Any) -> Case:
    model = MODELS[name]
    return Case(lambda: build(model), kind, **more)


def with_heads(name: str, *, query: int, key_value: int) -> Case:
    """One of the models with grouped queries, with other heads."""
    cls, config = MODELS[name]
    heads = {"num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": HIDDEN // query}
    other = type(config)(**{**_GROUPED, **heads})
    return Case(lambda: build((cls, other)))


def assert_as_stock(directory: Path) -> None:
    """The export holds the bits of what the stock converter makes of the regular checkpoint beside it."""
    converted = stock.convert(directory / TAG, directory / "stock" / UNIVERSAL)
    # For the other name of a tied parameter the converter writes one rank's shard.
    exported = states(directory / UNIVERSAL)
    cut = "vocab_tensor" in exported.get("model.embed_tokens.weight/fp32", {})
    tied = ["lm_head.weight"] if cut and "lm_head.weight/exp_avg" not in exported else []
    stock.assert_same_universal(directory / UNIVERSAL, converted, ignore=tied)
