"""One TOML file a run: sections of checked values, from a preset, a file and overrides, in that order."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedem.data import DATA, DataSource
from fedem.engines import ENGINES, Batching
from fedem.errors import UserError, unknown
from fedem.methods import ALIASES, METHODS, find_method, resolve_method
from fedem.models import MODELS, ModelSpec
from fedem.models.losses import LOSSES, Loss
from fedem.schedules import SCHEDULES, Schedule
from fedem.settings import Settings, complete, names_of
from fedem.solvers import SOLVERS, Solver

Values = dict[str, Any]
Sections = dict[str, Values]
Layer = Mapping[str, Mapping[str, Any]]

GIVEN = "given"
"""Name of data or a model that was passed from Python, and so can't be made again from a file."""


@dataclass(frozen=True)
class RunSettings(Settings):
    """How a run goes, whatever the method."""

    rounds: int = field(default=200, metadata={"min": 1})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**63 - 1})
    clients_per_round: float = field(default=1.0, metadata={"above": 0})
    unseen: float = field(default=0.0, metadata={"min": 0, "below": 1})
    device: str = "auto"
    engine: str = field(default="auto", metadata={"choices": ENGINES})
    chunk_size: int = field(default=0, metadata={"min": 0})
    dtype: str = field(default="float32", metadata={"choices": ("float32", "float64")})
    fine_tune_epochs: int = field(default=0, metadata={"min": 0})
    unseen_epochs: int = field(default=5, metadata={"min": 1})
    evaluate_every: int = field(default=10, metadata={"min": 0})
    measure_alpha_every: int = field(default=0, metadata={"min": 0})
    checkpoint_every: int = field(default=10, metadata={"min": 1})


Kinds = tuple[type[Settings], ...]


def _rows(table: Mapping[str, type[Settings]]) -> dict[str, Kinds]:
    return {name: (kind,) for name, kind in table.items()}


# A section's values belong to one kind of settings or, for a method, to its algorithm's and its mixer's.
_UNNAMED: dict[str, Kinds] = {"run": (RunSettings,), "batching": (Batching,)}
_NAMED: dict[str, dict[str, Kinds]] = {
    "data": _rows(DATA),
    "method": {name: (row.algorithm, row.mixer) for name, row in METHODS.items()},
    "model": _rows(MODELS),
    "loss": _rows(LOSSES),
    "solver": _rows(SOLVERS),
    "schedule": _rows(SCHEDULES),
}
_WITHOUT_SETTINGS = [("data", GIVEN), ("model", GIVEN), ("loss", "auto")]
_DEFAULTS: Sections = {
    "data": {"name": "synthetic"},
    "method": {"name": "fedem"},
    "model": {"name": "linear"},
    "loss": {"name": "auto"},
    "solver": {"name": "sgd"},
    "schedule": {"name": "step"},
}


@dataclass(frozen=True)
class Config:
    """A complete, checked configuration: every key of every section has its value."""

    sections: Sections

    @classmethod
    def build(cls, *layers: Layer, preset: bool = True) -> Config:
        """Lay sections over each other, later ones winning, on top of the defaults and the shipped presets."""
        asked = _overlay(*map(_check_layer, layers))
        chosen = _overlay({"data": _DEFAULTS["data"], "method": _DEFAULTS["method"]}, asked)
        method = str(chosen["method"].get("name"))
        find_method(method)
        ground = _preset(chosen["data"].get("name"), method) if preset else {}
        solver = chosen.get("solver", {}).get("name", ground.get("solver", {}).get("name"))
        if preset and isinstance(solver, str) and solver in SOLVERS and solver != ground["solver"]["name"]:
            # Learning rates and decays are shipped for one solver and mean nothing to another.
            del ground["solver"]
            ground["schedule"] = {"learning_rate": SOLVERS[solver].usual_rate}
        merged = _overlay(_DEFAULTS, ground, asked)
        return cls({name: _complete(name, merged.get(name, {})) for name in (*_UNNAMED, *_NAMED)})

    @property
    def run(self) -> RunSettings:
        """The [run] section."""
        return RunSettings(**self.sections["run"])

    @property
    def batching(self) -> Batching:
        """The [batching] section."""
        return Batching(**self.sections["batching"])

    @property
    def data(self) -> DataSource:
        """The data set's recipe."""
        if self.name("data") == GIVEN:
            raise UserError("The data of this run were passed from Python; pass them again, a file can't hold them.")
        return DATA[self.name("data")](**self.values("data"))

    @property
    def model(self) -> ModelSpec:
        """The model's recipe."""
        if self.name("model") == GIVEN:
            raise UserError("The model of this run was passed from Python; pass model=... again to load it.")
        return MODELS[self.name("model")](**self.values("model"))

    @property
    def loss(self) -> Loss | None:
        """The loss; None when it is to be guessed from the targets."""
        name = self.name("loss")
        return None if name == "auto" else LOSSES[name](**self.values("loss"))

    @property
    def solver(self) -> Solver:
        """The local solver."""
        return SOLVERS[self.name("solver")](**self.values("solver"))

    @property
    def schedule(self) -> Schedule:
        """The learning-rate schedule."""
        return SCHEDULES[self.name("schedule")](**self.values("schedule"))

    def name(self, section: str) -> str:
        """Return the name chosen in a section."""
        return str(self.sections[section]["name"])

    def values(self, section: str) -> Values:
        """Return a section's values without its name."""
        return {key: value for key, value in self.sections[section].items() if key != "name"}

    def replace(self, section: str, **values: Any) -> Config:
        """Return a copy with some values of one section changed."""
        old = self.sections[section]
        return Config(
            self.sections | {section: _complete(section, _overlay({section: old}, {section: values})[section])}
        )

    def differences(self, other: Config) -> list[str]:
        """Return ``section.key`` of all values that differ."""
        return [
            f"{section}.{key}"
            for section, values in self.sections.items()
            for key in {**values, **other.sections[section]}
            if values.get(key) != other.sections[section].get(key)
        ]

    def to_toml(self) -> str:
        """Write as TOML; reading it back gives the same configuration."""
        return "\n".join(
            f"[{section}]\n" + "".join(f"{key} = {_literal(value)}\n" for key, value in values.items())
            for section, values in self.sections.items()
        )


