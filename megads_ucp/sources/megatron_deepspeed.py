# SPDX-License-Identifier: Apache-2.0
"""Rules from the layers of Megatron-DeepSpeed, which cannot describe themselves as megatron-core's can.

They are recognised by their class names at any TP degree, also at TP 1, where the client's own name patterns omit
row-parallel weights. Two facts that no type reveals are found by running the code on a few marked numbers: the row
order of an attention's fused projection (which differs silently between forks and versions), and whether an activation
splits its input into two halves. Nothing of Megatron-DeepSpeed is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, get_args

import torch
from torch import nn

from megads_ucp.errors import LayoutError
from megads_ucp.layout.attention import AttentionOrder, Order
from megads_ucp.layout.rule import Rule, Style
from megads_ucp.sources.attributes import partition_dim

MEGATRON_DEEPSPEED = "Megatron-DeepSpeed's layers"

_COLUMN, _ROW, _VOCABULARY = "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"
_POSITIONS = "SequenceParallelPositionEmbedding"  # each rank has the positions of its part of the sequence
_PROJECTION = "query_key_value"
_HEADS = ("lm_head", "output_layer")


def rules_from_megatron_deepspeed(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], tp_degree: int
) -> dict[str, Rule]:
    """Rules of all parameters in Megatron-DeepSpeed's layers, and of norms and embeddings beside them.

    Raises:
        LayoutError: the row order of an attention's or an activation's projection cannot be determined.
    """
    if not any(_is_parallel(layer) for layer in module.modules()):
        return {}
    found: dict[int, Rule] = {}
    for layer in module.modules():
        for parameter, rule in _own_rules(layer):
            found.setdefault(id(parameter), rule)
    for path, layer in module.named_modules():
        for parameter, rule in _fused_rules(path, layer, tp_degree):
            found[id(parameter)] = rule
    return {name: found[id(parameter)] for name, parameter in parameters.items() if id(parameter) in found}


def vocabulary_names(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Names of the parameters whose dim 0 is a vocabulary that Megatron pads: embeddings of words, and output layers.

    BERT's and T5's output layers are the embedding once more, with a bias of their own.
    """
    embeddings = (m for m in module.modules() if _is_parallel(m) and type(m).__name__ == _VOCABULARY)
    found = {id(parameter): parameter.shape[0] for layer in embeddings for parameter in layer.parameters()}
    rows = set(found.values())
    for path, layer in module.named_modules():
        is_head = path.rpartition(".")[2] in _HEADS or "LMHead" in type(layer).__name__
        for parameter in layer.parameters(recurse=False) if is_head else ():
            if partition_dim(parameter) == 0 and parameter.shape[0] in rows:
                found[id(parameter)] = parameter.shape[0]
    return tuple(name for name, parameter in parameters.items() if id(parameter) in found)


def _is_parallel(layer: nn.Module | None) -> bool:
    """Whether it is one of the parallel layers, and not megatron-core's of the same name, which describe themselves."""
    names = (_COLUMN, _ROW, _VOCABULARY, _POSITIONS)
    return type(layer).__name__ in names and not callable(getattr(layer, "sharded_state_dict", None))


def _own_rules(layer: nn.Module) -> Iterator[tuple[nn.Parameter, Rule]]:
    """The rules that follow from a layer's type alone. An outer layer comes first and overrides the layers in it."""
    kind = type(layer).__name__
    replicated = Rule("replicated", MEGATRON_DEEPSPEED)
    if _is_parallel(layer) and not getattr(layer, "is_expert_without_slicing", False):
        split = Rule("split", MEGATRON_DEEPSPEED, dim=1 if kind == _ROW else 0)
        for parameter in layer.parameters():
            yield parameter, replicated if kind == _ROW and parameter.ndim == 1 else split
    elif kind.endswith("Norm") or isinstance(layer, nn.LayerNorm | nn.Embedding):
        for parameter in layer.parameters(recurse=False):
            yield parameter, replicated


def _fused_rules(path: str, layer: nn.Module, tp_degree: int) -> Iterator[tuple[nn.Parameter, Rule]]:
    """The rules of fused projections: an attention's and a gated MLP's."""
    projection: Any = getattr(layer, _PROJECTION, None)
    if _is_parallel(projection):
        rule = _attention_rule(path, layer, tp_degree)
        yield from ((parameter, rule) for parameter in projection.parameters())
    first: Any = getattr(layer, "dense_h_to_4h", None)
    second: Any = getattr(layer, "dense_4h_to_h", None)
    if _is_parallel(first) and _is_parallel(second) and first.weight.shape[0] == 2 * second.weight.shape[1]:
        _check_halves(path, layer)
        half = second.weight.shape[1] * tp_degree
        rule = Rule("split", MEGATRON_DEEPSPEED, dim=0, sub_sizes=(half, half), style="n_sub_params")
        yield from ((parameter, rule) for parameter in first.parameters())


