# SPDX-License-Identifier: Apache-2.0
"""Prepares the pytest process: tests.support.ranks sets the environment when imported, which must precede torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

import tests.support.ranks  # noqa: F401

# A busy machine is no failure.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the C++ extensions that DeepSpeed builds from session to session, in pytest's own cache."""
    if getattr(config, "cache", None) is not None:  # -p no:cacheprovider leaves it out
        os.environ["TORCH_EXTENSIONS_DIR"] = str(config.cache.mkdir("torch_extensions"))


@pytest.fixture(scope="session")
def build_op() -> Callable[[str], None]:
    """`build_op("CPUAdamBuilder")` has one of DeepSpeed's extensions loaded before the ranks of a test are forked.

    Built or loaded on a rank it would count against that rank's time, and a job killed meanwhile would leave torch's
    lock file, for which others wait for ever. The operating system frees the lock taken here by itself.
    """

    def build(builder: str) -> None:
        from deepspeed.accelerator import get_accelerator

        extensions = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        op = get_accelerator().create_op_builder(builder)
        with (extensions / f"{builder}.building").open("w") as building:
            fcntl.flock(building, fcntl.LOCK_EX)  # a suite beside this one may share the cache
            (extensions / op.name / "lock").unlink(missing_ok=True)
            op.load()

    return build
