# SPDX-License-Identifier: Apache-2.0
"""Whether rows that a client's number of words calls padding are words.

An input embedding that is not the output layer too gets gradients for the words that occur, and none for others. So
second moments that are zero in some padding rows and not in others show that the number is too small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megads_ucp.comm.channel import Channel
from megads_ucp.plan.types import StateSpec, Subject
from megads_ucp.save.replicas import Values

_SECOND_MOMENTS = "exp_avg_sq"

_SHOWN = 10

_MEND = (
    "This package keeps those rows, but DeepSpeed's own loader would drop them: state the number of all words, added "
    "ones included, as original_vocab_size in universal_checkpoint_info."
)


def words_beyond(channel: Channel, subjects: Sequence[Subject], values: Values) -> str | None:
    """What to warn of, if vocabularies have words beyond the number of real rows. Collective, if any has padding.

    Args:
        channel: the process group.
        subjects: of the export.
        values: see :data:`~megads_ucp.save.replicas.Values`.

    Raises:
        Disagreement: some rank's values cannot be read.
    """
    paddings = list(_paddings(subjects))
    if not paddings:
        return None
    with channel.agreed("looking at the rows that pad vocabularies"):
        used = torch.cat([_rows_in_use(subject, state, channel.rank, values) for subject, state in paddings])
    counts = channel.sum_int64(used).split([subject.layout.shape[0] for subject, _ in paddings])
    real = {subject.name: subject.layout.shape[0] for subject in subjects if not subject.padding}
    found = []
    for (subject, _), count in zip(paddings, counts, strict=True):
        rows = [real[subject.name] + row for row in count.nonzero().flatten().tolist()]
        if 0 < len(rows) < len(count):
            name = subject.name
            found.append(
                f"{name} has {real[name]} real rows by original_vocab_size, but rows {_listed(rows)} are words"
            )
    return f"{'; '.join(found)}. {_MEND}" if found else None


def _listed(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_SHOWN]))
    return shown if len(rows) <= _SHOWN else f"{shown} ... {rows[-1]} ({len(rows)} in all)"


def _paddings(subjects: Sequence[Subject]) -> Iterator[tuple[Subject, StateSpec]]:
    for subject in subjects:
        for state in subject.states if subject.padding else ():
            if state.name == _SECOND_MOMENTS:
                yield subject, state


def _rows_in_use(subject: Subject, state: StateSpec, rank: int, values: Values) -> torch.Tensor:
    """For every padding row, whether this rank holds a part of it that is not zero, int64."""
    layout = subject.layout
    used = torch.zeros(layout.numel, dtype=torch.bool)
    for holding in subject.holdings:
        start = holding.fragment.param_start
        boxes = layout.runs(holding.tp_rank, start, holding.fragment.numel) if holding.rank == rank else ()
        if boxes:
            held = (values(holding, state) != 0).cpu()
            for box in boxes:
                box.full_view(used, 0).copy_(box.shard_view(held, start))
    return used.view(layout.shape[0], -1).any(1).long()
