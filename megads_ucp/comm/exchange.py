# SPDX-License-Identifier: Apache-2.0
"""The exchange of fragments: the transfers of this rank and its peers, over a channel.

All ranks take transfers in one order, each those that concern it, and send and receive at most a window of bytes ahead.
That cannot block: of all transfers not done yet, both ends of the first one have nothing left to do before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from megads_ucp.comm.channel import Channel, Pending
from megads_ucp.plan.types import Transfer

WINDOW_BYTES = 8 << 20
"""Messages under way, in and out each; one may be larger."""

_FARTHEST = 64
"""Transfers that are looked at before their turn."""

Source = Callable[[Transfer], tuple[torch.Tensor, int]]
"""Returns the 1-D tensor, on any device, that a transfer is taken from, and the place of its first element: in the
shard of the holding, or (backwards) in the full tensor."""


class Exchange:
    """Runs transfers for one rank.

    Args:
        channel: connects all ranks of the job.
        source: of the transfers that this rank sends, and of those it gets from itself or from ``near`` ranks.
        lay: takes a transfer to this rank and the values of each of its boxes, in their order.
        near: ranks of this host whose values ``source`` knows, and which know this rank's: nothing is sent to them.
        window_bytes: see :data:`WINDOW_BYTES`.
    """

    def __init__(
        self,
        channel: Channel,
        source: Source,
        lay: Callable[[Transfer, list[torch.Tensor]], None],
        near: Collection[int] = (),
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._channel, self._source, self._lay = channel, source, lay
        self._near = frozenset(near) | {channel.rank}
        self._window = window_bytes
        self._sent: deque[tuple[Pending, torch.Tensor]] = deque()
        self._bytes_sent = 0
        self._failure: BaseException | None = None

    def run(self, transfers: Iterable[Transfer]) -> None:
        """Send, receive and lay down everything that concerns this rank.

        A failure to read a source or to lay values down is kept until the end and then raised, so that peers still get
        their messages and none hangs.

        Args:
            transfers: what this rank sends and gets, its own values included, in the order that all ranks share.

        Raises:
            ChannelError: a peer has died or the timeout has passed.
        """
        with self._channel.communicating("exchanging fragments"):
            for transfer, message in self._expecting(transfers):
                if transfer.receiver != self._channel.rank:
                    self._send(transfer)
                else:
                    if message is not None:
                        message[0].wait()
                    self._take(transfer, None if message is None else message[1])
            while self._sent:
                self._settle()
        if self._failure is not None:
            raise self._failure

    def _expecting(
        self, transfers: Iterable[Transfer]
    ) -> Iterator[tuple[Transfer, tuple[Pending, torch.Tensor] | None]]:
        """The transfers but those to near ranks, each with the message it comes in, whose receipt begins before its
        turn."""
        ahead: deque[tuple[Transfer, tuple[Pending, torch.Tensor] | None]] = deque()
        nbytes = 0
        for transfer in transfers:
            message = None
            if transfer.receiver != self._channel.rank:
                if transfer.receiver in self._near:
                    continue
            elif transfer.sender not in self._near:
                buffer = torch.empty(transfer.nbytes, dtype=torch.uint8)
                message = self._channel.irecv(buffer, transfer.sender), buffer
                nbytes += transfer.nbytes
            ahead.append((transfer, message))
            while nbytes > self._window or len(ahead) > _FARTHEST:
                earliest = ahead.popleft()
                nbytes -= earliest[0].nbytes if earliest[1] is not None else 0
                yield earliest
        yield from ahead

    def _send(self, transfer: Transfer) -> None:
        while self._sent and self._bytes_sent + transfer.nbytes > self._window:
            self._settle()
        buffer = torch.empty(transfer.nbytes, dtype=torch.uint8)
        try:
            for value, view in zip(_unpack(buffer, transfer), self._views(transfer), strict=True):
                value.copy_(view)
        except Exception as failure:  # reported once the peers have been served
            self._failure = self._failure or failure
        self._sent.append((self._channel.isend(buffer, transfer.receiver), buffer))
        self._bytes_sent += transfer.nbytes

    def _settle(self) -> None:
        """Wait for the earliest message that has been sent."""
        pending, buffer = self._sent.popleft()
        pending.wait()
        self._bytes_sent -= buffer.numel()

    def _take(self, transfer: Transfer, message: torch.Tensor | None) -> None:
        try:
            self._lay(transfer, self._views(transfer) if message is None else _unpack(message, transfer))
        except Exception as failure:  # reported once the peers have been served
            self._failure = self._failure or failure

    def _views(self, transfer: Transfer) -> list[torch.Tensor]:
        """The boxes of a transfer as views of values that this rank can read."""
        values, start = self._source(transfer)
        if transfer.backwards:
            return [box.full_view(values, start) for box in transfer.boxes]
        return [box.shard_view(values, start) for box in transfer.boxes]


def _unpack(message: torch.Tensor, transfer: Transfer) -> list[torch.Tensor]:
    """The boxes of a transfer as views of a message, each dense, one after the other."""
    parts = message.view(transfer.extent.state.live).split([box.numel for box in transfer.boxes])
    return [part.view(box.shape) for part, box in zip(parts, transfer.boxes, strict=True)]
