"""Experiments that are declared, not programmed: a file says which runs a table of the paper is made of."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedem.core.errors import UserError, unknown
from fedem.data.dataset import Dataset
from fedem.data.store import Public
from fedem.runs.config import Config, Layer, parse_assignment
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import Listener, Trainer, carry_out
from fedem.studies.comparison import Spread

__all__ = [
    "Entry",
    "Experiment",
    "LatestData",
    "Line",
    "check",
    "find",
    "listed",
    "plan",
    "read",
    "sort_settings",
    "tabulate",
    "work_off",
]


# What an experiment's file declares.
#
# A TOML file says which runs a table or a figure of the paper is made of: settings of all, choices on one or several
# axes, the figures to show, and what the paper has for them.

FILE = "experiment.toml"
SLASH = " / "
"""between labels, and between a figure and the label of what it is the ratio to"""
ALL = "all"
"""in [quick], all runs"""
_KEYS = ("title", "place", "seeds", "figures", "settings", "axes", "without", "paper", "quick")


@dataclass(frozen=True)
class Experiment:
    """What a file declares.

    Attributes:
        name: of its folder.
        title: what is shown.
        place: where the paper has it.
        seeds: how many the paper has.
        figures: names of a summary's figures, ``recovery.cluster_accuracy`` for what lies deeper and
            ``seconds_per_round / FedAvg`` for the ratio to the run that has this label in place of its own.
        settings: of all runs.
        axes: the choices: axis -> label -> settings.
        without: runs that are left out: labels by axis.
        paper: the paper's figures by the labels, in the order of the axes, joined with " / ".
        quick: settings of a short trial of the whole, of the runs with a label or of "all".

    """

    name: str
    title: str
    place: str
    seeds: int
    figures: tuple[str, ...]
    settings: tuple[Layer, ...]
    axes: Mapping[str, Mapping[str, tuple[Layer, ...]]]
    without: tuple[Mapping[str, str], ...] = ()
    paper: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    quick: Mapping[str, tuple[Layer, ...]] = field(default_factory=dict)

    def parted(self, figure: str) -> tuple[str, str | None, str]:
        """Part a figure into its name and, for a ratio, axis and label of what it is the ratio to."""
        name, _, label = figure.partition(SLASH)
        return name, next((axis for axis, choices in self.axes.items() if label in choices), None), label


def read(folder: Path) -> Experiment:
    """Read the experiment declared in ``folder``."""
    path = folder / FILE
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} can't be read as an experiment: {error}") from None
    for key in content:
        if key not in _KEYS:
            raise unknown(f"key in {path}", key, _KEYS)
    for key in ("title", "figures", "axes"):
        if key not in content:
            raise UserError(f"{path} has no {key!r}; it is needed.")
    for key in ("settings", "axes", "paper", "quick"):
        _check(path, key, content.get(key, {}), isinstance(content.get(key, {}), Mapping), "a table")
    for axis, choices in content["axes"].items():
        _check(path, f"axes.{axis}", choices, isinstance(choices, Mapping) and bool(choices), "a table of choices")
    axes = {
        axis: {label: _layers(settings, f"{path}, axes.{axis}") for label, settings in choices.items()}
        for axis, choices in content["axes"].items()
    }
    labels = [label for choices in axes.values() for label in choices]
    for label in labels:
        named = not any(mark in label for mark in (",", ":", SLASH))
        _check(path, "label", label, named, f"labels without ',', ':' and '{SLASH}', which part them in options")
    figures, seeds, without = content["figures"], content.get("seeds", 1), content.get("without", [])
    _check(path, "seeds", seeds, type(seeds) is int and seeds > 0, "a whole number from 1")
    words = isinstance(figures, list) and all(isinstance(name, str) for name in figures)
    _check(path, "figures", figures, words and bool(figures), "a list of names")
    for name in figures:
        _, slash, label = name.partition(SLASH)
        if slash and label not in labels:
            raise unknown(f"label in {path}, figures", label, labels)
    gaps = isinstance(without, list) and all(
        isinstance(gap, Mapping) and gap and all(label in axes.get(axis, ()) for axis, label in gap.items())
        for gap in without
    )
    _check(path, "without", without, gaps, f"tables of labels by axis ({', '.join(axes)})")
    for label in content.get("quick", {}):
        if label not in (*labels, ALL):
            raise unknown(f"label in {path}, quick", label, (*labels, ALL))
    return Experiment(
        folder.name,
        str(content["title"]),
        str(content.get("place", "")),
        seeds,
        tuple(figures),
        _layers(content.get("settings", {}), f"{path}, settings"),
        axes,
        tuple(without),
        {key: _paper(path, key, values, axes, figures) for key, values in content.get("paper", {}).items()},
        {label: _layers(settings, f"{path}, quick") for label, settings in content.get("quick", {}).items()},
    )


def _check(path: Path, key: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise UserError(f"{path} has {key} = {value!r}; allowed: {allowed}.")


def _paper(
    path: Path, key: str, values: Any, axes: Mapping[str, Mapping[str, object]], figures: Sequence[str]
) -> tuple[float | None, ...]:
    """Read the paper's figures of one choice on every axis."""
    if key not in map(SLASH.join, itertools.product(*axes.values())):
        raise UserError(
            f"{path} has paper.{key!r}; allowed: a label of each axis ({', '.join(axes)}) between '{SLASH}'."
        )
    numbers = isinstance(values, list) and all(value == "" or type(value) in (int, float) for value in values)
    _check(path, f"paper.{key!r}", values, numbers and len(values) == len(figures), f'{len(figures)} numbers or ""')
    return tuple(None if value == "" else float(value) for value in values)


