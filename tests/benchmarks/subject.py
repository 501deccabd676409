# SPDX-License-Identifier: Apache-2.0
"""What is measured: a GPT of megatron-core under BF16_Optimizer with AdamW, at any TP and DP degree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cpu_shims
import deepspeed
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from tests.support.gpt import GPT, STOCK_INFO, ModelParallelUnit
from tests.support.models import Batch, initialize, train

SEQUENCE = 8  # what is saved and loaded does not depend on it
SAMPLES = 4  # per global batch; divides at every DP measured


@dataclass(frozen=True)
class Size:
    """Dimensions of the model. TP 1, 2 and 4 divide all of them."""

    layers: int
    hidden: int
    heads: int
    query_groups: int
    feed_forward: int
    vocabulary: int


SIZES = {
    "full": Size(layers=12, hidden=768, heads=12, query_groups=4, feed_forward=2048, vocabulary=32000),
    "small": Size(layers=4, hidden=256, heads=8, query_groups=4, feed_forward=704, vocabulary=8000),
}


class MeasuredGPT(GPT):
    """Without the `_extra_state: None` entries that megatron-core's layers save: the stock converter dies on them."""

    def state_dict(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **keywords).items() if value is not None}


def build_engine(size: Size, tp: int, config: Mapping[str, Any] | None = None) -> deepspeed.DeepSpeedEngine:
    """An engine over all ranks at tensor parallelism `tp`. Collective.

    config: laid over the DeepSpeed config.
    """
    cpu_shims.install_without_accelerator()
    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(0)
    transformer = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_query_groups=size.query_groups,
        ffn_hidden_size=size.feed_forward,
        tensor_model_parallel_size=tp,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    model = MeasuredGPT(
        transformer,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=size.vocabulary,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return initialize(model, "bf16_optimizer", mpu=ModelParallelUnit(), config=config)


def train_one_step(engine: deepspeed.DeepSpeedEngine, size: Size) -> None:
    """Makes every optimizer state exist and differ from zero."""
    train(engine, _batches(size))


def _batches(size: Size) -> Iterator[Batch]:
    text = torch.randint(size.vocabulary, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def client_state(size: Size) -> dict[str, Any]:
    """What a user of the stock converter passes to `save_checkpoint`."""
    return {"universal_checkpoint_info": {**STOCK_INFO, "original_vocab_size": size.vocabulary}}
