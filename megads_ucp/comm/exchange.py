# SPDX-License-Identifier: Apache-2.0
"""The exchange of fragments: a plan's messages between this rank and its peers, round by round, over a channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megads_ucp.comm.channel import Channel, Pending
from megads_ucp.layout.boxes import Box
from megads_ucp.plan.types import Extent, Plan, Transfer


@dataclass
class _Round:
    """What this rank has under way in one round."""

    sends: list[Pending]
    receives: dict[int, tuple[Pending, torch.Tensor]]


class Exchange:
    """Runs a plan's traffic for one rank.

    Two rounds are under way at a time: while the messages of one are laid down, those of the next travel. So a plan's
    rounds are made for half of the bytes that may be in flight.

    Args:
        channel: connects all ranks of the job.
        plan: equal on all ranks.
        source: returns the 1-D tensor, on any device, that a transfer of this rank is taken from: the holding in the
            extent's state, from the fragment's first element on (backwards: the extent, from its first element on).
        lay: takes a transfer and the values of each of its boxes, in their order.
        arrived: takes the index of an extent once all its transfers to this rank have been laid down.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        source: Callable[[Transfer, Extent], torch.Tensor],
        lay: Callable[[Transfer, list[torch.Tensor]], None],
        arrived: Callable[[int], None],
    ) -> None:
        self._channel, self._plan = channel, plan
        self._source, self._lay, self._arrived = source, lay, arrived
        self._incoming = _by_round(plan.incoming(channel.rank))
        self._outgoing = _by_round(plan.outgoing(channel.rank))
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Send, receive and lay down everything that concerns this rank.

        A failure to read a source or to lay values down is kept until the end and then raised, so that peers still get
        their messages and none hangs.

        Raises:
            ChannelError: a peer has died or the timeout has passed.
        """
        missing: dict[int, int] = defaultdict(int)
        for transfers in self._incoming.values():
            for transfer in transfers:
                missing[transfer.extent] += 1

        buffers = [_Buffers(), _Buffers()]
        with self._channel.communicating("exchanging fragments"):
            current = self._post(0, buffers[0])
            for turn in range(self._plan.rounds):
                following = self._post(turn + 1, buffers[(turn + 1) % 2])
                self._receive(turn, current, missing)
                for send in current.sends:
                    send.wait()
                current = following
        if self._failure is not None:
            raise self._failure

    def _post(self, turn: int, buffers: _Buffers) -> _Round:
        """Post all receives, then pack and post all sends of a round."""
        expected: dict[int, int] = defaultdict(int)
        for transfer in self._incoming.get(turn, ()):
            if (peer := self._plan.sender(transfer)) != self._channel.rank:
                expected[peer] += self._plan.size(transfer)
        inbox = buffers.inbox(sum(expected.values()))
        receives = {}
        for peer, nbytes in sorted(expected.items()):
            message, inbox = inbox[:nbytes], inbox[nbytes:]
            receives[peer] = (self._channel.irecv(message, peer), message)

        messages: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in self._outgoing.get(turn, ()):
            messages[self._plan.receiver(transfer)].append(transfer)
        outbox = buffers.outbox(sum(self._plan.size(t) for transfers in messages.values() for t in transfers))
        sends = []
        for peer, transfers in sorted(messages.items()):
            nbytes = sum(self._plan.size(transfer) for transfer in transfers)
            message, outbox = outbox[:nbytes], outbox[nbytes:]
            self._pack(message, transfers)
            sends.append(self._channel.isend(message, peer))
        return _Round(sends, receives)

    def _pack(self, message: torch.Tensor, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            slot, message = message[: self._plan.size(transfer)], message[self._plan.size(transfer) :]
            try:
                for value, view in zip(self._unpack(slot, transfer), self._views(transfer), strict=True):
                    value.copy_(view)
            except Exception as failure:  # reported once the peers have been served
                self._failure = self._failure or failure

    def _receive(self, turn: int, under_way: _Round, missing: dict[int, int]) -> None:
        """Lay down the transfers of a round in the plan's order; wait for a peer's message when it is first needed."""
        unread: dict[int, torch.Tensor] = {}
        for transfer in self._incoming.get(turn, ()):
            peer = self._plan.sender(transfer)
            slot = None
            if peer != self._channel.rank:
                if peer not in unread:
                    work, unread[peer] = under_way.receives[peer]
                    work.wait()
                size = self._plan.size(transfer)
                slot, unread[peer] = unread[peer][:size], unread[peer][size:]
            try:
                self._lay(transfer, self._views(transfer) if slot is None else self._unpack(slot, transfer))
                missing[transfer.extent] -= 1
                if not missing[transfer.extent]:
                    self._arrived(transfer.extent)
            except Exception as failure:  # reported once the peers have been served
                self._failure = self._failure or failure

    def _views(self, transfer: Transfer) -> list[torch.Tensor]:
        """The boxes of a transfer as views of this rank's own values."""
        extent = self._plan.extents[transfer.extent]
        values = self._source(transfer, extent)
        if self._plan.backwards:
            return [box.full_view(values, extent.start) for box in transfer.boxes]
        return [box.shard_view(values, transfer.holding.fragment.param_start) for box in transfer.boxes]

    def _unpack(self, slot: torch.Tensor, transfer: Transfer) -> list[torch.Tensor]:
        """The boxes of a transfer as views of its part of a message, each dense, one after the other."""
        dtype = self._plan.extents[transfer.extent].state.live
        flat = slot[: transfer.numel * dtype.itemsize].view(dtype)
        return _split(flat, transfer.boxes)


def _split(flat: torch.Tensor, boxes: tuple[Box, ...]) -> list[torch.Tensor]:
    parts = flat.split([box.numel for box in boxes])
    return [part.view(box.shape) for part, box in zip(parts, boxes, strict=True)]


def _by_round(transfers: list[Transfer]) -> dict[int, list[Transfer]]:
    rounds: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        rounds[transfer.round].append(transfer)
    return rounds


class _Buffers:
    """Memory for the messages of one round, grown on demand and reused."""

    def __init__(self) -> None:
        self._in = torch.empty(0, dtype=torch.uint8)
        self._out = torch.empty(0, dtype=torch.uint8)

    def inbox(self, nbytes: int) -> torch.Tensor:
        if self._in.numel() < nbytes:
            self._in = torch.empty(nbytes, dtype=torch.uint8)
        return self._in[:nbytes]

    def outbox(self, nbytes: int) -> torch.Tensor:
        if self._out.numel() < nbytes:
            self._out = torch.empty(nbytes, dtype=torch.uint8)
        return self._out[:nbytes]