def read_toml(path: Path) -> Sections:
    """Read a run's file; every top-level entry must be a section."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} can't be read as TOML: {error}") from None
    _check_layer(content, f" in {path}")
    return content


def _check_layer(layer: Layer, where: str = "") -> Layer:
    for name, values in layer.items():
        if name not in (*_UNNAMED, *_NAMED):
            raise unknown(f"section{where}", name, (*_UNNAMED, *_NAMED))
        if not isinstance(values, Mapping):
            raise UserError(f"{name!r}{where} is {values!r}; allowed: a section [{name}].")
    return layer


def parse_assignment(text: str) -> Sections:
    """Parse ``section.key=value``; the value is a TOML literal, or else a word.

    >>> parse_assignment("solver.momentum=0.5")
    {'solver': {'momentum': 0.5}}
    """
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise UserError(f"--set got {text!r}; allowed: section.key=value, such as schedule.learning_rate=0.3.")
    if section not in (*_UNNAMED, *_NAMED):
        raise unknown("section", section, (*_UNNAMED, *_NAMED))
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return {section: {name: parsed}}


def route(options: Mapping[str, Any], method: str) -> Sections:
    """Sort flat options, as Python callers pass them, into sections by the names of their keys.

    A section's own name takes a name or a whole section: ``solver="adam"``, ``schedule={"name": "cosine"}``.
    """
    chosen: Sections = {"method": {"name": resolve_method(method)}}
    flat: Values = {}
    for key, value in options.items():
        if key == "data":
            raise UserError("Option 'data' is for runs from a file; the federation is the first argument.")
        if key in _NAMED or key in _UNNAMED:
            if key in _UNNAMED and not isinstance(value, Mapping):
                raise UserError(f"Option {key!r} is {value!r}; allowed: a mapping of its settings.")
            chosen.setdefault(key, {}).update(value if isinstance(value, Mapping) else {"name": value})
        else:
            flat[key] = value
    places: dict[str, str] = {}
    for section in ("run", "batching", "method", "solver", "schedule", "model", "loss"):
        for key in names_of(*_kinds(section, {**_DEFAULTS.get(section, {}), **chosen.get(section, {})})):
            places.setdefault(key, section)
    for key, value in flat.items():
        if key not in places:
            raise unknown("option", key, places)
        chosen.setdefault(places[key], {})[key] = value
    return chosen


def _kinds(section: str, values: Mapping[str, Any]) -> Kinds:
    """Return the classes that describe a section's values; none when it has none to set."""
    if section in _UNNAMED:
        return _UNNAMED[section]
    name = values.get("name")
    if (section, name) in _WITHOUT_SETTINGS:
        return ()
    if not isinstance(name, str) or name not in _NAMED[section]:
        raise unknown(section, name, _NAMED[section])
    return _NAMED[section][name]


def _complete(section: str, values: Mapping[str, Any]) -> Values:
    kinds = _kinds(section, values)
    own = {key: value for key, value in values.items() if key != "name" or section in _UNNAMED}
    named = {} if section in _UNNAMED else {"name": values["name"]}
    if not kinds:
        if own:
            raise UserError(f"[{section}] has {next(iter(own))!r}, but {values['name']!r} takes no settings.")
        return named
    return named | complete(section, own, *kinds)


def _overlay(*layers: Layer) -> Sections:
    """Merge section by section; a layer that changes a section's name keeps the old values that the new one has too."""
    merged: Sections = {}
    for layer in layers:
        for section, given in layer.items():
            values = dict(given)
            if section == "method" and "name" in values:
                values["name"] = ALIASES.get(values["name"], values["name"])
            old = merged.get(section, {})
            default = _DEFAULTS.get(section, {}).get("name")
            if old and "name" in values and old.get("name", default) != values["name"]:
                known = names_of(*_kinds(section, values))
                old = {key: value for key, value in old.items() if key in known}
            merged[section] = old | values
    return merged


def _preset(data: Any, method: str) -> Sections:
    """Return the shipped settings for a method on a data set: those for any data, then those for this one."""
    layers: list[Layer] = []
    for name in ("default", data):
        resource = files("fedem.presets").joinpath(f"{name}.toml")
        if resource.is_file():
            content = tomllib.loads(resource.read_text(encoding="utf-8"))
            layers += [content.get("all", {}), content.get(method, {})]
    return _overlay(*layers)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # A JSON string is a TOML basic string, but for the characters that TOML wants escaped and JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