def _attention_rule(path: str, attention: nn.Module, tp_degree: int) -> Rule:
    heads = int(attention.num_attention_heads_per_partition)  # type: ignore[arg-type]
    groups = int(getattr(attention, "num_key_value_heads_per_partition", heads))
    head_dim = int(attention.hidden_size_per_attention_head)  # type: ignore[arg-type]
    order = _probe_order(path, attention, groups, heads // groups, head_dim)
    whole = AttentionOrder(order.order, groups * tp_degree, order.queries, head_dim)
    if order.order == "interleaved":
        return Rule("split", MEGATRON_DEEPSPEED, dim=0, attention=whole)
    sizes = tuple(count * head_dim * whole.groups for count in whole.heads)
    style: Style = "n_sub_params" if len(set(sizes)) == 1 else "sub_param_shape"
    return Rule("split", MEGATRON_DEEPSPEED, dim=0, sub_sizes=sizes, style=style, attention=whole)


class _Captured(Exception):
    """Carries the inputs of an attention's core out of its ``forward``."""


class _FixedProjection(nn.Module):
    """Stands in for the projection: returns these rows for any input."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return self.rows, None


class _Capture(nn.Module):
    """Stands in for every layer after the projection, and ends the probe there."""

    def forward(self, *inputs: Any, **_: Any) -> NoReturn:
        raise _Captured(*inputs[:3])


def _probe_order(path: str, attention: nn.Module, groups: int, queries: int, head_dim: int) -> AttentionOrder:
    """The order in which the attention's own ``forward`` splits its projection, inferred from the inputs of its core.

    The probe's projection has twice the groups: with a single one, as a rank may hold, both orders are the same.
    """
    groups *= 2
    rows = torch.arange(groups * (queries + 2) * head_dim, dtype=torch.float32)
    with torch.no_grad(), _probed(attention, _FixedProjection(rows.view(1, 1, -1))):
        try:
            attention.forward(torch.zeros(1, 1, 1), None)
            got: Any = "its core attention was never called"
        except _Captured as captured:
            got = [part.flatten().tolist() for part in captured.args if isinstance(part, torch.Tensor)]
        except Exception as error:  # of foreign code: anything
            got = f"{type(error).__name__}: {error}"
    for name in get_args(Order):
        order = AttentionOrder(name, groups, queries, head_dim)
        query, *others = (_rows_of(order, part) for part in range(3))
        repeated = [[row for head in part for row in head * queries] for part in others]
        plain = [[row for head in part for row in head] for part in (query, *others)]
        if got in (plain, [plain[0], *repeated]):
            return order
    raise _unknown_order(path, queries, got)


def _rows_of(order: AttentionOrder, part: int) -> list[list[float]]:
    """The rows of queries, keys or values: a list for each group."""
    first, width = order.start(part, order.groups), order.heads[part] * order.head_dim
    return [[float(first + group * order.stride(part) + row) for row in range(width)] for group in range(order.groups)]


def _unknown_order(path: str, queries: int, got: Any) -> LayoutError:
    text = got if isinstance(got, str) else f"the first rows of queries, keys and values are {[p[:4] for p in got]}"
    if queries > 1:
        return LayoutError(
            f"{path}: this code's attention does not split its projection as grouped queries are laid out "
            f"(--num-key-value-heads; {queries} queries for each key and value). Upstream cuts its local projection "
            "into equal thirds, which is right without grouped queries only. Train without that flag, or on a fork "
            f"that supports it. ({text})"
        )
    return LayoutError(
        f"{path}: the row order of this attention's {_PROJECTION} could not be determined by running it on marked "
        "numbers, and a wrong one would silently scramble queries, keys and values. Please report this model. "
        f"({text})"
    )


@contextmanager
def _probed(attention: nn.Module, answer: nn.Module) -> Iterator[None]:
    """Give the attention this projection, twice as many heads, and no other layers of its own, for a while."""
    children = dict(attention._modules)
    counts = ("num_attention_heads_per_partition", "num_key_value_heads_per_partition")
    sizes = ("projection_size", "kv_projection_size")  # what the code for DeepSpeed's sequence parallelism cuts by
    doubled = {name: vars(attention)[name] for name in (*counts, *sizes) if name in vars(attention)}
    try:
        for name in children:
            attention._modules[name] = answer if name == _PROJECTION else _Capture()
        for name, value in doubled.items():
            setattr(attention, name, 2 * value)
        yield
    finally:
        attention._modules.update(children)
        vars(attention).update(doubled)


def _check_halves(path: str, mlp: nn.Module) -> None:
    """Check that the activation computes element i from elements i and i + width of its input."""
    width = 4
    numbers = torch.linspace(0.5, 1.5, 2 * width, requires_grad=True)
    with torch.enable_grad():
        mlp.activation_func(numbers)[1].backward()  # type: ignore[operator]
    assert numbers.grad is not None
    if numbers.grad.nonzero().flatten().tolist() != [1, 1 + width]:
        raise LayoutError(
            f"{path}: its activation halves its input, but not into a first and a second half, so the layout of "
            "dense_h_to_4h is unknown. Please report this model."
        )
