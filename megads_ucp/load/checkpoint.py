# SPDX-License-Identifier: Apache-2.0
"""A universal checkpoint as a resume sees it."""

from __future__ import annotations

import copy
import fnmatch
import platform
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO, VOCAB_TENSOR

from megads_ucp import storage
from megads_ucp.engine.compat import PICKLED_CLASSES
from megads_ucp.engine.state import Coordinates
from megads_ucp.errors import StorageError
from megads_ucp.layout.attention import QKV_ORDER, AttentionOrder
from megads_ucp.load.reads import File
from megads_ucp.storage.format import (
    EXACT_FILES,
    MANIFEST,
    MASTER,
    MODEL_STATES_FILES,
    OPTIMIZER_STATE,
    OPTIMIZER_VALUES,
    STEP,
    ZERO,
    padding_file,
    state_file,
)
from megads_ucp.storage.values import GroupValues, from_file


class Checkpoint:
    """A universal checkpoint directory, written by us or by the stock converter (then without a manifest).

    Parameters go by the names they were saved under, until :meth:`renamed` gives them those of this run.

    Raises:
        StorageError: on construction, if the directory is not one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._zero = directory / ZERO
        self._saved_as: Mapping[str, str] = {}
        self._renamed: dict[str, list[str]] = {}
        if not directory.is_dir():
            raise StorageError(f"{directory} does not exist, or not on this host ({platform.node()}).")
        if not self._zero.is_dir():
            universal = directory.with_name(f"{directory.name}_universal")
            hint = f" The one exported beside it is {universal.name}." if universal.is_dir() else ""
            raise StorageError(f"{directory} has no directory zero: it is not a universal checkpoint.{hint}")
        self.manifest = storage.read_manifest(directory) if (directory / MANIFEST).exists() else None

    def renamed(self, saved_as: Mapping[str, str]) -> Checkpoint:
        """The same checkpoint, with parameters under other names.

        Args:
            saved_as: by name in this run, the name in the checkpoint, where they differ.
        """
        other = copy.copy(self)
        other._saved_as, other._renamed = saved_as, {}
        for here, saved in saved_as.items():
            other._renamed.setdefault(saved, []).append(here)
        return other

    def names(self) -> tuple[str, ...]:
        """Of everything the checkpoint has, as saved: parameters, frozen ones, buffers."""
        if self.manifest is not None:
            return tuple(self.manifest.parameters)
        return storage.parameter_names(self._zero)

    @property
    def _files(self) -> Mapping[str, storage.FileRecord]:
        """The manifest's records of files; none without a manifest."""
        return self.manifest.files if self.manifest is not None else {}

    @cached_property
    def _recorded_states(self) -> dict[str, list[str]]:
        """The manifest's names of states, by folder."""
        found: dict[str, list[str]] = {}
        for path in sorted(self._files):
            folder, _, name = path.rpartition("/")
            found.setdefault(folder, []).append(name.removesuffix(".pt"))
        return found

    def has(self, parameter: str) -> bool:
        """By the manifest, where there is one: a directory that was deleted is damage, not a parameter never saved."""
        if self.manifest is None:
            return (self._zero / self._saved(parameter)).is_dir()
        return self._state_file(parameter, MASTER) in self._files

    def states(self, parameter: str) -> list[str]:
        """Names of the states the checkpoint has for a parameter, ``step`` included.

        By the manifest, where there is one: a file that was deleted is missing, not a state the optimizer never had.
        """
        if self.manifest is None:
            return storage.state_names(self._zero / self._saved(parameter))
        return self._recorded_states.get(f"{ZERO}/{self._saved(parameter)}", [])

    def file(self, parameter: str, state: str) -> File:
        """The file of one state, checked as far as that goes without reading its tensor.

        Raises:
            StorageError: missing, truncated, or not the file that the manifest describes.
        """
        name = self._state_file(parameter, state)
        if self.manifest is None:
            tensor = storage.open_tensor(self.directory / name)
            order = AttentionOrder.from_dict(tensor.metadata.get(QKV_ORDER))
            return File(tensor, None, bool(tensor.metadata.get(VOCAB_TENSOR)), order)
        record = self._record(name)
        layout = self.manifest.parameters[self._saved(parameter)].layout
        storage.check_frame(self.directory / name, record)
        tensor = storage.TensorFile.of_record(self.directory / name, record)
        order = AttentionOrder.from_dict(layout.qkv_order)
        return File(tensor, record, layout.vocabulary_size is not None, order)

    def padding(self, parameter: str, state: str) -> File | None:
        """The file of the rows that padded a vocabulary, None if the run that saved had none or kept none.

        Raises:
            StorageError: as :meth:`file`.
        """
        name = padding_file(self._saved(parameter), state)
        if name not in self._files:
            return None
        record = self._record(name)
        storage.check_frame(self.directory / name, record)
        return File(storage.TensorFile.of_record(self.directory / name, record), record, vocabulary=False)

    def padded_rows(self, parameter: str) -> int | None:
        """Rows of a vocabulary in the run that saved, padding included; None where nobody wrote that down."""
        known = self._parameter(parameter)
        return None if known is None else known.layout.padded_rows

    def has_whole(self, parameter: str, shape: tuple[int, ...]) -> bool:
        """Whether the manifest lists the parameter in this shape, with no vocabulary cut to its real rows."""
        known = self._parameter(parameter)
        return known is not None and known.shape == shape and known.layout.vocabulary_size is None

    def tells_order(self, parameter: str) -> bool:
        """Whether the manifest says how a fused query-key-value projection orders its rows."""
        known = self._parameter(parameter)
        return known is not None and known.layout.qkv_order is not None

    def _parameter(self, name: str) -> storage.ParameterRecord | None:
        """The manifest's record of a parameter, None without it or without a manifest."""
        return self.manifest.parameters.get(self._saved(name)) if self.manifest is not None else None

    def _saved(self, parameter: str) -> str:
        return self._saved_as.get(parameter, parameter)

    def _state_file(self, parameter: str, state: str) -> str:
        return state_file(self._saved(parameter), state)

    def dtype(self, parameter: str, state: str) -> torch.dtype:
        """By the manifest, without a look at the file."""
        return self._record(self._state_file(parameter, state)).tensor_dtype

    def step(self, parameter: str) -> Any:
        """The step of a parameter, None if the optimizer that saved kept none."""
        if STEP not in self.states(parameter):
            return None
        file = self._state_file(parameter, STEP)
        self._check_object(file)
        return storage.read_object(self.directory / file)

    def has_grid(self, place: Coordinates) -> bool:
        """Whether the run that saved had as many pipeline stages and tensor-parallel ranks as this one."""
        saved = self.manifest.topology if self.manifest is not None else {}
        return (saved.get("pipeline_stages"), saved.get("tensor_parallel")) == (place.stages, place.tp_degree)

    def values(self) -> tuple[GroupValues, ...]:
        """What the optimizer kept beside its tensors; none from the stock converter or an export of version 0.1.

        Raises:
            StorageError: the file of it is missing, damaged or of another export.
        """
        if OPTIMIZER_VALUES not in self._files:
            return ()
        self._check_object(OPTIMIZER_VALUES)
        return from_file(storage.read_object(self.directory / OPTIMIZER_VALUES))

    def state_dtypes(self, parameter: str) -> Mapping[str, torch.dtype]:
        """Dtypes of a parameter's states in the run that saved, master weights included; none without a manifest."""
        known = self._parameter(parameter)
        return {} if known is None else {name: getattr(torch, dtype) for name, dtype in known.states.items()}

    def common_state(self) -> dict[str, Any]:
        """Content of zero/optimizer_state.pt."""
        self._check_object(OPTIMIZER_STATE)
        state: dict[str, Any] = storage.read_object(self.directory / OPTIMIZER_STATE, PICKLED_CLASSES)
        return state

    def exact_values(self) -> dict[str, torch.Tensor]:
        """What fp32 could not hold of buffers and frozen parameters, of all stages, by name.

        Raises:
            StorageError: a file of them is missing, damaged or of another export.
        """
        values: dict[str, torch.Tensor] = {}
        for name in sorted(fnmatch.filter(self._files, EXACT_FILES), reverse=True):  # as in zero/, the first
            self._check_object(name)
            values.update(storage.read_object(self.directory / name))
        return {here: value for name, value in values.items() for here in self._names_here(name)}

    def check_model_states(self, rank: int, world: int) -> None:
        """Check this rank's part of the mp_rank files, which DeepSpeed reads itself, by their number and place.

        Raises:
            StorageError: one is missing, damaged or of another export.
        """
        names = sorted(path for path in self._files if path.startswith("mp_rank_"))
        for name in names[rank::world]:
            self._check_object(name)

    def info(self) -> Mapping[str, Any] | None:
        """The ``universal_checkpoint_info`` of the run that saved it."""
        for path in sorted(self.directory.glob(MODEL_STATES_FILES)):
            # Client state may hold any object, so this file is trusted as far as DeepSpeed's own load of it trusts it.
            state: dict[str, Any] = storage.read_object(path, weights_only=False)
            return state.get(UNIVERSAL_CHECKPOINT_INFO)
        raise StorageError(f"{self.directory} has no mp_rank_*_model_states.pt: it is not a universal checkpoint.")

    def groups(self) -> tuple[storage.GroupRecord, ...]:
        """The parameter groups of every stage, by stage and index; none without a manifest."""
        saved = self.manifest.groups if self.manifest is not None else ()
        return tuple(
            replace(group, parameters=tuple(here for name in group.parameters for here in self._names_here(name)))
            for group in saved
        )

    def _names_here(self, saved: str) -> list[str]:
        """What this run calls a saved parameter; two names, if it has two of one that was saved once."""
        return self._renamed.get(saved, [saved])

    def _record(self, path: str) -> storage.FileRecord:
        if path not in self._files:
            raise StorageError(f"{self.directory} has no {path}: its manifest does not list it.")
        return self._files[path]

    def _check_object(self, path: str) -> None:
        """Compare a small pickled file, as a whole, with the manifest if there is one."""
        if self.manifest is not None:
            storage.verify_file(self.directory / path, self._record(path))
