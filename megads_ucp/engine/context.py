# SPDX-License-Identifier: Apache-2.0
"""What the package keeps for one engine, from one export or resume to the next: its channel and its latest survey."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from megads_ucp.comm.agreement import Announcement
from megads_ucp.comm.channel import Channel
from megads_ucp.comm.shared_memory import SharedMemory
from megads_ucp.config import ExportConfig
from megads_ucp.engine.state import EngineState
from megads_ucp.errors import PlanError, UniversalCheckpointError, UnsupportedError
from megads_ucp.sources.layers import LayerClaims, ask_layers
from megads_ucp.survey import GroupDescription, RankDescription, Survey, build_survey

_abandoned: list[Channel | SharedMemory] = []
"""Channels and shared memory, to be closed, of engines that the garbage collector has taken. Not by it: it may run amid
a collective."""


class EngineContext:
    """One engine's state, configuration, channel and survey; exports and resumes of the engine share it.

    Attributes:
        state: how the engine is read and filled.
        config: how it exports and resumes.
        turn: held during a save and a load, so that threads that use one engine take turns.
    """

    def __init__(self, state: EngineState | str, config: ExportConfig) -> None:
        """
        Args:
            state: of the engine, or why it cannot be exported and what to do.
            config: of the engine.
        """
        self._state = state
        self.config = config
        self.turn = threading.RLock()
        self._announcement = Announcement(asdict(config))
        self._channel: Channel | None = None
        self._memory: SharedMemory | None = None
        self._layers: LayerClaims | None = None
        self._seen: list[list[int]] = []
        self._survey: Survey | None = None

    @property
    def unsupported(self) -> str | None:
        """Why the engine cannot be exported, None if it can."""
        return self._state if isinstance(self._state, str) else None

    @property
    def state(self) -> EngineState:
        """
        Raises:
            UnsupportedError: the engine cannot be exported.
        """
        if isinstance(self._state, str):
            raise UnsupportedError(self._state)
        return self._state

    @property
    def channel(self) -> Channel:
        """The channel of the export or resume that is under way."""
        assert self._channel is not None, "connect() comes first"
        return self._channel

    def connect(self) -> Channel:
        """The channel for one export or resume: the last one's, unless some rank has aborted it. Collective.

        Raises:
            Disagreement: the ranks have different settings.
        """
        self._announcement.check(self.config.timeout_minutes)
        if self._channel is None or self._channel.aborted():
            self.close()
            self._channel = Channel(self.config.timeout_minutes)
            self._abandon = weakref.finalize(self, _abandoned.append, self._channel)
            self._seen, self._survey = [], None  # only some ranks may have got the last one
        return self._channel

    def shared_memory(self) -> SharedMemory:
        """The memory that ranks of this host share, made at its first use on a channel. Collective."""
        if self._memory is None:
            self._memory = SharedMemory(self.channel, self.config.shared_memory != "never")
            self._abandon_memory = weakref.finalize(self, _abandoned.append, self._memory)
        return self._memory

    def close(self) -> None:
        """Give back what the channel takes of this process. Local; the next export or resume opens another one."""
        if self._memory is not None:
            self._abandon_memory.detach()
            self._memory.close()
            self._memory = None
        if self._channel is not None:
            self._abandon.detach()
            self._channel.close()
            self._channel = None
        while _abandoned:
            _abandoned.pop().close()

    def give_up(self, reason: BaseException) -> None:
        """Have all ranks that wait for this one fail now."""
        if self._channel is not None:
            self._channel.abort(reason)

    def speaks_of(self, failure: BaseException) -> bool:
        """Whether this rank is to log a failure: of what all ranks have, those that it names do."""
        spokesmen = failure.spokesmen if isinstance(failure, UniversalCheckpointError) else None
        return spokesmen is None or dist.get_rank() in spokesmen

    def describe(self, info: Mapping[str, Any] | None, exclude: Collection[str] = ()) -> RankDescription:
        """This rank's description. The layers are asked once, since what they say of their shapes does not change.

        Args:
            info: the client's ``universal_checkpoint_info``, if there is one.
            exclude: names of tensors, not owned by the optimizer, to leave out.

        Raises:
            LayoutError: a layer says something that its own tensors contradict.
        """
        state = self.state
        if self._layers is None:
            self._layers = ask_layers(state.module, state.parameters, state.coordinates.tp_degree)
        groups = tuple(
            GroupDescription(
                flat=group.flat,
                shapes=tuple(group.shapes[member.name] for member in group.flat.members),
                ranks=group.ranks,
                states=tuple((name, value.dtype) for name, value in group.sharded_states().items()),
            )
            for group in state.groups
        )
        unowned = tuple((name, tuple(value.shape)) for name, value in state.unowned().items() if name not in exclude)
        return RankDescription(
            coordinates=state.coordinates,
            groups=groups,
            unowned=unowned,
            buffers=tuple(name for name, _ in unowned if name not in state.parameters),
            claims=self._layers.claims,
            info=info,
            vocabulary=self._layers.vocabulary,
            tied=tuple(sorted(state.tied)),
            warnings=self._layers.warnings,
        )

    def survey(self, description: RankDescription, first_of_replicas: bool) -> Survey:
        """The survey of all ranks, the same object as long as nothing has changed. Collective.

        Args:
            description: this rank's.
            first_of_replicas: whether this rank describes its (stage, TP rank) to the others.

        Raises:
            PlanError: two data-parallel replicas describe themselves differently.
            LayoutError: a parameter's layout is unknown or contradictory.
        """
        place = description.coordinates
        seen = self.channel.all_gather_ints([place.stage, place.tp_rank, int(first_of_replicas), description.digest()])
        if self._survey is None or seen != self._seen:
            self._survey = self._renewed(description, seen)
            self._seen = seen
        return self._survey

    def _renewed(self, description: RankDescription, seen: list[list[int]]) -> Survey:
        first = {(stage, tp): rank for rank, (stage, tp, is_first, _) in reversed(list(enumerate(seen))) if is_first}
        for rank, (stage, tp, _, digest) in enumerate(seen):
            if (stage, tp) not in first:
                raise PlanError(
                    f"rank {rank} is tensor-parallel rank {tp} of pipeline stage {stage} by its mpu, but no rank there "
                    "is the first of a group that ZeRO partitions over: the mpu's tensor- and data-parallel groups "
                    "overlap. Give deepspeed.initialize an mpu in which they are apart."
                )
            speaker = first[stage, tp]
            if seen[speaker][3] != digest:
                raise PlanError(
                    f"rank {rank} (pipeline stage {stage}, tensor-parallel rank {tp}) describes its parameters, groups "
                    f"or optimizer states differently from rank {speaker}, its data-parallel replica. Build the same "
                    "model and the same parameter groups on all of them."
                )
        return build_survey(tuple(self.channel.broadcast(description, first[place]) for place in sorted(first)))
