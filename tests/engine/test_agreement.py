# SPDX-License-Identifier: Apache-2.0
"""Errors that several ranks have: their class, which ranks say them, and what differs from rank to rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist

from megads_ucp import errors
from megads_ucp.comm.channel import Channel
from megads_ucp.errors import (
    Disagreement,
    LayoutError,
    StorageError,
    UniversalCheckpointError,
    UnsupportedError,
)
from tests.support.accidents import assert_complete, before, entries, install, reports
from tests.support.models import MLP, initialize, mlp_batches, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow


def trained(**config: Any) -> Any:
    engine = initialize(MLP(), "fp32", config=config)
    train(engine, mlp_batches(0, 1))
    return engine


# ---------------------------------------------------------------------------------------------------- classes of errors


class Damaged(StorageError):
    """Not documented: a subclass that only a module of the package knows."""


FAILURES: dict[str, tuple[list[Exception | None], type[UniversalCheckpointError]]] = {
    "one rank": ([None, StorageError("a"), None], StorageError),
    "all ranks alike": ([UnsupportedError("a"), UnsupportedError("a"), UnsupportedError("a")], UnsupportedError),
    "one class, two reasons": ([None, LayoutError("a"), LayoutError("b")], LayoutError),
    "a subclass": ([None, Damaged("a"), StorageError("b")], StorageError),
    "two classes": ([None, LayoutError("a"), StorageError("b")], Disagreement),
    "a foreign one": ([None, OSError("a"), None], Disagreement),
    "a foreign one beside ours": ([None, OSError("a"), StorageError("b")], Disagreement),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_error_keeps_its_class_on_all_ranks(case):
    failures, expected = FAILURES[case]

    def body() -> tuple[str, bool]:
        channel = Channel(1.0)
        own = failures[channel.rank]
        with pytest.raises(UniversalCheckpointError) as raised, channel.agreed("opening"):
            if own is not None:
                raise own
        assert type(raised.value) is expected
        assert raised.value.__cause__ is own
        return str(raised.value), channel.rank in (raised.value.spokesmen or ())

    found = run_ranks(body, 3)
    assert {message for message, _ in found} == {found[0][0]}
    for rank, failure in enumerate(failures):
        first = failure is not None and [str(f) for f in failures].index(str(failure)) == rank
        assert found[rank][1] == (rank == 0 or first)
        assert failure is None or str(failure) in found[0][0]


def test_every_documented_error_is_one_that_agreement_can_raise():
    documented = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)]
    for cls in documented:
        assert str(cls("opening failed")) == "opening failed"


def test_what_cannot_be_exported_can_be_caught_by_its_class(tmp_path):
    def body() -> None:
        install(strict=True)
        engine = trained()
        if dist.get_rank() == 0:
            (tmp_path / "x_universal").write_text("a file in the way")
        with pytest.raises(StorageError, match="x_universal"):
            engine.save_checkpoint(str(tmp_path), tag="x")

    run_ranks(body, 2)


def test_a_failure_is_logged_on_rank_0_and_where_it_happened(tmp_path):
    def full() -> None:
        raise OSError("the disk is full")

    def body() -> list[str]:
        install()
        engine = trained()
        if dist.get_rank() == 2:
            before(r"open .*layers.*\.pt", full)
        with reports() as messages:
            engine.save_checkpoint(str(tmp_path), tag="x")
        return messages

    found = run_ranks(body, 4)
    assert [len(messages) for messages in found] == [1, 0, 1, 0]
    assert found[0] == found[2]
    assert "rank 2: " in found[0][0] and "the disk is full" in found[0][0]
    assert entries(tmp_path) == ["latest", "x"]


def test_what_every_rank_is_refused_is_logged_on_rank_0_alone(tmp_path):
    def body() -> tuple[list[str], list[str]]:
        install()
        with reports() as early:
            engine = trained(zero_optimization={"stage": 0})
        with reports() as late:
            engine.save_checkpoint(str(tmp_path), tag="x")
            engine.save_checkpoint(str(tmp_path), tag="y")
        return early, late

    found = run_ranks(body, 3)
    assert found[1:] == [([], [])] * 2
    early, late = found[0]
    assert len(early) == 1 and "ZeRO stage 0" in early[0] and '"universal_checkpoint_export": false' in early[0]
    assert len(late) == 2 and all("ranks 0-2: ZeRO stage 0" in message for message in late)
    assert entries(tmp_path) == ["latest", "x", "y"]


def test_what_cannot_be_exported_is_refused_where_it_is_built_if_the_user_is_strict(tmp_path):
    def body() -> None:
        install(strict=True)
        with pytest.raises(UnsupportedError, match=r"rank .*: ZeRO stage 0 .*stage to 1"):
            trained(zero_optimization={"stage": 0})
        unexported = {"zero_optimization": {"stage": 0}, "universal_checkpoint_export": False}
        trained(**unexported).save_checkpoint(str(tmp_path), tag="x")
        evaluated = {"train_micro_batch_size_per_gpu": 1}  # a reference model, under the flags of the trained one
        assert deepspeed.initialize(model=MLP(), config=evaluated, dist_init_required=False)[0].optimizer is None

    run_ranks(body, 2)
    assert entries(tmp_path) == ["latest", "x"]


# ------------------------------------------------------------------------------------------ settings that must be equal


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"bucket_mb": 8}, {"bucket_mb": 16}),
        ({"on_drift": "error"}, {"on_drift": "warn"}),
        ({"timeout_minutes": 2.0}, {"timeout_minutes": 3.0}),
    ],
)
def test_settings_that_differ_are_named_with_their_ranks(tmp_path, own, other):
    ((name, value),), ((_, another),) = own.items(), other.items()

    def body() -> None:
        install(strict=True, **(other if dist.get_rank() == 1 else own))
        engine = trained()
        for _ in range(2):
            with pytest.raises(Disagreement, match=f"{name} is {value!r} on ranks 0, 2 and {another!r} on rank 1"):
                engine.save_checkpoint(str(tmp_path), tag="x")

    run_ranks(body, 3)
    assert entries(tmp_path) == ["latest", "x"]


def test_a_resume_checks_the_settings_too(tmp_path):
    def body() -> None:
        install(strict=True)
        trained().save_checkpoint(str(tmp_path), tag="x")
        section = {"universal_checkpoint_export": {"read_together": ("always", "never")[dist.get_rank()]}}
        engine = trained(checkpoint={"load_universal": True}, **section)
        with pytest.raises(Disagreement, match="read_together is 'always' on rank 0 and 'never' on rank 1"):
            engine.load_checkpoint(str(tmp_path))

    run_ranks(body, 2)


def test_an_export_that_only_some_ranks_want_ends_at_once(tmp_path):
    def body() -> list[str]:
        install(enabled=dist.get_rank() > 0)
        engine = trained()
        with reports() as messages:
            engine.save_checkpoint(str(tmp_path), tag="x")
        train(engine, mlp_batches(1, 2))
        return messages

    quiet, *speaking = run_ranks(body, 3)
    assert quiet == []
    assert "enabled is False on rank 0 and True on ranks 1-2" in speaking[0][0]
    assert entries(tmp_path) == ["latest", "x"]


# -------------------------------------------------------------------------------- arguments of a save, equal everywhere


def differing(tmp_path: Path, **different: Any) -> list[Any]:
    def body() -> str:
        install(strict=True)
        engine = trained()
        given = {"save_dir": str(tmp_path / "a"), "tag": "x"}
        if dist.get_rank() == 1:
            given.update(different)
        with pytest.raises(Disagreement) as raised:
            engine.save_checkpoint(**given)
        engine.save_checkpoint(str(tmp_path / "a"), tag="after")
        return str(raised.value)

    return run_ranks(body, 3)


@pytest.mark.parametrize(
    ("different", "named"),
    [
        ({"tag": "y"}, "tag is 'x' on ranks 0, 2 and 'y' on rank 1"),
        ({"tag": None}, "tag is 'x' on ranks 0, 2 and 'global_step1' on rank 1"),
        ({"save_latest": False}, "save_latest is True on ranks 0, 2 and False on rank 1"),
        ({"exclude_frozen_parameters": True}, "exclude_frozen_parameters is False on ranks 0, 2 and True on rank 1"),
    ],
)
def test_an_argument_of_a_save_that_differs_is_named_with_its_ranks(tmp_path, different, named):
    for message in differing(tmp_path, **different):
        assert named in message
    assert_complete(tmp_path / "a" / "after_universal")
    assert not (tmp_path / "a" / "x_universal").exists()


def test_a_directory_that_differs_is_named_with_its_ranks(tmp_path):
    message, *_ = differing(tmp_path, save_dir=str(tmp_path / "b"))
    assert f"save_dir is '{tmp_path / 'a'}' on ranks 0, 2 and '{tmp_path / 'b'}' on rank 1" in message
