"""Settings chosen on the validation part: a sweep whose axis is the trials, which a sampler draws one after the other.

base/config.toml          the run whose settings are tried
search.json               what is searched, on which data
trials/NNN/trial.json     a trial's values and, once it is over, their scores
trials/NNN/seedS/         its runs (see :mod:`fedem.runs.folder`)

The next trial's values are a function of the trials before, so a search that was killed goes on as if it never was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedem.core.errors import UserError, check_known, needed
from fedem.core.files import plain, write_json
from fedem.core.schema import ANYTHING, Listed, Maybe, Number, Table, Text, Whole, read_json
from fedem.core.settings import names_of
from fedem.data.dataset import Dataset
from fedem.methods import METHODS
from fedem.models.metrics import find_metric
from fedem.runs.config import Config, Layer, Sections, Values, overlay, parse_assignment
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import DivergedError
from fedem.runs.trainer import Listener, Trainer, carry_out
from fedem.studies import sweep
from fedem.studies.sweep import PAPER, Entry, SharedData, Spread, check_seeds, layers_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Grids = Mapping[str, Sequence[Any]]  # the values to try of each setting, by section.key

SAMPLERS = ("grid", "random", "tpe")
RATE = "schedule.learning_rate"
# What all trials must share, or their scores could not be compared.
_SAME = ("data", "partition", "loss", "run.seed", "run.rounds", "run.unseen", "method.name")
# Of a user's own table, whose rates go by the data.
_OWN: dict[str, tuple[Any, ...]] = {
    "model.name": ("linear", "mlp"),
    "batching.batch_size": (8, 64),
    "solver.weight_decay": (0.0, 0.01),
}
_COMPONENTS = (2, 3, 5)
_SEEDS = Listed(Whole(least=0))
TRIAL = Table(
    {
        "number": Whole(least=0),
        "values": Table(),
        "scores": Maybe(Listed(Number())),
        "seconds": Maybe(Number(least=0)),
        "error": Maybe(Text()),
    }
)
SEARCH = Table({"grids": Table(others=Listed(ANYTHING)), "sampler": Text(choices=SAMPLERS), "seeds": _SEEDS})
TUNED = Table({"data": Text(), "method": Text(), "metric": Text(), "trials": Listed(TRIAL)})
_NEAR_THE_END = 0.1  # share of a range that counts as its edge


def usual_grids(method: str, *given: Layer) -> Grids:
    """Return the grids for a method, but for settings that are given a value: the paper's, or of a user's own table."""
    fixed = {f"{section}.{name}" for layer in given for section, values in layer.items() for name in values}
    if overlay(*given).get("data", {}).get("name") == "file":
        row = METHODS[method]
        counts = (
            {"method.num_components": _COMPONENTS} if "num_components" in names_of(row.algorithm, row.mixer) else {}
        )
        return {key: values for key, values in (_OWN | counts).items() if key not in fixed}
    grids = PAPER["grids"]["all"] | PAPER["grids"].get(method, {})
    return {key: tuple(10.0**power for power in powers) for key, powers in grids.items() if key not in fixed}


def paper_rate(data: str, method: str) -> float | None:
    """Return the learning rate that the paper found for a method on a data set; None where it has none."""
    power = PAPER["found"].get(data, {}).get(method)
    return None if power is None else float(10.0**power)


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
            allowed = "section.key=value,value,..., such as schedule.learning_rate=0.1,0.3"
            raise UserError(f"--grid got {text!r}; allowed: {allowed}.")
        values = tuple(parse_assignment(f"{key}={word}")[section][name] for word in words)
        if key in grids or len(set(values)) < len(values):
            raise UserError(f"--grid got {text!r}; allowed: every setting once, and each of its values once.")
        if section in _SAME or key in _SAME:
            raise UserError(f"--grid got {text!r}, but {key} is the same in all trials; allowed: other settings.")
        grids[key] = values
    return grids


def next_values(
    grids: Grids, sampler: str, seed: int, tried: Sequence[tuple[Values, float | None]], maximize: bool
) -> Values:
    """Return the values of the next trial, a function of the arguments alone: so a search can be taken up anywhere.

    Sampler "grid" goes through all combinations, the last setting fastest; "random" and "tpe" draw a number between the
    least and the largest, on a logarithmic scale where all are above 0, or else one of the values. What was ``tried``
    before comes with its score, None where training failed.
    """
    if sampler == "grid":
        return dict(zip(grids, next(islice(product(*grids.values()), len(tried), None)), strict=True))
    import optuna
    from optuna.trial import TrialState, create_trial

    ranges = {key: _range(values) for key, values in grids.items()}
    number = int(np.random.SeedSequence([seed, len(tried)]).generate_state(1)[0])
    kind = optuna.samplers.RandomSampler if sampler == "random" else optuna.samplers.TPESampler
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # or it reports every study that is made
    try:
        study = optuna.create_study(sampler=kind(seed=number), direction="maximize" if maximize else "minimize")
    finally:
        optuna.logging.set_verbosity(before)
    for values, score in tried:
        # What is pruned ranks below all that has a score: so the sampler keeps away from where training fails.
        state = TrialState.PRUNED if score is None else TrialState.COMPLETE
        study.add_trial(create_trial(state=state, value=score, params=dict(values), distributions=ranges))
    return dict(study.ask(ranges).params)


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


@dataclass(frozen=True)
class Search:
    """A run, and the values to try of some of its settings."""

    layers: tuple[Layer, ...]  # the run whose settings are tried, the method's name among them
    grids: Grids
    sampler: str = "grid"
    num_trials: int | None = None  # None where the sampler is "grid", which tries all combinations
    seeds: tuple[int, ...] = (0,)  # a trial is one run for each

    @property
    def count(self) -> int:
        return math.prod(map(len, self.grids.values())) if self.num_trials is None else self.num_trials

    @property
    def base(self) -> Config:
        return Config.build(*self.ground)

    @property
    def ground(self) -> tuple[Layer, ...]:
        """What is asked for; trials that differ in what acts after training are scored then alone, and share it."""
        later = Config.build(*self.layers).acting_later.keys() & self.grids.keys()
        return ({"run": {"evaluate_every": 0}}, *self.layers) if later else self.layers

    def config(self, values: Mapping[str, Any], seed: int) -> Config:
        return Config.build(*self.ground, *layers_of(values), {"run": {"seed": seed}})

    def chosen_layer(self, values: Mapping[str, Any]) -> Sections:
        """Return what the user asked for, and the values chosen: what is to be written over the shipped settings."""
        return {name: section for name, section in overlay(*self.layers, *layers_of(values)).items() if section}

    def check(self) -> None:
        """Refuse what can't be searched, before any data are made."""
        number, given = self.num_trials, overlay(*self.layers)
        check_known("sampler", [self.sampler], SAMPLERS)
        if not self.grids:
            raise UserError("There is no setting to search; allowed: one or several, each as --grid section.key=...")
        for key, values in self.grids.items():
            section, _, name = key.partition(".")
            if not values:
                raise UserError(f"The grid of {key} is empty; allowed: one value or several.")
            if name in given.get(section, {}):
                raise UserError(f"{key} is both set and searched; allowed: one of --set and --grid.")
        check_seeds(self.seeds)
        if self.sampler != "grid":
            needed(f"The sampler {self.sampler}", "optuna", extra="tune")
            if number is None or number < 1:
                raise UserError(f"--trials is {number}; allowed: at least 1.")
        elif number is not None:
            allowed = "with --sampler random or tpe"
            raise UserError(f"--trials is {number}, but a grid is tried as a whole; allowed: {allowed}.")
        for combination in self._each_value():
            self.config(combination, self.seeds[0])

    def prepare(self) -> tuple[SharedData, str, list[str]]:
        """Make every seed's data, without their test part, and check the runs; returns data, metric, fingerprints.

        All is refused where no value can be trained; else those that can't fail their trials.
        """

        def make(config: Config) -> Dataset:
            dataset = config.make_data()
            return dataset._replace(federation=dataset.federation.without_test())

        data, metric, refused = SharedData(make, len(self.seeds)), "", list[UserError]()
        first, *others = self._each_value()
        # The first values try, with each seed, what is made at a run's start, such as a graph.
        for values, seed in [*((first, seed) for seed in self.seeds), *((other, self.seeds[0]) for other in others)]:
            config = self.config(values, seed)
            dataset = data.of(config)
            if not len(dataset.federation.validation):
                allowed = "a share or number of them above 0 (data.validation, data.num_validation)"
                raise UserError(f"The data of seed {seed} have no validation samples to choose by; allowed: {allowed}.")
            try:
                trainer = Trainer.prepare(config, dataset, fresh=values is first, tries=False)
            except UserError as error:
                refused.append(error)
            else:
                metric = metric or trainer.recipe.metrics[0].name
        if not metric:
            raise refused[0]
        return data, metric, [data.of(self.config(first, seed)).federation.fingerprint for seed in self.seeds]

    def record(self) -> Record:
        grids = {key: list(values) for key, values in self.grids.items()}
        return {"grids": grids, "sampler": self.sampler, "seeds": list(self.seeds)}

    def _each_value(self) -> Iterator[Values]:
        """Yield every value once, with the others' first: what a setting allows has no gaps, so ranges are fine too."""
        first = {key: values[0] for key, values in self.grids.items()}
        yield first
        for key, values in self.grids.items():
            yield from (first | {key: value} for value in values[1:])


