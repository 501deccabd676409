# SPDX-License-Identifier: Apache-2.0
"""An export that succeeds says so on rank 0: one line, with or without logging set up."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import TAG, Recipe

LINE = r"universal checkpoint {folder}/step_universal: [\d.e-]+ GB in [\d.]+ s, [\d.e-]+ GB/s \(plan .+\)\n"


def printed(folder: Path, set_up: Callable[[], None]) -> list[tuple[str, str]]:
    """Of each rank: standard output and standard error of a run that exports once."""

    def body() -> tuple[str, str]:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            for handler in list(logging.root.handlers):  # pytest's
                logging.root.removeHandler(handler)
            set_up()
            Recipe("fp32").saved(folder)
        assert (folder / f"{TAG}_universal").is_dir()
        return out.getvalue(), err.getvalue()

    return run_ranks(body, 2)


def test_a_script_that_sets_up_no_logging_sees_one_line_of_rank_0_on_standard_output(tmp_path: Path):
    (first, _), (second, _) = printed(tmp_path, lambda: None)

    (line,) = re.findall(LINE.format(folder=tmp_path), first)
    assert "universal checkpoint" not in second
    assert first.count("universal checkpoint") == line.count("universal checkpoint") == 1


def test_where_logging_has_a_handler_the_line_goes_there_and_nowhere_else(tmp_path: Path):
    (out, err), _ = printed(tmp_path, logging.basicConfig)

    assert re.search("^INFO:megads_ucp:" + LINE.format(folder=tmp_path), err, re.M)
    assert err.count("universal checkpoint") == 1 and "universal checkpoint" not in out


def test_a_handler_for_warnings_alone_does_not_swallow_it(tmp_path: Path):
    def warnings_only() -> None:
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        logging.root.addHandler(handler)

    (out, err), _ = printed(tmp_path, warnings_only)

    assert out.count("universal checkpoint") == 1 and "universal checkpoint" not in err


@pytest.mark.parametrize(
    "silence",
    [lambda: logging.getLogger("megads_ucp").setLevel(logging.WARNING), lambda: logging.disable(logging.INFO)],
    ids=["level", "disable"],
)
def test_it_can_be_silenced(tmp_path: Path, silence: Callable[[], None]):
    (out, err), _ = printed(tmp_path, silence)

    assert "universal checkpoint" not in out + err
