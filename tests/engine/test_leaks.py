# SPDX-License-Identifier: Apache-2.0
"""What an engine costs its process ends with the engine: file descriptors, threads, process groups."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

import megads_ucp
from tests.support.accidents import install
from tests.support.models import MLP, initialize, mlp_batches, train
from tests.support.ranks import run_ranks
from tests.support.runs import LOADING

pytestmark = pytest.mark.slow

ENGINES = 10


def held() -> dict[str, int]:
    """By this process."""
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
    }


def use(directory: Path, kind: str) -> Any:
    """An engine that has resumed, if there is anything to resume from, and exported."""
    engine = initialize(MLP(), kind, config=LOADING)
    train(engine, mlp_batches(0, 1))
    if (directory / "latest_universal").exists():
        engine.load_checkpoint(str(directory))
    dist.barrier()
    engine.save_checkpoint(str(directory), tag="x")
    return engine


def destroy(engine: Any) -> None:
    engine.destroy()


def drop(engine: Any) -> None:
    """Leave it to the garbage collector."""


def uninstall(engine: Any) -> None:
    megads_ucp.uninstall()


# DeepSpeed's own hooks keep an engine with DeepSpeedZeroOptimizer alive until it is destroyed.
@pytest.mark.parametrize(("end", "kind"), [(destroy, "fp32"), (drop, "bf16_optimizer"), (uninstall, "fp32")])
def test_engines_leave_nothing_behind(tmp_path, end: Callable[[Any], None], kind: str):
    def body() -> list[dict[str, int]]:
        found = []
        for _ in range(ENGINES):
            install(strict=True)
            engine = use(tmp_path, kind)
            end(engine)
            del engine
            gc.collect()
            found.append(held())
        return found

    for rank in run_ranks(body, 2):
        assert rank[1:] == [rank[1]] * (ENGINES - 1)


def test_a_destroyed_engine_has_closed_its_process_group_and_an_aborted_one_is_not_kept(tmp_path):
    def body() -> None:
        install(strict=True)
        engine = initialize(MLP(), "fp32")
        train(engine, mlp_batches(0, 1))
        engine.save_checkpoint(str(tmp_path), tag="first")
        before = held()
        attachment = vars(engine)["_megads_ucp_attachment"]
        dist.barrier()
        if dist.get_rank() == 1:
            attachment.context.give_up(ValueError("on this rank alone"))
        dist.barrier()
        engine.save_checkpoint(str(tmp_path), tag="second")
        assert all(number <= before[kind] for kind, number in held().items())  # a thread may have been ending
        engine.destroy()
        assert held()["process groups"] == before["process groups"] - 1
        engine.destroy()  # again, as the garbage collector will
        assert type(engine).destroy is DeepSpeedEngine.destroy

    run_ranks(body, 2)


@pytest.mark.parametrize("end", [destroy, drop])
def test_destroying_does_what_deepspeeds_own_does_also_if_the_garbage_collector_does_it(end: Callable[[Any], None]):
    def body() -> None:
        calls = []

        class Counting(DeepSpeedEngine):
            def destroy(self) -> None:
                calls.append(1)
                super().destroy()

        install(strict=True)
        engine = initialize(MLP(), "bf16_optimizer")
        engine.__class__ = Counting
        gone = weakref.ref(engine)
        end(engine)
        assert len(calls) == (end is destroy)
        del engine
        gc.collect()
        assert gone() is None
        assert len(calls) == (2 if end is destroy else 1)

    run_ranks(body, 1)
