"""What a run is to do, in typed sections: one TOML file per run, from a preset, a file and overrides, in that order."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fedem.core import schema
from fedem.core.errors import UserError, unknown
from fedem.core.files import toml_literal
from fedem.core.precision import PRECISIONS
from fedem.core.settings import Settings, complete, entries_of, names_of
from fedem.data import DATA, Dataset, DataSource
from fedem.data.partitions import PARTITIONS, Partition
from fedem.engines import ENGINES, Batching
from fedem.graphs import GRAPHS, Topology
from fedem.methods import ALIASES, METHODS, Method, find_method, resolve_method
from fedem.methods.wrappers.compression import Compression
from fedem.methods.wrappers.defences import DEFENCES, Defence
from fedem.methods.wrappers.server_steps import SERVER_RULES, ServerRule
from fedem.models import MODELS, Auto, ModelSpec
from fedem.models.losses import LOSSES, Loss
from fedem.models.metrics import find_metric
from fedem.runs.attacks import ATTACKS, Attack
from fedem.solvers import SOLVERS, Solver
from fedem.solvers.schedules import SCHEDULES, Schedule

if TYPE_CHECKING:
    from fedem.runs.recipe import ModelSource, Recipe

Values = dict[str, Any]
Sections = dict[str, Values]
Layer = Mapping[str, Mapping[str, Any]]
_Kind = TypeVar("_Kind")

GIVEN = "given"  # the name of data or a model passed from Python, which can't be made again from a file
ON_THE_WAY = "run.evaluate_every"  # how often clients are scored before the last round


@dataclass(frozen=True)
class RunSettings(Settings):
    """How a run goes, whatever the method.

    Attributes:
        rounds: communication rounds.
        seed: decides whatever is random.
        clients_per_round: share of the clients that take part in each round, up to 1, or their number, from 2.
        unseen: share of the clients held out of training; after it they are fitted and scored, where the method can.
        unseen_share: share of its training samples that a client held out is fitted on.
        device: "cpu", "cuda", "cuda:1", ...; "auto" takes a GPU where there is one.
        engine: "stacked" trains many clients at once, "one_by_one" one after the other, with the same results up to
            rounding; "auto" stacks, but for models that can't be stacked and those that a CPU trains faster alone.
        chunk_size: clients stacked together; 0 chooses as many as memory holds. It changes no result beyond rounding.
        dtype: type of the models' parameters and of what is computed with them.
        precision: how exactly models multiply float32 numbers. "tf32": ten bits of each factor, on a GPU; "float32":
            all bits; "bfloat16": models compute in that type where torch deems it safe. Means over clients, mixture
            weights and distances always have all bits.
        local_layers: layers that stay with their clients, with commas between: "bias" is an intercept of one's own,
            "head" the last layer, "body" all but that, "50%" the first half of the layers, "batch_norm" the batch
            normalisations with their statistics; or names of layers and parameters, in which * stands for anything.
            "none" shares all, but for what the method keeps itself (fedper, fedrep, lgfedavg, fedbn).
        label_shares: whether each client adds the logarithms of its label shares, which it counts, to the outputs of
            the shared models: for clients that differ in how often they see which class.
        keep_momentum: whether a client's solver goes on from where its last round left it (momentum, Adam's moments)
            and does not start afresh.
        fine_tune_epochs: passes that every client trains over its samples before it predicts; 1 makes FedAvg FedAvg+.
        fine_tune_rate: learning rate of that; 0 takes the method's own where it has one, else that of the first round.
        neighbours: how many of its own training samples, the nearest in the features of its model, a client asks beside
            its model when it predicts; how much they count is chosen by validation. 0: the model predicts alone.
        unlabelled: whether clients sum up their inputs when training is over, so that one that comes later without
            labels can fit its mixture weights, with methods that have such.
        unseen_epochs: passes that a client held out makes over its samples, with methods that train it to fit it.
        evaluate_every: rounds between scores, which choose the best state; the last round always is, with 0 it alone.
        patience: rounds without a better validation score after which training ends; the best state is then the one
            that counts, also where the last round comes first. 0: all rounds are trained, and the last state counts.
            So it is without validation samples, with an evaluate_every of 0 and over a network, whatever stands here.
        metrics: what clients are scored by: names in a list or with commas between them, the first of which decides
            what is best; empty: accuracy for classes, mean_squared_error for numbers, and after training on a table
            also what else people decide by. For classes there are also balanced_accuracy, roc_auc, average_precision,
            macro_f1, recall, f1, top_5_accuracy (or another number), log_loss and calibration_error, for numbers rmse,
            mae and r2.
        measure_alpha_every: rounds between measurements of alpha, the part of the way to the optimum that local solvers
            leave; 0: never.
        diagnose_every: rounds between measurements of what the convergence theorems speak of; 0: never.
        checkpoint_every: rounds between checkpoints of a run that has a folder; there is one after the last round.
        checkpoint_seconds: seconds between checkpoints in place of rounds, or more where writing them would take over a
            fiftieth of the time; 0: by rounds.
        partition_hash: hash of who owns which samples: a run writes it down, and is refused on others; empty: any.
    """

    rounds: int = field(default=200, metadata={"min": 1})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**63 - 1})
    clients_per_round: float = field(default=1.0, metadata={"above": 0})
    unseen: float = field(default=0.0, metadata={"min": 0, "below": 1})
    unseen_share: float = field(default=1.0, metadata={"min": 0, "max": 1, "acts": "unseen"})
    device: str = "auto"
    engine: str = field(default="auto", metadata={"choices": ENGINES})
    chunk_size: int = field(default=0, metadata={"min": 0})
    dtype: str = field(default="float32", metadata={"choices": ("float32", "float64")})
    precision: str = field(default="tf32", metadata={"choices": PRECISIONS})
    local_layers: str = field(default="none", metadata={"each": str.strip})
    label_shares: bool = False
    keep_momentum: bool = field(default=False, metadata={"came_later": True})
    fine_tune_epochs: int = field(default=0, metadata={"min": 0, "acts": "scores"})
    fine_tune_rate: float = field(default=0.0, metadata={"min": 0, "acts": "scores"})
    neighbours: int = field(default=0, metadata={"min": 0, "acts": "scores"})
    unlabelled: bool = field(default=False, metadata={"acts": "scores"})
    unseen_epochs: int = field(default=5, metadata={"min": 1, "acts": "scores"})
    evaluate_every: int = field(default=10, metadata={"min": 0})
    patience: int = field(default=0, metadata={"min": 0})
    metrics: str = field(default="", metadata={"each": find_metric})
    measure_alpha_every: int = field(default=0, metadata={"min": 0})
    diagnose_every: int = field(default=0, metadata={"min": 0})
    checkpoint_every: int = field(default=10, metadata={"min": 1})
    checkpoint_seconds: float = field(default=0.0, metadata={"min": 0})
    partition_hash: str = ""

    def is_due(self, every: int, done: int) -> bool:
        """Whether something is due after ``done`` rounds: each ``every`` rounds, 0 being never, and after the last."""
        return bool(every) and (done == self.rounds or done % every == 0)

    def is_scored(self, done: int) -> bool:
        """Whether clients are scored after ``done`` rounds: each ``evaluate_every`` and, even if 0, after the last."""
        return done == self.rounds or self.is_due(self.evaluate_every, done)

    @property
    def scores_on_the_way(self) -> bool:
        """Whether clients are scored before the last round, too."""
        return 0 < self.evaluate_every < self.rounds


class MethodSettings(NamedTuple):
    """The [method] section: a method's name and its values, which its algorithm and its mixer take."""

    name: str
    values: Values


