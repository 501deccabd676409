# SPDX-License-Identifier: Apache-2.0
"""What name patterns say: pure, and against the stock converter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.affine import block_gather_map, contiguous_split_map, replicated_map
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megads_ucp.errors import LayoutError
from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.rule import Rule
from megads_ucp.sources.patterns import PatternRules, rules_from_patterns
from megads_ucp.sources.resolve import Claim, Resolution, Trust, check_resolved, resolve
from tests.support.layouts import rebuild

STATES = ("fp32", "exp_avg", "exp_avg_sq")


def read(info: dict[str, Any], **shapes: list[tuple[int, ...]]) -> PatternRules:
    """rules_from_patterns for parameters whose names have underscores for dots."""
    named = {name.replace("_", "."): shape for name, shape in shapes.items()}
    return rules_from_patterns(info, list(named), named)


def resolved(
    patterns: PatternRules,
    shapes: dict[str, list[tuple[int, ...]]],
    *better: Claim,
    unused: frozenset[str] | None = None,
) -> Resolution:
    result = resolve(
        list(shapes),
        shapes,
        [
            *better,
            Claim("name patterns", Trust.PATTERNS, patterns.stated, patterns.doubts),
            Claim("default", Trust.DEFAULT, patterns.defaults),
        ],
        tp_degree=len(next(iter(shapes.values()))),
        vocabulary=patterns.vocabulary,
        unused_patterns=patterns.unused if unused is None else unused,
    )
    check_resolved([result])
    return result


# ------------------------------------------------------------------------------------------ against the stock converter


def stock_merge(folder: Path, info: dict[str, Any], name: str, shards: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """{state: contents of its .pt file} as merge_tp_slices makes them from one fragment per TP rank."""
    for state, tensors in shards.items():
        for rank, shard in enumerate(tensors):
            flat = shard.reshape(-1)
            ds_to_universal.dump_param_fragment(str(folder / "tmp"), rank, 0, state, flat, name, 0, flat.numel())
    shapes = [tuple(shard.shape) for shard in shards["fp32"]]
    ds_to_universal.merge_tp_slices(info, str(folder / "zero"), str(folder / "tmp"), len(shapes), (name, shapes))
    return {state: torch.load(folder / "zero" / name / f"{state}.pt", weights_only=False) for state in STATES}


def assert_like_stock(folder: Path, info: dict[str, Any], shapes: list[tuple[int, ...]], name: str = "m.w") -> Layout:
    """Our rule for these shards makes the same tensors and metadata as the stock converter."""
    patterns = rules_from_patterns(info, [name], {name: shapes})
    layout = build_layout(name, resolved(patterns, {name: shapes}, unused=frozenset()).rules[name], shapes)
    same = layout.replicated
    generator = torch.Generator().manual_seed(len(shapes))
    shards = {}
    for state in STATES:
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        shards[state] = [drawn[0]] * len(shapes) if same else drawn
    for state, contents in stock_merge(folder, info, name, shards).items():
        param = contents.pop("param")
        assert torch.equal(rebuild(layout, shards[state]).view_as(param), param)
        assert plain(layout.metadata()) == plain(contents)
    return layout


def plain(value: Any) -> Any:
    """Metadata with SubparamShape as a dict and lists as tuples: which of the two a client used does not matter."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    return plain(vars(value)) if hasattr(value, "__dict__") else value


degrees = st.integers(1, 4)
sizes = st.integers(1, 5)


@pytest.fixture
def folders(tmp_path_factory):
    """A fresh folder for each example of a hypothesis test."""
    return lambda: tmp_path_factory.mktemp("merge")


# Function-scoped fixtures are made once for all examples, which is all that `folders` needs.
stock = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@stock
@given(tp=degrees, shape=st.lists(sizes, min_size=1, max_size=3))
def test_replicated_and_averaged_are_as_in_stock(folders, tp, shape):
    shapes = [tuple(shape)] * tp
    assert assert_like_stock(folders(), {"tp_replicated_parameter_patterns": ["m.w"]}, shapes).replicated
    assert assert_like_stock(folders(), {"parameter_to_average_patterns": ["m.w"]}, shapes).averaged


@stock
@given(held=st.lists(sizes, min_size=1, max_size=4), other=sizes)
def test_row_parallel_and_the_default_are_as_in_stock(folders, held, other):
    rows = {"parameter_with_row_parallelism_patterns": ["m.w"]}
    assert_like_stock(folders(), rows, [(other, width) for width in held])
    assert_like_stock(
        folders(), {"parameter_with_row_parallelism_patterns": ["n.w"]}, [(width, other) for width in held]
    )


