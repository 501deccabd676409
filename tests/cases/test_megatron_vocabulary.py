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

SAVED, STEPS = 50, 55
ROWS = {1: 160, 2: 192, 4: 256}
"""Of the embedding, by TP degree: NullTokenizer makes 130 words of 129, and 32 times the degree divides the rows."""

FLAGS = {"vocab-size": 129, "make-vocab-size-divisible-by": 32, "save-interval": SAVED, "lr-decay-iters": STEPS}
MORE = tuple(word for name, value in FLAGS.items() for word in (f"--{name}", str(value)))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if CHECKOUT not in os.environ:
        pytest.skip(f"set {CHECKOUT} to a checkout of Megatron-DeepSpeed")
    with Host(Path(os.environ[CHECKOUT]), tmp_path_factory.mktemp("vocabulary")) as host:
        yield host


def job(topology: Topology, model: Model, **more: Path) -> Job:
    return Job(topology, model, tag=f"global_step{SAVED}_universal", steps=STEPS, more=MORE, **more)


@pytest.mark.parametrize("model", [Model(), Model(UNTIED), Model(pipe=True)], ids=["tied", "untied", "pipe"])
def test_losses_go_on(host: Host, model: Model, tmp_path: Path) -> None:
    """Exactly where the vocabulary is padded alike; within 0.1 per cent where it is not."""
    source = host.run(job(Topology(tp=2, dp=2), model, save=tmp_path))
    expected = losses(source)[SAVED:]

    for target in (Topology(tp=2, dp=2), Topology(tp=1, dp=2), Topology(tp=4, dp=1)):
        resumed = host.run(job(target, model, load=tmp_path))
        found = losses(resumed)
        largest = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
        print(f"{target} ({ROWS[target.tp]} rows): {largest:.1e}, {[text for text in resumed[0].warnings]}")
        assert found == (expected if target.tp == 2 else pytest.approx(expected, rel=1e-3))
        assert not [text for text in resumed[0].warnings if "softmax" in text]
