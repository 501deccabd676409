# SPDX-License-Identifier: Apache-2.0
"""What the package keeps for one engine from one export or resume to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megads_ucp.comm.channel import Channel
from megads_ucp.engine.state import LiveState
from megads_ucp.errors import PlanError
from megads_ucp.sources.layers import LayerWords, ask_layers
from megads_ucp.survey import (
    GroupDescription,
    RankDescription,
    Survey,
    build_survey,
)


class Surveyor:
    """Keeps an engine's channel and its latest survey; renews the survey when some rank's description has changed."""

    def __init__(self, timeout_minutes: float) -> None:
        self._timeout_minutes = timeout_minutes
        self._channel: Channel | None = None
        self._seen: list[list[int]] = []
        self._survey: Survey | None = None
        self._words: LayerWords | None = None

    def describe(
        self, live: LiveState, info: Mapping[str, Any] | None, exclude: Collection[str] = ()
    ) -> RankDescription:
        """This rank's description; the layers are asked once, since what they say of their shapes does not change.

        Raises:
            LayoutError: as :func:`ask_layers`.
        """
        self._words = self._words or ask_layers(live)
        return describe(live, self._words, info, exclude)

    def connect(self) -> Channel:
        """The channel for one export or resume: the last one's, unless some rank has hung up on it. Collective."""
        if self._channel is None or self._channel.abandoned():
            self._channel = Channel(self._timeout_minutes)
            self._seen, self._survey = [], None  # only some ranks may have got the last one
        return self._channel

    def give_up(self, reason: BaseException) -> None:
        """Have all ranks that wait for this one fail now."""
        if self._channel is not None:
            self._channel.hang_up(reason)

    @property
    def channel(self) -> Channel:
        """The channel of the export or resume that is under way."""
        assert self._channel is not None, "connect() comes first"
        return self._channel

    def survey(self, description: RankDescription, first_of_replicas: bool) -> Survey:
        """The survey of all ranks, the same object as long as nothing has changed. Collective.

        Raises:
            PlanError: two data-parallel replicas describe themselves differently.
            LayoutError: a parameter's layout is unknown or contradictory.
        """
        place = description.coordinates
        seen = self.channel.all_gather_ints([place.stage, place.tp_rank, int(first_of_replicas), description.digest()])
        if self._survey is None or seen != self._seen:
            self._survey = self._renew(description, seen)
            self._seen = seen
        return self._survey

    def _renew(self, description: RankDescription, seen: list[list[int]]) -> Survey:
        first = {(stage, tp): rank for rank, (stage, tp, is_first, _) in reversed(list(enumerate(seen))) if is_first}
        for rank, (stage, tp, _, digest) in enumerate(seen):
            speaker = first[stage, tp]
            if seen[speaker][3] != digest:
                raise PlanError(
                    f"rank {rank} (pipeline stage {stage}, tensor-parallel rank {tp}) describes its parameters, groups "
                    f"or optimizer states differently from rank {speaker}, its data-parallel replica. Build the same "
                    "model and the same parameter groups on all of them."
                )
        descriptions = tuple(self.channel.broadcast(description, first[place]) for place in sorted(first))
        return build_survey(descriptions)


def describe(
    live: LiveState, words: LayerWords, info: Mapping[str, Any] | None, exclude: Collection[str] = ()
) -> RankDescription:
    """This rank's description, without the unowned tensors named in ``exclude``."""
    groups = tuple(
        GroupDescription(
            flat=group.flat,
            shapes=tuple(group.shapes[member.name] for member in group.flat.members),
            ranks=group.ranks,
            states=tuple((name, value.dtype) for name, value in group.sharded_states().items()),
        )
        for group in live.groups
    )
    unowned = tuple((name, tuple(value.shape)) for name, value in live.unowned().items() if name not in exclude)
    buffers = tuple(name for name, _ in unowned if name not in live.parameters)
    return RankDescription(
        live.coordinates,
        groups,
        unowned,
        buffers,
        words.claims,
        info,
        words.vocabulary,
        tuple(sorted(live.tied)),
        words.warnings,
    )
