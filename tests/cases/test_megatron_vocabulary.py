# SPDX-License-Identifier: Apache-2.0
"""Megatron-DeepSpeed's vocabularies, whose padded size goes by TP: resumes after enough steps to train the padding.

Needs a checkout of deepspeedai/Megatron-DeepSpeed, named by MEGATRON_DEEPSPEED_PATH.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mds import CHECKOUT, UNTIED, Host, Job, Model, Topology, losses

pytestmark = pytest.mark.slow

ROWS = {1: 160, 2: 192, 4: 256}
"""Of the embedding, by TP degree: NullTokenizer makes 130 words of 129, and 32 times the degree divides the rows."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if CHECKOUT not in os.environ:
        pytest.skip(f"set {CHECKOUT} to a checkout of Megatron-DeepSpeed")
    with Host(Path(os.environ[CHECKOUT]), tmp_path_factory.mktemp("vocabulary")) as host:
        yield host


def job(topology: Topology, model: Model, saved: int, *, save: Path | None = None, load: Path | None = None) -> Job:
    """A run that saves after so many steps, and goes on for 5."""
    flags = {
        "vocab-size": 129,
        "make-vocab-size-divisible-by": 32,
        "save-interval": saved,
        "lr": 1e-2,
        "lr-decay-iters": saved + 5,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return Job(
        topology, model, tag=f"global_step{saved}_universal", steps=saved + 5, more=tuple(words), save=save, load=load
    )


def differences(host: Host, model: Model, saved: int, targets: list[Topology], folder: Path) -> list[float]:
    """How far the losses after a resume are from those of the run that went on, relative, at each target."""
    source = losses(host.run(job(Topology(tp=2, dp=2), model, saved, save=folder)))[saved:]
    found = []
    for target in targets:
        resumed = host.run(job(target, model, saved, load=folder))
        assert not [text for text in resumed[0].warnings if "softmax" in text]
        found.append(max(abs(one / other - 1) for one, other in zip(losses(resumed), source, strict=True)))
        print(f"{target} ({ROWS[target.tp]} rows): {found[-1]:.1e}")
    return found


@pytest.mark.parametrize("model", [Model(), Model(UNTIED), Model(pipe=True)], ids=["tied", "untied", "pipe"])
def test_a_run_goes_on_exactly_where_its_vocabulary_is_padded_alike(host: Host, model: Model, tmp_path: Path) -> None:
    assert differences(host, model, 50, [Topology(tp=2, dp=2)], tmp_path) == [0.0]
