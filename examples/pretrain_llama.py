# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small Hugging Face llama that no TP degree divides, under AutoTP and ZeRO-1, and resume it at any other.

    torchrun --standalone --nproc-per-node 3 pretrain_llama.py --tp 3 \
        --save checkpoints --save-interval 20 --universal-checkpoint-export
    torchrun --standalone --nproc-per-node 4 pretrain_llama.py --tp 2 --load checkpoints --train-steps 80

The plugin is the three lines that name `megads_ucp`. Everything else is an ordinary training script, written so that
its losses do not depend on the topology (see training.py).
"""

from __future__ import annotations

import argparse
import os

import cpu_shims
import deepspeed
import deepspeed.comm as dist
import hf_engine
import torch
import training
from deepspeed.accelerator import get_accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import megads_ucp

# At TP 2: 4 + 2 heads, 2 + 1 key/value heads, 129 + 128 words. At TP 3 the heads divide, and nothing else does. At TP 4
# the last rank holds no head at all.
SHAPE = {
    "vocab_size": 257,  # bytes, and a word that never occurs to make it a prime
    "hidden_size": 96,
    "intermediate_size": 250,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,  # AutoTP then shards the vocabulary of both
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree; the other ranks are data parallel")
    training.add_arguments(parser)
    megads_ucp.add_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    cpu_shims.use_gloo_alone()
    megads_ucp.install(args)

    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=args.seq_length))
    engine = hf_engine.build_engine(args, model, args.tp)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return engine(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss

    corpus = training.Corpus(training.standard_library(), args.seq_length, args.seed)
    training.run(engine, corpus, loss_of, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
