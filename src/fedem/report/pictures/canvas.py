"""What all pictures have in common: ink and colours, which a page can replace for the dark, frames, looks, files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedem.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedem.report.runs import Gathered, Numbers

INK, GRID = "#20262c", "#dde2e7"
# As many colours as there are methods, as far from each other as can be, also for eyes that take red for green. Strokes
# and markers alone distinguish as many lines, for the grey of paper.
COLOURS = (
    *("#0b5fa5", "#d95f02", "#1b8a5a", "#c2185b", "#6a4fb3", "#8c5a2b", "#17a2b8", "#b8a000", "#5b6770", "#e06fb5"),
    *("#c600fc", "#630063", "#0000b4", "#005100", "#9090fc", "#1bbd6c", "#5100e1", "#a27e87", "#990000", "#990087"),
    *("#5a363f", "#ab5ac6", "#fc48ea", "#ea9063", "#2451d8", "#5a9924", "#243f1b", "#d88790", "#d8903f"),
)
_ALIKE = 6  # lines one after the other that have the same stroke
_STROKES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2, 3, 2)))
_MARKERS = "os^DvPX<>p*h"
MOST_POINTS, MOST_DOTS = 200, 1000
_WIDTH, _NAMES, _FACTOR, _LEAST = 7.0, 4, 10, 0.7
_BARE = {"Date": None, "Creator": None, "Format": None, "Type": None}
_UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}
# How files are written, by ending; a date in them would make each a new one.
FORMATS: dict[str, Any] = {"svg": {"metadata": _BARE}, "png": {"dpi": 160}, "pdf": {"metadata": {"CreationDate": None}}}
SETTINGS: dict[str, Any] = {"font.size": 9, "svg.hashsalt": "fedem"}
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


class Picture(NamedTuple):
    """A figure, what it is called and what there is to see."""

    title: str
    sentence: str
    figure: Figure


Painter = Callable[["Gathered"], Picture | None]  # None where there is nothing of the kind to be drawn


def look(name: str, names: Iterable[str] = METHODS) -> dict[str, Any]:
    """Return the colour, line and marker that ``name`` has among ``names``; of a method, the same in every picture."""
    place = list(names).index(name)
    # Where colours come again, they come with another stroke.
    stroke = _STROKES[(place // _ALIKE + place // len(COLOURS)) % len(_STROKES)]
    marker = _MARKERS[place % len(_MARKERS)]
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": stroke, "marker": marker, "linewidth": 1.6}


def bytes_unit(amount: float) -> tuple[str, int]:
    """Return the largest unit that is not larger than an amount of bytes, at least kB, and its size."""
    return next(((unit, size) for unit, size in _UNITS.items() if amount >= size), ("kB", _UNITS["kB"]))


def saved(figure: Figure, ending: str, **how: Any) -> bytes:
    """Write a figure as it is; see :func:`alone`."""
    content = io.BytesIO()
    figure.savefig(content, format=ending, bbox_inches="tight", **how)
    return content.getvalue()


def inked() -> AbstractContextManager[None]:
    """Draw and write in the pictures' style."""
    from matplotlib import style

    colours = {"grid.color": GRID, **dict.fromkeys(_INKED, INK)}
    return style.context(["default", f"{__package__}.fedem", SETTINGS, colours])


def paint(painter: Painter, data: Gathered) -> Picture | None:
    """Draw a picture, which then is to be written by :func:`inline` or :func:`alone`."""
    with inked():
        picture = painter(data)
    return None if picture is None else picture._replace(title=data.titled(picture.title))


def inline(picture: Picture, name: str) -> str:
    """Return an SVG element for a page: colours are the page's, and every id starts with ``name``."""
    with inked():
        text = saved(picture.figure, "svg", transparent=True, metadata=_BARE).decode()
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    # The page chooses the size: on a phone it shrinks a picture as long as its letters stay legible.
    width = re.search(r'(\swidth="([\d.]+)pt")\sheight="[^"]*"', text)
    assert width is not None
    text = text.replace(width[0], f'{width[1]} style="min-width: {_LEAST * float(width[2]):.0f}pt"', 1)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    variables = {colour: f"var(--colour-{number})" for number, colour in enumerate(COLOURS)}
    for colour, variable in {INK: "currentColor", GRID: "var(--grid)", **variables}.items():
        text = text.replace(colour, variable)
    return text.replace("<svg", f'<svg role="img" aria-labelledby="{name}-title"', 1)


def alone(picture: Picture, ending: str) -> bytes:
    """Return a file of its own: the picture under its title, on white; the same bytes for the same figures."""
    with inked():
        picture.figure.suptitle(picture.title, x=0.01, ha="left", fontsize=11)
        return saved(picture.figure, ending, facecolor="white", **FORMATS[ending])


def panels(count: int, columns: int = 2, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels, ``columns`` of them in a row."""
    from matplotlib.figure import Figure

    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(_WIDTH, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def legend(figure: Figure, axes: Axes) -> None:
    """Name the lines of one panel below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    # Many names must not take the panels' room.
    figure.set_figheight(figure.get_figheight() + 0.19 * ((len(labels) - 1) // _NAMES))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(_NAMES, len(labels)), handlelength=2.6)


def band(axes: Axes, places: Numbers, curves: Numbers, data: Gathered, method: str) -> None:
    """Draw the mean of a method's ``curves`` ``[seeds, n]`` in a band from the lowest seed to the highest."""
    keep = thinned(len(places))
    places, curves, how = places[keep], curves[:, keep], data.looks[method]
    every = max(1, len(places) // 6)
    axes.plot(places, curves.mean(0), label=data.titles[method], markevery=every, markersize=3.5, **how)
    if len(curves) > 1:
        axes.fill_between(places, curves.min(0), curves.max(0), color=how["color"], alpha=0.18, linewidth=0)


def outline(axes: Axes, values: Numbers, edges: Numbers, data: Gathered, method: str) -> None:
    """Draw which share of the clients has which of the ``values``."""
    counts, _ = np.histogram(values, edges)
    how = {"label": data.titles[method], **{key: data.looks[method][key] for key in ("color", "linestyle")}}
    axes.stairs(100 * counts / len(values), edges, **how)
    axes.set(ylabel="share of clients in %")
    axes.set_ylim(bottom=0)


def dots(axes: Axes, places: Numbers, colour: str) -> None:
    """Draw clients as dots at ``places`` ``[n, 2]``, not as an image, so that a page can choose the colour."""
    axes.plot(*places.T, "o", color=colour, markersize=3.2, markeredgewidth=0, alpha=0.55)


def thinned(count: int, most: int = MOST_POINTS) -> NDArray[np.int64]:
    """Return positions among ``count``, both ends included, no more than a picture can show."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def widely(axes: Axes, which: str, arrays: Sequence[Numbers] | None = None) -> None:
    """Make an axis logarithmic where positive values, by default those of all lines, differ by large factors."""
    found = [getattr(line, f"get_{which}data")() for line in axes.lines] if arrays is None else arrays
    values = np.concatenate([np.zeros(0), *found])
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() / values.min() >= _FACTOR:
        logarithmic(axes, which)


def logarithmic(axes: Axes, which: str) -> None:
    """Make an axis logarithmic, with plain numbers beside it."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,), numticks=6))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