class Section(NamedTuple):
    """What may stand in a section: values of one kind of settings, or a name and the values that go with it."""

    name: str
    about: str
    table: Mapping[str, Any]  # classes of settings by name, of methods their rows; {"": class} where there are no names
    default: str = ""
    bare: Mapping[str, str] = {}  # a name beside those with settings, and what it stands for: its settings are None
    came_later: bool = False  # whether plans were made before it: where it has its default, their hashes leave it out

    @property
    def is_named(self) -> bool:
        return "" not in self.table

    def kinds(self, values: Mapping[str, Any]) -> tuple[type[Settings], ...]:
        """Return the classes that describe ``values``: for a method two, for a name without settings none."""
        name = values.get("name") if self.is_named else ""
        if not isinstance(name, str) or name not in (*self.table, *self.bare):
            raise unknown(self.name, name, self.table)
        row = self.table.get(name, ())
        return (row.algorithm, row.mixer) if isinstance(row, Method) else (row,) if row else ()

    def complete(self, values: Mapping[str, Any]) -> Values:
        kinds = self.kinds(values)
        named = {"name": values["name"]} if self.is_named else {}
        own = {key: value for key, value in values.items() if key not in named}
        if own and not kinds:
            raise UserError(f"[{self.name}] has {next(iter(own))!r}, but {values['name']!r} takes no settings.")
        return named | complete(self.name, own, *kinds)

    def typed(self, values: Mapping[str, Any]) -> Any:
        """Check the section's ``values`` and make its settings of them; None for a name that has none."""
        own = self.complete(values)
        name = own.pop("name", "")
        if self.table is METHODS:
            return MethodSettings(name, own)
        return next((kind(**own) for kind in self.kinds(values)), None)

    def plain(self, settings: Settings | MethodSettings | None) -> Values:
        if settings is None:
            return {"name": next(iter(self.bare))}
        if isinstance(settings, MethodSettings):
            return {"name": settings.name, **settings.values}
        kind = type(settings)
        name = {"name": next(name for name, row in self.table.items() if row is kind)} if self.is_named else {}
        return name | {key: getattr(settings, key) for key in names_of(kind)}


