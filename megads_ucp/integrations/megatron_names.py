# SPDX-License-Identifier: Apache-2.0
"""Megatron-DeepSpeed's two names for each parameter of a GPT: with its pipeline module, and without it.

``GPTModel`` names parameters by their modules, ``GPTModelPipe`` (both in megatron/model/gpt_model.py) by their places
in a list: an embedding (tied to the head, or a layer of its own), transformer layers, a norm, and perhaps a head. The
tensors are the same. Pure: names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

Scheme = Literal["with", "without"]
"""Whether a model was built with the pipeline module."""

_EMBEDDING, _LAYERS = "language_model.embedding.", "language_model.encoder.layers."
_NORM, _HEAD = "language_model.encoder.final_layernorm.", "language_model.output_layer."

_TIED = "tied_modules.embed."
_PLACED = re.compile(r"(\d+)\.(.+)")


def bridge(target: Collection[str], saved: Collection[str]) -> Mapping[str, str]:
    """The saved name of each parameter of a model, where the other of the two schemes saved it.

    Args:
        target: names of all parameters of the model, on all of its pipeline stages.
        saved: names of all parameters in the checkpoint.

    Returns:
        By name in the model; empty if both have the same scheme, or one has neither. Names that the other scheme has
        no name for are left out.
    """
    if {scheme(target), scheme(saved)} != {"with", "without"}:
        return {}
    by_module = {module: name for name, module in _by_module(saved).items()}
    return {name: by_module[module] for name, module in _by_module(target).items() if module in by_module}


def scheme(names: Iterable[str]) -> Scheme | None:
    """How a GPT's parameters are named; None if they are not those of a GPT of Megatron-DeepSpeed."""
    names = list(names)
    if any(name.startswith(_LAYERS) for name in names):
        return "without"
    return "with" if _layer_places(names) else None


def _layer_places(names: Iterable[str]) -> list[int]:
    """Places of the transformer layers in a pipeline module, which are what has an attention."""
    placed = (_PLACED.fullmatch(name) for name in names)
    return sorted({int(found[1]) for found in placed if found and found[2].startswith("self_attention.")})


def _by_module(names: Collection[str]) -> dict[str, str]:
    """Names as ``GPTModel`` has them, by the names given, which may be of either scheme."""
    if scheme(names) == "without":
        return {name: name for name in names}
    numbers = {place: number for number, place in enumerate(_layer_places(names))}
    return {name: module for name in names if (module := _module_name(name, numbers))}


def _module_name(name: str, numbers: Mapping[int, int]) -> str | None:
    """The name in ``GPTModel`` of a parameter of ``GPTModelPipe``, None if there is none.

    Args:
        name: in the pipeline module.
        numbers: of the transformer layers, by their places.
    """
    if name.startswith(_TIED):
        return _EMBEDDING + name.removeprefix(_TIED)
    found = _PLACED.fullmatch(name)
    if found is None:
        return None
    place, rest = int(found[1]), found[2]
    if place in numbers:
        return f"{_LAYERS}{numbers[place]}.{rest}"
    if place < min(numbers):
        return _EMBEDDING + rest
    return _HEAD + rest.removeprefix("lm_head.") if rest.startswith("lm_head.") else _NORM + rest
