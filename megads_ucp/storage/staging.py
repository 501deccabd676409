# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory that appears whole or not at all.

An export to ``<parent>/<name>`` is written into ``<parent>/.<name>.staging-<run id>`` and committed in this order:

1. all directories of the tree are made durable (the files already are);
2. the token that marks the directory as unfinished is removed;
3. the directory takes its name. If the name is free, by ``rename``. If an older export has it, the two names are
   exchanged atomically (``renameat2`` with RENAME_EXCHANGE; Linux, most local and some network file systems). Where
   that is not available: the older one is renamed to ``.<name>.replaced-<run id>``, then the new one takes the name;
4. the file that names the latest checkpoint is replaced;
5. the older export is deleted.

A crash between any two steps leaves the older or the new export under the name, complete, with one exception: between
the two renames of the fallback, the name is missing and the older export is under ``.replaced-``. :func:`repair` puts
it back, and deletes whatever else a killed export left.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megads_ucp.errors import StorageError
from megads_ucp.storage.durable import (
    fsync_directories,
    fsync_tree,
    latest_preparation,
    storage_errors,
    write_durably,
    write_latest,
)

logger = logging.getLogger(__name__)


_TOKEN = ".unfinished"


_STAGING, _REPLACED = "staging", "replaced"


_RUN_ID = r"[A-Za-z0-9_-]+"  # no dots: leftovers of "x" must not look like those of a target named "x.staging-y"


_RENAME_EXCHANGE = 2  # linux/fs.h


_AT_FDCWD = -100  # linux/fcntl.h


@dataclass(frozen=True)
class Staging:
    """An export in the making. One rank creates it and all others join it, then all write, then one commits.

    Attributes:
        target: path of the directory once it is complete.
        run_id: distinguishes this export from earlier, killed ones; letters, digits, "-" and "_".
    """

    target: Path
    run_id: str

    def __post_init__(self) -> None:
        if not re.fullmatch(_RUN_ID, self.run_id):
            raise ValueError(f"run id {self.run_id!r} may only hold letters, digits, '-' and '_'")

    @property
    def directory(self) -> Path:
        """Where the files are written until the commit."""
        return _beside(self.target, _STAGING, self.run_id)

    @classmethod
    def create(cls, target: Path, run_id: str) -> Staging:
        """Make the directory and its parents, after clearing what killed exports of the same target left behind.

        Raises:
            StorageError: the file system is read-only or full, or a file is in the place of a directory.
        """
        staging = cls(Path(target), run_id)
        with storage_errors("create", staging.directory):
            os.makedirs(staging.target.parent, exist_ok=True)
        repair(staging.target)
        if os.path.lexists(staging.target) and not staging.target.is_dir():
            raise StorageError(f"cannot export to {staging.target}: a file of that name is in the way, move it away")
        with storage_errors("create", staging.directory):
            os.mkdir(staging.directory)
            write_durably(staging.directory / _TOKEN, run_id.encode())
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

    def path(self, relative: str) -> Path:
        """Where to write a file, after making the directories on the way.

        Args:
            relative: path within the checkpoint, with slashes.

        Raises:
            StorageError: the path leaves the checkpoint, or the staging directory has vanished.
        """
        parts = PurePosixPath(relative)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise StorageError(f"{relative!r} is no path within a checkpoint directory")
        path = self.directory
        for part in parts.parts[:-1]:
            path = path / part
            with storage_errors("create", path):
                # One level at a time below a root that must be there: parents=True would quietly start a deleted
                # checkpoint anew, without the files written so far.
                try:
                    os.mkdir(path)
                except FileExistsError:
                    if not path.is_dir():
                        raise
        return path / parts.name

    def discard(self) -> None:
        """Delete an export that will not be committed. Never raises: it is called when something else went wrong."""
        _delete(self.directory)

    def commit(
        self,
        latest: Path | None,
        *,
        sizes: Mapping[str, int] | None = None,
        exchange: Callable[[Path, Path], bool] | None = None,
    ) -> None:
        """Give the finished directory its name, durably, then make ``latest`` name it (see the module's docstring).

        Call it on one rank, after the writes of every rank have returned.

        Args:
            latest: file in a parent of the target, to hold the target's path relative to that parent; None: no such
                file is written.
            sizes: of the files that must be there, in bytes by path within the checkpoint: something may have deleted
                some of them meanwhile.
            exchange: swaps two names, or returns False where it cannot; :func:`rename_exchange` unless given.

        Raises:
            StorageError: a step failed; the export under the target's name, older or new, is complete all the same.
        """
        name = None if latest is None else self.target.relative_to(latest.parent).as_posix()
        if not self._visible():
            raise StorageError(f"{self.directory} vanished while it was written: was it deleted by a rotation policy?")
        self._check_sizes(sizes or {})
        fsync_tree(self.directory)
        with storage_errors("complete", self.directory):
            os.unlink(self.directory / _TOKEN)
        fsync_directories([self.directory])
        older = self._take_name(exchange or rename_exchange)
        if latest is not None and name is not None:
            write_latest(latest, name)
        if older is not None:
            _delete(older)

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        for name, nbytes in sizes.items():
            path = self.directory / name
            with storage_errors("complete", path):
                found = os.stat(path).st_size
            if found != nbytes:
                raise StorageError(f"{path} has {found} bytes instead of {nbytes}: something else has written to it")

    def _take_name(self, exchange: Callable[[Path, Path], bool]) -> Path | None:
        """Give the directory its name, durably; return where an older export of that name is now, if there was one."""
        older: Path | None = None
        with storage_errors("rename the finished export to", self.target):
            if not self.target.exists():
                os.rename(self.directory, self.target)
            elif exchange(self.directory, self.target):
                older = self.directory
            else:
                older = _beside(self.target, _REPLACED, self.run_id)
                os.rename(self.target, older)
                fsync_directories([self.target.parent])
                os.rename(self.directory, self.target)
        fsync_directories([self.target.parent])
        return older

    def _visible(self) -> bool:
        try:
            return (self.directory / _TOKEN).read_text() == self.run_id
        except OSError:
            return False


