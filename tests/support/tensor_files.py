# SPDX-License-Identifier: Apache-2.0
"""Files of one tensor, written as by the ranks of an export."""

from __future__ import annotations

from pathlib import Path

import torch

from megads_ucp.storage import ExtentRecord, FileWriter, Frame


def write_part(
    path: Path, frame: Frame, start: int, data: torch.Tensor | memoryview, root: Path | None = None
) -> ExtentRecord:
    """What one rank writes of a file that others write parts of, from byte `start` of the payload on."""
    file = FileWriter(path, frame, root)
    try:
        record = file.write(start, [data])
        file.close()
        return record
    finally:
        file.abandon()


def complete(path: Path, frame: Frame, crc32: int) -> None:
    """Write what follows the payload."""
    file = FileWriter(path, frame)
    file.complete(crc32)
    file.close()


def write_file(path: Path, frame: Frame, payload: torch.Tensor | memoryview, root: Path | None = None) -> ExtentRecord:
    """Write a whole file anew."""
    path.unlink(missing_ok=True)
    record = write_part(path, frame, 0, payload, root)
    complete(path, frame, record.crc32)
    return record
