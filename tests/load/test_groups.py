# SPDX-License-Identifier: Apache-2.0
"""Saved parameter groups and those of a run, matched by the names of their members. Pure: no ranks, no engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megads_ucp.errors import StorageError
from megads_ucp.load.groups import match_groups, revived
from megads_ucp.storage import GroupRecord

DECAY, PLAIN = {"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}


def saved(*stages: list[tuple[str, dict[str, Any]]]) -> tuple[GroupRecord, ...]:
    """The groups of each stage, each with the one-letter names of its members."""
    return tuple(
        GroupRecord(stage, index, tuple(names), values)
        for stage, groups in enumerate(stages)
        for index, (names, values) in enumerate(groups)
    )


def matched(mine: list[str], groups: tuple[GroupRecord, ...]) -> list[tuple[int, int] | None]:
    found = match_groups([list(names) for names in mine], groups)
    return [None if group is None else (group.stage, group.index) for group in found]


def test_a_group_continues_those_that_its_members_were_in() -> None:
    pipeline = saved([("ab", DECAY), ("c", PLAIN)], [("d", PLAIN)], [("e", DECAY), ("f", PLAIN)])
    assert matched(["abe", "cdf"], pipeline) == [(0, 0), (0, 1)]
    assert matched(["e", "df"], pipeline) == [(2, 0), (1, 0)]
    assert matched(["d"], pipeline) == [(1, 0)]
    tied = saved([("ta", DECAY)], [("tb", DECAY)])
    assert matched(["tb"], tied) == [(0, 0)]


def test_a_group_without_known_members_goes_by_its_place() -> None:
    groups = saved([("a", DECAY), ("b", PLAIN)], [("c", PLAIN)])
    assert matched(["", "c"], groups) == [(0, 0), (1, 0)]
    assert matched(["a", "new"], groups) == [(0, 0), (0, 1)]
    assert matched(["a", "b", "new"], groups) == [(0, 0), (0, 1), None]


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (["c", "ab"], ["c, saved in group 1 of stage 0, is in parameter group 0", "a, saved in group 0", "in group 1"]),
        (["a", "b", "c"], ["a, saved in group 0 of stage 0", "and b, saved in group 0 of stage 0, in group 1"]),
        (["abc"], ["2 parameter groups with different weight_decay (0.1 and 0.0): a in group 0", "c in group 1"]),
        (["ad"], ["different weight_decay (0.1 and 0.0)", "a in group 0 of stage 0, d in group 0 of stage 1"]),
    ],
    ids=["swapped", "split", "merged", "merged over stages"],
)
def test_other_groups_are_refused(mine: list[str], words: list[str]) -> None:
    with pytest.raises(StorageError) as caught:
        match_groups([list(names) for names in mine], saved([("ab", DECAY), ("c", PLAIN)], [("d", PLAIN)]))
    for part in words:
        assert part in str(caught.value)


def test_equal_groups_of_one_stage_are_not_merged_either() -> None:
    with pytest.raises(StorageError, match=r"saved in 2 parameter groups: a in group 0, b in group 1\."):
        match_groups([["a", "b"]], saved([("a", DECAY), ("b", DECAY)]))


def test_values_come_back_as_what_they_are_in_the_run() -> None:
    current = {"lr": torch.tensor(1.0, dtype=torch.float64), "betas": (0.9, 0.99), "hook": len, "foreach": None, "n": 1}
    values = {"lr": 0.1, "betas": [0.8, 0.9], "hook": "<built-in function len>", "foreach": None, "n": 2, "name": "x"}
    found = revived(values, current)
    assert torch.equal(found.pop("lr"), torch.tensor(0.1, dtype=torch.float64))
    assert found == {"betas": (0.8, 0.9), "hook": len, "foreach": None, "n": 2, "name": "x"}
