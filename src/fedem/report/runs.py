"""Folders of runs that are over -> figures by data, method and settings, then seed. Shapes: T clients, M components."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedem.core.errors import UserError, check_known
from fedem.core.schema import read_json_if_there
from fedem.methods import METHODS
from fedem.models.metrics import Metric, find_metric
from fedem.runs.config import GIVEN, ON_THE_WAY, Config
from fedem.runs.evaluate import Record, metrics_of
from fedem.runs.folder import SUMMARY_FILE, RunFolder
from fedem.studies.comparison import COMPARISON, Comparison, data_name, summarize
from fedem.studies.sweep import Entry, failures, reason

Numbers = NDArray[np.float64]
Settings = Mapping[str, Any]  # values of a configuration by section.key

# What says where and how a run was made, not what it is.
_PLACE = {f"run.{key}" for key in ("seed", "device", "engine", "chunk_size", "partition_hash")}
_PLACE |= {"run.checkpoint_every", "run.checkpoint_seconds"}
_SHORT = {"method.num_components": "M"}


@dataclass(frozen=True)
class Clients:
    """Clients of a run, in the order of its clients.csv."""

    names: tuple[str, ...]
    sizes: Numbers  # numbers of training samples, [T]
    scores: Numbers  # on the test part, [T]; not a number where a client has no test samples
    weights: Numbers  # of the mixture, [T, M]; M is 0 where a client has one model


@dataclass(frozen=True)
class Run:
    """A run that is over; one that failed has no outcome, and no clients."""

    method: str
    seed: int
    folder: RunFolder
    config: Config
    summary: dict[str, Any]
    history: list[Record]
    clients: Clients  # those that took part in training
    fingerprint: str | None  # of the samples; None where the checkpoint was removed
    command: str | None  # what makes the run again; None for data or models passed from Python
    called: str = ""  # what it is called, with its other seeds; empty: by its method and what differs in its settings

    @property
    def entry(self) -> Entry:
        return Entry({"method": self.method}, self.seed, self.config, self.folder)

    @cached_property
    def sent(self) -> Numbers:
        """Bytes sent up and down, all clients together, by the end of each recorded round."""
        return np.cumsum([(line["bytes_up"] or 0) + (line["bytes_down"] or 0) for line in self.history], dtype=float)


def read_runs(paths: Sequence[Path], called: Mapping[Path, str] = {}) -> list[Run]:
    """Read the runs below ``paths``, each once; a path is a run's folder (with its baselines) or one of many runs'.

    ``called`` says what runs are called, by their folders.
    """
    if not paths:
        raise UserError("No folders are given; allowed: one or several folders of runs, comparisons or experiments.")
    names = {path.resolve(): name for path, name in called.items()}
    runs: dict[Path, Run] = {}
    for path in paths:
        folders, whole = _folders(path), path / "comparison.json"
        command = (read_json_if_there(whole, COMPARISON) or {}).get("command")
        for folder in folders:
            if (place := folder.path.resolve()) not in runs:
                runs[place] = replace(_read(folder, command), called=names.get(place, ""))
    return list(runs.values())


def _folders(path: Path) -> list[RunFolder]:
    """Return a run's folder and its baselines', or those of a comparison or an experiment."""
    if not path.is_dir():
        raise UserError(f"There is no folder {path}; allowed: the folder of a run, a comparison or an experiment.")
    if (folder := RunFolder(path)).exists():
        return [folder, *folder.baselines()]
    if (path / "search.json").is_file():
        what = "a search of settings (tune.json has its trials)"
        raise UserError(f"{path} holds {what}; allowed: runs, or folders of runs.")
    if not (found := [RunFolder(place.parent) for place in sorted(path.glob("*/config.toml"))]):
        raise UserError(f"{path} holds no run (no config.toml) and no runs in folders of their own (no */config.toml).")
    return found


def _read(folder: RunFolder, command: str | None) -> Run:
    """Read a run that is over; ``command`` made it and others, where that is known."""
    if (summary := folder.summary()) is None:
        if folder.failure() is None:
            raise UserError(f"The run in {folder.path} is not complete; go on with it first (--resume).")
        config, nothing = folder.config(), np.zeros(0)
        nobody = Clients((), nothing, nothing, np.zeros((0, 0)))
        return Run(config.name("method"), config.run.seed, folder, config, {}, [], nobody, None, command)
    check_known(f"method in {folder.path / SUMMARY_FILE}", [summary["method"]], METHODS)
    everybody = folder.clients()
    rows = [row for row in everybody if row["role"] == "train"]
    if everybody and not rows:
        raise UserError(f"{folder.path} holds clients fitted after training; allowed: runs of training.")
    # A server has no scores of single clients; its run's file of them is empty.
    if rows and len(rows) != summary["num_clients"]:
        found = f"{len(rows)} clients that were trained, and summary.json {summary['num_clients']}"
        raise UserError(f"{folder.path}/clients.csv has {found}: the file is damaged.")

    def column(name: str) -> Numbers:
        return np.array([float(row.get(name) or "nan") for row in rows], dtype=np.float64)

    weights = [column(name) for name in (rows[0] if rows else {}) if name.startswith("weight_")]
    stacked = np.array(weights, dtype=np.float64).reshape(len(weights), len(rows)).T
    names, scores = tuple(row["client"] for row in rows), column(f"test_{metrics_of(summary)[0].name}")
    scores[[row.get("hostile") == "True" for row in rows]] = np.nan  # they are no part of any figure
    config, clients = folder.config(), Clients(names, column("train_samples"), scores, stacked)
    if command is None and GIVEN not in (config.name("data"), config.name("model")):
        command = shlex.join(["fedem", "train", str(folder.path / "config.toml")])
    fingerprint = folder.standing()[0].get("data")
    history, seed = folder.metrics(), int(summary["seed"])
    return Run(summary["method"], seed, folder, config, summary, history, clients, fingerprint, command)


@dataclass(frozen=True)
class Gathered:
    """Runs on the same data. An entry is a method, or one of several settings of a method."""

    comparison: Comparison  # one row per entry; its method is the entry's name
    runs: dict[str, list[Run]]  # of each entry, seed by seed; the best entry first
    looks: dict[str, dict[str, Any]]  # each entry's colour, line and marker, the same for all data
    place: str  # a word for ids and folders; empty where the report has no other data
    notes: tuple[str, ...] = ()  # what else is to be said, such as of data on which every run failed

    @property
    def titles(self) -> dict[str, str]:
        """What each entry is called in tables; ``name`` is what a sentence calls it."""
        return {row.method: row.title for row in self.comparison.rows}

    def name(self, entry: str) -> str:
        return _name(entry, self.runs[entry][0].method)

    def best_of(self, method: str) -> str | None:
        return next((entry for entry, runs in self.runs.items() if runs[0].method == method), None)

    def titled(self, title: str) -> str:
        """Name the data as well, where a report has several."""
        return f"{title}: {self.comparison.data}" if self.place else title

    @property
    def has_equal_seeds(self) -> bool:
        return all(len(runs) == len(self.comparison.seeds) for runs in self.runs.values())

    @property
    def differences(self) -> dict[str, list[str]]:
        """Which settings differ among the entries of a method, by its title, where it has several."""
        settings: dict[str, list[Settings]] = {}
        for runs in self.runs.values():
            settings.setdefault(METHODS[runs[0].method].title, []).append(_settings_of(runs[0]))
        return {title: differing(each) for title, each in settings.items() if len(each) > 1}

    @property
    def commands(self) -> list[str]:
        found = (run.command for runs in self.runs.values() for run in runs)
        return list(dict.fromkeys(command for command in found if command is not None))

    @cached_property
    def metric(self) -> Metric:
        return find_metric(self.comparison.metric)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics by the names of their figures in a summary; the one that decides comes first."""
        further = metrics_of(next(iter(self.runs.values()))[0].summary)
        return {f"test_{metric.name}": metric for metric in (self.metric, *further)}

    @property
    def score(self) -> str:
        return f"test_{self.metric.name}"

    @property
    def label(self) -> str:
        return f"test {self.metric.unit}"

    def in_words(self, value: float | None, metric: Metric | None = None) -> str:
        metric = metric or self.metric
        return metric.text(value) + (" %" if metric.in_percent and value is not None else "")

    def apart(self, better: float, worse: float) -> str:
        amount = self.metric.text(abs(better - worse), plain=".3g") + (" points" if self.metric.in_percent else "")
        return f"{amount} {'above' if better >= worse else 'below'}"


