# SPDX-License-Identifier: Apache-2.0
"""Compares loss curves: differences step by step, a table, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from launch import Losses

MARKERS = ("o", "x", "+", "d")  # each fits into, or around, the one before it
SIZES = (8, 5, 6, 4)
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")
FLOOR = 1e-9  # where differences of nothing at all are drawn


def relative_differences(reference: Losses, other: Losses) -> dict[int, float]:
    """|other - reference| / |reference| per step that both took; infinite where either is not a number."""
    quotients = {
        step: abs(loss - reference[step]) / abs(reference[step]) for step, loss in other.items() if step in reference
    }
    return {step: math.inf if math.isnan(value) else value for step, value in quotients.items()}


def largest_differences(reference: Losses, others: Mapping[str, Losses]) -> dict[int, float]:
    """The worst of all other runs, per step that any of them took."""
    worst: dict[int, float] = {}
    for losses in others.values():
        for step, value in relative_differences(reference, losses).items():
            worst[step] = max(value, worst.get(step, 0.0))
    return worst


def table(name: str, reference: Losses, others: Mapping[str, Losses], rows: int = 10) -> str:
    """Side by side, about `rows` evenly spaced steps and always the last one."""
    worst = largest_differences(reference, others)
    steps = sorted(worst, reverse=True)
    shown = sorted(steps[:: max(1, len(steps) // rows)])
    width = max(12, *(len(name) + 2 for name in (name, *others)))
    header = f"{'step':>6}{''.join(title.rjust(width) for title in (name, *others))}   largest relative difference"
    lines = [header, "─" * len(header)]
    for step in shown:
        losses = (run.get(step) for run in (reference, *others.values()))
        cells = "".join(f"{'' if loss is None else f'{loss:.6f}':>{width}}" for loss in losses)
        lines.append(f"{step:>6}{cells}{worst[step]:>30.1e}")
    return "\n".join(lines)


def plot(
    path: Path,
    title: str,
    name: str,
    reference: Losses,
    others: Mapping[str, Losses],
    *,
    events: Mapping[int, str],
    tolerance: float,
    every: int = 1,
    dpi: int = 150,
) -> None:
    """Losses above (the reference as a line, the others as markers on it), relative differences below against the
    tolerance.

    events: what happened after a step, drawn as a dotted line.
    every: of the other runs' losses above, only each `every`-th gets a marker.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    above.plot(list(reference), list(reference.values()), color="0.35", linewidth=1.5, label=name)
    for (label, losses), marker, size, color in zip(others.items(), MARKERS, SIZES, COLORS, strict=False):
        style = {"marker": marker, "color": color, "linestyle": "none", "markerfacecolor": "none"}
        above.plot(list(losses), list(losses.values()), markersize=size, markevery=every, label=label, **style)
        differences = relative_differences(reference, losses)
        below.plot(list(differences), [max(value, FLOOR) for value in differences.values()], markersize=4, **style)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
        for step in events:
            axis.axvline(step, color="0.6", linestyle=":", linewidth=1)
    for step, event in events.items():
        above.annotate(
            event, (step, above.get_ylim()[1]), (-4, -2), textcoords="offset points",
            color="0.4", ha="right", va="top", fontsize=9,
        )  # fmt: skip
    above.set_title(title, loc="left", fontsize=11)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    below.axhline(tolerance, color="tab:red", linewidth=1)
    below.annotate(
        "tolerance", (min((*reference, *events)), tolerance), (0, -3), textcoords="offset points",
        color="tab:red", ha="left", va="top", fontsize=9,
    )  # fmt: skip
    below.set(yscale="log", ylim=(FLOOR / 2, tolerance * 4), xlabel="step", ylabel="relative difference")
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
