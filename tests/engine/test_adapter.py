# SPDX-License-Identifier: Apache-2.0
"""The partition arithmetic against DeepSpeed's own optimizers, built as every rank of a shard group in turn.

A fake process group lets one process be any rank of any number of them. Its collectives move nothing, which is no
matter here: an optimizer cuts its own partition out of its own copy of the parameters. DeepSpeed's optimizers live in a
process apart, which hands back what they hold, so that the process of the tests stays fit to fork ranks.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megads_ucp.layout.partition import FlatGroup, Fragment, Member
from tests.support.flat_groups import flat_group

FIELD_CASE = (266240,)
FIELD_DEGREE = 768
ODD_SIZES = (5, 3, 17, 1, 33, 9, 2, 41, 7, 25, 13)
DEGREES = (2, 3, 8)


@dataclass(frozen=True)
class Held:
    """What a real optimizer, built as one rank, says and holds of a parameter group."""

    values: np.ndarray  # the fp32 partition
    mapping: tuple[Fragment, ...]  # as in the parameters' `_hp_mapping`
    booked_padding: int  # its entry in the checkpoint's `group_paddings`
    members: tuple[Member, ...] | None = None  # its own flat order and offsets, where it keeps them


@dataclass(frozen=True)
class Zero:
    """A configuration of `DeepSpeedZeroOptimizer`."""

    stage: int
    parameter_alignment: bool
    round_robin: bool
    dtype: torch.dtype

    def group(self, sizes: tuple[int, ...], degree: int) -> FlatGroup:
        return flat_group(
            [str(index) for index in range(len(sizes))],
            sizes,
            degree,
            alignment=2 * degree,
            parameter_alignment=16 // self.dtype.itemsize if self.parameter_alignment else 1,
            round_robin=self.round_robin,
        )


def bf16_group(sizes: tuple[int, ...], degree: int) -> FlatGroup:
    """The group as `BF16_Optimizer` lays it out."""
    return flat_group([str(index) for index in range(len(sizes))], sizes, degree, alignment=2 * degree)


@cache
def parameter_values(sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Values by which elements are recognized: exact in bf16, none of them 0 (the value of padding).

    Integers are exact in bf16 up to 256. Groups of up to 255 elements get distinct ones; in larger ones, whose
    fragments are long, it is the sequence that never repeats.
    """
    total = sum(sizes)
    distinct = torch.arange(1, total + 1)
    values = distinct if total < 256 else torch.randint(1, 256, (total,), generator=torch.Generator().manual_seed(0))
    return {str(index): part.float() for index, part in enumerate(values.split(sizes))}


# --- In the other process ---------------------------------------------------------------------------------------------


def prepare_process() -> None:
    """Makes DeepSpeed's optimizers ready to be built over and over, without compiling anything."""
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.runtime import bf16_optimizer

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Not reachable by attribute: `deepspeed.comm.torch` there is PyTorch itself. Would compile an extension.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    # Reads and prints the memory in use, four times per optimizer.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None


def serve(calls: Connection) -> None:
    """Answers each (function, args) with (result, None) or (None, traceback), until the first None."""
    prepare_process()
    while call := calls.recv():
        function, args = call
        try:
            calls.send((function(*args), None))
        except Exception:
            calls.send((None, traceback.format_exc()))


def become_rank(rank: int, degree: int) -> None:
    import deepspeed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degree)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("fake", verbose=False)


def make_parameters(sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(value.to(dtype, copy=True)) for name, value in parameter_values(sizes).items()}


def mapping_of(parameters: dict[str, torch.nn.Parameter]) -> tuple[Fragment, ...]:
    fragments = []
    for name, parameter in parameters.items():
        link: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if link is not None:
            there, here = link.lp_fragment_address, link.hp_fragment_address
            fragments.append(Fragment(name, here.numel, there.start, here.start))
    return tuple(sorted(fragments, key=lambda fragment: fragment.partition_start))


