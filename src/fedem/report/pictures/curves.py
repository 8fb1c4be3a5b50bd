"""Scores on the way: against the rounds, against the bytes sent; and what was diagnosed."""

from collections.abc import Callable, Sequence

import numpy as np

from fedem.core.errors import counted
from fedem.models.metrics import Metric
from fedem.report.pictures.canvas import INK, Picture, band, bytes_unit, legend, logarithmic, panels, widely
from fedem.report.runs import Gathered, Numbers, Run
from fedem.runs.evaluate import Record

DIAGNOSED = {
    "objective": "objective f",
    "gradient_norm2": "|grad f|^2",
    "improvement": "gain of the weights",
    "weights_kl": "KL of the weights",
    "consensus": "distance to consensus",
    "dissimilarity": "mean |grad f_t|^2",
}
_LISTED = 4
_UNSCORED = "No method ends with a test score in every seed."


def against_rounds(data: Gathered) -> Picture | None:
    """Draw score and loss against communication rounds."""
    return _against(data, "Scores against rounds", _ending, "communication rounds")


def against_bytes(data: Gathered) -> Picture | None:
    """Draw score and loss against what all clients have sent and received."""
    if not (most := max((run.sent[-1] for runs in data.runs.values() for run in runs if run.history), default=0)):
        return None
    unit, size = bytes_unit(most)
    below = f"{unit} sent up and down, all clients together"
    return _against(data, "Scores against bytes sent", _reaching, below, size)


def _against(data: Gathered, title: str, say: Callable[[Gathered], str], below: str, size: float = 0) -> Picture | None:
    """Draw every score against the rounds or, in units of ``size``, against the bytes sent; None without scores."""
    if not any(len(common_curve(runs, data.score)[0]) for runs in data.runs.values()):
        return None
    shown: dict[str, Metric | None] = {data.score: data.metric, "test_loss": None, **data.metrics}
    figure, places = panels(len(shown))
    for axes, (name, metric) in zip(places, shown.items(), strict=True):
        scale = metric.scale if metric else 1
        for method, runs in data.runs.items():
            rounds, values = common_curve(runs, name)
            if not len(rounds):  # of its rounds nothing is kept
                continue
            along = sent_by(runs, rounds) / size if size else rounds
            # A method that sends nothing has no place on an axis of bytes.
            if along[-1] > 0:
                band(axes, along, scale * values, data, method)
        if size:
            widely(axes, "x")
        else:
            axes.set_xlim(left=0)
            axes.locator_params(axis="x", integer=True)
        oracle = data.comparison.oracle.get(name)
        if oracle is not None and oracle.mean is not None:
            axes.axhline(scale * oracle.mean, color=INK, linewidth=1, linestyle=(0, (2, 3)), label="oracle")
        axes.set(xlabel=below, ylabel=f"test {metric.unit}" if metric else "test loss in nats")
        if metric is None or not metric.larger_is_better:
            widely(axes, "y")
    legend(figure, places[0])
    return Picture(title, say(data), figure)


def diagnostics(data: Gathered) -> Picture | None:
    """Draw what the convergence theorems speak of, where runs recorded it."""
    found = {(name, method): common_curve(runs, name) for name in DIAGNOSED for method, runs in data.runs.items()}
    if not (curves := {key: curve for key, curve in found.items() if curve[1].any()}):
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
    sentence = f"{data.name(method)} was measured after {counted(len(curves[names[0], method][0]), 'round')}."
    if (falling := curves.get(("gradient_norm2", method))) is not None:
        first, last = falling[1].mean(0)[[0, -1]]
        sentence = f"The squared gradient of {data.name(method)} goes from {first:.2g} to {last:.2g}."
    return Picture("Diagnostics of convergence", sentence, figure)


def recorded(history: Sequence[Record], name: str) -> Numbers:
    """Return rounds and the figure called ``name`` after them, where it is known and finite, ``[n, 2]``."""
    known = [(line["round"], line[name]) for line in history if line.get(name) is not None]
    found = np.array(known, dtype=np.float64).reshape(-1, 2)
    return found[np.isfinite(found[:, 1])]


def common_curve(runs: list[Run], name: str) -> tuple[Numbers, Numbers]:
    """Return the rounds after which every seed knows the figure, and its values, ``[n]`` and ``[seeds, n]``.

    Seeds that know it after the last round alone are left out where others know it on the way.
    """
    curves = [dict(recorded(run.history, name).tolist()) for run in runs]
    curves = [curve for curve in curves if len(curve) > 1] or curves
    rounds = [number for number in curves[0] if all(number in curve for curve in curves)]
    values = np.array([[curve[number] for number in rounds] for curve in curves], dtype=np.float64)
    return np.array(rounds, dtype=np.float64), values.reshape(len(curves), len(rounds))


def sent_by(runs: list[Run], rounds: Numbers) -> Numbers:
    """Return the bytes sent by the end of each of ``rounds`` ``[n]``, the mean over seeds whose rounds are kept."""
    known = [(run.sent, np.array([line["round"] for line in run.history])) for run in runs if run.history]
    found = [sent[np.searchsorted(numbers, rounds)] for sent, numbers in known]
    return np.mean(found, axis=0)


def _finals(data: Gathered) -> list[tuple[str, float]]:
    """Return the scores that methods end with in every seed, the best first."""
    means = ((row.method, row.figures[data.score].mean) for row in data.comparison.rows)
    return [(method, mean) for method, mean in means if mean is not None]


def _ending(data: Gathered) -> str:
    if not (finals := _finals(data)):
        return _UNSCORED
    (best, top), (worst, bottom) = finals[0], finals[-1]
    sentence = f"{data.name(best)} ends at {data.in_words(top)}"
    if len(finals) > 1:
        sentence += f", {data.apart(top, bottom)} {data.name(worst)}"
    oracle = data.comparison.oracle.get(data.score)
    if oracle is not None and oracle.mean is not None:
        sentence += f"; the oracle has {data.in_words(oracle.mean)}"
    return sentence + "."


def _reaching(data: Gathered) -> str:
    """Say how much each method sends until it has what the worst one ends with."""
    curves = {method: common_curve(runs, data.score) for method, runs in data.runs.items()}
    # Of the seeds that are drawn: others may end elsewhere.
    ends = [curves[method][1].mean(0)[-1] for method, _ in _finals(data) if len(curves[method][0])]
    if not ends:
        return _UNSCORED
    goal, reaching = min(ends) if data.metric.larger_is_better else max(ends), []
    for method, (rounds, values) in curves.items():
        means = values.mean(0)
        reached = means >= goal if data.metric.larger_is_better else means <= goal
        if reached.any():
            unit, size = bytes_unit(sent := sent_by(data.runs[method], rounds)[reached.argmax()])
            reaching.append(f"{data.name(method)} has sent {f'{sent / size:.3g} {unit}' if sent else 'nothing'}")
    which = "its final score" if len(data.runs) == 1 else "the worst of the final scores"
    if len(reaching) > _LISTED + 1:  # to say that there is one more takes as long as to say what it is
        reaching[_LISTED:] = [f"{len(reaching) - _LISTED} further methods are in the picture"]
    *kept, last = reaching
    listed = f"{', '.join(kept)} and {last}" if kept else last
    return f"On reaching {data.in_words(goal)}, {which}, for the first time, {listed}."
