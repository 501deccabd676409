# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors a block of code reads from checkpoint files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megads_ucp.storage import TensorFile


@contextmanager
def payload_counted() -> Iterator[Callable[[], int]]:
    """Yields a function that says how many bytes of payload this process has asked for in the block so far."""
    sizes: list[int] = []  # threads may append at the same time
    original = TensorFile._read_span

    def read_span(self: TensorFile, fd: int, start: int, out: torch.Tensor) -> None:
        sizes.append(out.nbytes)
        original(self, fd, start, out)

    TensorFile._read_span = read_span  # type: ignore[method-assign]
    try:
        yield lambda: sum(sizes)
    finally:
        TensorFile._read_span = original  # type: ignore[method-assign]
