# SPDX-License-Identifier: Apache-2.0
"""The one line that a job's log has of an export that succeeded, whether or not logging is set up there."""

from __future__ import annotations

import logging
import sys


def announce(logger: logging.Logger, text: str) -> None:
    """Log at INFO what a user should see without having asked; once, and on standard output if nobody else shows it.

    Few training scripts set up logging; then Python shows warnings alone, and Megatron's and DeepSpeed's own lines of a
    save are on standard output. A level that the user gave this logger counts, and so does ``logging.disable``; the
    root's, WARNING unless somebody changes it, does not.
    """
    silenced = logger.disabled or logger.level > logging.INFO or logger.manager.disable >= logging.INFO
    if silenced:
        return
    if any(handler.level <= logging.INFO for handler in _handlers(logger)):
        logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))
    else:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    """All that a record of this logger reaches."""
    found, at = list(logger.handlers), logger
    while at.propagate and at.parent is not None:
        at = at.parent
        found += at.handlers
    return found
