"""What a federation's data look like: sizes, labels, how much clients differ. Shapes: T clients, K labels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text
from scipy.special import rel_entr
from torch import Tensor

from fedem.core.errors import counted
from fedem.data.dataset import Dataset
from fedem.data.encoding import some
from fedem.data.federation import PARTS, Federation
from fedem.report.console import figures_table, rendered
from fedem.report.pictures.canvas import COLOURS, FORMATS, SETTINGS, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

_NAMED_CLIENTS, _NAMED_LABELS, _LISTED = 40, 20, 20
_GREYS = ("#3d4a55", "#8796a3", "#c3ccd4")
_LEGEND: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0, "frameon": False}
Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


def label_counts(federation: Federation, num_labels: int = 0) -> Counts:
    """Count each client's labels over all parts, ``[T, K]``; K is at least ``num_labels``."""
    owners, targets = _pooled(federation)
    counts = np.zeros((federation.num_clients, max(num_labels, int(targets.max()) + 1)), dtype=np.int64)
    np.add.at(counts, (owners, targets.numpy()), 1)
    return counts


def _pooled(federation: Federation) -> tuple[Counts, Tensor]:
    """Return the position of each sample's client, and its target, part by part: ``[N]`` and ``[N, ...]``."""
    parts = [federation.part(part) for part in PARTS]
    clients = np.arange(federation.num_clients)
    owners = np.concatenate([np.repeat(clients, part.sizes.numpy()) for part in parts])
    return owners, torch.cat([part.targets for part in parts])


def shares(counts: Counts) -> Floats:
    """Return label distributions, ``[..., K]``."""
    return counts / counts.sum(-1, keepdims=True)


def total_variation(counts: Counts) -> float:
    """Return the mean over clients of half the sum of their label shares' differences to the pool's: 0 to almost 1."""
    return float(np.abs(shares(counts) - shares(counts.sum(0))).sum(1).mean() / 2)


def jensen_shannon(counts: Counts) -> float:
    """Return the mean Jensen-Shannon divergence of clients' label distributions from the pool's, in bits: 0 to 1."""
    own, pool = shares(counts), shares(counts.sum(0))
    middle = (own + pool) / 2
    return float((rel_entr(own, middle) + rel_entr(pool, middle)).sum(1).mean() / 2 / np.log(2))


def between_share(values: Floats, owners: Counts) -> float:
    """Return the share of the values' variance that lies between clients, 0 to 1: values and owners ``[N]``."""
    values = values - values.mean()
    sizes, sums = np.bincount(owners), np.bincount(owners, weights=values)
    total, between = np.square(values).sum(), (np.square(sums[sizes > 0]) / sizes[sizes > 0]).sum()
    return float(between / total) if total else 0.0


@dataclass(frozen=True, eq=False)
class Description:
    """What there is to say of a federation."""

    title: str  # name of the data
    names: tuple[str, ...]  # of the T clients
    sizes: Counts  # samples of each client in each part, [T, 3]
    inputs: str  # shape and type of one input
    columns: str | None  # what was made of a table's columns, if it was one
    notes: tuple[str, ...]  # ... and what is unusual about them
    filled: bool  # whether missing values are filled, and not refused
    counts: Counts | None = None  # of labels, [T, K]; None for regression
    labels: tuple[str, ...] = ()  # names of the K labels
    between: float | None = None  # for regression: the share of the targets' variance between clients
    quartiles: Floats | None = None  # for regression: of each client's targets, [T, 3]


