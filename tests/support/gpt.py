# SPDX-License-Identifier: Apache-2.0
"""A small GPT of megatron-core at any TP degree, with the same initial weights at each.

To be used on a rank (inside run_ranks); skips the test's module where megatron-core is not installed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import cpu_shims
import deepspeed.comm
import pytest
import torch
from torch import nn

from tests.support.models import GLOBAL_BATCH, Batch, full_weight

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE = 8
VOCABULARY = 48  # divides at every TP: no padding rows in the softmax

# What a client of the stock converter states (`universal_checkpoint_info`) for this model.
STOCK_INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r".*layernorm\.weight$"],
    "parameter_with_row_parallelism_patterns": [r".*linear_proj\.weight$", r".*linear_fc2\.weight$"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*linear_fc1\.weight$"],
    "vocabulary_parameter_patterns": [r".*word_embeddings\.weight$", r"output_layer\.weight$"],
    "original_vocab_size": VOCABULARY,
}


class ModelParallelUnit:
    """The `mpu` for DeepSpeed: megatron-core's parallel_state, plus two names that it no longer has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_model_parallel_rank(self) -> int:
        return int(deepspeed.comm.get_rank(parallel_state.get_model_parallel_group()))

    def get_model_parallel_world_size(self) -> int:
        return int(deepspeed.comm.get_world_size(parallel_state.get_model_parallel_group()))


class GPT(GPTModel):
    """megatron-core's GPTModel as a function of (tokens, labels) that returns the mean loss."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
        return super().forward(tokens, positions, mask, labels=labels).float().mean()


def build_gpt(
    tp: int,
    *,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
    biases: bool = False,
    vocabulary: int = VOCABULARY,
    layers: int = 2,
) -> tuple[GPT, Any]:
    """Sets up tensor parallelism of the given degree and returns (model, mpu for DeepSpeed).

    Grouped queries (8 heads, 4 groups), SwiGLU, RMSNorm, rotary positions: everything divides at TP 1, 2 and 4.
    tied: whether input and output share their embedding. biases: of all linear layers. vocabulary: rows of the
    embeddings, padding included.
    """
    config = configure(tp, dtype=dtype, biases=biases, layers=layers)
    model = GPT(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocabulary,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )
    draw_shards(model, tp)
    return model, ModelParallelUnit()


def configure(
    tp: int, *, stages: int = 1, dtype: torch.dtype = torch.float32, biases: bool = False, layers: int = 2
) -> TransformerConfig:
    """Sets up tensor parallelism of the given degree and returns what megatron-core's layers are built of.

    stages: of a DeepSpeed pipeline, which megatron-core only knows of so that its groups are those of one stage.
    """
    cpu_shims.install_without_accelerator()
    parallel_state.initialize_model_parallel(tp, pipeline_model_parallel_size=stages)
    model_parallel_cuda_manual_seed(0)
    return TransformerConfig(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=44,
        tensor_model_parallel_size=tp,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=biases,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
    )


@torch.no_grad()
def draw_shards(model: nn.Module, tp: int, seed: int = 0) -> None:
    """Fills each parameter with this TP rank's part of the full weight of its name."""
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if (dim := cut_dim(name)) is not None:
            shape[dim] *= tp
        full = full_weight(name, shape, seed)
        parameter.copy_(shard(name, full, parallel_state.get_tensor_model_parallel_rank(), tp))


def cut_dim(name: str) -> int | None:
    """The dimension along which a parameter is cut over TP ranks; None if each holds all of it."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return 1
    if (
        name.endswith(("word_embeddings.weight", "output_layer.weight"))
        or ".linear_qkv." in name
        or ".linear_fc1." in name
    ):
        return 0
    return None


def shard(name: str, full: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """The TP rank's part of a full tensor: an oracle for tests, written apart from the library's own layouts."""
    dim = cut_dim(name)
    if dim is None:
        return full
    # SwiGLU: gate and up projection are stacked, and each is cut on its own.
    blocks = full.chunk(2) if ".linear_fc1." in name else [full]
    return torch.cat([block.chunk(tp, dim)[rank] for block in blocks], dim)


def gpt_batches(start: int, stop: int, samples: int = GLOBAL_BATCH) -> Iterator[Batch]:
    """The global batches (tokens, labels) of steps [start, stop), the same for a step whichever run asks."""
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(zlib.crc32(f"tokens {step}".encode()))
        text = torch.randint(VOCABULARY, (samples, SEQUENCE + 1), generator=generator)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()
