# SPDX-License-Identifier: Apache-2.0
"""The flat buffers that DeepSpeed builds, worked out from parameter sizes alone, where there is no optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megads_ucp.layout.partition import FlatGroup, Member


def flat_group(
    names: Sequence[str],
    numels: Sequence[int],
    degree: int,
    *,
    alignment: int,
    parameter_alignment: int = 1,
    round_robin: bool = False,
) -> FlatGroup:
    """The flat buffer that DeepSpeed 0.19.8 builds of a parameter group, worked out from the sizes alone.

    Sources: `BF16_Optimizer._setup_for_real_optimizer`, `DeepSpeedZeroOptimizer.__init__` and `_round_robin_reorder`,
    `deepspeed.runtime.utils.align_dense_tensors`.

    Args:
        names: the group's trainable, non-empty parameters in the order of the parameter group.
        numels: their sizes in elements.
        degree: ranks in the shard group.
        alignment: elements that the buffer's length is a multiple of; both optimizers use
            `nccl_start_alignment_factor * degree`, which is 2 * degree.
        parameter_alignment: elements that every parameter's offset is a multiple of. 1 for `BF16_Optimizer` and by
            default; `zero_optimization.parameter_alignment` makes it 16 bytes: 8 in bf16 and fp16, 4 in fp32.
        round_robin: `zero_optimization.round_robin_gradients` (`DeepSpeedZeroOptimizer` only).
    """
    members = []
    end = 0
    for index in _round_robin_order(len(names), degree) if round_robin else range(len(names)):
        # Rounding up before each parameter, not after it, is what leaves no such padding after the last one.
        member = Member(names[index], numels[index], _round_up(end, parameter_alignment))
        members.append(member)
        end = member.stop
    return FlatGroup(tuple(members), _round_up(end, alignment), degree)


def _round_robin_order(count: int, degree: int) -> Iterator[int]:
    """Indices in the order of `_round_robin_reorder`: parameters are dealt to the ranks like cards, then collected."""
    return (index for first in range(min(degree, count)) for index in range(first, count, degree))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
