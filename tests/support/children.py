# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a forked child, for tests of what a process may do to others or suffer itself."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def start_child(body: Callable[[], object]) -> int:
    """Forks; the child runs ``body`` and exits, with 1 if it raised. Returns the child's process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def exit_code(pid: int) -> int:
    """Waits for a child; negative numbers are the signals that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_child(body: Callable[[], object]) -> int:
    """Runs ``body`` in a child and returns its exit code."""
    return exit_code(start_child(body))