@stock
@given(halves=st.lists(sizes, min_size=1, max_size=4), other=st.lists(sizes, max_size=1))
def test_two_halves_are_as_in_stock(folders, halves, other):
    info = {"parameter_with_2_sub_params_cat_dim_0": ["m.w"]}
    layout = assert_like_stock(folders(), info, [(2 * half, *other) for half in halves])
    assert layout.metadata() == {"cat_dim": 0, "param_n_sub_params": 2}


@stock
@given(data=st.data(), tp=degrees, count=st.integers(1, 3), dim=st.integers(0, 1), other=sizes)
def test_sub_parameters_with_shard_widths_are_as_in_stock(folders, data, tp, count, dim, other):
    widths = [data.draw(st.lists(st.integers(0, 4), min_size=tp, max_size=tp).filter(any)) for _ in range(count)]
    full: list[Any] = [other, other]
    full[dim] = tuple(map(sum, widths))
    if data.draw(st.booleans()):
        full[1 - dim] = -1  # a placeholder
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": ["m.w"], "shape": tuple(full), "partition_dim": dim}],
        "sub_param_shard_widths": {"m.w": widths},
    }
    shapes = [tuple(sum(row[rank] for row in widths) if d == dim else other for d in (0, 1)) for rank in range(tp)]
    assert_like_stock(folders(), info, shapes)


@stock
@given(tp=degrees, count=st.integers(1, 3), width=st.integers(1, 3), other=sizes)
def test_counts_of_sub_parameters_in_old_info_are_as_in_stock(folders, tp, count, width, other):
    info = {"parameter_with_sub_params": [{"patterns": ["m.w"], "shape": (count, -1), "partition_dim": 0}]}
    layout = assert_like_stock(folders(), info, [(count * width, other)] * tp)
    assert layout.rule.sub_sizes == (width * tp,) * count


@stock
@given(tp=degrees, heads=st.lists(sizes, min_size=1, max_size=3), head=st.integers(1, 3), other=sizes)
def test_sub_parameters_told_as_a_view_are_as_in_stock(folders, tp, heads, head, other):
    view = (tuple(tp * n for n in heads), head, other)
    info = {"parameter_with_sub_params": [{"patterns": ["m.w"], "shape": view, "partition_dim": 0}]}
    shapes: list[tuple[int, ...]] = [(sum(heads) * head, other)] * tp
    layout = build_layout("m.w", read(info, m_w=shapes).stated["m.w"], shapes)
    shards = {state: [torch.randn(shape) for shape in shapes] for state in STATES}
    for state, contents in stock_merge(folders(), info, "m.w", shards).items():
        # Stock leaves the tensor in the shape of the view; ours has the parameter's, and metadata to match.
        assert torch.equal(rebuild(layout, shards[state]).view(contents["param"].shape), contents["param"])


@stock
@given(rows=st.lists(sizes, min_size=1, max_size=4), other=sizes, data=st.data())
def test_vocabularies_are_cut_as_in_stock(folders, rows, other, data):
    vocabulary = data.draw(st.integers(1, sum(rows)))
    info = {"vocabulary_parameter_patterns": ["m.w"], "original_vocab_size": vocabulary}
    info["tp_replicated_parameter_patterns"] = ["n.w"]  # a layout of some parameter, so that there is a default
    layout = assert_like_stock(folders(), info, [(size, other) for size in rows])
    assert layout.shape == (vocabulary, other)
    assert layout.metadata() == {"cat_dim": 0, "vocab_tensor": True}


@pytest.mark.parametrize("vocabulary", [None, 7])
@pytest.mark.parametrize(
    "affine",
    [
        replicated_map((7, 2), 2),
        contiguous_split_map((7, 6), (4, 2), 1),
        block_gather_map((8, 3), {0: [0, 3], 1: [1, 2]}, 2, 0),
    ],
)
def test_affine_maps_come_first_as_in_stock(tmp_path, affine, vocabulary):
    info: dict[str, Any] = {
        "affine_map": {"version": 1, "params": {"^m\\.w$": affine.to_dict()}},
        "parameter_with_row_parallelism_patterns": ["m.w"],  # for older converters
        "universal_checkpoint_version": 0.4,
    }
    if vocabulary:
        info |= {"vocabulary_parameter_patterns": ["m.w"], "original_vocab_size": vocabulary}
    layout = assert_like_stock(tmp_path, info, [affine.shard_shapes[0], affine.shard_shapes[1]])
    assert layout.metadata() == ({"vocab_tensor": True} if vocabulary else {})


def test_affine_maps_of_a_later_format_are_refused():
    with pytest.raises(LayoutError, match="version 9"):
        read({"affine_map": {"version": 9, "params": {}}}, w=[(1,)])


