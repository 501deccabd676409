# SPDX-License-Identifier: Apache-2.0
"""What may be named what, checked before anything is written.

The path of a parameter's files is its name: stock DeepSpeed looks for ``zero/<name>/<state>.pt`` and nothing else. So a
name that a file system cannot hold, or not beside another one, is refused and not encoded.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from megads_ucp.errors import StorageError
from megads_ucp.storage.format import MANIFEST, OPTIMIZER_STATE, SUFFIX, ZERO, state_file

_RENAME = "give the module or the ParameterDict key another name"


def check_tag(save_dir: str | os.PathLike[str], tag: str) -> None:
    """Refuse to save the regular checkpoint ``tag`` into a universal one.

    Raises:
        StorageError: names the universal checkpoint.
    """
    parts = PurePosixPath(tag).parts
    for count in range(1, len(parts) + 1):
        directory = Path(save_dir, *parts[:count])
        if _is_universal(directory):
            raise StorageError(
                f"tag {tag!r} would write the regular checkpoint into {directory}, which is a universal checkpoint: "
                f"save with a tag that does not begin with the name of one, best without {SUFFIX} in it"
            )


def check_target(target: Path) -> None:
    """Refuse to export to a name that the file system does not take, or that something else has.

    Raises:
        StorageError: says which.
    """
    if target.name in ("", ".", "..", SUFFIX, f"..{SUFFIX}"):
        raise StorageError(f"cannot export to {target}: the tag must end in a name of its own")
    longest, path_limit = _limits(target)
    if too_long := [part for part in target.parts if len(os.fsencode(part)) > longest]:
        size = len(os.fsencode(too_long[-1]))
        raise StorageError(
            f"cannot export to {target}: {too_long[-1]} has {size} bytes, the file system takes names of {longest}. "
            f"Save with a tag that leaves {len(SUFFIX)} bytes for {SUFFIX}"
        )
    if len(os.fsencode(target)) >= path_limit:
        raise StorageError(f"cannot export to {target}: paths may have {path_limit - 1} bytes. Save with a shorter tag")
    if os.path.lexists(target) and not target.is_dir():
        raise StorageError(f"cannot export to {target}: a file of that name is in the way, move it away")
    if target.is_dir() and not _is_universal(target) and any(target.iterdir()):
        raise StorageError(
            f"cannot export to {target}: that is no universal checkpoint (the regular one of tag {target.name}?), and "
            "would be replaced. Move it away, or save with another tag"
        )


def check_names(directory: Path, parameters: Mapping[str, Sequence[str]], *, folds_case: bool | None = None) -> None:
    """Refuse parameters that could not have files of their own, or not under their names.

    Args:
        directory: that they would be written to; it need not be there.
        parameters: for each name, the names of its states.
        folds_case: whether names that differ only in case are one to the file system; looked up if it is None.

    Raises:
        StorageError: names the parameter, or both, and the way out.
    """
    longest, path_limit = _limits(directory)
    for name, states in parameters.items():
        for state in states:
            if reason := _why_impossible(name, state, longest, path_limit - len(os.fsencode(directory)) - 2):
                raise StorageError(f"parameter {name!r} cannot be a path of files ({reason}): {_RENAME}")
    _check_clashes(parameters)
    twins: dict[str, str] = {}
    for name in parameters:
        other = twins.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name and (_folds_case(directory) if folds_case is None else folds_case):
            raise StorageError(
                f"parameters {other!r} and {name!r} are one name to the file system of {directory}, which does not "
                f"distinguish case: {_RENAME}, or save elsewhere"
            )


def _why_impossible(name: str, state: str, longest: int, room: int) -> str:
    """Why a state of a parameter can have no file of its name, empty if it can.

    Args:
        name: of the parameter.
        state: of it.
        longest: most bytes of one name.
        room: bytes for the path within the checkpoint directory.
    """
    path = state_file(name, state)
    try:
        parts = [os.fsencode(part) for part in path.split("/")]
    except UnicodeEncodeError:
        return "it holds characters that no file name can"
    if "\0" in path:
        return "it holds a NUL character"
    if name.startswith("/"):
        return "it begins with a slash"
    if b"" in parts:
        return "it ends in a slash" if name.endswith("/") else "it holds two slashes in a row"
    if b"." in parts or b".." in parts:
        return "one of its parts between slashes is . or .."
    if "/" in state:
        return f"its state {state!r} holds a slash"
    if (size := max(map(len, parts))) > longest:
        return f"a part of {path} has {size} bytes, the file system takes {longest}"
    if len(os.fsencode(path)) > room:
        return f"{path} has {len(os.fsencode(path))} bytes, and {room} are left in that directory"
    return ""


def _check_clashes(parameters: Mapping[str, Sequence[str]]) -> None:
    """Refuse a parameter that needs a directory where another one, or the format itself, has a file."""
    files = {state_file(name, state): name for name, states in parameters.items() for state in states}
    if any(path == OPTIMIZER_STATE for name in parameters for path in _directories(name)):
        raise StorageError(f"a parameter needs the directory {OPTIMIZER_STATE}, which is a file: {_RENAME}")
    for name in parameters:
        for path in _directories(name):
            folder, _, last = path.rpartition("/")
            other = files.get(path, folder.removeprefix(f"{ZERO}/"))
            if last.endswith(".pt") and other in parameters and other != name:
                raise StorageError(
                    f"the files of parameter {name!r} would lie in {path}, among the states of parameter {other!r}: "
                    f"{_RENAME}"
                )


def _directories(name: str) -> Iterator[str]:
    """The directories on the way to a parameter's files, its own included, but for ``zero``."""
    parts = name.split("/")
    for count in range(1, len(parts) + 1):
        yield "/".join((ZERO, *parts[:count]))


def _is_universal(directory: Path) -> bool:
    return (directory / MANIFEST).exists() or (directory / ZERO).is_dir()


def _limits(path: Path) -> tuple[int, int]:
    """Bytes that a name and a path (its NUL included) may have where ``path`` is, or is to be."""
    there = _existing(path)
    return os.pathconf(there, "PC_NAME_MAX"), os.pathconf(there, "PC_PATH_MAX")


def _folds_case(path: Path) -> bool:
    """Whether the file system takes another case of a name for the same, by the nearest name with letters there is."""
    for there in (_existing(path), *_existing(path).parents):
        other = there.with_name(there.name.swapcase()) if there.name else there
        if other != there:
            return other.exists() and other.samefile(there)
    return False


def _existing(path: Path) -> Path:
    """The nearest directory above that is there."""
    path = Path(os.path.abspath(path))
    while True:
        try:
            path.stat()
        except OSError:  # not there, or too long to be
            path = path.parent
        else:
            return path