_PASSED, _ALONG = {GIVEN: "Passed from Python."}, {GIVEN: "Passed from Python, as part of the data."}
_AUTO = {"auto": "By the targets: squared_error for numbers, logistic for two classes, cross_entropy for more."}
_NETWORKS = {**MODELS, "auto": Auto}
_SERVED = {"none": "Clients talk to a server, or to nobody."}
_STEPS = "How a server that averages steps from u, what it has, along d, the mean change that its clients made to u."
_MEAN = {"none": "The server takes the mean of the clients' models as it is."}
_HARM = "What some of the clients do to harm the others, in a simulation. Scores are of the honest ones alone."
_HONEST = {"none": "All clients are honest."}
_GUARDS = "How uploads are kept from spoiling what is averaged: hostile ones, or broken ones."
_TRUST = {"none": "All uploads are taken as they are."}
_ALL = (
    Section("run", "How a run goes: rounds, who takes part, where it computes, when it is scored.", {"": RunSettings}),
    Section("batching", "How a client walks through its samples in a round.", {"": Batching}),
    Section("compression", "What the messages of a server and its clients leave out.", {"": Compression}),
    Section("data", "Where the samples come from.", DATA, "synthetic", _PASSED),
    Section("partition", "How samples become clients'; by default as is usual for the data.", PARTITIONS, "", _ALONG),
    Section("method", "What is trained, and how clients' work is put together.", METHODS, "fedem"),
    Section("graph", "Who averages with whom where there is no server.", GRAPHS, "none", _SERVED),
    Section("server", _STEPS, SERVER_RULES, "none", _MEAN, came_later=True),
    Section("attack", _HARM, ATTACKS, "none", _HONEST, came_later=True),
    Section("defence", _GUARDS, DEFENCES, "none", _TRUST, came_later=True),
    Section("model", "The network that each component, or each client, has.", _NETWORKS, "linear", _PASSED),
    Section("loss", "What is minimised: the negative log-likelihood of the targets.", LOSSES, "auto", _AUTO),
    Section("solver", "How a client takes its local steps.", SOLVERS, "sgd"),
    Section("schedule", "The learning rate of each round.", SCHEDULES, "step"),
)
SECTIONS = {section.name: section for section in _ALL}
DEFAULTS: Sections = {name: {"name": section.default} for name, section in SECTIONS.items() if section.default}


