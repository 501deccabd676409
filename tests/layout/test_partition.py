# SPDX-License-Identifier: Apache-2.0
"""Partition arithmetic: worked cases, and any case against a slow reference that deals out elements one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads_ucp.errors import PlanError
from megads_ucp.layout.partition import FlatGroup, Fragment, Member, Partition
from tests.support.flat_groups import flat_group

PADDING = None
patient = settings(deadline=None)  # a busy machine is no failure


def trailing_group(numel: int, degree: int) -> FlatGroup:
    """A group of one parameter, aligned as both of DeepSpeed's optimizers align it."""
    return flat_group(["x"], [numel], degree, alignment=2 * degree)


def reference(
    numels: list[int], degree: int, parameter_alignment: int, round_robin: bool
) -> list[list[tuple[str, int] | None]]:
    """For each rank, for each element of its partition: (parameter, index within it), or PADDING."""
    names = [str(index) for index in range(len(numels))]
    if round_robin:  # each parameter's turn, then its place among those of the same turn
        names.sort(key=lambda name: (int(name) % degree, int(name) // degree))
    flat: list[tuple[str, int] | None] = []
    for name in names:
        while len(flat) % parameter_alignment:
            flat.append(PADDING)
        flat.extend((name, element) for element in range(numels[int(name)]))
    while len(flat) % (2 * degree):
        flat.append(PADDING)
    size = len(flat) // degree
    return [flat[rank * size : (rank + 1) * size] for rank in range(degree)]


def elementwise(partition: Partition) -> list[tuple[str, int] | None]:
    """A partition in the form of the reference. An element claimed twice fails."""
    elements: list[tuple[str, int] | None] = [PADDING] * partition.numel
    for fragment in partition.fragments:
        for offset in range(fragment.numel):
            assert elements[fragment.partition_start + offset] is PADDING
            elements[fragment.partition_start + offset] = (fragment.name, fragment.param_start + offset)
    return elements


def padding(partition: Partition) -> int:
    return partition.numel - sum(fragment.numel for fragment in partition.fragments)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[int], int, int, bool]:
    """numels, degree, parameter_alignment, round_robin. Sizes of 1, and more ranks than elements, are common."""
    numels = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    return numels, draw(st.integers(1, 24)), draw(st.sampled_from([1, 4, 8])), draw(st.booleans())


def build(case: tuple[list[int], int, int, bool]) -> FlatGroup:
    numels, degree, parameter_alignment, round_robin = case
    return flat_group(
        [str(index) for index in range(len(numels))],
        numels,
        degree,
        alignment=2 * degree,
        parameter_alignment=parameter_alignment,
        round_robin=round_robin,
    )


@patient
@given(groups())
def test_every_element_is_where_the_reference_puts_it(case: tuple[list[int], int, int, bool]) -> None:
    group = build(case)
    assert [elementwise(group.partition(rank)) for rank in range(group.degree)] == reference(*case)


@patient
@given(groups())
def test_every_real_element_lies_in_exactly_one_fragment(case: tuple[list[int], int, int, bool]) -> None:
    group = build(case)
    held = [
        (fragment.name, fragment.param_start + offset)
        for rank in range(group.degree)
        for fragment in group.partition(rank).fragments
        for offset in range(fragment.numel)
    ]
    assert sorted(held) == sorted((member.name, i) for member in group.members for i in range(member.numel))


@patient
@given(groups())
def test_group_padding_is_what_follows_the_last_real_element(case: tuple[list[int], int, int, bool]) -> None:
    group = build(case)
    flat = [element for part in reference(*case) for element in part]
    last = max(index for index, element in enumerate(flat) if element is not PADDING)
    size = group.partition_numel
    for rank in range(group.degree):
        assert group.group_padding(rank) == sum(index > last for index in range(rank * size, (rank + 1) * size))


@patient
@given(groups())
def test_holders_are_the_ranks_whose_partitions_have_a_fragment(case: tuple[list[int], int, int, bool]) -> None:
    group = build(case)
    partitions = [group.partition(rank) for rank in range(group.degree)]
    for member in group.members:
        assert group.holders(member.name) == tuple(
            (rank, fragment)
            for rank, partition in enumerate(partitions)
            for fragment in partition.fragments
            if fragment.name == member.name
        )


@pytest.mark.parametrize(
    ("numel", "degree", "flat", "paddings"),
    [
        # The flat length is the next multiple of 2 * degree; its tail covers the last ranks, wholly or in part.
        (1, 4, 8, [1, 2, 2, 2]),
        (3, 4, 8, [0, 1, 2, 2]),
        (9, 4, 16, [0, 0, 3, 4]),
        (10, 4, 16, [0, 0, 2, 4]),
        (17, 8, 32, [0, 0, 0, 0, 3, 4, 4, 4]),
        (33, 8, 48, [0, 0, 0, 0, 0, 3, 6, 6]),
        (5, 2, 8, [0, 3]),
        (8, 4, 8, [0, 0, 0, 0]),
    ],
)
def test_tails_worked_out_by_hand(numel: int, degree: int, flat: int, paddings: list[int]) -> None:
    group = trailing_group(numel, degree)
    assert group.numel == flat
    assert [group.group_padding(rank) for rank in range(degree)] == paddings
    assert [padding(group.partition(rank)) for rank in range(degree)] == paddings


def test_the_field_case_of_768_ranks() -> None:
    group = trailing_group(266240, 768)
    assert (group.numel, group.partition_numel) == (267264, 348)
    assert group.partition(0).fragments == (Fragment("x", 348, param_start=0, partition_start=0),)
    assert padding(group.partition(764)) == 0
    assert group.partition(765) == Partition(348, (Fragment("x", 20, param_start=266220, partition_start=0),))
    assert group.partition(766) == group.partition(767) == Partition(348, ())
    assert [group.group_padding(rank) for rank in (764, 765, 766, 767)] == [0, 328, 348, 348]
    assert [rank for rank, _ in group.holders("x")] == list(range(766))


def test_padding_between_parameters_is_not_group_padding() -> None:
    group = flat_group(["a", "b", "c"], [5, 3, 2], 3, alignment=6, parameter_alignment=8)
    assert group.members == (Member("a", 5, 0), Member("b", 3, 8), Member("c", 2, 16))
    assert (group.numel, group.partition_numel) == (18, 6)  # exactly full: no padding follows the last parameter
    assert group.partition(0) == Partition(6, (Fragment("a", 5, param_start=0, partition_start=0),))
    assert group.partition(1) == Partition(6, (Fragment("b", 3, param_start=0, partition_start=2),))
    assert group.partition(2) == Partition(6, (Fragment("c", 2, param_start=0, partition_start=4),))
    assert [group.group_padding(rank) for rank in range(3)] == [0, 0, 0]


def test_round_robin_deals_parameters_to_the_ranks_in_turn() -> None:
    group = flat_group("abcdefgh", [1] * 8, 3, alignment=6, round_robin=True)
    assert "".join(member.name for member in group.members) == "adgbehcf"


def test_round_robin_over_more_ranks_than_parameters_changes_nothing() -> None:
    assert flat_group("abc", [5, 3, 2], 8, alignment=16, round_robin=True) == flat_group(
        "abc", [5, 3, 2], 8, alignment=16
    )


def test_a_group_without_parameters_holds_nothing() -> None:
    group = flat_group([], [], 4, alignment=8)
    assert group.numel == 0
    assert group.partition(3) == Partition(0, ())
    assert group.group_padding(3) == 0


@pytest.mark.slow
def test_65536_ranks() -> None:
    numels = [50257 * 64, *[64, 64 * 192, 64 * 64, 64 * 256] * 48, 1]
    names = [str(index) for index in range(len(numels))]
    group = flat_group(names, numels, 65536, alignment=2 * 65536)
    partitions = [group.partition(rank) for rank in range(group.degree)]
    assert sum(fragment.numel for partition in partitions for fragment in partition.fragments) == sum(numels)
    assert sum(map(padding, partitions)) == group.numel - sum(numels)
    assert sum(group.group_padding(rank) for rank in range(group.degree)) == group.numel - sum(numels)
    assert sum(fragment.numel for name in names for _, fragment in group.holders(name)) == sum(numels)


@pytest.mark.parametrize(
    ("members", "numel", "degree", "message"),
    [
        ((Member("a", 4, 0), Member("b", 4, 3)), 8, 2, "'b' starts at element 3, before 4, where 'a' ends"),
        ((Member("b", 4, 4), Member("a", 4, 0)), 8, 2, "'a' starts at element 0, before 8, where 'b' ends"),
        ((Member("a", 4, -1),), 8, 2, "'a' starts at element -1, before 0, where the buffer starts"),
        ((Member("a", 9, 0),), 8, 2, "8 elements stops before 9, where 'a' ends"),
        ((Member("a", 0, 0),), 8, 2, "'a' has 0 elements"),
        ((Member("a", 2, 0), Member("b", 1, 2), Member("a", 2, 3)), 8, 2, "more than once in one group: a"),
        ((), 9, 2, "9 elements cannot be cut equally over 2 ranks"),
        ((), 8, 0, "8 elements cannot be cut equally over 0 ranks"),
    ],
)
def test_impossible_groups_are_refused(members: tuple[Member, ...], numel: int, degree: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        FlatGroup(members, numel, degree)


@pytest.mark.parametrize(
    "fragments",
    [
        (Fragment("a", 3, 0, 0), Fragment("b", 2, 0, 2)),
        (Fragment("a", 2, 0, 2), Fragment("b", 2, 0, 0)),
        (Fragment("a", 5, 0, 0),),
        (Fragment("a", 0, 0, 0),),
        (Fragment("a", 1, 0, -1),),
    ],
)
def test_impossible_partitions_are_refused(fragments: tuple[Fragment, ...]) -> None:
    with pytest.raises(PlanError, match="does not fit a partition of 4 elements"):
        Partition(4, fragments)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_shard_group_is_refused(rank: int) -> None:
    group = trailing_group(9, 4)
    with pytest.raises(PlanError, match=f"Shard rank {rank} is outside its shard group of 4 ranks"):
        group.partition(rank)
    with pytest.raises(PlanError, match=f"Shard rank {rank} is outside its shard group of 4 ranks"):
        group.group_padding(rank)


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(PlanError, match="'y' is not one of the 1 parameters of this group"):
        trailing_group(9, 4).holders("y")
