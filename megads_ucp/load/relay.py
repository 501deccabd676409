# SPDX-License-Identifier: Apache-2.0
"""Runs a plan by which ranks read for each other: each extent once, then its elements travel to their fragments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from megads_ucp.comm.channel import Channel
from megads_ucp.comm.exchange import Exchange
from megads_ucp.load.reads import SPAN_BYTES, Read
from megads_ucp.plan.types import Extent, Plan, Transfer


def relayed(plan: Plan | None) -> set[tuple[str, str]]:
    """Parameters and states that the plan reads."""
    if plan is None:
        return set()
    return {(plan.subjects[extent.subject].name, extent.state.name) for extent in plan.extents}


class Relay:
    """One rank's part in it.

    Args:
        reads: what this rank would read alone, by parameter and state.
        verify: check what is read against the manifest's checksums.
    """

    def __init__(self, plan: Plan, reads: Mapping[tuple[str, str], Read], verify: bool) -> None:
        self._plan, self._reads, self._verify = plan, reads, verify
        self._buffers: dict[int, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._uses: Counter[int] = Counter()

    def run(self, channel: Channel) -> None:
        """Read, send, receive and lay down. Collective.

        Raises:
            StorageError: as :meth:`Read.run`, once all ranks have got what they wait for.
            ChannelError: a peer has died.
        """
        self._uses = Counter(t.extent for t in self._plan.transfers if self._plan.sender(t) == channel.rank)
        extents = [self._plan.extents[transfer.extent] for transfer in self._plan.incoming(channel.rank)]
        for key in dict.fromkeys(map(self._key, extents)):
            self._reads[key].clear()
        Exchange(channel, self._plan, self._extent, self._lay, lambda extent: None).run()

    def _key(self, extent: Extent) -> tuple[str, str]:
        return self._plan.subjects[extent.subject].name, extent.state.name

    def _extent(self, transfer: Transfer, extent: Extent) -> torch.Tensor:
        """The values of an extent that this rank reads, read at its first use and forgotten after its last."""
        index, dtype = transfer.extent, extent.state.written
        if index not in self._buffers:
            buffer = self._spare.pop() if self._spare else torch.empty(SPAN_BYTES, dtype=torch.uint8)
            file = self._reads[self._key(extent)].file
            file.read(extent.start, buffer[: extent.nbytes].view(dtype), self._verify)
            self._buffers[index] = buffer
        values = self._buffers[index][: extent.nbytes].view(dtype)
        self._uses[index] -= 1
        if not self._uses[index]:  # what is returned is copied before the next extent is read
            self._spare.append(self._buffers.pop(index))
        return values

    def _lay(self, transfer: Transfer, values: list[torch.Tensor]) -> None:
        read = self._reads[self._key(self._plan.extents[transfer.extent])]
        for box, value in zip(transfer.boxes, values, strict=True):
            read.lay(box, value)