@pytest.mark.parametrize("shape", [(3, -1), ((5, 5, 5), 4)])
def test_old_info_with_uneven_sub_parameters_is_refused_as_in_stock(tmp_path, shape):  # T7
    info = {"parameter_with_sub_params": [{"patterns": ["m.w"], "shape": shape, "partition_dim": 0}]}
    shapes: list[tuple[int, ...]] = [(9, 4), (6, 4)]
    with pytest.raises(LayoutError, match=r"m\.w.*do not divide over 2 TP ranks") as error:
        resolved(read(info, m_w=shapes), {"m.w": shapes})
    assert "sub_param_shard_widths" in str(error.value)
    with pytest.raises(AssertionError, match="not divisible"):
        stock_merge(tmp_path, info, "m.w", {state: [torch.randn(shape) for shape in shapes] for state in STATES})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sub_param_shard_widths": {}}, "needs its sub_param_shard_widths"),
        ({"sub_param_shard_widths": {"m.w": [[2, 2], [1, 2]]}}, "shard widths"),
        ({"sub_param_shard_widths": {"m.w": [[2, 2], [1, 1]]}}, "do not fill"),
    ],
)
def test_sub_parameters_that_do_not_fit_are_refused(change, reason):
    shapes: list[tuple[int, ...]] = [(4, 4), (4, 4)]
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": ["m.w"], "shape": ((4, 2), -1), "partition_dim": 0}],
        **change,
    }
    with pytest.raises(LayoutError, match=reason):
        resolved(read(info, m_w=shapes), {"m.w": shapes})


def test_a_vocabulary_without_its_size_is_refused():
    with pytest.raises(LayoutError, match="original_vocab_size"):
        read({"vocabulary_parameter_patterns": ["m.w"]}, m_w=[(4, 4)])


# ---------------------------------------------------------------------------------------------------- doubtful patterns


def test_two_rules_for_one_parameter_are_a_doubt():  # T8
    info = {"tp_replicated_parameter_patterns": [".*norm.*"], "parameter_with_row_parallelism_patterns": [r".*weight$"]}
    shapes: dict[str, list[tuple[int, ...]]] = {"norm.weight": [(4, 4)] * 2}
    patterns = rules_from_patterns(info, list(shapes), shapes)
    with pytest.raises(LayoutError, match=r"norm\.weight.*several rules.*norm.*weight"):
        resolved(patterns, shapes)
    layers = Claim("layers", Trust.LAYERS, {"norm.weight": Rule("replicated", "the layer")})
    assert resolved(patterns, shapes, layers).rules["norm.weight"].source == "the layer"


def test_two_patterns_of_one_rule_are_none():
    info = {"tp_replicated_parameter_patterns": [".*norm.*", ".*weight"]}
    assert not read(info, norm_weight=[(4,)] * 2).doubts


@pytest.mark.parametrize(
    ("pattern", "victim", "why"),
    [
        ("h.0.norm.weight", "h.0.norm.weight_scale", "by its beginning only"),
        ("h.0.norm.weight", "h.0xnorm.weight", "stands for any character"),
        ("h.1", "h.10.norm.weight", "middle of a word"),
        ("h.1.", "h.10.norm.weight", "stands for any character"),
    ],
)
def test_a_pattern_that_matches_by_accident_is_a_doubt(pattern, victim, why):  # T8
    shapes: dict[str, list[tuple[int, ...]]] = dict.fromkeys(["h.0.norm.weight", "h.1.norm.weight", victim], [(4,)] * 2)
    info = {"tp_replicated_parameter_patterns": [pattern, r"h\.[01]\.norm\.weight$"]}
    patterns = rules_from_patterns(info, list(shapes), shapes)
    assert list(patterns.doubts) == [victim]
    with pytest.raises(LayoutError, match=f"{re.escape(victim)}.*{re.escape(repr(pattern))} .*{why}"):
        resolved(patterns, shapes)


def test_a_vocabulary_that_matches_by_accident_is_a_doubt_and_not_cut():
    shapes: dict[str, list[tuple[int, ...]]] = {"embed.weight": [(6, 2)] * 2, "embed.weight_g": [(6, 2)] * 2}
    info = {"vocabulary_parameter_patterns": ["embed.weight"], "original_vocab_size": 11}
    patterns = rules_from_patterns(info, list(shapes), shapes)
    assert (dict(patterns.vocabulary), list(patterns.doubts)) == ({"embed.weight": 11}, ["embed.weight_g"])
    rules = {name: Rule("split", "the layer", dim=0) for name in shapes}
    chosen = resolved(patterns, shapes, Claim("layers", Trust.LAYERS, rules)).rules
    assert [chosen[name].vocabulary_size for name in shapes] == [11, None]


