# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own offline converter as the reference, and the comparison of two universal checkpoint directories."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import run_ranks

_DIFFERENCES_SHOWN = 20


def convert(checkpoint: Path, universal: Path, *, inject_missing_state: bool = False) -> Path:
    """Runs deepspeed.checkpoint.ds_to_universal on a regular checkpoint directory and returns the universal one.

    Strict, in a process of its own (it changes process-wide state, and its failures then show what it printed). It
    also writes `latest_universal` beside `universal`, so give it a directory away from one that a test looks at.

    inject_missing_state: for checkpoints saved without `universal_checkpoint_info` in their client state.

    Raises RankError with the converter's traceback and output.
    """

    def body() -> None:
        from deepspeed.checkpoint import ds_to_universal

        with tempfile.TemporaryDirectory() as scratch:
            arguments = argparse.Namespace(
                input_folder=str(_without_missing_entries(checkpoint, Path(scratch))),
                output_folder=str(universal),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=inject_missing_state,
            )
            ds_to_universal.main(arguments)

    run_ranks(body, 1)
    return universal


def _without_missing_entries(checkpoint: Path, scratch: Path) -> Path:
    """The checkpoint, or a copy whose modules lack the entries that are None.

    megatron-core's layers save `_extra_state: None`, on which the converter dies (`tensor.float()`).
    """
    states = {path: torch.load(path, map_location="cpu", weights_only=False) for path in _model_states(checkpoint)}
    if not any(value is None for state in states.values() for value in (state["module"] or {}).values()):
        return checkpoint
    copy = shutil.copytree(checkpoint, scratch / checkpoint.name)
    for path, state in states.items():
        state["module"] = {name: value for name, value in state["module"].items() if value is not None}
        torch.save(state, copy / path.name)
    return copy


def assert_same_universal(ours: Path, stock: Path, *, ignore: Collection[str] = ()) -> None:
    """Fails with the list of differences unless two universal checkpoint directories hold the same bits.

    The same files under zero/, each with equal contents (tensors by torch.equal and dtype, metadata keys and values,
    `step`, optimizer state), and the same mp_rank files but for their `module` entry, which a resume does not read.

    ignore: parameter names whose files are left out on both sides.
    """
    differences = list(universal_differences(Path(ours), Path(stock), ignore))
    shown = differences[:_DIFFERENCES_SHOWN]
    if len(differences) > len(shown):
        shown.append(f"... and {len(differences) - len(shown)} more")
    assert not differences, f"{ours} differs from {stock}:\n" + "\n".join(shown)


def universal_differences(ours: Path, stock: Path, ignore: Collection[str] = ()) -> Iterator[str]:
    """One line per difference; see assert_same_universal."""
    roots = ours, stock
    left, right = (_files(root, ignore) for root in roots)
    yield from (f"{name}: missing" for name in sorted(right - left))
    yield from (f"{name}: not expected" for name in sorted(left - right))
    for name in sorted(left & right):
        exported, converted = (torch.load(root / name, map_location="cpu", weights_only=False) for root in roots)
        if name.startswith("mp_rank_"):
            exported.pop("module", None)
            converted.pop("module", None)
        yield from differences(exported, converted, name)


def differences(left: Any, right: Any, where: str) -> Iterator[str]:
    """How two values loaded from checkpoints differ, part by part, with the path to each part."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):  # a Parameter equals its tensor
        yield from _tensor_differences(left.detach(), right.detach(), where)
    elif type(left) is not type(right):
        yield f"{where}: {type(left).__name__} instead of {type(right).__name__}"
    elif isinstance(left, dict):
        for key in left.keys() - right.keys():
            yield f"{where}[{key!r}]: not expected"
        for key in right.keys() - left.keys():
            yield f"{where}[{key!r}]: missing"
        for key in left.keys() & right.keys():
            yield from differences(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{where}: {len(left)} entries instead of {len(right)}"
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from differences(one, other, f"{where}[{index}]")
    elif is_dataclass(left):  # SubparamShape
        for field in fields(left):
            path = f"{where}.{field.name}"
            yield from differences(getattr(left, field.name), getattr(right, field.name), path)
    elif "__eq__" not in vars(type(left)) and hasattr(left, "__dict__"):  # loss scalers, for one
        yield from differences(vars(left), vars(right), where)
    elif left != right:
        yield f"{where}: {left!r} instead of {right!r}"


def _tensor_differences(left: torch.Tensor, right: torch.Tensor, where: str) -> Iterator[str]:
    if left.dtype != right.dtype:
        yield f"{where}: {left.dtype} instead of {right.dtype}"
    elif left.shape != right.shape:
        yield f"{where}: shape {tuple(left.shape)} instead of {tuple(right.shape)}"
    elif not torch.equal(left, right):
        unequal = (left != right).nonzero()
        first = tuple(unequal[0].tolist())
        yield (
            f"{where}: {len(unequal)} of {left.numel()} elements differ, "
            f"the first at {first}: {left[first].item()} instead of {right[first].item()}"
        )


def _files(root: Path, ignore: Collection[str]) -> set[str]:
    zero = root / "zero"
    parameters = [path for path in zero.rglob("*") if path.is_file() and path.parent.name not in set(ignore)]
    return {path.relative_to(root).as_posix() for path in [*parameters, *_model_states(root)]}


def _model_states(root: Path) -> list[Path]:
    return sorted(root.glob("mp_rank_*_model_states.pt"))
