# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory appears whole or not at all, whatever happens to its writer."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megads_ucp.errors import StorageError
from megads_ucp.storage import (
    MANIFEST,
    FileRecord,
    Staging,
    directories_of,
    frame,
    read_latest,
    read_manifest,
    share,
    to_read,
    verify_file,
    write_manifest,
)
from megads_ucp.storage.durable import write_latest
from megads_ucp.storage.leftovers import leftovers
from megads_ucp.storage.staging import rename_exchange
from tests.support.children import exit_code, run_child, start_child
from tests.support.exports import cleared, left_by_a_killed_job
from tests.support.manifests import manifest
from tests.support.tensor_files import write_file

NAMES = ("zero/a.weight/fp32.pt", "zero/b.bias/fp32.pt")


def export(target: Path, run_id: str, value: float, latest: Path | None, exchange=None) -> None:
    """A whole export in which every element of every tensor is ``value``."""
    staging = Staging.create(target, run_id)
    staging.make_directories(NAMES)
    records = {}
    for name in NAMES:
        framed = frame((1000,), torch.float32, {"cat_dim": 0})
        extent = write_file(staging.path(name), framed, torch.full((1000,), value), root=staging.directory)
        records[extent.path] = FileRecord.of_tensor(framed, [extent])
    write_manifest(staging.directory, manifest(run_id=run_id, files=records))
    staging.settle({name: record.nbytes for name, record in records.items()}, directories_of(NAMES))
    staging.commit(latest, exchange=exchange)


def begun(target: Path, run_id: str) -> Staging:
    """An export with one file."""
    staging = Staging.create(target, run_id)
    staging.make_directories(["zero/w/fp32.pt"])
    write_file(staging.path("zero/w/fp32.pt"), frame((3,), torch.float32, {}), torch.zeros(3))
    return staging


def value_of(target: Path) -> float:
    """The value of a complete export, checked file by file."""
    records = list(read_manifest(target).files.values())
    for record in records:
        verify_file(target / record.path, record)
    (value,) = {torch.load(target / record.path)["param"].unique().item() for record in records}
    files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert files == {MANIFEST, *(record.path for record in records)}
    return value