def overlay(*layers: Layer) -> Sections:
    """Merge section by section; a layer that changes a section's name keeps the old values that the new one has too."""
    merged: Sections = {}
    for layer in layers:
        for section, given in layer.items():
            values = dict(given)
            if section == "method" and "name" in values:
                values["name"] = ALIASES.get(str(values["name"]), values["name"])
            old = merged.get(section, {})
            default = DEFAULTS.get(section, {}).get("name")
            if old and "name" in values and old.get("name", default) != values["name"]:
                known = names_of(*SECTIONS[section].kinds(values))
                old = {key: value for key, value in old.items() if key in known}
            merged[section] = old | values
    return merged


@dataclass(frozen=True)
class Config:
    """A complete configuration: the settings of every section, checked once, when they are made.

    Data, partition and model may have been passed from Python. A file can't hold them, and asking for them is an error.
    ``graph`` is None where clients don't average over one, ``server`` where the server takes the mean as it is,
    ``defence`` where it takes all uploads as they are, ``attack`` where all clients are honest, ``loss`` where it is
    the one that fits the targets.
    """

    run: RunSettings
    batching: Batching
    compression: Compression
    _data: DataSource | None
    _partition: Partition | None
    method: MethodSettings
    graph: Topology | None
    server: ServerRule | None
    attack: Attack | None
    defence: Defence | None
    _model: ModelSpec | None
    loss: Loss | None
    solver: Solver
    schedule: Schedule

    @classmethod
    def build(cls, *layers: Layer, preset: bool = True) -> Config:
        """Lay sections over each other, later ones winning, on top of the defaults and the shipped presets."""
        asked = overlay(*map(_check_layer, layers))
        chosen = overlay({"data": DEFAULTS["data"], "method": DEFAULTS["method"]}, asked)
        method = str(chosen["method"].get("name"))
        find_method(method)
        ground = _preset(chosen["data"].get("name"), method, chosen.get("model", {}).get("name")) if preset else {}
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
        return cls(**{_field(name): section.typed(merged.get(name, {})) for name, section in SECTIONS.items()})

    def resolve(self, dataset: Dataset, source: ModelSource | None = None, fresh: bool = True) -> Recipe:
        """Settle on ``dataset`` what depends on the data; see :func:`fedem.runs.recipe.resolve`."""
        from fedem.runs.recipe import resolve

        return resolve(self, dataset, source, fresh)

    @property
    def data(self) -> DataSource:
        """Where the samples come from."""
        return _there(self._data, "The data of this run were", "pass them again, a file can't hold them")

    @property
    def partition(self) -> Partition:
        """How the data's samples become clients'."""
        mend = f"as part of its data; allowed in a file: {', '.join(PARTITIONS)}"
        return _there(self._partition, "The partition of this run was", mend)

    @property
    def model(self) -> ModelSpec:
        """The network that each component, or each client, has."""
        return _there(self._model, "The model of this run was", "pass model=... again to load it")

    def make_data(self) -> Dataset:
        """Make the data and deal them to the clients."""
        return self.data.make(self.run.seed, self.partition, self.run.unseen)

    @cached_property
    def sections(self) -> Sections:
        """All sections as the values of a file, names included."""
        return {name: section.plain(getattr(self, _field(name))) for name, section in SECTIONS.items()}

    def name(self, section: str) -> str:
        """Return the name chosen in a section."""
        return str(self.sections[section]["name"])

    def values(self, section: str) -> Values:
        """Return a section's values without its name."""
        return {key: value for key, value in self.sections[section].items() if key != "name"}

    def replace(self, section: str, **values: Any) -> Config:
        """Return a copy with some values of one section changed."""
        merged = overlay({section: self.sections[section]}, {section: values})[section]
        return dataclasses.replace(self, **{_field(section): SECTIONS[section].typed(merged)})

    def settled_like(self, made: Config) -> Config:
        """Return the configuration with what it leaves to the data as a run that was ``made`` has it."""
        config = self
        if config.loss is None:
            config = config.replace("loss", **made.sections["loss"])
        if isinstance(config._model, Auto):
            config = config.replace("model", **made.sections["model"])
        if config.batching.batch_size < 0:
            config = config.replace("batching", batch_size=made.batching.batch_size)
        if config.batching.local_epochs == 0:
            config = config.replace("batching", local_epochs=made.batching.local_epochs)
        if config.schedule.learning_rate == 0 and made.schedule.backtrack:  # else it was given
            found = {"learning_rate": made.schedule.learning_rate, "backtrack": made.schedule.backtrack}
            config = config.replace("schedule", **found)
        return config

    def differences(self, other: Config) -> list[str]:
        """Return ``section.key`` of all values that differ."""
        return [
            f"{section}.{key}"
            for section, values in self.sections.items()
            for key in {**values, **other.sections[section]}
            if values.get(key) != other.sections[section].get(key)
        ]

    @cached_property
    def acting_later(self) -> dict[str, str]:
        """Where the settings act that training does not depend on, by ``section.key``."""
        kinds = {section: SECTIONS[section].kinds(self.sections[section]) for section in ("run", "method")}
        fields = ((f"{name}.{key}", entry) for name, each in kinds.items() for key, entry in entries_of(*each).items())
        return {place: entry.metadata["acts"] for place, entry in fields if "acts" in entry.metadata}

    def trains_as(self, other: Config) -> bool:
        """Whether a run of the other is this one until it is over.

        Scores on the way are part of it. A run that has none may be one with them, unless these decide when it ends.
        """
        on_the_way = other.run.scores_on_the_way
        same = {place for place, where in self.acting_later.items() if where == "unseen" or not on_the_way}
        if not (on_the_way or self.run.patience):
            same.add(ON_THE_WAY)
        if find_method(self.method.name).trains_as(find_method(other.method.name)):
            same.add("method.name")
        return set(self.differences(other)) <= same

    def to_toml(self) -> str:
        """Write as TOML; reading it back gives the same configuration."""
        return to_toml(self.sections)


