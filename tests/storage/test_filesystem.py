# SPDX-License-Identifier: Apache-2.0
"""File systems are told apart by what the operating system says of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megads_ucp.errors import StorageError
from megads_ucp.storage import one_writer_reason
from megads_ucp.storage.filesystem import reason_of


def magic_by_coreutils(directory: Path) -> int:
    shown = subprocess.run(["stat", "-f", "-c", "%t", directory], check=True, capture_output=True, text=True)
    return int(shown.stdout, 16)


@pytest.mark.parametrize("magic", [0xEF53, 0x58465342, 0x9123683E, 0x0BD00BD0, 0x47504653, 0x19830326, 0x00C36400])
def test_local_and_cluster_file_systems_take_several_writers(magic):
    assert reason_of(magic) is None


@pytest.mark.parametrize(
    ("magic", "name"),
    [(0x6969, "NFS"), (0xFF534D42, "SMB"), (0xFE534D42, "SMB"), (0x65735546, "FUSE"), (0x01021997, "9p")],
)
def test_file_systems_that_take_one_writer_are_named(magic, name):
    assert f"{name}, where" in str(reason_of(magic))


def test_a_file_system_that_is_not_known_takes_one_writer():
    assert "magic number 0x9fa0" in str(reason_of(0x9FA0))


def test_a_magic_number_is_the_same_with_a_sign():
    assert reason_of(0x9123683E - (1 << 32)) is None


@pytest.mark.parametrize("directory", ["/", "/dev/shm", "/proc", "/sys", "."])
def test_the_operating_system_is_asked(directory):
    reason = reason_of(magic_by_coreutils(Path(directory)))
    assert one_writer_reason(Path(directory)) == (reason and f"{directory} lies on {reason}")


def test_a_tmpfs_takes_several_writers_and_proc_one():
    assert one_writer_reason(Path("/dev/shm")) is None
    assert one_writer_reason(Path("/proc")) == (
        "/proc lies on a file system that megads_ucp does not know (magic number 0x9fa0), so files there get one "
        "writer each"
    )


def test_a_directory_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(StorageError, match=r"cannot look at the file system of .*gone: No such file"):
        one_writer_reason(tmp_path / "gone")