def entries(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


# ---- without accidents


@pytest.mark.parametrize("tag", ["global_step5", "eval/global_step5", "a b*[é]"])
def test_a_committed_export_has_its_name_and_latest_names_it(tmp_path, tag):
    latest = tmp_path / "latest_universal"
    export(tmp_path / f"{tag}_universal", "r1", 1.0, latest)
    assert latest.read_text() == f"{tag}_universal"
    assert value_of(tmp_path / latest.read_text()) == 1.0
    assert entries(tmp_path) == sorted([tag.split("/")[0] + ("" if "/" in tag else "_universal"), "latest_universal"])
    assert leftovers(tmp_path / f"{tag}_universal") == {}


def test_a_relative_target_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(Path("save/step1_universal"), "r1", 1.0, Path("save/latest_universal"))
    assert entries(tmp_path / "save") == ["latest_universal", "step1_universal"]


def test_latest_is_left_alone_if_it_is_not_given(tmp_path):
    export(tmp_path / "x_universal", "r1", 1.0, None)
    assert entries(tmp_path) == ["x_universal"]


def test_latest_is_read_as_it_was_written(tmp_path):
    latest = tmp_path / "latest_universal"
    assert read_latest(latest) is None
    write_latest(latest, "eval/a b_universal", "r1")
    assert read_latest(latest) == "eval/a b_universal"
    latest.write_text("step1_universal\n")  # as an editor leaves it
    assert read_latest(latest) == "step1_universal"


@pytest.mark.parametrize("exchange", [None, lambda a, b: False], ids=["exchange", "two renames"])
def test_a_later_export_replaces_an_older_one_of_the_same_name(tmp_path, exchange):
    target, latest = tmp_path / "x_universal", tmp_path / "latest_universal"
    export(target, "r1", 1.0, latest)
    (target / "only_in_the_old_one").touch()
    (target / "only_in_the_old_one").unlink()
    export(target, "r2", 2.0, latest, exchange)
    assert value_of(target) == 2.0
    assert entries(tmp_path) == ["latest_universal", "x_universal"]


def test_an_export_is_as_large_as_its_tensors(tmp_path):
    staging = Staging.create(tmp_path / "x_universal", "r1")
    staging.make_directories(["zero/w/fp32.pt"])
    framed = frame((1 << 20,), torch.float32, {})
    write_file(staging.path("zero/w/fp32.pt"), framed, torch.zeros(1 << 20))
    staging.commit(tmp_path / "latest_universal")
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 1.01 * framed.payload_bytes


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_directories_and_latest_follow_the_umask(tmp_path, umask):
    previous = os.umask(umask)
    try:
        export(tmp_path / "x_universal", "r1", 1.0, tmp_path / "latest_universal")
    finally:
        os.umask(previous)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask


def test_other_ranks_join_what_one_rank_created(tmp_path):
    created = Staging.create(tmp_path / "x_universal", "r1")
    assert Staging.join(tmp_path / "x_universal", "r1") == created


def test_a_rank_that_does_not_see_save_dir_says_so(tmp_path):
    Staging.create(tmp_path / "node0" / "x_universal", "r1")
    for target, run_id in ((tmp_path / "node1" / "x_universal", "r1"), (tmp_path / "node0" / "x_universal", "r2")):
        with pytest.raises(StorageError, match=r"does not see .*x_universal.*all ranks share"):
            Staging.join(target, run_id, patience_s=0.05)


def test_discard_leaves_nothing_and_may_be_called_twice(tmp_path):
    staging = begun(tmp_path / "x_universal", "r1")
    staging.discard()
    staging.discard()
    assert entries(tmp_path) == []


def test_creating_clears_what_killed_exports_of_the_same_target_left_and_nothing_else(tmp_path):
    left_by_a_killed_job(tmp_path / "x_universal", "r1")
    other = Staging.create(tmp_path / "x_universal.staging-y", "r1")
    another = Staging.create(tmp_path / "xx_universal", "r1")
    fresh = Staging.create(tmp_path / "x_universal", "r2")
    claims = ".x_universal.staging-y.writer-r1", ".xx_universal.writer-r1", ".x_universal.writer-r2"
    staged = [staging.directory.name for staging in (other, another, fresh)]
    assert entries(tmp_path) == sorted([*claims, *staged])


@pytest.mark.parametrize("relative", ["../x", "/x", "a/../../x", ""])
def test_a_path_outside_the_checkpoint_is_refused(tmp_path, relative):
    staging = Staging.create(tmp_path / "x_universal", "r1")
    for reach in (
        lambda: staging.path(relative),
        lambda: staging.make_directories([relative]),
        lambda: staging.settle({relative: 0}, []),
        lambda: staging.settle({}, [relative]),
    ):
        with pytest.raises(StorageError, match="no path within"):
            reach()


def test_a_path_makes_nothing(tmp_path):
    staging = Staging.create(tmp_path / "x_universal", "r1")
    assert staging.path("zero/w/fp32.pt") == staging.directory / "zero" / "w" / "fp32.pt"
    assert entries(staging.directory) == []


def test_ranks_make_directories_that_others_make_too(tmp_path):
    staging = Staging.create(tmp_path / "x_universal", "r1")
    names = [f"zero/block/{index}/fp32.pt" for index in range(300)]
    children = [start_child(partial(staging.make_directories, names)) for _ in range(4)]
    assert [exit_code(child) for child in children] == [0] * 4
    assert len(list((staging.directory / "zero" / "block").iterdir())) == 300


def test_the_directories_of_files_are_all_that_lie_on_the_way_outer_ones_first():
    names = ["zero/b/c/fp32.pt", "zero/b/c/exp_avg.pt", "zero/a/fp32.pt", "mp_rank_00_model_states.pt"]
    assert directories_of(names) == ["zero", "zero/a", "zero/b", "zero/b/c"]


@given(items=st.lists(st.integers()), world=st.integers(1, 50))
def test_all_shares_together_are_everything_in_order_and_equal_up_to_one(items, world):
    shares = [share(items, rank, world) for rank in range(world)]
    assert [item for own in shares for item in own] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_run_id_cannot_reach_elsewhere(tmp_path):
    with pytest.raises(ValueError, match="run id"):
        Staging(tmp_path / "x_universal", "../r1")


def test_exchange_swaps_two_directories(tmp_path):
    for name in "ab":
        (tmp_path / name / f"was_{name}").mkdir(parents=True)
    assert rename_exchange(tmp_path / "a", tmp_path / "b")
    assert (entries(tmp_path / "a"), entries(tmp_path / "b")) == (["was_b"], ["was_a"])
    with pytest.raises(FileNotFoundError):
        rename_exchange(tmp_path / "a", tmp_path / "missing")


# ---- accidents


def test_a_file_in_the_place_of_a_directory_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot create .*file/.*Not a directory|cannot create .*file/.*in the way"):
        Staging.create(tmp_path / "file" / "x_universal", "r1")
    with pytest.raises(StorageError, match=r"file: a file of that name is in the way"):
        Staging.create(tmp_path / "file", "r1")
    assert entries(tmp_path) == ["file"]
    staging = Staging.create(tmp_path / "x_universal", "r1")
    (staging.directory / "zero").touch()
    with pytest.raises(StorageError, match=r"zero: .*in the way"):
        staging.make_directories(["zero/w/fp32.pt"])


def test_a_read_only_directory_is_reported(tmp_path):
    (tmp_path / "save").mkdir(mode=0o555)

    def body() -> None:
        if os.getuid() == 0:  # root may write anywhere
            os.setuid(65534)
        with pytest.raises(StorageError, match=r"cannot create .*save/.*Permission denied"):
            Staging.create(tmp_path / "save" / "x_universal", "r1")

    assert run_child(body) == 0


def test_a_directory_that_vanishes_is_reported_and_not_started_anew(tmp_path):
    export(tmp_path / "x_universal", "r1", 1.0, tmp_path / "latest_universal")
    staging = Staging.create(tmp_path / "x_universal", "r2")
    staging.discard()  # as a rotation policy might
    with pytest.raises(StorageError, match="deleted meanwhile"):
        staging.make_directories(["zero/w/fp32.pt"])
    for complete in (lambda: staging.settle({}, []), lambda: staging.commit(tmp_path / "latest_universal")):
        with pytest.raises(StorageError, match=r"staging-r2 vanished"):
            complete()
    assert value_of(tmp_path / "x_universal") == 1.0


def test_files_and_directories_that_are_not_as_they_were_written_are_reported(tmp_path):
    staging = begun(tmp_path / "x_universal", "r1")
    size = os.stat(staging.path("zero/w/fp32.pt")).st_size
    staging.settle({"zero/w/fp32.pt": size}, ["zero", "zero/w"])
    with pytest.raises(StorageError, match=rf"zero/w/fp32\.pt has {size} bytes instead of {size + 1}"):
        staging.settle({"zero/w/fp32.pt": size + 1}, [])
    with pytest.raises(StorageError, match=r"cannot complete .*zero/b/fp32\.pt: .*deleted meanwhile"):
        staging.settle({"zero/w/fp32.pt": size, "zero/b/fp32.pt": size}, [])
    with pytest.raises(StorageError, match=r"cannot make durable .*zero/b: .*deleted meanwhile"):
        staging.settle({}, ["zero", "zero/b"])


def test_a_latest_file_that_cannot_be_replaced_is_reported(tmp_path):
    (tmp_path / "latest_universal" / "directory").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"cannot write .*latest_universal"):
        export(tmp_path / "x_universal", "r1", 1.0, tmp_path / "latest_universal")
    assert value_of(tmp_path / "x_universal") == 1.0
    assert entries(tmp_path) == ["latest_universal", "x_universal"]


