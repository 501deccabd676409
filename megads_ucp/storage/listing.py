# SPDX-License-Identifier: Apache-2.0
"""What universal checkpoints a save directory holds. Only reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megads_ucp.errors import StorageError
from megads_ucp.storage.durable import storage_errors
from megads_ucp.storage.format import MANIFEST, ZERO
from megads_ucp.storage.manifest import Manifest, read_manifest


@dataclass(frozen=True)
class Export:
    """A universal checkpoint with a manifest.

    Attributes:
        name: of its directory.
        step: ``global_steps`` of the run that saved it.
        created: time of the export, in UTC, ISO 8601.
    """

    name: str
    step: int
    created: str

    def __str__(self) -> str:
        return f"{self.name} (step {self.step}, {self.created})"


def complete_exports(save_dir: Path) -> tuple[Export, ...]:
    """The exports in a directory of which nothing is missing, newest first.

    Directories of the stock converter are left out: nothing says whether they are complete.
    """
    found = []
    for name in _names(save_dir):
        if not name.startswith(".") and (save_dir / name / MANIFEST).is_file():  # staging directories begin with dots
            try:
                manifest = read_manifest(save_dir / name)
                if what_is_missing(save_dir / name, manifest) is None:
                    found.append(Export(name, int(manifest.run["global_steps"]), manifest.created))
            except (StorageError, KeyError):
                continue
    return tuple(sorted(found, key=lambda export: (export.created, export.step, export.name), reverse=True))


def what_is_missing(directory: Path, manifest: Manifest | None = None) -> str | None:
    """What makes a universal checkpoint incomplete, as a look at names and sizes shows it; None if nothing does.

    Args:
        directory: of the checkpoint.
        manifest: of it, if it has been read.

    Raises:
        StorageError: its manifest is damaged.
    """
    if not directory.is_dir():
        return "it does not exist"
    if not (directory / ZERO).is_dir():
        return f"it has no directory {ZERO}"
    if manifest is None:
        if not (directory / MANIFEST).is_file():
            return None  # of the stock converter
        manifest = read_manifest(directory)
    for path, record in manifest.files.items():
        try:
            size = os.stat(directory / path).st_size
        except OSError:
            return f"it lacks {path}"
        if size != record.nbytes:
            return f"{path} has {size} bytes instead of {record.nbytes}"
    return None


def is_universal(directory: Path) -> bool:
    """Whether a directory is a universal checkpoint, ours or the stock converter's, and no regular one."""
    return (directory / ZERO).is_dir()


def has_checkpoints(save_dir: Path) -> bool:
    """Whether a directory holds anything that may be a checkpoint, of whatever kind: any directory or tracker file."""
    return any(name.startswith("latest") or (save_dir / name).is_dir() for name in _names(save_dir))


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    with storage_errors("list", directory):
        return os.listdir(directory)
