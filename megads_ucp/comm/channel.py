# SPDX-License-Identifier: Apache-2.0
"""Agreement between the ranks of a job, on a process group of our own."""

from __future__ import annotations

import datetime
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from megads_ucp.errors import ChannelError, Disagreement, UniversalCheckpointError

HOST = torch.device("cpu")
"""To be entered around all that uses a channel: what is made without a word about its device is to be in host memory,
wherever the client's ``torch.set_default_device`` would have it, which torch's collectives of objects go by too."""


_LONGEST_REASON = 2000


_HUNG_UP, _FIRST = "megads_ucp/hung_up", "megads_ucp/hung_up_first"
"""Keys in the group's store: how many ranks have hung up, and why the first one did."""


_ROLL_CALL_SECONDS = 5.0
"""How long ranks that have hung up may take to say so; they learn of each other within milliseconds."""


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
