# SPDX-License-Identifier: Apache-2.0
"""Megatron-DeepSpeed, unmodified: exported at each topology, resumed at others, against the run that went on.

    MEGATRON_DEEPSPEED_PATH=... python -m tests.matrices.megatron [--kinds fp32,bf16] [--models plain,gqa] [--no-stock]

A line per source. Each cell: the target and the largest relative difference of the five losses after the resume from
those of the uninterrupted run, and whether the loaded state, exported again, has the source's bits. Beside it the same
for DeepSpeed's own converter and load, or how they fail. MEGATRON_DEEPSPEED_ARGONNE_PATH names a checkout of the fork
for the models with grouped queries.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
    losses,
)
from tests.support.ranks import RankError
from tests.support.runs import same_bits

MODELS = {
    "plain": Model(),
    "swiglu": Model((*SWIGLU, *UNTIED)),
    "llama": Model((*SWIGLU, *UNTIED, *LLAMA)),
    "gqa": Model((*GQA, *SWIGLU, *UNTIED, *LLAMA)),
}
FLAT = {  # without the pipeline module: sources, each with its targets
    Topology(tp=1, dp=2): (Topology(tp=2, dp=1), Topology(tp=2, dp=2), Topology(tp=4, dp=1)),
    Topology(tp=2, dp=2): (Topology(tp=1, dp=2), Topology(tp=4, dp=1), Topology(tp=1, dp=4)),
}
PIPE = {
    Topology(tp=2, pp=2, dp=1): (Topology(tp=1, dp=2), Topology(tp=1, pp=2, dp=2), Topology(tp=4, dp=1)),
    Topology(tp=1, pp=2, dp=2): (Topology(tp=2, dp=2), Topology(tp=2, pp=2, dp=1), Topology(tp=1, pp=4, dp=1)),
}


@dataclass(frozen=True)
class Case:
    """A source and where it is resumed."""

    name: str
    model: Model
    kind: str
    source: Topology
    targets: tuple[Topology, ...]

    def __str__(self) -> str:
        return f"{self.name}{' (pipe)' if self.model.pipe else ''} | {self.kind} | {self.source}"


def cases(models: Sequence[str], kinds: Sequence[str]) -> Iterator[Case]:
    for kind in kinds:
        for name in models:
            for source, targets in FLAT.items():
                # Two key-value heads do not divide over four ranks.
                fitting = tuple(t if name != "gqa" or t.tp < 4 else Topology(tp=1, dp=1) for t in targets)
                yield Case(name, MODELS[name], kind, source, fitting)
            if name in ("plain", "swiglu"):  # rotary positions fail under the pipeline module, in that repository
                model = replace(MODELS[name], pipe=True, layers=4)
                yield from (Case(name, model, kind, source, targets) for source, targets in PIPE.items())


@dataclass(frozen=True)
class Source:
    """A source's run: its directory and the losses after the save."""

    directory: Path
    losses: list[float]

    @property
    def regular(self) -> Path:
        return self.directory / f"global_step{SAVED}"

    @property
    def universal(self) -> Path:
        return self.directory / f"global_step{SAVED}_universal"


def export(host: Host, case: Case, folder: Path) -> Source:
    traces = host.run(Job(case.source, case.model, case.kind, save=folder))
    return Source(folder, losses(traces)[SAVED:])


def resume(host: Host, case: Case, source: Source, target: Topology) -> tuple[float, bool]:
    """The largest relative difference of the losses after our resume, and whether the state loaded has equal bits."""
    again = source.directory / f"again-{target}"
    traces = host.run(Job(target, case.model, case.kind, load=source.directory, again=again))
    return largest(losses(traces), source.losses), same_bits(again / f"global_step{SAVED}_universal", source.universal)


def largest(these: Sequence[float], those: Sequence[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(these, those, strict=True))


def convert(host: Host, source: Source) -> str | None:
    """Stock's converter on the regular checkpoint; in a few words how it fails, if it does."""
    try:
        host.convert(source.regular, source.directory / "stock")
    except RankError as error:
        return f"converter: {_last_words(str(error))}"
    return None


def stock_resume(host: Host, case: Case, source: Source, target: Topology) -> str:
    job = Job(target, case.model, case.kind, plugin=False, load=source.directory, tag="stock")
    try:
        return f"{target} {largest(losses(host.run(job)), source.losses):.0e}"
    except RankError as error:
        return f"{target} load: {_last_words(str(error))}"


def _last_words(text: str) -> str:
    """The last exception of a traceback, shortened."""
    lines = text.partition("---------- last")[0].splitlines()  # what ranks printed comes after it
    raised = [line.strip() for line in lines if re.match(r"\s*[A-Za-z_.]*(Error|Exception)\b", line)]
    return (raised[-1] if raised else text.strip()[-80:])[:110].replace("|", "/")


def line(host: Host, case: Case, folder: Path, stock: bool) -> tuple[str, bool]:
    """A line of the table, and whether everything of ours was right."""
    source = export(host, case, folder)
    ours, right = [], True
    for target in case.targets:
        difference, equal = resume(host, case, source, target)
        right &= equal and difference <= TOLERANCE[case.kind]
        ours.append(f"{target} {difference:.0e}{'' if equal else ' OTHER BITS'}")
    stock_cell = "not asked"
    if stock:
        failed = convert(host, source)
        stock_cell = failed or ", ".join(stock_resume(host, case, source, target) for target in case.targets)
    return f"| {case} | {', '.join(ours)} | {stock_cell} |", right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--kinds", default=",".join(TOLERANCE))
    parser.add_argument("--no-stock", dest="stock", action="store_false")
    chosen = parser.parse_args()
    failed, started = 0, time.monotonic()
    print(
        "| model | engine | exported at | resumed at, losses within | stock converter and load |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        hosts: dict[str, Host] = {}
        for number, case in enumerate(cases(chosen.models.split(","), chosen.kinds.split(","))):
            variable = ARGONNE if case.name == "gqa" else CHECKOUT
            if variable not in os.environ:
                print(f"| {case} | set {variable} | |")
                continue
            folder = Path(name) / str(number)
            folder.mkdir()
            if variable not in hosts:
                (Path(name) / variable).mkdir()
                hosts[variable] = Host(Path(os.environ[variable]), Path(name) / variable)
            try:
                text, right = line(hosts[variable], case, folder, chosen.stock)
            except RankError as error:
                text, right = f"| {case} | FAILED: {_last_words(str(error))} | |", False
            failed += not right
            print(text, flush=True)
        for host in hosts.values():
            host.close()
    print(f"\n{failed} sources failed; {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
