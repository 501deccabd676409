# SPDX-License-Identifier: Apache-2.0
"""Runs a plan by which ranks read for each other: each extent once, then its elements travel to their fragments."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megads_ucp.comm.channel import Channel
from megads_ucp.comm.exchange import Exchange
from megads_ucp.load.reads import SPAN_BYTES, Read
from megads_ucp.plan.load import ReadPlan
from megads_ucp.plan.types import Extent, Transfer


def relayed(plan: ReadPlan | None) -> set[tuple[str, str]]:
    """Parameters and states that the plan reads for this rank."""
    if plan is None:
        return set()
    return {(plan.subjects[transfer.extent.subject].name, transfer.extent.state.name) for transfer in plan.transfers}


class Relay:
    """One rank's part in it.

    Args:
        reads: what this rank would read alone, by parameter and state.
        verify: check what is read against the manifest's checksums.
    """

    def __init__(self, plan: ReadPlan, reads: Mapping[tuple[str, str], Read], verify: bool) -> None:
        self._plan, self._reads, self._verify = plan, reads, verify
        self._buffer = torch.empty(SPAN_BYTES, dtype=torch.uint8)
        self._in_buffer: Extent | None = None

    def run(self, channel: Channel) -> None:
        """Read, send, receive and lay down. Collective.

        Raises:
            StorageError: as :meth:`Read.run`, once all ranks have got what they wait for.
            ChannelError: a peer has died.
        """
        for key in sorted(relayed(self._plan)):
            self._reads[key].clear()
        Exchange(channel, self._values, self._lay).run(self._plan.transfers)

    def _key(self, extent: Extent) -> tuple[str, str]:
        return self._plan.subjects[extent.subject].name, extent.state.name

    def _values(self, transfer: Transfer) -> tuple[torch.Tensor, int]:
        """The values of an extent that this rank reads; all its transfers come one after the other."""
        extent = transfer.extent
        values = self._buffer[: extent.nbytes].view(extent.state.written)
        if extent is not self._in_buffer:
            self._in_buffer = None
            self._reads[self._key(extent)].file.read(extent.start, values, self._verify)
            self._in_buffer = extent
        return values, extent.start

    def _lay(self, transfer: Transfer, values: list[torch.Tensor]) -> None:
        read = self._reads[self._key(transfer.extent)]
        for box, value in zip(transfer.boxes, values, strict=True):
            read.lay(box, value)