def find(place: Path, name: str) -> Experiment:
    """Return the experiment called ``name`` among those in ``place``."""
    names = listed(place)
    if name not in names:
        raise unknown("experiment", name, names)
    return read(place / name)


def listed(place: Path) -> list[str]:
    """Return the names of the experiments in a folder."""
    names = sorted(path.parent.name for path in place.glob(f"*/{FILE}"))
    if not names:
        raise UserError(
            f"There are no experiments in {place} (no */{FILE}); the paper's are in the folder experiments of fedem's "
            "repository. Go there, or name the folder with --experiments."
        )
    return names


def _layers(settings: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    """Turn ``section.key = value`` into layers of settings."""
    if not isinstance(settings, Mapping):
        raise UserError(f'{where} has {settings!r}; allowed: {{ "section.key" = value }}.')
    layers: list[Layer] = []
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        if not dot or isinstance(value, Mapping):
            raise UserError(f'{where} has {key!r}; allowed: "section.key" = value.')
        layers.append({section: {name: value}})
    return tuple(layers)


# The runs of an experiment: a choice on every axis and a seed, each an ordinary run in a folder of its own.
#
# All runs of a seed with the same data have the same clients and splits.


class Entry(NamedTuple):
    """One run of an experiment."""

    labels: dict[str, str]
    """its choice on each axis"""
    seed: int
    config: Config
    folder: RunFolder

    @property
    def title(self) -> str:
        """Its labels and seed."""
        return f"{', '.join(self.labels.values())}, seed {self.seed}"

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.folder.summary() is not None

    def check_complete(self) -> None:
        """Refuse a complete run with other settings than those asked for: its figures would pass for theirs."""
        if not self.is_complete:
            return
        made = self.folder.config()
        # What was settled with the data in hand can't be known without them.
        settled = self.config.replace("run", partition_hash=made.run.partition_hash)
        if settled.loss is None:
            settled = settled.replace("loss", **made.sections["loss"])
        self.folder.reopen(settled)


def plan(
    experiment: Experiment,
    out: Path,
    seeds: Sequence[int],
    only: Mapping[str, Sequence[str]] | None = None,
    asked: Sequence[Layer] = (),
    own: Mapping[str, Sequence[Layer]] | None = None,
    quick: bool = False,
) -> list[Entry]:
    """Return the runs, those with the same data and seed together; configurations and complete runs are checked.

    Args:
        experiment: what was declared.
        out: where the runs' folders lie.
        seeds: one run of each choice for each.
        only: labels by axis, to leave out the others.
        asked: further settings of all runs.
        own: further settings of the runs with a label.
        quick: with the settings of the short trial.

    """
    if len(set(seeds)) < len(seeds):
        raise UserError(f"The seeds are {', '.join(map(str, seeds))}; allowed: one or several, each once.")
    axes = _chosen(experiment, only or {})
    entries = []
    for labels in (dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values())):
        if any(all(labels.get(axis) == label for axis, label in gap.items()) for gap in experiment.without):
            continue
        layers = [*experiment.settings]
        for axis, label in labels.items():
            layers += experiment.axes[axis][label]
        for label in (ALL, *labels.values()) if quick else ():
            layers += experiment.quick.get(label, ())
        layers += asked
        for label in labels.values():
            layers += (own or {}).get(label, ())
        for seed in seeds:
            try:
                config = Config.build(*layers, {"run": {"seed": seed}})
            except UserError as error:
                raise UserError(f"{', '.join(labels.values())}, seed {seed}: {error}") from None
            entries.append(Entry(labels, seed, config, RunFolder(out / _folder(labels, seed))))
    if not entries:
        raise UserError("No run is left: every one is excluded.")
    for entry in entries:
        entry.check_complete()
    return sorted(entries, key=lambda entry: (entry.seed, repr(recipe(entry.config))))


