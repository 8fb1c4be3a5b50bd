"""Pictures of a declared experiment: its figures along one of its axes, or along the rounds."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedem.report.pictures.canvas import Picture, inked, legend, look, panels, thinned, widely
from fedem.report.pictures.curves import recorded
from fedem.report.studies import figure_heading, over_seeds
from fedem.studies.board import DATA
from fedem.studies.experiments import SLASH, Experiment, Line, in_percent
from fedem.studies.sweep import Entry, Spread

_TICKS = 26  # letters below an axis, at most
# Points (place, mean, deviation) of a line, by panel (data set and figure) and then by the line's name.
_Lines = dict[tuple[str, str], dict[str, list[tuple[float, float, float]]]]


def draw_experiment(experiment: Experiment, lines: Sequence[Line], entries: Sequence[Entry]) -> Picture | None:
    """Draw the figures along what the experiment names, in bands of a standard deviation; None where none is known.

    Each data set and figure has a panel, each choice on the other axes a line. Along the rounds they are of the runs
    that were scored on the way.
    """
    places = list(experiment.axes.get(experiment.along, ()))
    curves, seeds = _along_axis(experiment, lines) if places else _along_rounds(experiment, entries)
    if not curves:
        return None
    names = list(dict.fromkeys(name for own in curves.values() for name in own))
    with inked():
        drawn, panes = panels(len(curves))
        for axes, ((panel, figure), own) in zip(panes, curves.items(), strict=True):
            for name, points in own.items():
                along, means, widths = np.array(points)[thinned(len(points))].T
                how = look(name, names) | {"markersize": 4, "markevery": 1 if places else max(1, len(along) // 6)}
                axes.plot(along, means, label=name, **how)
                axes.fill_between(along, means - widths, means + widths, color=how["color"], alpha=0.15, linewidth=0)
            if places:
                # In half a row's width, longer ones would run into each other.
                axes.set_xticks(range(len(places)), places, rotation=45 if len("".join(places)) > _TICKS else 0)
            else:
                axes.set_xlim(left=0)
                if not in_percent(figure):
                    widely(axes, "y")
            below = experiment.along if places else "communication rounds"
            axes.set(title=panel, xlabel=below, ylabel=figure_heading(figure))
        if len(names) > 1:
            legend(drawn, panes[0])
    return Picture(f"{experiment.title}\n{over_seeds(sorted(seeds))}", "", drawn)


def _along_axis(experiment: Experiment, lines: Sequence[Line]) -> tuple[_Lines, set[int]]:
    places, curves = list(experiment.axes[experiment.along]), _Lines()
    for line in lines:
        labels = dict(line.labels)
        where, panel = places.index(labels.pop(experiment.along)), labels.pop(DATA, "")
        for figure, spread in line.ours.items():
            _add(curves, (panel, figure), labels, where, spread)
    return curves, {seed for line in lines for seed in line.seeds}


def _along_rounds(experiment: Experiment, entries: Sequence[Entry]) -> tuple[_Lines, set[int]]:
    """Take the rounds after which all seeds were scored that were on the way at all."""
    by_choice: dict[tuple[str, ...], list[tuple[Entry, list[dict[float, float]]]]] = {}
    for entry in entries:
        if entry.is_complete and entry.failure is None:
            history = entry.folder.metrics()
            found = [dict(recorded(history, figure).tolist()) for figure in experiment.figures]
            if len(found[0]) > 1:
                by_choice.setdefault(tuple(entry.labels.values()), []).append((entry, found))
    curves, seeds = _Lines(), set[int]()
    for runs in by_choice.values():
        labels = dict(runs[0][0].labels)
        panel = labels.pop(DATA, "")
        seeds |= {entry.seed for entry, _ in runs}
        for figure, own in zip(experiment.figures, zip(*(found for _, found in runs), strict=True), strict=True):
            for place in sorted(set.intersection(*map(set, own))):
                _add(curves, (panel, figure), labels, place, Spread.of(curve[place] for curve in own))
    return curves, seeds


def _add(curves: _Lines, panel: tuple[str, str], labels: Mapping[str, str], place: float, spread: Spread) -> None:
    if spread.mean is not None:
        scale = 100 if in_percent(panel[1]) else 1
        point = place, scale * spread.mean, scale * (spread.deviation or 0)
        curves.setdefault(panel, {}).setdefault(SLASH.join(labels.values()), []).append(point)
