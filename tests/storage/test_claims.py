# SPDX-License-Identifier: Apache-2.0
"""One writer per target: another one is refused while it lives, and cleared away once it is gone. Readers only read."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megads_ucp.errors import StorageError
from megads_ucp.storage import MANIFEST, Staging, to_read
from megads_ucp.storage.claims import SILENT_SECONDS, Claim
from megads_ucp.storage.durable import preparation_of_latest
from megads_ucp.storage.leftovers import beside
from tests.support.accidents import reports
from tests.support.children import exit_code, start_child
from tests.support.exports import cleared, left_by_a_killed_job


def entries(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def writing(target: Path, and_then: Callable[[], object] = lambda: None) -> int:
    """A process that is writing ``target`` until it is killed; returns its id once it has begun."""

    def body() -> None:
        staging = Staging.create(target, "other")
        and_then()
        staging.make_directories(["zero/w/begun"])
        staging.path("zero/w/begun").touch()
        time.sleep(600)

    process = start_child(body)
    while not list(target.parent.glob(".*/zero/w/begun")):
        time.sleep(0.01)
    return process


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    assert exit_code(process) == -signal.SIGKILL


def of_another_machine(claim: Path) -> None:
    """As if the writer had been a process elsewhere."""
    content = json.loads(claim.read_bytes())
    claim.write_bytes(json.dumps({**content, "host": "elsewhere", "boot": "another"}).encode())


def age(*paths: Path) -> None:
    """As if nothing there had changed for longer than a writer may be silent."""
    then = time.time() - 2 * SILENT_SECONDS
    for path in (each for root in paths for each in (root, *root.rglob("*"))):
        os.utime(path, (then, then))


def test_a_target_that_another_process_is_writing_is_refused_until_that_is_gone(tmp_path):
    target = tmp_path / "x_universal"
    process = writing(target)
    before = entries(tmp_path)
    with pytest.raises(StorageError, match=rf"another job .* is writing .*x_universal \(host .*, process {process}, "):
        Staging.create(target, "mine")
    assert entries(tmp_path) == before
    kill(process)
    mine = Staging.create(target, "mine")
    assert entries(tmp_path) == sorted([mine.directory.name, ".x_universal.writer-mine"])


def test_a_target_that_another_thread_is_writing_is_refused_and_the_first_one_is_whole(tmp_path):
    first = Staging.create(tmp_path / "x_universal", "r1")
    with pytest.raises(StorageError, match=rf"another job or thread is writing .* process {os.getpid()}"):
        Staging.create(tmp_path / "x_universal", "r2")
    first.commit(tmp_path / "latest_universal")
    assert entries(tmp_path) == ["latest_universal", "x_universal"]


def test_a_process_that_a_killed_writer_has_forked_is_no_writer(tmp_path):
    forked: list[int] = []
    read, write = os.pipe()

    def fork() -> None:
        forked.append(start_child(lambda: time.sleep(600)))  # holds the lock of the claim, as workers of a loader do
        os.write(write, str(forked[0]).encode())

    kill(writing(tmp_path / "x_universal", fork))
    try:
        cleared(tmp_path / "x_universal")
        assert entries(tmp_path) == []
    finally:
        os.kill(int(os.read(read, 20)), signal.SIGKILL)


def test_what_a_writer_on_another_machine_left_is_let_alone_until_it_has_been_silent_for_long(tmp_path):
    target = tmp_path / "x_universal"
    left_by_a_killed_job(target, "r1")
    claim, staging = beside(target, "writer", "r1"), beside(target, "staging", "r1")
    of_another_machine(claim)
    with reports() as messages:
        cleared(target)
    assert entries(tmp_path) == sorted([claim.name, staging.name])
    assert "is left alone" in messages[0] and "host elsewhere" in messages[0]

    age(claim, staging)
    (staging / "zero/w/still_writing").touch()
    cleared(target)
    assert staging.exists()
    age(staging)
    cleared(target)
    assert entries(tmp_path) == []


def test_a_writer_on_another_machine_that_holds_its_lock_lives(tmp_path):
    target = tmp_path / "x_universal"
    claim = Claim.take(beside(target, "writer", "r1"))
    of_another_machine(claim.path)
    age(claim.path)
    with pytest.raises(StorageError, match=r"another job or thread is writing .* \(host elsewhere, process"):
        Staging.create(target, "r2")
    claim.release()
    cleared(target)
    assert entries(tmp_path) == []


def test_what_has_no_claim_belongs_to_nobody(tmp_path):
    for role in ("staging", "replaced"):
        (beside(tmp_path / "x_universal", role, "r1") / "zero").mkdir(parents=True)
    cleared(tmp_path / "x_universal")
    assert entries(tmp_path) == []


def test_each_export_prepares_latest_in_a_file_of_its_own_and_clears_away_those_of_the_gone(tmp_path):
    latest = tmp_path / "latest_universal"
    left_by_a_killed_job(tmp_path / "x_universal", "gone", lambda staging: prepared(latest, "gone").touch())
    other = Staging.create(tmp_path / "y_universal", "living")
    prepared(latest, "living").touch()
    prepared(latest, "unknown").touch()
    cleared(tmp_path / "z_universal", latest)
    assert [name for name in entries(tmp_path) if "latest" in name] == [
        prepared(latest, run_id).name for run_id in ("living", "unknown")
    ]
    age(prepared(latest, "unknown"))
    cleared(tmp_path / "z_universal", latest)
    other.commit(latest)
    assert latest.read_text() == "y_universal"
    assert [name for name in entries(tmp_path) if "latest" in name] == ["latest_universal"]


prepared = preparation_of_latest


def test_an_export_of_a_longer_name_than_its_staging_directory_may_have(tmp_path):
    names = [f"{tag}_universal" for tag in ("x" * 244, "x" * 243 + "y", "ä" * 122)]
    for name in names:
        left_by_a_killed_job(tmp_path / name, "gone")
    for name in names:
        Staging.create(tmp_path / name, "r1").commit(tmp_path / "latest_universal")
        assert (tmp_path / "latest_universal").read_text() == name
    assert entries(tmp_path) == sorted([*names, "latest_universal"])


# ---- readers


def test_a_reader_uses_what_a_killed_commit_has_set_aside_and_changes_nothing(tmp_path):
    target = tmp_path / "x_universal"
    assert to_read(target) == target
    older, newer = (beside(target, "replaced", run_id) for run_id in ("r2", "r1"))
    for path in (older, newer):
        path.mkdir()
        (path / MANIFEST).touch()
    age(older)
    beside(target, "replaced", "r3").mkdir()  # half deleted
    before = entries(tmp_path)
    assert to_read(target, patience_s=0.0) == newer
    assert entries(tmp_path) == before
    target.mkdir()
    assert to_read(target) == target


def test_an_export_puts_back_what_a_killed_commit_has_set_aside(tmp_path):
    target = tmp_path / "x_universal"
    older = beside(target, "replaced", "r1")

    def set_aside(staging: Staging) -> None:
        older.mkdir()
        (older / MANIFEST).write_text("older")

    left_by_a_killed_job(target, "r1", set_aside)
    cleared(target)
    assert entries(tmp_path) == ["x_universal"] and (target / MANIFEST).read_text() == "older"


def test_a_reader_waits_for_a_writer_between_two_renames(tmp_path):
    target = tmp_path / "x_universal"
    aside = beside(target, "replaced", "r1")
    aside.mkdir()
    (aside / MANIFEST).touch()

    def finish() -> None:
        time.sleep(0.2)
        target.mkdir()

    process = start_child(finish)
    assert to_read(target, patience_s=60.0) == target
    assert exit_code(process) == 0


def test_two_writers_that_commit_at_once_without_an_exchange_are_both_whole(tmp_path):
    target = tmp_path / "x_universal"
    (target / "zero").mkdir(parents=True)
    slow = Staging.create(target, "r1")
    hidden = {slow.directory: tmp_path / "staging", beside(target, "writer", "r1"): tmp_path / "writer"}
    for path, away in hidden.items():  # as if this machine did not see them yet
        os.rename(path, away)
    fast = Staging.create(target, "r2")
    for path, away in hidden.items():
        os.rename(away, path)
    for staging in (slow, fast):
        staging.make_directories([f"zero/{staging.run_id}"])
        staging.path(f"zero/{staging.run_id}").touch()
    committed: list[bool] = []

    def never(a: Path, b: Path) -> bool:
        if not committed:  # the other one commits between the first one's look and its renames
            committed.append(True)
            fast.commit(None, exchange=never)
        return False

    slow.commit(None, exchange=never)
    assert os.listdir(target / "zero") == ["r1"]
    assert entries(tmp_path) == ["x_universal"]
