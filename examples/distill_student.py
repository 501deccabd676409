# SPDX-License-Identifier: Apache-2.0
"""Distill a Hugging Face model into a small llama, each at a tensor parallelism of its own; resume the student at any.

    torchrun --standalone --nproc-per-node 2 distill_student.py --tp 2 --teacher-tp 2 \
        --save checkpoints --save-interval 20 --universal-checkpoint-export
    torchrun --standalone --nproc-per-node 2 distill_student.py --tp 1 --teacher-tp 2 \
        --load checkpoints --train-steps 80

The plugin is the lines that name `megads_ucp`. The text is the reference of the Python language that comes with Python
for its `help()`: 0.5 MB of English. The loss is the KL divergence from the teacher at every position (sharded_kl.py).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_shims
import deepspeed
import deepspeed.comm as dist
import hf_engine
import teachers
import torch
import training
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.layers import VocabParallelLinear
from sharded_kl import gather_samples, sharded_kl
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import megads_ucp
from megads_ucp import model_scope

# At TP 2: 6 + 4 heads, 3 + 2 key/value heads. SmolLM2-135M has 9 and 3.
SHAPE = {
    "hidden_size": 320,
    "intermediate_size": 850,
    "num_hidden_layers": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "tie_word_embeddings": True,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree of the student")
    parser.add_argument("--teacher-tp", type=int, default=1, help="and of the teacher; one of the two may be 1")
    parser.add_argument("--teacher", type=Path, help="a directory of Hugging Face's format, or a GGUF file")
    training.add_arguments(parser)
    megads_ucp.add_arguments(parser)
    args = parser.parse_args()
    if args.tp != args.teacher_tp and 1 not in (args.tp, args.teacher_tp):
        parser.error(
            "--tp and --teacher-tp: either the same, or one of them 1, so that their vocabularies fit together"
        )
    return args


# ---------------------------------------------------------------------------------------------------------- vocabulary


@dataclass(frozen=True)
class Words:
    """The part of the vocabulary that a rank holds of a model: rows [start, stop), which is all of it without AutoTP.

    group: the ranks that hold all of the vocabulary together; None if each of them does.
    """

    start: int
    stop: int
    group: Any = None


def words_of(head: nn.Linear) -> Words:
    if isinstance(head, VocabParallelLinear):
        return Words(head.vocab_start_index, head.vocab_end_index, head.mp_group)
    return Words(0, head.weight.shape[0])


class StudentForCausalLM(LlamaForCausalLM):
    """A llama that can compute logits where the teacher's words lie: of ``teacher``, to be set before the first step.

    (AutoTP compares the arguments of a model's first call between ranks, and these words differ.)
    """

    teacher: Words

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (samples, sequence, words): of this rank's samples, and the words that AutoTP gave it, if it is cut.

        If only the teacher is cut: of all samples in its group, and the teacher's words. Each rank of the group then
        has other samples, but the same whole head, so hidden states travel, which are small, and no logits.
        """
        hidden, teacher = self.model(input_ids=tokens, use_cache=False).last_hidden_state, self.teacher
        if teacher.group is None or isinstance(self.lm_head, VocabParallelLinear):
            return self.lm_head(hidden)
        hidden = gather_samples(hidden, teacher.group)
        logits = functional.linear(hidden, self.lm_head.weight[teacher.start : teacher.stop])
        if logits.requires_grad:
            # Each rank finds its words' part of the gradient of the group's mean loss. They are to be added up, and
            # DeepSpeed takes the mean over data parallel ranks.
            parts = dist.get_world_size(teacher.group)
            logits.register_hook(lambda gradient: gradient * parts)
        return logits


class Distillation:
    """The loss of a student against a frozen teacher."""

    def __init__(self, student: deepspeed.DeepSpeedEngine, teacher: deepspeed.DeepSpeedEngine) -> None:
        self.student, self.teacher = student, teacher
        self.of_student, self.of_teacher = words_of(student.module.lm_head), words_of(teacher.module.lm_head)
        student.module.teacher = self.of_teacher

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean KL divergence over the positions of a micro batch (samples, seq_length + 1)."""
        tokens = tokens[:, :-1].contiguous()
        logits = self.student(tokens)
        with torch.no_grad():
            target = self.teacher(input_ids=self.tokens_of_group(tokens), use_cache=False).logits
        if self.of_teacher.group is None:
            target = target[..., self.of_student.start : self.of_student.stop]
        group = self.of_teacher.group or self.of_student.group
        return sharded_kl(logits.flatten(0, 1), target.flatten(0, 1), group).mean()

    def tokens_of_group(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the teacher reads: all ranks of its TP group must give it the same."""
        together = self.of_student.group is not None or self.of_teacher.group is None
        return tokens if together else gather_samples(tokens, self.of_teacher.group)


# --------------------------------------------------------------------------------------------------- models and engines


def build_teacher(args: argparse.Namespace, source: teachers.Source) -> deepspeed.DeepSpeedEngine:
    """The frozen model under AutoTP.

    By `deepspeed.initialize`: it cuts by the model's own plan, as it cuts the student, so that both get the same words.
    `tp_model_init` cuts nothing in DeepSpeed 0.19.8, but leaves it to an `initialize` that follows, and
    `init_inference` gathers logits.
    """
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32, **source.options)
    model.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31,
        **hf_engine.tensor_parallel(args.teacher_tp),
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    engine.eval()
    return engine


def build_student(args: argparse.Namespace, vocabulary: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(args.seed)
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=args.seq_length, **SHAPE)
    return hf_engine.build_engine(args, StudentForCausalLM(config), args.tp)


def python_reference(source: teachers.Source) -> torch.Tensor:
    """The topics of `help()`, chapters of the Python language reference, as tokens of the teacher's: (tokens,)."""
    from pydoc_data.topics import topics

    tokenizer = AutoTokenizer.from_pretrained(source.folder, **source.options)
    return torch.tensor(tokenizer("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"])


def main() -> None:
    args = parse_arguments()
    cpu_shims.use_gloo_alone()
    megads_ucp.install(args)
    disable_progress_bar()

    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    source = teachers.find(args.teacher)
    with model_scope("teacher"):
        teacher = build_teacher(args, source)
    with model_scope("student"):
        student = build_student(args, teacher.module.config.vocab_size)
    corpus = training.Corpus(python_reference(source), args.seq_length, args.seed)
    training.run(student, corpus, Distillation(student, teacher).loss, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
