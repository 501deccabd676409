# SPDX-License-Identifier: Apache-2.0
"""What an export is asked to do, and what it did."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megads_ucp.storage.format import LATEST, universal_directory


@dataclass(frozen=True)
class ExportRequest:
    """What a call of ``save_checkpoint`` asks for.

    Attributes:
        directory: the universal checkpoint to be.
        latest: the file that is to name it, None to leave that alone.
        client_state: as given to ``save_checkpoint``.
        exclude_frozen: leave frozen parameters out.
        arguments: of ``save_checkpoint``, those that must be equal on all ranks.
    """

    directory: Path
    latest: Path | None
    client_state: Mapping[str, Any]
    exclude_frozen: bool
    arguments: Mapping[str, Any]

    @classmethod
    def of_save(
        cls, save_dir: Any, tag: str, client_state: Mapping[str, Any], save_latest: bool, exclude_frozen: bool
    ) -> ExportRequest:
        """The request that goes with a save of the regular checkpoint ``<save_dir>/<tag>``."""
        save_dir = Path(os.path.abspath(save_dir))
        latest = save_dir / LATEST if save_latest else None
        arguments = {
            "save_dir": str(save_dir),
            "tag": tag,
            "save_latest": save_latest,
            "exclude_frozen_parameters": exclude_frozen,
        }
        return cls(universal_directory(save_dir / tag), latest, client_state, exclude_frozen, arguments)


@dataclass
class ExportReport:
    """What one export did, as this rank saw it.

    Attributes:
        directory: the universal checkpoint.
        nbytes: payload bytes of all tensors, over all ranks.
        nbytes_moved: of these, bytes that one rank sent to another.
        imbalance: payload bytes of the busiest writer over the mean.
        seconds: by step of the flow.
    """

    directory: Path
    nbytes: int = 0
    nbytes_moved: int = 0
    imbalance: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started

    def __str__(self) -> str:
        steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in self.seconds.items())
        size, seconds = self.nbytes / 1e9, sum(self.seconds.values())
        return f"{self.directory}: {size:.3g} GB in {seconds:.1f} s, {size / max(seconds, 1e-3):.2g} GB/s ({steps})"
