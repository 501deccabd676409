# SPDX-License-Identifier: Apache-2.0
"""Agreement between the ranks of a job, and their messages, on a gloo process group of our own.

Everything goes through host memory, so that it can neither reorder nor block the collectives of training, and takes no
accelerator memory.
"""

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
"""To be entered around everything that uses a channel: a tensor made without a device must be in host memory, even if
the client has called ``torch.set_default_device``, which torch's collectives of objects follow too."""

_LONGEST_REASON = 2000  # characters

_ABORTED, _FIRST = "megads_ucp/aborted", "megads_ucp/aborted_first"
"""Keys in the group's store: how many ranks have aborted the channel, and the reason of the first one."""

_ROLL_CALL_SECONDS = 5.0
"""How long ranks that have aborted may take to say so; they notice each other's abort within milliseconds."""


_KINDS: dict[str, type[UniversalCheckpointError]] = {
    cls.__name__: cls
    for cls in [UniversalCheckpointError] + UniversalCheckpointError.__subclasses__()  # noqa: RUF005
}
"""The documented errors, by the name that travels."""


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

    A rank that meets an error on it aborts it, which closes the rank's connections. So all ranks waiting for that rank
    abort as well, and all waiting for those, within milliseconds and not after the timeout.

    Args:
        timeout_minutes: how long an operation may wait for another rank.

    Attributes:
        rank: of this process, in the job.
        world: number of ranks.
    """

    def __init__(self, timeout_minutes: float) -> None:
        timeout = datetime.timedelta(minutes=timeout_minutes)
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        self._store = self._group.get_group_store()
        self._pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def aborted(self) -> bool:
        """Whether any rank has aborted the channel, so that all need a new one. Ask when no rank is using it."""
        return self._group is None or self._store.add(_ABORTED, 0) > 0

    @contextmanager
    def communicating(self, doing: str) -> Iterator[None]:
        """Communicate in the body. Any failure but an error of this package aborts the channel.

        Args:
            doing: what the body does, for the message: "exchanging fragments".

        Raises:
            ChannelError: names the ranks that no longer answer, as far as that can be found out.
        """
        if self._group is None:
            raise ChannelError(f"{doing} failed: this rank has aborted the channel before.")
        try:
            yield
        except UniversalCheckpointError:
            raise
        except Exception as error:  # gloo raises RuntimeError for all its troubles
            raise ChannelError(f"{doing} failed: {self.abort(error)}") from error

    def abort(self, reason: BaseException) -> str:
        """Close this rank's connections, and find out which ranks have died: those that do not abort as well.

        Returns:
            What is known about the cause, in a sentence or two.
        """
        cause = f"rank {self.rank}: {reason_of(reason)}"
        with suppress(RuntimeError):  # of a store that has died, as the roll call will find
            # While all connections are open: what other ranks meet once they are closed is a consequence, no cause.
            self._store.compare_set(_FIRST, "", cause)
        traceback.clear_frames(reason.__traceback__)  # the frames of a failed collective hold the group, too
        self.close()
        return self._roll_call(cause)

    def close(self) -> None:
        """Give back this rank's connections, threads and process group. Local; for when nothing is under way."""
        for pending in list(self._pending):
            pending.drop()
        group, self._group = self._group, None
        if group is not None:
            with suppress(ValueError):  # it has gone with the world, by dist.destroy_process_group()
                dist.destroy_process_group(group)

    def _roll_call(self, cause: str) -> str:
        try:
            first = self._store.compare_set(_FIRST, "", cause).decode()
            self._store.set(f"{_ABORTED}/{self.rank}", "")
            present, deadline = self._store.add(_ABORTED, 1), time.monotonic() + _ROLL_CALL_SECONDS
            while present < self.world and time.monotonic() < deadline:
                time.sleep(0.02)
                present = self._store.add(_ABORTED, 0)
            candidates = range(self.world) if present < self.world else ()
            silent = [rank for rank in candidates if not self._store.check([f"{_ABORTED}/{rank}"])]
        except RuntimeError:  # DistNetworkError
            return f"{cause}. The job's store does not answer: its host (usually rank 0, or the launcher) has died."
        if silent:
            return f"no sign of life from {ranks_in_words(silent)}: dead, or stuck. {first}"
        return f"all ranks are alive, but the channel between them failed. {first}"

    def agree(self, failure: BaseException | None, doing: str) -> None:
        """Return on every rank if no rank failed; otherwise raise the same error on every rank.

        Args:
            failure: of this rank, if it failed.
            doing: the step that all ranks have taken, for the message.

        Raises:
            UniversalCheckpointError: names ``doing``, and each failed rank with its reason. Of the class that all
                failures have, if that is one of this package's; otherwise a Disagreement.
            ChannelError: some rank does not answer.
        """
        own_reason = reason_of(failure)
        found: list[tuple[str, str]] = [("", "")] * self.world
        with self.communicating(doing if own_reason is None else f"{doing} (here: {own_reason})"):
            failed = torch.tensor([failure is not None], dtype=torch.int32)
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
            if not failed.item():
                return
            dist.all_gather_object(found, (own_reason or "", _kind(failure)), group=self._group)
        ranks_by_reason: dict[str, list[int]] = defaultdict(list)
        for rank, (reason, _) in enumerate(found):
            if reason:
                ranks_by_reason[reason].append(rank)
        causes = "; ".join(f"{ranks_in_words(ranks)}: {reason}" for reason, ranks in ranks_by_reason.items())
        kinds = {kind for reason, kind in found if reason}
        error = _KINDS.get(kinds.pop() if len(kinds) == 1 else "", Disagreement)(f"{doing} failed. {causes}")
        error.spokesmen = {0, *(ranks[0] for ranks in ranks_by_reason.values())}
        raise error from failure

    @contextmanager
    def agreed(self, doing: str) -> Iterator[None]:
        """Run the body on this rank, then leave only if the bodies of all ranks succeeded.

        The body must not wait for other ranks: a rank that failed in its own body would not be there.

        Args:
            doing: what the body does, for the message.

        Raises:
            UniversalCheckpointError: as :meth:`agree`.
            ChannelError: some rank does not answer.
        """
        failure: Exception | None = None
        try:
            yield
        except ChannelError:
            raise  # all ranks get one; no rank is left to agree with
        except Exception as raised:  # reported to all ranks and raised there
            failure = raised
        self.agree(failure, doing)

    def all_gather_ints(self, values: list[int]) -> list[list[int]]:
        """The values of all ranks, by rank. Every rank gives equally many, each within 63 bits."""
        own = torch.tensor(values, dtype=torch.int64)
        gathered = list(torch.empty(self.world, len(values), dtype=torch.int64))
        with self.communicating("gathering integers from all ranks"):
            dist.all_gather(gathered, own, group=self._group)
        return [row.tolist() for row in gathered]

    def sum_int64(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, modulo 2**64, in place; returns ``values``. Every rank gives equally many."""
        with self.communicating("summing counts over all ranks"):
            dist.all_reduce(values, group=self._group)
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of rank ``source``, on every rank. Anything picklable."""
        box = [value]
        with self.communicating(f"receiving a broadcast of rank {source}"):
            dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def gather(self, value: Any, destination: int = 0) -> list[Any] | None:
        """The values of all ranks, by rank, on rank ``destination``; None elsewhere. Anything picklable."""
        values = [None] * self.world if self.rank == destination else None
        with self.communicating(f"gathering on rank {destination}"):
            dist.gather_object(value, values, dst=destination, group=self._group)
        return values

    def scatter(self, values: list[Any] | None, source: int = 0) -> Any:
        """This rank's of the values that rank ``source`` gives, one per rank; None elsewhere. Anything picklable."""
        received: list[Any] = [None]
        with self.communicating(f"receiving from rank {source}"):
            dist.scatter_object_list(received, values, src=source, group=self._group)
        return received[0]

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Start to send ``tensor`` to rank ``peer``. Only within :meth:`communicating`, waiting included."""
        return self._under_way(dist.isend(tensor, peer, group=self._group))

    def irecv(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Start to receive ``tensor`` from rank ``peer``. Only within :meth:`communicating`, waiting included."""
        return self._under_way(dist.irecv(tensor, peer, group=self._group))

    def _under_way(self, work: dist.Work | None) -> Pending:
        pending = Pending(work)
        self._pending.add(pending)
        return pending


def reason_of(failure: BaseException | None) -> str | None:
    """A failure in one line, for the logs of other ranks."""
    if failure is None:
        return None
    text = str(failure) if isinstance(failure, UniversalCheckpointError) else f"{type(failure).__name__}: {failure}"
    return text[:_LONGEST_REASON]


def _kind(failure: BaseException | None) -> str:
    """Name of the class that all ranks raise if all of them fail in this way; "" for a foreign error."""
    return next((cls.__name__ for cls in type(failure).__mro__ if cls in _KINDS.values()), "")


def ranks_in_words(ranks: list[int]) -> str:
    """Ascending ranks in words: "rank 3", "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)