def gather(paths: Sequence[Path], called: Mapping[Path, str] = {}) -> list[Gathered]:
    """Read the runs below ``paths`` and sort them; those on the same data come together.

    ``called`` says what runs are called, by their folders; the others have a name of their method and settings.
    """
    from fedem.report.pictures.canvas import look  # pictures are of what is read here

    sorted_runs, notes = list[dict[str, list[Run]]](), list[str]()
    for entries in (_entries(runs) for runs in _grouped(read_runs(paths, called), _data_of)):
        failed = {name: failures(run.entry for run in runs) for name, runs in entries.items()}
        if all(failed.values()):
            on = data_name(next(iter(entries.values()))[0].config)
            each = ((f"{name} on {on}", by_seed) for name, found in failed.items() for by_seed in found.values())
            notes += starmap(reason, each)
        else:
            sorted_runs.append(entries)
    if not sorted_runs:
        raise UserError(f"No run came to an end. {' '.join(notes)}")
    comparisons = [_compare(entries) for entries in sorted_runs]
    names = _names([comparison.data for comparison in comparisons], sorted_runs)
    methods = {entry: runs[0].method for entries in sorted_runs for entry, runs in entries.items()}
    # An entry looks like its method, unless some method has several.
    plain = all(entry == method for entry, method in methods.items())
    looks = {entry: look(entry, METHODS if plain else methods) for entry in methods}
    sets = zip(names, _places(names), comparisons, sorted_runs, strict=True)
    gathered = [
        Gathered(replace(found, data=name), {row.method: entries[row.method] for row in found.rows}, looks, place)
        for name, place, found, entries in sets
    ]
    return [replace(gathered[0], notes=tuple(notes)), *gathered[1:]]