def _there(settings: _Kind | None, what: str, mend: str) -> _Kind:
    if settings is None:
        raise UserError(f"{what} passed from Python; {mend}.")
    return settings


def _field(section: str) -> str:
    return f"_{section}" if section in ("data", "partition", "model") else section


def to_toml(sections: Layer) -> str:
    """Write sections as TOML."""
    return "\n".join(
        f"[{section}]\n" + "".join(f"{key} = {toml_literal(value)}\n" for key, value in values.items())
        for section, values in sections.items()
    )


def read_toml(path: Path) -> Sections:
    """Read a run's file; every top-level entry must be a section."""
    return _parsed(path, _content(path))


def read_config(path: Path) -> Config:
    """Read a run's file as a complete configuration; tables of many runs ask for each of them again and again."""
    return _as_written(path, _content(path), Path.cwd())


@lru_cache(maxsize=4096)
def _as_written(path: Path, content: bytes, place: Path) -> Config:
    """Build what is written; paths in it are relative to the current folder, ``place``."""
    return Config.build(_parsed(path, content), preset=False)


def _content(path: Path) -> bytes:
    try:
        return schema.read_bytes(path, "TOML")
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}.") from None


def _parsed(path: Path, content: bytes) -> Sections:
    return _check_layer(schema.parse_toml(content, path), f" in {path}")


def _check_layer(layer: Layer, where: str = "") -> Sections:
    """Refuse what is no section; a run's own file gets what held before settings came that it does not have."""
    for name, values in layer.items():
        if name not in SECTIONS:
            raise unknown(f"section{where}", name, SECTIONS)
        if not isinstance(values, Mapping):
            raise UserError(f"{name!r}{where} is {values!r}; allowed: a section [{name}].")
    sections = {name: dict(values) for name, values in layer.items()}
    if "partition_hash" in sections.get("run", {}):  # written by a run, and so with all settings that there were
        for name, section in sections.items():
            known = SECTIONS[name].kinds(section) if section.get("name", "") in [*SECTIONS[name].table] else ()
            for key, entry in entries_of(*known).items():
                if "before" in entry.metadata:
                    section.setdefault(key, entry.metadata["before"])
    return sections


