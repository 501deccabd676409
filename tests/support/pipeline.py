# SPDX-License-Identifier: Apache-2.0
"""A small GPT as a DeepSpeed PipelineModule of megatron-core layers, the same at any PP x TP x DP.

To be used on a rank (inside run_ranks); skips the test's module where megatron-core is not installed. Its layers, in
order: the embedding, transformer layers, a function (which leaves a gap in the numbers), a frozen gate with a buffer,
the final norm, the head. A tied head shares the embedding's module, and then neither has a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from torch import nn

from tests.support.models import GLOBAL_BATCH, Batch, decay_groups, full_weight, initialize
from tests.support.runs import LOADING, TAG, shards, tensors

pytest.importorskip("megatron.core")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from tests.support import gpt

# The head's stage has a copy of its own, which it never uses.
SPARE = "tied_modules.embed.positions.weight"

MICRO_BATCHES = 3  # of GLOBAL_BATCH samples in all: divides over DP 1, 2 and 4


@dataclass(frozen=True)
class Grid:
    """Degrees of parallelism; ranks are numbered along ``axes``, the last one fastest.

    megatron-core numbers tensor-parallel ranks first: above TP 1, "model" must be the last axis.
    """

    pp: int
    tp: int
    dp: int
    axes: tuple[str, ...] = ("pipe", "data", "model")

    @property
    def world(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def degrees(self) -> dict[str, int]:
        return {"pipe": self.pp, "data": self.dp, "model": self.tp}

    def topology(self) -> ProcessTopology:
        if self.axes == ("pipe", "data", "model"):
            return PipeModelDataParallelTopology(self.pp, self.tp, self.dp)
        return ProcessTopology(axes=list(self.axes), dims=[self.degrees[axis] for axis in self.axes])

    def __str__(self) -> str:
        short = {"pipe": "PP", "data": "DP", "model": "TP"}
        return "".join(f"{short[axis]}{self.degrees[axis]}" for axis in self.axes)


class Embedding(nn.Module):
    """Words and learned positions, of which a tied head uses the words only."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            gpt.VOCABULARY, config.hidden_size, init_method=config.init_method, config=config
        )
        self.positions = nn.Embedding(gpt.SEQUENCE, config.hidden_size, dtype=config.params_dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.word_embeddings(tokens) + self.positions.weight).transpose(0, 1).contiguous()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear_with_grad_accumulation_and_async_allreduce(
            hidden, self.word_embeddings.weight, None, False, True, False
        )


# What a client states of this model: for its plain layers, which do not describe themselves, and for stock tools.
TIED_INFO: dict[str, Any] = {
    **gpt.STOCK_INFO,
    "tp_replicated_parameter_patterns": [r".*layernorm\.weight$", r".*\.positions\.weight$", r"\d+\.weight$"],
    "vocabulary_parameter_patterns": [r".*\.word_embeddings\.weight$"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\."],
}
UNTIED_INFO: dict[str, Any] = {
    **TIED_INFO,
    "vocabulary_parameter_patterns": [r"0\.word_embeddings\.weight$", r"\d+\.output_layer\.weight$"],
    "pipeline_replicated_parameter_patterns": [],
}
FROZEN_INFO = r"\d+\.gain$"  # a pattern that the stock converter, which does not see the parameter, would not know


def halved(hidden: torch.Tensor) -> torch.Tensor:
    return hidden / 2


class Layer(TransformerLayer):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)[None, None]
        return super().forward(hidden, attention_mask=mask)[0]


