# SPDX-License-Identifier: Apache-2.0
"""A training script in a folder of its own, which parses arguments and makes a DeepSpeed config as Megatron does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The shape of megatron/arguments.py: a parser of its own, an optional provider of more, no abbreviations.
ARGUMENTS = """
import argparse

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--local_rank", type=int, default=None)
    parser.add_argument("--universal-checkpoint", action="store_true")
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
"""

SCRIPT = """
import json, sys
import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it is compiled, and a killed build blocks others
from helper_beside_the_script import WORD
from megatron.arguments import parse_args
from tests.support.models import MLP, mlp_batches, train
{more}

def own_arguments(parser):
    parser.add_argument("--own", default="default")
    return parser

if __name__ == "__main__":
    args = parse_args({provider})
    config = {{
        "train_batch_size": 12, "zero_optimization": {{"stage": 1}},
        "optimizer": {{"type": "Adam", "params": {{"lr": 1e-3, "torch_adam": True}}}},
        "checkpoint": {{"tag_validation": "Fail"}}, **json.loads({config!r}),
    }}
    if args.universal_checkpoint:
        config["checkpoint"] = {{"load_universal": True}}  # as Megatron's _create_ds_config_dict replaces it
    model = MLP()
    engine = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=config)[0]
    if args.universal_checkpoint:
        engine.load_checkpoint("out")
    train(engine, mlp_batches(0, 2, samples=12))
    engine.save_checkpoint("out", tag="step", client_state={{"args": vars(args), "argv": sys.argv, "word": WORD}})
"""


def client(folder: Path, provider: str = "", config: Any = None, more: str = "") -> Path:
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "arguments.py").write_text(ARGUMENTS)
    (folder / "helper_beside_the_script.py").write_text("WORD = 'beside'")
    script = folder / "pretrain_gpt.py"
    script.write_text(SCRIPT.format(provider=provider, config=json.dumps(config or {}), more=more))
    return script
