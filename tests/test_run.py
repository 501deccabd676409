# SPDX-License-Identifier: Apache-2.0
"""megads_ucp.run: a client with Megatron's way of parsing arguments and of making a DeepSpeed config, run as it is."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megads_ucp import run
from megads_ucp.arguments import add_arguments
from tests.support.clients import client
from tests.support.mds import CHECKOUT
from tests.support.ranks import run_ranks


def launched(script: Path, *arguments: str) -> dict[str, Any]:
    """What the script saved, run as DeepSpeed's launcher runs `--module megads_ucp.run SCRIPT ARGUMENT...`."""

    def body() -> None:
        os.chdir(script.parent)
        run.main([f"--local_rank={dist.get_rank()}", str(script), *arguments])

    run_ranks(body, 2)
    saved: dict[str, Any] = torch.load(script.parent / "out/step/mp_rank_00_model_states.pt", weights_only=False)
    return saved


def exported(script: Path) -> bool:
    return (script.parent / "out" / "step_universal" / "zero").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["", "own_arguments", "megads_ucp.add_arguments"])
def test_our_flags_join_the_scripts_and_the_rest_passes_through(tmp_path: Path, provider: str) -> None:
    script = client(tmp_path / "client", provider, more="import megads_ucp; megads_ucp.install()")
    own = ["--own", "mine"] if provider == "own_arguments" else []

    saved = launched(script, "--universal-checkpoint-export", "--hidden-size", "7", *own)

    assert exported(script)
    assert saved["args"]["universal_checkpoint_export"] is True and saved["args"]["hidden_size"] == 7
    assert saved["argv"][:2] == [str(script), "--local_rank=0"] and saved["word"] == "beside"
    assert saved["args"].get("own") == ("mine" if own else None)


@pytest.mark.slow
def test_without_our_flags_nothing_is_exported(tmp_path: Path) -> None:
    script = client(tmp_path / "client")

    assert launched(script)["args"]["universal_checkpoint_export"] is False
    assert not exported(script)


@pytest.mark.slow
def test_the_settings_survive_when_the_client_replaces_the_checkpoint_section(tmp_path: Path) -> None:
    script = client(tmp_path / "client", config={"universal_checkpoint_export": {"strict": True}})
    launched(script)
    (script.parent / "out/step_universal").rename(script.parent / "out/first_universal")
    (script.parent / "out/latest_universal").write_text("first_universal")

    saved = launched(script, "--universal-checkpoint")  # loads, trains on, exports again

    assert exported(script) and saved["global_steps"] == 4


def test_help_shows_our_flags_and_ends(tmp_path: Path) -> None:
    script = client(tmp_path / "client")

    def body() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit, match="0"):
            run.main([str(script), "--help"])
        return out.getvalue()

    (text,) = run_ranks(body, 1)
    assert "--hidden-size" in text and text.count("  --universal-checkpoint-export-strict") == 1


def test_no_script_is_an_error_that_shows_the_usage():
    before = list(sys.meta_path)
    usage = r"usage: megads-ucp-run SCRIPT \[ARGUMENT \.\.\.\], or python -m megads_ucp\.run SCRIPT"
    with pytest.raises(SystemExit, match=r"there is no script nosuch\.py\.\n\n" + usage):
        run.main(["nosuch.py", "--universal-checkpoint-export"])
    with pytest.raises(SystemExit, match=r"no script is given\.\n\n" + usage):
        run.main(["--local_rank=0"])
    assert sys.meta_path == before


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--local_rank=0", "--help"]])
def test_help_without_a_script_lists_our_flags(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    run.main(arguments)

    text = capsys.readouterr().out
    flags = list(vars(add_arguments(ArgumentParser(add_help=False)).parse_args([])))
    assert text.startswith("usage: megads-ucp-run SCRIPT") and len(flags) > 5
    for flag in flags:
        assert f"\n  --{flag.replace('_', '-')}" in text


def test_megatrons_own_parser_takes_every_flag_that_the_help_lists():
    """Its own help cannot list them: upstream's ends in `ValueError: incomplete format`, of a lone per cent sign."""
    if CHECKOUT not in os.environ:
        pytest.skip(f"set {CHECKOUT} to a checkout of Megatron-DeepSpeed")
    script = """
import sys
from tests.support.mds_shims import stand_in_for_missing_modules
stand_in_for_missing_modules()
from megads_ucp import run
run.add_flags_to_megatron()
from megatron.arguments import parse_args
print([name for name in vars(parse_args()) if name.startswith("universal_checkpoint_")])
"""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ[CHECKOUT]])}
    command = [sys.executable, "-c", script, "--universal-checkpoint-export", "--universal-checkpoint-verify"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    flags = vars(add_arguments(ArgumentParser(add_help=False)).parse_args([]))
    assert done.stdout.splitlines()[-1] == str(list(flags))
