# SPDX-License-Identifier: Apache-2.0
"""Several models of different tensor-parallel degrees in one process, each in a scope of its own.

What DeepSpeed 0.19.8 lets leak from model to model is shown first, in the same process: a test here that fails because
nothing leaks any more says that DeepSpeed has mended it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import TensorParallel_Layer, is_autotp_training_mode
from deepspeed.utils import groups
from torch import nn

import megads_ucp
from megads_ucp.engine.scopes import SETTINGS, model_scope
from megads_ucp.errors import TensorParallelError
from tests.support import stock
from tests.support.autotp import MODELS, Case, Topology, batches, case, with_heads
from tests.support.models import Batch, draw_weights, train
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import AFTER, BEFORE, EXPORTING, TAG, UNIVERSAL, Log, assert_same_state

pytestmark = pytest.mark.slow  # each builds several engines

TP4, TP2DP2 = Topology(4, 1), Topology(2, 2)
TEACHER, STUDENT = case("llama"), with_heads("qwen2", query=4, key_value=2)  # 3 and 2 key/value heads

Scope = Callable[[str], AbstractContextManager[None]]


def no_scope(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def topology(engine: Any) -> Topology:
    """What the engine's layers are cut over, and its own data parallelism."""
    return Topology(degree(engine.module), engine.dp_world_size)


def degree(model: nn.Module) -> int:
    (found,) = {layer.tp_world_size for layer in model.modules() if isinstance(layer, TensorParallel_Layer)} or {1}
    return found


def inference(model: nn.Module, tp: int) -> Any:
    return deepspeed.init_inference(model, config={"dtype": torch.float32, "tensor_parallel": {"tp_size": tp}})


def now() -> dict[str, Any]:
    return {setting.name: getattr(setting.owner, setting.name) for setting in SETTINGS}


def without_and_with(body: Callable[[Scope], Any], world: int) -> tuple[Any, Any]:
    """What the first rank returns without scopes and then, in the same spoiled process, with them; there, the process
    is afterwards as it was."""

    def both() -> tuple[Any, Any]:
        spoiled = body(no_scope)
        before = now()
        result = body(model_scope)
        assert now() == before
        return spoiled, result

    return run_ranks(both, world)[0]


# ---------------------------------------------------------------------------------------------------------- every leak


@pytest.mark.parametrize("first", [4, 2])
def test_l1_the_first_models_group_is_everyones(first: int) -> None:
    def body(scope: Scope) -> list[Topology]:
        with scope("first"):
            one = TEACHER.engine(first)
        with scope("second"):
            other = STUDENT.engine(6 - first)
        return [topology(one), topology(other)]

    spoiled, result = without_and_with(body, 4)
    first_asked, second_asked = (TP4, TP2DP2) if first == 4 else (TP2DP2, TP4)
    assert spoiled == [first_asked, first_asked]
    assert result == [first_asked, second_asked]


def test_l2_tp_model_init_of_one_model_cuts_the_others() -> None:
    def body(scope: Scope) -> list[int]:
        with scope("first"):
            one = TEACHER.engine(1, model=deepspeed.tp_model_init(TEACHER.model(), 2, torch.float32))
        with scope("second"):
            other = STUDENT.engine(1)
        return [degree(one.module), degree(other.module)]

    assert without_and_with(body, 2) == ([2, 2], [2, 1])


@pytest.mark.parametrize("setting", ["tp_overlap_comm", "keep_module_on_host"])
def test_l3_l4_a_later_model_sets_layers_of_earlier_ones(setting: str) -> None:
    def body(scope: Scope) -> list[bool]:
        seen: list[bool] = []
        engines = []
        for name, value in (("first", False), ("second", True)):
            with scope(name):
                config = {"tensor_parallel": {"autotp_size": 2, setting: value}}
                engine = case("llama", config=config).engine(1)
            layer = engine.module.model.layers[0].mlp.up_proj
            layer.register_forward_pre_hook(lambda layer, _: seen.append(getattr(type(layer), setting)))
            engines.append(engine)
        for engine in engines:
            engine(*next(batches(0, 1)))
        return seen

    assert without_and_with(body, 2) == ([True, True], [False, True])


