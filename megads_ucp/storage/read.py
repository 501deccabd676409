# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoint files: headers without running code, and of the tensors only the ranges asked for."""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from megads_ucp.errors import StorageError
from megads_ucp.storage.durable import pread_all, ranges, storage_errors
from megads_ucp.storage.manifest import FileRecord, check_frame
from megads_ucp.storage.write import payload_view

# Beside parameters, and in zero/optimizer_state.pt.
_CLASSES_OF_THE_FORMAT = (SubparamShape, LossScaler, DynamicLossScaler, ZeroStageEnum)


_LOCK = threading.Lock()


_bytes_read = 0


def bytes_read() -> int:
    """Bytes of tensor payload asked for by this process since the last :func:`reset_bytes_read`."""
    return _bytes_read


def reset_bytes_read() -> None:
    global _bytes_read
    with _LOCK:
        _bytes_read = 0


@dataclass(frozen=True)
class TensorFile:
    """A ``.pt`` file of the universal format, known by its header: ``{"param": tensor, **metadata}``.

    shape, strides: of the tensor, in elements. The stock converter saves views, so the stored elements need not be
        contiguous, nor fill their storage. Everything below counts *logical* elements, in row-major order.
    payload_offset: byte offset in the file of the tensor's first element.
    metadata: the keys beside "param"; empty where the file is known by its record.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    payload_offset: int
    metadata: Mapping[str, Any] = field(hash=False)
    strides: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return _numel(self.shape)

    @cached_property
    def contiguous(self) -> bool:
        """Whether logical neighbours are neighbours in the file, so that a range is one read."""
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()

    def read(self, start: int, numel: int, out: torch.Tensor) -> torch.Tensor:
        """Reads logical elements [start, start + numel) into ``out`` (contiguous, on the CPU, this dtype); returns it.

        Raises:
            StorageError: the file is gone or shorter than it was.
        """
        return self.read_runs([(start, numel)], out)

    def read_runs(self, runs: Sequence[tuple[int, int]], out: torch.Tensor) -> torch.Tensor:
        """Reads several ranges ``(start, numel)`` and lays them one after the other in ``out``; opens the file once.

        Ranges that continue each other become one read; gaps are never read: the caller knows what a seek is worth.

        Raises:
            StorageError: as :meth:`read`.
        """
        total = sum(numel for _, numel in runs)
        if out.dtype != self.dtype or out.numel() != total:
            raise ValueError(f"{self.path}: {total} x {self.dtype} do not fit into {out.numel()} x {out.dtype}")
        if any(start < 0 or numel < 0 or start + numel > self.numel for start, numel in runs):
            raise ValueError(f"{self.path}: a range of {list(runs)} is outside the tensor's {self.numel} elements")
        flat, done = out.detach().view(-1), 0
        read = self._read_span if self.contiguous else self._read_strided
        with storage_errors("read", self.path), ranges(self.path) as fd:
            for start, numel in _merged(runs):
                read(fd, start, flat[done : done + numel])
                done += numel
        return out

    def _read_span(self, fd: int, start: int, out: torch.Tensor) -> None:
        """Reads what lies in the file from the ``start``-th stored element on, counted from the first logical one."""
        global _bytes_read
        view = payload_view(out)
        with _LOCK:
            _bytes_read += len(view)
        if pread_all(fd, view, self.payload_offset + start * self.dtype.itemsize) < len(view):
            raise StorageError(f"{self.path} is truncated: it ends before stored element {start + out.numel()}")

    def _read_strided(self, fd: int, start: int, out: torch.Tensor) -> None:
        """The rare case, correct rather than fast: reads the stored span of all rows touched and picks from it."""
        if not out.numel():
            return
        row = _numel(self.shape[1:])
        first, last = start // row, (start + out.numel() - 1) // row
        shape = (last - first + 1, *self.shape[1:])
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))
        stored = torch.empty(span, dtype=self.dtype, device="cpu")
        self._read_span(fd, first * self.strides[0], stored)
        out.copy_(stored.as_strided(shape, self.strides).reshape(-1)[start - first * row :][: out.numel()])


def open_tensor(path: Path) -> TensorFile:
    """Reads the header of a ``.pt`` file that holds one tensor. Nothing in the file can run code; no payload is read.

    Raises:
        StorageError: missing, truncated, not a file of ``torch.save``, other content, or in need of code to load.
    """
    content = _load(path, map_location="meta")
    if not isinstance(content, dict) or not isinstance(content.get("param"), torch.Tensor):
        found = f"the keys {sorted(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise StorageError(f'{path} holds {found} instead of a tensor under "param": not a universal checkpoint\'s')
    tensor = content["param"]
    metadata = {key: value for key, value in content.items() if key != "param"}
    if tensor.layout != torch.strided or any(isinstance(value, torch.Tensor) for value in metadata.values()):
        raise StorageError(f"{path} holds something else than one plain tensor: not a universal checkpoint's")
    storage = tensor.untyped_storage()
    # torch.load(map_location="meta") leaves the position of the record there (torch/serialization.py, load_tensor), but
    # not for its pre-zip format.
    begin = getattr(storage, "_checkpoint_offset", None)
    if begin is None:
        raise StorageError(f"{path} is not a zip file: it is of the format torch.save had before version 1.6")
    with storage_errors("read", path):
        size = os.stat(path).st_size
    if begin + storage.nbytes() > size:
        raise StorageError(f"{path} is truncated: its tensor ends at byte {begin + storage.nbytes()} of {size}")
    offset = begin + tensor.storage_offset() * tensor.element_size()
    return TensorFile(Path(path), tuple(tensor.shape), tensor.dtype, offset, metadata, tuple(tensor.stride()))


def open_recorded(path: Path, record: FileRecord) -> TensorFile:
    """The same, of a file that the manifest describes: compared with its record instead of unpickled, which is faster.

    Raises:
        StorageError: missing, of another size, damaged outside the payload, of another export, or not a tensor's.
    """
    check_frame(path, record)
    dtype = record.tensor_dtype
    assert record.shape is not None
    strides = torch.empty(record.shape, device="meta").stride()
    return TensorFile(Path(path), record.shape, dtype, record.payload_offset, {}, tuple(strides))


def state_names(folder: Path) -> list[str]:
    """Names of the states whose files a parameter's directory holds, sorted: "exp_avg" for exp_avg.pt.

    Raises:
        StorageError: the directory is missing.
    """
    with storage_errors("list", folder):
        return sorted(path.stem for path in folder.iterdir() if path.suffix == ".pt")


def read_object(path: Path, *, weights_only: bool = True) -> Any:
    """``torch.load`` onto the CPU of a small pickled file. ``weights_only=False`` runs what the file says: only for the
    user's own checkpoints, whose client state may hold any object.

    Raises:
        StorageError: as :func:`open_tensor`.
    """
    return _load(path, map_location="cpu", weights_only=weights_only)


def _load(path: Path, *, map_location: str, weights_only: bool = True) -> Any:
    try:
        with storage_errors("read", path), open(path, "rb") as stream, _allowlist():
            return torch.load(stream, map_location=map_location, weights_only=weights_only)
    except StorageError:
        raise
    except pickle.UnpicklingError as error:
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        what = f"needs {forbidden[1]} to load, which was not run" if forbidden else "is not a plain file of torch.save"
        raise StorageError(f"{path} {what}: it is damaged, or not a universal checkpoint's") from error
    except Exception as error:  # torch.load reports damage as RuntimeError, EOFError, ValueError, KeyError ...
        raise StorageError(f"{path} is truncated, damaged or not a file of torch.save: {error}") from error


@contextmanager
def _allowlist() -> Iterator[None]:
    """Lets the classes that the stock format itself uses pass ``weights_only``.

    ``safe_globals`` takes its classes off a process-wide set again on leaving, so threads must not overlap in it and
    classes that the user had already allowed must not go through it.
    """
    with _LOCK:
        missing = [cls for cls in _CLASSES_OF_THE_FORMAT if cls not in torch.serialization.get_safe_globals()]
        with torch.serialization.safe_globals(missing):
            yield


def _merged(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same ranges in the same order, with those that continue their predecessor joined to it."""
    begin = end = 0
    for start, numel in runs:
        if start != end:
            if end > begin:
                yield begin, end - begin
            begin = start
        end = start + numel
    if end > begin:
        yield begin, end - begin


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
