"""Scores on the way: against the rounds, against the bytes sent; and what was diagnosed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedem.models.metrics import Metric
from fedem.report.pictures.canvas import INK, Picture, band, legend, logarithmic, panels, widely
from fedem.report.runs import Gathered, Numbers, Run
from fedem.report.studies import TITLES as DIAGNOSED
from fedem.runs.measures import Diagnosis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def against_rounds(data: Gathered) -> Picture | None:
    """Draw score and loss against communication rounds."""
    if not _is_scored(data):
        return None
    shown = _scores(data)
    figure, axes = panels(len(shown))
    for place, (name, label) in zip(axes, shown.items(), strict=True):
        for method, runs in data.runs.items():
            rounds, values = common_curve(runs, name)
            if len(rounds):
                band(place, rounds, _shown(data, name, values), data, method)
        _frame(data, place, name, label, "communication rounds")
        place.set_xlim(left=0)
        place.locator_params(axis="x", integer=True)
    legend(figure, axes[0])
    return Picture("Scores against rounds", _ending(data), figure)


def against_bytes(data: Gathered) -> Picture | None:
    """Draw score and loss against what all clients have sent and received."""
    if not _is_scored(data) or not any(run.sent.any() for runs in data.runs.values() for run in runs):
        return None
    shown = _scores(data)
    figure, axes = panels(len(shown))
    unit, size = _unit(max(run.sent[-1] for runs in data.runs.values() for run in runs))
    for place, (name, label) in zip(axes, shown.items(), strict=True):
        amounts = []
        for method, runs in data.runs.items():
            rounds, values = common_curve(runs, name)
            sent = sent_by(runs, rounds) / size
            # A method that sends nothing has no place on this axis.
            if len(sent) and sent[-1] > 0:
                band(place, sent, _shown(data, name, values), data, method)
                amounts.append(sent)
        widely(place, "x", amounts)
        _frame(data, place, name, label, f"{unit} sent up and down, all clients together")
    legend(figure, axes[0])
    return Picture("Scores against bytes sent", _reaching(data), figure)


def diagnostics(data: Gathered) -> Picture | None:
    """Draw what the convergence theorems speak of, where runs recorded it."""
    found = {
        (name, method): common_curve(runs, name) for name in Diagnosis._fields for method, runs in data.runs.items()
    }
    curves = {key: curve for key, curve in found.items() if curve[1].any()}
    if not curves:
        return None
    names = list(dict.fromkeys(name for name, _ in curves))
    figure, axes = panels(len(names), columns=3, height=2.3)
    for place, name in zip(axes, names, strict=True):
        for (other, method), (rounds, values) in curves.items():
            if other == name:
                # All but f tend to zero; where one has arrived, a logarithmic axis has no place for it.
                kept = (values > 0).all(0) | (name == "objective")
                band(place, rounds[kept], values[:, kept], data, method)
        if name != "objective":
            logarithmic(place, "y")
        place.set(title=DIAGNOSED[name], xlabel="communication rounds")
    legend(figure, axes[0])
    method = next(method for _, method in curves)
    sentence = f"{data.name(method)} was measured after {len(curves[names[0], method][0])} rounds."
    if (falling := curves.get(("gradient_norm2", method))) is not None:
        first, last = falling[1].mean(0)[[0, -1]]
        sentence = f"The squared gradient of {data.name(method)} goes from {first:.2g} to {last:.2g}."
    return Picture("Diagnostics of convergence", sentence, figure)


def common_curve(runs: list[Run], name: str) -> tuple[Numbers, Numbers]:
    """Return the rounds after which every seed knows the figure, and its values, ``[n]`` and ``[seeds, n]``."""
    curves = [dict(zip(*map(np.ndarray.tolist, run.curve(name)), strict=True)) for run in runs]
    rounds = [number for number in curves[0] if all(number in curve for curve in curves)]
    return np.array(rounds, dtype=np.float64), np.array(
        [[curve[number] for number in rounds] for curve in curves], dtype=np.float64
    ).reshape(len(runs), len(rounds))


def sent_by(runs: list[Run], rounds: Numbers) -> Numbers:
    """Return the bytes sent by the end of each of ``rounds`` ``[n]``, the mean over seeds."""
    found = []
    for run in runs:
        recorded = np.array([line["round"] for line in run.history])
        found.append(run.sent[np.searchsorted(recorded, rounds)])
    return np.asarray(np.mean(found, axis=0), dtype=np.float64)


def _is_scored(data: Gathered) -> bool:
    return any(len(common_curve(runs, data.score)[0]) for runs in data.runs.values())


def _scores(data: Gathered) -> dict[str, str]:
    further = {name: f"test {metric.unit}" for name, metric in data.further.items()}
    return {data.score: data.label, "test_loss": "test loss in nats", **further}


def _shown(data: Gathered, name: str, values: Numbers) -> Numbers:
    metric = _metric(data, name)
    return values if metric is None else metric.scale * values


def _metric(data: Gathered, name: str) -> Metric | None:
    """Return the metric of one of :func:`_scores`; None for the loss."""
    return data.metric if name == data.score else data.further.get(name)


def _frame(data: Gathered, axes: Axes, name: str, label: str, below: str) -> None:
    oracle = data.comparison.oracle.get(name)
    if oracle is not None and oracle.mean is not None:
        best = float(_shown(data, name, np.array(oracle.mean)))
        axes.axhline(best, color=INK, linewidth=1, linestyle=(0, (2, 3)), label="oracle")
    axes.set(xlabel=below, ylabel=label)
    metric = _metric(data, name)
    if metric is None or not metric.larger_is_better:
        widely(axes, "y", [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])


def _ending(data: Gathered) -> str:
    finals = {data.name(row.method): row.figures[data.score].mean for row in data.comparison.rows}
    known = [(title, value) for title, value in finals.items() if value is not None]
    if not known:
        return "No method ends with a test score in every seed."
    (best, top), (worst, bottom) = known[0], known[-1]
    sentence = f"{best} ends at {data.in_words(top)}"
    if len(known) > 1:
        sentence += f", {data.apart(top, bottom)} {worst}"
    oracle = data.comparison.oracle.get(data.score)
    if oracle is not None and oracle.mean is not None:
        sentence += f"; the oracle has {data.in_words(oracle.mean)}"
    return sentence + "."


def _reaching(data: Gathered) -> str:
    """Say how much each method sends until it has what the worst one ends with."""
    finals = [row.figures[data.score].mean for row in data.comparison.rows]
    known = [value for value in finals if value is not None]
    if not known:
        return "No method ends with a test score in every seed."
    goal, reaching = known[-1], []
    for method, runs in data.runs.items():
        rounds, values = common_curve(runs, data.score)
        means = values.mean(0)
        # Means of the same numbers, taken in two ways, may differ by a rounding.
        reached = (
            np.isclose(means, goal) | (means > goal if data.metric.larger_is_better else means < goal)
        ).nonzero()[0]
        if len(reached):
            reaching.append(f"{data.name(method)} has sent {_amount(sent_by(runs, rounds)[reached[0]])}")
    which = "its final score" if len(data.runs) == 1 else "the worst of the final scores"
    return f"On reaching {data.in_words(goal)}, {which}, for the first time, {_listed(reaching)}."


def _unit(amount: float) -> tuple[str, float]:
    """Return the largest unit that is not larger than an amount of bytes."""
    return next(((unit, size) for unit, size in _UNITS.items() if amount >= size), ("kB", _UNITS["kB"]))


def _amount(sent: float) -> str:
    unit, size = _unit(sent)
    return f"{sent / size:.3g} {unit}" if sent else "nothing"


def _listed(parts: list[str], most: int = 4) -> str:
    # To say that there is one more takes as long as to say what it is.
    rest = parts[most:] if len(parts) <= most + 1 else [f"{len(parts) - most} further methods are in the picture"]
    kept = parts[:most] + rest
    return kept[0] if len(kept) == 1 else f"{', '.join(kept[:-1])} and {kept[-1]}"
