# SPDX-License-Identifier: Apache-2.0
"""Loads of Megatron-DeepSpeed's that find nothing, or something else: a forgotten flag, a first start, a wrong tag."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mds import CHECKOUT, SAVED, Host, Job, Topology, losses
from tests.support.ranks import RankError

pytestmark = pytest.mark.slow

UNIVERSAL = f"global_step{SAVED}_universal"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if CHECKOUT not in os.environ:
        pytest.skip(f"set {CHECKOUT} to a checkout of Megatron-DeepSpeed")
    with Host(Path(os.environ[CHECKOUT]), tmp_path_factory.mktemp("upstream")) as running:
        yield running


@pytest.fixture(scope="module")
def saved(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    host.run(Job(Topology(dp=2), save=folder, steps=SAVED))
    return folder


def refusal(host: Host, *arguments: str) -> str:
    with pytest.raises(RankError) as caught:
        host.run(Job(Topology(dp=2), more=arguments))
    return str(caught.value)


def test_a_forgotten_flag_is_named(host: Host, saved: Path) -> None:
    message = refusal(host, "--load", str(saved), "--load-tag", UNIVERSAL)
    assert f"{UNIVERSAL} is a universal checkpoint, and this run loads regular ones: add --universal-ch" in message


def test_a_tag_that_is_not_there(host: Host, saved: Path) -> None:
    message = refusal(host, "--load", str(saved), "--universal-checkpoint", "--load-tag", "global_step7_universal")
    assert "global_step7_universal does not exist" in message
    assert f"{UNIVERSAL} (step {SAVED}, " in message and f"Name one by --load-tag {UNIVERSAL}" in message


def test_a_chain_of_jobs_with_one_command_line(host: Host, tmp_path: Path) -> None:
    """The first one starts from scratch, as Megatron does; the next ones resume."""
    flags = ("--load", str(tmp_path), "--universal-checkpoint")
    first = host.run(Job(Topology(dp=2), save=tmp_path, more=flags))
    assert {trace.iteration for trace in first} == {0}
    assert [len(trace.warnings) for trace in first] == [1, 0] and "starts from scratch" in first[0].warnings[0]

    (tmp_path / "latest_universal").write_text(UNIVERSAL)  # as if it had died after its first save
    second = host.run(Job(Topology(tp=2), more=flags))
    assert {trace.iteration for trace in second} == {SAVED}
    assert [trace.warnings for trace in second] == [[], []]
    assert losses(second) == pytest.approx(losses(first)[SAVED:], rel=1e-5)


def test_a_first_start_that_must_have_a_checkpoint_stops(host: Host, tmp_path: Path) -> None:
    flags = ("--load", str(tmp_path / "nowhere"), "--universal-checkpoint", "--exit-on-missing-checkpoint")
    message = refusal(host, *flags)
    assert "nowhere holds no checkpoint, and --exit-on-missing-checkpoint is set" in message


def test_regular_checkpoints_alone_are_no_first_start(host: Host, tmp_path: Path) -> None:
    host.run(Job(Topology(dp=2), save=tmp_path, steps=SAVED, plugin=False))
    message = refusal(host, "--load", str(tmp_path), "--universal-checkpoint")
    assert "drop --universal-checkpoint to load the regular checkpoint" in message
