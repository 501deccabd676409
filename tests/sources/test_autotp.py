# SPDX-License-Identifier: Apache-2.0
"""Layouts that AutoTP describes, on real ranks; and its records by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import _build_param_uc_restore_meta
from torch import nn

from megads_ucp.errors import LayoutError
from megads_ucp.layout.layout import build_layout
from megads_ucp.sources.attributes import rules_from_attributes
from megads_ucp.sources.autotp import rules_from_autotp
from megads_ucp.sources.megatron_core import rules_from_sharded_state_dict
from tests.support.layouts import Described, detached, on_ranks, parameters_of, rebuild


def autotp_model(kind: str) -> nn.Module:
    import transformers

    common = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6}
    models: dict[str, Callable[[], Any]] = {
        # q, k and v split 4:2 heads over TP 2 and the MLP 50 into 25s; an odd vocabulary.
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**common, intermediate_size=50, num_key_value_heads=3)
        ),
        "llama tied": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**common, intermediate_size=50, num_key_value_heads=3, tie_word_embeddings=True)
        ),
        # Fused and interleaved QKV, biases.
        "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**common, intermediate_size=50)),
    }
    torch.manual_seed(0)
    model: nn.Module = models[kind]()
    return model


def autotp_engine(model: nn.Module, tp: int) -> deepspeed.DeepSpeedEngine:
    from tests.support.models import initialize

    # DeepSpeed's own would compile a C++ extension, and a client's would have to follow the parameters AutoTP replaces.
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    return initialize(model, "fp32", config={"tensor_parallel": {"autotp_size": tp}, "optimizer": optimizer})


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", ["llama", "llama tied", "gpt_neox"])
def test_autotp_describes_every_parameter(kind, tp):
    pytest.importorskip("transformers")

    def body() -> Described:
        engine = autotp_engine(autotp_model(kind), tp)
        named = parameters_of(engine.module)
        assert rules_from_attributes(named, tp) == {}
        return rules_from_autotp(engine.module, named), detached(named)

    layouts = on_ranks(body, tp)
    original = parameters_of(autotp_model(kind))
    assert layouts.keys() == original.keys()
    for name, (layout, full) in layouts.items():
        assert torch.equal(full, original[name]), name
        split_vocabulary = "lm_head" in name or (kind == "llama tied" and "embed_tokens" in name)
        assert layout.metadata() == ({"vocab_tensor": True} if split_vocabulary else {})


def test_a_plain_module_has_nothing_to_say():
    module = nn.Linear(3, 3)
    named = dict(module.named_parameters())
    assert rules_from_sharded_state_dict(module, named).rules == {}
    assert rules_from_autotp(module, named) == {}


def test_a_layout_that_autotp_cannot_describe_is_refused_in_its_words():
    module = nn.Linear(3, 3)
    meta = _build_param_uc_restore_meta(partition_type="column", unsupported_reason="too clever by half")
    setattr(module.weight, DS_AUTOTP_UC_META, meta)
    with pytest.raises(LayoutError, match="weight: too clever by half"):
        rules_from_autotp(module, dict(module.named_parameters()))


def test_what_autotp_split_without_a_map_goes_by_its_sizes():
    """AutoTP._slice_embedding (deepspeed/module_inject/auto_tp.py) records this, and no affine map."""
    full = torch.randn(5, 6)
    module = nn.Embedding(5, 4)
    meta = _build_param_uc_restore_meta(
        partition_type="row", partition_dim=1, logical_shape=(5, 6), partition_sizes=[4, 2], original_shape=(5, 6)
    )
    setattr(module.weight, DS_AUTOTP_UC_META, meta)
    rule = rules_from_autotp(module, dict(module.named_parameters()))["weight"]
    layout = build_layout("weight", rule, [(5, 4), (5, 2)])
    assert torch.equal(rebuild(layout, list(full.split([4, 2], dim=1))), full)
    assert layout.metadata() == {"cat_dim": 1}  # as the stock converter writes for the pattern that AutoTP publishes
