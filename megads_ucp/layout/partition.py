# SPDX-License-Identifier: Apache-2.0
"""Which elements of which parameter a rank holds, and how many elements of its partition are padding.

ZeRO stages 1 and 2 lay the parameters of a group end to end in one flat buffer, lengthen it until every rank of the
shard group gets an equal part, and give each rank one part, its *partition*:

    flat buffer   | a a a a a | b b b | c c c c | . . . .        4 ranks, 16 elements, 4 of them padding
    rank          0       | 1       | 2       | 3
    partition       a a a a | a b b b | c c c c | . . . .

A partition is thus a list of *fragments* of parameters; the rest of it is padding. Padding may fill several whole
partitions, and with `parameter_alignment` some of it lies between parameters.

Everything here is integers, in elements. Parameters are those of one tensor-parallel rank, flattened. Nothing is listed
per element or per rank, so 65,536 ranks cost no more than the fragments they hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megads_ucp.errors import PlanError


@dataclass(frozen=True)
class Member:
    """A parameter in its group's flat buffer: elements [offset, offset + numel)."""

    name: str
    numel: int
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Fragment:
    """A run of one parameter's elements in one rank's partition.

    The first of them is element `param_start` of the (TP-local, flattened) parameter, and `partition_start` of the
    partition.
    """

    name: str
    numel: int
    param_start: int
    partition_start: int

    @property
    def partition_stop(self) -> int:
        return self.partition_start + self.numel


@dataclass(frozen=True)
class Partition:
    """One rank's part of a flat buffer.

    Attributes:
        numel: elements, padding included.
        fragments: the real elements, in ascending order.

    Raises:
        PlanError: fragments overlap, are out of order or leave the partition.
    """

    numel: int
    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        end = 0
        for fragment in self.fragments:
            if fragment.numel <= 0 or fragment.partition_start < end or fragment.partition_stop > self.numel:
                raise PlanError(
                    f"{fragment} does not fit a partition of {self.numel} elements whose first {end} are taken. "
                    "Fragments must be given in ascending order and may not overlap."
                )
            end = fragment.partition_stop


@dataclass(frozen=True)
class FlatGroup:
    """A parameter group's flat buffer, cut over the ranks of its shard group in equal parts.

    Attributes:
        members: parameters in the order of their offsets, which under `round_robin_gradients` is not the order of the
            parameter group.
        numel: elements, padding included.
        degree: size of the group's own shard group (`real_dp_process_group[i]` in DeepSpeed); a shard rank is a rank
            within it.

    Raises:
        PlanError: members overlap, leave the buffer, are empty or share a name.
    """

    members: tuple[Member, ...]
    numel: int
    degree: int

    def __post_init__(self) -> None:
        if self.degree < 1 or self.numel < 0 or self.numel % self.degree:
            raise PlanError(f"A flat buffer of {self.numel} elements cannot be cut equally over {self.degree} ranks.")
        end, landmark = 0, "where the buffer starts"
        for member in self.members:
            if member.numel <= 0:
                raise PlanError(
                    f"Parameter '{member.name}' has {member.numel} elements. Leave empty parameters out, as "
                    "DeepSpeed's optimizers do: they take no part in a flat buffer."
                )
            if member.offset < end:
                raise PlanError(
                    f"Parameter '{member.name}' starts at element {member.offset}, before {end}, {landmark}. "
                    "Give members in ascending order of offset; they may not overlap."
                )
            end, landmark = member.stop, f"where '{member.name}' ends"
        if end > self.numel:
            raise PlanError(f"A flat buffer of {self.numel} elements stops before {end}, {landmark}.")
        if len(self._member_of) != len(self.members):
            names = [member.name for member in self.members]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise PlanError(f"Parameters appear more than once in one group: {', '.join(repeated)}.")

    # Both are derived and immutable; cached_property keeps them out of equality and hashing.
    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(member.stop for member in self.members)

    @cached_property
    def _member_of(self) -> dict[str, Member]:
        return {member.name: member for member in self.members}

    @property
    def partition_numel(self) -> int:
        """Elements per rank, padding included."""
        return self.numel // self.degree

    def partition(self, shard_rank: int) -> Partition:
        """A shard rank's partition; one of padding alone has no fragments."""
        self._check_rank(shard_rank)
        return Partition(self.partition_numel, tuple(self._fragments(shard_rank)))

    def group_padding(self, shard_rank: int) -> int:
        """Elements of a shard rank's partition past the last real element of the group.

        The stock converter (`_strip_tensor_paddings` in deepspeed/checkpoint/zero_checkpoint.py) cuts as many elements
        as `group_paddings` says off the end of the rank's partition. `BF16_Optimizer._setup_for_real_optimizer` books
        the whole tail on the last rank instead, even when the tail is longer than a partition.
        """
        self._check_rank(shard_rank)
        real = self._stops[-1] if self._stops else 0
        return min(max((shard_rank + 1) * self.partition_numel - real, 0), self.partition_numel)

    def holders(self, name: str) -> tuple[tuple[int, Fragment], ...]:
        """Every shard rank that holds a part of the parameter, ascending, with that part.

        Raises:
            PlanError: the group has no parameter of that name.
        """
        member = self._member_of.get(name)
        if member is None:
            raise PlanError(f"Parameter '{name}' is not one of the {len(self.members)} parameters of this group.")
        first, last = member.offset // self.partition_numel, (member.stop - 1) // self.partition_numel
        return tuple((rank, self._cut(member, rank)) for rank in range(first, last + 1))

    def fragment(self, name: str, shard_rank: int) -> Fragment | None:
        """The part of a parameter that a shard rank holds; None if it holds none, or the group has no such parameter.

        Raises:
            PlanError: there is no such shard rank.
        """
        self._check_rank(shard_rank)
        member, start = self._member_of.get(name), shard_rank * self.partition_numel
        if member is None or member.stop <= start or member.offset >= start + self.partition_numel:
            return None
        return self._cut(member, shard_rank)

    def _fragments(self, shard_rank: int) -> Iterator[Fragment]:
        start = shard_rank * self.partition_numel
        for index in range(bisect_right(self._stops, start), len(self.members)):
            member = self.members[index]
            if member.offset >= start + self.partition_numel:
                return
            yield self._cut(member, shard_rank)

    def _cut(self, member: Member, shard_rank: int) -> Fragment:
        """The part of a member that lies in a rank's partition; there must be one."""
        start = shard_rank * self.partition_numel
        first, stop = max(member.offset, start), min(member.stop, start + self.partition_numel)
        return Fragment(member.name, stop - first, first - member.offset, first - start)

    def _check_rank(self, shard_rank: int) -> None:
        if not 0 <= shard_rank < self.degree:
            raise PlanError(f"Shard rank {shard_rank} is outside its shard group of {self.degree} ranks.")
