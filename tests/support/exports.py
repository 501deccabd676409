# SPDX-License-Identifier: Apache-2.0
"""What a killed export leaves, and a later one that clears it away, without any ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megads_ucp.storage import Staging
from tests.support.children import run_child


def left_by_a_killed_job(target: Path, run_id: str, act: Callable[[Staging], object] = lambda staging: None) -> None:
    """What is there after a process that was writing ``target``, and has done ``act``, is gone without a word."""

    def body() -> None:
        staging = Staging.create(target, run_id)
        staging.make_directories(["zero/w/fp32.pt"])
        staging.path("zero/w/fp32.pt").touch()
        act(staging)
        os._exit(7)

    assert run_child(body) == 7


def cleared(target: Path, latest: Path | None = None) -> None:
    """Begins an export of ``target``, which clears up, and gives it up."""
    Staging.create(target, "clearing", latest).discard()