def describe(dataset: Dataset, title: str) -> Description:
    """Describe a data set's clients; those held out of training are not there yet."""
    federation, encoding = dataset.federation, dataset.encoding
    sizes = np.stack([federation.part(part).sizes.numpy() for part in PARTS], axis=1)
    pool = federation.train.pool
    inputs = f"{list(pool.inputs.shape[1:])} {str(pool.inputs.dtype).removeprefix('torch.')}"
    columns: tuple[str | None, tuple[str, ...], bool] = (None, (), False)
    if encoding is not None:
        filled = any(feature.fill is not None for feature in encoding.features or ())
        columns = (encoding.describe(), encoding.notes, filled)
    common = (title, federation.names, sizes, inputs, *columns)
    if not pool.targets.is_floating_point():
        known = dataset.label_names or ()
        counts = label_counts(federation, len(known))
        # Some labels are characters, such as a blank.
        shown = (label if label.isprintable() and label.strip() else repr(label) for label in known)
        labels = tuple(shown) or tuple(map(str, range(counts.shape[1])))
        return Description(*common, counts, labels)
    owners, targets = _pooled(federation)
    targets = targets.double() if encoding is None else encoding.decode(targets.double())
    # Several targets a sample count as one: their mean.
    values = targets.reshape(len(targets), -1).mean(1).numpy()
    ends = np.bincount(owners, minlength=federation.num_clients).cumsum()[:-1]
    own = np.split(values[np.argsort(owners, kind="stable")], ends)
    quartiles = np.array([np.quantile(column, (0.25, 0.5, 0.75)) for column in own])
    return Description(*common, between=between_share(values, owners), quartiles=quartiles)


def known_clients(names: Sequence[str], run: Path, trained: Sequence[str]) -> str:
    """Say which of the clients called ``names`` a run has trained already; empty where it has none of them."""
    there = set(trained)
    known = [name for name in names if name in there]
    if not known:
        return ""
    number = f"{len(known):,} of {counted(len(names), 'client')} took part in the training of {run} already"
    return f"{number} ({some(list(map(repr, known)))}); `fedem predict` uses the models that they have there."


def sizes_table(description: Description) -> Table:
    """Return samples in each part and in all: together, and of the least, the median and the largest client."""
    title = Text(f"{description.title}: samples of {counted(len(description.names), 'client')}")
    table = figures_table(title, "part", "all", "least", "median", "largest")
    columns = [*description.sizes.T, description.sizes.sum(1)]
    for name, column in zip((*PARTS, "together"), columns, strict=True):
        figures = (column.sum(), column.min(), np.median(column), column.max())
        table.add_row(name, *(f"{figure:,.0f}" for figure in figures), end_section=name == PARTS[-1])
    return table


def labels_table(description: Description) -> Table:
    """Return each label's samples, share, and number of clients that have it; many labels: the most frequent."""
    counts = description.counts
    assert counts is not None, "regression has no labels"
    total = counts.sum(0)
    order = np.argsort(-total, kind="stable")[:_LISTED] if len(total) > _LISTED else np.arange(len(total))
    more = f", the {_LISTED} most frequent of {len(total)}" if len(total) > _LISTED else ""
    table = figures_table(f"Labels{more}", "label", "samples", "share in %", "clients")
    for label in order.tolist():
        share = f"{100 * total[label] / total.sum():.1f}"
        table.add_row(Text(description.labels[label]), f"{total[label]:,}", share, f"{(counts[:, label] > 0).sum():,}")
    return table


def remarks(description: Description) -> list[str]:
    """Return what else there is to say, a line each."""
    measures = {"total_variation": total_variation, "jensen_shannon": jensen_shannon}
    return rendered("data.txt", description=description, **measures).split("\n")[:-1]


def by_dominant_label(counts: Counts, names: Sequence[str]) -> Counts:
    """Return the order in which clients are drawn: by dominant label, then by its share, then by name. ``[T]``."""
    own = shares(counts)
    return np.lexsort((np.argsort(np.argsort(names)), -own.max(1), own.argmax(1)))


