# SPDX-License-Identifier: Apache-2.0
"""F3, F4: damaged files are found by name when a run resumes, before anything changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megads_ucp.errors import UniversalCheckpointError
from megads_ucp.storage import read_manifest
from tests.support.accidents import (
    install,
    trained,
)
from tests.support.models import MLP, initialize, mlp_batches, train
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    """Two exports of one run, "one" and "two", a step apart."""
    save = tmp_path_factory.mktemp("exports")

    def body() -> None:
        install(strict=True)
        engine = trained("fp32")
        engine.save_checkpoint(str(save), tag="one")
        train(engine, mlp_batches(1, 2))
        engine.save_checkpoint(str(save), tag="two")

    run_ranks(body, 2)
    return save


WEIGHT, VECTOR = "zero/layers.1.weight", "zero/layers.0.bias"  # the first member of its group is neither
FIRST = "zero/layers.0.weight"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def middle_of_payload(directory: Path, name: str) -> int:
    record = read_manifest(directory).files[name]
    return record.payload_offset + record.payload_bytes // 2


def truncate(directory: Path, name: str) -> None:
    os.truncate(directory / name, (directory / name).stat().st_size - 1)


def from_another(directory: Path, name: str) -> None:
    shutil.copyfile(directory.parent.parent / "exports" / "two_universal" / name, directory / name)


def remove(directory: Path, name: str) -> None:
    (directory / name).unlink()


DAMAGES: dict[str, tuple[Callable[[Path, str], None], str, str]] = {
    "truncated": (truncate, f"{WEIGHT}/exp_avg.pt", "is truncated"),
    "flipped in its header": (lambda d, n: flip(d / n, 50), f"{VECTOR}/fp32.pt", "damaged"),
    "flipped in its directory": (lambda d, n: flip(d / n, -40), f"{WEIGHT}/fp32.pt", "damaged"),
    "missing": (remove, f"{WEIGHT}/exp_avg_sq.pt", "No such file"),
    "missing, of the first of the group": (remove, f"{FIRST}/exp_avg.pt", "No such file"),
    "missing step": (remove, f"{FIRST}/step.pt", "No such file"),
    "of another export": (from_another, f"{WEIGHT}/fp32.pt", "of another export"),
    "step of another export": (from_another, f"{FIRST}/step.pt", "damaged"),
    "optimizer state flipped": (lambda d, n: flip(d / n, 400), "zero/optimizer_state.pt", "damaged"),
    "optimizer state truncated": (truncate, "zero/optimizer_state.pt", "is truncated"),
    "optimizer state missing": (remove, "zero/optimizer_state.pt", "No such file"),
    "model state flipped": (lambda d, n: flip(d / n, 400), "mp_rank_00_model_states.pt", "damaged"),
    "model state truncated": (truncate, "mp_rank_00_model_states.pt", "is truncated"),
    "model state missing": (remove, "mp_rank_00_model_states.pt", "No such file"),
    "manifest truncated": (truncate, "manifest.json", "is damaged"),
}


def live_tensors(engine: Any) -> list[torch.Tensor]:
    """Copies of everything that a load may change."""
    masters = engine.optimizer.single_partition_of_fp32_groups
    states = [engine.optimizer.optimizer.state[master] for master in masters]
    tensors = [*masters, *(value for state in states for value in state.values()), *engine.module.parameters()]
    rates = [torch.tensor(group["lr"]) for group in engine.optimizer.param_groups]
    return [torch.as_tensor(tensor).detach().clone() for tensor in [*tensors, *rates]]


def failing_loads(save: Path, tags: list[str]) -> tuple[dict[str, str], float]:
    """On each rank: the error of loading each tag, none of which changes a bit; then the loss after loading "one"."""
    install()
    engine = initialize(MLP(), "fp32", config={"checkpoint": {"load_universal": True}})
    train(engine, mlp_batches(5, 6))
    reported, live = {}, live_tensors(engine)
    for tag in tags:
        with pytest.raises(UniversalCheckpointError) as raised:
            engine.load_checkpoint(str(save / tag), tag="one_universal")
        reported[tag] = str(raised.value)
        assert all(map(torch.equal, live, live_tensors(engine))), tag
    engine.load_checkpoint(str(save / "exports"), tag="one_universal")
    return reported, train(engine, mlp_batches(1, 2))[0]


def test_a_damaged_file_is_found_by_name_on_all_ranks_before_anything_changes(tmp_path, exports):
    shutil.copytree(exports, tmp_path / "exports")
    for name, (damage, file, _) in DAMAGES.items():
        shutil.copytree(exports / "one_universal", tmp_path / name / "one_universal")
        damage(tmp_path / name / "one_universal", file)

    ranks = run_ranks(failing_loads, 2, tmp_path, list(DAMAGES))
    reported, loss = ranks[0]
    assert reported == ranks[1][0]
    for name, (_, file, reason) in DAMAGES.items():
        assert file in reported[name] and reason in reported[name], f"{name}: {reported[name]}"
    assert loss == undamaged_loss()


def undamaged_loss() -> float:
    return run_ranks(lambda: train(initialize(MLP(), "fp32"), mlp_batches(0, 2)), 2)[0][1]


def test_a_flipped_bit_in_a_tensor_is_found_on_request(tmp_path, exports):
    shutil.copytree(exports / "one_universal", tmp_path / "one_universal")
    file = f"{WEIGHT}/exp_avg.pt"
    flip(tmp_path / file.replace("zero", "one_universal/zero", 1), middle_of_payload(tmp_path / "one_universal", file))

    def body() -> str:
        install(verify=True)
        engine = initialize(MLP(), "fp32", config={"checkpoint": {"load_universal": True}})
        engine.load_checkpoint(str(exports), tag="two_universal")  # undamaged
        with pytest.raises(UniversalCheckpointError) as raised:
            engine.load_checkpoint(str(tmp_path), tag="one_universal")
        return str(raised.value)

    messages = run_ranks(body, 2)
    assert messages[0] == messages[1]
    assert file in messages[0] and "checksum" in messages[0] and "must not be used" in messages[0]


class Bomb:
    """Runs code when it is unpickled: creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (os.fspath(self.file),))


def test_pickles_that_run_code_do_not_run_when_a_checkpoint_is_loaded(tmp_path, exports):
    shutil.copytree(exports, tmp_path / "exports")
    files = [f"{WEIGHT}/fp32.pt", f"{FIRST}/step.pt", "zero/optimizer_state.pt"]
    tags = [file.replace("/", " ") for file in files]
    for tag, file in zip(tags, files, strict=True):
        directory = tmp_path / tag / "one_universal"
        shutil.copytree(exports / "one_universal", directory)
        (directory / "manifest.json").unlink()  # as in a directory of the stock converter, or a forged one
        torch.save({"param": torch.zeros(11, 13), "cat_dim": Bomb(tmp_path / "ran")}, directory / file)

    ranks = run_ranks(failing_loads, 2, tmp_path, tags)
    assert not (tmp_path / "ran").exists()
    for reported, _ in ranks:
        for tag, file in zip(tags, files, strict=True):
            assert file in reported[tag] and "mkdir" in reported[tag] and "not run" in reported[tag]
    torch.load(tmp_path / tags[0] / "one_universal" / files[0], weights_only=False)  # the bomb is live
    assert (tmp_path / "ran").exists()
