# SPDX-License-Identifier: Apache-2.0
"""What a resume warns of: it is allowed, but should not go unnoticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megads_ucp.engine.state import EngineState
from megads_ucp.layout.layout import Layout
from megads_ucp.load.checkpoint import Checkpoint


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
    if saved not in (None, facts["train_batch_size"]):
        yield (
            f"was trained with a global batch of {saved}, this run has one of {facts['train_batch_size']}. "
            + batch_advice(saved, facts["data_parallel"], facts["micro_batch_size"])
        )


def order_taken_for_granted(checkpoint: Checkpoint, layouts: Iterable[Layout]) -> str | None:
    """A remark if the order of queries, keys and values in fused projections is unknown (stock converter)."""
    for layout in layouts:
        order = layout.rule.attention
        if order is not None and not checkpoint.tells_order(layout.name):
            harm = " The stock converter scrambles it if it was saved at TP > 1." if order.order == "blocks" else ""
            return (
                f"does not say in which order {layout.name} and similar parameters keep queries, keys and values; this "
                f"code's is assumed ({order.order}).{harm if checkpoint.manifest is None else ''} An export by the run "
                "that saved it would say."
            )
    return None


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
