# SPDX-License-Identifier: Apache-2.0
"""Runs a training script as it is, with the package installed. For Megatron-DeepSpeed, the one word to add:

    torchrun ... -m megads_ucp.run pretrain_gpt.py --universal-checkpoint-export ...
    deepspeed --module megads_ucp.run pretrain_gpt.py --universal-checkpoint-export ...

Our flags join the script's own where Megatron parses them, and so are in ``args`` and in its checkpoints. Everything
else passes through.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from megads_ucp.arguments import add_arguments
from megads_ucp.engine.attach import install

MEGATRON_ARGUMENTS = "megatron.arguments"


Provider = Callable[[Any], Any] | None


_USAGE = """usage: python -m megads_ucp.run SCRIPT [ARGUMENT ...]

Runs SCRIPT with megads_ucp installed; all arguments are the script's. A Megatron-DeepSpeed script also takes
--universal-checkpoint-export and its like (see its --help). For any other, put "universal_checkpoint_export": true into
the DeepSpeed config."""


def main(arguments: Sequence[str]) -> None:
    """Run the script that is the first of ``arguments``, as ``__main__``.

    Raises:
        SystemExit: no script is given, or it does not exist.
    """
    script, theirs = _split(arguments)
    if script is None and {"-h", "--help"} & set(theirs):
        sys.stdout.write(f"{_USAGE}\n")
        return
    if script is None:
        raise SystemExit(_USAGE)
    if not Path(script).is_file():
        raise SystemExit(f"megads_ucp.run: there is no script {script}.\n\n{_USAGE}")
    join_megatron()
    install()
    sys.argv = [script, *theirs]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as `python SCRIPT` has it; `python -m` put its own there
    runpy.run_path(script, run_name="__main__")


def _split(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The script and its arguments. DeepSpeed's launcher puts ``--local_rank=0`` before what it takes for ours."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return argument, [*arguments[:index], *arguments[index + 1 :]]
    return None, list(arguments)


def join_megatron() -> None:
    """Have Megatron's ``parse_args`` know our flags, now or as soon as ``megatron.arguments`` is imported."""
    if MEGATRON_ARGUMENTS in sys.modules:
        _join(sys.modules[MEGATRON_ARGUMENTS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _join(module: ModuleType) -> None:
    """Wrap ``parse_args(extra_args_provider=None, ...)`` of Megatron's module so that ours is a provider as well."""
    original = module.parse_args

    @functools.wraps(original)
    def parse_args(extra_args_provider: Provider = None, *positional: Any, **keyword: Any) -> Any:
        def provide(parser: Any) -> Any:
            return add_arguments(parser if extra_args_provider is None else extra_args_provider(parser))

        return original(provide, *positional, **keyword)

    module.parse_args = parse_args  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    """Finds ``megatron.arguments`` where it would be found anyway, for :class:`_Joining` to load."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != MEGATRON_ARGUMENTS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Joining(spec.loader)
        return spec


class _Joining(Loader):
    """Another loader's work, and ours after it: before anybody can take a name from the module."""

    def __init__(self, original: Loader) -> None:
        self._original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._original.exec_module(module)
        _join(module)


if __name__ == "__main__":
    main(sys.argv[1:])
