# SPDX-License-Identifier: Apache-2.0
"""Accidents of an export: real ranks die, real disks fill up, and nothing worse comes of it."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megads_ucp.errors import UniversalCheckpointError
from megads_ucp.storage import open_tensor, read_manifest
from tests.support.accidents import (
    assert_complete,
    before,
    entries,
    hide,
    install,
    kill,
    remount,
    reports,
    small_disk,
    trained,
)
from tests.support.models import MLP, initialize, mlp_batches, train
from tests.support.ranks import run_ranks

LATEST = "latest_universal"
root_only = pytest.mark.skipif(os.getuid() != 0, reason="mounting a file system needs root")


# ------------------------------------------------------------------------------------------- F1: ranks that are killed


def killed_during_an_export(
    save: Path, victim: int, arm: Callable[[list[int]], None], *, tag: str = "new", doomed: bool = False
) -> list[str]:
    """On each of 3 ranks: exports "old", then ``tag``; ``arm`` prepares a death on the victim, given all process ids.

    Returns what this rank reported about it; if it is ``doomed``, it waits for its end.
    """
    install()
    engine = trained()
    engine.save_checkpoint(str(save), tag="old")
    train(engine, mlp_batches(1, 2))
    processes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    if dist.get_rank() == victim:
        arm(processes)
    with reports() as messages:
        engine.save_checkpoint(str(save), tag=tag)
    while doomed:
        signal.pause()
    return messages


def assert_old_or_new(save: Path) -> str:
    """What the latest export is named; it is complete, and so is everything else that looks like a checkpoint."""
    name = (save / LATEST).read_text()
    assert name in ("old_universal", "new_universal")
    for universal in save.glob("*_universal"):
        if universal.is_dir():
            assert_complete(universal)
    for file in [*save.glob("old/*"), *save.glob("new/*")]:
        torch.load(file, weights_only=False)
    return name


def body_that_exports(save: Path, tag: str) -> Callable[[], None]:
    def body() -> None:
        install(strict=True)
        trained().save_checkpoint(str(save), tag=tag)

    return body


def assert_next_export_cleans_up(save: Path) -> None:
    run_ranks(body_that_exports(save, "new"), 1)
    assert (save / LATEST).read_text() == "new_universal"
    assert entries(save) == sorted(["latest", LATEST, "old", "old_universal", "new", "new_universal"])
    assert_complete(save / "new_universal")


# By rank: rank 0 creates and commits, the others only write.
MOMENTS = [
    pytest.param(1, "open .*new_universal.*fp32.pt", marks=pytest.mark.slow),
    (0, "open .*new_universal.*manifest.json"),
    pytest.param(0, "os.mkdir .*new_universal", marks=pytest.mark.slow),
    pytest.param(0, "open .*new_universal.writer", marks=pytest.mark.slow),
    pytest.param(0, "open .*new_universal.*exp_avg", marks=pytest.mark.slow),
    pytest.param(0, "open .*new_universal.*mp_rank", marks=pytest.mark.slow),
    pytest.param(0, "os.rename .*new_universal", marks=pytest.mark.slow),
    pytest.param(0, "os.rename .*latest_universal", marks=pytest.mark.slow),
    pytest.param(2, "open .*new_universal.writer", marks=pytest.mark.slow),
    pytest.param(2, "open .*new_universal.*step.pt", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "moment"), MOMENTS)
def test_a_rank_killed_during_an_export_leaves_the_older_one_and_the_others_say_so(tmp_path, victim, moment):
    def body() -> list[str]:
        arm = lambda processes: before(moment, partial(kill, [processes[victim]]))  # noqa: E731
        return killed_during_an_export(tmp_path, victim, arm)

    reported = run_ranks(body, 3, expect_death={victim: signal.SIGKILL})

    for rank in {0, 1, 2} - {victim}:  # they have reported, so they did not wait for the timeout (see `install`)
        (message,) = reported[rank]
        assert "no universal checkpoint" in message and "new_universal" in message
        # The victim's host serves the key-value store here, so its death leaves nobody to ask who is there.
        assert ("store does not answer" if victim == 0 else f"no sign of life from rank {victim}:") in message
        assert "regular checkpoint is untouched" in message
    assert assert_old_or_new(tmp_path) == "old_universal"
    assert_next_export_cleans_up(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "os.rename .*new_universal",
        pytest.param("open .*new_universal.*exp_avg_sq", marks=pytest.mark.slow),
        pytest.param("open .*new_universal.*manifest.json", marks=pytest.mark.slow),
    ],
)
def test_a_job_killed_during_an_export_leaves_the_older_one(tmp_path, moment):
    def body() -> None:
        killed_during_an_export(tmp_path, 0, lambda processes: before(moment, partial(kill, processes)))

    run_ranks(body, 3, expect_death=dict.fromkeys(range(3), signal.SIGKILL))
    assert assert_old_or_new(tmp_path) == "old_universal"
    assert_next_export_cleans_up(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "open .*old_universal.*optimizer_state.pt",
        pytest.param("open .*latest_universal.new", marks=pytest.mark.slow),  # just after the two have changed places
        pytest.param("os.rmdir", marks=pytest.mark.slow),  # amid the deletion of the older one
    ],
)
def test_a_job_killed_while_it_replaces_an_export_leaves_one_of_the_two(tmp_path, moment):
    def body() -> None:
        killed_during_an_export(tmp_path, 0, lambda processes: before(moment, partial(kill, processes)), tag="old")

    run_ranks(body, 3, expect_death=dict.fromkeys(range(3), signal.SIGKILL))
    assert assert_old_or_new(tmp_path) == "old_universal"
    step = read_manifest(tmp_path / "old_universal").run["global_steps"]
    assert step == (1 if "optimizer_state" in moment else 2)
    run_ranks(body_that_exports(tmp_path, "old"), 1)
    assert entries(tmp_path) == sorted(["latest", LATEST, "old", "old_universal"])
    assert_complete(tmp_path / "old_universal")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_kill_9_at_a_random_moment(tmp_path, seed):
    chance = random.Random(seed)
    # An export takes a tenth of a second here: sometimes it is over before the shot.
    victim, delay, everybody = chance.randrange(3), chance.uniform(0.0, 0.15), chance.random() < 0.3
    doomed = range(3) if everybody else [victim]

    def body() -> list[str]:
        def arm(processes: list[int]) -> None:
            shot = threading.Timer(delay, kill, [[processes[rank] for rank in doomed]])
            before("new_universal", shot.start)

        return killed_during_an_export(tmp_path, victim, arm, doomed=dist.get_rank() in doomed)

    run_ranks(body, 3, expect_death=dict.fromkeys(doomed, signal.SIGKILL))
    assert_old_or_new(tmp_path)
    assert_next_export_cleans_up(tmp_path)


@pytest.mark.slow  # waits for a timeout
def test_a_rank_that_is_stuck_costs_one_export_and_no_more(tmp_path):
    save, reported = tmp_path / "save", [tmp_path / "0", tmp_path / "2"]

    def until_the_others_have_reported() -> None:
        while not all(file.exists() for file in reported):
            time.sleep(0.01)

    def body() -> tuple[list[str], list[str]]:
        install(timeout_minutes=0.2)  # which nothing else here comes near
        engine = trained()
        engine.save_checkpoint(str(save), tag="old")
        if dist.get_rank() == 1:
            before("stuck_universal", until_the_others_have_reported)
        with reports() as first:
            engine.save_checkpoint(str(save), tag="stuck")
        (tmp_path / str(dist.get_rank())).touch()
        train(engine, mlp_batches(1, 2))
        with reports() as second:
            engine.save_checkpoint(str(save), tag="new")
        return first, second

    for rank, (first, second) in enumerate(run_ranks(body, 3)):
        (message,) = first
        assert rank == 1 or "no sign of life from rank 1: dead, or stuck" in message
        assert second == []
    assert (save / LATEST).read_text() == "new_universal"
    assert entries(save) == sorted([LATEST, "latest", "old", "stuck", "new", "old_universal", "new_universal"])
    assert_complete(save / "new_universal")


# ---------------------------------------------------------------------------------------------------- F2, F6: the disk


SIZES = (7, 130, 110, 5)
LARGE = 40_000  # bytes: less than the largest weight of that model, more than a rank prints


def body_of_trouble(save: Path, *troubles: Callable[[Path], None]) -> tuple[list[list[str]], list[float]]:
    """On each rank: exports "old"; then, once per trouble, trains a step and exports that step's number; then "new".

    Returns the reports of each of these exports but the first, and the losses of all steps.
    """
    install()
    engine = initialize(MLP(SIZES), "bf16_optimizer")
    losses = train(engine, mlp_batches(0, 1))
    engine.save_checkpoint(str(save), tag="old")
    reported = []
    for step, trouble in enumerate(troubles, start=1):
        losses += train(engine, mlp_batches(step, step + 1))
        trouble(save)
        dist.barrier()
        with reports() as messages:
            engine.save_checkpoint(str(save), tag=str(step))
        reported.append(messages)
        assert (save / LATEST).read_text() == "old_universal"
    losses += train(engine, mlp_batches(len(troubles) + 1, len(troubles) + 3))
    return reported, losses


def undisturbed_losses(steps: int) -> list[float]:
    return run_ranks(lambda: train(initialize(MLP(SIZES), "bf16_optimizer"), mlp_batches(0, steps)), 2)[0]


def assert_reported(reported: list[list[str]], pattern: str) -> None:
    """Rank 0, and the rank that failed, have reported the same one failure, which matches."""
    (message,) = reported[0]
    assert re.search(pattern, message), message
    assert all(messages in ([], [message]) for messages in reported), reported
    for rank in re.findall(r" rank (\d+): ", message):
        assert reported[int(rank)] == [message]


def on_rank(rank: int, act: Callable[[], object]) -> None:
    if dist.get_rank() == rank:
        act()


def forbid_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, resource.RLIM_INFINITY))


def allow_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def remove_staging(save: Path) -> None:
    (staging,) = save.glob(".*_universal.staging-*")
    staging.rename(save / "trash")  # other threads and ranks write into it: out of their way, as some tools do it, too
    shutil.rmtree(save / "trash")


@pytest.mark.slow
def test_trouble_with_files_is_reported_on_all_ranks_and_training_goes_on(tmp_path):
    def a_write_that_fails(save: Path) -> None:
        on_rank(1, partial(before, "open .*1_universal.*fp32.pt", forbid_large_files))

    def a_file_in_the_way(save: Path) -> None:
        allow_large_files()
        on_rank(0, (save / "2_universal").touch)

    def a_rotation_that_deletes_everything(save: Path) -> None:
        on_rank(1, partial(before, "open .*3_universal.*exp_avg.pt", partial(remove_staging, save)))

    def a_rotation_that_has_deleted_a_part(save: Path) -> None:
        def delete() -> None:
            (file,) = save.glob(".*_universal.staging-*/zero/layers.1.bias/exp_avg.pt")
            file.unlink()

        on_rank(0, partial(before, "open .*4_universal.*manifest.json", delete))

    def body() -> Any:
        return body_of_trouble(
            tmp_path,
            a_write_that_fails,
            a_file_in_the_way,
            a_rotation_that_deletes_everything,
            a_rotation_that_has_deleted_a_part,
        )

    ranks = run_ranks(body, 2)
    failed, in_the_way, deleted, incomplete = ([reported[i] for reported, _ in ranks] for i in range(4))
    assert_reported(failed, r"1_universal.* rank 1: cannot write .*zero/.*\.pt: File too large")
    assert_reported(in_the_way, r"rank 0: cannot export to .*2_universal: a file of that name is in the way")
    assert_reported(deleted, r"3_universal.* rank 1: cannot (write|create) .*zero/.*deleted meanwhile")
    assert_reported(incomplete, r"rank \d: cannot complete .*layers.1.bias/exp_avg.pt: .*deleted meanwhile")
    assert ranks[0][1] == undisturbed_losses(7)
    (tmp_path / "2_universal").unlink()
    assert entries(tmp_path) == sorted(["latest", LATEST, "old", "old_universal", *"1234"])  # nothing half-done
    assert_complete(tmp_path / "old_universal")
    for file in tmp_path.glob("[1234]/*"):
        torch.load(file, weights_only=False)


@pytest.mark.slow
def test_a_disk_that_is_full_or_read_only(tmp_path):
    def full(save: Path) -> None:
        def fill() -> None:
            regular = sum(file.stat().st_size for file in (save / "old").iterdir())
            space = os.statvfs(save)
            with open(save / "ballast", "wb") as ballast:
                ballast.write(bytes(space.f_bavail * space.f_frsize - regular - 16 * 4096))

        on_rank(0, fill)

    def read_only(save: Path) -> None:
        def protect() -> None:
            (save / "ballast").unlink()
            before("open .*2_universal.writer", partial(remount, save, "ro"))

        on_rank(0, protect)

    def writable(save: Path) -> None:
        on_rank(0, partial(remount, save, "rw"))
        on_rank(0, (save / "3_universal").touch)

    with small_disk(tmp_path / "disk", 4 << 20) as save:
        ranks = run_ranks(partial(body_of_trouble, save, full, read_only, writable), 2)
        assert_reported(
            [messages[0] for messages, _ in ranks], r"1_universal.*rank.*: cannot .*No space left.*free space there"
        )
        assert_reported(
            [messages[1] for messages, _ in ranks], r"2_universal.*rank 0: cannot create .*: Read-only file system"
        )
        assert ranks[0][1] == undisturbed_losses(6)
        assert_complete(save / "old_universal")
        assert not list(save.glob(".*"))
        for file in save.glob("[123]/*"):
            torch.load(file, weights_only=False)


def test_strict_raises_on_every_rank_after_the_regular_checkpoint_is_written(tmp_path):
    (tmp_path / "new_universal").touch()

    def body() -> str:
        install(strict=True)
        engine = trained()
        with pytest.raises(UniversalCheckpointError) as raised:
            engine.save_checkpoint(str(tmp_path), tag="new")
        return str(raised.value)

    messages = run_ranks(body, 2)
    assert messages[0] == messages[1] and "rank 0: cannot export to" in messages[0]
    assert (tmp_path / "latest").read_text() == "new"
    for file in (tmp_path / "new").iterdir():
        torch.load(file, weights_only=False)


@pytest.mark.slow
@root_only
def test_a_save_dir_that_not_all_ranks_see_is_refused(tmp_path):
    def body(save: Path) -> Any:
        on_rank(1, partial(before, "open .*1_universal.writer", partial(hide, save)))
        install()
        engine = trained()
        with reports() as hidden:
            engine.save_checkpoint(str(save), tag="1")
        with reports() as differing:
            engine.save_checkpoint(f"{save}{dist.get_rank()}", tag="2")
        return hidden, differing

    ranks = run_ranks(body, 2, tmp_path / "save")
    assert_reported([hidden for hidden, _ in ranks], r"rank 1: this rank .* does not see .*all ranks share")
    for rank, (_, differing) in enumerate(ranks):
        assert f"save_dir is '{tmp_path}/save0' on rank 0 and '{tmp_path}/save1' on rank 1" in differing[0], rank
    assert entries(tmp_path / "save") == ["1", "latest"]
    assert not list(tmp_path.rglob("*universal*"))


@pytest.mark.slow
def test_modes_and_groups_are_those_of_the_regular_files(tmp_path):
    if os.getuid() == 0:
        os.chown(tmp_path, -1, 4711)
        os.chmod(tmp_path, 0o2775)

    def body() -> None:
        install(strict=True)
        engine = trained()
        for umask in (0o027, 0o002):
            os.umask(umask)
            engine.save_checkpoint(str(tmp_path / f"{umask:o}"), tag="x")

    run_ranks(body, 2)
    for umask in ("27", "2"):
        regular = [tmp_path / umask / "x", *(tmp_path / umask / "x").rglob("*")]
        export = [tmp_path / umask / "x_universal", *(tmp_path / umask / "x_universal").rglob("*")]
        rights = {path.is_dir(): (path.stat().st_mode, path.stat().st_gid) for path in regular}
        assert len({(path.stat().st_mode, path.stat().st_gid) for path in regular}) == 2
        for path in [*export, tmp_path / umask / LATEST]:
            assert (path.stat().st_mode, path.stat().st_gid) == rights[path.is_dir()], path


@pytest.mark.slow
def test_an_export_is_as_large_as_its_tensors_and_leaves_nothing_else(tmp_path):
    def body() -> None:
        install(strict=True)
        engine = initialize(MLP((512, 1024, 256)), "fp32")
        train(engine, mlp_batches(0, 1, (512, 1024, 256)))
        for tag in ("x", "y", "x"):
            engine.save_checkpoint(str(tmp_path), tag=tag)

    run_ranks(body, 2)
    assert entries(tmp_path) == sorted(["latest", LATEST, "x", "x_universal", "y", "y_universal"])
    for universal in (tmp_path / "x_universal", tmp_path / "y_universal"):
        assert_complete(universal)
        tensors = sum(open_tensor(path).numel * 4 for path in universal.rglob("*.pt") if is_tensor(path))
        assert tensors == 3 * 4 * sum(p.numel() for p in MLP((512, 1024, 256)).parameters())
        files = sum(path.stat().st_size for path in universal.rglob("*") if path.is_file())
        assert tensors < files < 1.01 * tensors


def is_tensor(path: Path) -> bool:
    return path.parent.parent.name == "zero" and path.name != "step.pt"
