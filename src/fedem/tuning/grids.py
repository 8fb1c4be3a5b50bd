"""What a search tries: values by ``section.key``, the paper's unless others are asked for, and the next of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import numpy as np

from fedem.config import parse_assignment
from fedem.data.tables.readers import needed
from fedem.errors import UserError, unknown
from fedem.sections import Layer, Values

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Grids = Mapping[str, Sequence[Any]]
"""The values to try of each setting, by ``section.key``."""
Tried = tuple[Values, float | None]
"""Values and the score that they came to; None where training failed."""

SAMPLERS = ("grid", "random", "tpe")
RATE = "schedule.learning_rate"
# The paper's grids: of every method's learning rate, and of the weight of a penalty.
_RATES = tuple(10.0**exponent for exponent in (-0.5, -1.0, -1.5, -2.0, -2.5, -3.0))
_WEIGHTS = tuple(10.0**exponent for exponent in (1, 0, -1, -2, -3))
_WEIGHT_OF = {
    "fedprox": "method.mu",
    "pfedme": "method.pull",
    "ditto": "method.pull",
    "mocha": "method.penalty",
}
# The learning rates that the paper's grid search came to, as base-10 logarithms.
_COLUMNS = ("fedavg", "fedprox", "fedavg+", "clustered", "pfedme", "fedem")
_FOUND = {
    "femnist": (-1.5, -1.5, -1.5, -1.5, -1.5, -1.0),
    "emnist": (-1.5, -1.5, -1.5, -1.5, -1.5, -1.0),
    "cifar10": (-1.5, -1.5, -1.5, -1.5, -1.0, -1.0),
    "cifar100": (-1.0, -1.0, -1.0, -1.0, -1.0, -0.5),
    "shakespeare": (-1.0, -1.0, -1.0, -1.0, -1.0, -0.5),
    "synthetic": (-1.0, -1.0, -1.0, -1.0, -1.0, -1.0),
}
# What all trials must share, or their scores could not be compared.
_SAME = ("data", "partition", "loss", "run.seed", "run.rounds", "run.unseen", "method.name")
_NEAR_THE_END = 0.1
"""share of a range that counts as its edge"""


def usual_grids(method: str, *given: Layer) -> Grids:
    """Return the paper's grids for a method, but for settings that are given a value."""
    grids = {RATE: _RATES} | ({weight: _WEIGHTS} if (weight := _WEIGHT_OF.get(method)) else {})
    fixed = {f"{section}.{name}" for layer in given for section, values in layer.items() for name in values}
    return {key: values for key, values in grids.items() if key not in fixed}


def paper_rate(data: str, method: str) -> float | None:
    """Return the learning rate that the paper found for a method on a data set; None where it tells none."""
    if data not in _FOUND or method not in _COLUMNS:
        return None
    return float(10.0 ** _FOUND[data][_COLUMNS.index(method)])


def read_grids(texts: Iterable[str]) -> Grids:
    """Read ``section.key=value,value,...``; values are TOML literals, or else words.

    >>> read_grids(["schedule.learning_rate=0.1,0.3"])
    {'schedule.learning_rate': (0.1, 0.3)}
    """
    grids: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, _, listed = text.partition("=")
        key, words = key.strip(), [word.strip() for word in listed.split(",")]
        section, _, name = key.partition(".")
        if not (section and name and all(words)):
            raise UserError(
                f"--grid got {text!r}; allowed: section.key=value,value,..., such as schedule.learning_rate=0.1,0.3."
            )
        values = tuple(parse_assignment(f"{key}={word}")[section][name] for word in words)
        if key in grids or len(set(values)) < len(values):
            raise UserError(f"--grid got {text!r}; allowed: every setting once, and each of its values once.")
        if section in _SAME or key in _SAME:
            raise UserError(f"--grid got {text!r}, but {key} is the same in all trials; allowed: other settings.")
        grids[key] = values
    return grids


def layers_of(values: Mapping[str, Any]) -> list[Layer]:
    """Return values by ``section.key`` as layers of a configuration."""
    return [{key.partition(".")[0]: {key.partition(".")[2]: value}} for key, value in values.items()]


def next_values(grids: Grids, sampler: str, seed: int, tried: Sequence[Tried], maximize: bool) -> Values:
    """Return the values of the next trial, a function of the arguments alone: so a search can be taken up anywhere.

    Args:
        grids: "grid" goes through all their combinations, the last setting fastest. "random" and "tpe" draw a number
            between the least and the largest, on a logarithmic scale where all are above 0; or else one of the values.
        sampler: one of :data:`SAMPLERS`.
        seed: decides what is drawn, together with the number of trials before.
        tried: the trials before.
        maximize: whether a larger score is better.

    """
    if sampler == "grid":
        return dict(zip(grids, next(islice(product(*grids.values()), len(tried), None)), strict=True))
    import optuna
    from optuna.trial import TrialState, create_trial

    ranges = {key: _range(values) for key, values in grids.items()}
    number = int(np.random.SeedSequence([seed, len(tried)]).generate_state(1)[0])
    kind = optuna.samplers.RandomSampler if sampler == "random" else optuna.samplers.TPESampler
    with _silent():
        study = optuna.create_study(sampler=kind(seed=number), direction="maximize" if maximize else "minimize")
        for values, score in tried:
            # What is pruned ranks below all that has a score: so the sampler keeps away from where training fails.
            state = TrialState.PRUNED if score is None else TrialState.COMPLETE
            study.add_trial(create_trial(state=state, value=score, params=dict(values), distributions=ranges))
        return dict(study.ask(ranges).params)


def check_sampler(sampler: str) -> None:
    """Refuse a sampler that there is not, or that is not installed."""
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    if sampler != "grid":
        needed(f"The sampler {sampler}", "optuna", extra="tune")


def edge_of(values: Sequence[Any], chosen: Any, sampler: str) -> str | None:
    """Return "lower" or "upper" where the chosen value lies at that edge of what was searched; else None."""
    if not _are_numbers(values) or len(values) < 2:
        return None
    scale = math.log if min(values) > 0 else float
    low, high = scale(min(values)), scale(max(values))
    place = (scale(chosen) - low) / (high - low)
    margin = 0.0 if sampler == "grid" else _NEAR_THE_END
    return "lower" if place <= margin else "upper" if place >= 1 - margin else None


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _range(values: Sequence[Any]) -> BaseDistribution:
    """Return what is drawn from: a range of numbers, of whole ones where all are whole; or the values themselves."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not _are_numbers(values):
        return CategoricalDistribution(values)
    low, high = min(values), max(values)
    if all(isinstance(value, int) for value in values):
        return IntDistribution(low, high, log=low > 0)
    return FloatDistribution(low, high, log=low > 0)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep optuna from telling of every study that is made."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)
