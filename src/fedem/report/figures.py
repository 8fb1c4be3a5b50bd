"""Pictures of a comparison: the test score against the rounds."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from fedem.comparison import Comparison, Row
from fedem.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Ten colours that differ in hue or lightness, the first ones most; then the same with other strokes and markers.
COLOURS = (
    "#0b5fa5",
    "#d95f02",
    "#1b8a5a",
    "#c2185b",
    "#6a4fb3",
    "#8c5a2b",
    "#17a2b8",
    "#b8a000",
    "#5b6770",
    "#e06fb5",
)
_STROKES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = "os^DvPX<>p*h"
SETTINGS: dict[str, Any] = {"font.size": 9, "svg.hashsalt": "fedem"}


def draw(comparison: Comparison) -> dict[str, bytes]:
    """Return the picture as PNG and SVG, by ending: the same bytes for the same figures; none without test scores.

    A line a method, the mean over the seeds, in a band of one standard deviation on either side. A method looks the
    same in every picture.
    """
    if not any(row.curve for row in comparison.rows):
        return {}
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", SETTINGS]):
        # A figure that no window knows of: nothing is shown, and nothing global is changed.
        figure = Figure(figsize=(8, max(4.5, 0.3 * len(comparison.rows))), facecolor="white")
        axes = figure.add_subplot()
        _lines(axes, comparison)
        _frame(axes, comparison)
        return {"png": saved(figure, "png", dpi=160), "svg": saved(figure, "svg", metadata={"Date": None})}


def _lines(axes: Axes, comparison: Comparison) -> None:
    scale = 100 if comparison.metric == "accuracy" else 1
    best = comparison.oracle.get(f"test_{comparison.metric}")
    if best is not None and best.mean is not None:
        label = f"oracle  {scale * best.mean:.1f}"
        axes.axhline(scale * best.mean, color="black", linewidth=1, linestyle=(0, (2, 3)), label=label, zorder=1.5)
    # Many bands on top of each other would hide the lines.
    haze = 0.13 if len(comparison.rows) <= 6 else 0.05
    # The better lie above the worse; the legend stays in the order of the scores.
    for height, row in zip(range(len(comparison.rows), 0, -1), comparison.rows, strict=True):
        points = [(point.round, point.spread) for point in row.curve if point.spread.mean is not None]
        rounds = [number for number, _ in points]
        means = [scale * (spread.mean or 0.0) for _, spread in points]
        widths = [scale * (spread.deviation or 0.0) for _, spread in points]
        how = look(row.method)
        every = max(1, len(points) // 8)
        axes.plot(
            rounds, means, label=_label(row, comparison), zorder=2 + height / 100, markevery=every, markersize=4, **how
        )
        low, high = ([mean + sign * width for mean, width in zip(means, widths, strict=True)] for sign in (-1, 1))
        axes.fill_between(rounds, low, high, color=how["color"], alpha=haze, linewidth=0, zorder=1)


def look(method: str) -> dict[str, Any]:
    """Return a method's colour, line and marker, the same in every picture."""
    return look_at(list(METHODS).index(method))


def look_at(position: int) -> dict[str, Any]:
    """Return the colour, line and marker at a ``position`` of the list of looks."""
    return {
        "color": COLOURS[position % len(COLOURS)],
        "linestyle": _STROKES[position // len(COLOURS) % len(_STROKES)],
        "marker": _MARKERS[position % len(_MARKERS)],
        "linewidth": 1.6,
    }


def _label(row: Row, comparison: Comparison) -> str:
    final = row.figures[f"test_{comparison.metric}"].mean
    if final is None:
        return f"{row.title}  -"
    return f"{row.title}  {100 * final:.1f}" if comparison.metric == "accuracy" else f"{row.title}  {final:.4g}"


def _frame(axes: Axes, comparison: Comparison) -> None:
    from matplotlib.ticker import LogLocator

    accuracy = comparison.metric == "accuracy"
    axes.set_xlabel("communication rounds")
    axes.set_ylabel("test accuracy in %, average over clients" if accuracy else "test mean squared error")
    if not accuracy:
        # Errors differ by factors, and those of a method that diverges by many.
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlim(left=0, right=comparison.rounds * 1.02)
    axes.locator_params(axis="x", integer=True)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    count = len(comparison.seeds)
    over = "one seed" if count == 1 else f"mean ± standard deviation over {count} seeds"
    axes.set_title(f"{comparison.data}, {comparison.num_clients} clients: {over}", loc="left", fontsize=10)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0,
        frameon=False,
        handlelength=3.2,
        title="after the last round",
        alignment="left",
    )


def saved(figure: Figure, ending: str, **how: Any) -> bytes:
    """Return the picture's bytes."""
    content = io.BytesIO()
    figure.savefig(content, format=ending, bbox_inches="tight", **how)
    return content.getvalue()
