# SPDX-License-Identifier: Apache-2.0
"""Megatron-DeepSpeed as it is: one job of each kind. `python -m tests.matrices.megatron` runs all of them.

Needs a checkout of deepspeedai/Megatron-DeepSpeed, named by MEGATRON_DEEPSPEED_PATH; what is said about the other order
of queries, keys and values, and about grouped queries, needs one of the Argonne fork as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megads_ucp.integrations.megatron_names import bridge
from tests.support.mds import (
    ARGONNE,
    CHECKOUT,
    GQA,
    LLAMA,
    SAVED,
    SWIGLU,
    TOLERANCE,
    UNTIED,
    Host,
    Job,
    Model,
    Topology,
    Trace,
    losses,
)
from tests.support.ranks import RankError
from tests.support.runs import same_bits, states
from tests.support.stock import differences

pytestmark = pytest.mark.slow

PLAIN, LLAMAS = Model(), Model((*SWIGLU, *UNTIED, *LLAMA))
UNIVERSAL = f"global_step{SAVED}_universal"
PADDED = ("--make-vocab-size-divisible-by", "96")  # the 128 rows are padded to 192, at TP 1 and at TP 2
ITERATION = (SAVED, SAVED * 8, SAVED * 8 * 16)  # iteration, consumed samples, tokens


def host_of(variable: str, folder: Path) -> Iterator[Host]:
    if variable not in os.environ:
        pytest.skip(f"set {variable} to a checkout of Megatron-DeepSpeed")
    with Host(Path(os.environ[variable]), folder) as host:
        yield host


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    yield from host_of(CHECKOUT, tmp_path_factory.mktemp("upstream"))


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    yield from host_of(ARGONNE, tmp_path_factory.mktemp("fork"))


@pytest.fixture(scope="module")
def plain(host: Host, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trace]]:
    """A source at TP2DP2: its directory, and what its ranks saw."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, host.run(Job(Topology(tp=2, dp=2), PLAIN, save=folder))


def fed(traces: list[Trace]) -> list[set[str]]:
    """The samples of each step, over all ranks."""
    return [{sample for trace in traces for sample in trace.samples[step]} for step in range(len(traces[0].samples))]


def assert_resumes(host: Host, job: Job, source: list[float], tmp_path: Path) -> list[Trace]:
    assert job.load is not None
    again = tmp_path / "again"
    traces = host.run(replace(job, again=again))
    assert losses(traces) == pytest.approx(source[SAVED:], rel=TOLERANCE[job.kind])
    assert same_bits(again / UNIVERSAL, job.load / UNIVERSAL)
    assert {(trace.iteration, trace.consumed, trace.tokens) for trace in traces} == {ITERATION}
    return traces


@pytest.mark.parametrize("target", [Topology(tp=1, dp=4), Topology(tp=4, dp=1)], ids=str)
def test_a_run_goes_on_at_another_topology(
    host: Host, plain: tuple[Path, list[Trace]], target: Topology, tmp_path: Path
) -> None:
    folder, source = plain

    resumed = assert_resumes(host, Job(target, PLAIN, load=folder), losses(source), tmp_path)

    assert resumed[0].rates == source[0].rates[SAVED:]
    assert fed(resumed) == fed(source)[SAVED:] and all(len(step) == 8 for step in fed(resumed))  # no gap, no repeat
    draws = {trace.draws for trace in resumed}
    assert len(draws) == target.tp and draws.isdisjoint(trace.draws for trace in source)


def test_what_an_export_says_of_a_projection(plain: tuple[Path, list[Trace]]) -> None:
    universal = plain[0] / UNIVERSAL
    name = "language_model.encoder.layers.0.self_attention.query_key_value.weight"

    content = torch.load(universal / "zero" / name / "fp32.pt", weights_only=False)

    order = {"order": "blocks", "groups": 4, "queries": 1, "head_dim": 8}
    assert {key: value for key, value in content.items() if key != "param"} == {
        "cat_dim": 0,
        "param_n_sub_params": 3,
        "qkv_order": order,
    }
    manifest = json.loads((universal / "manifest.json").read_text())
    assert manifest["parameters"][name]["layout"]["qkv_order"] == order
    # Megatron's args, of classes that only its checkout has.
    assert b"universal_checkpoint_export_strict" in (universal / "mp_rank_00_model_states.pt").read_bytes()


