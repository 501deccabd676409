# SPDX-License-Identifier: Apache-2.0
"""Rules from layers like Megatron-DeepSpeed's, and the way from one order of queries, keys and values to the other.

No checkout is needed: what the integration knows layers by is the names of their classes and what their code does.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megads_ucp.errors import LayoutError
from megads_ucp.layout.attention import QKV_ORDER, AttentionOrder, Order, reordering_map
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.load.remarks import order_taken_for_granted
from megads_ucp.sources.attributes import rules_from_attributes
from megads_ucp.sources.megatron_deepspeed import rules_from_megatron_deepspeed, vocabulary_names
from megads_ucp.sources.resolve import Claim, Trust, resolve
from tests.support.layouts import rebuild
from tests.support.models import draw_weights
from tests.support.runs import UNIVERSAL, Recipe, export, resume, tensors

HIDDEN, HEADS, HEAD_DIM = 12, 4, 3
ORDERS: tuple[Order, ...] = ("blocks", "interleaved")


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, tp: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs // tp, inputs))
        self.bias = nn.Parameter(torch.randn(outputs // tp))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return nn.functional.linear(hidden, self.weight, self.bias), None


class RowParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, tp: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs // tp))
        self.bias = nn.Parameter(torch.randn(outputs))


class VocabParallelEmbedding(nn.Module):
    def __init__(self, rows: int, tp: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows // tp, HIDDEN))


class SequenceParallelPositionEmbedding(nn.Module):
    def __init__(self, rows: int, tp: int) -> None:
        super().__init__()
        self.local_embeddings = nn.Embedding(rows // tp, HIDDEN)


class CoreAttention(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        return torch.tanh(query) * key + value  # each in a role of its own


class Attention(nn.Module):
    """Takes its projection apart in the given order; "thirds" as upstream does, grouped queries or not."""

    def __init__(self, tp: int, order: str, groups: int = HEADS) -> None:
        super().__init__()
        self.order = order
        self.num_attention_heads_per_partition = HEADS // tp
        self.num_key_value_heads_per_partition = groups // tp
        self.hidden_size_per_attention_head = HEAD_DIM
        self.query_key_value = ColumnParallelLinear(HIDDEN, (HEADS + 2 * groups) * HEAD_DIM, tp)
        self.core_attention = CoreAttention()
        self.dense = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, tp)

    def forward(self, hidden: torch.Tensor, mask: Any) -> torch.Tensor:
        mixed, _ = self.query_key_value(hidden)
        heads, groups = self.num_attention_heads_per_partition, self.num_key_value_heads_per_partition
        each, lead = heads // groups, mixed.shape[:2]
        if self.order == "interleaved":
            parts = mixed.view(*lead, groups, each + 2, HEAD_DIM).split([each, 1, 1], dim=-2)
        elif self.order == "blocks":
            parts = mixed.split([heads * HEAD_DIM, groups * HEAD_DIM, groups * HEAD_DIM], dim=-1)
        else:
            parts = mixed.split(mixed.shape[-1] // 3, dim=-1)
        query, key, value = (part.reshape(*lead, -1, HEAD_DIM) for part in parts)
        repeated = (part.repeat_interleave(each, dim=2) for part in (key, value))
        result: torch.Tensor = self.core_attention(query, *repeated, mask)
        return result


class MLP(nn.Module):
    def __init__(self, tp: int, gated: bool, interleaved: bool = False) -> None:
        super().__init__()
        self.gated, self.interleaved = gated, interleaved
        self.dense_h_to_4h = ColumnParallelLinear(HIDDEN, 48 if gated else 24, tp)
        self.dense_4h_to_h = RowParallelLinear(24, HIDDEN, tp)

    def activation_func(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class Model(nn.Module):
    def __init__(self, tp: int, order: str = "blocks", groups: int = HEADS, gated: bool = True) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(16, tp)
        self.position_embeddings = nn.Embedding(8, HIDDEN)
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.attention = Attention(tp, order, groups)
        self.mlp = MLP(tp, gated)


class Net(nn.Module):
    """Called like tests.support.models.MLP; a batch is a sequence."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.first, self.attention, self.last = (
            nn.Linear(7, HIDDEN),
            Attention(1, order, groups=2),
            nn.Linear(HIDDEN, 5),
        )
        draw_weights(self)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        context = self.attention(self.first(inputs).unsqueeze(1), None).flatten(2)
        hidden = nn.functional.linear(context, self.attention.dense.weight, self.attention.dense.bias)
        return nn.functional.mse_loss(self.last(torch.tanh(hidden)).squeeze(1), targets)