def leftovers(target: Path) -> tuple[Path, ...]:
    """Staging and replaced directories beside ``target``, of exports that were killed or are still running."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.({_STAGING}|{_REPLACED})-{_RUN_ID}")
    with storage_errors("list", target.parent):
        names = os.listdir(target.parent) if target.parent.is_dir() else []
    return tuple(target.parent / name for name in sorted(names) if pattern.fullmatch(name))


def repair(target: Path, latest: Path | None = None) -> tuple[Path, ...]:
    """Put back the export that a killed commit had set aside, if ``target`` is missing, and delete other leftovers.

    Not while an export of the same target is running.

    Args:
        target: directory of a universal checkpoint.
        latest: the file that names the latest checkpoint; a half-prepared version of it is deleted too.

    Returns:
        The leftovers found; they are gone.

    Raises:
        StorageError: the operating system refuses.
    """
    found = leftovers(target)
    replaced = [path for path in found if path.name.startswith(f".{target.name}.{_REPLACED}-")]
    if replaced and not os.path.lexists(target):
        with storage_errors("put back", target):
            os.rename(replaced[-1], target)
        fsync_directories([target.parent])
        logger.warning("put %s back, which a killed export had set aside", target)
    for path in found:
        _delete(path)
    if latest is not None and latest_preparation(latest).exists():
        _delete(latest_preparation(latest))
        found += (latest_preparation(latest),)
    return found


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


def _beside(target: Path, role: str, run_id: str) -> Path:
    return target.with_name(f".{target.name}.{role}-{run_id}")


def _delete(path: Path) -> None:
    """Delete a file or tree as far as possible. What stays does no harm, and the next export tries again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot delete %s: %s", path, error)
    if os.path.lexists(path):
        logger.warning("%s is no longer needed but could not be deleted completely", path)