def test_l5_inference_after_training_takes_the_training_group_and_mode() -> None:
    def body(scope: Scope) -> list[Any]:
        modes: list[bool] = []
        with scope("student"):
            student = STUDENT.engine(2)
        with scope("teacher"):
            teacher = inference(frozen(), 4)
        (tokens, _) = next(batches(0, 1))
        for engine in (student, teacher):
            engine.module.register_forward_pre_hook(lambda *_: modes.append(is_autotp_training_mode()))
        student(*next(batches(0, 1)))
        teacher(input_ids=tokens)
        teacher.generate(input_ids=tokens, max_new_tokens=1, do_sample=False)
        return [degree(student.module), degree(teacher.module), modes]

    assert without_and_with(body, 4) == ([2, 2, [True, True, True]], [2, 4, [True, False, False]])


def test_l6_a_model_without_tensor_parallelism_cannot_follow_one_with() -> None:
    def body(scope: Scope) -> Any:
        with scope("teacher"):
            TEACHER.engine(2)
        try:
            with scope("student"):
                return topology(STUDENT.engine(1))
        except AttributeError as failure:
            return str(failure)

    spoiled, result = without_and_with(body, 4)
    assert "'NoneType' object has no attribute 'get_model_parallel_rank'" in spoiled
    assert result == Topology(1, 4)


def test_l7_the_first_inference_engines_group_is_everyones() -> None:
    def body(scope: Scope) -> list[int]:
        found = []
        for name, tp in (("first", 4), ("second", 2), ("third", 4)):
            with scope(name):
                found.append(degree(inference(TEACHER.model(), tp).module))
        return found

    assert without_and_with(body, 4) == ([4, 4, 4], [4, 2, 4])


def test_l8_an_inference_engine_of_fewer_ranks_than_there_are_has_groups_on_all() -> None:
    """Stock makes one group, of the first ranks; the others die."""

    def body(scope: Scope) -> int:
        with scope("teacher"):
            return degree(inference(TEACHER.model(), 2).module)

    with pytest.raises(RankError, match="tp_size=-1"):
        run_ranks(body, 4, no_scope)
    assert run_ranks(body, 4, model_scope) == [2] * 4


# ------------------------------------------------------------------------------------------------- two training engines


def build(which: str, *, resuming: bool = False) -> Any:
    checked, tp = (TEACHER, 4) if which == "teacher" else (STUDENT, 2)
    return checked.engine(tp, resuming=resuming)


def each(engines: dict[str, Any], start: int, stop: int) -> dict[str, list[float]]:
    """Losses of the engines, which take their steps in turns."""
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for batch in batches(start, stop):
        for name, engine in engines.items():
            losses[name] += train(engine, [batch])
    return losses


