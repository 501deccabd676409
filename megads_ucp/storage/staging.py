# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory that appears whole or not at all.

An export to ``<parent>/<name>`` claims the target (claims.py), is written into ``<parent>/.<name>.staging-<run id>``
and is completed in this order:

1. the ranks settle it, each its share: all files are there, and the directories below are made durable (the files
   already are);
2. one rank commits it: the directory itself is made durable and takes its name. If the name is free, by
   ``rename``. If an older export has it, the two names are exchanged atomically (``renameat2`` with RENAME_EXCHANGE;
   Linux, most local and some network file systems). Where that is not available: the older one is renamed to
   ``.<name>.replaced-<run id>``, then the new one takes the name;
3. the file that names the latest checkpoint is replaced;
4. the older export is deleted, then the claim.

A crash between any two steps leaves the older or the new export under the name, complete, with one exception: between
the two renames of the fallback, the name is missing and the older export is under ``.replaced-``, where readers find
it (``to_read`` in leftovers.py). The next export of the same target puts it back, and deletes what else was left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar

from megads_ucp.errors import StorageError
from megads_ucp.storage.claims import Claim, read_claim
from megads_ucp.storage.durable import fsync_directories, storage_errors, write_latest
from megads_ucp.storage.leftovers import REPLACED, RUN_ID, STAGING, WRITER, beside, clear, delete
from megads_ucp.storage.names import check_target

_RENAME_EXCHANGE = 2  # linux/fs.h


_AT_FDCWD = -100  # linux/fcntl.h


_ATTEMPTS = 10
"""How often a name is tried that another job keeps taking or giving away in between."""

T = TypeVar("T")


