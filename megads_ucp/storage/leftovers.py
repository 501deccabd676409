# SPDX-License-Identifier: Apache-2.0
"""What exports leave beside their target when they are killed: how it is named, found, used, and cleared away.

Of a target ``<name>``, the export with a run id has ``.<name>.staging-<run id>`` (being written, or, after the commit,
the older export on its way out), ``.<name>.replaced-<run id>`` (the older export, set aside), and
``.<name>.writer-<run id>`` (its claim). A long name is cut and completed by a digest, so that the role and the run id
never make it too long for the file system. A reader uses what it finds and changes nothing. Only the next export of the
same target clears up, and only what writers left that are gone (:mod:`megads_ucp.storage.claims`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from pathlib import Path

from megads_ucp.errors import StorageError
from megads_ucp.storage.claims import SILENT_SECONDS, Claim, Standing, read_claim, standing
from megads_ucp.storage.durable import fsync_directories, preparation_of_latest, storage_errors
from megads_ucp.storage.format import MANIFEST

logger = logging.getLogger(__name__)

STAGING, REPLACED, WRITER = "staging", "replaced", "writer"
"""Roles of what lies beside a target."""

RUN_ID = r"[A-Za-z0-9_-]+"
"""Pattern of run ids. No dots: leftovers of "x" must not look like those of a target named "x.staging-y"."""

_LONGEST_STEM = 160  # bytes; with a dot, a role and a run id of a UUID well below any file system's limit
_DIGEST = 16  # hexadecimal digits


def beside(target: Path, role: str, run_id: str) -> Path:
    """What the export ``run_id`` of ``target`` has in a role."""
    return target.with_name(f".{_stem(target.name)}.{role}-{run_id}")


def leftovers(target: Path) -> dict[str, dict[str, Path]]:
    """What exports of ``target`` that were killed or still run have there, by run id and role."""
    pattern = re.compile(rf"\.{re.escape(_stem(target.name))}\.({STAGING}|{REPLACED}|{WRITER})-({RUN_ID})")
    with storage_errors("list", target.parent):
        names = os.listdir(target.parent) if target.parent.is_dir() else []
    found: dict[str, dict[str, Path]] = defaultdict(dict)
    for match in filter(None, map(pattern.fullmatch, sorted(names))):
        found[match[2]][match[1]] = target.parent / match[0]
    return dict(found)


def to_read(target: Path, patience_s: float = 1.0) -> Path:
    """The directory to read an export from: what a killed commit had set aside if ``target`` is missing, else itself.

    Nothing is changed: a writer that lives may be between two renames, or another one clear up.

    Args:
        target: directory of a universal checkpoint.
        patience_s: seconds that a writer between two renames may take.
    """
    deadline = time.monotonic() + patience_s
    while not os.path.lexists(target):
        found = _set_aside(leftovers(target))
        if not found:
            break
        if time.monotonic() > deadline:
            return found[-1]
        time.sleep(0.05)
    return target


def clear(target: Path, latest: Path | None, claim: Claim) -> None:
    """Delete what exports of ``target`` left whose writers are gone; before, put back what one of them had set aside.

    Args:
        target: directory of a universal checkpoint.
        latest: the file that names the latest checkpoint: preparations of it are left by killed exports too.
        claim: on ``target``, of the caller.

    Raises:
        StorageError: another writer, which came first, is writing ``target``; or the operating system refuses.
    """
    found = leftovers(target)
    found = {run_id: paths for run_id, paths in found.items() if paths.get(WRITER) != claim.path}
    gone = {run_id: paths for run_id, paths in found.items() if _is_gone(target, paths, claim)}
    if not os.path.lexists(target) and (aside := _set_aside(gone)):
        with storage_errors("put back", target):
            os.rename(aside[-1], target)
        fsync_directories([target.parent])
        logger.warning("put %s back, which a killed export had set aside", target)
    preparations = [] if latest is None else _stray_preparations(latest, gone, claim)
    for paths in gone.values():
        for role in (STAGING, REPLACED, WRITER):  # the claim last: what has one is looked at twice
            if role in paths:
                delete(paths[role])
    for path in preparations:
        delete(path)


def delete(path: Path) -> None:
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


def _stem(name: str) -> str:
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_STEM:
        return name
    beginning = encoded[: _LONGEST_STEM - _DIGEST - 1].decode(errors="ignore")
    return f"{beginning}~{hashlib.sha256(encoded).hexdigest()[:_DIGEST]}"


def _set_aside(found: dict[str, dict[str, Path]]) -> list[Path]:
    """The complete exports that have been set aside, the newest last."""
    manifests = [paths[REPLACED] / MANIFEST for paths in found.values() if REPLACED in paths]
    complete = [path for path in manifests if path.exists()]
    return [path.parent for path in sorted(complete, key=lambda path: path.stat().st_mtime_ns)]


def _is_gone(target: Path, paths: dict[str, Path], claim: Claim) -> bool:
    """Whether the writer of ``paths`` is gone; a writer that lives and came before ``claim`` is an error."""
    if WRITER not in paths:
        return True
    belongings = [path for role, path in paths.items() if role != WRITER]
    known, other = standing(paths[WRITER], belongings, claim.now), read_claim(paths[WRITER])
    if known is Standing.LIVES:
        own = claim.writer
        if other is not None and (own.since, str(claim.path)) < (other.since, str(paths[WRITER])):
            return False  # it finds this claim, and leaves
        who = "" if other is None else f" ({other})"
        raise StorageError(
            f"another job or thread is writing {target}{who}: end it, or save with another tag or in another directory"
        )
    if known is Standing.UNKNOWN and belongings:
        logger.warning(
            "%s is left alone: nobody can say from here whether its writer (%s) still lives. If it does not, delete it",
            belongings[0],
            other or "unknown",
        )
    return known is Standing.GONE


def _stray_preparations(latest: Path, gone: dict[str, dict[str, Path]], claim: Claim) -> list[Path]:
    """Preparations of ``latest`` by exports that are gone; without a claim beside them, those of an hour ago."""
    prefix = preparation_of_latest(latest, "").name
    with storage_errors("list", latest.parent):
        names = os.listdir(latest.parent) if latest.parent.is_dir() else []
    strays = []
    for name in names:
        run_id, path = name.removeprefix(prefix), latest.parent / name
        if not name.startswith(prefix):
            continue
        claims = [latest.parent / other for other in names if other.endswith(f".{WRITER}-{run_id}")]
        known = standing(claims[0], [path], claim.now) if claims else Standing.UNKNOWN
        with storage_errors("look at", path):
            old = path.exists() and claim.now - path.stat().st_mtime > SILENT_SECONDS
        if run_id in gone or known is Standing.GONE or old:
            strays.append(path)
    return strays