def test_an_export_that_is_given_up_leaves_the_older_one_as_it_was(tmp_path):
    export(tmp_path / "x_universal", "r1", 1.0, tmp_path / "latest_universal")
    Staging.create(tmp_path / "x_universal", "r2", tmp_path / "latest_universal").discard()
    assert value_of(tmp_path / "x_universal") == 1.0
    assert entries(tmp_path) == ["latest_universal", "x_universal"]


FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def killed_at_event(number: int, body: Callable[[], object]) -> bool:
    """Runs ``body`` in a child that is killed just before its ``number``-th use of the file system; False if it got by.

    Python announces these calls to audit hooks, so that nothing needs to be replaced to stop the child between any two.
    """

    def child() -> None:
        seen = 0

        def hook(event: str, args: object) -> None:
            nonlocal seen
            if event in FILE_EVENTS:
                seen += 1
                if seen > number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        body()

    code = run_child(child)
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tag", "exchange"),
    [("step2", None), ("step1", None), ("step1", lambda a, b: False)],
    ids=["new name", "exchange", "two renames"],
)
def test_kill_9_at_any_moment_of_an_export_leaves_a_complete_checkpoint(tmp_path, tag, exchange):
    export(tmp_path / "before" / "step1_universal", "old", 1.0, tmp_path / "before" / "latest_universal")
    outcomes = []
    for number in range(1000):
        save = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", save)
        latest, target = save / "latest_universal", save / f"{tag}_universal"
        killed = killed_at_event(number, partial(export, target, "new", 2.0, latest, exchange))

        value_of(to_read(save / latest.read_text(), patience_s=0.0))  # at any moment a reader finds one
        cleared(target, latest)
        outcomes.append((latest.read_text(), value_of(save / latest.read_text())))
        assert set(entries(save)) <= {"latest_universal", "step1_universal", target.name}
        assert all(value_of(directory) in (1.0, 2.0) for directory in save.glob("step*"))
        if not killed:
            break

    assert outcomes[0] == ("step1_universal", 1.0)
    assert outcomes[-1] == (target.name, 2.0)
    assert outcomes == sorted(outcomes)  # once the new one is there, no later crash brings the old one back
    export(target, "next", 3.0, latest)
    assert value_of(target) == 3.0


def test_a_killed_writer_of_latest_leaves_the_old_content(tmp_path):
    latest = tmp_path / "latest_universal"
    write_latest(latest, "old", "r0")
    for number in range(100):
        killed = killed_at_event(number, partial(write_latest, latest, "new", "r1"))
        assert latest.read_text() in ("old", "new")
        if not killed:
            break
    assert latest.read_text() == "new" and entries(tmp_path) == ["latest_universal"]
