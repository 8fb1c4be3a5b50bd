"""How clients fare one by one: their scores, their sizes, and who gains against training alone or one model for all."""

from collections.abc import Iterable

import numpy as np

from fedem.core.errors import counted
from fedem.report.answer import PLAIN
from fedem.report.pictures.canvas import INK, MOST_DOTS, Picture, band, dots, legend, outline, panels, thinned, widely
from fedem.report.runs import Gathered, Numbers, Run

_BINS, _GROUPS = 30, 5


def sorted_scores(data: Gathered) -> Picture | None:
    """Draw the clients' scores from the worst to the best, the bottom decile marked."""
    if not (methods := _scored(data)):
        return None
    figure, (axes,) = panels(1, height=3.8)
    marks = _deciles(data, methods)
    for method in methods:
        places, curves = sorted_curves(data, method)
        band(axes, places, data.metric.scale * curves, data, method)
        if method in marks:
            how = {"color": data.looks[method]["color"], "markersize": 7, "fillstyle": "none"}
            axes.plot(decile_place(data, method), data.metric.scale * marks[method], "o", **how)
    axes.set(xlabel="clients, from the worst, in %", ylabel=data.label, xlim=(0, 100))
    if not data.metric.larger_is_better:
        widely(axes, "y")
    axes.axvline(10, color=INK, linewidth=0.8, linestyle=(0, (2, 3)), label="bottom decile")
    legend(figure, axes)
    sentence = "Every line goes from the worst client to the best."
    if marks:
        order = sorted(marks, key=marks.__getitem__, reverse=data.metric.larger_is_better)
        best, known = order[0], data.best_of("fedavg")
        worst = known if known in order[1:] else order[-1]
        beside = "" if best == worst else f", {data.apart(marks[best], marks[worst])} {data.name(worst)}'s"
        sentence = f"{data.name(best)}'s bottom decile is {data.in_words(marks[best])}{beside}."
    return Picture("Scores of the clients, sorted", sentence, figure)


def histogram(data: Gathered) -> Picture | None:
    """Draw how many clients have which score, all seeds together."""
    if not (methods := _scored(data)):
        return None
    scores = {name: np.concatenate([_known(run.clients.scores) for run in data.runs[name]]) for name in methods}
    scale = data.metric.scale
    edges = np.histogram_bin_edges(scale * np.concatenate(list(scores.values())), _BINS)
    figure, (axes,) = panels(1, height=3.4)
    for method, values in scores.items():
        outline(axes, scale * values, edges, data, method)
    for method, mark in _deciles(data, methods).items():
        axes.plot(scale * mark, 0, "^", color=data.looks[method]["color"], clip_on=False, zorder=3)
    axes.set(xlabel=f"{data.label} of a client (triangles: bottom deciles)")
    legend(figure, axes)
    halves = []
    for method in dict.fromkeys((methods[0], methods[-1])):
        low, high = np.quantile(scores[method], (0.25, 0.75))
        halves.append(f"{data.name(method)}'s from {data.in_words(low)} to {data.in_words(high)}")
    sentence = f"The middle half of the clients' scores: {' and '.join(halves)}."
    return Picture("Histogram of the clients' scores", sentence, figure)


