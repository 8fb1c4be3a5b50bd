"""What should these clients use? A portfolio of methods and models, by successive halving on validation.

In each rung all candidates that are left train for the same number of rounds on the same samples, and the better half
goes on to a longer one. Later rungs deal training and validation samples anew several times, so that a choice does not
hang on a few validation samples. The test part is dropped until the choice is made; then the winner and the plain
alternatives are trained and scored on it.

choice.json       what was tried, rung by rung, and what was chosen
winner/           the winner's run; beside it those it is compared with, each a run like any other
"""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedem.core.errors import UserError
from fedem.core.files import write_json
from fedem.data.dataset import Dataset
from fedem.data.federation import Federation
from fedem.models.losses import CLASSES, guess_loss
from fedem.models.metrics import METRICS, Metric
from fedem.runs.config import GIVEN, Config, Layer, overlay, route
from fedem.runs.evaluate import Record, has_diverged
from fedem.runs.folder import RunFolder
from fedem.runs.result import Result
from fedem.runs.rounds import DivergedError
from fedem.runs.trainer import Trainer, carry_out
from fedem.studies.references import beside
from fedem.studies.sweep import layers_of

PORTFOLIO: dict[str, dict[str, Any]] = tomllib.loads(
    files("fedem.studies").joinpath("portfolio.toml").read_text(encoding="utf-8")
)
PLAIN = ("one_model", "own_models")  # what the winner is compared with, besides the runner-up
_RUNGS = ((0.125, 1), (0.25, 2), (1.0, 3))  # share of the rounds, and how often samples are dealt
_FEWEST = 4  # candidates that reach the last rung, where there is time
_FIRST_SHARE = 0.5  # of the budget, after which the first rung tries no more
_UNITS = {"s": 1, "m": 60, "h": 3600}

Watch = Callable[[str], None]  # told what is trained next


def read_budget(text: str) -> float:
    """Read a length of time, such as 90s, 10m or 2h; returns seconds.

    >>> read_budget("10m")
    600.0
    """
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"The budget is {text!r}; allowed: a length of time above 0, such as 90s, 10m or 2h.")
    return seconds


class Candidate(NamedTuple):
    """A method with its settings, and a model."""

    key: str
    model: str
    title: str
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        return f"{self.key}-{self.model}"


def candidates(models: Sequence[str], task: str, num_clients: int) -> list[Candidate]:
    """Return what suits the data, the simplest first: every method with the first model, then with the next."""
    found = []
    for model in models:
        for key, entry in PORTFOLIO.items():
            if model not in entry.get("models", models) or entry.get("only", task) != task:
                continue
            if num_clients <= entry.get("most_clients", num_clients):
                values = {name: value for name, value in entry.items() if "." in name} | {"model.name": model}
                found.append(Candidate(key, model, f"{entry['title']} ({model})", tuple(layers_of(values))))
    return found


class Difference(NamedTuple):
    """How far one is from another in the mean over clients, weighted as scores are, and the standard error of that."""

    mean: float
    error: float


def paired(ours: Mapping[str, float], others: Mapping[str, float], weights: Mapping[str, float]) -> Difference:
    """Compare client by client, over those that both have scores of; what is above 0 is ours."""
    known = [name for name in ours if math.isfinite(ours[name] - others.get(name, math.nan))]
    gaps, shares = np.array([ours[name] - others[name] for name in known]), np.array([weights[name] for name in known])
    if not len(known) or not shares.sum():
        return Difference(math.nan, math.nan)
    shares = shares / shares.sum()
    mean = float(shares @ gaps)
    spread = float(np.sqrt((shares**2) @ (gaps - mean) ** 2))
    return Difference(mean, spread * math.sqrt(len(known) / (len(known) - 1)) if len(known) > 1 else math.nan)


@dataclass
class Tried:
    """A candidate in a rung: its validation scores, one for each dealing, or why it has none."""

    candidate: Candidate
    rounds: int
    scores: list[float] = field(default_factory=list)
    clients: list[dict[str, float]] = field(default_factory=list)  # validation scores by client, for each dealing
    seconds: float = 0.0
    failure: str = ""

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores)) if self.scores else math.nan

    @property
    def by_client(self) -> dict[str, float]:
        """Each client's mean over the dealings."""
        known: dict[str, list[float]] = {}
        for name, score in (pair for own in self.clients for pair in own.items()):
            if math.isfinite(score):
                known.setdefault(name, []).append(score)
        return {name: float(np.mean(scores)) for name, scores in known.items()}

    def record(self) -> Record:
        named = {"candidate": self.candidate.name, "title": self.candidate.title, "rounds": self.rounds}
        return (
            named
            | {"validation": self.scores, "seconds": self.seconds}
            | ({"failure": self.failure} if self.failure else {})
        )


