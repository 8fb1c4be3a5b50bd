"""The runs of an experiment: a choice on every axis and a seed, each an ordinary run in a folder of its own.

All runs of a seed with the same data have the same clients and splits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedem.config import Config, parse_assignment
from fedem.errors import UserError, unknown
from fedem.experiments.declared import ALL, Experiment
from fedem.runs import RunFolder
from fedem.sections import Layer


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
            settled = Config(settled.sections | {"loss": made.sections["loss"]})
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