class Gate(nn.Module):
    """A frozen gain and a persistent buffer, both of which the loss depends on."""

    shift: torch.Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype), requires_grad=False)
        self.register_buffer("shift", torch.empty(config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + self.gain) + self.shift


class Head(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        sizes = config.hidden_size, gpt.VOCABULARY
        self.output_layer = ColumnParallelLinear(
            *sizes, config=config, init_method=config.init_method, bias=False, gather_output=False
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output_layer(hidden)[0]
        return logits


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return vocab_parallel_cross_entropy(logits.float(), labels.t().contiguous()).mean()


@dataclass(frozen=True)
class Pipeline:
    """A model that exists on any grid.

    Attributes:
        kind: a key of tests.support.models.KINDS.
        tied: whether the head is the embedding's words.
        gated: whether there is a frozen parameter and a buffer.
        groups: parameter groups of a stage's module.
    """

    kind: str = "fp32"
    tied: bool = True
    gated: bool = True
    layers: int = 3
    groups: Callable[[nn.Module], list[dict[str, Any]]] = decay_groups

    def __str__(self) -> str:
        return f"{self.kind} {'tied' if self.tied else 'untied'}"

    @property
    def info(self) -> dict[str, Any]:
        info = dict(TIED_INFO if self.tied else UNTIED_INFO)
        if self.gated:
            key = "tp_replicated_parameter_patterns"
            info[key] = [*info[key], FROZEN_INFO]
        return info

    def module(self, grid: Grid, seed: int = 0) -> PipelineModule:
        dtype = torch.float32 if self.kind == "fp32" else torch.bfloat16
        config = gpt.configure(grid.tp, stages=grid.pp, dtype=dtype, layers=self.layers)
        module = PipelineModule(
            self._specs(config), topology=grid.topology(), loss_fn=loss, partition_method="type:Layer|Norm"
        )
        module.universal_checkpoint_info = self.info
        gpt.draw_shards(module, grid.tp, seed)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(full_weight(name, buffer.shape, seed))
        return module

    def _specs(self, config: TransformerConfig) -> list[Any]:
        block = get_gpt_layer_local_spec(normalization="RMSNorm").submodules

        def words(**more: Any) -> LayerSpec:
            return TiedLayerSpec("embed", Embedding, config, tied_weight_attr="word_embeddings.weight", **more)

        return [
            words() if self.tied else LayerSpec(Embedding, config),
            *(LayerSpec(Layer, config, block, layer_number=number + 1) for number in range(self.layers)),
            halved,
            *([LayerSpec(Gate, config)] if self.gated else []),
            LayerSpec(nn.RMSNorm, config.hidden_size, dtype=config.params_dtype),
            words(forward_fn=Embedding.logits) if self.tied else LayerSpec(Head, config),
        ]

    def engine(self, grid: Grid, *, resuming: bool = False) -> Any:
        module = self.module(grid, seed=int(resuming))
        config = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // MICRO_BATCHES // grid.dp,
            "gradient_accumulation_steps": MICRO_BATCHES,
            **(LOADING if resuming else {}),
        }
        return initialize(module, self.kind, groups=self.groups(module), config=config)

    def save(self, engine: Any, directory: Path, **more: Any) -> None:
        info = {"universal_checkpoint_info": self.info}
        engine.save_checkpoint(str(directory), tag=TAG, client_state=info, **more)

    def assert_holds(self, engine: Any, universal: Path, *, but: str = "") -> None:
        """On a rank: what its stage and TP rank hold, ``but`` one, is what the oracle cuts of the full tensors."""
        exported = tensors(universal)
        tp_rank, tp = engine.grid.get_slice_parallel_rank(), engine.grid.get_slice_parallel_world_size()
        held = {**shards(engine), **{f"{name}/fp32": value for name, value in unowned(engine.module).items()}}
        for path, value in held.items():
            name = path.rpartition("/")[0]
            expected = gpt.shard(name, exported[path], tp_rank, tp)
            assert name == but or torch.equal(value.float(), expected), (
                f"{path} on stage {engine.stage_id}, TP rank {tp_rank}"
            )


def unowned(module: nn.Module) -> dict[str, torch.Tensor]:
    frozen = {name: value for name, value in module.named_parameters() if not value.requires_grad}
    return {**frozen, **dict(module.named_buffers())}


def train(engine: Any, batches: Iterable[Batch]) -> list[float]:
    """One optimizer step per global batch; returns the mean loss of each (equal on all ranks)."""
    return [engine.train_batch(_micro_batches(engine, batch)).item() for batch in batches]


def _micro_batches(engine: Any, batch: Batch) -> Iterator[Batch]:
    grid = engine.grid
    step = grid.data_parallel_size * MICRO_BATCHES
    for micro in range(MICRO_BATCHES):
        yield tuple(tensor[grid.data_parallel_id * MICRO_BATCHES + micro :: step] for tensor in batch)
