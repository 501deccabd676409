# SPDX-License-Identifier: Apache-2.0
"""Jobs for property tests: every way of cutting parameters, over up to four TP and five DP ranks."""

from __future__ import annotations

from typing import cast

from deepspeed.checkpoint.affine import block_gather_map, segmented_map
from hypothesis import strategies as st

from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.rule import Kind, Rule
from tests.support.jobs import ADAM, MIXED, Job


def widths(tp_degree: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 5), min_size=tp_degree, max_size=tp_degree).map(tuple)


@st.composite
def layouts_of(draw: st.DrawFn, name: str, tp_degree: int) -> Layout:
    """Every way of cutting a parameter over tensor-parallel ranks, sizes of zero and one included."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["replicated", "averaged", "split", "sub-parameters", "vocabulary", "partly", "dealt"]))

    def cut(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]

    if kind in ("replicated", "averaged"):
        return build_layout(name, Rule(cast(Kind, kind), "test"), [shape] * tp_degree)
    if kind == "split":
        return build_layout(name, Rule("split", "test", dim=dim), cut(draw(widths(tp_degree))))
    if kind == "sub-parameters":
        rows = draw(st.lists(widths(tp_degree), min_size=2, max_size=3))
        rule = Rule("split", "test", dim=dim, shard_widths=tuple(rows), style="sub_param_shape")
        return build_layout(name, rule, cut(tuple(map(sum, zip(*rows, strict=True)))))
    if kind == "vocabulary":
        rows_each = shape[0]
        real = draw(st.integers(1, rows_each * tp_degree))
        rule = Rule("split", "test", dim=0, vocabulary_size=real)
        return build_layout(name, rule, [shape] * tp_degree)
    if kind == "partly":  # a fused QKV whose K and V every rank holds
        by_rank, copied = draw(widths(tp_degree)), draw(st.integers(1, 4))
        whole = [*shape[:dim], sum(by_rank) + copied, *shape[dim + 1 :]]
        affine = segmented_map(whole, [(sum(by_rank), False), (copied, True)], dim, tp_degree, [by_rank])
    else:
        blocks, size = draw(st.permutations(range(draw(st.integers(tp_degree, 7))))), draw(st.integers(1, 3))
        whole = [*shape[:dim], size * len(blocks), *shape[dim + 1 :]]
        affine = block_gather_map(whole, {rank: blocks[rank::tp_degree] for rank in range(tp_degree)}, size, dim)
    shards = [affine.shard_shapes[rank] for rank in range(tp_degree)]
    return build_layout(name, Rule("affine", "test", affine=affine.to_dict()), shards)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    tp_degree, degree = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    owned = draw(st.integers(1, 6))
    unowned = draw(st.integers(0, 2))
    found = [draw(layouts_of(f"p{index}", tp_degree)) for index in range(owned + unowned)]
    return Job(tuple(found[:owned]), tuple(found[owned:]), draw(st.sampled_from([ADAM, MIXED])), tp_degree, degree)


BUCKETS = st.one_of(st.just(64), st.integers(64, 300), st.just(1 << 20))
