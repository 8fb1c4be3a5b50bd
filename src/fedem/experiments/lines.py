"""Our figures beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedem.comparison import Spread
from fedem.experiments.declared import Experiment
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
    lines = []
    for key, group in _grouped(entries).items():
        found = [summary for entry in group if (summary := entry.folder.summary()) is not None]
        ours = {name: Spread.of(_figure(summary, name) for summary in found) for name in experiment.figures}
        told = experiment.paper.get(key, (None,) * len(experiment.figures))
        lines.append(Line(group[0].labels, len(found), ours, dict(zip(experiment.figures, told, strict=True))))
    return lines


def _grouped(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(" / ".join(entry.labels.values()), []).append(entry)
    return groups


def _figure(summary: Record, name: str) -> float | None:
    """Find a figure by its name; of several numbers, such as a distance for each component, the largest."""
    value: Any = summary
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, list):
        value = max(value)
    return None if value is None else float(value)