def test_stock_deepspeed_cuts_the_export_right(host: Host, plain: tuple[Path, list[Trace]]) -> None:
    folder, source = plain

    resumed = host.run(Job(Topology(tp=4, dp=1), PLAIN, plugin=False, load=folder))

    assert losses(resumed) == pytest.approx(losses(source)[SAVED:], rel=1e-5)


def test_random_states_of_each_data_parallel_rank_grow_with_dp(host: Host, tmp_path: Path) -> None:
    more = ("--data-parallel-random-init",)
    source = host.run(Job(Topology(tp=2, dp=1), PLAIN, save=tmp_path, more=more))

    resumed = host.run(Job(Topology(tp=2, dp=2), PLAIN, load=tmp_path, more=more))

    assert losses(resumed) == pytest.approx(losses(source)[SAVED:], rel=1e-5)
    assert len({trace.draws for trace in resumed}) == 4


def test_a_directory_of_the_stock_converter_is_taken_with_a_warning(host: Host, tmp_path: Path) -> None:
    model = Model(pipe=True)
    source = host.run(Job(Topology(tp=2), model, save=tmp_path))
    host.convert(tmp_path / f"global_step{SAVED}", tmp_path / "stock")

    resumed = host.run(Job(Topology(tp=1), model, load=tmp_path, tag="stock"))

    (warning,) = [text for text in resumed[0].warnings if "queries, keys and values" in text]
    assert "this code's is assumed (blocks). The stock converter scrambles it if it was saved at TP > 1" in warning
    assert losses(resumed) != pytest.approx(losses(source)[SAVED:], rel=1e-5)  # and so it did


@pytest.mark.parametrize(
    ("model", "kind", "zero", "source", "target"),
    [
        (LLAMAS, "bf16", 1, Topology(tp=2, dp=2), Topology(tp=1, dp=2)),
        (LLAMAS, "fp32", 2, Topology(tp=1, dp=2), Topology(tp=2, dp=2)),
        (PLAIN, "fp32", 1, Topology(sp=2, dp=2), Topology(tp=2, dp=1)),
        (Model(pipe=True, layers=4), "fp32", 1, Topology(tp=2, pp=2), Topology(dp=2)),
        (Model((*SWIGLU, *UNTIED), pipe=True, layers=4), "fp32", 1, Topology(pp=2, dp=2), Topology(tp=2, pp=2)),
    ],
    ids=["llama-bf16", "llama-zero2", "ulysses", "pipe", "pipe-swiglu-untied"],
)
def test_kinds_of_runs(
    host: Host, model: Model, kind: str, zero: int, source: Topology, target: Topology, tmp_path: Path
) -> None:
    first = host.run(Job(source, model, kind, zero=zero, save=tmp_path / "save"))

    assert_resumes(host, Job(target, model, kind, zero=zero, load=tmp_path / "save"), losses(first), tmp_path)


def under_names_of(universal: Path, other: Path) -> dict[str, Any]:
    """Content of every parameter's files by the names that another directory has."""
    content = states(universal)
    saved_as = bridge({name.split("/")[0] for name in states(other)}, {name.split("/")[0] for name in content})
    here = {saved: name for name, saved in saved_as.items()}
    return {f"{here[name.split('/')[0]]}/{name.split('/')[1]}": value for name, value in content.items()}