def saved(names: tuple[str, ...], directory: Path, scope: Scope) -> dict[str, list[float]]:
    """On a rank: engines of these names train, export, and train on; returns all losses."""
    megads_ucp.install(EXPORTING)
    engines = {}
    for name in names:
        with scope(name):
            engines[name] = build(name)
    before = each(engines, 0, BEFORE)
    for name, engine in engines.items():
        engine.save_checkpoint(str(directory / name), tag=TAG)
    after = each(engines, BEFORE, BEFORE + AFTER)
    return {name: before[name] + after[name] for name in names}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Exports and losses of processes that hold one of the models only, and know of no scopes."""
    directory = tmp_path_factory.mktemp("alone")
    losses: dict[str, list[float]] = {}
    for name in ("teacher", "student"):
        losses |= run_ranks(saved, 4, (name,), directory, no_scope)[0]
    return directory, losses


@pytest.mark.parametrize("names", [("teacher", "student"), ("student", "teacher")], ids="-".join)
def test_two_engines_train_export_and_resume_as_if_alone(
    names: tuple[str, ...], alone: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    def resumed() -> dict[str, list[float]]:
        megads_ucp.install(EXPORTING)
        engines = {}
        for name in reversed(names):
            with model_scope(name):
                engines[name] = build(name, resuming=True)
        for name, engine in engines.items():
            engine.load_checkpoint(str(tmp_path / name))
            engine.save_checkpoint(str(tmp_path / "again" / name), tag=TAG)
        return each(engines, BEFORE, BEFORE + AFTER)

    directory, losses = alone
    assert run_ranks(saved, 4, names, tmp_path, model_scope)[0] == losses
    for name in names:
        stock.assert_same_universal(tmp_path / name / UNIVERSAL, directory / name / UNIVERSAL)
    assert run_ranks(resumed, 4)[0] == {name: found[BEFORE:] for name, found in losses.items()}
    for name in names:
        assert_same_state(tmp_path / "again" / name / UNIVERSAL, directory / name / UNIVERSAL)


# ----------------------------------------------------------------------------------------------------- a frozen teacher


def by_initialize() -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 4}}
    return deepspeed.initialize(model=frozen(), config=config)[0]


def by_tp_model_init() -> Any:
    model = deepspeed.tp_model_init(frozen(), 4, torch.float32)
    return deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})[0]


def by_init_inference() -> Any:
    return inference(frozen(), 4)


def frozen() -> nn.Module:
    """The teacher, with its logits for output."""
    cls, config = MODELS["llama"]
    model = cls(config).requires_grad_(False).eval()
    draw_weights(model)
    return model


@pytest.mark.parametrize("make", [by_initialize, by_tp_model_init, by_init_inference])
def test_a_frozen_teacher_beside_a_student(
    make: Callable[[], Any], alone: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    """Whichever is built first; the plugin is installed, and the student exports."""

    def body() -> list[Any]:
        megads_ucp.install()
        found = []
        for order in (("teacher", "student"), ("student", "teacher")):
            engines = {}
            for name in order:
                with model_scope(f"{name} of {order}"):
                    engines[name] = make() if name == "teacher" else student()
            teacher, losses = engines["teacher"], []
            for batch in batches(0, BEFORE):
                with torch.no_grad():
                    logits = teacher(input_ids=batch[0]).logits
                losses += train(engines["student"], [batch])
            engines["student"].save_checkpoint(str(tmp_path / order[0]), tag=TAG)
            assert (degree(teacher.module), topology(engines["student"])) == (4, TP2DP2)
            found.append((losses, logits))
        return found

    def student() -> Any:
        config = {**STUDENT.config, "universal_checkpoint_export": {"strict": True}}
        return Case(STUDENT.model, config=config).engine(2)

    directory, losses = alone
    tokens = [batch[0] for batch in batches(0, BEFORE)][-1]
    with torch.no_grad():
        expected = frozen()(input_ids=tokens).logits
    for rank in run_ranks(body, 4):
        for found, logits in rank:
            assert found == losses["student"][:BEFORE]
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for order in ("teacher", "student"):
        assert_same_state(tmp_path / order / UNIVERSAL, directory / "student" / UNIVERSAL)


# -------------------------------------------------------------------------------------- without a scope, it is noticed


@pytest.mark.parametrize("first", [4, 2])
def test_the_plugin_refuses_a_model_of_another_degree(first: int) -> None:
    other = 6 - first

    def body() -> list[str]:
        megads_ucp.install()  # with the export off
        TEACHER.engine(first)
        builders: list[Callable[[], Any]] = [
            lambda: STUDENT.engine(other),
            lambda: Case(STUDENT.model, config={"universal_checkpoint_export": True}).engine(other),
            lambda: STUDENT.engine(1),
            lambda: inference(STUDENT.model(), other),
        ]
        messages = []
        for builder in builders:
            with pytest.raises(TensorParallelError) as failure:
                builder()
            messages.append(str(failure.value))
        with model_scope("student"):
            assert degree(STUDENT.engine(other).module) == other
        assert degree(STUDENT.engine(first).module) == first
        return messages

    for rank, messages in enumerate(run_ranks(body, 4)):
        kinds = ["DeepSpeedEngine"] * 3 + ["InferenceEngine"]
        for message, kind, wanted in zip(messages, kinds, (other, other, 1, other), strict=True):
            start = f"rank {rank}: the {kind} of Qwen2ForCausalLM is configured for TP {wanted} but got TP {first}"
            assert message.startswith(start)
            assert "with megads_ucp.model_scope(" in message


def test_a_second_model_that_follows_tp_model_init_is_pointed_out() -> None:
    """DeepSpeed has written the degree into its configuration: nobody can tell any more whether that was meant."""

    def body() -> list[str]:
        megads_ucp.install()
        log = Log()
        first = TEACHER.engine(1, model=deepspeed.tp_model_init(TEACHER.model(), 2, torch.float32))
        assert log.messages == []
        with model_scope("of its own"):  # the same degree, and nothing to be in doubt of
            STUDENT.engine(1, model=deepspeed.tp_model_init(STUDENT.model(), 2, torch.float32))
        assert log.messages == []
        second = STUDENT.engine(1)
        assert degree(first.module) == degree(second.module) == 2
        return log.messages

    for (message,) in run_ranks(body, 2):
        assert "Qwen2ForCausalLM has TP 2, which an earlier deepspeed.tp_model_init asks of every later" in message


# ---------------------------------------------------------------------------------------------------- names and nesting


def test_scopes_nest_and_a_name_is_one_scope() -> None:
    def body() -> None:
        at_first, init = now(), deepspeed.DeepSpeedEngine.__init__
        with model_scope("teacher"):
            teacher = TEACHER.engine(4)
            within = now()
            with model_scope("student"):
                student = STUDENT.engine(2)
                with model_scope("teacher"):
                    assert now() == within
                    train(student, batches(0, 1))
                    assert now() == within
                assert groups.get_tensor_model_parallel_world_size() == 2
                second = STUDENT.engine(2)
                assert second.optimizer.dp_process_group is student.optimizer.dp_process_group
            assert now() == within
            with model_scope("teacher"):
                assert now() == within
        assert now() == at_first
        assert deepspeed.DeepSpeedEngine.__init__ is init
        assert (topology(teacher), topology(student)) == (TP4, TP2DP2)
        assert type(teacher).__name__ == "DeepSpeedEngine" and isinstance(teacher, deepspeed.DeepSpeedEngine)

    run_ranks(body, 4)


def test_a_name_keeps_its_degree() -> None:
    def body() -> str:
        with model_scope("teacher"):
            teacher = TEACHER.engine(4)
        before = now()
        with pytest.raises(TensorParallelError) as failure, model_scope("teacher"):
            STUDENT.engine(2)
        assert now() == before
        train(teacher, batches(0, 1))
        return str(failure.value)

    for rank, message in enumerate(run_ranks(body, 4)):
        assert message.startswith(
            f"rank {rank}: the DeepSpeedEngine of Qwen2ForCausalLM is configured for TP 2 but got TP 4"
        )
        assert 'model_scope("teacher") has groups of another size' in message and "another name" in message


def test_a_block_that_fails_leaves_nothing_behind() -> None:
    def fails(engine: Any, batch: Batch) -> None:
        def refuse(*_: Any) -> None:
            raise OSError("no luck")

        engine.module.register_forward_pre_hook(refuse)
        engine(*batch)

    def body() -> Topology:
        before = now()
        with pytest.raises(ValueError, match="Conflicting tensor_parallel"), model_scope("teacher"):
            TEACHER.engine(2, model=deepspeed.tp_model_init(TEACHER.model(), 4, torch.float32))
        assert now() == before
        with model_scope("teacher"):
            engine = TEACHER.engine(2)
        found = topology(engine)
        with pytest.raises(OSError, match="no luck"):
            fails(engine, next(batches(0, 1)))
        assert now() == before
        return found

    assert run_ranks(body, 4) == [TP2DP2] * 4


def test_tp_model_init_alone_is_not_enough() -> None:
    def body() -> None:
        with pytest.raises(TensorParallelError, match=r"tp_model_init .*deepspeed\.initialize"), model_scope("teacher"):
            model = deepspeed.tp_model_init(TEACHER.model(), 2, torch.float32)
        with model_scope("teacher"):  # what it has recorded is forgotten
            assert degree(TEACHER.engine(1, model=model).module) == 1

    run_ranks(body, 2)


def test_a_name_of_a_world_that_has_ended_is_free(tmp_path: Path) -> None:
    def body() -> list[Topology]:
        with model_scope("model"):
            found = [topology(TEACHER.engine(2))]
        rank, world = dist.get_rank(), dist.get_world_size()
        deepspeed.comm.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=world)
        with model_scope("model"):
            engine = STUDENT.engine(4)
        train(engine, batches(0, 1))
        return [*found, topology(engine)]

    assert run_ranks(body, 4)[0] == [TP2DP2, TP4]