def parse_assignment(text: str) -> Sections:
    """Parse ``section.key=value``; the value is a TOML literal, or else a word.

    >>> parse_assignment("solver.momentum=0.5")
    {'solver': {'momentum': 0.5}}
    """
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise UserError(f"--set got {text!r}; allowed: section.key=value, such as schedule.learning_rate=0.3.")
    _check_layer({section: {}})
    try:
        tomllib.loads(f"value = {value.strip()}")
    except tomllib.TOMLDecodeError:
        return {section: {name: value.strip()}}
    except (RecursionError, ValueError):
        pass  # said below
    return {section: {name: schema.parse_toml(f"value = {value.strip()}", f"--set {key.strip()}")["value"]}}


def assignment(place: str, value: Any) -> str:
    """Write ``section.key=value`` so that it is parsed to the value: a word as it is, if it is read as one.

    >>> print(assignment("solver.momentum", 0.5), assignment("graph.name", "ring"), assignment("data.folder", ""))
    solver.momentum=0.5 graph.name=ring data.folder=""
    """
    section, _, key = place.partition(".")
    word = isinstance(value, str) and parse_assignment(f"{place}={value}")[section][key] == value and bool(value)
    return f"{place}={value if word else toml_literal(value)}"


def unbound(file: Layer, *asked: Layer) -> Layer:
    """Return a file's sections without the hash of its partition, if what is ``asked`` besides makes other clients."""

    def clients(layer: Layer) -> list[Any]:
        run = layer.get("run", {})
        return [layer.get("data", {}), layer.get("partition", {}), run.get("seed"), run.get("unseen")]

    if "run" not in file or clients(overlay(file, *asked)) == clients(file):
        return file
    return {**file, "run": {key: value for key, value in file["run"].items() if key != "partition_hash"}}


def route(options: Mapping[str, Any], method: str) -> Sections:
    """Sort flat options of Python callers into sections; also ``solver="adam"``, ``schedule={"name": "cosine"}``."""
    chosen: Sections = {"method": {"name": resolve_method(method)}}
    flat: Values = {}
    for key, value in options.items():
        if key == "data":
            raise UserError("Option 'data' is for runs from a file; the federation is the first argument.")
        if key not in SECTIONS:
            flat[key] = value
            continue
        section = SECTIONS[key]
        if not isinstance(value, Mapping):
            if not section.is_named:
                raise UserError(f"Option {key!r} is {value!r}; allowed: a mapping of its settings.")
            value = section.plain(value) if type(value) in section.table.values() else {"name": value}
        chosen.setdefault(key, {}).update(value)
    places: dict[str, str] = {}
    for name in ("run", "batching", "method", "solver", "schedule", "model", "loss", "graph"):
        for key in names_of(*SECTIONS[name].kinds({**DEFAULTS.get(name, {}), **chosen.get(name, {})})):
            places.setdefault(key, name)
    for key, value in flat.items():
        if key not in places:
            raise unknown("option", key, places)
        chosen.setdefault(places[key], {})[key] = value
    return chosen


def _preset(data: Any, method: str, model: Any) -> Sections:
    """Return the shipped settings for a method on a data set: for any data, for a user's own, then for this one.

    What a file has ``with`` a model is for that model alone: weights and rates of one mean nothing to another.
    """
    layers: list[Layer] = []
    for name in ("default", *(["own"] if data in ("file", GIVEN) else []), data):
        for content in _shipped(name):
            layers += [content.get("all", {}), content.get(method, {})]
            chosen = model or overlay(*layers).get("model", {}).get("name")
            special = content.get("with", {}).get(chosen, {}) if isinstance(chosen, str) else {}
            layers += [special.get("all", {}), special.get(method, {})]
    return overlay(*layers)


def _shipped(name: Any) -> Iterator[dict[str, Any]]:
    """Return a preset's file, if there is one, after the one that it is ``like``."""
    resource = files("fedem.runs").joinpath("presets", f"{name}.toml")
    if resource.is_file():
        content = tomllib.loads(resource.read_text(encoding="utf-8"))
        if "like" in content:
            yield from _shipped(content["like"])
        yield content
