# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a load is of, and what there is beside one that cannot be loaded. Only reads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megads_ucp import storage
from megads_ucp.comm.channel import HOST
from megads_ucp.engine.context import EngineContext
from megads_ucp.errors import ChannelError, StorageError, UniversalCheckpointError
from megads_ucp.integrations.wording import megatron_arguments, wording
from megads_ucp.storage.format import LATEST
from megads_ucp.storage.leftovers import to_read

logger = logging.getLogger("megads_ucp")

_REGULAR_LATEST = "latest"
"""File in a save directory that names the latest regular checkpoint (DeepSpeedEngine.load_checkpoint)."""

_SHOWN = 10


class _NothingThere(Exception):
    """Rank 0 found no universal checkpoint at all; DeepSpeed's own answer is a ValueError."""


def find(context: EngineContext, load_dir: Path, tag: Any) -> str | None:
    """The name of the universal checkpoint to be loaded, by rank 0's look at the directory. Collective.

    All ranks get it: others may not see it, or not yet, and must neither wait for those that do nor load another one.

    Args:
        context: of the engine.
        load_dir: as given to ``load_checkpoint``.
        tag: the same; None: what ``latest_universal`` names.

    Returns:
        None where Megatron-DeepSpeed is to start from scratch: the first job of a chain has nothing to load.

    Raises:
        StorageError: there is no such checkpoint, or ``latest_universal`` names none that can be loaded.
        ValueError: no universal checkpoint has been exported there.
    """
    with HOST:
        channel, found, nothing = context.connect(), None, None
        with channel.agreed(f"looking for a checkpoint in {load_dir}"):
            if channel.rank == 0:
                try:
                    found = _where(load_dir, _find(load_dir, tag, context.config.fallback))
                except _NothingThere as error:
                    nothing = str(error)
        found, nothing = channel.broadcast((found, nothing), 0)
    if nothing is not None:
        raise ValueError(nothing)
    return found


def _find(load_dir: Path, tag: Any, fallback: bool) -> str | None:
    if tag is not None:
        if not _is_there(load_dir / str(tag)):
            raise StorageError(f"{load_dir / str(tag)} does not exist. {_others(load_dir)}")
        return str(tag)
    latest = load_dir / LATEST
    name = storage.read_latest(latest)
    fault = _fault(load_dir, name, thorough=fallback)
    if fault is None:
        return name
    complete = storage.complete_exports(load_dir)
    if complete and fallback:
        logger.warning("%s %s. Loading the newest complete export there, %s.", latest, fault, complete[0])
        return complete[0].name
    if name is None and not complete:
        _start_from_scratch(load_dir)
        return None
    raise (_NothingThere if name is None else StorageError)(f"{latest} {fault}. {_others(load_dir)}")


def _where(load_dir: Path, name: str | None) -> str | None:
    """What a checkpoint is to be read as: another name if a killed commit has set it aside. Nothing is put back."""
    directory = load_dir / (name or LATEST)
    if name is None or (there := to_read(directory)) == directory:
        return name
    logger.warning(
        "%s is missing: loading %s, which a killed export had set aside. The next export of that name puts it back.",
        directory,
        there,
    )
    return str(Path(name).with_name(there.name))


def _fault(load_dir: Path, name: str | None, *, thorough: bool) -> str | None:
    """What is wrong with ``latest_universal``, which holds ``name``; None if nothing is."""
    if name is None:
        return "does not exist"
    if not name:
        return "is empty"
    if not _is_there(load_dir / name):
        return f"names {name}, which does not exist"
    if thorough and (load_dir / name).is_dir():
        try:
            missing = storage.what_is_missing(load_dir / name)
        except StorageError as error:
            missing = str(error)
        return f"names {name}, which is not complete: {missing}" if missing else None
    return None


