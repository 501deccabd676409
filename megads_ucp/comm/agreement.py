# SPDX-License-Identifier: Apache-2.0
"""What must be equal on all ranks: settings and arguments. Digests are compared; values travel if they differ."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megads_ucp.comm.channel import Channel, ranks_in_words
from megads_ucp.errors import Disagreement

_POLL_SECONDS = 0.05


class Announcement:
    """The settings of an engine that has been built, put where all ranks find them. Not collective.

    A rank that has other settings may never ask for a channel (it exports nothing, say), and one that waits for it
    there waits for the timeout. So settings are compared before, by way of the job's store.

    Args:
        settings: by name; the same names on all ranks.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None, "DeepSpeed has built an engine, so there is a world"
        self._store = dist.group.WORLD.get_group_store()
        # Ranks build their engines in the same order, so the number says which one this is.
        number = self._store.add(f"megads_ucp/engines/{self._rank}", 1)
        self._key = f"megads_ucp/settings/{number}"
        self._alike = False
        self._text = _text(settings)
        self._store.set(f"{self._key}/{self._rank}", self._text)
        self._store.add(self._counter(self._text), 1)
        self._store.add(self._key, 1)

    def check(self, timeout_minutes: float) -> None:
        """Return if all ranks have announced the same; wait for those that have not yet.

        Raises:
            Disagreement: names each setting that differs, with its values and their ranks; or the ranks that have
                announced none.
        """
        if self._alike:
            return
        deadline = time.monotonic() + timeout_minutes * 60
        while self._store.add(self._key, 0) < self._world:
            if time.monotonic() > deadline:
                self._refuse_absent()
            time.sleep(_POLL_SECONDS)
        if self._store.add(self._counter(self._text), 0) < self._world:
            texts = [self._store.get(f"{self._key}/{rank}").decode() for rank in range(self._world)]
            raise disagreement("settings of the universal checkpoint", texts, "the same flags and DeepSpeed config")
        self._alike = True

    def _counter(self, text: str) -> str:
        return f"{self._key}/{hashlib.sha256(text.encode()).hexdigest()}"

    def _refuse_absent(self) -> None:
        absent = [rank for rank in range(self._world) if not self._store.check([f"{self._key}/{rank}"])]
        raise Disagreement(
            f"{ranks_in_words(absent)} did not build this engine with megads_ucp installed: call megads_ucp.install() "
            "before deepspeed.initialize on all ranks."
        )


def check_equal(channel: Channel, what: str, values: Mapping[str, Any], way_out: str) -> None:
    """Return if all ranks give the same values. Collective.

    Args:
        channel: connects the ranks.
        what: the values are, for the message: "arguments of save_checkpoint".
        values: plain ones, by name; the same names on all ranks.
        way_out: what to give all ranks.

    Raises:
        Disagreement: names each one that differs, with its values and their ranks.
    """
    text = _text(values)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2  # a channel takes 63 bits
    if len({row[0] for row in channel.all_gather_ints([digest])}) > 1:
        texts = channel.broadcast(channel.gather(text), 0)
        raise disagreement(what, texts, way_out)


def disagreement(what: str, texts: Sequence[str], way_out: str) -> Disagreement:
    """The error that names all that differs.

    Args:
        what: the values are.
        texts: of all ranks, by rank.
        way_out: what to give all ranks.
    """
    by_rank = [json.loads(text) for text in texts]
    parts = []
    for name in by_rank[0]:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, values in enumerate(by_rank):
            ranks[values[name]].append(rank)
        if len(ranks) > 1:
            parts.append(
                f"{name} is " + " and ".join(f"{value} on {ranks_in_words(at)}" for value, at in ranks.items())
            )
    error = Disagreement(f"the ranks have different {what}: {'; '.join(parts)}. Give all ranks {way_out}.")
    error.spokesmen = {texts.index(text) for text in texts}
    return error


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps({name: repr(value) for name, value in values.items()})