def rules(model: nn.Module, tp: int) -> dict[str, Rule]:
    return rules_from_megatron_deepspeed(model, dict(model.named_parameters()), tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_tell_how_every_parameter_is_cut_at_tp_1_too(tp: int) -> None:
    found = rules(Model(tp), tp)

    assert found.keys() == dict(Model(tp).named_parameters()).keys()
    cut = {name: (rule.kind, rule.dim, rule.sub_sizes) for name, rule in found.items()}
    whole = ("replicated", None, None)
    assert cut["word_embeddings.weight"] == ("split", 0, None)
    assert cut["position_embeddings.weight"] == cut["input_layernorm.bias"] == whole
    assert cut["attention.dense.weight"] == cut["mlp.dense_4h_to_h.weight"] == ("split", 1, None)
    assert cut["attention.dense.bias"] == cut["mlp.dense_4h_to_h.bias"] == whole
    assert cut["attention.query_key_value.bias"] == cut["attention.query_key_value.weight"] == ("split", 0, (12,) * 3)
    assert cut["mlp.dense_h_to_4h.weight"] == cut["mlp.dense_h_to_4h.bias"] == ("split", 0, (24, 24))
    assert rules(Model(tp, gated=False), tp)["mlp.dense_h_to_4h.weight"].sub_sizes is None


class BertLMHead(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(16 // tp)), nn.Parameter(torch.zeros(16 // tp))
        self.bias.tensor_model_parallel, self.bias.partition_dim = True, 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_tell_what_is_a_vocabulary(tp: int) -> None:
    """Embeddings of words, and in an output layer what is cut like them; a layer of that width elsewhere is none."""
    model = Model(tp)
    model.lm_head = BertLMHead(tp)
    model.binary_head = ColumnParallelLinear(HIDDEN, 16, tp)

    assert vocabulary_names(model, dict(model.named_parameters())) == ("word_embeddings.weight", "lm_head.bias")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_an_attention_is_seen_from_its_own_code(order: Order, tp: int) -> None:
    model = Model(tp, order)
    before = dict(model.attention.named_children()), dict(vars(model.attention))

    rule = rules(model, tp)["attention.query_key_value.weight"]

    assert rule.attention == AttentionOrder(order, HEADS, 1, HEAD_DIM)  # at TP 4, with a single head, too
    assert before[0] == dict(model.attention.named_children()) and before[1] == vars(model.attention)
    keys = build_layout("w", rule, [(36 // tp, HIDDEN)] * tp).metadata()
    stock = {"cat_dim": 0, "param_n_sub_params": 3} if order == "blocks" else {"cat_dim": 0}
    assert keys == {**stock, QKV_ORDER: rule.attention.to_dict()}


@pytest.mark.parametrize("order", ORDERS)
def test_grouped_queries_are_told_where_the_code_is_sound(order: Order) -> None:
    rule = rules(Model(2, order, groups=2), 2)["attention.query_key_value.weight"]

    assert rule.attention == AttentionOrder(order, 2, 2, HEAD_DIM)
    assert rule.sub_sizes == (None if order == "interleaved" else (12, 6, 6))


def test_grouped_queries_cut_in_equal_thirds_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"attention.*--num-key-value-heads.*equal thirds"):
        rules(Model(1, "thirds", groups=1), 1)  # (4 + 1 + 1) heads: three times two, so the code itself runs


def test_an_order_that_nobody_knows_is_refused() -> None:
    model = Model(1)
    model.attention.forward = lambda hidden, mask: model.attention.core_attention(  # type: ignore[method-assign]
        *model.attention.query_key_value(hidden)[0].flip(-1).chunk(3, dim=-1), mask
    )

    with pytest.raises(LayoutError, match=r"attention: the row order of .* could not be determined"):
        rules(model, 1)


def test_halves_that_are_not_halves_are_refused() -> None:
    model = Model(1)
    model.mlp = MLP(1, gated=True, interleaved=True)

    with pytest.raises(LayoutError, match="mlp: its activation halves its input, but not into"):
        rules(model, 1)


def test_positions_of_a_sequence_parallel_embedding_are_cut() -> None:
    model = Model(2)
    model.position_embeddings = SequenceParallelPositionEmbedding(8, 2)  # type: ignore[assignment]

    assert rules(model, 2)["position_embeddings.local_embeddings.weight"].dim == 0


def test_a_model_without_such_layers_is_left_to_others() -> None:
    assert rules(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), 1) == {}


def test_the_layers_override_the_clients_patterns_with_one_warning_and_only_refine_attributes() -> None:
    model = Model(2)
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear):
            for parameter in layer.parameters():
                parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
    parameters = dict(model.named_parameters())
    shapes = {name: [tuple(parameter.shape)] * 2 for name, parameter in parameters.items()}
    claims = [
        Claim("Megatron-DeepSpeed", Trust.LAYERS, rules(model, 2)),
        Claim("attributes", Trust.ATTRIBUTES, rules_from_attributes(parameters, 2)),
        Claim("patterns", Trust.PATTERNS, {"attention.dense.weight": Rule("replicated", "pattern '.*weight'")}),
    ]

    resolved = resolve(list(parameters), shapes, claims, tp_degree=2)

    (warning,) = resolved.warnings
    assert "1 parameters" in warning and "attention.dense.weight: pattern '.*weight' says replicated" in warning
    assert resolved.rules["attention.query_key_value.weight"].attention is not None


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("theirs", "mine"), [ORDERS, ORDERS[::-1]])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_shards_in_one_order_are_found_in_a_tensor_of_the_other(
    theirs: Order, mine: Order, groups: int, tp: int
) -> None:
    source, target = (AttentionOrder(order, groups, HEADS // groups, HEAD_DIM) for order in (theirs, mine))
    heads = {part: torch.randn(groups, count * HEAD_DIM, 5) for part, count in enumerate(source.heads)}
    shards = [whole({part: rows.chunk(tp)[rank] for part, rows in heads.items()}, mine) for rank in range(tp)]

    affine = reordering_map(target, source, (source.rows, 5), tp)
    layout = build_layout("w", Rule("affine", "test", affine=affine.to_dict()), [tuple(s.shape) for s in shards])

    assert torch.equal(rebuild(layout, shards), whole(heads, theirs))


def whole(heads: dict[int, torch.Tensor], order: str) -> torch.Tensor:
    """The projection's rows, from (groups, rows, 5) of queries, keys and values."""
    if order == "interleaved":
        return torch.cat([heads[part] for part in range(3)], dim=1).flatten(0, 1)
    return torch.cat([heads[part].flatten(0, 1) for part in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "mine"), [ORDERS, ORDERS[::-1]])
def test_a_resume_goes_on_in_code_of_the_other_order(theirs: Order, mine: Order, tmp_path: Path) -> None:
    source, target = (Recipe("fp32", functools.partial(Net, order)) for order in (theirs, mine))
    losses = export(source, 2, tmp_path / "source")

    resumed = resume(target, 3, tmp_path / "source", again=tmp_path / "again")

    assert resumed == pytest.approx(losses, rel=1e-6)
    saved, again = tensors(tmp_path / "source" / UNIVERSAL), tensors(tmp_path / "again" / UNIVERSAL)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        name = f"attention.query_key_value.weight/{state}"
        heads = {part: rows.unflatten(0, (2, -1)) for part, rows in enumerate(parts(saved[name], theirs))}
        assert torch.equal(again[name], whole(heads, mine)) and not torch.equal(again[name], saved[name])
        assert torch.equal(again[f"attention.dense.weight/{state}"], saved[f"attention.dense.weight/{state}"])


def parts(rows: torch.Tensor, order: Order) -> list[torch.Tensor]:
    """Queries, keys and values of two groups, group by group."""
    widths = [2 * HEAD_DIM, HEAD_DIM, HEAD_DIM]
    if order == "blocks":
        return list(rows.split([2 * width for width in widths]))
    return [part.flatten(0, 1) for part in rows.unflatten(0, (2, -1)).split(widths, dim=1)]


def test_a_projection_of_other_heads_is_refused() -> None:
    with pytest.raises(LayoutError, match="different heads"):
        reordering_map(AttentionOrder("blocks", 2, 2, 3), AttentionOrder("interleaved", 4, 1, 3), (24, 5), 1)
    with pytest.raises(LayoutError, match="update megads_ucp"):
        AttentionOrder.from_dict({"order": "sorted", "groups": 1, "queries": 1, "head_dim": 1})


@pytest.mark.parametrize(("order", "scrambled"), [("blocks", True), ("interleaved", False)])
def test_an_order_that_a_directory_does_not_tell_is_taken_for_granted_aloud(tmp_path, order: Order, scrambled: bool):
    (tmp_path / "zero").mkdir()  # a directory of the stock converter has no manifest
    attention = AttentionOrder(order, HEADS, 1, HEAD_DIM)
    rows = attention.rows
    told = build_layout("qkv", Rule("split", "test", dim=0, attention=attention), [(rows, HIDDEN)])
    plain = build_layout("other", Rule("replicated", "test"), [(rows, HIDDEN)])
    assert order_taken_for_granted(Checkpoint(tmp_path), [plain]) is None
    assert order_taken_for_granted(Checkpoint(tmp_path), [plain, told]) is None  # it has no such parameter at all
    (tmp_path / "zero" / "qkv").mkdir()
    remark = order_taken_for_granted(Checkpoint(tmp_path), [plain, told])
    assert remark is not None and "qkv" in remark and order in remark and ("scrambles" in remark) == scrambled