@dataclass(frozen=True)
class Final:
    """What was trained after the choice, or a reference, on the test part."""

    name: str
    title: str
    test: float | None
    to_the_winner: Difference | None  # paired by client, above 0 where it is better; None for the winner itself
    folder: Path | None = None


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen, why, and how it compares."""

    winner: Candidate
    result: Result  # the winner's model, trained
    metric: Metric  # by which it was chosen
    shown: Metric  # by which the test part is scored
    reason: str
    rungs: list[list[Tried]]  # the best first
    finals: list[Final]  # the winner first
    untried: list[Candidate]  # for want of time
    notes: list[str]  # what else there is to say
    seconds: float

    def record(self) -> Record:
        finals = [
            {"name": each.name, "title": each.title, f"test_{self.shown.name}": each.test}
            | ({} if each.to_the_winner is None else {"to_the_winner": each.to_the_winner._asdict()})
            for each in self.finals
        ]
        return {
            "winner": self.winner.name,
            "settings": overlay(*self.winner.layers),
            "reason": self.reason,
            "chosen_by": self.metric.name,
            "metric": self.shown.name,
            "rungs": [[tried.record() for tried in rung] for rung in self.rungs],
            "finals": finals,
            "untried": [each.name for each in self.untried],
            "notes": self.notes,
            "seconds": self.seconds,
        }


def choose(
    data: Federation | Dataset,
    *,
    budget: str = "10m",
    out: str | Path | None = None,
    in_order: bool = False,
    watch: Watch | None = None,
    **options: Any,
) -> Choice:
    """Find out what suits clients best, by validation, and train it.

    Args:
        data: the clients and their samples.
        budget: how long it may take, about: 90s, 10m, 2h. Little time means fewer candidates and shorter trials.
        out: a folder for choice.json and the runs of the winner and of what it is compared with.
        in_order: whether samples are in order of time: then training and validation samples are not dealt anew.
        watch: called with the name of what is trained next.
        **options: settings of all candidates by their names, such as ``seed=1``, ``rounds=100``, ``metrics="roc_auc"``.
    """
    dataset = data if isinstance(data, Dataset) else Dataset(data)
    layers = [{"data": {"name": GIVEN}}, route(options, "fedavg")]
    return search(layers, dataset, read_budget(budget), None if out is None else Path(out), in_order, watch)


def search(
    layers: Sequence[Layer],
    dataset: Dataset,
    budget: float,
    out: Path | None = None,
    in_order: bool = False,
    watch: Watch | None = None,
) -> Choice:
    """Choose among the portfolio with the settings of ``layers``, in about ``budget`` seconds; see :func:`choose`."""
    started = time.perf_counter()
    federation = dataset.federation
    if federation.num_clients < 2:
        raise UserError(f"There is {federation.num_clients} client; allowed: 2 or more, or there is nothing to choose.")
    if not len(federation.validation):
        raise UserError("There are no validation samples to choose by; allowed: a share of them above 0.")
    base = Config.build(*layers)
    loss = base.loss or guess_loss(federation.train.targets)
    if loss.task == CLASSES and not base.run.metrics:
        # The log loss tells more of few samples than how many are right.
        layers = [*layers, {"run": {"metrics": f"log_loss,{loss.metric}"}}]
    models = ("cnn",) if len(federation.input_shape) >= 3 else ("linear", "mlp")
    left, untried = candidates(models, loss.task, federation.num_clients), list[Candidate]()
    if out is not None:
        if out.is_dir() and any(out.iterdir()):
            raise UserError(f"{out} is not empty; allowed: a new folder, or one with nothing in it.")
        RunFolder(out).prepare()
    metric, rungs = None, list[list[Tried]]()
    for number, (share, dealings) in enumerate(_RUNGS):
        rounds, dealings = max(1, round(share * base.run.rounds)), 1 if in_order else dealings
        spent = time.perf_counter() - started
        if rungs:
            left, dealings, rounds = _afford(rungs[-1], left, budget - spent, dealings, rounds)
        folds = [federation.without_test()]
        folds += [folds[0].redealt(base.run.seed + fold) for fold in range(1, dealings)]
        rung = list[Tried]()
        for candidate in left:
            if not rungs and time.perf_counter() - started > _FIRST_SHARE * budget and rung:
                untried.append(candidate)
                continue
            if watch:
                watch(f"{candidate.title}; stage {number + 1} of {len(_RUNGS)}, {rounds} rounds")
            tried = Tried(candidate, rounds)
            found = _try(tried, Config.build(*layers, *candidate.layers), dataset, folds)
            metric = metric or found
            rung.append(tried)
        if metric is None or not any(tried.scores for tried in rung):
            raise UserError(f"No candidate came to an end. {rung[0].candidate.title}: {rung[0].failure}")
        rung.sort(key=lambda tried: _rank(tried, metric))
        rungs.append(rung)
        able = [tried.candidate for tried in rung if tried.scores]
        left = _kept(able, max(_FEWEST, math.ceil(len(able) / 2)) if number + 2 < len(_RUNGS) else _FEWEST)
    assert metric is not None
    winner, reason = _decide(rungs[-1], metric, federation)
    shown = metric if base.run.metrics else METRICS[loss.metric]
    finals, result, notes = _finish(layers, dataset, winner, rungs[-1], shown, out, watch)
    spent = time.perf_counter() - started
    choice = Choice(winner, result, metric, shown, reason, rungs, finals, untried, notes, spent)
    if out is not None:
        write_json(out / "choice.json", choice.record())
    return choice


def _kept(able: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the best of them, and one model for all: whoever says that clients differ says so against it."""
    pooled = next((each for each in able if each.key == PLAIN[0]), None)
    first = [able[0], *([pooled] if pooled and pooled != able[0] else [])]
    return [*first, *(each for each in able if each not in first)][:count]