def _start_from_scratch(load_dir: Path) -> None:
    """Let Megatron-DeepSpeed start where there is no checkpoint of any kind, as it does with ``--load`` alone.

    Raises:
        _NothingThere: the caller is another one, or there are regular checkpoints, or the user wants none of it.
    """
    arguments, words = megatron_arguments(), wording()
    if arguments is None:
        raise _NothingThere(
            f"{load_dir / LATEST} does not exist: no universal checkpoint has been exported there. Save with "
            f"--universal-checkpoint-export, name one by tag=, or {words.load_regular} to load the regular checkpoint."
        )
    if storage.has_checkpoints(load_dir):
        raise _NothingThere(
            f"{load_dir / LATEST} does not exist: no universal checkpoint has been exported there. Save with "
            f"--universal-checkpoint-export, or {words.load_regular} to load the regular checkpoint."
        )
    if getattr(arguments, "exit_on_missing_checkpoint", False):
        raise _NothingThere(f"--load {load_dir} holds no checkpoint, and --exit-on-missing-checkpoint is set.")
    logger.warning("--load %s holds no checkpoint, so this run starts from scratch.", load_dir)


def _is_there(directory: Path) -> bool:
    """Whether there is such a directory, be it where a killed commit has set it aside."""
    return to_read(directory).is_dir()


def _others(save_dir: Path) -> str:
    """The complete exports in a directory, and how to load another one than the latest."""
    complete = storage.complete_exports(save_dir)
    if not complete:
        return "There is no complete export there."
    more = f" and {len(complete) - _SHOWN} more" if len(complete) > _SHOWN else ""
    return (
        f"Complete exports there, newest first: {', '.join(map(str, complete[:_SHOWN]))}{more}. Name one by "
        f"{wording().choose(complete[0].name)}, or have the newest taken by --universal-checkpoint-fallback."
    )


def with_others(context: EngineContext, directory: Path, error: UniversalCheckpointError) -> UniversalCheckpointError:
    """The error of a load that failed before anything changed, with the exports that can be loaded. Collective.

    Args:
        context: of the engine.
        directory: what was to be loaded; if nothing is missing in it, others are of no help.
        error: the same on every rank.
    """
    if isinstance(error, ChannelError):
        return error
    with HOST:
        channel, advice = context.connect(), ""
        with channel.agreed(f"looking for other checkpoints than {directory}"):
            if channel.rank == 0:
                advice = _advice_beside(directory)
        advice = channel.broadcast(advice, 0)
    if not advice:
        return error
    advised = type(error)(f"{error} {advice}")
    advised.__dict__.update(error.__dict__)
    return advised


def _advice_beside(directory: Path) -> str:
    try:
        broken = storage.what_is_missing(directory) is not None
    except StorageError:
        broken = True
    return _others(directory.parent) if broken and directory.is_dir() else ""


def check_is_regular(load_dir: Path, tag: Any) -> None:
    """Check that a load which is not said to be of a universal checkpoint is not of one. Each rank by itself.

    Raises:
        StorageError: it is, or there are universal checkpoints and no regular one; says what to add.
    """
    name = storage.read_latest(load_dir / _REGULAR_LATEST) if tag is None else str(tag)
    if name and storage.is_universal(load_dir / name):
        raise StorageError(
            f"{load_dir / name} is a universal checkpoint, and this run loads regular ones: {wording().load_universal}."
        )
    if name is None and (universal := storage.read_latest(load_dir / LATEST)):
        raise StorageError(
            f"{load_dir} holds universal checkpoints (the latest is {universal}), and no file {_REGULAR_LATEST} that "
            f"names a regular one: {wording().load_universal}."
        )


def universal_beside(load_dir: Path) -> str | None:
    """An advice to load the latest universal checkpoint, where there is one and a regular one cannot be loaded."""
    name = storage.read_latest(load_dir / LATEST)
    if not name or not storage.is_universal(load_dir / name):
        return None
    return f"{load_dir / name} loads at any topology: {wording().load_universal}."


def is_stock_made(load_dir: Path, tag: Any) -> bool:
    """Whether a universal load is of a directory of the stock converter."""
    name = storage.read_latest(load_dir / LATEST) if tag is None else str(tag)
    directory = load_dir / (name or LATEST)
    return storage.is_universal(directory) and not (directory / storage.MANIFEST).exists()
