"""Tables and pictures of how fast a run converges: its diagnostics, and a study of the convergence theorems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedem.checkpoint import write_atomically
from fedem.diagnostics import Diagnosis
from fedem.report.figures import COLOURS, SETTINGS, saved
from fedem.theory import QUANTITIES, Study, Trend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

TITLES = {
    "objective": "objective f",
    "gradient_norm2": "|grad f|^2",
    "improvement": "gain of the weights",
    "weights_kl": "KL of the weights",
    "consensus": "distance to consensus",
    "dissimilarity": "mean |grad f_t|^2",
}
_COLUMNS = 3


def study_table(study: Study) -> Table:
    """Return a row for each K, then the slopes beside the theorem's."""
    from rich.table import Table

    from fedem.methods import METHODS

    title = METHODS[study.config.name("method")].title
    seeds = "one seed" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds"
    table = Table(title=f"{title}, means over K rounds at learning rate {study.initial_rate:g} / sqrt(K), {seeds}")
    for heading in ("K", "learning rate", *(TITLES[name] for name in QUANTITIES)):
        table.add_column(heading, justify="right")
    for point in study.points:
        means = (f"{point.means[name]:.3g}" for name in QUANTITIES)
        table.add_row(str(point.rounds), f"{point.learning_rate:.3g}", *means)
    table.add_section()
    for heading, show in (("slope", _slope), ("theorem", _rate), ("tolerance", _tolerance), ("holds", _holds)):
        table.add_row(heading, "", *(show(study.trends[name]) for name in QUANTITIES))
    return table


def _slope(trend: Trend | None) -> str:
    return "zero" if trend is None else f"{trend.slope:.3f}"


def _rate(trend: Trend | None) -> str:
    return "" if trend is None or trend.rate is None else f"{trend.rate:g}"


def _tolerance(trend: Trend | None) -> str:
    return "" if trend is None else f"{trend.tolerance:.3f}"


def _holds(trend: Trend | None) -> str:
    return "" if trend is None or trend.holds is None else ("yes" if trend.holds else "no")


def study_remarks(study: Study) -> list[str]:
    """Return what else there is to say of a study, a line each."""
    constant, slope = study.dissimilarity
    lines = [
        f"Bounded dissimilarity at every measured round: mean |grad f_t|^2 <= G^2 + beta^2 |grad f|^2 with "
        f"G = {constant:.3g}, beta = {slope:.3g}."
    ]
    if any(trend is not None and trend.holds is False for trend in study.trends.values()):
        lines.append(
            "A theorem speaks of K that are large enough: where a slope is too flat, try more rounds, or a larger a0 "
            "if f still falls at the end of the shortest run."
        )
    return lines


def draw_study(study: Study) -> bytes:
    """Return a picture as PNG: each quantity against K on logarithmic axes, its fit and the theorem's slope."""
    from matplotlib import style
    from matplotlib.figure import Figure

    fitted = {name: trend for name, trend in study.trends.items() if trend is not None}
    rounds = np.array([point.rounds for point in study.points], dtype=float)
    with style.context(["default", SETTINGS]):
        figure = Figure(figsize=(3.4 * max(1, len(fitted)), 3.2), layout="constrained", facecolor="white")
        for position, (name, trend) in enumerate(fitted.items()):
            axes = figure.add_subplot(1, len(fitted), position + 1)
            means = np.array([point.means[name] for point in study.points])
            colour = COLOURS[position % len(COLOURS)]
            axes.loglog(rounds, means, "o", color=colour)
            line = np.exp(trend.intercept) * rounds**trend.slope
            axes.loglog(rounds, line, color=colour, label=f"slope {trend.slope:.2f} ± {trend.tolerance:.2f}")
            if trend.rate is not None:
                bound = line[0] * (rounds / rounds[0]) ** trend.rate
                axes.loglog(rounds, bound, color="black", linestyle=(0, (4, 3)), label=f"theorem {trend.rate:g}")
            _frame(axes, f"mean {TITLES[name]}", "K, communication rounds")
            axes.set_xticks(rounds, [f"{number:g}" for number in rounds])
            axes.set_xticks([], minor=True)
            axes.legend(frameon=False)
        return saved(figure, "png", dpi=160)


def plot_diagnostics(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what was diagnosed in a run's ``metrics`` against the rounds, to a file ending in .png or .svg.

    What is zero throughout is left out, and so is what is not finite.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    curves = {name: _curve(metrics, name) for name in Diagnosis._fields}
    shown = {name: curve for name, curve in curves.items() if any(value != 0 for _, value in curve)}
    rows = math.ceil(len(shown) / _COLUMNS)
    with style.context(["default", SETTINGS]):
        figure = Figure(figsize=(3.4 * _COLUMNS, 2.8 * max(1, rows)), layout="constrained", facecolor="white")
        for position, (name, curve) in enumerate(shown.items()):
            axes = figure.add_subplot(rows, _COLUMNS, position + 1)
            # All but f tend to zero; where one has arrived, a logarithmic axis has no place for it.
            falling = name != "objective"
            points = [(number, value) for number, value in curve if value > 0 or not falling]
            axes.plot(*zip(*points, strict=True), color=COLOURS[position], marker="o", markersize=2.5, linewidth=1.3)
            axes.set_yscale("log" if falling else "linear")
            _frame(axes, TITLES[name], "communication rounds")
        ending = path.suffix.removeprefix(".")
        how: dict[str, Any] = {"dpi": 160} if ending == "png" else {"metadata": {"Date": None}}
        write_atomically(path, saved(figure, ending, **how))


def _curve(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["round"], line[name]) for line in metrics if line.get(name) is not None and math.isfinite(line[name])]


def _frame(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(below)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
