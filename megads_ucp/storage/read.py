# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoint files: headers without running code, and of the tensors only the ranges asked for."""

from __future__ import annotations

import math
import os
import pickle
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from megads_ucp.errors import StorageError
from megads_ucp.storage.durable import payload_view, pread_all, ranges, storage_errors
from megads_ucp.storage.format import MASTER
from megads_ucp.storage.records import FileRecord

_LOCK = threading.Lock()


@dataclass(frozen=True)
class TensorFile:
    """A ``.pt`` file of the universal format, known by its header: ``{"param": tensor, **metadata}``.

    The stock converter saves views, so the stored elements need be neither contiguous nor all of their storage.
    Offsets and counts of elements are *logical* all the same, in row-major order.

    Attributes:
        path: of the file.
        shape: of the tensor.
        dtype: of the tensor.
        payload_offset: byte offset in the file of the tensor's first element.
        metadata: the keys beside "param"; empty where the file is known by its record.
        strides: of the tensor, in elements.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    payload_offset: int
    metadata: Mapping[str, Any] = field(hash=False)
    strides: tuple[int, ...]

    @classmethod
    def of_record(cls, path: Path, record: FileRecord) -> TensorFile:
        """A file that the manifest describes and that has been compared with it: without unpickling anything.

        Raises:
            StorageError: not a tensor's file.
        """
        dtype, shape = record.tensor_dtype, record.shape
        assert shape is not None
        return cls(path, shape, dtype, record.payload_offset, {}, torch.empty(shape, device="meta").stride())

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def contiguous(self) -> bool:
        """Whether logical neighbours are neighbours in the file, so that a range is one read."""
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()

    def read(self, start: int, numel: int, out: torch.Tensor) -> torch.Tensor:
        """Read logical elements [start, start + numel) into ``out`` (contiguous, on the CPU, of this dtype).

        Returns:
            ``out``

        Raises:
            StorageError: the file is gone or shorter than it was.
        """
        if out.dtype != self.dtype or out.numel() != numel:
            raise ValueError(f"{self.path}: {numel} x {self.dtype} do not fit into {out.numel()} x {out.dtype}")
        if start < 0 or start + numel > self.numel:
            raise ValueError(
                f"{self.path}: [{start}, {start + numel}) is outside the {self.numel} elements of the tensor"
            )
        read = self._read_span if self.contiguous else self._read_strided
        with storage_errors("read", self.path), ranges(self.path) as fd:
            if numel:
                read(fd, start, out.detach().view(-1))
        return out

    def _read_span(self, fd: int, start: int, out: torch.Tensor) -> None:
        """Read the stored elements from ``start`` on, counted in the file from the first logical one."""
        view = payload_view(out)
        if pread_all(fd, view, self.payload_offset + start * self.dtype.itemsize) < len(view):
            raise StorageError(f"{self.path} is truncated: it ends before stored element {start + out.numel()}")

    def _read_strided(self, fd: int, start: int, out: torch.Tensor) -> None:
        """Read the stored span of all rows touched and pick from it: the rare case, correct rather than fast."""
        row = math.prod(self.shape[1:])
        first, last = start // row, (start + out.numel() - 1) // row
        shape = (last - first + 1, *self.shape[1:])
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))
        stored = torch.empty(span, dtype=self.dtype, device="cpu")
        self._read_span(fd, first * self.strides[0], stored)
        out.copy_(stored.as_strided(shape, self.strides).reshape(-1)[start - first * row :][: out.numel()])


def open_tensor(path: Path) -> TensorFile:
    """Read the header of a ``.pt`` file that holds one tensor. No code in the file is run, no payload is read.

    Raises:
        StorageError: missing, truncated, not a file of ``torch.save``, other content, or in need of code to load.
    """
    content = _load(path, map_location="meta", allowed=(SubparamShape,))
    if not isinstance(content, dict) or not isinstance(content.get("param"), torch.Tensor):
        found = f"the keys {sorted(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise StorageError(f'{path} holds {found}, not a tensor under "param": it is no file of a universal checkpoint')
    tensor = content["param"]
    metadata = {key: value for key, value in content.items() if key != "param"}
    if tensor.layout != torch.strided or any(isinstance(value, torch.Tensor) for value in metadata.values()):
        raise StorageError(f"{path} holds more than one plain tensor: it is no file of a universal checkpoint")
    storage = tensor.untyped_storage()
    # torch.load(map_location="meta") leaves the position of the record there (torch/serialization.py, load_tensor), but
    # not for its pre-zip format.
    begin = getattr(storage, "_checkpoint_offset", None)
    if begin is None:
        raise StorageError(f"{path} is not a zip file: it has the format that torch.save wrote before version 1.6")
    with storage_errors("read", path):
        size = os.stat(path).st_size
    if begin + storage.nbytes() > size:
        raise StorageError(f"{path} is truncated: its tensor ends at byte {begin + storage.nbytes()} of {size}")
    offset = begin + tensor.storage_offset() * tensor.element_size()
    return TensorFile(Path(path), tuple(tensor.shape), tensor.dtype, offset, metadata, tuple(tensor.stride()))


def state_names(folder: Path) -> list[str]:
    """Names of the states with a file in a parameter's directory, sorted: "exp_avg" for exp_avg.pt.

    Raises:
        StorageError: the directory is missing.
    """
    with storage_errors("list", folder):
        return sorted(path.stem for path in folder.iterdir() if path.suffix == ".pt")


def parameter_names(zero: Path) -> tuple[str, ...]:
    """Names of the parameters with a directory in ``zero``, sorted; they may hold slashes.

    Raises:
        StorageError: the operating system refuses.
    """
    with storage_errors("list", zero):
        return tuple(sorted(path.parent.relative_to(zero).as_posix() for path in zero.rglob(f"{MASTER}.pt")))


def read_object(path: Path, allowed: tuple[type, ...] = (), *, weights_only: bool = True) -> Any:
    """``torch.load`` onto the CPU of a small pickled file.

    Args:
        path: of the file.
        allowed: classes that the file may hold beside those torch itself allows.
        weights_only: False runs the code that the file names. Only for the user's own checkpoints: their client state
            may hold any object.

    Raises:
        StorageError: missing, truncated, not a file of ``torch.save``, or in need of other code to load.
    """
    return _load(path, map_location="cpu", allowed=allowed, weights_only=weights_only)


def _load(path: Path, *, map_location: str, allowed: tuple[type, ...], weights_only: bool = True) -> Any:
    try:
        with storage_errors("read", path), open(path, "rb") as stream, _allowlist(allowed):
            return torch.load(stream, map_location=map_location, weights_only=weights_only)
    except StorageError:
        raise
    except pickle.UnpicklingError as error:
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        what = f"needs {forbidden[1]} to load, which was not run" if forbidden else "is not a plain file of torch.save"
        raise StorageError(f"{path} {what}: it is damaged, or no file of a universal checkpoint") from error
    except Exception as error:  # torch.load reports damage as RuntimeError, EOFError, ValueError, KeyError ...
        raise StorageError(f"{path} is truncated, damaged or not a file of torch.save: {error}") from error


@contextmanager
def _allowlist(allowed: tuple[type, ...]) -> Iterator[None]:
    """Let ``allowed`` pass ``weights_only``.

    ``safe_globals`` takes its classes off a process-wide set again on leaving. So threads must not overlap in it, and
    classes that the user had allowed before must not go through it.
    """
    with _LOCK:
        missing: list[Any] = [cls for cls in allowed if cls not in torch.serialization.get_safe_globals()]
        with torch.serialization.safe_globals(missing):
            yield
