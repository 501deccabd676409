# SPDX-License-Identifier: Apache-2.0
"""The errors of this package. Each message names the file, parameter or rank concerned and the way out."""

from __future__ import annotations


class UniversalCheckpointError(RuntimeError):
    """Base of all errors that megads_ucp raises."""


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
    """A step failed on some rank. Raised on all ranks; names every failed rank and its reason."""


class ChannelError(UniversalCheckpointError):
    """A rank no longer answers, so the channel between the ranks is closed. The next export or resume opens another."""
