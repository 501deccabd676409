# SPDX-License-Identifier: Apache-2.0
"""The command-line flags, usable with any argparse parser and as Megatron's ``extra_args_provider``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from megads_ucp.config import CHOICES, CONFIG_SECTION, ExportConfig

_DEFAULT = ExportConfig()

_FLAGS: dict[str, dict[str, Any]] = {
    "--universal-checkpoint-export": {
        "action": "store_true",
        "help": "write a universal checkpoint <tag>_universal beside every regular checkpoint",
    },
    "--universal-checkpoint-export-strict": {
        "action": "store_true",
        "help": "raise on every rank when an export fails; by default the failure is reported and training goes on",
    },
    "--universal-checkpoint-export-bucket-mb": {
        "type": int,
        "default": _DEFAULT.bucket_mb,
        "metavar": "MIB",
        "help": "bytes of messages in flight per rank and direction (default: %(default)s)",
    },
    "--universal-checkpoint-export-timeout-minutes": {
        "type": float,
        "default": _DEFAULT.timeout_minutes,
        "metavar": "MINUTES",
        "help": "how long a rank waits for its peers before the export is given up (default: %(default)s)",
    },
    "--universal-checkpoint-export-on-drift": {
        "choices": CHOICES["on_drift"],
        "default": _DEFAULT.on_drift,
        "help": "what happens when copies of a parameter, which ought to be equal, have drifted apart: 'error' fails "
        "the export, 'warn' exports one of the copies (default: %(default)s)",
    },
    "--universal-checkpoint-export-shared-files": {
        "choices": CHOICES["shared_files"],
        "default": _DEFAULT.shared_files,
        "help": "whether several ranks may write parts of one file; auto: where the file system is known to allow it "
        "(default: %(default)s)",
    },
    "--universal-checkpoint-export-shared-memory": {
        "choices": CHOICES["shared_memory"],
        "default": _DEFAULT.shared_memory,
        "help": "whether ranks of one host read what they need of each other from shared memory; 'never': it travels "
        "as messages, as between hosts (default: %(default)s)",
    },
    "--universal-checkpoint-verify": {
        "action": "store_true",
        "help": "check everything that a resume reads against the manifest's checksums",
    },
    "--universal-checkpoint-fallback": {
        "action": "store_true",
        "help": "where latest_universal is missing or empty, or names a checkpoint that is gone or incomplete, resume "
        "from the newest complete one",
    },
    "--universal-checkpoint-read-together": {
        "choices": CHOICES["read_together"],
        "default": _DEFAULT.read_together,
        "help": "whether a resume reads matrices cut along dim 1 once, and sends each rank its columns; auto: where "
        "the tensor-parallel ranks of a model are on several hosts (default: %(default)s)",
    },
}


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the argument group to ``parser``, unless it is there already, and return the parser."""
    if parser.get_default(CONFIG_SECTION) is not None:
        return parser  # the script adds them, and so does megads_ucp.run
    group = parser.add_argument_group("universal checkpoint export (megads_ucp)")
    for flag, options in _FLAGS.items():
        group.add_argument(flag, **options)
    return parser
