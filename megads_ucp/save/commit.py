# SPDX-License-Identifier: Apache-2.0
"""The end of an export: what all ranks have written becomes one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megads_ucp import storage
from megads_ucp.comm.channel import Channel
from megads_ucp.engine.state import EngineState
from megads_ucp.plan.types import Subject
from megads_ucp.save.frames import Frames, one_file_of_each
from megads_ucp.save.manifest import group_records, manifest, merge_groups
from megads_ucp.save.optimizer_values import ONLY_WEIGHTS, RankValues, drift_of, left_out_message, listed, merge
from megads_ucp.storage.format import OPTIMIZER_VALUES
from megads_ucp.storage.values import from_file, to_file


@dataclass(frozen=True)
class Written:
    """What rank 0 has to know of what one rank has written."""

    records: list[storage.ExtentRecord]
    groups: list[storage.GroupRecord]
    values: RankValues | None


class Commit:
    """The three steps of it, all of them collective.

    Args:
        channel: connects all ranks.
        state: of the engine.
        subjects: every parameter that is exported.
        frames: of their files.
        staging: the directory that becomes the checkpoint.
        warn: takes a warning, and the key under which it is given once, by default its text.
    """

    def __init__(
        self,
        channel: Channel,
        state: EngineState,
        subjects: Sequence[Subject],
        frames: Frames,
        staging: storage.Staging,
        warn: Callable[..., None],
    ) -> None:
        self._channel, self._state, self._staging = channel, state, staging
        self._subjects, self._frames = subjects, frames
        self._warn = warn

    def gather(self, records: list[storage.ExtentRecord], values: RankValues) -> list[Written] | None:
        """What all ranks have written, on rank 0."""
        groups = group_records(self._state) if self._state.first_of_replicas else []
        return self._channel.gather(Written(records, groups, values if self._speaks(values) else None))

    def checksums(self, written: list[Written] | None) -> dict[str, int]:
        """The checksums of whole payloads of the files that this rank has begun and others have written parts of.

        Rank 0 writes the optimizer's values, too, since it has all ranks' now.
        """
        channel, begun = self._channel, None
        with channel.agreed("completing the files"):
            if written is not None:
                split = storage.split_crc32(record for by_rank in written for record in by_rank.records)
                begun = [
                    {r.path: split[r.path] for r in by_rank.records if r.start == 0 and r.path in split}
                    for by_rank in written
                ]
                written[0].records.append(self._write_values([w.values for w in written if w.values is not None]))
        own: dict[str, int] = channel.scatter(begun)
        return own

    def take_name(
        self, sizes: Mapping[str, int], written: list[Written] | None, absent: Collection[str], latest: Path | None
    ) -> None:
        """Write the manifest, see that all files are there and durable, and give the directory its name.

        Args:
            sizes: of the files that are this rank's to look after, in bytes, by name.
            written: on rank 0, what all ranks have written.
            absent: names of parameters that were left out on request.
            latest: as for :meth:`Staging.commit`.
        """
        channel, staging, doing = self._channel, self._staging, f"committing {self._staging.target}"
        with channel.agreed(doing):
            if written is not None:
                storage.write_manifest(staging.directory, self._manifest(written, absent))
        with channel.agreed(doing):
            directories = storage.directories_of(one_file_of_each(self._subjects))
            staging.settle(sizes, storage.share(directories, channel.rank, channel.world))
        with channel.agreed(doing):
            if written is not None:
                staging.commit(latest)

    def _manifest(self, written: list[Written], absent: Collection[str]) -> storage.Manifest:
        groups = merge_groups(group for by_rank in written for group in by_rank.groups)
        records = [record for by_rank in written for record in by_rank.records]
        files = storage.file_records(self._frames.all(), records)
        run_id, world = self._staging.run_id, self._channel.world
        return manifest(self._state, self._subjects, files, groups, absent, run_id, world)

    def _speaks(self, values: RankValues) -> bool:
        """Whether rank 0 needs this rank's values: the first of the replicas speaks for all that have the same."""
        channel, state = self._channel, self._state
        place = state.coordinates
        own = [place.stage, place.tp_rank, int(state.first_of_replicas), values.digest()]
        digests = {(stage, tp): digest for stage, tp, first, digest in channel.all_gather_ints(own) if first}
        return state.first_of_replicas or digests[place.stage, place.tp_rank] != own[-1]

    def _write_values(self, ranks: list[RankValues]) -> storage.ExtentRecord:
        """Write what the optimizer keeps beside its tensors; warn of what is left out, and of what differs by rank."""
        staging, groups = self._staging, merge(ranks)
        left_out = list(dict.fromkeys(entry for group in groups for entry in group.left_out))
        if left_out:
            self._warn(f"{left_out_message(left_out, self._state.facts()['base_optimizer'])} {ONLY_WEIGHTS}")
        if drift := drift_of(groups):
            names = sorted({name for group in groups for name in group.differing_names()})
            self._warn(
                f"values of the optimizer that differ between ranks: {listed(drift)}. A resume at the same topology "
                "gives each rank its own back, another one gives all of them the first rank's.",
                key=", ".join(names),
            )
        record = storage.write_object(staging.path(OPTIMIZER_VALUES), to_file(groups), root=staging.directory)
        from_file(storage.read_object(staging.path(OPTIMIZER_VALUES)))
        return record
