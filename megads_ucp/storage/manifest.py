# SPDX-License-Identifier: Apache-2.0
"""The manifest of a universal checkpoint: its schema, and how it is written and read (format version 1)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads_ucp.errors import StorageError
from megads_ucp.storage.durable import storage_errors, write_durably
from megads_ucp.storage.format import MANIFEST
from megads_ucp.storage.records import FileRecord

_FORMAT = {"format": "megads_ucp manifest", "format_version": 1}


@dataclass(frozen=True)
class LayoutRecord:
    """How a parameter was cut over tensor-parallel ranks when it was saved.

    Attributes:
        kind: of its :class:`~megads_ucp.layout.rule.Rule`, as are ``dim``, ``sub_sizes`` and ``source``.
        vocabulary_size: real rows of a vocabulary that was padded on the ranks; None for any other parameter.
        padded_rows: all rows of a vocabulary, padding included; None for any other parameter, and in manifests of
            version 0.1, which kept no padding.
        qkv_order: ``AttentionOrder.to_dict()`` of a fused query-key-value projection; None for any other parameter.
        shards: shape of the shard of each tensor-parallel rank.
    """

    kind: str
    dim: int | None
    sub_sizes: tuple[int, ...] | None
    vocabulary_size: int | None
    padded_rows: int | None
    qkv_order: Mapping[str, Any] | None
    source: str
    shards: tuple[tuple[int, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LayoutRecord:
        """Inverse of :meth:`to_json`; manifests of version 0.1 lack the later fields."""
        sub_sizes = content["sub_sizes"]
        return cls(
            kind=content["kind"],
            dim=content["dim"],
            sub_sizes=None if sub_sizes is None else tuple(sub_sizes),
            vocabulary_size=content["vocabulary_size"],
            padded_rows=content.get("padded_rows"),
            qkv_order=content.get("qkv_order"),
            source=content["source"],
            shards=tuple(map(tuple, content["shards"])),
        )


@dataclass(frozen=True)
class ParameterRecord:
    """What the manifest knows about one parameter, frozen parameter or buffer.

    Attributes:
        shape: of the full tensor, as it lies in the files.
        owned: whether an optimizer owns it.
        states: dtype ("bfloat16") on the ranks of each of its states, master weights included.
        layout: how it was cut.
    """

    shape: tuple[int, ...]
    owned: bool
    states: Mapping[str, str]
    layout: LayoutRecord

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**vars(self), "layout": self.layout.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ParameterRecord:
        """Inverse of :meth:`to_json`."""
        layout = LayoutRecord.from_json(content["layout"])
        return cls(tuple(content["shape"]), content["owned"], content["states"], layout)


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group of one pipeline stage.

    Attributes:
        stage: pipeline stage.
        index: place among the groups of the stage.
        parameters: names of its members, in the order of the flat group.
        hyperparameters: as JSON holds them; a value that JSON cannot hold is represented by its repr.
    """

    stage: int
    index: int
    parameters: tuple[str, ...]
    hyperparameters: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> GroupRecord:
        """Inverse of :meth:`to_json`."""
        parameters = tuple(content["parameters"])
        return cls(content["stage"], content["index"], parameters, content["hyperparameters"])


class _FileRecords(Mapping[str, FileRecord]):
    """Records made when they are looked up: a rank reads a few of a checkpoint's files, which may be 10,000."""

    def __init__(self, entries: list[Mapping[str, Any]]) -> None:
        self._entries = {entry["path"]: entry for entry in entries}

    def __getitem__(self, path: str) -> FileRecord:
        return FileRecord.from_json(self._entries[path])

    def __contains__(self, path: object) -> bool:
        return path in self._entries  # Mapping's own would make the record

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class Manifest:
    """What a universal checkpoint contains, and what wrote it.

    Attributes:
        run_id: of the export.
        created: time of the export, in UTC, ISO 8601.
        versions: of megads_ucp, DeepSpeed, torch and Python.
        topology: parallel degrees of the run that saved it.
        run: precision, optimizer, batch and step of that run (``EngineState.facts``).
        parameters: by name.
        absent: names of parameters that were left out on request.
        groups: of all pipeline stages, by stage and index.
        files: by path; of a manifest that was read, each is checked when it is looked up (StorageError).
    """

    run_id: str
    created: str
    versions: Mapping[str, str]
    topology: Mapping[str, int]
    run: Mapping[str, Any]
    parameters: Mapping[str, ParameterRecord]
    absent: tuple[str, ...]
    groups: tuple[GroupRecord, ...]
    files: Mapping[str, FileRecord]

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it, with format and version."""
        return {
            **_FORMAT,
            **vars(self),
            "parameters": {name: parameter.to_json() for name, parameter in self.parameters.items()},
            "groups": [group.to_json() for group in self.groups],
            "files": [file.to_json() for file in self.files.values()],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        """Inverse of :meth:`to_json`, also after a passage through JSON.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: a field is missing or makes no sense.
        """
        return cls(
            run_id=content["run_id"],
            created=content["created"],
            versions=content["versions"],
            topology=content["topology"],
            run=content["run"],
            parameters={name: ParameterRecord.from_json(entry) for name, entry in content["parameters"].items()},
            absent=tuple(content["absent"]),
            groups=tuple(map(GroupRecord.from_json, content["groups"])),
            files=_FileRecords(content["files"]),
        )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``, durably but for its name (which the commit's fsync of directories sees to).

    Raises:
        StorageError: the operating system refuses.
    """
    text = json.dumps(manifest.to_json(), separators=(",", ":"))
    with storage_errors("write", directory / MANIFEST):
        write_durably(directory / MANIFEST, text.encode())


def read_manifest(directory: Path) -> Manifest:
    """The content of ``manifest.json``.

    Raises:
        StorageError: missing, damaged, foreign or of a newer version.
    """
    path = directory / MANIFEST
    with storage_errors("read", path):
        data = path.read_bytes()
    try:
        content = json.loads(data)
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise StorageError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT["format"]:
        raise StorageError(f"{path} is not a manifest of megads_ucp: {directory} was written by something else")
    if content.get("format_version") != _FORMAT["format_version"]:
        raise StorageError(
            f"{path} has format version {content.get('format_version')}, this megads_ucp reads version "
            f"{_FORMAT['format_version']}: install a newer one"
        )
    try:
        return Manifest.from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{path} is malformed ({error!r}): restore it from a copy, or load another tag") from error