def build_bf16_optimizer(sizes: tuple[int, ...], degree: int) -> list[Held]:
    """A real `BF16_Optimizer` as each rank; one group, of parameters of these sizes."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    held = []
    for rank in range(degree):
        become_rank(rank, degree)
        parameters = make_parameters(sizes, torch.bfloat16)
        optimizer = BF16_Optimizer(
            torch.optim.SGD(parameters.values()),
            {parameter: name for name, parameter in parameters.items()},
            SimpleNamespace(enabled=True, immediate_grad_update=False),
            dp_process_group=torch.distributed.group.WORLD,
            grad_acc_dtype=torch.float32,
        )
        (values,), (padding,) = optimizer.fp32_groups_flat_partition, optimizer.group_paddings
        held.append(Held(values.detach().numpy(), mapping_of(parameters), padding))
        optimizer.destroy()  # or its buffers stay: parameters and their mappings refer to each other, unseen by gc
    return held


def build_zero_optimizer(sizes: tuple[int, ...], degree: int, zero: Zero) -> list[Held]:
    """A real `DeepSpeedZeroOptimizer` as each rank; one group, of parameters of these sizes."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    held = []
    for rank in range(degree):
        become_rank(rank, degree)
        parameters = make_parameters(sizes, zero.dtype)
        names = {parameter: name for name, parameter in parameters.items()}
        optimizer = DeepSpeedZeroOptimizer(
            torch.optim.SGD(parameters.values()),
            names,
            timers=None,
            optimizer_params={},
            dp_process_group=torch.distributed.group.WORLD,
            partition_grads=zero.stage == 2,
            parameter_alignment=zero.parameter_alignment,
            round_robin_gradients=zero.round_robin,
        )
        (values,), (padding,) = optimizer.single_partition_of_fp32_groups, optimizer.groups_padding
        (order,), (offsets,) = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets
        members = tuple(Member(names[p], p.numel(), offset) for p, offset in zip(order, offsets, strict=True))
        held.append(Held(values.detach().numpy(), mapping_of(parameters), padding, members))
        optimizer.destroy()
    return held


# --- In the process of the tests --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[..., list[Held]]]:
    """Calls a function in a process of its own, started once.

    A pipe and not an executor, because an executor's threads may outlive it by a moment and spoil a fork of ranks.
    """
    fork = multiprocessing.get_context("fork")  # finds DeepSpeed imported if tests before this one needed it
    here, there = fork.Pipe()
    process = fork.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()

    def call(function: Callable[..., list[Held]], *args: object) -> list[Held]:
        here.send((function, args))
        if not here.poll(timeout=600):
            pytest.fail(f"{function.__name__} takes too long")
        held, failure = here.recv()
        if failure is not None:
            pytest.fail(failure)
        return held

    yield call
    here.send(None)
    process.join()


@pytest.fixture(scope="module")
def field_case(elsewhere: Callable[..., list[Held]]) -> list[Held]:
    return elsewhere(build_bf16_optimizer, FIELD_CASE, FIELD_DEGREE)


def assert_held(held: list[Held], group: FlatGroup, sizes: tuple[int, ...]) -> None:
    """Every rank's fp32 partition is the group's fragments, where the group says, and zeros."""
    parameters = parameter_values(sizes)
    assert len(held) == group.degree
    for rank, rank_holds in enumerate(held):
        partition = group.partition(rank)
        expected = torch.zeros(partition.numel)
        for fragment in partition.fragments:
            part = parameters[fragment.name].narrow(0, fragment.param_start, fragment.numel)
            expected.narrow(0, fragment.partition_start, fragment.numel).copy_(part)
        assert torch.equal(torch.from_numpy(rank_holds.values), expected), f"rank {rank} of {group.degree}"


