# SPDX-License-Identifier: Apache-2.0
"""Every line of the table of launchers in docs/megatron-deepspeed.md.

What is installed here runs for real. Of DeepSpeed's launchers of several hosts, their own classes make the command, and
what they would have a host run is run.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deepspeed.launcher import multinode_runner, runner

from tests.support.clients import client

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
TABLE = re.findall(
    r"^\| ([^|]+) \| `(.+ pretrain_gpt\.py <flags>'?)` \|$", (ROOT / "docs/megatron-deepspeed.md").read_text(), re.M
)
LINES = dict(TABLE)
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}

pytestmark = pytest.mark.slow


def environment(**more: str) -> dict[str, str]:
    """A user's, with this package's scripts first and the tests' helpers at hand."""
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **more}


def run(command: str | Sequence[str], **more: str) -> str:
    """What a command prints, whether or not it fails."""
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,  # finds out what hangs
    )
    return done.stdout


def free_port() -> str:
    """At random, and below those that the kernel gives away: a suite beside this one may be looking for one, too."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as candidate:
            candidate.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return str(candidate.getsockname()[1])


def command_of(line: str, hosts: dict[str, list[int]]) -> list[str]:
    """What DeepSpeed's launcher runs for a line, from its own parser and its own class for the launcher."""
    words = shlex.split(line.replace("$(which megads-ucp-run)", str(SCRIPTS / "megads-ucp-run")))
    args = runner.parse_args(words[1:])
    args.master_addr, args.launcher = "127.0.0.1", args.launcher.lower()
    pool, world = {host: len(slots) for host, slots in hosts.items()}, runner.encode_world_info(hosts)
    if args.launcher == "pdsh":
        command: list[str] = multinode_runner.PDSHRunner(args, world).get_cmd({}, hosts)[0]
        return command
    classes = vars(multinode_runner).values()
    (by_name,) = [c for c in classes if isinstance(c, type) and c.__name__.lower() == f"{args.launcher}runner"]
    made: Any = by_name(args, world, pool)
    return list(made.get_cmd({}, hosts))


def on_the_first_host(command: list[str]) -> list[str]:
    """The part that starts Python there."""
    python = command[command.index(sys.executable) :]
    return [word.replace("%n", "0") for word in python[: python.index(":") if ":" in python else None]]


def test_the_table_is_read():
    assert len(TABLE) == len(LINES) == 8


@pytest.mark.parametrize("launcher", [name for name, line in TABLE if line.startswith("deepspeed")])
def test_what_deepspeed_would_run_on_a_host_starts_our_runner(launcher: str):
    line = LINES[launcher].replace("pretrain_gpt.py <flags>", "--help")

    python = on_the_first_host(command_of(line, {"first": [0], "second": [0]}))

    assert "usage: megads-ucp-run SCRIPT" in run(python, **RANKS)


@pytest.mark.parametrize(
    ("launcher", "answer"),
    [("MPICH", "Error while finding module specification for"), ("Slurm", "can't open file")],
)
def test_some_launchers_of_deepspeed_cannot_start_a_module(launcher: str, answer: str):
    """Once they can, the table needs no other lines for them."""
    line = f"deepspeed --launcher {launcher} --hostfile hosts --module megads_ucp.run --help"

    python = on_the_first_host(command_of(line, {"first": [0], "second": [0]}))

    assert answer in run(python, **RANKS)


@pytest.mark.parametrize(
    ("launcher", "given", "instead"),
    [
        ("torchrun", "--nproc-per-node 8", "--nproc-per-node 2"),
        ("DeepSpeed, on one host or by pdsh", "--hostfile hosts", "--num_gpus 2"),
        ("DeepSpeed, by MPICH", "--hostfile hosts", "--hostfile {folder}/hosts --force_multi --no_ssh_check"),
        ("mpiexec (MPICH)", "-n 16 -ppn 8", "-n 2"),
    ],
)
def test_a_line_trains_and_exports(launcher: str, given: str, instead: str, tmp_path: Path):
    needed = "mpirun" if "MPICH" in launcher else "torchrun"
    if shutil.which(needed, path=environment()["PATH"]) is None:
        pytest.skip(f"there is no {needed} here")
    script, port = client(tmp_path / "client"), free_port()
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    line = LINES[launcher].replace("pretrain_gpt.py <flags>", f"{script} --universal-checkpoint-export")
    line = line.replace(given, instead.format(folder=tmp_path))
    if line.startswith("deepspeed"):
        line = line.replace("deepspeed ", f"deepspeed --master_addr 127.0.0.1 --master_port {port} ", 1)

    printed = run(f"cd {script.parent} && {line}", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PET_MASTER_PORT=port)

    assert (script.parent / "out/step_universal/zero").is_dir(), printed[-3000:]


def test_the_srun_line_starts_our_runner_as_the_rank_that_slurm_says(tmp_path: Path):
    script = tmp_path / "say.py"
    script.write_text("import os, sys; print([os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')], sys.argv)")
    words = shlex.split(LINES["srun"].replace("pretrain_gpt.py <flags>", f"{script} --lr 1"))

    printed = run(words[words.index("bash") :], SLURM_PROCID="9", SLURM_NTASKS="16", SLURM_LOCALID="1")

    assert f"['9', '16', '1'] ['{script}', '--lr', '1']" in printed
