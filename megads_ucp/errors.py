# SPDX-License-Identifier: Apache-2.0
"""The errors this package raises. Each message names the file, parameter or rank concerned and the way out."""

from __future__ import annotations


class UniversalCheckpointError(RuntimeError):
    """Base of every error raised by megads_ucp."""


class UnsupportedError(UniversalCheckpointError):
    """The engine is of a kind that cannot be exported or restored yet."""


class TensorParallelError(UniversalCheckpointError):
    """A model's tensor parallelism is not what its configuration asks for."""


class LayoutError(UniversalCheckpointError):
    """How a parameter is cut over tensor-parallel ranks is unknown or contradictory."""


class DriftError(UniversalCheckpointError):
    """Copies of a parameter, or of its state, that ought to be equal are not."""


class PlanError(UniversalCheckpointError):
    """The ranks' descriptions of their partitions do not fit together."""


class StorageError(UniversalCheckpointError):
    """A checkpoint file is missing, damaged, foreign, or could not be written."""


class Disagreement(UniversalCheckpointError):
    """A step failed on some rank; raised on all of them, naming every rank that failed and why."""


class ChannelError(UniversalCheckpointError):
    """Some rank does not answer any more. The channel is closed; :meth:`Channel.abandoned` tells all ranks so."""