@pytest.mark.parametrize(
    ("flags", "source", "target"),
    [
        ((), Topology(pp=2), Topology(tp=2)),
        ((), Topology(tp=2), Topology(pp=2)),
        ((*SWIGLU, *UNTIED), Topology(dp=2), Topology(pp=1, tp=2)),
        ((*SWIGLU, *UNTIED), Topology(tp=2), Topology(pp=2, dp=2)),
        (PADDED, Topology(pp=2), Topology(tp=2)),
    ],
    ids=["from-pipe", "to-pipe", "from-pipe-untied", "to-pipe-untied", "from-pipe-padded"],
)
def test_a_run_goes_on_with_the_pipeline_module_or_without(
    host: Host, flags: tuple[str, ...], source: Topology, target: Topology, tmp_path: Path, request: Any
) -> None:
    from_pipe = "from-pipe" in request.node.callspec.id
    first = host.run(Job(source, Model(flags, pipe=from_pipe, layers=4), save=tmp_path / "save"))

    resumed = host.run(
        Job(target, Model(flags, pipe=not from_pipe, layers=4), load=tmp_path / "save", again=tmp_path / "again")
    )

    assert losses(resumed) == pytest.approx(losses(first)[SAVED:], rel=TOLERANCE["fp32"])
    saved, again = tmp_path / "save" / UNIVERSAL, tmp_path / "again" / UNIVERSAL
    content = states(again)
    assert content and list(differences(under_names_of(saved, again), content, "state")) == []
    assert {(trace.iteration, trace.consumed, trace.tokens) for trace in resumed} == {ITERATION}
    assert not [text for trace in resumed for text in trace.warnings if "queries, keys and values" in text]


def test_what_the_other_scheme_does_not_have_is_an_error_that_says_which_the_checkpoint_has(
    host: Host, tmp_path: Path
) -> None:
    host.run(Job(Topology(), Model(pipe=True, layers=4), save=tmp_path))

    with pytest.raises(RankError, match="It was saved with Megatron-DeepSpeed's pipeline module") as error:
        host.run(Job(Topology(), Model(UNTIED, layers=4), load=tmp_path))

    assert "language_model.output_layer.weight" in str(error.value)
    assert "--no-pipeline-parallel" in str(error.value)


def test_a_model_with_experts_saves_its_regular_checkpoint_and_is_not_exported(host: Host, tmp_path: Path) -> None:
    model = Model(("--num-experts", "2", "--create-moe-param-group"))
    lenient = {"universal_checkpoint_export": {"strict": False}}

    traces = host.run(Job(Topology(dp=2), model, save=tmp_path, zero=2, config=lenient, steps=SAVED))

    assert [text for text in traces[0].warnings if "expert-parallel groups are not supported yet" in text]
    assert not (tmp_path / UNIVERSAL).exists()
    (state,) = (tmp_path / f"global_step{SAVED}").glob("mp_rank_*_model_states.pt")
    assert b"vocabulary_parameter_patterns" in state.read_bytes()


def test_a_save_says_one_line_in_megatrons_log(host: Host, tmp_path: Path) -> None:
    host.run(Job(Topology(dp=2), PLAIN, save=tmp_path, steps=SAVED + 1))

    assert host.log().count(f"universal checkpoint {tmp_path / UNIVERSAL}: ") == 1


def test_grouped_queries_of_the_fork(fork: Host, tmp_path: Path) -> None:
    model = Model((*GQA, *LLAMAS.flags))
    first = fork.run(Job(Topology(tp=1, dp=2), model, save=tmp_path / "save"))

    assert_resumes(fork, Job(Topology(tp=2, dp=2), model, load=tmp_path / "save"), losses(first), tmp_path)


def test_a_run_goes_on_in_code_that_orders_queries_keys_and_values_otherwise(
    host: Host, fork: Host, plain: tuple[Path, list[Trace]], tmp_path: Path
) -> None:
    folder, source = plain

    there = fork.run(Job(Topology(tp=1, dp=2), PLAIN, load=folder, again=tmp_path))
    back = host.run(Job(Topology(tp=2), PLAIN, load=tmp_path))

    assert losses(there) == pytest.approx(losses(source)[SAVED:], rel=1e-5)
    assert losses(back) == pytest.approx(losses(source)[SAVED:], rel=1e-5)
