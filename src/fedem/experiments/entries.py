"""The runs of an experiment: a choice on every axis and a seed, each an ordinary run in a folder of its own.

All runs of a seed with the same data have the same clients and splits. What is complete is never run again, and several
processes may work on one experiment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedem.config import Config, parse_assignment
from fedem.data.base import Dataset
from fedem.errors import UserError, unknown
from fedem.experiments.declared import Experiment
from fedem.job import Job
from fedem.runs import RunFolder
from fedem.sections import Layer
from fedem.training import Listener, carry_out


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


def plan(
    experiment: Experiment,
    out: Path,
    seeds: Sequence[int],
    only: Mapping[str, Sequence[str]] | None = None,
    asked: Sequence[Layer] = (),
    own: Mapping[str, Sequence[Layer]] | None = None,
    quick: bool = False,
) -> list[Entry]:
    """Return the runs, those with the same data and seed together; every configuration is checked.

    Args:
        experiment: what was declared.
        out: where the runs' folders lie.
        seeds: one run of each choice for each.
        only: labels by axis, to leave out the others.
        asked: further settings of all runs.
        own: further settings of the runs with a label.
        quick: with the settings of the short trial.

    """
    axes = _chosen(experiment, only or {})
    entries = []
    for labels in (dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values())):
        if any(all(labels.get(axis) == label for axis, label in gap.items()) for gap in experiment.without):
            continue
        layers = [*experiment.settings]
        for axis, label in labels.items():
            layers += [*experiment.axes[axis][label], *(own or {}).get(label, ())]
        for label in ("all", *labels.values()) if quick else ():
            layers += experiment.quick.get(label, ())
        layers += asked
        for seed in seeds:
            config = Config.build(*layers, {"run": {"seed": seed}})
            entries.append(Entry(labels, seed, config, RunFolder(out / _folder(labels, seed))))
    if not entries:
        raise UserError("No run is left: every one is excluded.")
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
        key, equals, value = text.partition("=")
        label, colon, place = key.rpartition(":")
        if colon and label.strip() not in labels:
            raise unknown(f"label in --set {text!r}", label.strip(), labels)
        layer = parse_assignment(f"{place}{equals}{value}")
        if "seed" in layer.get("run", {}):
            raise UserError(f"--set got {text!r}; run.seed is given by --seeds.")
        (own.setdefault(label.strip(), []) if colon else shared).append(layer)
    return shared, own


def _folder(labels: Mapping[str, str], seed: int) -> str:
    words = (re.sub(r"[^a-z0-9.+]+", "-", label.lower()).strip("-") for label in labels.values())
    return "_".join([*words, f"seed{seed}"])


def recipe(config: Config) -> tuple[Any, ...]:
    """Return what makes a run's data."""
    return config.data, config.partition, config.run.seed, config.run.unseen


def work_off(
    entries: Sequence[Entry],
    watch: Callable[[Entry], AbstractContextManager[Listener | None]],
    make: Callable[[Config], Dataset] = Config.make_data,
) -> dict[str, str]:
    """Train what is not complete, one run after the other; those that another process is training are left to it.

    Args:
        entries: of a plan.
        watch: a context for each run, which yields what is told of its rounds.
        make: how data are made; they are kept while runs with the same come one after the other.

    Returns:
        what went wrong, by the title of the run

    """
    kept: tuple[Any, Dataset] | None = None
    failed: dict[str, str] = {}
    for entry in entries:
        if entry.is_complete:
            continue
        with _claimed(entry) as mine:
            if not mine or entry.is_complete:
                continue
            try:
                if kept is None or kept[0] != recipe(entry.config):
                    kept = None  # lest two data sets be in memory
                    kept = (recipe(entry.config), make(entry.config))
                begun = entry.folder.exists()
                with watch(entry) as listener:
                    _train(entry, kept[1], begun, listener)
            except UserError as error:  # the others can go on without it
                failed[entry.title] = str(error)
    return failed


def _train(entry: Entry, dataset: Dataset, begun: bool, listener: Listener | None) -> None:
    job = Job.prepare(entry.config, dataset, None, fresh=not begun)
    carry_out(job, out=entry.folder.path, resume=begun, listener=listener)


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