@pytest.mark.parametrize("pattern", ["model.norm", r".*norm\.", r"model\.(norm|bias).*", r"model\..+"])
def test_patterns_for_a_whole_module_are_no_doubt(pattern):
    shapes: dict[str, list[tuple[int, ...]]] = {"model.norm.weight": [(4,)] * 2, "model.norm.bias": [(4,)] * 2}
    patterns = rules_from_patterns({"tp_replicated_parameter_patterns": [pattern]}, list(shapes), shapes)
    assert not patterns.doubts
    assert len(patterns.stated) == 2


def test_what_megatron_deepspeed_sends_is_no_doubt():
    """Its patterns (UniversalCheckpointInfo in megatron/model/gpt_model.py) are unanchored and have bare dots."""
    layer = r"language_model.encoder.layers.\d+."
    info = {
        "vocabulary_parameter_patterns": [
            "language_model.embedding.word_embeddings.weight",
            "language_model.output_layer.weight",
        ],
        "tp_replicated_parameter_patterns": [
            layer + "input_layernorm.weight",
            layer + "post_attention_layernorm.weight",
            "language_model.encoder.final_layernorm.weight",
            layer + "self_attention.dense.bias",
            layer + "mlp.dense_4h_to_h.bias",
        ],
        "parameter_with_row_parallelism_patterns": [
            layer + "mlp.dense_4h_to_h.weight",
            layer + "self_attention.dense.weight",
        ],
        "parameter_with_2_sub_params_cat_dim_0": [layer + "mlp.dense_h_to_4h.weight", layer + "mlp.dense_h_to_4h.bias"],
        "original_vocab_size": 250,
    }
    matrices = ["self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
    shapes: dict[str, list[tuple[int, ...]]] = {
        "language_model.embedding.word_embeddings.weight": [(128, 8)] * 2,
        "language_model.output_layer.weight": [(128, 8)] * 2,
        "language_model.encoder.final_layernorm.weight": [(8,)] * 2,
    }
    for number in (0, 1, 10, 11):
        prefix = f"language_model.encoder.layers.{number}."
        shapes |= {f"{prefix}{matrix}.weight": [(8, 8)] * 2 for matrix in matrices}
        shapes |= {f"{prefix}{matrix}.bias": [(8,)] * 2 for matrix in matrices}
        shapes |= {f"{prefix}{norm}_layernorm.weight": [(8,)] * 2 for norm in ("input", "post_attention")}
    patterns = rules_from_patterns(info, list(shapes), shapes)
    assert not patterns.doubts
    assert not patterns.unused
    rules = resolved(patterns, shapes).rules
    assert rules["language_model.encoder.layers.10.mlp.dense_4h_to_h.weight"].dim == 1
    assert rules["language_model.encoder.layers.10.self_attention.query_key_value.bias"].dim == 0
    assert rules["language_model.output_layer.weight"].vocabulary_size == 250


def test_one_exact_pattern_per_parameter_is_read_in_linear_time():
    names = [f"layers.{number}.weight" for number in range(20_000)]
    info = {"tp_replicated_parameter_patterns": [f"^{re.escape(name)}$" for name in names]}
    patterns = rules_from_patterns(info, names, {name: [(2,)] for name in names})
    assert len(patterns.stated) == len(names)


def test_info_that_names_no_layout_gives_no_default_under_tensor_parallelism():
    info = {"universal_checkpoint_version": 0.4}  # what --inject_missing_state makes
    assert not read(info, m_w=[(4, 4)] * 2).defaults
    with pytest.raises(LayoutError, match=r"m\.w, shape \(4, 4\) on each of 2 TP ranks: no source describes it"):
        resolved(read(info, m_w=[(4, 4)] * 2), {"m.w": [(4, 4)] * 2})
    assert read(info, m_w=[(4, 4)]).defaults["m.w"] == Rule("split", "", dim=0)


def test_a_mistyped_pattern_is_an_error_where_a_parameter_is_left_to_the_default():
    info = {
        "parameter_with_row_parallelism_patterns": [r"mlp\.fc2\.wieght"],
        "tp_replicated_parameter_patterns": ["norm"],
    }
    shapes: dict[str, list[tuple[int, ...]]] = {"mlp.fc2.weight": [(4, 4)] * 2, "norm.weight": [(4,)] * 2}
    patterns = rules_from_patterns(info, list(shapes), shapes)
    with pytest.raises(LayoutError, match=r"mlp\.fc2\.weight.*wieght"):
        resolved(patterns, shapes)
    layers = Claim("layers", Trust.LAYERS, {"mlp.fc2.weight": Rule("split", "the layer", dim=1)})
    assert resolved(patterns, shapes, layers).warnings == ()
    # The pattern belongs to a parameter of another pipeline stage.
    assert resolved(patterns, shapes, unused=frozenset()).rules["mlp.fc2.weight"].dim == 0