def sizes(data: Gathered) -> Picture | None:
    """Draw how many training samples clients have, and how clients of each size fare."""
    # All methods know the same clients of a seed.
    by_seed = {run.seed: run.clients.sizes for runs in data.runs.values() for run in runs}
    if not len(counts := _known(np.concatenate(list(by_seed.values())))):
        return None
    methods = _scored(data)
    figure, axes = panels(2 if methods else 1)
    span = np.geomspace(max(1.0, counts.min()), max(2.0, counts.max() + 1), _BINS)
    axes[0].stairs(*np.histogram(np.maximum(counts, 1), span), fill=True, color=INK, alpha=0.55)
    widely(axes[0], "x", [counts])
    axes[0].set(xlabel="training samples of a client", ylabel="clients, all seeds")
    for method in methods:
        places, curves = by_size(data, method)
        band(axes[1], places, data.metric.scale * curves, data, method)
    if methods:
        widely(axes[1], "x", [counts])
        axes[1].set(xlabel="training samples (fifths of the clients)", ylabel=f"mean {data.label}")
        if not data.metric.larger_is_better:
            widely(axes[1], "y")
        legend(figure, axes[1])
    low, middle, high = (int(value) for value in np.quantile(counts, (0, 0.5, 1)))
    largest = 100 * np.sort(counts)[-max(1, len(counts) // 10) :].sum() / counts.sum()
    sentence = f"Clients have {low:,} to {high:,} training samples, {middle:,} in the median; "
    sentence += f"the largest tenth of them holds {largest:.0f} % of all."
    return Picture("Sizes of the clients", sentence, figure)


def sorted_curves(data: Gathered, method: str) -> tuple[Numbers, Numbers]:
    """Return places from 0 to 100 and each seed's scores there, the worst first: ``[n]`` and ``[seeds, n]``."""
    seeds = [np.sort(_known(run.clients.scores)) for run in data.runs[method]]
    if not data.metric.larger_is_better:
        seeds = [values[::-1] for values in seeds]
    places = np.linspace(0, 100, len(thinned(max(map(len, seeds)))))
    # Seeds may have different numbers of clients.
    curves = [np.interp(places, np.linspace(0, 100, len(values)), values) for values in seeds]
    return places, np.array(curves)


def decile_place(data: Gathered, method: str) -> float:
    """Return where the client of the bottom decile stands among places from 0 to 100.

    It is the ceil(T/10)-th worst; where the decile leaves clients out, the next to that place with its score.
    """
    sign, places = 1 if data.metric.larger_is_better else -1, []
    for run in data.runs[method]:
        scores, decile = np.sort(sign * _known(run.clients.scores)), sign * run.summary["bottom_decile"]
        first, beyond = np.searchsorted(scores, decile, "left"), np.searchsorted(scores, decile, "right")
        rank = np.clip(np.ceil(len(scores) / 10) - 1, first, beyond - 1)
        places.append(100 * rank / max(1, len(scores) - 1))
    return float(np.mean(places))


def by_size(data: Gathered, method: str) -> tuple[Numbers, Numbers]:
    """Return the median sizes of fifths of the clients, small to large, and their mean scores, seed by seed."""
    places, curves = [], []
    for run in data.runs[method]:
        scores, numbers = run.clients.scores, run.clients.sizes
        order = np.argsort(numbers, kind="stable")
        groups = [group for group in np.array_split(order[np.isfinite(scores[order])], _GROUPS) if len(group)]
        places.append([np.median(numbers[group]) for group in groups])
        curves.append([scores[group].mean() for group in groups])
    # A seed with fewer than five clients that were scored has fewer groups.
    count = min(map(len, places))
    kept = np.array([row[:count] for row in places])
    return np.maximum(kept.mean(0), 1.0), np.array([row[:count] for row in curves])


def _known(values: Numbers) -> Numbers:
    return values[np.isfinite(values)]


def _scored(data: Gathered) -> list[str]:
    return [name for name, runs in data.runs.items() if all(len(_known(run.clients.scores)) for run in runs)]


def _deciles(data: Gathered, methods: list[str]) -> dict[str, float]:
    """Return the bottom deciles of the methods that have one, means over seeds."""
    means = {row.method: row.figures["bottom_decile"].mean for row in data.comparison.rows}
    return {method: mean for method in methods if (mean := means[method]) is not None}


def against_baselines(data: Gathered) -> Picture | None:
    """Draw each client's score beside its score with a baseline, and the sorted differences."""
    if (method := subject(data)) is None:
        return None
    baselines = [name for name in map(data.best_of, PLAIN) if name is not None]
    if not (found := {name: both for name in baselines if (both := pairs(data, name, method)).size}):
        return None
    metric, title, colour = data.metric, data.titles[method], data.looks[method]["color"]
    sign = 1 if metric.larger_is_better else -1
    unit = f"in points of {metric.title}" if metric.in_percent else f"in {metric.title.removeprefix('mean ')}"
    figure, axes = panels(2 * len(found))
    sentences = []
    for left, right, (name, (before, after)) in zip(axes[::2], axes[1::2], found.items(), strict=True):
        both = metric.scale * np.stack((before, after), 1)
        shown = thinned(len(both), MOST_DOTS)
        dots(left, both[shown], colour)
        if len(shown) < len(both):
            left.set_title(f"{len(shown):,} of {len(both):,} clients")
        ends = [both.min(), both.max()]
        left.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (2, 3)))
        left.set(xlabel=f"{data.titles[name]}: {data.label}", ylabel=f"{title}: {data.label}")
        if not metric.larger_is_better:
            for axis in "xy":
                widely(left, axis, [both.ravel()])
        change = after - before
        shown = thinned(len(change))
        places, ordered = 100 * shown / max(1, len(change) - 1), metric.scale * np.sort(change)[shown]
        right.plot(places, ordered, color=colour)
        # Where a larger score is worse, clients gain below zero.
        right.fill_between(places, ordered, 0, where=sign * ordered > 0, color=colour, alpha=0.25, linewidth=0)
        right.axhline(0, color=INK, linewidth=0.9)
        right.set(xlabel="clients, sorted, in %", ylabel=f"{title} minus {data.titles[name]}\n{unit}", xlim=(0, 100))
        better = f"for {(sign * change > 0).sum():,} of {counted(len(change), 'client')}"
        amount = metric.text(float(np.median(change)), "+.1f", "+.3g") + (" points" if metric.in_percent else "")
        sentences.append(f"{data.name(method)} is better than {data.name(name)} {better}, {amount} in the median.")
    return Picture("Who gains and who loses", " ".join(sentences), figure)


def subject(data: Gathered) -> str | None:
    """Return whose gains are looked at: FedEM's, else those of the best method that is not a baseline."""
    others = (method for method, runs in data.runs.items() if runs[0].method not in PLAIN)
    return data.best_of("fedem") or next(others, None)


def pairs(data: Gathered, baseline: str, method: str) -> Numbers:
    """Return the scores of the clients that both methods know, for the seeds that both have, ``[2, n]``."""
    known = {(run.seed, name): score for run in data.runs[baseline] for name, score in _by_name(run)}
    both = [(known.get((run.seed, name), np.nan), score) for run in data.runs[method] for name, score in _by_name(run)]
    found = np.array(both, dtype=np.float64).reshape(-1, 2)
    return found[np.isfinite(found).all(1)].T


def _by_name(run: Run) -> Iterable[tuple[str, float]]:
    return zip(run.clients.names, run.clients.scores, strict=True)
