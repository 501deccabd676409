# SPDX-License-Identifier: Apache-2.0
"""The only module that communicates: agreement between ranks, and the exchange of fragments.

Everything goes over host memory on a gloo process group of our own, so that it can neither reorder nor block the
collectives of training, and takes no accelerator memory.
"""

from __future__ import annotations

import datetime
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megads_ucp.errors import UniversalCheckpointError
from megads_ucp.layout.core import Box
from megads_ucp.plan import Extent, Plan, Transfer

HOST = torch.device("cpu")
"""To be entered around all that uses a channel: what is made without a word about its device is to be in host memory,
wherever the client's ``torch.set_default_device`` would have it, which torch's collectives of objects go by too."""

_LONGEST_REASON = 2000

_HUNG_UP, _FIRST = "megads_ucp/hung_up", "megads_ucp/hung_up_first"
"""Keys in the group's store: how many ranks have hung up, and why the first one did."""

_ROLL_CALL_SECONDS = 5.0
"""How long ranks that have hung up may take to say so; they learn of each other within milliseconds."""


class Disagreement(UniversalCheckpointError):
    """A step failed on some rank; raised on all of them, naming every rank that failed and why."""


class ChannelError(UniversalCheckpointError):
    """Some rank does not answer any more. The channel is closed; :meth:`Channel.abandoned` tells all ranks so."""