def _settings_of(run: Run) -> Settings:
    """Return what may not differ among the seeds of an entry."""
    sections = run.config.sections.items()
    flat = {f"{section}.{key}": value for section, values in sections for key, value in values.items()}
    left_out = _PLACE if run.config.run.patience else {*_PLACE, ON_THE_WAY}  # unless scores decide when it ends
    return {place: value for place, value in flat.items() if place not in left_out}


def _data_of(run: Run) -> Settings:
    """Return the settings that the data are made by, and whether clients are held out."""
    made = {place: value for place, value in _settings_of(run).items() if place.startswith(("data.", "partition."))}
    return made | {"run.unseen": run.config.run.unseen}


def _grouped(runs: Sequence[Run], key: Callable[[Run], Settings]) -> list[list[Run]]:
    """Put runs of equal settings together, in the order of their first ones."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(key(run), sort_keys=True), []).append(run)
    return list(groups.values())


def _entries(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Sort runs on the same data by method and settings, then by seed; refuse what nothing would distinguish."""
    by_seed: dict[int, Run] = {}
    for run in (run for run in runs if run.summary):
        first = by_seed.setdefault(run.seed, run)
        if (
            first.clients.names != run.clients.names
            or not np.array_equal(first.clients.sizes, run.clients.sizes)
            or len({first.fingerprint, run.fingerprint} - {None}) > 1
        ):
            where = f"{first.folder.path} and {run.folder.path} have the same settings of data and the same seed"
            raise UserError(f"{where}, but other clients; allowed: the same clients for the same settings and seed.")
    entries: dict[str, list[Run]] = {}
    for name, group in _named_groups(runs):
        ordered = sorted(group, key=lambda run: run.seed)
        for first, run in pairwise(ordered):
            if first.seed == run.seed:
                both = f"{first.folder.path} and {run.folder.path} are both {run.method} with seed {run.seed}"
                raise UserError(f"{both} and the same settings; allowed: each once.")
        entries[name] = ordered
    return entries


