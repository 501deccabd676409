# SPDX-License-Identifier: Apache-2.0
"""Models that exist at several tensor-parallel degrees: exports at one, resumes at another.

How a full tensor and its shards belong together is written here a second time (``Case.shard``), apart from the
library's layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megads_ucp
from tests.support import gpt
from tests.support.models import Batch, draw_weights, initialize, train
from tests.support.ranks import run_ranks
from tests.support.runs import (
    AFTER,
    BEFORE,
    EXPORTING,
    LOADING,
    TAG,
    UNIVERSAL,
    assert_same_state,
    shards,
    tensors,
)

Info = Mapping[str, Any]
Shard = Callable[[str, torch.Tensor, int, int], torch.Tensor]  # (name, full tensor, TP rank, TP degree)

VERSION_ONLY: Info = {"universal_checkpoint_version": 0.4}


@dataclass(frozen=True)
class Case:
    """A model that exists at several tensor-parallel degrees.

    Attributes:
        build: TP degree -> (model, mpu for DeepSpeed).
        shard: what a TP rank holds of a full tensor.
        info: what the client says of its parameters, by TP degree; in client_state only, so that a resuming model does
            not know it.
        config: laid over the DeepSpeed config.
    """

    build: Callable[[int], tuple[nn.Module, Any]]
    shard: Shard
    batches: Callable[[int, int], Iterator[Batch]]
    info: Callable[[int], Info] = lambda tp: VERSION_ONLY
    kind: str = "fp32"
    optimizer: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, tp: int, *, resuming: bool = False, tells: bool = False) -> Any:
        model, mpu = self.build(tp)
        if resuming:
            draw_weights(model, seed=1)
        if tells:
            model.universal_checkpoint_info = self.info(tp)  # type: ignore[assignment]
        config: dict[str, Any] = {**self.config, **(LOADING if resuming else {})}
        if self.optimizer is not None:
            config["optimizer"] = self.optimizer
        if mpu is None and tp > 1:
            config["tensor_parallel"] = {"autotp_size": tp}
        return initialize(model, self.kind, mpu=mpu, config=config)

    def save(self, engine: Any, tp: int, directory: Path, tag: str = TAG) -> None:
        engine.save_checkpoint(
            str(directory),
            tag=tag,
            client_state={"universal_checkpoint_info": self.info(tp)} if self.info(tp) else {},
        )

    def assert_holds(self, engine: Any, universal: Path) -> None:
        """On a rank: its shards, put together from all DP ranks, are those of the full tensors in the files.

        Elements that `shard` makes NaN, the padding of a vocabulary, may have any value.
        """
        rank = engine.mpu.get_tensor_model_parallel_rank() if engine.mpu else 0
        tp = engine.mpu.get_tensor_model_parallel_world_size() if engine.mpu else 1
        exported = tensors(universal)
        for path, value in shards(engine).items():
            expected = self.shard(path.rpartition("/")[0], exported[path], rank, tp)
            known = ~expected.isnan()
            assert value.shape == expected.shape, f"{path} on TP rank {rank} of {tp}"
            assert torch.equal(value[known], expected[known]), f"{path} on TP rank {rank} of {tp}"


def export(
    case: Case, tp: int, dp: int, directory: Path, *, before: int = BEFORE, after: int = AFTER, check: bool = False
) -> list[float]:
    """Trains, saves and exports to `directory`, and trains on: the losses of the steps after the save."""

    def body() -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = case.engine(tp)
        train(engine, case.batches(0, before))
        case.save(engine, tp, directory)
        if check:
            case.assert_holds(engine, directory / UNIVERSAL)
        return train(engine, case.batches(before, before + after))

    return run_ranks(body, tp * dp)[0]


def resume(
    case: Case,
    tp: int,
    dp: int,
    directory: Path,
    again: Path,
    *,
    after: int = AFTER,
    tells: bool = False,
    check: bool = True,
    same: Callable[[Path, Path], None] = assert_same_state,
) -> list[float]:
    """Loads `directory`, exports what was loaded to `again`, which must hold the same bits, and trains on."""

    def body() -> list[float]:
        megads_ucp.install(EXPORTING)
        engine = case.engine(tp, resuming=True, tells=tells)
        engine.load_checkpoint(str(directory))
        if check:
            case.assert_holds(engine, directory / UNIVERSAL)
        case.save(engine, tp, again)
        return train(engine, case.batches(BEFORE, BEFORE + after))

    losses = run_ranks(body, tp * dp)[0]
    same(again / UNIVERSAL, directory / UNIVERSAL)
    return losses


def stock_resume(case: Case, tp: int, dp: int, directory: Path) -> None:
    """DeepSpeed alone loads `directory`, has the right values everywhere, and can train on."""

    def body() -> None:
        engine = case.engine(tp, resuming=True)
        engine.load_checkpoint(str(directory))
        assert "load_checkpoint" not in vars(engine)  # nothing of ours is here
        case.assert_holds(engine, directory / UNIVERSAL)
        train(engine, case.batches(BEFORE, BEFORE + 1))

    run_ranks(body, tp * dp)


def gpt_case(**model: Any) -> Case:
    return Case(lambda tp: gpt.build_gpt(tp, **model), gpt.shard, gpt.gpt_batches)


def llama_case(hidden: int, intermediate: int, *, heads: int, key_value_heads: int, **more: Any) -> Case:
    """A llama of one layer and 101 words for AutoTP; ``more`` goes to its configuration."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM  # here, so that no rank has to

    from tests.support.autotp import build as with_loss

    config = LlamaConfig(
        vocab_size=101,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        **more,
    )

    def build(tp: int) -> tuple[nn.Module, Any]:
        return with_loss((LlamaForCausalLM, config)), None

    # DeepSpeed's own optimizer: a client's would have to follow the parameters that AutoTP replaces.
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    return Case(build, gpt.shard, gpt.gpt_batches, info=lambda tp: {}, optimizer=optimizer)
