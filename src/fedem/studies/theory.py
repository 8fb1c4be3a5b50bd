"""The paper's convergence theorems, put to the test: runs of K rounds at the learning rate a0 / sqrt(K), for several K.

With a server the theorem bounds the means over the K rounds of |grad f|^2 by O(K^-1/2) and of the mixture weights' gain
by O(K^-3/4); over a graph those of |grad f|^2 by O(K^-1/2), of the weights' KL divergence by O(K^-1) and of the
distance to consensus by O(K^-1/2). In a picture with two logarithmic axes such a bound is a slope.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from fedem.core.errors import UserError, naming
from fedem.runs.config import Config, Layer
from fedem.runs.evaluate import Record, has_diverged, name_scores
from fedem.runs.measures import Dissimilarity, check_diagnosable, diagnose, estimate_dissimilarity
from fedem.runs.trainer import Listener, Trainer
from fedem.studies.sweep import check_seeds

QUANTITIES = ("gradient_norm2", "improvement", "weights_kl", "consensus")
# The theorems' exponents of K, by quantity.
_SERVER_RATES = {"gradient_norm2": -0.5, "improvement": -0.75}
_GRAPH_RATES = {"gradient_norm2": -0.5, "weights_kl": -1.0, "consensus": -0.5}
_LEAST_RUNS = 3  # a line through two points has no error
_CONFIDENCE = 0.95
_ROUNDING = 1e-9
# A study sets these for each of its runs, so that no one value is that of all.
_OWN = {"run": ("rounds", "seed"), "schedule": ("learning_rate",)}

# What the theorems ask of a run: plain SGD, all clients in every round, nothing in the objective but f.
REQUIRED: Layer = {
    "solver": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0},
    "run": {"clients_per_round": 1.0, "unseen": 0.0, "local_layers": "none", "label_shares": False}
    | {"fine_tune_epochs": 0},
}
# Where a run says nothing else. What belongs to a method, as fine-tuning does to FedAvg+, is refused and not undone.
ASSUMED: Layer = {
    "solver": REQUIRED["solver"],
    "batching": {"batch_size": 16, "local_steps": 10},
    "run": {"clients_per_round": 1.0},
}
# A federation whose components are told apart within tens of rounds: before that no rate can show.
SMALL: Layer = {
    "data": {"name": "synthetic", "num_clients": 20, "num_components": 2, "dimension": 20, "dirichlet": 0.1}
    | {"noise_scale": 0.0, "max_samples": 200, "num_validation": 0, "num_test": 0},
    "method": {"num_components": 2},
}


class Trend(NamedTuple):
    """The line of least squares through log mean against log K."""

    slope: float
    intercept: float
    tolerance: float  # of the slope: a one-sided 95% interval, by Student's t and the fit's standard error
    rate: float | None  # the theorem's exponent; None where it has none

    @property
    def holds(self) -> bool | None:
        """Whether the means fall at least as fast as the theorem says, within the tolerance; None without a rate."""
        return None if self.rate is None else self.slope <= self.rate + self.tolerance


class Point(NamedTuple):
    """All runs of the same length."""

    rounds: int  # K
    learning_rate: float  # a0 / sqrt(K)
    means: dict[str, float]  # of each quantity, over the K rounds and the seeds


@dataclass(frozen=True)
class Study:
    """The result: means for each K, and the slopes fitted through them."""

    config: Config
    initial_rate: float  # a0
    seeds: tuple[int, ...]
    points: tuple[Point, ...]
    trends: dict[str, Trend | None]  # of each quantity; None where it is zero, so that it has no logarithm
    dissimilarity: Dissimilarity

    def record(self) -> Record:
        return {
            "method": self.config.name("method"),
            "initial_rate": self.initial_rate,
            "seeds": list(self.seeds),
            "points": [point._asdict() for point in self.points],
            "trends": {name: trend and trend._asdict() | {"holds": trend.holds} for name, trend in self.trends.items()},
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
    seeds: Sequence[int] = (0,),
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
    check_diagnosable(first.training.algorithm, first.training.mixer)
    done, measured = 0, {}
    for (length, seed), trainer in trainers.items():
        measured[length, seed] = _measured(trainer, every, done, listener)
        done += length
    means = {length: _means([measured[length, seed] for seed in seeds], length) for length in rounds}
    points = tuple(Point(length, a0 / math.sqrt(length), means[length]) for length in rounds)
    rates = _GRAPH_RATES if first.training.mixer.over_graph else _SERVER_RATES
    trends = {name: fit_trend(rounds, [point.means[name] for point in points], rates.get(name)) for name in QUANTITIES}
    everything = [line for lines in measured.values() for line in lines]
    return Study(scheduled, a0, tuple(seeds), points, trends, estimate_dissimilarity(everything))


def fit_trend(rounds: Sequence[int], means: Sequence[float], rate: float | None) -> Trend | None:
    """Fit log mean against log K, both ``[runs]``; None where a mean is zero."""
    if min(means) <= 0:
        return None
    from scipy.stats import t

    lengths, logs = np.log(rounds), np.log(means)
    centred = lengths - lengths.mean()
    slope = float(centred @ logs / (centred @ centred))
    intercept = float(logs.mean() - slope * lengths.mean())
    residuals = logs - intercept - slope * lengths
    freedom = len(logs) - 2
    error = math.sqrt(float(residuals @ residuals) / freedom / float(centred @ centred))
    return Trend(slope, intercept, float(t.ppf(_CONFIDENCE, freedom)) * error + _ROUNDING, rate)


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
            length, rate = training.num_rounds, training.schedule.rate(0, training.num_rounds)
            raise UserError(
                f"Training diverged within {length} rounds at learning rate {rate:g}; a smaller a0 is needed."
            )
    return lines


def _means(runs: Sequence[Sequence[Mapping[str, Any]]], num_rounds: int) -> dict[str, float]:
    """Average each quantity over all rounds, those between two that were measured by interpolation, and over runs."""
    numbers = np.arange(1, num_rounds + 1)

    def mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
        return float(np.interp(numbers, [line["round"] for line in lines], [line[name] for line in lines]).mean())

    return {name: float(np.mean([mean(lines, name) for lines in runs])) for name in QUANTITIES}


def _check(config: Config, rounds: Sequence[int], a0: float, every: int, seeds: Sequence[int]) -> None:
    if len(rounds) < _LEAST_RUNS or min(rounds) < 1 or any(a >= b for a, b in pairwise(rounds)):
        allowed = f"at least {_LEAST_RUNS} of them, from 1, each larger than the one before"
        raise UserError(f"The numbers of rounds are {', '.join(map(str, rounds)) or 'none'}; allowed: {allowed}.")
    if not (math.isfinite(a0) and a0 > 0):
        raise UserError(f"a0 is {a0:g}; allowed: a number above 0.")
    if every < 1:
        raise UserError(f"every is {every}; allowed: at least 1.")
    check_seeds(seeds)
    for section, values in REQUIRED.items():
        for key, allowed in values.items():  # the name first, as the section of another solver has other keys
            if (value := config.sections[section][key]) != allowed:
                where = "in a study of the theorems, which speak of plain SGD with all clients in every round"
                raise UserError(f"{section}.{key} is {value!r}; allowed {where}: {allowed!r}.")
