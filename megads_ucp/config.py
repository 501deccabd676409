# SPDX-License-Identifier: Apache-2.0
"""What a user can set about the export. An engine's own DeepSpeed config section decides; the flags are the default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

CONFIG_SECTION = "universal_checkpoint_export"

CHOICES = {
    "on_drift": ("error", "warn"),
    "read_together": ("auto", "always", "never"),
    "shared_files": ("auto", "always", "never"),
    "shared_memory": ("auto", "never"),
}
"""The values that settings of type str may have."""


@dataclass(frozen=True)
class ExportConfig:
    """How an engine exports.

    Attributes:
        enabled: write ``<tag>_universal`` beside every regular checkpoint.
        strict: a failed export raises on every rank; otherwise it is reported and training goes on.
        bucket_mb: bytes of messages in flight per rank and direction, in MiB.
        timeout_minutes: how long a rank waits for its peers before the export is given up; fractions are allowed.
        on_drift: what it means that copies of a parameter have drifted apart: "error" fails the export, "warn" exports
            one of them, with a warning.
        shared_files: whether several ranks may write parts of one file: "always", "never", or "auto", where the file
            system is known to allow it (:func:`megads_ucp.storage.one_writer_reason`).
        shared_memory: whether ranks of one host read what they need of each other from shared memory: "auto", where
            they can, or "never"; otherwise it travels as messages, as between hosts.
        verify: a resume checks everything it reads against the manifest's checksums.
        read_together: whether a resume reads matrices that tensor parallelism cuts along dim 1 once, and has their
            columns travel to the ranks: "always", "never", or "auto", where such ranks are on several hosts. On one
            host they find each other's rows in the page cache, which is faster.
        fallback: where ``latest_universal`` is missing or empty, or names a checkpoint that is gone or incomplete, a
            resume takes the newest complete one.
    """

    enabled: bool = False
    strict: bool = False
    bucket_mb: int = 8
    timeout_minutes: float = 30.0
    on_drift: str = "error"
    shared_files: str = "auto"
    shared_memory: str = "auto"
    verify: bool = False
    read_together: str = "auto"
    fallback: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value, wanted = getattr(self, field.name), type(field.default)
            if type(value) is not wanted and (wanted, type(value)) != (float, int):
                raise ValueError(f"{CONFIG_SECTION}.{field.name} must be {wanted.__name__}, not {value!r}")
        if self.bucket_mb < 1:
            raise ValueError(f"{CONFIG_SECTION}.bucket_mb must be at least 1, not {self.bucket_mb}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{CONFIG_SECTION}.{name} must be one of {list(choices)}, not {getattr(self, name)!r}")
        if not 0 < self.timeout_minutes < math.inf:
            raise ValueError(f"{CONFIG_SECTION}.timeout_minutes must be above 0, not {self.timeout_minutes}")

    @classmethod
    def from_arguments(cls, args: Any) -> ExportConfig:
        """The configuration in parsed command-line arguments (any object; absent attributes keep their defaults)."""
        names = {field.name: f"universal_checkpoint_export_{field.name}" for field in fields(cls)}
        names["enabled"] = CONFIG_SECTION
        names["verify"] = "universal_checkpoint_verify"
        names["read_together"] = "universal_checkpoint_read_together"
        names["fallback"] = "universal_checkpoint_fallback"
        return cls(**{field: getattr(args, name) for field, name in names.items() if hasattr(args, name)})

    def for_engine(self, deepspeed_config: Mapping[str, Any]) -> ExportConfig:
        """This default, overridden by the engine's own section: ``true``, ``false`` or ``{"enabled": ..., ...}``.

        A section without "enabled" enables the export: whoever writes one wants it.

        Raises:
            ValueError: the section has unknown keys or values of a wrong type.
        """
        if CONFIG_SECTION not in deepspeed_config:
            return self
        section = deepspeed_config[CONFIG_SECTION]
        if isinstance(section, bool):
            return replace(self, enabled=section)
        known = {field.name for field in fields(self)}
        if not isinstance(section, Mapping) or not set(section) <= known:
            raise ValueError(
                f'"{CONFIG_SECTION}" in the DeepSpeed config must be true, false or a section of {sorted(known)}; '
                f"got {section!r}"
            )
        return replace(self, **{"enabled": True, **section})
