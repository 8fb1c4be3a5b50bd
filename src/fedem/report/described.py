"""What a federation's data look like, in tables and as a picture: sizes, labels, and how much clients differ.

Shapes: T clients, K labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text, TextType
from scipy.special import rel_entr

from fedem.data.dataset import Dataset
from fedem.data.federation import PARTS, Federation
from fedem.report.studies import COLOURS, SETTINGS, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

ENDINGS = ("png", "svg")
_NAMED_CLIENTS, _NAMED_LABELS = 40, 20
_GREYS = ("#3d4a55", "#8796a3", "#c3ccd4")
_LEGEND: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0, "frameon": False}
_LISTED = 20
Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


def label_counts(federation: Federation, num_labels: int = 0) -> Counts:
    """Count each client's labels over all parts, ``[T, K]``; K is at least ``num_labels``."""
    targets = [federation.part(part).targets.numpy() for part in PARTS]
    width = max([num_labels, *(int(column.max()) + 1 for column in targets if len(column))])
    counts = np.zeros((federation.num_clients, width), dtype=np.int64)
    for part, column in zip(PARTS, targets, strict=True):
        np.add.at(counts, (_owners(federation, part), column), 1)
    return counts


def shares(counts: Counts) -> Floats:
    """Return label distributions, ``[..., K]``."""
    divided: Floats = counts / counts.sum(-1, keepdims=True)
    return divided


def total_variation(counts: Counts) -> float:
    """Return the mean distance of clients' label distributions to the pool's, half the sum of the differences.

    From 0, all alike, to almost 1.
    """
    return float(np.abs(shares(counts) - shares(counts.sum(0))).sum(1).mean() / 2)


def jensen_shannon(counts: Counts) -> float:
    """Return the mean Jensen-Shannon divergence of clients' label distributions from the pool's, in bits: 0 to 1."""
    own, pool = shares(counts), shares(counts.sum(0))
    middle = (own + pool) / 2
    return float((rel_entr(own, middle) + rel_entr(pool, middle)).sum(1).mean() / 2 / np.log(2))


def between_share(values: Floats, owners: Counts) -> float:
    """Return the share of the values' variance that lies between clients, 0 to 1: values and owners ``[N]``."""
    values = values - values.mean()
    total = float(np.square(values).sum())
    sizes = np.bincount(owners)
    sums = np.bincount(owners, weights=values)
    between = float((np.square(sums[sizes > 0]) / sizes[sizes > 0]).sum())
    return between / total if total else 0.0


@dataclass(frozen=True, eq=False)
class Description:
    """What there is to say of a federation.

    Attributes:
        title: name of the data.
        names: of the T clients.
        sizes: samples of each client in each part, ``[T, 3]``.
        counts: of labels, ``[T, K]``; None for regression.
        labels: names of the K labels.
        between: for regression: the share of the targets' variance between clients.
        quartiles: for regression: of each client's targets, ``[T, 3]``.
        inputs: shape and type of one input.
        columns: what was made of a table's columns, if it was one.

    """

    title: str
    names: tuple[str, ...]
    sizes: Counts
    inputs: str
    counts: Counts | None = None
    labels: tuple[str, ...] = ()
    between: float | None = None
    quartiles: Floats | None = None
    columns: str | None = None


def describe(dataset: Dataset, title: str) -> Description:
    """Describe a data set's clients; those held out of training are not there yet."""
    federation, encoding = dataset.federation, dataset.encoding
    sizes = np.stack([federation.part(part).sizes.numpy() for part in PARTS], axis=1)
    pool = federation.train.pool
    inputs = f"{list(pool.inputs.shape[1:])} {str(pool.inputs.dtype).removeprefix('torch.')}"
    columns = None if encoding is None else encoding.describe()
    if not pool.targets.is_floating_point():
        known = dataset.label_names or ()
        counts = label_counts(federation, len(known))
        # Some labels are characters, such as a blank.
        shown = (label if label.isprintable() and label.strip() else repr(label) for label in known)
        labels = tuple(shown) or tuple(map(str, range(counts.shape[1])))
        return Description(title, federation.names, sizes, inputs, counts, labels, columns=columns)
    owners = np.concatenate([_owners(federation, part) for part in PARTS])
    targets = torch.cat([federation.part(part).targets for part in PARTS]).double()
    if encoding is not None:
        targets = encoding.decode(targets)
    # Several targets a sample count as one: their mean.
    values = targets.reshape(len(targets), -1).mean(1).numpy()
    ends = np.bincount(owners, minlength=federation.num_clients).cumsum()[:-1]
    own = np.split(values[np.argsort(owners, kind="stable")], ends)
    quartiles = np.array([np.quantile(column, (0.25, 0.5, 0.75)) for column in own])
    between = between_share(values, owners)
    return Description(title, federation.names, sizes, inputs, between=between, quartiles=quartiles, columns=columns)


