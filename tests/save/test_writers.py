# SPDX-License-Identifier: Apache-2.0
"""Who writes what makes no difference to a checkpoint: one rank or several per file, shared memory or messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megads_ucp import storage
from tests.support.degrees import export, gpt_case
from tests.support.runs import UNIVERSAL

SECTION = "universal_checkpoint_export"


def saved(directory: Path, **settings: Any) -> Path:
    """The export of a GPT at TP 2 x DP 2."""
    case = replace(gpt_case(tied=False, biases=True), config={SECTION: {"strict": True, **settings}})
    export(case, 2, 2, directory)
    return directory / UNIVERSAL


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    states = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")
    paths = [path for path in (checkpoint / "zero").rglob("*.pt") if path.name in states]
    return {str(path.relative_to(checkpoint)): torch.load(path, weights_only=False)["param"] for path in paths}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("usual"))


def writers(checkpoint: Path) -> list[int]:
    """How many extents each tensor's file has, ascending."""
    files = storage.read_manifest(checkpoint).files.values()
    return sorted(len(file.extents) for file in files if file.shape is not None)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"shared_memory": "never"}, {"shared_files": "never"}, {"bucket_mb": 1}])
def test_the_bits_are_the_same(tmp_path, usual, settings):
    other = saved(tmp_path, **settings)
    expected, found = tensors(usual), tensors(other)
    assert found.keys() == expected.keys() and len(found) > 20
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    if "shared_files" in settings:
        assert writers(other)[-1] == 1


@pytest.mark.slow
def test_ranks_of_one_host_that_share_memory_say_nothing_of_messages(usual, tmp_path, capfd):
    saved(tmp_path, shared_memory="never")
    assert "travels as messages: that is what the configuration asks for" in capfd.readouterr().out
    saved(tmp_path / "again")
    assert "travels as messages" not in capfd.readouterr().out