def _chosen(experiment: Experiment, only: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    for axis, labels in only.items():
        if axis not in experiment.axes:
            raise unknown("axis", axis, experiment.axes)
        for label in labels:
            if label not in experiment.axes[axis]:
                raise unknown(f"choice of {axis}", label, experiment.axes[axis])
    return {
        axis: [label for label in choices if label in only.get(axis, choices)]
        for axis, choices in experiment.axes.items()
    }


def sort_settings(experiment: Experiment, assignments: Sequence[str]) -> tuple[list[Layer], dict[str, list[Layer]]]:
    """Sort ``[LABEL:]section.key=value`` into the layers of all runs and those of the runs with a label."""
    labels = [label for choices in experiment.axes.values() for label in choices]
    shared: list[Layer] = []
    own: dict[str, list[Layer]] = {}
    for text in assignments:
        # A label may have an equals sign, "M = 3", and a value a colon.
        label = next((label for label in labels if text.startswith(f"{label}:")), None)
        assignment = text if label is None else text.removeprefix(f"{label}:")
        other, colon, _ = assignment.partition("=")[0].rpartition(":")
        if colon:
            raise unknown(f"label in --set {text!r}", other, labels)
        layer = parse_assignment(assignment)
        if "seed" in layer.get("run", {}):
            raise UserError(f"--set got {text!r}; run.seed is given by --seeds.")
        (shared if label is None else own.setdefault(label, [])).append(layer)
    return shared, own


def _folder(labels: Mapping[str, str], seed: int) -> str:
    words = (re.sub(r"[^a-z0-9.+]+", "-", label.lower()).strip("-") for label in labels.values())
    return "_".join([*words, f"seed{seed}"])


def recipe(config: Config) -> tuple[Any, ...]:
    """Return what makes a run's data."""
    return config.data, config.partition, config.run.seed, config.run.unseen


# Our figures beside the paper's.


class Line(NamedTuple):
    """A line of the table: one choice on every axis."""

    labels: dict[str, str]
    num_seeds: int
    """complete ones"""
    ours: dict[str, Spread]
    paper: dict[str, float | None]


def tabulate(experiment: Experiment, entries: Sequence[Entry]) -> list[Line]:
    """Put our figures, over the seeds that are complete, beside the paper's."""
    known = {
        (_key(entry.labels), entry.seed): summary
        for entry in entries
        if (summary := entry.folder.summary()) is not None
    }
    lines = []
    for key, group in _grouped(entries).items():
        seeds = [entry.seed for entry in group if (key, entry.seed) in known]
        labels = group[0].labels
        ours = {}
        for name in experiment.figures:
            figure, axis, reference = experiment.parted(name)
            values = [_figure(known[key, seed], figure) for seed in seeds]
            if axis is not None:
                other = _key({**labels, axis: reference})
                below = [_figure(known.get((other, seed), {}), figure) for seed in seeds]
                values = [_ratio(*pair) for pair in zip(values, below, strict=True)]
            ours[name] = Spread.of(values)
        told = experiment.paper.get(key, (None,) * len(experiment.figures))
        lines.append(Line(labels, len(seeds), ours, dict(zip(experiment.figures, told, strict=True))))
    return lines


def _key(labels: Mapping[str, str]) -> str:
    return SLASH.join(labels.values())


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _grouped(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_key(entry.labels), []).append(entry)
    return groups


def _figure(summary: Record, name: str) -> float | None:
    """Find a figure by its name; of several numbers, such as a distance for each component, the largest."""
    value: Any = summary
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, list):
        value = max(value)
    return None if value is None else float(value)


