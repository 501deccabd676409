# SPDX-License-Identifier: Apache-2.0
"""One resume: everything that was checked and is about to be read into this rank, and the reading of it.

:func:`megads_ucp.load.prepare.prepare` makes one. Nothing live changes before that has succeeded on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import LOSS_SCALER

from megads_ucp.comm.channel import HOST, Channel
from megads_ucp.engine.state import EngineState
from megads_ucp.load.reads import Read
from megads_ucp.load.relay import Relay, relayed
from megads_ucp.load.states import GroupState, make_states
from megads_ucp.plan.load import ReadPlan

logger = logging.getLogger("megads_ucp")

_SHOWN = 10


@dataclass(frozen=True)
class LoadRequest:
    """What of a checkpoint is wanted.

    Attributes:
        optimizer_states: states, steps, hyperparameters and loss scale; otherwise only what the model computes with.
        strict: a parameter that the checkpoint lacks is an error; otherwise it keeps its value, with a warning.
        verify: check everything that is read against the manifest's checksums.
        scheduled: the learning rate follows a schedule of the engine.
    """

    optimizer_states: bool = True
    strict: bool = True
    verify: bool = False
    scheduled: bool = False


@dataclass(frozen=True)
class Unowned:
    """What is read into buffers and frozen parameters.

    Attributes:
        reads: whole shards.
        detours: live tensors that are not contiguous, each with the memory that its values are read into.
        exact: this rank's shards of those whose values fp32 cannot hold, flat, by name.
    """

    reads: tuple[Read, ...]
    detours: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    exact: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Resume:
    """What one resume reads into one rank.

    Attributes:
        channel: of the engine.
        state: of the engine.
        directory: the checkpoint.
        request: what of it is wanted.
        common: content of zero/optimizer_state.pt.
        groups: what each parameter group gets beside the values of its fragments.
        reads: of fragments, by parameter and state.
        together: the plan by which some of the reads are done by several ranks for each other.
        unowned: what no optimizer owns.
        kept: names of what the checkpoint lacks, which keeps the value it has.
    """

    channel: Channel
    state: EngineState
    directory: Path
    request: LoadRequest
    common: Mapping[str, Any]
    groups: tuple[GroupState, ...]
    reads: Mapping[tuple[str, str], Read]
    together: ReadPlan | None
    unowned: Unowned
    kept: tuple[str, ...]

    def fill_optimizer(self) -> dict[str, Any] | None:
        """Fill master weights and, where they are wanted, optimizer states, steps and hyperparameters. Collective.

        Returns:
            What zero/optimizer_state.pt says beyond groups, None if optimizer states are not wanted.

        Raises:
            UniversalCheckpointError: reading failed; the engine must not be used.
        """
        with HOST:
            self._read_fragments()
            return self._common_state() if self.request.optimizer_states else None

    def fill_unowned(self) -> None:
        """Fill buffers and frozen parameters, and warn of what the checkpoint lacks. Collective.

        Raises:
            UniversalCheckpointError: reading failed; the engine must not be used.
        """
        with HOST:
            with self.channel.agreed(self._reading):
                self._read_unowned()
            self._warn_of_kept()

    @property
    def _reading(self) -> str:
        return f"reading {self.directory} (the engine must not be used now)"

    def _read_fragments(self) -> None:
        groups = self.state.groups
        with self.channel.agreed(self._reading):
            if self.request.optimizer_states:
                # Hyperparameters first: by them an optimizer has its step on a device or not.
                for group, saved in zip(groups, self.groups, strict=True):
                    group.set_hyperparameters(saved.hyperparameters)
                for group, saved in zip(groups, self.groups, strict=True):
                    make_states(group, saved)
            shared = relayed(self.together)
            for key, read in self.reads.items():
                if key not in shared:
                    read.run(self.request.verify)
        if self.together is not None:
            with self.channel.agreed(self._reading):
                Relay(self.together, self.reads, self.request.verify).run(self.channel)

    def _common_state(self) -> dict[str, Any]:
        """The saved state without a loss scaler of another kind than this run's: the target's precision decides."""
        current, saved = self.state.common_optimizer_state(), self.common
        if type(saved.get(LOSS_SCALER)) is type(current.get(LOSS_SCALER)) and self.state.half_precision:
            return dict(saved)
        of_scaler = (LOSS_SCALER, "dynamic_loss_scale", "overflow")
        return {key: value for key, value in saved.items() if key not in of_scaler}

    def _read_unowned(self) -> None:
        for read in self.unowned.reads:
            read.run(self.request.verify)
        for value, flat in self.unowned.detours:
            value.copy_(flat.view(value.shape))
        live = self.state.unowned()
        for name, exact in self.unowned.exact.items():
            live[name].copy_(exact.view(live[name].shape))

    def _warn_of_kept(self) -> None:
        """On rank 0, for all ranks: each knows of its own fragments only."""
        kept = sorted({name for by_rank in self.channel.gather(self.kept) or [] for name in by_rank})
        if kept:
            logger.warning(
                "%s lacks %s%s: they keep the values this run gave them.",
                self.directory,
                ", ".join(kept[:_SHOWN]),
                f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else "",
            )
