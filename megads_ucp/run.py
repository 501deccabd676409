# SPDX-License-Identifier: Apache-2.0
"""Run an unchanged training script with megads_ucp installed. For Megatron-DeepSpeed, the one word to add:

    torchrun ... -m megads_ucp.run pretrain_gpt.py --universal-checkpoint-export ...
    deepspeed --module megads_ucp.run pretrain_gpt.py --universal-checkpoint-export ...
    deepspeed --launcher MPICH $(which megads-ucp-run) pretrain_gpt.py --universal-checkpoint-export ...

Our flags are parsed with the script's own, by Megatron, and so are in its ``args`` and in its checkpoints. Everything
else passes through.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import megads_ucp
from megads_ucp.arguments import add_arguments

MEGATRON_ARGUMENTS = "megatron.arguments"

Provider = Callable[[Any], Any] | None

_USAGE = "megads-ucp-run SCRIPT [ARGUMENT ...], or python -m megads_ucp.run SCRIPT [ARGUMENT ...]"

_DESCRIPTION = """Runs SCRIPT with megads_ucp installed; all arguments are the script's. A Megatron-DeepSpeed script
also takes the flags below. For any other, put "universal_checkpoint_export": true into the DeepSpeed config."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script as ``__main__``.

    Args:
        arguments: the script and its own arguments; None: those of the command line.

    Raises:
        SystemExit: no script is given, or it does not exist.
    """
    script, script_arguments = _split(sys.argv[1:] if arguments is None else arguments)
    if script is None and {"-h", "--help"} & set(script_arguments):
        sys.stdout.write(_help())
        return
    if script is None:
        raise SystemExit(f"megads_ucp.run: no script is given.\n\nusage: {_USAGE}")
    if not Path(script).is_file():
        raise SystemExit(f"megads_ucp.run: there is no script {script}.\n\nusage: {_USAGE}")
    add_flags_to_megatron()
    megads_ucp.install()
    sys.argv = [script, *script_arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as `python SCRIPT` does
    runpy.run_path(script, run_name="__main__")


def _help() -> str:
    """Usage and our flags. The script's own help may be out of reach: upstream's dies of a per cent sign in it."""
    parser = argparse.ArgumentParser(usage=_USAGE, description=_DESCRIPTION, add_help=False)
    return add_arguments(parser).format_help()


def _split(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The script and its arguments: DeepSpeed's launcher puts ``--local_rank=0`` in front of the script."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return argument, [*arguments[:index], *arguments[index + 1 :]]
    return None, list(arguments)


def add_flags_to_megatron() -> None:
    """Let Megatron's ``parse_args`` take our flags, now or as soon as ``megatron.arguments`` is imported."""
    if MEGATRON_ARGUMENTS in sys.modules:
        _wrap_parse_args(sys.modules[MEGATRON_ARGUMENTS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _wrap_parse_args(module: ModuleType) -> None:
    """Add our flags to those of the ``extra_args_provider`` that Megatron's ``parse_args`` is called with."""
    original = module.parse_args

    @functools.wraps(original)
    def parse_args(extra_args_provider: Provider = None, *positional: Any, **keyword: Any) -> Any:
        def provide(parser: Any) -> Any:
            return add_arguments(parser if extra_args_provider is None else extra_args_provider(parser))

        return original(provide, *positional, **keyword)

    module.parse_args = parse_args  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    """Finds ``megatron.arguments`` where it would be found anyway, for :class:`_WrappingLoader` to load."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != MEGATRON_ARGUMENTS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WrappingLoader(spec.loader)
        return spec


class _WrappingLoader(Loader):
    """Another loader, after which ``parse_args`` is wrapped, before anybody can import it from the module."""

    def __init__(self, original: Loader) -> None:
        self._original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._original.exec_module(module)
        _wrap_parse_args(module)


if __name__ == "__main__":
    main()
