"""Which clients gain, and which lose, against training alone and against one model for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedem.report.gathered import Gathered
from fedem.report.pictures.canvas import INK, MOST_DOTS, Picture, dots, panels, thinned, widely
from fedem.report.reading import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASELINES = ("local", "fedavg")


class Pairs(NamedTuple):
    """The scores of the same clients, those of all seeds one after the other, ``[n]`` each."""

    before: Numbers
    after: Numbers


def against_baselines(data: Gathered) -> Picture | None:
    """Draw each client's score beside its score with a baseline, and the sorted differences."""
    method = subject(data)
    if method is None:
        return None
    baselines = [name for name in map(data.best_of, _BASELINES) if name is not None]
    found = {name: entry for name in baselines if len((entry := pairs(data, name, method)).before)}
    if not found:
        return None
    title = data.titles[method]
    figure, axes = panels(2 * len(found))
    told = []
    for number, (name, entry) in enumerate(found.items()):
        before, after = data.scaled(entry.before), data.scaled(entry.after)
        left, right = axes[2 * number : 2 * number + 2]
        colour = data.looks[method]["color"]
        shown = thinned(len(before), MOST_DOTS)
        dots(left, np.stack([before, after], 1)[shown], colour)
        if len(shown) < len(before):
            left.set_title(f"{len(shown):,} of {len(before):,} clients")
        ends = [min(before.min(), after.min()), max(before.max(), after.max())]
        left.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (2, 3)))
        left.set(xlabel=f"{data.titles[name]}: {data.label}", ylabel=f"{title}: {data.label}")
        if not data.accuracy:
            for axis in "xy":
                widely(left, axis, [before, after])
        _differences(right, after - before, colour, data)
        right.set(xlabel="clients, sorted, in %", ylabel=f"{title} minus {data.titles[name]}{_unit(data)}")
        told.append(_sentence(data, entry, data.name(method), data.name(name)))
    return Picture("Who gains and who loses", " ".join(told), figure)


def subject(data: Gathered) -> str | None:
    """Return whose gains are looked at: FedEM's, else those of the best method that is no baseline."""
    others = (method for method, runs in data.runs.items() if runs[0].method not in _BASELINES)
    return data.best_of("fedem") or next(others, None)


def pairs(data: Gathered, baseline: str, method: str) -> Pairs:
    """Return the scores of the clients that both methods know, for the seeds that both have."""
    before: list[float] = []
    after: list[float] = []
    seeds = {run.seed: run.clients for run in data.runs[baseline]}
    for second in data.runs[method]:
        if (first := seeds.get(second.seed)) is None:
            continue
        known = dict(zip(first.names, first.scores.tolist(), strict=True))
        before += [known.get(name, np.nan) for name in second.clients.names]
        after += second.clients.scores.tolist()
    both = np.array([before, after], dtype=np.float64)
    return Pairs(*both[:, np.isfinite(both).all(0)])


def _differences(axes: Axes, differences: Numbers, colour: str, data: Gathered) -> None:
    shown = thinned(len(differences))
    places, ordered = 100 * shown / max(1, len(differences) - 1), np.sort(differences)[shown]
    axes.plot(places, ordered, color=colour)
    # Where a larger score is worse, clients gain below zero.
    better = ordered > 0 if data.accuracy else ordered < 0
    axes.fill_between(places, ordered, 0, where=better, color=colour, alpha=0.25, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.set_xlim(0, 100)


def _unit(data: Gathered) -> str:
    return "\nin points of accuracy" if data.accuracy else "\nin squared error"


def _sentence(data: Gathered, entry: Pairs, title: str, baseline: str) -> str:
    change = entry.after - entry.before
    better = int((change > 0 if data.accuracy else change < 0).sum())
    middle = float(np.median(change))
    amount = f"{100 * middle:+.1f} points" if data.accuracy else f"{middle:+.3g}"
    return f"{title} is better than {baseline} for {better:,} of {len(change):,} clients, {amount} in the median."
