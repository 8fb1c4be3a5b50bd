"""The paper's convergence theorems, put to the test: runs of K rounds at the learning rate a0 / sqrt(K), for several K.

With a server the theorem bounds the means over the K rounds of |grad f|^2 by O(K^-1/2) and of the mixture weights' gain
by O(K^-3/4); over a graph those of |grad f|^2 by O(K^-1/2), of the weights' KL divergence by O(K^-1) and of the
distance to consensus by O(K^-1/2). In a picture with two logarithmic axes such a bound is a slope, and a measured slope
has a confidence interval: it is consistent with the bound, refutes it, or leaves it undecided.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from fedem.core.errors import UserError, naming
from fedem.methods.base import METHODS, names_where
from fedem.runs.config import Config, Layer
from fedem.runs.evaluate import Record, has_diverged, name_scores
from fedem.runs.measures import Dissimilarity, check_diagnosable, diagnose, estimate_dissimilarity, unsteady_layer
from fedem.runs.rounds import Training
from fedem.runs.trainer import Listener, Trainer
from fedem.studies.sweep import PAPER, check_seeds

QUANTITIES = ("gradient_norm2", "improvement", "weights_kl", "consensus")
_LEAST_RUNS = 3  # a line through two points has no error
_CONFIDENCE = 0.95
_ROUNDING = 1e-9
# A study sets these for each of its runs, so that no one value is that of all.
_OWN = {"run": ("rounds", "seed"), "schedule": ("learning_rate",)}

CONSISTENT, UNDECIDED, REFUTED = OUTCOMES = ("consistent", "undecided", "refuted")  # the worse, the later

_REQUIRED: Layer = PAPER["required"]
SMALL: Layer = PAPER["small"]


def assumed(method: str) -> Layer:
    """Return what holds where a run says nothing else; what a method has of its own is refused, not undone."""
    graph = {"graph": _REQUIRED["graph"]} if METHODS[method].mixer.over_graph else {}
    batching = {"batch_size": 16, "local_steps": 10}
    return {"solver": _REQUIRED["solver"], "batching": batching, "run": {"clients_per_round": 1.0}} | graph


class Trend(NamedTuple):
    """The line of least squares through log mean against log K."""

    slope: float
    intercept: float
    low: float  # the 95% confidence interval of the slope
    high: float
    rate: float | None  # the theorem's exponent; None where it has none

    @property
    def outcome(self) -> str | None:
        """Whether the whole interval is at most the rate, or above it, or neither; None without a rate."""
        if self.rate is None:
            return None
        rate = self.rate + _ROUNDING  # an exact power has no other error
        return CONSISTENT if self.high <= rate else REFUTED if self.low > rate else UNDECIDED


class Point(NamedTuple):
    """All runs of the same length."""

    rounds: int  # K
    learning_rate: float  # a0 / sqrt(K)
    each: dict[str, list[float]]  # of each quantity the mean over the K rounds, for each seed

    @property
    def means(self) -> dict[str, float]:
        """Of each quantity, over the seeds too."""
        return {name: float(np.mean(values)) for name, values in self.each.items()}


@dataclass(frozen=True)
class Study:
    """The result: means for each K, and the slopes fitted through them."""

    config: Config
    initial_rate: float  # a0
    seeds: tuple[int, ...]
    points: tuple[Point, ...]
    trends: dict[str, Trend | None]  # of each quantity; None where it is zero, so that it has no logarithm
    dissimilarity: Dissimilarity

    @property
    def outcome(self) -> str:
        """The worst of all outcomes; what is zero is as small as any bound."""
        found = (trend.outcome for trend in self.trends.values() if trend is not None)
        return max((outcome for outcome in found if outcome), key=OUTCOMES.index, default=CONSISTENT)

    def record(self) -> Record:
        return {
            "outcome": self.outcome,
            "method": self.config.name("method"),
            "initial_rate": self.initial_rate,
            "seeds": list(self.seeds),
            "points": [point._asdict() | {"means": point.means} for point in self.points],
            "trends": {n: trend and trend._asdict() | {"outcome": trend.outcome} for n, trend in self.trends.items()},
            **self.dissimilarity.record(),
            "data_seed": self.config.run.seed,
            "config": {
                section: {key: value for key, value in values.items() if key not in _OWN.get(section, ())}
                for section, values in self.config.sections.items()
            },
        }


def study(
    config: Config,
    rounds: Sequence[int],
    a0: float,
    every: int = 10,
    seeds: Sequence[int] = (0, 1),
    listener: Listener | None = None,
) -> Study:
    """Train K ``rounds`` at learning rate a0 / sqrt(K), for each K and seed on the same data, and fit the slopes.

    The run is ``config`` but for its rounds, seed and schedule; its own seed makes the data. Means are over the seeds
    as well, as the theorems speak of expectations; between rounds that are measured (:func:`is_due`) they interpolate.
    The ``listener`` is called with the number of rounds done in all as a record's "round".
    """
    _check(config, rounds, a0, every, seeds)
    data = config.make_data()
    scheduled = config.replace("schedule", name="inverse_sqrt", learning_rate=a0)
    trainers: dict[tuple[int, int], Trainer] = {}
    for length, seed in product(rounds, seeds):
        # Whatever is wrong with a run may be wrong for its seed alone, such as the graph that it draws.
        with naming(f"K = {length}, seed {seed}"):
            trainers[length, seed] = Trainer.prepare(scheduled.replace("run", rounds=length, seed=seed), data)
    first = next(iter(trainers.values()))
    _check_covered(first.training)
    done, measured = 0, {}
    for (length, seed), trainer in trainers.items():
        measured[length, seed] = _measured(trainer, every, done, listener)
        done += length
    each = {k: {q: [_mean(measured[k, seed], k, q) for seed in seeds] for q in QUANTITIES} for k in rounds}
    points = tuple(Point(length, a0 / math.sqrt(length), each[length]) for length in rounds)
    rates = PAPER["rates"]["graph" if first.training.mixer.over_graph else "server"]
    trends = {name: fit_trend(rounds, [point.each[name] for point in points], rates.get(name)) for name in QUANTITIES}
    everything = [line for lines in measured.values() for line in lines]
    return Study(scheduled, a0, tuple(seeds), points, trends, estimate_dissimilarity(everything))


def fit_trend(rounds: Sequence[int], means: Sequence[Sequence[float]], rate: float | None) -> Trend | None:
    """Fit log mean against log K: ``[runs]`` and, for each seed, ``[runs, seeds]``; None where a mean is zero.

    The slope is the mean of the seeds' slopes. Its interval is the wider of two by Student's t: from the spread of the
    seeds' slopes, where there are several, and from how far their mean is from a line.
    """
    logs = np.asarray(means, dtype=float)
    if logs.min() <= 0:
        return None
    from scipy.stats import t

    lengths, logs = np.log(rounds), np.log(logs)
    centred = lengths - lengths.mean()
    slopes = centred @ logs / (centred @ centred)
    slope, count = float(slopes.mean()), len(slopes)
    intercept = float(logs.mean() - slope * lengths.mean())
    residuals = logs.mean(1) - intercept - slope * lengths
    freedom = len(rounds) - 2
    error = math.sqrt(float(residuals @ residuals) / freedom / float(centred @ centred))
    half = t.ppf((1 + _CONFIDENCE) / 2, freedom) * error
    if count > 1:
        half = max(half, t.ppf((1 + _CONFIDENCE) / 2, count - 1) * slopes.std(ddof=1) / math.sqrt(count))
    return Trend(slope, intercept, slope - float(half), slope + float(half), rate)


def is_due(number: int, num_rounds: int, every: int) -> bool:
    """Whether round ``number`` (from 1) is measured: what falls as a power of the rounds gone by is then known well.

    At first all are; then the gaps widen to a tenth of the rounds gone by, and to ``every`` rounds at most.
    """
    gap = min(every, max(1, number // 10))
    return number % gap == 0 or number == num_rounds


def _measured(trainer: Trainer, every: int, done: int, listener: Listener | None) -> list[Record]:
    """Carry out one run; returns a record for each round that was measured."""
    trainer = trainer.placed()
    training, lines = trainer.training, []
    with trainer.recipe.products():
        state = training.init()
        for number in range(1, training.num_rounds + 1):
            before, (state, _) = state, training.step(state)
            if is_due(number, training.num_rounds, every):
                lines.append({"round": number, **diagnose(training, before, state)._asdict()})
            if listener is not None:
                listener({"round": done + number})
        # Where everything is saturated gradients vanish, and any bound on them holds.
        if has_diverged(name_scores(trainer.scores(trainer.predictors(state)))):
            rate = training.schedule.rate(0, training.num_rounds)
            where = f"within {training.num_rounds} rounds at learning rate {rate:g}"
            raise UserError(f"Training diverged {where}; a smaller a0 is needed.")
    return lines


def _mean(lines: Sequence[Mapping[str, Any]], num_rounds: int, name: str) -> float:
    """Average a quantity over all rounds of a run, those between two that were measured by interpolation."""
    known = [line["round"] for line in lines], [line[name] for line in lines]
    return float(np.interp(np.arange(1, num_rounds + 1), *known).mean())


def _check(config: Config, rounds: Sequence[int], a0: float, every: int, seeds: Sequence[int]) -> None:
    if len(rounds) < _LEAST_RUNS or min(rounds) < 1 or any(a >= b for a, b in pairwise(rounds)):
        allowed = f"at least {_LEAST_RUNS} of them, from 1, each larger than the one before"
        raise UserError(f"The numbers of rounds are {', '.join(map(str, rounds)) or 'none'}; allowed: {allowed}.")
    if not (math.isfinite(a0) and a0 > 0):
        raise UserError(f"a0 is {a0:g}; allowed: a number above 0.")
    if every < 1:
        raise UserError(f"every is {every}; allowed: at least 1.")
    check_seeds(seeds)
    for section, values in _REQUIRED.items():
        for key, allowed in values.items():  # the name first, as the section of another solver has other keys
            if (value := config.sections[section].get(key, allowed)) != allowed:
                where = "in a study of the theorems, which speak of plain SGD with all clients, honest, in every round"
                if section == "graph":
                    where = "in a study of the theorems, which speak of steps scaled by n_t / n from a common start"
                raise UserError(f"{section}.{key} is {value!r}; allowed {where}: {allowed!r}.")
    if config.batching.batch_size and not config.batching.local_steps:
        allowed = "at least 1, or batching.batch_size = 0, as the theorems have everybody take the same number of steps"
        raise UserError(f"batching.local_steps is 0; allowed in a study of the theorems: {allowed}.")


def _check_covered(training: Training) -> None:
    algorithm = training.algorithm
    check_diagnosable(algorithm, training.mixer, compressed=training.codec is not None)
    problem = ""
    if not algorithm.uploads_model:
        names = names_where(lambda row: row.is_diagnosable and row.algorithm.uploads_model)
        problem = f"{type(algorithm).__name__}, whose steps are not along the gradient of a surrogate; allowed: {names}"
    elif getattr(algorithm, "num_components", 1) != 1 and not algorithm.model.loss.has_bounded_slope:
        problem = f"mixtures with {type(algorithm.model.loss).__name__}, whose gradients are not bounded; allowed: "
        problem += "losses of classes, or method.num_components = 1"
    elif (layer := unsteady_layer(algorithm.model)) is not None:
        problem = f"a model with {layer}, whose gradients in training are not those of f; allowed: layers that do the "
        problem += "same in training and in evaluation"
    if problem:
        raise UserError(f"The theorems do not cover {problem}.")