def draw_clients(description: Description, ending: str) -> bytes:
    """Return the picture as PNG or SVG: above the clients' label shares or targets, below their sizes part by part."""
    from matplotlib import style
    from matplotlib.figure import Figure

    # Names are users' own: a dollar is not a formula, and a character that the font lacks is drawn as a box.
    with style.context(["default", {**SETTINGS, "text.parse_math": False}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        figure = Figure(figsize=(9, 5.4), facecolor="white")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1), gridspec_kw={"hspace": 0.08})
        if description.counts is not None:
            order, sorting = by_dominant_label(description.counts, description.names), "dominant label"
            _draw_labels(above, description.labels, shares(description.counts)[order])
        else:
            assert description.quartiles is not None, "targets are labels or numbers"
            order, sorting = np.argsort(description.quartiles[:, 1], kind="stable"), "median target"
            low, median, high = description.quartiles[order].T
            places, width = np.arange(len(median)), max(0.8, min(8.0, 300 / len(median)))
            above.vlines(places, low, high, color=COLOURS[0], linewidth=width, alpha=0.45, label="middle half")
            above.plot(places, median, "o", color=COLOURS[0], markersize=min(5.0, width), label="median")
            above.set_ylabel("targets of the client")
            above.legend(**_LEGEND)
        _draw_stacked(below, description.sizes[order].T, PARTS, _GREYS)
        below.set(ylabel="samples", ylim=(0, 1.05 * description.sizes.sum(1).max()))
        below.set(xlabel=f"clients, sorted by {sorting}", xlim=(-0.5, len(order) - 0.5))
        below.legend(reverse=True, **_LEGEND)
        clients = f"{counted(len(order), 'client')}, {counted(int(description.sizes.sum()), 'sample')}"
        above.set_title(f"{description.title}: {clients}", loc="left")
        above.tick_params(axis="x", length=0)
        if len(order) > _NAMED_CLIENTS:
            below.locator_params(axis="x", integer=True)
        else:
            names = [name if len(name) <= 14 else f"{name[:12]}..." for name in np.array(description.names)[order]]
            below.set_xticks(range(len(names)), names, rotation=90 if sum(map(len, names)) > 80 else 0)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        return saved(figure, ending, **FORMATS[ending])


def _draw_labels(axes: Axes, labels: Sequence[str], own: Floats) -> None:
    """Draw the clients' label distributions, ``[T, K]``."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    num_labels = len(labels)
    gradient = colormaps["turbo"].resampled(num_labels)
    colours = COLOURS if num_labels <= len(COLOURS) else [gradient(label) for label in range(num_labels)]
    _draw_stacked(axes, 100 * own.T, labels, colours)
    axes.set(ylabel="share of the client's samples in %", ylim=(0, 100))
    if num_labels <= _NAMED_LABELS:
        axes.legend(title="label", reverse=True, **_LEGEND)
        return
    scale = ScalarMappable(BoundaryNorm(np.arange(num_labels + 1) - 0.5, num_labels), gradient)
    place, ticks = axes.inset_axes((1.015, 0, 0.02, 1)), np.linspace(0, num_labels - 1, 11).round()
    bar = axes.figure.colorbar(scale, cax=place, ticks=ticks)
    bar.ax.set_yticklabels([labels[int(tick)] for tick in bar.get_ticks()])
    bar.minorticks_off()
    bar.set_label(f"label, of {num_labels}")


def _draw_stacked(axes: Axes, values: NDArray[np.number], names: Sequence[str], colours: Sequence[ColorType]) -> None:
    """Stack the clients' ``values``, ``[areas, T]``: thousands of clients draw as fast as five."""
    edges = np.arange(values.shape[1] + 1) - 0.5
    heights = np.vstack([np.zeros(values.shape[1]), values.cumsum(0)])
    steps = np.hstack([heights, heights[:, -1:]])
    for name, low, high, colour in zip(names, steps[:-1], steps[1:], colours, strict=False):
        axes.fill_between(edges, low, high, step="post", color=colour, linewidth=0, label=name)
    if values.shape[1] <= _NAMED_CLIENTS:
        axes.vlines(edges[1:-1], 0, steps.max(), color="white", linewidth=1.5)