def _named_groups(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Group runs on the same data by what they are called or, where they are not, by method and settings."""
    for name in dict.fromkeys(run.called for run in runs if run.called):
        yield name, [run for run in runs if run.called == name]
    others = [run for run in runs if not run.called]
    for method in dict.fromkeys(run.method for run in others):
        groups = _grouped([run for run in others if run.method == method], _settings_of)
        labels = distinct_labels([_settings_of(group[0]) for group in groups])
        for label, group in zip(labels, groups, strict=True):
            yield f"{method} ({label})" if label else method, group


def differing(settings: Sequence[Settings]) -> list[str]:
    """Return the places whose values are not the same in all ``settings``."""
    places = dict.fromkeys(place for each in settings for place in each)
    return [place for place in places if len({json.dumps(each.get(place)) for each in settings}) > 1]


def distinct_labels(settings: Sequence[Settings]) -> list[str]:
    """Return a label for each, of as few values as distinguish them: those of a section's name before its others."""

    def count(places: Sequence[str]) -> int:
        return len({json.dumps([each.get(place) for place in places]) for each in settings})

    def assigned(place: str, value: Any) -> str:
        return f"{_SHORT.get(place, place)}={value if isinstance(value, str) else json.dumps(value)}"

    kept: list[str] = []
    for place in sorted(differing(settings), key=lambda place: not place.endswith(".name")):
        if count([*kept, place]) > count(kept):
            kept.append(place)
    return [", ".join(assigned(place, each[place]) for place in kept if place in each) for each in settings]


def _compare(entries: Mapping[str, list[Run]]) -> Comparison:
    """Sum up each entry over the seeds that it has."""
    runs = sorted(((name, run) for name, runs in entries.items() for run in runs), key=lambda pair: pair[1].seed)
    found = summarize([Entry({"method": name}, run.seed, run.config, run.folder) for name, run in runs])
    titles = {name: _name(name, runs[0].method) for name, runs in entries.items() if name != runs[0].method}
    rows = [replace(row, title=titles.get(row.method, row.title)) for row in found.rows]
    failed = [replace(each, title=titles.get(each.method, each.title)) for each in found.failed]
    return replace(found, rows=rows, failed=failed)


def _name(entry: str, method: str) -> str:
    return METHODS[method].title + entry.removeprefix(method) if entry.startswith(method) else entry


def _names(names: Sequence[str], sorted_runs: Sequence[Mapping[str, list[Run]]]) -> list[str]:
    """Return a name for each data set; to those of the same name what differs is added."""
    settings = [_data_of(next(iter(entries.values()))[0]) for entries in sorted_runs]
    found = []
    for name, each in zip(names, settings, strict=True):
        alike = [other for other, kind in zip(settings, names, strict=True) if kind == name]
        label = distinct_labels(alike)[alike.index(each)]
        found.append(f"{name} ({label})" if label else name)
    return found


def _places(names: Sequence[str]) -> list[str]:
    """Return a word each for ids and folders; none where there is one data set alone."""
    found: list[str] = []
    for name in names if len(names) > 1 else ():
        word = re.sub(r"[^a-z0-9.+]+", "-", name.lower()).strip("-")
        found.append(f"{word}-{len(found)}" if word in found else word)
    return found or [""]