def _owners(federation: Federation, part: str) -> Counts:
    """Return the position of each sample's client, ``[N]``."""
    return np.repeat(np.arange(federation.num_clients), federation.part(part).sizes.numpy())


def sizes_table(description: Description) -> Table:
    """Return samples in each part and in all: together, and of the least, the median and the largest client."""
    title = Text(f"{description.title}: samples of {len(description.names):,} clients")
    table = _figures_table(title, "part", "all", "least", "median", "largest")
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
    table = _figures_table(f"Labels{more}", "label", "samples", "share in %", "clients")
    for label in order.tolist():
        share = f"{100 * total[label] / total.sum():.1f}"
        table.add_row(Text(description.labels[label]), f"{total[label]:,}", share, f"{(counts[:, label] > 0).sum():,}")
    return table


def _figures_table(title: TextType, name: str, *headings: str) -> Table:
    """Return a table of a column of names and others of figures."""
    table = Table(name, title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def remarks(description: Description) -> list[str]:
    """Return what else there is to say, a line each."""
    lines = [f"Inputs: {description.inputs}."]
    if description.columns:
        lines += [f"Columns: {description.columns}.", "Missing values: none."]
    if description.counts is not None:
        lines.append(
            f"Clients' labels against the pool's, mean over clients: total variation distance "
            f"{total_variation(description.counts):.3f}, Jensen-Shannon divergence "
            f"{jensen_shannon(description.counts):.3f} bits (0: all alike, 1: nothing in common)."
        )
    if description.between is not None:
        lines.append(f"{100 * description.between:.1f}% of the targets' variance lies between clients.")
    return lines


def by_dominant_label(counts: Counts, names: Sequence[str]) -> Counts:
    """Return the order in which clients are drawn: by dominant label, then by its share, then by name. ``[T]``."""
    own = shares(counts)
    return np.lexsort((np.argsort(np.argsort(names)), -own.max(1), own.argmax(1)))


def draw_clients(description: Description, ending: str) -> bytes:
    """Return the picture as PNG or SVG: the same bytes for the same data.

    Above each client's label shares, stacked, clients sorted by dominant label (for regression the quartiles of their
    targets, sorted by the median); below their sizes, part by part.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    # Names are users' own: a dollar is not a formula, and a character that the font lacks is drawn as a box.
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
    _draw_stacked(axes, 100 * shares(counts)[order].T, description.labels, colours)
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of the client's samples in %")
    if num_labels <= _NAMED_LABELS:
        axes.legend(title="label", reverse=True, **_LEGEND)
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
    axes.legend(**_LEGEND)


def _draw_sizes(axes: Axes, description: Description, order: Counts) -> None:
    _draw_stacked(axes, description.sizes[order].T, PARTS, _GREYS)
    axes.set_ylim(0, 1.05 * description.sizes.sum(1).max())
    axes.set_ylabel("samples")
    axes.legend(reverse=True, **_LEGEND)


def _draw_stacked(axes: Axes, values: NDArray[np.number], names: Sequence[str], colours: Sequence[ColorType]) -> None:
    """Stack the clients' ``values``, ``[areas, T]``: thousands of clients draw as fast as five."""
    edges = np.arange(values.shape[1] + 1) - 0.5
    heights = np.vstack([np.zeros(values.shape[1]), values.cumsum(0)])
    steps = np.hstack([heights, heights[:, -1:]])
    for name, low, high, colour in zip(names, steps[:-1], steps[1:], colours, strict=False):
        axes.fill_between(edges, low, high, step="post", color=colour, linewidth=0, label=name)
    if values.shape[1] <= _NAMED_CLIENTS:
        axes.vlines(edges[1:-1], 0, steps.max(), color="white", linewidth=1.5)


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
