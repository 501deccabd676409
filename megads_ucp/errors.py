# SPDX-License-Identifier: Apache-2.0
"""The errors of this package. Each message names the file, parameter or rank concerned and the way out."""

from __future__ import annotations

from collections.abc import Collection


class UniversalCheckpointError(RuntimeError):
    """Base of all errors that megads_ucp raises.

    Attributes:
        spokesmen: where all ranks have the same error, those that log it; None if each rank has one of its own.
    """

    spokesmen: Collection[int] | None = (0,)


class UnsupportedError(UniversalCheckpointError):
    """This engine, or this DeepSpeed, cannot be exported or restored."""


class TensorParallelError(UniversalCheckpointError):
    """The tensor parallelism of a model differs from what its configuration asks for."""


class LayoutError(UniversalCheckpointError):
    """How a parameter is cut over tensor-parallel ranks is unknown or contradictory."""


class DriftError(UniversalCheckpointError):
    """Replicas of a parameter or of its optimizer state, which must be equal, differ."""


class PlanError(UniversalCheckpointError):
    """The ranks' descriptions of their partitions contradict each other."""


class StorageError(UniversalCheckpointError):
    """A checkpoint file is missing, damaged or foreign, or could not be read or written."""


class Disagreement(UniversalCheckpointError):
    """The ranks differ: in a setting, in an argument of a save, or in the kind of error a step failed with; or that
    error is none of this package's. Raised on all ranks; names the ranks, and the value or the reason of each."""


class ChannelError(UniversalCheckpointError):
    """A rank no longer answers, so the channel between the ranks is closed. The next export or resume opens another."""

    spokesmen = None
