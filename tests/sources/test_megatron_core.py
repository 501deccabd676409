# SPDX-License-Identifier: Apache-2.0
"""Layouts that megatron-core's layers describe, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megads_ucp.errors import LayoutError
from megads_ucp.sources.attributes import rules_from_attributes
from megads_ucp.sources.megatron_core import rules_from_sharded_state_dict
from megads_ucp.sources.patterns import rules_from_patterns
from megads_ucp.sources.resolve import Claim, Trust, check_resolved, resolve
from tests.support.layouts import Described, detached, on_ranks, parameters_of
from tests.support.ranks import run_ranks

GPTS = [
    {"tied": True},
    {"tied": False, "add_bias_linear": True, "normalization": "LayerNorm", "position": "learned_absolute"},
    {"tied": False, "gated_linear_unit": False, "activation_func": nn.functional.gelu, "add_bias_linear": True},
]


def build(tp: int, *, tied: bool, position: str = "rope", **config: Any) -> nn.Module:
    """megatron-core's GPTModel with random parameters, other ones on each rank unless they are replicated."""
    import cpu_shims
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    cpu_shims.install_without_accelerator()
    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(0)
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 44,
        "tensor_model_parallel_size": tp,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
    }
    settings |= config
    model: nn.Module = GPTModel(
        TransformerConfig(**settings),
        get_gpt_layer_local_spec(normalization=settings["normalization"]),
        vocab_size=48,
        max_sequence_length=8,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=position,
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        # Those that are not split must be equal on all ranks.
        for name, parameter in model.named_parameters():
            if "layernorm" in name or "position" in name or name.endswith(("proj.bias", "fc2.bias")):
                dist.broadcast(parameter, 0)
    return model


def as_layers_say(model: nn.Module) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]]:
    """(global shape, offset, local tensor) of all parts of each parameter, by megatron-core's own description."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    described = model.sharded_state_dict()  # type: ignore[operator]
    apply_factories(described)
    parts = {}
    for name, value in described.items():
        pieces = [piece for piece in nested_values({"": value}) if isinstance(piece, ShardedTensor)]
        parts[name] = [
            (
                tuple(piece.global_shape[piece.prepend_axis_num :]),
                tuple(piece.global_offset[piece.prepend_axis_num :]),
                piece.data.detach().clone(),
            )
            for piece in pieces
            if piece.data is not None
        ]
    return parts


@pytest.mark.parametrize("gpt", GPTS)
@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_layers_describe_every_parameter(tp, gpt):
    pytest.importorskip("megatron.core")

    def body():
        model = build(tp, **gpt)
        named = parameters_of(model)
        described = rules_from_sharded_state_dict(model, named)
        assert described.warnings == ()
        assert set(described.vocabulary) == {n for n in named if "word_embeddings" in n or "output_layer" in n}
        # Attributes know less, but nothing else.
        attributes = rules_from_attributes(named, tp)
        assert attributes.items() <= described.rules.items()
        return (described.rules, detached(named)), as_layers_say(model)

    ranks = run_ranks(body, tp)
    layouts = on_ranks(lambda: ranks[dist.get_rank()][0], tp)
    for name, (layout, full) in layouts.items():
        expected = torch.full(layout.shape, torch.nan)
        for _, parts in ranks:
            for shape, offset, local in parts[name]:
                assert shape == layout.shape
                expected[tuple(slice(o, o + s) for o, s in zip(offset, local.shape, strict=True))] = local
        assert torch.equal(full, expected), name
        # T1: a checkpoint of TP 1 says as much as one of TP 2.
        keys = layout.metadata()
        assert keys.get("cat_dim") == (None if layout.replicated else int(name.endswith(("proj.weight", "fc2.weight"))))
        assert keys.get("param_n_sub_params") == (
            2 if "linear_fc1" in name and gpt.get("gated_linear_unit", True) else None
        )


def test_megatron_layers_describe_themselves_when_deepspeed_has_moved_their_memory():
    pytest.importorskip("megatron.core")

    def body():
        from tests.support.gpt import build_gpt
        from tests.support.models import initialize

        model, mpu = build_gpt(2, dtype=torch.bfloat16)
        before = rules_from_sharded_state_dict(model, parameters_of(model))
        engine = initialize(model, "bf16_optimizer", mpu=mpu)
        after = rules_from_sharded_state_dict(engine.module, parameters_of(engine.module))
        assert after == before
        assert set(after.rules) == set(engine.param_names.values())

    run_ranks(body, 2)


def test_megatron_layers_tell_the_dimension_at_tp_1_even_without_attributes():
    pytest.importorskip("megatron.core")

    def body():
        model = build(1, tied=True, perform_initialization=False)
        groups = [module.tp_group for module in model.modules() if hasattr(module, "tp_group")]
        named = parameters_of(model)
        assert rules_from_attributes(named, 1) == {}
        rules = rules_from_sharded_state_dict(model, named).rules
        assert rules["decoder.layers.1.mlp.linear_fc2.weight"].dim == 1
        assert rules["decoder.layers.1.mlp.linear_fc1.weight"].style == "n_sub_params"
        assert [module.tp_group for module in model.modules() if hasattr(module, "tp_group")] == groups

    run_ranks(body, 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_layers_inside_other_modules(tp):
    pytest.importorskip("megatron.core")

    def body():
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.module import MegatronModule

        parallel_state.initialize_model_parallel(tp)
        config = ModelParallelConfig(tensor_model_parallel_size=tp, use_cpu_initialization=True)

        def linear(kind: Any, **kwargs: Any) -> nn.Module:
            made: nn.Module = kind(
                4, 4, config=config, init_method=nn.init.normal_, bias=True, skip_bias_add=False, **kwargs
            )
            return made

        def pair() -> list[nn.Module]:
            return [linear(ColumnParallelLinear), linear(RowParallelLinear, input_is_parallel=True)]

        class Outer(MegatronModule):
            """Describes itself, but takes what lies in its ModuleList for replicated."""

            def __init__(self) -> None:
                super().__init__(config)
                self.inner = nn.ModuleList(pair())
                self.norm = nn.LayerNorm(4)

        class Broken(nn.Linear):
            def sharded_state_dict(self, **_: Any) -> dict[str, Any]:
                raise RuntimeError("no idea")

        plain = nn.Sequential(*pair(), nn.Linear(4, 4))
        found = rules_from_sharded_state_dict(plain, parameters_of(plain)).rules
        assert {name: rule.dim for name, rule in found.items()} == {
            "0.weight": 0,
            "0.bias": 0,
            "1.weight": 1,
            "1.bias": None,
        }

        outer = Outer()
        found = rules_from_sharded_state_dict(outer, parameters_of(outer)).rules
        dims = {"inner.0.weight": 0, "inner.0.bias": 0, "inner.1.weight": 1, "inner.1.bias": None}
        assert {name: rule.dim for name, rule in found.items()} == {**dims, "norm.weight": None, "norm.bias": None}

        broken = nn.Sequential(Broken(2, 2), linear(ColumnParallelLinear))
        result = rules_from_sharded_state_dict(broken, parameters_of(broken))
        assert set(result.rules) == {"1.weight", "1.bias"}
        assert "Broken 0" in result.warnings[0]
        assert "RuntimeError: no idea" in result.warnings[0]

    run_ranks(body, tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_fused_parameters_of_unequal_parts(tp):
    """What the in_proj of a state-space layer is: projections of different widths in one weight, each split."""
    pytest.importorskip("megatron.core")
    widths = (6, 4, 4, 2)
    full = torch.randn(sum(widths), 3)

    def body() -> Described:
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.ssm.gated_delta_net import _split_tensor_factory
        from megatron.core.tensor_parallel import ColumnParallelLinear

        parallel_state.initialize_model_parallel(tp)
        config = ModelParallelConfig(tensor_model_parallel_size=tp, use_cpu_initialization=True)

        class Fused(ColumnParallelLinear):
            def sharded_state_dict(self, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
                described: dict[str, Any] = super().sharded_state_dict(prefix, **kwargs)
                local = [width // tp for width in widths]
                key = f"{prefix}weight"
                described[key] = _split_tensor_factory(described[key], local, ["z", "x", "B", "C"], 0)
                return described

        layer = Fused(3, sum(widths), config=config, init_method=nn.init.normal_, bias=False)
        rank = dist.get_rank()
        with torch.no_grad():
            layer.weight.copy_(torch.cat([part.chunk(tp)[rank] for part in full.split(list(widths))]))
        return dict(rules_from_sharded_state_dict(layer, parameters_of(layer)).rules), detached(parameters_of(layer))

    layout, rebuilt = on_ranks(body, tp)["weight"]
    assert torch.equal(rebuilt, full)
    shape = layout.metadata()["sub_param_shape"]
    assert (shape.shape, shape.partition_dim, shape.patterns) == ((widths, 3), 0, ["^weight$"])


def test_a_description_that_no_rule_can_express_is_refused():
    pytest.importorskip("megatron.core")

    def body():
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        class Tiled(nn.Linear):
            """Split along both dimensions."""

            def sharded_state_dict(self, prefix: str = "", **_: Any) -> dict[str, Any]:
                return {f"{prefix}weight": ShardedTensor.from_rank_offsets("weight", self.weight, (0, 1, 2), (1, 0, 2))}

        class Shifted(nn.Linear):
            """Two parts, the second of which lies where no even split would put it."""

            def sharded_state_dict(self, prefix: str = "", **_: Any) -> dict[str, Any]:
                from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

                def build(key: str, data: torch.Tensor, *_: Any) -> list[Any]:
                    first, second = data.chunk(2)
                    return [
                        ShardedTensor.from_rank_offsets(key, first, (0, 0, 4)),
                        ShardedTensor.from_rank_offsets(key, second, (0, 3, 4)),
                    ]

                return {f"{prefix}weight": ShardedTensorFactory(f"{prefix}weight", self.weight, build, torch.cat)}

        for kind, reason in ((Tiled, "more than one dimension"), (Shifted, "rank 0 of 2 would lie at")):
            layer = kind(4, 4)
            with pytest.raises(LayoutError, match=f"^weight: .*{reason}"):
                rules_from_sharded_state_dict(layer, parameters_of(layer))

    run_ranks(body, 1)


def test_patterns_of_a_client_are_overridden_by_megatron_layers():
    """T8: patterns that the layers contradict, and doubtful ones for which the layers know better."""
    pytest.importorskip("megatron.core")

    def body():
        model = build(2, tied=False)
        named = parameters_of(model)
        return rules_from_sharded_state_dict(model, named).rules, {name: tuple(p.shape) for name, p in named.items()}

    ranks = run_ranks(body, 2)
    rules = ranks[0][0]
    shapes = {name: [shapes[name] for _, shapes in ranks] for name in rules}
    info = {
        "parameter_with_row_parallelism_patterns": [".*linear_proj", ".*linear_qkv.weight"],  # the second one is wrong
        "tp_replicated_parameter_patterns": [".*l"],  # matches all but two by accident
    }
    patterns = rules_from_patterns(info, list(rules), shapes)
    claims = [
        Claim("layers", Trust.LAYERS, rules),
        Claim("patterns", Trust.PATTERNS, {**patterns.stated}, patterns.doubts),
        Claim("default", Trust.DEFAULT, patterns.defaults),
    ]
    result = resolve(list(rules), shapes, claims, tp_degree=2)
    assert result.rules == rules
    assert len(result.warnings) == 1
    with pytest.raises(LayoutError, match="several rules"):
        check_resolved([resolve(list(rules), shapes, claims[1:], tp_degree=2)])
