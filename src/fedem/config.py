"""One TOML file a run: sections of checked values, from a preset, a file and overrides, in that order."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedem.compression import Compression
from fedem.data import DATA, Dataset, DataSource
from fedem.data.partitions import PARTITIONS, Partition
from fedem.engines import Batching
from fedem.errors import UserError, unknown
from fedem.graphs import GRAPHS, Topology
from fedem.methods import find_method, resolve_method
from fedem.models import MODELS, ModelSpec
from fedem.models.losses import LOSSES, Loss
from fedem.schedules import SCHEDULES, Schedule
from fedem.sections import (
    DEFAULTS,
    GIVEN,
    NAMED,
    NO_GRAPH,
    UNNAMED,
    Layer,
    RunSettings,
    Sections,
    Values,
    complete_section,
    kinds_of,
    overlay,
)
from fedem.settings import names_of
from fedem.solvers import SOLVERS, Solver


@dataclass(frozen=True)
class Config:
    """A complete, checked configuration: every key of every section has its value."""

    sections: Sections

    @classmethod
    def build(cls, *layers: Layer, preset: bool = True) -> Config:
        """Lay sections over each other, later ones winning, on top of the defaults and the shipped presets."""
        asked = overlay(*map(_check_layer, layers))
        chosen = overlay({"data": DEFAULTS["data"], "method": DEFAULTS["method"]}, asked)
        method = str(chosen["method"].get("name"))
        find_method(method)
        ground = _preset(chosen["data"].get("name"), method) if preset else {}
        solver = chosen.get("solver", {}).get("name", ground.get("solver", {}).get("name"))
        if preset and isinstance(solver, str) and solver in SOLVERS and solver != ground["solver"]["name"]:
            # Learning rates and decays are shipped for one solver and mean nothing to another.
            del ground["solver"]
            ground["schedule"] = {"learning_rate": SOLVERS[solver].usual_rate}
        # Data that stay as they are made, or were passed from Python, are not partitioned.
        usual = DATA[data].usual if (data := chosen["data"].get("name")) in DATA else GIVEN
        merged = overlay(DEFAULTS, {"partition": {"name": usual}}, ground, asked)
        if isinstance(path := merged["graph"].get("path"), str) and path:
            # A run may be taken up from another folder.
            merged["graph"]["path"] = str(Path(path).absolute())
        return cls({name: complete_section(name, merged.get(name, {})) for name in (*UNNAMED, *NAMED)})

    @property
    def run(self) -> RunSettings:
        """The [run] section."""
        return RunSettings(**self.sections["run"])

    @property
    def batching(self) -> Batching:
        """The [batching] section."""
        return Batching(**self.sections["batching"])

    @property
    def compression(self) -> Compression:
        """The [compression] section."""
        return Compression(**self.sections["compression"])

    @property
    def data(self) -> DataSource:
        """The data set's recipe."""
        if self.name("data") == GIVEN:
            raise UserError("The data of this run were passed from Python; pass them again, a file can't hold them.")
        return DATA[self.name("data")](**self.values("data"))

    @property
    def partition(self) -> Partition:
        """How the data's samples become clients'."""
        if self.name("partition") == GIVEN:
            raise UserError(
                "The partition of this run was passed from Python, as part of its data; allowed in a file: "
                f"{', '.join(PARTITIONS)}."
            )
        return PARTITIONS[self.name("partition")](**self.values("partition"))

    def make_data(self) -> Dataset:
        """Make the data and deal them to the clients."""
        return self.data.make(self.run.seed, self.partition, self.run.unseen)

    @property
    def graph(self) -> Topology | None:
        """The graph over which clients average; None where they don't."""
        name = self.name("graph")
        return None if name == NO_GRAPH else GRAPHS[name](**self.values("graph"))

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
            self.sections | {section: complete_section(section, overlay({section: old}, {section: values})[section])}
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
        if name not in (*UNNAMED, *NAMED):
            raise unknown(f"section{where}", name, (*UNNAMED, *NAMED))
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
    if section not in (*UNNAMED, *NAMED):
        raise unknown("section", section, (*UNNAMED, *NAMED))
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return {section: {name: parsed}}


def unbound(file: Layer, *asked: Layer) -> Layer:
    """Return a file's sections without the hash of its partition, if what is ``asked`` besides makes other clients."""
    merged = overlay(file, *asked)
    same = all(merged.get(section, {}) == file.get(section, {}) for section in ("data", "partition")) and all(
        merged.get("run", {}).get(key) == file.get("run", {}).get(key) for key in ("seed", "unseen")
    )
    if same or "run" not in file:
        return file
    return {**file, "run": {key: value for key, value in file["run"].items() if key != "partition_hash"}}


def route(options: Mapping[str, Any], method: str) -> Sections:
    """Sort flat options, as Python callers pass them, into sections by the names of their keys.

    A section's own name takes a name or a whole section: ``solver="adam"``, ``schedule={"name": "cosine"}``.
    """
    chosen: Sections = {"method": {"name": resolve_method(method)}}
    flat: Values = {}
    for key, value in options.items():
        if key == "data":
            raise UserError("Option 'data' is for runs from a file; the federation is the first argument.")
        if key in NAMED or key in UNNAMED:
            if key in UNNAMED and not isinstance(value, Mapping):
                raise UserError(f"Option {key!r} is {value!r}; allowed: a mapping of its settings.")
            chosen.setdefault(key, {}).update(_section_of(key, value))
        else:
            flat[key] = value
    places: dict[str, str] = {}
    for section in ("run", "batching", "method", "solver", "schedule", "model", "loss", "graph"):
        for key in names_of(*kinds_of(section, {**DEFAULTS.get(section, {}), **chosen.get(section, {})})):
            places.setdefault(key, section)
    for key, value in flat.items():
        if key not in places:
            raise unknown("option", key, places)
        chosen.setdefault(places[key], {})[key] = value
    return chosen


def _section_of(section: str, value: Any) -> Mapping[str, Any]:
    """Return a section from a mapping, from an object of one of its kinds, or from a name."""
    if isinstance(value, Mapping):
        return value
    name = next((name for name, kinds in NAMED.get(section, {}).items() if (type(value),) == kinds), None)
    return (
        {"name": value}
        if name is None
        else {"name": name} | {key: getattr(value, key) for key in names_of(type(value))}
    )


def _preset(data: Any, method: str) -> Sections:
    """Return the shipped settings for a method on a data set: those for any data, then those for this one."""
    layers: list[Layer] = []
    for name in ("default", data):
        resource = files("fedem.presets").joinpath(f"{name}.toml")
        if resource.is_file():
            content = tomllib.loads(resource.read_text(encoding="utf-8"))
            layers += [content.get("all", {}), content.get(method, {})]
    return overlay(*layers)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # A JSON string is a TOML basic string, but for the characters that TOML wants escaped and JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
