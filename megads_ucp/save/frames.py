# SPDX-License-Identifier: Apache-2.0
"""The files of an export's tensors: their names, and the bytes around the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megads_ucp import storage
from megads_ucp.plan.types import Extent, Subject
from megads_ucp.storage.format import MASTER, OPTIMIZER_STATE, padding_file, state_file


def file_name(subjects: Sequence[Subject], extent: Extent) -> str:
    """The extent's file, relative to the checkpoint directory."""
    subject = subjects[extent.subject]
    return (padding_file if subject.padding else state_file)(subject.name, extent.state.name)


class Frames:
    """The frames of tensor files: made once, and one for all states of a parameter in one dtype."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._subjects = subjects
        self._made: dict[tuple[int, torch.dtype], storage.Frame] = {}

    def of(self, extent: Extent) -> storage.Frame:
        key = extent.subject, extent.state.written
        if key not in self._made:
            subject = self._subjects[extent.subject]
            self._made[key] = storage.frame(subject.layout.shape, extent.state.written, subject.metadata())
        return self._made[key]

    def all(self) -> dict[str, storage.Frame]:
        """The frame of every tensor's file of the checkpoint, by the file's name."""
        return {
            file_name(self._subjects, extent): self.of(extent)
            for number, subject in enumerate(self._subjects)
            for state in subject.states
            for extent in [Extent(number, state, 0, subject.layout.numel, 0)]
        }


def one_file_of_each(subjects: Iterable[Subject]) -> list[str]:
    """One file in each directory of the checkpoint, by its name."""
    return [OPTIMIZER_STATE, *((padding_file if s.padding else state_file)(s.name, MASTER) for s in subjects)]
