# SPDX-License-Identifier: Apache-2.0
"""KL divergence between two models whose logits are sharded over the vocabulary, and whose vocabularies may lie
differently: nothing of the size vocabulary x sequence ever leaves its rank.

`S` is the number of positions, samples and sequence taken together. What travels is 5 numbers per position, and, where
only one of the models is sharded, hidden states.
"""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist
import torch


def sharded_kl(student: torch.Tensor, teacher: torch.Tensor, group: Any = None) -> torch.Tensor:
    """KL(teacher || student) at each position: (S,).

    student, teacher: logits (S, words of this rank). Each rank of `group` holds the same words of both models, and no
        two ranks the same; how many may differ from rank to rank, and be none.
    group: the ranks that hold the vocabulary together; None: this one alone.

    Every rank of the group gets the same result, and in the backward pass the whole gradient of its own logits, if all
    of them go on to the same loss. No gradient reaches the teacher.
    """
    return _ShardedKL.apply(student, teacher, group)


class _ShardedKL(torch.autograd.Function):
    """KL = sum_v p_t (log p_t - log p_s), and its gradient with respect to student logits is p_s - p_t."""

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor, group: Any) -> torch.Tensor:
        student, teacher = _shifted(torch.stack((student, teacher)), group)
        exp_student, exp_teacher = student.exp(), teacher.exp()
        crossed = (exp_teacher * (teacher - student)).sum(-1)
        sums = torch.stack((exp_student.sum(-1), exp_teacher.sum(-1), crossed))
        if group is not None:
            dist.all_reduce(sums, group=group)
        sum_student, sum_teacher, crossed = sums
        ctx.save_for_backward(exp_student / sum_student[:, None] - exp_teacher / sum_teacher[:, None])
        return crossed / sum_teacher - sum_teacher.log() + sum_student.log()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return difference * grad[:, None], None, None


def _shifted(logits: torch.Tensor, group: Any) -> torch.Tensor:
    """Logits (2, S, words) less the largest over the whole vocabulary, so that no exponential overflows."""
    least = torch.finfo(logits.dtype).min
    largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], least)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return logits - largest[..., None]


def gather_samples(hidden: torch.Tensor, group: Any) -> torch.Tensor:
    """The samples of all ranks of `group`, in their order: (samples, ...) of each -> (samples of all, ...).

    In the backward pass each rank gets the sum of what all of them have found out about its own samples.
    """
    return _GatherSamples.apply(hidden, group)


class _GatherSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, hidden.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)  # gloo has no reduce-scatter in every version; hidden states are small
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None