@pytest.mark.slow
def test_bf16_optimizer_as_each_of_768_ranks(field_case: list[Held]) -> None:
    group = bf16_group(FIELD_CASE, FIELD_DEGREE)
    assert_held(field_case, group, FIELD_CASE)
    assert [held.mapping for held in field_case] == [group.partition(rank).fragments for rank in range(FIELD_DEGREE)]
    empty = [rank for rank, held in enumerate(field_case) if not held.values.any()]
    assert empty == [766, 767]
    assert np.count_nonzero(field_case[765].values) == 20


@pytest.mark.slow
def test_bf16_optimizer_books_more_padding_than_the_last_of_768_ranks_holds(field_case: list[Held]) -> None:
    """Why this library exists. The tail covers three ranks; all 1024 elements of it are booked on the last, which holds
    348. Whoever strips so much from that partition fails, and strips nothing where 328 and 348 elements are padding."""
    group = bf16_group(FIELD_CASE, FIELD_DEGREE)
    assert [held.booked_padding for held in field_case] == [0] * 767 + [1024]
    assert field_case[767].values.size == group.partition_numel == 348
    assert [group.group_padding(rank) for rank in range(FIELD_DEGREE)] == [0] * 765 + [328, 348, 348]


@pytest.mark.parametrize(
    ("sizes", "degree"),
    [((1,), 4), ((3,), 4), ((9,), 4), ((10,), 4), ((17,), 8), ((33,), 8), ((5,), 2), ((8,), 4)]
    + [(ODD_SIZES, degree) for degree in (1, *DEGREES, 100)],
)
def test_bf16_optimizer(elsewhere: Callable[..., list[Held]], sizes: tuple[int, ...], degree: int) -> None:
    group = bf16_group(sizes, degree)
    held = elsewhere(build_bf16_optimizer, sizes, degree)
    assert_held(held, group, sizes)
    assert [rank_holds.mapping for rank_holds in held] == [group.partition(rank).fragments for rank in range(degree)]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("round_robin", [False, True], ids=["in_order", "round_robin"])
@pytest.mark.parametrize("parameter_alignment", [False, True], ids=["packed", "aligned"])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_optimizer(
    elsewhere: Callable[..., list[Held]],
    stage: int,
    parameter_alignment: bool,
    round_robin: bool,
    dtype: torch.dtype,
    degree: int,
) -> None:
    zero = Zero(stage, parameter_alignment, round_robin, dtype)
    group = zero.group(ODD_SIZES, degree)
    held = elsewhere(build_zero_optimizer, ODD_SIZES, degree, zero)
    assert_held(held, group, ODD_SIZES)
    assert {rank_holds.members for rank_holds in held} == {group.members}
    assert [rank_holds.booked_padding for rank_holds in held] == [group.group_padding(rank) for rank in range(degree)]
    mappings = [rank_holds.mapping for rank_holds in held]
    # `_link_all_hp_params` knows the true offsets only if there is padding between parameters. Otherwise it assumes the
    # order of the parameter group, and under round robin maps parameters to elements of others.
    mapped_right = mappings == [group.partition(rank).fragments for rank in range(degree)]
    assert mapped_right == (parameter_alignment or not round_robin)


@pytest.mark.parametrize("sizes", [(1,), (8,), (16, 16, 16), (255,)], ids=str)
@pytest.mark.parametrize("parameter_alignment", [False, True], ids=["packed", "aligned"])
def test_zero_optimizer_at_the_edges(
    elsewhere: Callable[..., list[Held]], sizes: tuple[int, ...], parameter_alignment: bool
) -> None:
    """One element, one parameter, sizes that need no padding, and more ranks than either."""
    zero = Zero(1, parameter_alignment, round_robin=True, dtype=torch.bfloat16)
    group = zero.group(sizes, degree=8)
    held = elsewhere(build_zero_optimizer, sizes, 8, zero)
    assert_held(held, group, sizes)
    assert [rank_holds.booked_padding for rank_holds in held] == [group.group_padding(rank) for rank in range(8)]
