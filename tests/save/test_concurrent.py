# SPDX-License-Identifier: Apache-2.0
"""Several writers, or a reader and a writer, at the same place; and tags that meet what is there."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megads_ucp.errors import StorageError
from megads_ucp.storage import Staging, to_read
from tests.support.accidents import assert_complete, before, entries, install, reports, trained
from tests.support.children import exit_code, start_child
from tests.support.models import MLP, initialize, mlp_batches, train
from tests.support.ranks import run_ranks
from tests.support.runs import contents

pytestmark = pytest.mark.slow

LATEST = "latest_universal"
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def exported(save: Path, tag: str = "x") -> list[dict[str, torch.Tensor]]:
    """Exports from two ranks; returns what each holds."""

    def body() -> dict[str, torch.Tensor]:
        install(strict=True)
        engine = trained()
        engine.save_checkpoint(str(save), tag=tag)
        return contents(engine)

    return run_ranks(body, 2)


def tree(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Every name below a directory, with inode, size and time of change."""
    found = {path: path.lstat() for path in sorted(directory.rglob("*"))}
    return {str(path): (seen.st_ino, seen.st_size, seen.st_mtime_ns) for path, seen in found.items()}


@contextmanager
def read_only(directory: Path, at: Path) -> Iterator[Path]:
    """A directory at another place where nothing can be written. Skips the test where one cannot be mounted."""
    at.mkdir()
    if subprocess.run(["mount", "--bind", directory, at], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", at], check=True)
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def loading(directory: Path, tag: str | None) -> tuple[dict[str, torch.Tensor], list[str], str]:
    """On a rank: what it holds after a universal load into other values, the warnings, and the path that was loaded."""
    install(enabled=False)
    engine = initialize(MLP(), "bf16_optimizer", config=UNIVERSAL)
    with reports() as messages:
        path, _ = engine.load_checkpoint(str(directory), tag=tag)
    return contents(engine), messages, path


# ---- a reader changes nothing


def test_a_load_of_a_tag_that_is_being_exported_for_the_first_time_leaves_the_writer_alone(tmp_path):
    staging = Staging.create(tmp_path / "x_universal", "r1")
    staging.make_directories(["zero/w/fp32.pt"])
    staging.path("zero/w/fp32.pt").touch()
    there = tree(tmp_path)

    def body() -> None:
        with pytest.raises(StorageError, match="x_universal"):
            loading(tmp_path, "x_universal")

    run_ranks(body, 2)
    assert tree(tmp_path) == there
    staging.commit(tmp_path / LATEST)


@pytest.mark.parametrize("tag", [None, "x_universal"])
def test_what_a_killed_commit_has_set_aside_is_loaded_from_a_read_only_file_system(tmp_path, tag):
    saved = exported(tmp_path / "save")
    aside = tmp_path / "save" / ".x_universal.replaced-r1"
    (tmp_path / "save" / "x_universal").rename(aside)
    there = tree(tmp_path / "save")
    with read_only(tmp_path / "save", tmp_path / "mounted") as mounted:
        loaded = run_ranks(partial(loading, mounted, tag), 2)
    for rank, (values, messages, path) in enumerate(loaded):
        assert all(torch.equal(values[name], value) for name, value in saved[rank].items())
        assert Path(path).parent.name == aside.name
        assert (rank == 0) == any("had set aside" in message for message in messages)
    assert tree(tmp_path / "save") == there


# ---- several writers


def job(save: Path, tag: str, steps: int, result: Path) -> None:
    """A job of one rank that exports again and again; the last word of each export goes into ``result``."""

    def body() -> list[str]:
        install(strict=True)
        engine = trained(steps=steps)
        said = []
        for _ in range(8):
            try:
                engine.save_checkpoint(str(save), tag=tag)
                said.append("")
            except StorageError as error:
                said.append(str(error))
        return said

    (said,) = run_ranks(body, 1)
    result.write_text("\n".join(said))


@pytest.mark.parametrize("tags", [("x", "x"), ("x", "y")], ids=["same tag", "two tags"])
def test_two_jobs_export_whole_or_say_that_another_job_is_writing(tmp_path, tags):
    save, results = tmp_path / "save", [tmp_path / "0", tmp_path / "1"]
    save.mkdir()
    jobs = [start_child(partial(job, save, tag, 1 + i, results[i])) for i, tag in enumerate(tags)]
    assert [exit_code(process) for process in jobs] == [0, 0]
    said = [line for result in results for line in result.read_text().splitlines()]
    assert all(line == "" or "another job or thread is writing" in line for line in said)
    if len(set(tags)) == 2:
        assert not any(said)
    assert entries(save) == sorted(["latest", LATEST, *{*tags, *(f"{tag}_universal" for tag in tags)}])
    for tag in tags:
        assert_complete(save / f"{tag}_universal")


def test_threads_that_save_with_one_engine_take_turns(tmp_path):
    def body() -> list[BaseException]:
        install(strict=True)
        engine = trained()
        failures: list[BaseException] = []

        def save(tag: str) -> None:
            try:
                engine.save_checkpoint(str(tmp_path), tag=tag)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=save, args=(tag,)) for tag in ("a", "b", "a", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failures

    assert run_ranks(body, 1) == [[]]
    assert entries(tmp_path) == sorted(["latest", LATEST, *"abc", *(f"{tag}_universal" for tag in "abc")])
    for tag in "abc":
        assert_complete(tmp_path / f"{tag}_universal")


def test_an_export_waits_for_no_writer_and_says_which_one_there_is(tmp_path):
    other = Staging.create(tmp_path / "x_universal", "other")

    def body() -> list[str]:
        install()
        engine = trained()
        with reports() as messages:
            engine.save_checkpoint(str(tmp_path), tag="x")
        return messages

    (message,) = run_ranks(body, 2)[0]
    assert f"another job or thread is writing {tmp_path}/x_universal (host " in message
    assert f"process {os.getpid()}, since" in message and "rotation" not in message
    other.commit(tmp_path / LATEST)


# ---- tags


def refused(save: Path, tag: str, **settings: Any) -> str:
    """On a rank: what a save of that tag says, having trained a step more than the checkpoints that are there."""
    install(**settings)
    engine = trained(steps=2)
    with pytest.raises(StorageError) as raised:
        engine.save_checkpoint(str(save), tag=tag)
    return str(raised.value)


@pytest.mark.parametrize("tag", ["x_universal", "x_universal/more"])
def test_a_regular_checkpoint_is_not_saved_into_a_universal_one(tmp_path, tag):
    exported(tmp_path)
    there = tree(tmp_path)
    messages = run_ranks(partial(refused, tmp_path, tag), 2)
    assert len(set(messages)) == 1 and f"{tmp_path}/x_universal, which is a universal checkpoint" in messages[0]
    assert tree(tmp_path) == there


def test_an_export_does_not_replace_a_regular_checkpoint(tmp_path):
    exported(tmp_path, "x_universal")
    regular = tree(tmp_path / "x_universal")
    messages = run_ranks(partial(refused, tmp_path, "x", strict=True), 2)
    assert len(set(messages)) == 1 and "no universal checkpoint (the regular one of tag x_universal?)" in messages[0]
    assert tree(tmp_path / "x_universal") == regular
    assert (tmp_path / "latest").read_text() == "x"  # the regular one of the refused export is written
    assert_complete(tmp_path / "x_universal_universal")


@pytest.mark.parametrize("tag", ["t" * 210, "t" * 245, "ä" * 122, "eval/t", "{elsewhere}/abs"])
def test_tags_that_deepspeed_takes_work(tmp_path, tag):
    tag = tag.format(elsewhere=tmp_path / "elsewhere")
    saved = exported(tmp_path / "save", tag)
    assert (tmp_path / "save" / LATEST).read_text() == f"{tag}_universal"
    assert_complete(tmp_path / "save" / f"{tag}_universal")
    for loaded in (run_ranks(partial(loading, tmp_path / "save", name), 2) for name in (None, f"{tag}_universal")):
        for rank, (values, _, _) in enumerate(loaded):
            assert all(torch.equal(values[name], value) for name, value in saved[rank].items())


def test_a_tag_that_leaves_no_room_for_the_name_of_the_export_is_refused_on_all_ranks_alike(tmp_path):
    tag = "t" * 246
    messages = run_ranks(partial(refused, tmp_path, tag, strict=True), 2)
    assert len(set(messages)) == 1
    assert "has 256 bytes, the file system takes names of 255. Save with a tag that leaves 10 bytes" in messages[0]
    assert entries(tmp_path) == ["latest", tag]


# ---- names


class Named(MLP):
    """Has parameters by any name."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.more = nn.ParameterDict({name: nn.Parameter(torch.ones(5)) for name in names})

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs, targets) * sum(value.sum() for value in self.more.values())


@pytest.mark.parametrize("names", [("t/",), ("a/b", "a//b"), ("n" * 256,)])
def test_parameters_that_cannot_have_files_are_refused_before_anything_is_staged(tmp_path, names):
    def body() -> str:
        install(strict=True)
        engine = initialize(Named(names), "bf16_optimizer")
        train(engine, mlp_batches(0, 1))
        before("staging-", lambda: os._exit(3))
        with pytest.raises(StorageError) as raised:
            engine.save_checkpoint(str(tmp_path), tag="x")
        return str(raised.value)

    messages = run_ranks(body, 2)
    assert len(set(messages)) == 1
    assert f"parameter 'more.{names[-1]}'" in messages[0] and "another name" in messages[0]
    assert entries(tmp_path) == ["latest", "x"]
    assert to_read(tmp_path / "x_universal", patience_s=0.0) == tmp_path / "x_universal"
