# SPDX-License-Identifier: Apache-2.0
"""Prepares the pytest process; tests.ranks sets the environment when it is imported, which must precede torch."""

from __future__ import annotations

import os
import time

import pytest

import tests.ranks  # noqa: F401

_ABANDONED_SECONDS = 600


def pytest_configure(config: pytest.Config) -> None:
    """Keeps C++ extensions that DeepSpeed builds (DeepSpeedCPUAdam) from session to session, in pytest's own cache."""
    if config.cache is None:  # -p no:cacheprovider
        return
    extensions = config.cache.mkdir("torch_extensions")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
    # torch waits for ever for the owner of a lock, even one that was killed in the middle of a build.
    for lock in extensions.rglob("lock"):
        if time.time() - lock.stat().st_mtime > _ABANDONED_SECONDS:
            lock.unlink(missing_ok=True)