@dataclass(frozen=True)
class Trial:
    """Values that were tried, and their scores."""

    number: int
    values: Values
    # The validation score of the state that counts, one per seed; None where training failed, or is not over.
    scores: tuple[float, ...] | None = None
    seconds: float | None = None  # of all runs together
    error: str | None = None  # why training failed

    @property
    def spread(self) -> Spread:
        return Spread.of(self.scores or [None])

    def record(self) -> Record:
        return vars(self) | self.spread._asdict()

    @classmethod
    def read(cls, path: Path) -> Trial:
        record = read_json(path, TRIAL)
        scores = record["scores"] and tuple(record["scores"])
        return cls(record["number"], record["values"], scores, record["seconds"], record["error"])


@dataclass(frozen=True)
class Tuned:
    """The result: the trials, the best first and the failed last."""

    search: Search
    metric: str  # its name; it is measured on the validation part
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The trial with the best mean; None where all failed."""
        return self.trials[0] if self.trials[0].scores is not None else None

    @property
    def edges(self) -> dict[str, str]:
        """The settings whose chosen value lies at the "lower" or "upper" edge of what was searched."""
        chosen = self.best.values if self.best else {}
        found = {key: edge_of(self.search.grids[key], value, self.search.sampler) for key, value in chosen.items()}
        return {key: edge for key, edge in found.items() if edge is not None}

    @property
    def paper_rate(self) -> float | None:
        """The paper's learning rate, where it has one and ours was searched."""
        base = self.search.base
        return paper_rate(base.name("data"), base.name("method")) if RATE in self.search.grids else None

    def record(self) -> Record:
        base = self.search.base
        return {
            "data": base.name("data"),
            "method": base.name("method"),
            "metric": f"validation_{self.metric}",
            "rounds": base.run.rounds,
            **self.search.record(),
            "chosen": self.best.values if self.best else None,
            "edges": self.edges,
            "paper_learning_rate": self.paper_rate,
            "trials": [trial.record() for trial in self.trials],
        }


