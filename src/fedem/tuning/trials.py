"""The trials of a search, one after the other: each an ordinary run a seed, scored on the validation part alone.

========================  ==========================================================
base/config.toml          the run whose settings are tried
search.json               what is searched, on which data
trials/NNN/trial.json     a trial's values and, once it is over, what they came to
trials/NNN/seedS/         its runs (see :mod:`fedem.runs`)
========================  ==========================================================

The next trial's values are a function of the trials before, so a search that was killed goes on as if it never was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedem.checkpoint import plain, write_json
from fedem.comparison import Spread
from fedem.config import Config
from fedem.data.base import Dataset
from fedem.errors import UserError
from fedem.job import Job
from fedem.records import Record, has_diverged
from fedem.runs import RunFolder
from fedem.sections import Values
from fedem.training import Listener, carry_out
from fedem.tuning.grids import RATE, edge_of, next_values, paper_rate
from fedem.tuning.search import Search

_DIVERGED = "Training diverged"


@dataclass(frozen=True)
class Trial:
    """Values that were tried, and what they came to."""

    number: int
    values: Values
    scores: tuple[float, ...] | None = None
    """the validation score after the last round, one a seed; None where training failed, or is not over"""
    seconds: float | None = None
    """of all runs together"""
    error: str | None = None
    """why training failed"""

    @property
    def is_over(self) -> bool:
        """Whether the trial came to an end, be it a bad one."""
        return self.scores is not None or self.error is not None

    @property
    def spread(self) -> Spread:
        """The score over the seeds."""
        return Spread.of(self.scores or [None])

    def record(self) -> Record:
        """Name all figures, for a file."""
        facts = ("number", "values", "scores", "seconds", "error")
        return {name: getattr(self, name) for name in facts} | self.spread._asdict()

    @classmethod
    def read(cls, path: Path) -> Trial:
        """Read a trial's file."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            scores = None if record["scores"] is None else tuple(record["scores"])
            return cls(record["number"], record["values"], scores, record["seconds"], record["error"])
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path} can't be read as a trial ({type(error).__name__}: {error}).") from None


@dataclass(frozen=True)
class Tuned:
    """What came out: the trials, the best first and the failed last."""

    search: Search
    metric: str
    """accuracy or mean_squared_error, on the validation part"""
    trials: tuple[Trial, ...]

    @classmethod
    def of(cls, search: Search, metric: str, trials: Iterable[Trial]) -> Tuned:
        """Rank the trials by their means; of equals, the first one tried stays first."""
        sign = -1 if metric == "accuracy" else 1

        def rank(trial: Trial) -> float:
            return math.inf if (mean := trial.spread.mean) is None else sign * mean

        return cls(search, metric, tuple(sorted(trials, key=rank)))

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
        """The paper's learning rate, where it tells one and ours was searched."""
        base = self.search.base
        return paper_rate(base.name("data"), base.name("method")) if RATE in self.search.grids else None

    def record(self) -> Record:
        """Name all figures, for a file."""
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


def check_place(out: Path, resume: bool) -> None:
    """Refuse a folder that can't be written, that holds no search to resume or, unless resumed, anything."""
    base = RunFolder(out / "base")
    if resume and not base.exists():
        raise UserError(f"There is no search to resume in {out}.")
    if not resume and out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; go on with --resume, or choose another folder.")
    base.prepare(resume)


def tune(search: Search, out: Path, *, resume: bool = False, listener: Listener | None = None) -> Tuned:
    """Carry out a search in a folder.

    Args:
        search: what to try.
        out: the folder.
        resume: go on with the search in ``out``; trials that are over are not made again.
        listener: told of the progress, the number of rounds done in all as a record's "round".

    """
    search.check()
    check_place(out, resume)
    data, metric = search.prepare()
    base = RunFolder(out / "base")
    if not resume:
        base.create(search.base)
    # One process at a time: a trial that is not over then was stopped, and is nobody else's.
    with base.locked():
        base.reopen(search.base)
        _check_same(out, search, data)
        known = {trial.number: trial for trial in map(Trial.read, out.glob("trials/*/trial.json"))}
        trials: list[Trial] = []
        for number in range(search.count):
            trial = known.get(number)
            if trial is None:
                tried = [(other.values, other.spread.mean) for other in trials]
                drawn = next_values(search.grids, search.sampler, search.seeds[0], tried, metric == "accuracy")
                trial = Trial(number, drawn)
            if not trial.is_over:
                trial = _carry_out(trial, search, data, metric, out, listener)
            trials.append(trial)
    return Tuned.of(search, metric, trials)


def _check_same(out: Path, search: Search, data: Mapping[int, Dataset]) -> None:
    """Write down what is searched; refuse to mix it with another search."""
    path = out / "search.json"
    facts = search.record() | {"data": [dataset.federation.fingerprint for dataset in data.values()]}
    if not path.exists():
        write_json(path, facts)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted(name for name, value in plain(facts).items() if before.get(name) != value)
    if changed == ["data"]:
        raise UserError(f"The data are not those that the search in {out} was begun on.")
    if changed:
        raise UserError(
            f"The search in {out} was begun with other settings ({', '.join(changed)}); resume it as it was, or choose "
            "another folder."
        )


def _carry_out(
    trial: Trial, search: Search, data: Mapping[int, Dataset], metric: str, out: Path, listener: Listener | None
) -> Trial:
    """Train a trial's runs, from where they were stopped if they were; how it ended is written last."""
    place, rounds = out / "trials" / f"{trial.number:03d}", search.base.run.rounds
    place.mkdir(parents=True, exist_ok=True)
    # Resumed, the trial has the same values, even if another version of the sampler would draw others.
    write_json(place / "trial.json", trial.record())
    done, scores, seconds = trial.number * len(search.seeds) * rounds, [], 0.0
    try:
        for seed in search.seeds:
            watch = None if listener is None else _shifted(listener, done)
            summary = _run(search.config(trial.values, seed), data[seed], RunFolder(place / f"seed{seed}"), watch)
            if has_diverged(summary):
                raise _FailedError(f"{_DIVERGED}: the loss on the training samples is {summary['train_loss']}")
            scores.append(_finite(summary[f"validation_{metric}"]))
            seconds += summary["seconds_total"]
            done += rounds
        trial = replace(trial, scores=tuple(scores), seconds=seconds)
    except _FailedError as failed:
        trial = replace(trial, error=f"seed {seed}: {failed}")
    write_json(place / "trial.json", trial.record())
    return trial


class _FailedError(Exception):
    """Training can't come to an end with a trial's values."""


def _run(config: Config, dataset: Dataset, folder: RunFolder, listener: Listener | None) -> Mapping[str, Any]:
    """Carry out one run, unless it is complete; returns its summary."""
    if (summary := folder.summary()) is not None:
        return summary
    try:
        job = Job.prepare(config, dataset, None, fresh=not folder.exists())
    except UserError as error:
        raise _FailedError(error) from None
    try:
        return carry_out(job, out=folder.path, resume=folder.exists(), listener=listener).summary
    except UserError as error:
        # Whatever else goes wrong, such as a folder that can't be written, is not the values' fault.
        if not str(error).startswith(_DIVERGED):
            raise
        raise _FailedError(error) from None


def _finite(score: float | None) -> float:
    if score is None or not math.isfinite(score):
        raise _FailedError("the validation score is not finite")
    return float(score)


def _shifted(listener: Listener, done: int) -> Listener:
    return lambda record: listener({"round": done + record["round"]})
