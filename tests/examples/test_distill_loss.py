# SPDX-License-Identifier: Apache-2.0
"""The sharded KL divergence of the distillation example, against the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.support.models import draw_weights
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")

from distill_student import StudentForCausalLM, Words
from sharded_kl import sharded_kl
from transformers import LlamaConfig

POSITIONS = 7


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)  # float64, summed in another order


def plain_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    logarithms = student.log_softmax(-1), teacher.log_softmax(-1)
    return functional.kl_div(*logarithms, log_target=True, reduction="none").sum(-1)


def drawn(*shape: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("widths", [(11,), (6, 5), (5, 0, 6)], ids=str)
def test_uneven_shards_give_the_plain_divergence_and_gradient(widths: tuple[int, ...]) -> None:
    # Far from zero: an exponential of these, without the largest taken off first, is infinite.
    student, teacher = drawn(2, POSITIONS, sum(widths)) + 1000
    weights = drawn(POSITIONS)

    def body():
        start = sum(widths[: dist.get_rank()])
        words = slice(start, start + widths[dist.get_rank()])
        mine = student[:, words].clone().requires_grad_()
        divergence = sharded_kl(mine, teacher[:, words], dist.group.WORLD if len(widths) > 1 else None)
        (divergence * weights).sum().backward()
        return divergence.detach(), mine.grad

    whole = student.clone().requires_grad_()
    expected = plain_kl(whole, teacher)
    (expected * weights).sum().backward()
    divergences, gradients = zip(*run_ranks(body, len(widths)), strict=True)
    for divergence in divergences:
        assert_close(divergence, expected.detach())
    assert_close(torch.cat(gradients, 1), whole.grad)


def test_a_whole_student_meets_a_cut_teacher() -> None:
    """Gradients of data parallel ranks, averaged as DeepSpeed does, are those of one process that has all samples."""
    vocabulary, cut = 11, 6
    tokens = torch.arange(4 * 5).view(4, 5) % vocabulary
    teacher = drawn(4, 5, vocabulary)

    def student(words: Words) -> StudentForCausalLM:
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=12, intermediate_size=10, num_hidden_layers=1, num_attention_heads=3,
            num_key_value_heads=1, head_dim=4, tie_word_embeddings=True,
        )  # fmt: skip
        model = StudentForCausalLM(config).double()
        draw_weights(model)
        model.teacher = words
        return model

    def body():
        rank = dist.get_rank()
        words = Words(*((0, cut), (cut, vocabulary))[rank], group=dist.group.WORLD)
        model = student(words)
        logits = model(tokens.chunk(2)[rank])
        target = teacher[..., words.start : words.stop]
        loss = sharded_kl(logits.flatten(0, 1), target.flatten(0, 1), words.group).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}

    alone = student(Words(0, vocabulary))
    expected = plain_kl(alone(tokens), teacher).mean()
    expected.backward()
    for loss, gradients in run_ranks(body, 2):
        assert_close(loss, expected.detach())
        for name, parameter in alone.named_parameters():
            assert_close(gradients[name], parameter.grad)
