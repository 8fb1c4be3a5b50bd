"""What an experiment's file declares.

A TOML file says which runs a table or a figure of the paper is made of: settings of all, choices on one or several
axes, the figures to show, and what the paper has for them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedem.errors import UserError, unknown
from fedem.sections import Layer

FILE = "experiment.toml"
_KEYS = ("title", "place", "seeds", "figures", "settings", "axes", "without", "paper", "quick")


@dataclass(frozen=True)
class Experiment:
    """What a file declares.

    Attributes:
        name: of its folder.
        title: what is shown.
        place: where the paper has it.
        seeds: how many the paper has.
        figures: names of a summary's figures, ``recovery.cluster_accuracy`` for what lies deeper.
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
    axes = {
        axis: {label: _layers(settings, f"{path}, axes.{axis}") for label, settings in choices.items()}
        for axis, choices in content["axes"].items()
    }
    figures = tuple(content["figures"])
    paper = {key: tuple(_number(value) for value in values) for key, values in content.get("paper", {}).items()}
    for key, values in paper.items():
        labels = key.split(" / ")
        if len(labels) != len(axes) or any(label not in axes[axis] for axis, label in zip(axes, labels, strict=False)):
            raise UserError(
                f"{path} has paper.{key!r}; allowed: a label of each axis ({', '.join(axes)}) between ' / '."
            )
        if len(values) != len(figures):
            raise UserError(f"{path} has {len(values)} figures for {key!r}; allowed: {len(figures)}, as in figures.")
    return Experiment(
        folder.name,
        str(content["title"]),
        str(content.get("place", "")),
        int(content.get("seeds", 1)),
        figures,
        _layers(content.get("settings", {}), f"{path}, settings"),
        axes,
        tuple(content.get("without", ())),
        paper,
        {label: _layers(settings, f"{path}, quick") for label, settings in content.get("quick", {}).items()},
    )


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
        raise UserError(f"There are no experiments in {place} (no */{FILE}); name their folder with --experiments.")
    return names


def _layers(settings: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    """Turn ``section.key = value`` into layers of settings."""
    layers: list[Layer] = []
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        if not dot or isinstance(value, Mapping):
            raise UserError(f'{where} has {key!r}; allowed: "section.key" = value.')
        layers.append({section: {name: value}})
    return tuple(layers)


def _number(value: Any) -> float | None:
    return None if value == "" else float(value)
