"""Our figures beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedem.comparison import Spread
from fedem.experiments.declared import SLASH, Experiment
from fedem.experiments.entries import Entry
from fedem.records import Record


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