def _afford(
    before: Sequence[Tried], left: list[Candidate], seconds: float, dealings: int, rounds: int
) -> tuple[list[Candidate], int, int]:
    """Return as many candidates, dealings and rounds as there is time for, by what the rung before took."""
    pace = {tried.candidate.name: tried.seconds / (tried.rounds * max(1, len(tried.scores))) for tried in before}

    def cost(some: Sequence[Candidate], times: int) -> float:
        # The winner and two others are trained once more.
        return rounds * (times * sum(pace[each.name] for each in some) + 3 * max(pace[each.name] for each in some))

    while len(left) > 2 and cost(left, dealings) > seconds:
        left = left[:-1]
    while dealings > 1 and cost(left, dealings) > seconds:
        dealings -= 1
    if (needed := cost(left, dealings)) > seconds:
        rounds = max(before[0].rounds, int(rounds * seconds / needed))
    return left, dealings, rounds


def _try(tried: Tried, config: Config, dataset: Dataset, folds: Sequence[Federation]) -> Metric | None:
    """Train a candidate for its rounds with each dealing, and note its scores; returns what it is scored by."""
    config = config.replace("run", rounds=tried.rounds)
    started, metric = time.perf_counter(), None
    for fold in folds:
        try:
            trainer = Trainer.prepare(config, dataset._replace(federation=fold))
            metric = trainer.recipe.metrics[0]
            result = carry_out(trainer)
        except (DivergedError, UserError) as error:
            tried.failure = str(error)
        else:
            if has_diverged(result.summary):
                tried.failure = "Training diverged."
        if tried.failure:
            tried.scores, tried.clients = [], []
            break
        assert metric is not None
        figure = f"validation_{metric.name}"
        tried.scores.append(result.summary[figure])
        tried.clients.append({row["client"]: row[figure] for row in result.clients})
    tried.seconds = time.perf_counter() - started
    return metric


def _rank(tried: Tried, metric: Metric) -> tuple[bool, float]:
    return math.isnan(tried.mean), -tried.mean if metric.larger_is_better else tried.mean


def _weights(federation: Federation) -> dict[str, float]:
    return dict(zip(federation.names, federation.train.sizes.tolist(), strict=True))


def _gain(tried: Tried, other: Tried, metric: Metric, federation: Federation) -> Difference:
    """Return how much better one candidate is than another by validation, paired by client."""
    gap = paired(tried.by_client, other.by_client, _weights(federation))
    return gap if metric.larger_is_better else Difference(-gap.mean, gap.error)