class Pending:
    """A message under way. The channel can drop it: while anything holds a message, gloo keeps its connections open."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        assert self._work is not None, "waited for a message on a closed channel"
        self._work.wait()

    def drop(self) -> None:
        self._work = None


class Channel:
    """All ranks of the job, on a process group of our own. Making one is collective.

    Whoever meets an error on it hangs up, which closes its connections: so all ranks that wait for it, and all that
    wait for those, hang up as well, within milliseconds and not after the timeout.
    """

    def __init__(self, timeout_minutes: float) -> None:
        timeout = datetime.timedelta(minutes=timeout_minutes)
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        self._store = self._group.get_group_store()
        self._pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def abandoned(self) -> bool:
        """Whether any rank has hung up, so that all need a new channel. To be asked when no rank is using it."""
        return self._group is None or self._store.add(_HUNG_UP, 0) > 0

    @contextmanager
    def talking(self, doing: str) -> Iterator[None]:
        """Communicate in the body; any failure that is not one of ours ends the channel.

        Raises:
            ChannelError: says which ranks have gone silent, as far as that can be told.
        """
        if self._group is None:
            raise ChannelError(f"{doing} failed: this rank has hung up before.")
        try:
            yield
        except UniversalCheckpointError:
            raise
        except Exception as error:  # gloo raises RuntimeError for all its troubles
            raise ChannelError(f"{doing} failed: {self.hang_up(error)}") from error

    def hang_up(self, reason: BaseException) -> str:
        """Close the connections, and find out which ranks have died: those that do not hang up as well."""
        told = f"rank {self.rank}: {reason_of(reason)}"
        with suppress(RuntimeError):  # of a store that has died, as the roll call will find
            # While all connections are open: what others meet once they are closed is no reason, but follows from it.
            self._store.compare_set(_FIRST, "", told)
        for pending in list(self._pending):
            pending.drop()
        traceback.clear_frames(reason.__traceback__)  # the frames of a failed collective hold the group, too
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        del group
        return self._roll_call(told)

    def _roll_call(self, told: str) -> str:
        try:
            first = self._store.compare_set(_FIRST, "", told).decode()
            self._store.set(f"{_HUNG_UP}/{self.rank}", "")
            here, deadline = self._store.add(_HUNG_UP, 1), time.monotonic() + _ROLL_CALL_SECONDS
            while here < self.world and time.monotonic() < deadline:
                time.sleep(0.02)
                here = self._store.add(_HUNG_UP, 0)
            everybody = range(self.world) if here < self.world else ()
            silent = [rank for rank in everybody if not self._store.check([f"{_HUNG_UP}/{rank}"])]
        except RuntimeError:  # DistNetworkError
            return f"{told}. The job's store does not answer: its host (usually rank 0, or the launcher) has died."
        if silent:
            return f"no sign of life from {_ranks(silent)}: dead, or stuck. {first}"
        return f"all ranks are alive, but the channel between them failed. {first}"

    def agree(self, failure: BaseException | None, doing: str) -> None:
        """Return on every rank if no rank failed; otherwise raise the same error on every rank.

        Raises:
            Disagreement: names ``doing``, and each failed rank with its reason.
        """
        mine = reason_of(failure)
        reasons: list[str | None] = [None] * self.world
        with self.talking(doing if mine is None else f"{doing} (here: {mine})"):
            failed = torch.tensor([failure is not None], dtype=torch.int32)
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
            if not failed.item():
                return
            dist.all_gather_object(reasons, mine, group=self._group)
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, reason in enumerate(reasons):
            if reason is not None:
                ranks_of[reason].append(rank)
        told = "; ".join(f"{_ranks(ranks)}: {reason}" for reason, ranks in ranks_of.items())
        raise Disagreement(f"{doing} failed. {told}") from failure

    @contextmanager
    def agreed(self, doing: str) -> Iterator[None]:
        """Run the body on this rank, then leave only if every rank's body succeeded.

        The body must not wait for other ranks: one that failed in its own body would not be there.

        Raises:
            Disagreement: as :meth:`agree`.
            ChannelError: some rank does not answer.
        """
        failure: Exception | None = None
        try:
            yield
        except ChannelError:
            raise  # all ranks get one; there is nobody left to agree with
        except Exception as raised:  # told to all ranks and raised there
            failure = raised
        self.agree(failure, doing)

    def all_gather_ints(self, values: list[int]) -> list[list[int]]:
        """Everybody's values, by rank; all ranks give equally many, each within 63 bits."""
        mine = torch.tensor(values, dtype=torch.int64)
        everybody = list(torch.empty(self.world, len(values), dtype=torch.int64))
        with self.talking("gathering what the ranks hold"):
            dist.all_gather(everybody, mine, group=self._group)
        return [theirs.tolist() for theirs in everybody]

    def sum_int64(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of everybody's values, modulo 2**64, in their place; all ranks give equally many."""
        with self.talking("adding up what the ranks counted"):
            dist.all_reduce(values, group=self._group)
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        """``source``'s value, on every rank. Anything picklable."""
        box = [value]
        with self.talking(f"hearing from rank {source}"):
            dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def gather(self, value: Any, destination: int = 0) -> list[Any] | None:
        """Everybody's values by rank on ``destination``, None elsewhere."""
        values = [None] * self.world if self.rank == destination else None
        with self.talking(f"telling rank {destination}"):
            dist.gather_object(value, values, dst=destination, group=self._group)
        return values

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Within :meth:`talking`, as is the waiting."""
        return self._under_way(dist.isend(tensor, peer, group=self._group))

    def irecv(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Within :meth:`talking`, as is the waiting."""
        return self._under_way(dist.irecv(tensor, peer, group=self._group))

    def _under_way(self, work: dist.Work | None) -> Pending:
        pending = Pending(work)
        self._pending.add(pending)
        return pending


def reason_of(failure: BaseException | None) -> str | None:
    """One line for another rank's log."""
    if failure is None:
        return None
    text = str(failure) if isinstance(failure, UniversalCheckpointError) else f"{type(failure).__name__}: {failure}"
    return text[:_LONGEST_REASON]


def _ranks(ranks: list[int]) -> str:
    """Ascending ranks in words: "rank 3", "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)


@dataclass
class _Round:
    """What this rank has under way in one round."""

    sends: list[Pending]
    receives: dict[int, tuple[Pending, torch.Tensor]]


class Exchange:
    """Runs a plan's traffic for one rank.

    Two rounds are under way at a time: while one's messages are laid down, the next one's travel. The planner was told
    half of the bytes that may be in flight.

    Args:
        channel: the process group.
        plan: equal on all ranks.
        source: returns the 1-D tensor that a transfer of this rank's is taken from, on any device: the holding in the
            extent's state, from the fragment's first element on (backwards: the extent, from its first element on).
        lay: takes a transfer and the values of each of its boxes, in the boxes' order.
        arrived: called with an extent's index once all its transfers to this rank have been laid.
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
        """Send, receive and lay down everything of this rank's.

        A failure to read a source or to lay values down is kept until the end, so that peers get their messages all
        the same and nobody hangs; then it is raised.

        Raises:
            ChannelError: a peer has died or the timeout has passed.
        """
        missing: dict[int, int] = defaultdict(int)
        for transfers in self._incoming.values():
            for transfer in transfers:
                missing[transfer.extent] += 1

        buffers = [_Buffers(), _Buffers()]
        with self._channel.talking("exchanging fragments"):
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
        """Lay down a round's transfers in the plan's order, waiting for each peer's message when it is first needed."""
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
        """The boxes of a transfer as views of what this rank has."""
        extent = self._plan.extents[transfer.extent]
        values = self._source(transfer, extent)
        if self._plan.backwards:
            return [box.full_view(values, extent.start) for box in transfer.boxes]
        return [box.shard_view(values, transfer.holding.fragment.param_start) for box in transfer.boxes]

    def _unpack(self, slot: torch.Tensor, transfer: Transfer) -> list[torch.Tensor]:
        """The boxes of a transfer as views of their place in a message, each dense, one after the other."""
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
    """Memory for one round's messages, grown on demand and used again."""

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
