# SPDX-License-Identifier: Apache-2.0
"""The values that one export sends."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from megads_ucp.engine.state import EngineState
from megads_ucp.errors import PlanError
from megads_ucp.layout.layout import Layout
from megads_ucp.plan.types import UNOWNED, Holding, StateSpec

logger = logging.getLogger("megads_ucp")


class Snapshot:
    """The values one export sends: views of the live state, on the device where it is."""

    def __init__(self, engine: EngineState) -> None:
        self._groups = [
            {name: state.detach() for name, state in group.sharded_states().items()} for group in engine.groups
        ]
        unowned = {name: value.detach() for name, value in engine.unowned().items()}
        self._unowned = {name: value.reshape(-1) for name, value in unowned.items()}
        spoken_for = unowned if engine.first_of_replicas else {}
        self.inexact = {name: value for name, value in spoken_for.items() if not _fp32_holds(value)}
        """Of buffers and frozen parameters, those with values that fp32, and so the format, cannot hold, by name, on
        the rank that speaks for its replicas."""

    def warn_of_rounding(self, layouts: Mapping[str, Layout]) -> None:
        """Name what the universal format rounds and no file of ours keeps.

        Args:
            layouts: of this stage's parameters, without what is excluded.
        """
        if cut := [name for name in self.inexact if name in layouts and not held_whole(layouts[name])]:
            logger.warning(
                "fp32, in which the universal format keeps frozen parameters, cannot hold all values of %s, and "
                "tensor parallelism cuts them: keep them in client_state too.",
                ", ".join(cut),
            )

    def values(self, holding: Holding, state: StateSpec) -> torch.Tensor:
        """The 1-D values of one of this rank's own holdings in a state.

        What no optimizer owns comes as the model has it, in its dtype; copying it into a message or an extent makes it
        fp32, as the stock converter writes it (ds_to_universal.main, "fp32_path").

        Raises:
            PlanError: the optimizer no longer has the state.
        """
        group, fragment = holding.group, holding.fragment
        if group == UNOWNED:
            return self._unowned[fragment.name].narrow(0, fragment.param_start, fragment.numel)
        states = self._groups[group]
        if state.name not in states:
            raise PlanError(f"the optimizer has no state {state.name} for parameter {fragment.name} any more.")
        return states[state.name].narrow(0, fragment.partition_start, fragment.numel)


def held_whole(layout: Layout) -> bool:
    """Whether every tensor-parallel rank holds the whole tensor."""
    return layout.tp_degree == 1 or layout.replicated


def _fp32_holds(value: torch.Tensor) -> bool:
    if value.itemsize <= 2 or value.dtype == torch.float32:  # also those whose values torch can hardly compare
        return True
    return not value.is_complex() and torch.equal(value.float().to(value.dtype).nan_to_num(), value.nan_to_num())