# The work of an experiment: everything is checked, then what is not complete is trained, one run after the other.
#
# What is complete is never run again, and several processes may work on one experiment.


class LatestData:
    """Makes data; those made last are kept, as runs with the same come one after the other."""

    def __init__(self, make: Callable[[Config], Dataset] = Config.make_data):
        self._make = make
        self._kept: tuple[Any, Dataset] | None = None

    def of(self, config: Config) -> Dataset:
        """Return a run's data."""
        wanted = recipe(config)
        if self._kept is None or self._kept[0] != wanted:
            self._kept = None  # lest two data sets be in memory
            self._kept = (wanted, self._make(config))
        return self._kept[1]


def check(entries: Sequence[Entry], data: LatestData) -> None:
    """Prepare every run that is not complete, and refuse all where one can't be trained; nothing is written."""
    pending = [entry for entry in entries if not entry.is_complete]
    _check_present(pending, entries)
    for entry in pending:
        if not entry.folder.exists():
            entry.folder.prepare()
    # In this order the data of the first run are those at hand when its turn comes.
    for entry in reversed(pending):
        try:
            begun = entry.folder.exists()
            trainer = Trainer.prepare(entry.config, data.of(entry.config), fresh=not begun)
            if begun:
                _check_begun(entry, trainer)
        except UserError as error:
            raise UserError(f"{entry.title}: {error}") from None


def _check_present(pending: Sequence[Entry], entries: Sequence[Entry]) -> None:
    """Refuse data sets that are not prepared, all of them at once and before any is made."""
    missing: dict[str, set[str]] = {}
    for entry in pending:
        if isinstance(source := entry.config.data, Public):
            try:
                source.opened()
            except UserError as error:
                missing.setdefault(str(error), set()).add(entry.labels.get("data", ""))
    if missing:
        there = {entry.labels["data"] for entry in entries if "data" in entry.labels}.difference(*missing.values())
        hint = f" To run what is there: --data {','.join(sorted(there))}" if there else ""
        raise UserError(" ".join(f"{message}." for message in missing) + hint)


def _check_begun(entry: Entry, trainer: Trainer) -> None:
    """Refuse a run that was begun with other settings or data; one that another process is training is left to it."""
    with _claimed(entry) as mine:
        if mine:
            with entry.folder.locked():
                entry.folder.reopen(trainer.config)


def work_off(
    entries: Sequence[Entry], watch: Callable[[Entry], AbstractContextManager[Listener | None]], data: LatestData
) -> dict[str, str]:
    """Train what is not complete, one run after the other; those that another process is training are left to it.

    Args:
        entries: of a plan, checked.
        watch: a context for each run, which yields what is told of its rounds.
        data: makes the runs' data.

    Returns:
        what went wrong, by the title of the run

    """
    failed: dict[str, str] = {}
    for entry in entries:
        if entry.is_complete:
            continue
        with _claimed(entry) as mine:
            if not mine or entry.is_complete:
                continue
            try:
                dataset, begun = data.of(entry.config), entry.folder.exists()
                with watch(entry) as listener:
                    # What is made at a run's start, such as a graph, was tried when all were checked.
                    trainer = Trainer.prepare(entry.config, dataset, fresh=False)
                    carry_out(trainer, out=entry.folder.path, resume=begun, listener=listener)
            except UserError as error:  # the others can go on without it
                failed[entry.title] = str(error)
    return failed


@contextmanager
def _claimed(entry: Entry) -> Iterator[bool]:
    """Yield whether the run is ours: no other process works on it as long as this one does."""
    place = entry.folder.path.parent / ".claims"
    place.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield True
        return
    with (place / entry.folder.path.name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
