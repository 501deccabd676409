# SPDX-License-Identifier: Apache-2.0
"""Which saved parameter each parameter of this run is, where the two runs name the same ones differently.

What is known to be the same is bridged; where it cannot be, the error says what the names in the checkpoint are.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import prod

from megads_ucp.comm.channel import Channel
from megads_ucp.errors import StorageError
from megads_ucp.integrations.megatron_names import bridge, scheme
from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.survey import Survey

_COMPILED = "_orig_mod."
"""What torch.compile(model) puts into the names of the model's parameters (torch/_dynamo/eval_frame.py)."""

_WRAPPERS = {
    "module.": "a model wrapped by torch's DistributedDataParallel or DataParallel",
    "base_model.model.": "a model wrapped by PEFT",
}

_SHOWN = 3

_ENOUGH = 0.5
"""The part of a model that must be in a checkpoint for a load to make sense at all, in elements."""


def under_own_names(channel: Channel, checkpoint: Checkpoint, survey: Survey, strict: bool) -> Checkpoint:
    """The checkpoint with its parameters under this run's names, after a check that it is of this model. Collective.

    Args:
        channel: of the engine.
        checkpoint: under the names it was saved with.
        survey: of this run.
        strict: whether it must have every trained parameter.

    Raises:
        StorageError: it lacks a trained parameter (strict), or most of them.
    """
    doing = f"checking {checkpoint.directory}"
    saved: tuple[str, ...] = ()
    with channel.agreed(doing):
        if checkpoint.manifest is not None or channel.rank == 0:
            saved = checkpoint.names()
    if checkpoint.manifest is None:  # a directory is listed by one rank, for all
        saved = channel.broadcast(saved, 0)
    layouts = {name: layout for by_stage in survey.layouts for name, layout in by_stage.items()}
    checkpoint = checkpoint.renamed(saved_names(layouts, saved))
    with channel.agreed(doing):
        if channel.rank == 0:  # all ranks find the same, and nearest names take a while to find
            trained = [m.name for d in survey.descriptions for group in d.groups for m in group.flat.members]
            sizes = {name: prod(layout.shape) for name, layout in layouts.items()}
            _check(checkpoint, sizes, list(dict.fromkeys(trained)), saved, strict)
    return checkpoint


def saved_names(names: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """The saved name of each parameter that goes by another one here.

    Args:
        names: of this run's parameters, on all pipeline stages.
        saved: of all in the checkpoint.
    """
    known = set(saved)
    strange = [name for name in names if name not in known]
    return {**bridge(names, saved), **_compiled(strange, saved)} if strange else {}


def _compiled(names: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Of models, or parts of them, that torch.compile has wrapped in one of the two runs only."""
    plain = {name.replace(_COMPILED, ""): name for name in saved}
    found = ((name, plain.get(name.replace(_COMPILED, ""))) for name in names)
    return {name: other for name, other in found if other is not None}


def _check(
    checkpoint: Checkpoint, sizes: Mapping[str, int], trained: Collection[str], saved: Collection[str], strict: bool
) -> None:
    """Check that a checkpoint has enough of a model.

    Without ``strict``, that is half of what is trained or half of all there is: adapters may be new, or a frozen base
    may not have been saved, but nobody wants his initialisation back.

    Args:
        checkpoint: under this run's names.
        sizes: elements of each parameter and buffer of this run.
        trained: names of its trained parameters.
        saved: names in the checkpoint, as saved.
        strict: whether every trained parameter must be there.
    """
    lacking = [name for name in trained if not checkpoint.has(name)]
    strange = [name for name in sizes if not checkpoint.has(name)]
    if not lacking:
        return
    explained = _of_other_scheme(lacking, sizes, saved) or _explained(lacking, strange, saved)
    if strict:
        which = f"has no parameter {lacking[0]}"
        if len(lacking) > 1:
            which = f"lacks {len(lacking)} of the {len(trained)} parameters that this run trains"
        raise StorageError(
            f"{checkpoint.directory} {which}. {explained} With load_module_strict=False, what it lacks keeps the value "
            "it has."
        )
    parts = [_part(checkpoint, sizes, names) for names in (trained, list(sizes))]
    if max(parts) < _ENOUGH:
        raise StorageError(
            f"{checkpoint.directory} is of another model: it has {len(trained) - len(lacking)} of the {len(trained)} "
            f"parameters that this run trains, {parts[0]:.0%} of their elements. load_module_strict=False is for less "
            f"than half. {explained}"
        )


def _part(checkpoint: Checkpoint, sizes: Mapping[str, int], names: Collection[str]) -> float:
    return sum(sizes[name] for name in names if checkpoint.has(name)) / max(sum(sizes[name] for name in names), 1)


def _explained(lacking: Collection[str], strange: Collection[str], saved: Collection[str]) -> str:
    """What there is in the checkpoint instead: the same with a prefix, or what comes nearest.

    Args:
        lacking: names of trained parameters.
        strange: names of all parameters and buffers that the checkpoint does not have.
        saved: all names in it.
    """
    for names, others, here, there in (
        (saved, strange, "the checkpoint", "this run"),
        (strange, saved, "this run", "the checkpoint"),
    ):
        if prefix := _prefix(names, others):
            of = f", as of {_WRAPPERS[prefix]}" if prefix in _WRAPPERS else ""
            return (
                f'The names in {here} begin with "{prefix}"{of}, and those in {there} do not. Give '
                "deepspeed.initialize the same model, wrapped alike, in both."
            )
    lines = []
    for name in list(lacking)[:_SHOWN]:
        near = difflib.get_close_matches(name, saved, n=_SHOWN)
        lines.append(f"{name} (it has {', '.join(near) if near else 'nothing of a similar name'})")
    more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
    return f"Missing: {', '.join(lines)}{more}."


def _of_other_scheme(lacking: Collection[str], names: Collection[str], saved: Collection[str]) -> str:
    """Which of Megatron-DeepSpeed's two schemes of names a checkpoint has, if this run has the other; else empty.

    Args:
        lacking: names of trained parameters that the checkpoint does not have.
        names: of everything in this run.
        saved: names in the checkpoint, as saved.
    """
    here, there = scheme(names), scheme(saved)
    if {here, there} != {"with", "without"}:
        return ""
    return (
        f"It was saved {there} Megatron-DeepSpeed's pipeline module, and this run is {here} it "
        "(--no-pipeline-parallel). Names are translated, but nothing there corresponds to "
        f"{', '.join(list(lacking)[:_SHOWN])}. Give both runs the same number of layers, "
        "--untie-embeddings-and-output-weights and kind of positions."
    )


def _prefix(names: Collection[str], others: Collection[str]) -> str | None:
    """What all names begin with, if most of them are other names without it; of a known wrapper, some suffice.

    PEFT puts more than a prefix into the names of the layers that it adapts.
    """
    wanted = set(others)
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        tails = (".".join(parts[start:]) for start in range(1, len(parts)))
        found.update(name.removesuffix(tail) for tail in tails if tail in wanted)
    for prefix, count in found.most_common():
        most = 2 * count > min(len(names), len(others))
        if (most or prefix in _WRAPPERS) and all(name.startswith(prefix) for name in names):
            return prefix
    return None