def tune(
    search: Search, out: Path, *, resume: bool = False, retry_failed: bool = False, listener: Listener | None = None
) -> Tuned:
    """Carry out a search in ``out``, or ``resume`` the one in it; the ``listener`` hears the rounds of all runs.

    Trials that failed are not made again, unless ``retry_failed`` asks for it.
    """
    search.check()
    base = RunFolder(out / "base")
    sweep.check_folder("search", out, resume, base.exists())
    data, metric, prints = search.prepare()
    upwards = find_metric(metric).larger_is_better
    # One process at a time: a trial that is not over then was stopped, and is nobody else's.
    with sweep.held("search", out, resume, base.exists), base.reopened() if resume else base.created(search.base):
        base.reopen(search.base)
        _check_same(out, search.record() | {"data": prints})
        known = {trial.number: trial for trial in map(Trial.read, out.glob("trials/*/trial.json"))}
        trials: list[Trial] = []
        for number in range(search.count):
            trial = known.get(number)
            if trial is None:
                tried = [(other.values, other.spread.mean) for other in trials]
                trial = Trial(number, next_values(search.grids, search.sampler, search.seeds[0], tried, upwards))
            if trial.error is not None and retry_failed:
                sweep.clear_failed(_entries(trial, search, out))
                trial = replace(trial, error=None)
            if trial.scores is None and trial.error is None:
                others = [entry for other in trials if other.scores for entry in _entries(other, search, out)]
                trial = _carry_out(trial, search, data, metric, out, listener or _unheard, others)
            trials.append(trial)
    # Of equals, the first one tried stays first.
    return Tuned(search, metric, tuple(sorted(trials, key=lambda trial: trial.spread.rank(metric))))


