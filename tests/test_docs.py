# SPDX-License-Identifier: Apache-2.0
"""What the documentation says of files is true of the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = "megads_ucp|tests|examples|docs|engine|layout|sources|plan|comm|storage|save|load"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def modules_in_the_tree() -> Iterator[str]:
    """Paths of the modules in the drawn tree of docs/architecture.md, below megads_ucp/."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    folder = ""
    for line in text.partition("    megads_ucp/\n")[2].partition("\n\n")[0].splitlines():
        name, depth = line.split()[0], len(line) - len(line.lstrip())
        if name.endswith("/"):
            folder = name
        else:
            yield name if depth == 6 else folder + name


def test_the_tree_of_the_architecture_has_every_module_and_no_other():
    package = ROOT / "megads_ucp"
    found = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    faces = {name for name in found if name.endswith("/__init__.py")}
    assert set(modules_in_the_tree()) == found - faces


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_ours_that_a_page_names_exist(page: Path):
    text = page.read_text()
    paths = re.findall(rf"`((?:{FOLDERS})/[\w/.*]*)`", text)
    links = re.findall(r"\]\(([^)#:]+)", text)
    missing = [path for path in paths if not (list(ROOT.glob(path)) or list((ROOT / "megads_ucp").glob(path)))]
    assert missing + [link for link in links if not (page.parent / link).exists()] == []