def _decide(rung: Sequence[Tried], metric: Metric, federation: Federation) -> tuple[Candidate, str]:
    """Choose the simplest candidate that is at most a standard error behind the best by validation; say why.

    One model for all may be two behind: that clients differ is what must be shown, and the best of many looks better
    than it is.
    """
    best, *others = [tried for tried in rung if tried.scores]
    order = [f"{key}-{model}" for model in ("cnn", "linear", "mlp") for key in PORTFOLIO]
    gaps = {tried.candidate.name: _gain(best, tried, metric, federation) for tried in others}
    level = [
        tried
        for tried in others
        if (gap := gaps[tried.candidate.name]).mean <= gap.error * (2 if tried.candidate.key == PLAIN[0] else 1)
    ]
    chosen = min([best, *level], key=lambda tried: order.index(tried.candidate.name))
    unit = "%" if metric.in_percent else ""
    title = f"{chosen.candidate.title[0].upper()}{chosen.candidate.title[1:]}"
    shown = f"validation {metric.title} {metric.text(chosen.mean, plain='.3f')}{unit}"
    reason = f"{title}: {shown}"
    if chosen is not best:
        ahead = told(gaps[chosen.candidate.name], metric)
        reason += f". The best, {best.candidate.title}, is {ahead} ahead, which may be chance, and less simple"
    elif others:
        behind = told(gaps[others[0].candidate.name], metric)
        reason += f", the best; next is {others[0].candidate.title}, {behind} behind"
    if chosen.candidate.key == PLAIN[0]:
        reason += ". So one pooled model is best here: nothing shows that clients need models of their own"
    elif pooled := next((tried for tried in others if tried.candidate.key == PLAIN[0]), None):
        gain = _gain(chosen, pooled, metric, federation)
        reason += f". It is {told(gain, metric)} better than {pooled.candidate.title}"
        reason += ": clients differ" if gain.mean > 2 * gain.error else ", which may be chance, and simpler"
    else:
        reason += ". One model for all did not come to an end"
    return chosen.candidate, f"{reason}."


def told(gap: Difference, metric: Metric) -> str:
    """Say a difference with its standard error, in the metric's unit."""
    error = "" if math.isnan(gap.error) else f" ±{metric.text(gap.error, plain='.3f')}"
    return f"{metric.text(gap.mean, plain='.3f')}{error}{' points' if metric.in_percent else ''}"


def _finish(
    layers: Sequence[Layer],
    dataset: Dataset,
    winner: Candidate,
    rung: Sequence[Tried],
    metric: Metric,
    out: Path | None,
    watch: Watch | None,
) -> tuple[list[Final], Result, list[str]]:
    """Train the winner, the runner-up and the plain alternatives on the split as it is, and score the test part."""
    every = {each.key: each for each in candidates((winner.model,), "", 0)}
    runner_up = next((tried.candidate for tried in rung if tried.candidate != winner and tried.scores), None)
    chosen = [winner, *([runner_up] if runner_up else []), *(every[key] for key in PLAIN)]
    figure, federation = f"test_{metric.name}", dataset.federation
    weights, scored = _weights(federation), dict[str, dict[str, float]]()
    finals, notes, first = list[Final](), list[str](), None

    def add(
        name: str, title: str, summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]], folder: Path | None
    ) -> None:
        scored[name] = {row["client"]: math.nan if row[figure] is None else row[figure] for row in clients}
        gap = paired(scored[name], scored[winner.name], weights)
        if not metric.larger_is_better:
            gap = Difference(-gap.mean, gap.error)
        finals.append(Final(name, title, summary.get(figure), gap if finals else None, folder))

    if not len(federation.test):
        chosen = [winner]
    for candidate in {each.name: each for each in chosen}.values():
        if watch:
            watch(f"{candidate.title}; to the end")
        folder = None if out is None else out / ("winner" if candidate == winner else candidate.name)
        config = Config.build(*layers, *candidate.layers)
        trainer = Trainer.prepare(config, dataset)
        try:
            result = carry_out(trainer, out=folder)
        except DivergedError as error:
            if candidate == winner:
                raise
            notes.append(f"{candidate.title} is not in the table: {error}")
            continue
        if first is None:
            first, prepared = result, trainer
        if len(federation.test):
            add(candidate.name, candidate.title, result.summary, result.clients, folder)
    assert first is not None
    if len(federation.test):
        try:
            for each in beside(prepared):
                add(each.name, f"reference: {each.title}", each.record, each.clients, None)
        except UserError as error:  # scikit-learn is not there, or the inputs are words
            notes.append(f"There are no references: {error}")
    return finals, first, notes
