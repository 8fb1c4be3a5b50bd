"""Pictures of a federation's data: every client's label shares, or targets, and its size."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from fedem.federation import PARTS
from fedem.report.described import Counts, Description, by_dominant_label, shares
from fedem.report.figures import COLOURS, SETTINGS, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = ("png", "svg")
_NAMED_CLIENTS, _NAMED_LABELS = 40, 20
_GREYS = ("#3d4a55", "#8796a3", "#c3ccd4")


def draw_clients(description: Description, ending: str) -> bytes:
    """Return the picture as PNG or SVG: the same bytes for the same data.

    Above each client's label shares, stacked, clients sorted by dominant label (for regression the quartiles of their
    targets, sorted by the median); below their sizes, part by part.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    # Names are users' own: a dollar is no formula, and what the font has not is drawn as a box.
    with style.context(["default", {**SETTINGS, "text.parse_math": False}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        figure = Figure(figsize=(9, 5.4), facecolor="white")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1), gridspec_kw={"hspace": 0.08})
        if description.counts is not None:
            order = by_dominant_label(description.counts, description.names)
            _draw_labels(figure, above, description, order)
        else:
            assert description.quartiles is not None, "targets are labels or numbers"
            order = np.argsort(description.quartiles[:, 1], kind="stable")
            _draw_targets(above, description, order)
        _draw_sizes(below, description, order)
        _frame(above, below, description, order)
        how: dict[str, Any] = {"dpi": 160} if ending == "png" else {"metadata": {"Date": None}}
        return saved(figure, ending, **how)


def _draw_labels(figure: Figure, axes: Axes, description: Description, order: Counts) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    counts = description.counts
    assert counts is not None
    num_labels = len(description.labels)
    few = num_labels <= len(COLOURS)
    gradient = colormaps["turbo"].resampled(num_labels)
    colours = COLOURS if few else [gradient(label) for label in range(num_labels)]
    heights = np.vstack([np.zeros(len(order)), shares(counts)[order].T.cumsum(0)])
    edges = np.arange(len(order) + 1) - 0.5
    # A step a client and an area a label: thousands of clients draw as fast as five.
    steps = np.hstack([heights, heights[:, -1:]])
    for label, colour in zip(range(num_labels), colours, strict=False):
        low, high = 100 * steps[label], 100 * steps[label + 1]
        name = description.labels[label]
        axes.fill_between(edges, low, high, step="post", color=colour, linewidth=0, label=name)
    if len(order) <= _NAMED_CLIENTS:
        axes.vlines(edges[1:-1], 0, 100, color="white", linewidth=1.5)
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of the client's samples in %")
    if num_labels <= _NAMED_LABELS:
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False, title="label", reverse=True
        )
        return
    scale = ScalarMappable(BoundaryNorm(np.arange(num_labels + 1) - 0.5, num_labels), gradient)
    place = axes.inset_axes((1.015, 0, 0.02, 1))
    bar = figure.colorbar(scale, cax=place, ticks=np.linspace(0, num_labels - 1, 11).round())
    bar.ax.set_yticklabels([description.labels[int(tick)] for tick in bar.get_ticks()])
    bar.minorticks_off()
    bar.set_label(f"label, of {num_labels}")


def _draw_targets(axes: Axes, description: Description, order: Counts) -> None:
    quartiles = description.quartiles
    assert quartiles is not None
    low, median, high = quartiles[order].T
    places = np.arange(len(order))
    width = max(0.8, min(8.0, 300 / len(order)))
    axes.vlines(places, low, high, color=COLOURS[0], linewidth=width, alpha=0.45, label="middle half")
    axes.plot(places, median, "o", color=COLOURS[0], markersize=min(5.0, width), label="median")
    axes.set_ylabel("targets of the client")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False)


def _draw_sizes(axes: Axes, description: Description, order: Counts) -> None:
    edges = np.arange(len(order) + 1) - 0.5
    heights = np.vstack([np.zeros(len(order)), description.sizes[order].T.cumsum(0)])
    steps = np.hstack([heights, heights[:, -1:]])
    for part, low, high, colour in zip(PARTS, steps[:-1], steps[1:], _GREYS, strict=True):
        axes.fill_between(edges, low, high, step="post", color=colour, linewidth=0, label=part)
    if len(order) <= _NAMED_CLIENTS:
        axes.vlines(edges[1:-1], 0, steps.max(), color="white", linewidth=1.5)
    axes.set_ylim(0, 1.05 * steps.max())
    axes.set_ylabel("samples")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False, reverse=True)


def _frame(above: Axes, below: Axes, description: Description, order: Counts) -> None:
    count = len(order)
    sorting = "dominant label" if description.counts is not None else "median target"
    above.set_title(f"{description.title}: {count:,} clients, {description.sizes.sum():,} samples", loc="left")
    above.tick_params(axis="x", length=0)
    below.set_xlim(-0.5, count - 0.5)
    below.set_xlabel(f"clients, sorted by {sorting}")
    if count <= _NAMED_CLIENTS:
        names = [name if len(name) <= 14 else f"{name[:12]}..." for name in (description.names[i] for i in order)]
        crowded = sum(map(len, names)) > 80
        below.set_xticks(range(count), names, rotation=90 if crowded else 0)
    else:
        below.locator_params(axis="x", integer=True)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
