# SPDX-License-Identifier: Apache-2.0
"""The rules of the house, read from the source: who may import, communicate and open files; how large things may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import megads_ucp

PACKAGE = Path(megads_ucp.__file__).parent

COLLECTIVES = ("torch.distributed", "deepspeed.comm")
HARMLESS = {"is_initialized", "get_rank", "get_world_size", "get_all_ranks_from_group", "group", "ProcessGroup"}
"""What says where a rank stands, and moves nothing."""

OPENERS = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "save", "load", "mmap"}
"""Names of the functions and methods by which a program gets at the content of a file."""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package's ``__init__`` has the package's."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def statements(module: ast.Module) -> Iterator[ast.AST]:
    """Every node that runs: what stands under ``if TYPE_CHECKING`` is for type checkers alone."""
    skipped = {
        id(inner)
        for node in ast.walk(module)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    return (node for node in ast.walk(module) if id(node) not in skipped)


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it or None) of all imports of a file, those inside functions included."""
    for node in statements(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, whether module or not."""
    return {name for module, taken in imports(path) for name in (module, f"{module}.{taken}")}


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("module", modules())
def test_only_the_engine_room_imports_the_runtime_of_deepspeed(module: str):
    if not inside(module, "megads_ucp.engine"):
        assert not [name for name in imported(modules()[module]) if inside(name, "deepspeed.runtime")]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as it is written; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (outer := dotted(node.value)):
        return f"{outer}.{node.attr}"
    return ""


def uses_of_distributed(path: Path) -> set[str]:
    """Names that a file takes from torch.distributed or deepspeed.comm, by whatever alias."""
    aliases = {}
    used = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            aliases.update({a.asname or a.name: a.name for a in node.names if inside(a.name, *COLLECTIVES)})
        elif isinstance(node, ast.ImportFrom):
            for a in node.names:
                full = f"{node.module}.{a.name}"
                if inside(full, *COLLECTIVES) and full not in COLLECTIVES:
                    used.add(a.name)
                elif full in COLLECTIVES:
                    aliases[a.asname or a.name] = full
    aliases.setdefault("torch.distributed", "torch.distributed")
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and dotted(node.value) in aliases:
            used.add(node.attr)
    return used


@pytest.mark.parametrize("module", modules())
def test_only_comm_communicates(module: str):
    if not inside(module, "megads_ucp.comm"):
        assert uses_of_distributed(modules()[module]) <= HARMLESS


@pytest.mark.parametrize("module", modules())
def test_only_storage_opens_files(module: str):
    if inside(module, "megads_ucp.storage", "megads_ucp.comm.shared_memory"):  # the latter: memory of other processes
        return
    calls = (node.func for node in ast.walk(tree(modules()[module])) if isinstance(node, ast.Call))
    called = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
    assert not called & OPENERS


@pytest.mark.parametrize("module", modules())
def test_descriptions_know_no_files_and_no_groups(module: str):
    if inside(module, "megads_ucp.layout", "megads_ucp.plan", "megads_ucp.sources", "megads_ucp.survey"):
        doers = ("comm", "storage", "save", "load", "engine.context", "engine.adapter", "engine.attach")
        names = {name for name in imported(modules()[module]) if not inside(name, "megads_ucp.storage.format")}
        assert not [n for n in names if inside(n, *(f"megads_ucp.{doer}" for doer in doers))]
        assert not [n for n in imported(modules()[module]) if inside(n, "os", "pathlib", "io", "shutil")]


@pytest.mark.parametrize("module", modules())
def test_nothing_but_what_stands_in_for_an_engine_imports_save_and_load(module: str):
    for room in ("megads_ucp.save", "megads_ucp.load"):
        if not inside(module, room, "megads_ucp.engine.attach", "megads_ucp.engine.methods"):
            assert not [name for name in imported(modules()[module]) if inside(name, room)]


def is_face(module: str) -> bool:
    """Whether it only hands on the names of its package's modules, so that an import of it is an import of theirs."""
    path = modules()[module]
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    return path.name == "__init__.py" and all(isinstance(node, kinds) for node in tree(path).body)


def graph() -> dict[str, set[str]]:
    """Imports between modules of the package; a face (``__init__``) counts where a name is taken from it."""
    known = modules()
    return {module: {n for n in imported(path) if n in known and n != module} for module, path in known.items()}


def test_imports_run_in_no_circle_and_at_most_eight_lead_from_the_top_to_the_bottom():
    arrows, depth = graph(), {}

    def depth_of(module: str, above: tuple[str, ...] = ()) -> int:
        assert module not in above, f"an import circle: {[*above, module]}"
        if module not in depth:
            below = max((depth_of(other, (*above, module)) for other in arrows[module]), default=-1)
            depth[module] = below if is_face(module) else below + 1
        return depth[module]

    deepest = max(arrows, key=depth_of)
    assert depth[deepest] <= 8, deepest


@pytest.mark.parametrize("module", modules())
def test_modules_and_functions_are_short(module: str):
    path = modules()[module]
    assert len(path.read_text().splitlines()) <= 350
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 40, f"{module}.{node.name}"


def test_importing_the_package_touches_neither_deepspeed_nor_process_groups():
    script = (
        "import sys, megads_ucp; print(*sorted({m.partition('.')[0] for m in sys.modules} & {'deepspeed', 'torch'}))"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert found == []


@pytest.mark.slow
def test_a_deepspeed_without_what_is_needed_is_refused_in_words():
    script = """
import sys
sys.modules["deepspeed.runtime.bf16_optimizer"] = None  # as if this DeepSpeed had no such module
import megads_ucp
try:
    megads_ucp.install
except megads_ucp.UnsupportedError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert "deepspeed.runtime.bf16_optimizer" in told and "0.19.7" in told


def test_the_public_names_are_those_in_the_docs():
    documented = (PACKAGE.parent / "docs" / "api.md").read_text()
    for name in megads_ucp.__all__:
        assert f"`{name}`" in documented or f"`megads_ucp.{name}" in documented, name
        assert getattr(megads_ucp, name).__doc__, name
