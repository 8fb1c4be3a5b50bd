"""What an experiment's file declares.

A TOML file says which runs a table or a figure of the paper is made of: settings of all, choices on one or several
axes, the figures to show, and what the paper has for them.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedem.errors import UserError, unknown
from fedem.sections import Layer

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
