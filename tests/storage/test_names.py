# SPDX-License-Identifier: Apache-2.0
"""What may be named what is said in words, before anything is written."""

from __future__ import annotations

import re

import pytest

from megads_ucp.errors import StorageError
from megads_ucp.storage import Staging, check_names, check_tag

STATES = ("fp32", "exp_avg")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["p.t/"], r"'p.t/' .*ends in a slash"),
        (["p.a/b", "p.a//b"], r"'p.a//b' .*two slashes in a row"),
        (["/p"], r"'/p' .*begins with a slash"),
        (["a/./b"], r"'a/./b' .*\. or \.\."),
        (["../p"], r"'../p' .*\. or \.\."),
        (["a\0b"], r"'a\\x00b' .*NUL"),
        (["a\ud800"], r"characters that no file name can"),
        (["x" * 256], r"256 bytes, the file system takes 255"),
        (["ä" * 128], r"256 bytes, the file system takes 255"),
        (["/".join(["x" * 200] * 21)[1:]], r"bytes, and \d+ are left"),
        (["optimizer_state.pt"], r"directory zero/optimizer_state.pt, which is a file"),
        (["a", "a/fp32.pt"], r"'a/fp32.pt' would lie in zero/a/fp32.pt, among the states of parameter 'a'"),
        (["a", "a/b.pt/c"], r"'a/b.pt/c' would lie in zero/a/b.pt, among the states of parameter 'a'"),
    ],
)
def test_names_that_cannot_be_paths_are_refused(tmp_path, names, reason):
    with pytest.raises(StorageError, match=reason) as raised:
        check_names(tmp_path / "x_universal", dict.fromkeys(names, STATES))
    assert "another name" in str(raised.value)


def test_names_that_can_be_paths_are_taken(tmp_path):
    names = ["a", "a/b", "a b", "ä*", "a.b.weight", "x" * 255, "A", "B/b", "fp32.pt", "a.pt"]
    check_names(tmp_path / "x_universal", dict.fromkeys(names, STATES))


def test_names_that_differ_in_case_are_refused_where_that_is_no_difference(tmp_path):
    names = dict.fromkeys(["block.w", "Block.w"], STATES)
    check_names(tmp_path, names)  # as this file system says
    with pytest.raises(StorageError, match=r"'block.w' and 'Block.w' are one name"):
        check_names(tmp_path, names, folds_case=True)


def test_a_state_with_a_slash_is_refused(tmp_path):
    with pytest.raises(StorageError, match=r"'w' .* state 'a/b' holds a slash"):
        check_names(tmp_path, {"w": ["fp32", "a/b"]})


def test_a_name_too_long_for_the_file_system_is_refused_by_the_length_that_is_left(tmp_path):
    Staging.create(tmp_path / f"{'x' * 245}_universal", "r1").discard()
    with pytest.raises(StorageError, match=r"x_universal has 256 bytes, the file system takes names of 255"):
        Staging.create(tmp_path / f"{'x' * 246}_universal", "r1")
    assert not list(tmp_path.iterdir())


def test_what_is_no_universal_checkpoint_is_never_replaced(tmp_path):
    regular = tmp_path / "x_universal"
    regular.mkdir()
    (regular / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(StorageError, match=r"no universal checkpoint \(the regular one of tag x_universal\?\)"):
        Staging.create(regular, "r1")
    (regular / "mp_rank_00_model_states.pt").unlink()
    Staging.create(regular, "r1").commit(None)  # nothing is lost with an empty directory


@pytest.mark.parametrize("tag", ["x_universal", "x_universal/step1", "./x_universal"])
def test_a_tag_that_leads_into_a_universal_checkpoint_is_refused(tmp_path, tag):
    check_tag(tmp_path, tag)
    (tmp_path / "x_universal" / "zero").mkdir(parents=True)
    with pytest.raises(StorageError, match=re.escape(str(tmp_path / "x_universal"))):
        check_tag(tmp_path, tag)
    check_tag(tmp_path, "x")
    check_tag(tmp_path, "y_universal")
    with pytest.raises(StorageError, match="which is a universal checkpoint"):
        check_tag("/elsewhere", str(tmp_path / "x_universal"))
