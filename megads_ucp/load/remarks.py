# SPDX-License-Identifier: Apache-2.0
"""What a resume warns of: it is allowed, but should not go unnoticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megads_ucp.engine.state import EngineState, StateGroup
from megads_ucp.integrations.wording import megatron_arguments
from megads_ucp.layout.layout import Layout
from megads_ucp.load.checkpoint import Checkpoint
from megads_ucp.load.states import GroupState

_HYPERPARAMETERS = (
    *("lr", "initial_lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha", "rho"),
    *("amsgrad", "maximize", "decoupled_weight_decay", "bias_correction"),
)
"""Of the entries of param_groups, those that a user gives. Some optimizers keep counters and estimates there, too."""

_SCHEDULED = ("lr", "betas", "momentum")
"""Those that schedules set: betas and momentum under OneCycle."""


def remarks(checkpoint: Checkpoint, state: EngineState) -> Iterator[str]:
    """Where this run differs from the one that was saved; each remark continues "<directory> ..."."""
    if checkpoint.manifest is None:
        if len(state.groups) > 1:
            yield f"does not say which parameters were in which group: its {len(state.groups)} groups go by position."
        return
    run, facts = checkpoint.manifest.run, state.facts()
    optimizers = run["base_optimizer"], facts["base_optimizer"]
    if optimizers[0] != optimizers[1] and not all("Adam" in name for name in optimizers):
        yield (
            f"holds the optimizer states of {optimizers[0]}, this run has {optimizers[1]}. If they do not keep the "
            "same states, load with load_optimizer_states=False."
        )
    for values in checkpoint.values():
        degrees = {len(group.ranks) for group in state.groups}
        if values.differing and not (checkpoint.has_grid(state.coordinates) and degrees == {values.degree}):
            yield (
                f"has other values of {', '.join(values.differing_names())} (group {values.index}) on each rank of the "
                "run that saved, at another topology: all ranks get the first one's."
            )
    saved = run.get("train_batch_size")
    # Where a client ramps the batch up, it differs from step to step, and is set again after the load.
    ramped = getattr(megatron_arguments(), "rampup_batch_size", None) is not None
    own = {facts["train_batch_size"], facts["configured_batch_size"]}
    if saved is not None and not ramped and own.isdisjoint({saved, run.get("configured_batch_size")}):
        yield (
            f"was trained with a global batch of {saved}, this run has one of {facts['train_batch_size']}. "
            + batch_advice(saved, facts["data_parallel"], facts["micro_batch_size"])
        )


def other_hyperparameters(groups: Sequence[StateGroup], saved: Sequence[GroupState], scheduled: bool) -> str | None:
    """A remark if this run was built with other hyperparameters than those that it is about to get back.

    Args:
        groups: of this run.
        saved: what each of them gets.
        scheduled: whether a schedule sets learning rates (and momentum), which then differ from step to step.
    """
    found: dict[str, list[int]] = {}
    for index, (group, given) in enumerate(zip(groups, saved, strict=True)):
        own = group.hyperparameters()
        varying = _SCHEDULED if scheduled or "initial_lr" in own else ()
        for key in (key for key in _HYPERPARAMETERS if key in own and key in given.hyperparameters):
            before, after = _as_number(given.hyperparameters[key]), _as_number(own[key])
            if before != after and key not in varying:
                found.setdefault(f"{key} {before} (this run: {after})", []).append(index)
    if not found:
        return None
    values = [f"{text} in group {', '.join(map(str, where))}" for text, where in found.items()]
    return (
        f"was saved with other hyperparameters than this run was built with, and the saved ones win: "
        f"{'; '.join(values)}. To have this run's, set them in engine.optimizer.param_groups after the load."
    )


def _as_number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_as_number(item) for item in value] if isinstance(value, list | tuple) else value


def order_taken_for_granted(checkpoint: Checkpoint, layouts: Iterable[Layout]) -> str | None:
    """A remark if the order of queries, keys and values in fused projections is unknown (stock converter)."""
    for layout in layouts:
        order = layout.rule.attention
        if order is not None and checkpoint.has(layout.name) and not checkpoint.tells_order(layout.name):
            harm = " The stock converter scrambles it if it was saved at TP > 1." if order.order == "blocks" else ""
            return (
                f"does not say in which order {layout.name} and similar parameters keep queries, keys and values; this "
                f"code's is assumed ({order.order}).{harm if checkpoint.manifest is None else ''} An export by the run "
                "that saved it would say."
            )
    return None


@dataclass(frozen=True)
class Unpadded:
    """A vocabulary that this run pads and the checkpoint does not.

    Attributes:
        name: of the parameter.
        real: rows that the checkpoint has.
        wanted: rows of this run, padding included.
        padded: rows of the run that saved, padding included, where that is known.
    """

    name: str
    real: int
    wanted: int
    padded: int | None


def padding_missing(vocabularies: Sequence[Unpadded]) -> str:
    """A remark that rows which pad vocabularies start at zero."""
    first = min(vocabularies, key=lambda vocabulary: vocabulary.name)
    names = first.name if len(vocabularies) == 1 else f"{first.name} (and {len(vocabularies) - 1} more)"
    lost = f"the run that saved it padded its {first.real} rows to {first.padded}"
    if first.padded is None:
        lost = f"only the {first.real} real rows were written (the stock converter drops the others, as 0.1 did)"
    return (
        f"has no padding rows of {names}: {lost}, this run pads them to {first.wanted}. Rows {first.real} to "
        f"{first.wanted - 1} start at zero and take part in the softmax, so expect higher losses for a while. An "
        "export of this package continues exactly in a run that pads alike (Megatron's flag for it is "
        "--make-vocab-size-divisible-by)."
    )


def batch_advice(batch: int, degree: int, micro_batch: int) -> str:
    """How to keep a global batch at a data-parallel degree: the accumulation steps that fit, and the micro batch."""
    if batch % degree:
        near = [other for other in range(1, batch + 1) if batch % other == 0 and degree / 2 <= other <= degree * 2]
        return f"{batch} samples do not divide over DP {degree}; degrees near it that fit: {near or 'none'}."
    if batch % (degree * micro_batch) == 0:
        return f"To keep {batch}, set gradient_accumulation_steps to {batch // degree // micro_batch}."
    each = batch // degree
    fitting = [f"{micro} x {each // micro}" for micro in range(1, each + 1) if each % micro == 0]
    return f"To keep {batch} at DP {degree}, micro batch x gradient_accumulation_steps must be one of {fitting}."
