# SPDX-License-Identifier: Apache-2.0
"""What the optimizer keeps beside the tensors that are cut like its partition: carried as values, or refused by name.

What is one value for a whole parameter group travels: numbers, strings, None, tensors of one element, and lists, tuples
and dicts of these. Of anything else nobody can say which parameter its elements belong to at another topology, or
weights-only loading could not read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from megads_ucp.engine.state import EngineState
from megads_ucp.errors import UnsupportedError
from megads_ucp.storage.format import STEP
from megads_ucp.storage.values import GroupValues, Place

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SHOWN = 5


class NotPortable(Exception):
    """A value that no resume could bring back; the text says what it is."""


def portable(value: Any) -> Any:
    """The value as a checkpoint can hold it, detached from the optimizer's own.

    Raises:
        NotPortable: it cannot.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, numpy.generic) or (isinstance(value, numpy.ndarray) and value.ndim == 0):
        return portable(value.item())
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [portable(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    raise NotPortable(_described(value))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "numpy array"
        return f"a {kind} of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


@dataclass(frozen=True)
class RankValues:
    """One rank's values of all its groups; ``groups`` have no differing ones.

    Attributes:
        rank: global.
        place: in the groups.
        groups: with what is left out.
    """

    rank: int
    place: Place
    groups: tuple[GroupValues, ...]

    def digest(self) -> int:
        """62 bits that ranks with the same values share."""
        content = repr([(_canonical(group.hyperparameters), _canonical(group.scalars)) for group in self.groups])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") >> 2

    @property
    def left_out(self) -> list[str]:
        return [entry for group in self.groups for entry in group.left_out]


def collect(state: EngineState, rank: int) -> RankValues:
    """This rank's values, copied."""
    groups = []
    for index, group in enumerate(state.groups):
        left_out: list[str] = []
        hyperparameters = _portable_of(group.hyperparameters(), f"param_groups[{index}]", left_out)
        states = group.other_states()
        groups.append(
            GroupValues(
                stage=state.coordinates.stage,
                index=index,
                degree=len(group.ranks),
                hyperparameters=hyperparameters,
                scalars=_portable_of(states, f"state of group {index},", left_out),
                on_device=tuple(n for n, v in states.items() if torch.is_tensor(v) and v.device.type != "cpu"),
                left_out=tuple(left_out),
            )
        )
    if groups and (stray := state.stray_states()):
        entries = tuple(f"optimizer.state[{key!r}]" for key in stray)
        groups[0] = replace(groups[0], left_out=(*groups[0].left_out, *entries))
    return RankValues(rank, (state.coordinates.tp_rank, state.groups[0].shard_rank), tuple(groups))


def _portable_of(values: Mapping[str, Any], where: str, left_out: list[str]) -> dict[str, Any]:
    """Those values that are portable; the others are noted."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = portable(value)
        except NotPortable as reason:
            left_out.append(f"{where} {name}: {reason}")
    return found


def merge(ranks: Sequence[RankValues]) -> tuple[GroupValues, ...]:
    """The groups of all stages, by stage and index, from the ranks that have something to say.

    Args:
        ranks: by (place, stage) the first ones, and all that differ from the first of their replicas.
    """
    merged: dict[tuple[int, int], GroupValues] = {}
    for values in sorted(ranks, key=lambda values: values.place):
        for group in values.groups:
            first = merged.setdefault((group.stage, group.index), group)
            own = {
                kind: mine
                for kind in ("hyperparameters", "scalars")
                if (mine := _differing(getattr(first, kind), getattr(group, kind)))
            }
            if own:
                first = replace(first, differing={**first.differing, values.place: own})
            left_out = tuple(dict.fromkeys([*first.left_out, *group.left_out]))
            merged[group.stage, group.index] = replace(first, left_out=left_out)
    return tuple(merged[place] for place in sorted(merged))


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in other.items() if k not in first or _canonical(first[k]) != _canonical(v)}


def drift_of(groups: Iterable[GroupValues]) -> list[str]:
    """The values that differ between ranks, in words: of each group and name, the first rank's and one other's."""
    found = []
    for group in groups:
        for name in group.differing_names():
            place, other = next((p, v) for p, kinds in group.differing.items() for v in kinds.values() if name in v)
            first = group.hyperparameters.get(name, group.scalars.get(name))
            found.append(
                f"{name} of group {group.index} on stage {group.stage} ({_short(first)} on the first rank, "
                f"{_short(other[name])} on shard rank {place[1]} of TP rank {place[0]})"
            )
    return found


ONLY_WEIGHTS = "Only weights can be resumed from this export (load_optimizer_states=False)."


def left_out_message(left_out: Sequence[str], optimizer: str) -> str:
    """What is left out, and the way out."""
    return (
        f"{optimizer} keeps what no resume could bring back at another topology: {listed(left_out)}. Use an optimizer "
        "with states shaped like its parameters, or plain numbers in its groups; the regular checkpoint has all of it."
    )


def check_nothing_left_out(left_out: Sequence[str], optimizer: str) -> None:
    """
    Raises:
        UnsupportedError: something is.
    """
    if left_out:
        raise UnsupportedError(left_out_message(left_out, optimizer))


def listed(entries: Sequence[str]) -> str:
    """The entries in a message, the first few of many."""
    more = f"; and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return "; ".join(entries[:_SHOWN]) + more


def _short(value: Any) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) else value)


def _canonical(value: Any) -> Any:
    """A form that is equal, and has an equal repr, for equal values of one type: NaN and tensors included."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), repr(value.item())
    if isinstance(value, Mapping):
        return sorted((repr(key), _canonical(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return repr(value)


def steps_of(values: RankValues) -> dict[int, Any]:
    """The step of every group that has one, by index."""
    return {group.index: group.scalars[STEP] for group in values.groups if group.scalars.get(STEP) is not None}
