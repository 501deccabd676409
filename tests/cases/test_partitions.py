# SPDX-License-Identifier: Apache-2.0
"""Exports and resumes of awkward partitions: padding-only ranks, odd sizes, gaps, round-robin order.

Real engines on real gloo ranks. The sizes are those that broke in the field.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from tests.support import stock
from tests.support.models import MLP, train
from tests.support.ranks import run_ranks
from tests.support.runs import (
    TAG,
    UNIVERSAL,
    Recipe,
    assert_resumes,
    assert_same_state,
    export,
    resume,
    tensors,
    with_groups_of,
)

BF16_REL = 5e-3  # reduction order alone, at another number of ranks


# (elements of the extra groups, DP, DP of resumes): at DP 4, 1 element leave three ranks without any; 9, 10 at DP 4 and
# 17, 33 at DP 8 are sizes whose padding is longer than a partition, on which the stock converter dies by itself.
PADDING = {
    "dp4": ((1, 3, 9, 10), 4, (4, 1, 6)),
    "dp8": ((17, 33), 8, (8, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PADDING)
def test_padding_longer_than_a_partition(case: str, tmp_path: Path) -> None:
    """P1, P2: the stock converter agrees on the regular checkpoint, and no number of ranks fails to resume."""
    numels, world, targets = PADDING[case]
    recipe = with_groups_of(numels, "bf16_optimizer", samples=24)
    losses = export(recipe, world, tmp_path / "source")

    converted = stock.convert(tmp_path / "source" / TAG, tmp_path / "stock" / UNIVERSAL)
    stock.assert_same_universal(tmp_path / "source" / UNIVERSAL, converted)
    for index, numel in enumerate(numels):
        full = torch.load(tmp_path / "source" / UNIVERSAL / "zero" / f"scalars.{index}" / "exp_avg.pt")["param"]
        assert full.shape == (numel,)
        assert full.ne(0).all()

    for target in targets:
        again, rel = tmp_path / f"dp{target}", 0 if target == world else BF16_REL
        assert_resumes(recipe, target, tmp_path / "source", again, losses, rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "fp32_zero2"])
def test_a_group_that_is_empty_on_most_ranks(kind: str, tmp_path: Path) -> None:
    """P3, P2 for DeepSpeedZeroOptimizer: three groups of a client's optimizer, one of a single element."""
    recipe = with_groups_of((1, 9), kind)
    losses = export(recipe, 4, tmp_path / "source")
    for target in (4, 3, 6):
        assert_resumes(recipe, target, tmp_path / "source", tmp_path / f"dp{target}", losses)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero2", "parameter_alignment"])
def test_odd_sizes_and_padding_between_parameters(kind: str, tmp_path: Path) -> None:
    """P4: at DP 3, with the weights in a decaying group and the biases in one of their own (P3)."""
    recipe = Recipe(kind, functools.partial(MLP, (7, 11, 3, 5)))
    losses = export(recipe, 3, tmp_path / "source")
    if kind == "zero2":
        converted = stock.convert(tmp_path / "source" / TAG, tmp_path / "stock" / UNIVERSAL)
        stock.assert_same_universal(tmp_path / "source" / UNIVERSAL, converted)
    assert_resumes(recipe, 3, tmp_path / "source", tmp_path / "dp3", losses, rel=0)
    assert_resumes(recipe, 2, tmp_path / "source", tmp_path / "dp2", losses, rel=BF16_REL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16_optimizer", "fp32_zero2"])
def test_a_chain_of_topologies_changes_no_bit(kind: str, tmp_path: Path) -> None:
    """P5: DP 4 -> 3 -> 6 -> 1 -> 4, each hop exporting what it has loaded before it trains."""
    recipe = with_groups_of((1,), kind)
    losses = export(recipe, 4, tmp_path / "0")
    for hop, world in enumerate((3, 6, 1)):
        resume(recipe, world, tmp_path / str(hop), again=tmp_path / str(hop + 1), after=0)
        assert_same_state(tmp_path / str(hop + 1) / UNIVERSAL, tmp_path / "0" / UNIVERSAL)
    assert_resumes(recipe, 4, tmp_path / "3", tmp_path / "4", losses, rel=0)
    # Nor does anything else differ from the first export, but for the resumed run's own config.
    found = list(stock.universal_differences(tmp_path / "4" / UNIVERSAL, tmp_path / "0" / UNIVERSAL))
    assert found == ["mp_rank_00_model_states.pt['ds_config']['checkpoint']: not expected"]


EIGHT_ODD = (7, 5, 3, 9, 5)  # four layers: eight parameters of odd sizes


def true_states(engine: Any) -> dict[str, torch.Tensor]:
    """Every state of every parameter, gathered from all partitions and cut where the parameters' memory lies.

    That a parameter is a view into its group's flat buffer is what ZeRO trains by, whatever its mappings say.
    """
    optimizer, found = engine.optimizer, {}
    for flat, partition, process_group in zip(
        optimizer.bit16_groups_flat,
        optimizer.single_partition_of_fp32_groups,
        optimizer.real_dp_process_group,
        strict=True,
    ):
        states = {"fp32": partition, **optimizer.optimizer.state[partition]}
        for state, values in states.items():
            if state == "step":
                continue
            parts = list(torch.empty(dist.get_world_size(process_group), partition.numel()))
            dist.all_gather(parts, values.detach().contiguous(), group=process_group)
            gathered = torch.cat(parts)
            for name, parameter in engine.module.named_parameters():
                start = (parameter.data_ptr() - flat.data_ptr()) // flat.itemsize
                if 0 <= start < flat.numel():
                    found[f"{name}/{state}"] = gathered[start : start + parameter.numel()].view(parameter.shape).clone()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["round_robin", "round_robin_zero1"])
def test_round_robin_order(kind: str, tmp_path: Path) -> None:
    """P6: what DeepSpeed's own mappings get wrong in the export, in its debugging access, and in a resume."""
    recipe = Recipe(kind, functools.partial(MLP, EIGHT_ODD), groups=lambda model: [{"params": model.parameters()}])

    def source() -> tuple[dict[str, torch.Tensor], dict[str, bool], list[float]]:
        engine = recipe.saved(tmp_path / "source")
        truth = true_states(engine)
        accessed = {
            name: torch.equal(safe_get_full_fp32_param(parameter), parameter.detach())
            for name, parameter in engine.module.named_parameters()
        }
        return truth, accessed, train(engine, recipe.batches(3, 6))

    truth, accessed, losses = run_ranks(source, 2)[0]
    assert len(accessed) == 8 and all(accessed.values())
    exported = tensors(tmp_path / "source" / UNIVERSAL)
    assert exported.keys() == truth.keys()
    assert [name for name in truth if not torch.equal(exported[name], truth[name])] == []

    # The slice mappings in the regular checkpoint are true as well, so that the stock converter reads it right.
    converted = stock.convert(tmp_path / "source" / TAG, tmp_path / "stock" / UNIVERSAL)
    stock.assert_same_universal(tmp_path / "source" / UNIVERSAL, converted)

    for target in (2, 3):
        assert_resumes(recipe, target, tmp_path / "source", tmp_path / f"dp{target}", losses)
