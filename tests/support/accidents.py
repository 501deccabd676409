# SPDX-License-Identifier: Apache-2.0
"""What befalls an export in the tests of failures: at a chosen use of a file, in one rank, for real."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import megads_ucp
from megads_ucp.storage import MANIFEST, read_manifest, verify_file
from tests.support.models import MLP, initialize, mlp_batches, train

_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18  # linux/sched.h, linux/mount.h


def install(*, enabled: bool = True, **settings: Any) -> None:
    """megads_ucp.install with flags as if they had been parsed: ``strict=True`` or ``bucket_mb=1``, say.

    By default, ranks wait for each other for longer than a job may take: a job that waits for a dead rank fails.
    """
    named = {f"universal_checkpoint_export_{name}": value for name, value in settings.items() if name != "verify"}
    named.update(universal_checkpoint_verify=settings.get("verify", False))
    named.update(universal_checkpoint_export=enabled)
    megads_ucp.install(argparse.Namespace(**named))


def before(pattern: str, act: Callable[[], object]) -> None:
    """Has this process call ``act`` just before its first use of a file that matches ``pattern``.

    Matched against "<event> <path>", with Python's audit events ("open", "os.rename" and so on). Python announces these
    calls to audit hooks, so nothing needs to be replaced to come between any two of them.
    """
    waiting = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal waiting
        named = event in _FILE_EVENTS and isinstance(args[0], str | os.PathLike)
        if waiting and named and re.search(pattern, f"{event} {os.fspath(args[0])}"):
            waiting = False
            act()

    sys.addaudithook(hook)


def kill(processes: Sequence[int]) -> None:
    """kill -9, this process last."""
    for process in sorted(processes, key=lambda process: process == os.getpid()):
        os.kill(process, signal.SIGKILL)


@contextmanager
def reports() -> Iterator[list[str]]:
    """What megads_ucp logs in the block, warnings and errors."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector, logger = Collector(logging.WARNING), logging.getLogger("megads_ucp")
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)


@contextmanager
def small_disk(directory: Path, nbytes: int) -> Iterator[Path]:
    """A file system of its own, of that size, on ``directory``. Skips the test where one cannot be mounted."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", os.fspath(directory)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", os.fspath(directory)], check=True)


def remount(directory: Path, mode: str) -> None:
    """``mode``: "ro" or "rw"."""
    subprocess.run(["mount", "-o", f"remount,{mode}", os.fspath(directory)], check=True)


def hide(directory: Path) -> None:
    """Covers ``directory`` with an empty file system that only this process sees, as on a node that mounts another."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace")
    if libc.mount(b"none", os.fsencode(directory), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "cannot mount")


def assert_complete(universal: Path) -> None:
    """A universal checkpoint holds just the files of its manifest, undamaged, and torch loads them."""
    records = read_manifest(universal).files.values()
    for record in records:
        verify_file(universal / record.path, record)
        torch.load(universal / record.path, weights_only=False)
    files = {path.relative_to(universal).as_posix() for path in universal.rglob("*") if path.is_file()}
    assert files == {MANIFEST, *(record.path for record in records)}


def entries(directory: Path) -> list[str]:
    """What is in a save_dir, but for the scripts that DeepSpeed puts there (zero_to_fp32.py)."""
    return sorted(name for name in os.listdir(directory) if not name.endswith(".py"))


def trained(kind: str = "bf16_optimizer", steps: int = 1) -> Any:
    """On a rank: an engine after so many steps."""
    engine = initialize(MLP(), kind)
    train(engine, mlp_batches(0, steps))
    return engine