@dataclass(frozen=True)
class Staging:
    """An export in the making.

    One rank creates it, all others join it. Then, each step once all ranks are done with the one before: the ranks make
    the directories, write, and settle what they wrote, each its share; one commits.

    Attributes:
        target: path of the directory once it is complete.
        run_id: distinguishes this export from earlier, killed ones; letters, digits, "-" and "_".
    """

    target: Path
    run_id: str
    _claim: Claim | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(RUN_ID, self.run_id):
            raise ValueError(f"run id {self.run_id!r} may only hold letters, digits, '-' and '_'")

    @cached_property
    def directory(self) -> Path:
        """Where the files are written until the commit."""
        return beside(self.target, STAGING, self.run_id)

    @classmethod
    def create(cls, target: Path, run_id: str, latest: Path | None = None) -> Staging:
        """Make the directory and its parents, after clearing what killed exports of the same target left behind.

        Args:
            target: directory of the universal checkpoint to be.
            run_id: of this export.
            latest: as in :meth:`commit`.

        Raises:
            StorageError: another job is writing the target, something else has its name, or the file system is
                read-only or full.
        """
        target = Path(target)
        cls(target, run_id)
        with storage_errors("create", target):
            check_target(target)
            os.makedirs(target.parent, exist_ok=True)
            claim = Claim.take(beside(target, WRITER, run_id))
        staging = cls(target, run_id, claim)
        try:
            clear(target, latest, claim)
            with storage_errors("create", staging.directory):
                os.mkdir(staging.directory)
        except BaseException:
            claim.release()
            raise
        return staging

    @classmethod
    def join(cls, target: Path, run_id: str, *, patience_s: float = 2.0) -> Staging:
        """The staging directory that another rank has created.

        Args:
            target: as in :meth:`create`.
            run_id: as in :meth:`create`.
            patience_s: seconds that a network file system may take to show it.

        Raises:
            StorageError: this rank does not see it.
        """
        staging = cls(Path(target), run_id)
        deadline = time.monotonic() + patience_s
        while not staging._visible():
            if time.monotonic() > deadline:
                raise StorageError(
                    f"this rank (host {os.uname().nodename}) does not see {staging.directory}, which another rank has "
                    f"created: save_dir must lie on a file system that all ranks share"
                )
            time.sleep(0.05)
        return staging

    def make_directories(self, names: Iterable[str]) -> None:
        """Make the directories on the way to some files. Several ranks may make the same ones at once.

        Args:
            names: paths of the files within the checkpoint, with slashes.

        Raises:
            StorageError: a path leaves the checkpoint, the staging directory has vanished, or the operating system
                refuses.
        """
        for name in directories_of(names):
            path = self.directory / name
            with storage_errors("create", path):
                # One level at a time below a root that must be there: parents=True would quietly start a deleted
                # checkpoint anew, without the files written so far.
                try:
                    os.mkdir(path)
                except FileExistsError:
                    if not path.is_dir():
                        raise

    def path(self, name: str) -> Path:
        """Where to write a file, once :meth:`make_directories` has made its directories.

        Args:
            name: path within the checkpoint, with slashes.

        Raises:
            StorageError: the path leaves the checkpoint.
        """
        return self.directory / _within(name)

    def settle(self, sizes: Mapping[str, int], directories: Iterable[str]) -> None:
        """Check that some files are all there, and make the names inside some directories durable.

        Call it once the writes of all ranks have returned. The ranks together settle every file, and every directory
        but the staging directory itself, which the commit sees to.

        Args:
            sizes: of files, in bytes by path within the checkpoint: something may have deleted some of them meanwhile.
            directories: by path within the checkpoint (:func:`directories_of`).

        Raises:
            StorageError: a file is missing or of another size, a directory is gone, or the disk reports an error.
        """
        self._check_visible()
        for name, nbytes in sizes.items():
            path = self.path(name)
            with storage_errors("complete", path):
                found = os.stat(path).st_size
            if found != nbytes:
                raise StorageError(f"{path} has {found} bytes instead of {nbytes}: something else has written to it")
        fsync_directories(map(self.path, directories))

    def discard(self) -> None:
        """Delete an export that will not be committed. Never raises: it is called when something else went wrong."""
        delete(self.directory)
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def commit(self, latest: Path | None, *, exchange: Callable[[Path, Path], bool] | None = None) -> None:
        """Give the finished directory its name, durably, then make ``latest`` name it (see the module's docstring).

        Call it on one rank, once all ranks have settled their shares.

        Args:
            latest: file that is to hold the target's path, relative to the file's directory if the target lies in it;
                None: no such file is written.
            exchange: swaps two names, or returns False where it cannot; :func:`rename_exchange` unless given.

        Raises:
            StorageError: a step failed; the export under the target's name, older or new, is complete all the same.
        """
        self._check_visible()
        fsync_directories([self.directory])
        older = self._take_name(exchange or rename_exchange)
        try:
            if latest is not None:
                inside = self.target.is_relative_to(latest.parent)
                name = self.target.relative_to(latest.parent) if inside else self.target
                write_latest(latest, name.as_posix(), self.run_id)
        finally:
            if older is not None:
                delete(older)
            self._release()

    def _take_name(self, exchange: Callable[[Path, Path], bool]) -> Path | None:
        """Give the directory its name, durably; return where an older export of that name is now, if there was one."""
        aside: Path | None = None
        with storage_errors("rename the finished export to", self.target):
            for _ in range(_ATTEMPTS):
                try:
                    os.rename(self.directory, self.target)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                try:
                    if exchange(self.directory, self.target):
                        aside = self.directory
                        break
                    aside = beside(self.target, REPLACED, self.run_id)
                    delete(aside)  # there if another job has taken the name in between
                    os.rename(self.target, aside)
                    fsync_directories([self.target.parent])
                except FileNotFoundError:
                    continue  # another job, or a rotation, has given the name away in between
            else:
                raise StorageError(f"{self.target} was taken by another job, {_ATTEMPTS} times")
        fsync_directories([self.target.parent])
        return aside

    def _check_visible(self) -> None:
        if not self._visible():
            raise StorageError(
                f"{self.directory} vanished while it was written: was it deleted by a rotation policy, or by hand?"
            )

    def _visible(self) -> bool:
        return read_claim(beside(self.target, WRITER, self.run_id)) is not None and self.directory.is_dir()


def directories_of(names: Iterable[str]) -> list[str]:
    """All directories on the way to some files of a checkpoint, outer ones before inner ones, without the checkpoint's.

    Args:
        names: paths of the files within the checkpoint, with slashes.

    Raises:
        StorageError: a path leaves the checkpoint.
    """
    folders = {_within(name).parent for name in names}
    return sorted({str(outer) for folder in folders for outer in (folder, *folder.parents)} - {"."})


def share(items: Sequence[T], rank: int, world: int) -> Sequence[T]:
    """What one of ``world`` ranks gets of ``items``: neighbours, as many as any other rank or one more."""
    return items[len(items) * rank // world : len(items) * (rank + 1) // world]


def rename_exchange(a: Path, b: Path) -> bool:
    """Swap two names of one file system atomically; False where kernel, C library or file system cannot.

    Raises:
        OSError: any other reason, such as a missing permission.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28, musl 1.2.5
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(a), None, os.fspath(b))


def _within(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise StorageError(f"{name!r} is no path within a checkpoint directory")
    return path