def _unheard(record: Record) -> None: ...


def _check_same(out: Path, content: Record) -> None:
    """Write down what is searched; refuse to mix it with another search."""
    path = out / "search.json"
    if not path.exists():
        write_json(path, content)
    before = read_json(path, SEARCH)
    changed = sorted(name for name, value in plain(content).items() if before.get(name) != value)
    if changed == ["data"]:
        raise UserError(f"The data are not those that the search in {out} was begun on.")
    if changed:
        mend = "resume it as it was, or choose another folder"
        raise UserError(f"The search in {out} was begun with other settings ({', '.join(changed)}); {mend}.")


def _entries(trial: Trial, search: Search, out: Path) -> list[Entry]:
    layers = [*search.ground, *layers_of(trial.values)]
    return sweep.plan(out / "trials" / f"{trial.number:03d}", {}, search.seeds, lambda _: layers)


def _carry_out(
    trial: Trial, search: Search, data: SharedData, metric: str, out: Path, listener: Listener, others: list[Entry]
) -> Trial:
    """Train a trial's runs, from where they were stopped if they were; how it ended is written last."""
    place, rounds = out / "trials" / f"{trial.number:03d}", search.base.run.rounds
    place.mkdir(parents=True, exist_ok=True)
    # Resumed, the trial has the same values, even if another version of the sampler would draw others.
    write_json(place / "trial.json", trial.record())
    done, seed, ends = trial.number * len(search.seeds) * rounds, search.seeds[0], []

    def listen(record: Record) -> None:
        listener({"round": done + record["round"]})

    try:
        with _failing(UserError):  # values that don't go together
            search.config(trial.values, seed)
        for entry in _entries(trial, search, out):
            seed = entry.seed
            ends.append(_end(entry, data, metric, listen, others))
            done += rounds
        scores, seconds = zip(*ends, strict=True)
        trial = replace(trial, scores=scores, seconds=sum(seconds))
    except _FailedError as failed:
        trial = replace(trial, error=f"seed {seed}: {failed}")
    write_json(place / "trial.json", trial.record())
    return trial


class _FailedError(Exception):
    """Training can't come to an end with a trial's values."""


@contextmanager
def _failing(kind: type[UserError]) -> Iterator[None]:
    """Take an error of this kind for the values' fault; another, such as a folder's, is not."""
    try:
        yield
    except kind as error:
        raise _FailedError(error) from None


def _end(
    entry: Entry, data: SharedData, metric: str, listener: Listener, others: Sequence[Entry]
) -> tuple[float, float]:
    """Carry a run out, if it is not complete; returns the score to choose by and the seconds it took."""
    summary: Mapping[str, Any] | None = entry.folder.summary()
    if summary is None:
        with _failing(UserError):
            trainer = Trainer.prepare(entry.config, data.of(entry.config), fresh=not entry.folder.exists())
        begun = sweep.is_begun(entry, trainer, (other.folder for other in others))
        with _failing(DivergedError):
            summary = carry_out(trainer, out=entry.folder.path, resume=begun, listener=listener).summary
    if (failure := entry.failure) is not None:
        raise _FailedError(failure.message)
    score = summary[f"validation_{metric}"]
    if score is None or not math.isfinite(score):
        raise _FailedError("the validation score is not finite")
    return float(score), summary["seconds_total"]
