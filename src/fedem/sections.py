"""The sections of a run's configuration: what each may hold, and how layers of them are laid over each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedem.compression import Compression
from fedem.data import DATA
from fedem.data.partitions import PARTITIONS
from fedem.engines import ENGINES, Batching
from fedem.errors import UserError, unknown
from fedem.graphs import GRAPHS
from fedem.methods import ALIASES, METHODS
from fedem.models import MODELS
from fedem.models.losses import LOSSES
from fedem.precision import PRECISIONS
from fedem.schedules import SCHEDULES
from fedem.settings import Settings, complete, names_of
from fedem.solvers import SOLVERS

Values = dict[str, Any]
Sections = dict[str, Values]
Layer = Mapping[str, Mapping[str, Any]]

GIVEN = "given"
"""Name of data or a model that was passed from Python, and so can't be made again from a file."""

NO_GRAPH = "none"
"""Name of the graph of clients that talk to a server, or to nobody."""


@dataclass(frozen=True)
class RunSettings(Settings):
    """How a run goes, whatever the method.

    Attributes:
        rounds: communication rounds.
        seed: decides whatever is random.
        clients_per_round: share of the clients that take part in each round, up to 1, or their number, from 2.
        unseen: share of the clients held out of training; when it is over they are fitted and scored, where the method
            has something for them.
        unseen_share: share of its training samples that a client held out is fitted on.
        device: "cpu", "cuda", "cuda:1", ...; "auto" takes a GPU where there is one.
        engine: "stacked" trains many clients at once, "one_by_one" one after the other, with the same results up to
            rounding; "auto" stacks, but for models that can't be stacked and those that a CPU trains faster alone.
        chunk_size: clients stacked together; 0 chooses as many as memory holds. It changes no result beyond rounding.
        dtype: type of the models' parameters and of what is computed with them.
        precision: how exactly float32 numbers are multiplied. "tf32": ten bits of each factor, on a GPU; "float32": all
            bits; "bfloat16": models compute in that type where torch deems it safe.
        local_layers: "batch_norm" keeps each client's batch normalisation, scales and statistics, with the client;
            "none" shares all layers.
        label_shares: whether each client adds the logarithms of its label shares, which it counts, to the outputs of
            the shared models: for clients that differ in how often they see which class.
        fine_tune_epochs: passes over its samples that every client trains for itself before it predicts; 1 turns
            FedAvg into FedAvg+.
        fine_tune_rate: learning rate of that; 0 takes the method's own where it has one, else schedule.learning_rate.
        unseen_epochs: passes that a client held out makes over its samples, with methods that train it to fit it.
        evaluate_every: rounds between scores, by which the best state is chosen; the last round is scored in any case,
            with 0 it alone.
        measure_alpha_every: rounds between measurements of alpha, the share of the way to the optimum that local
            solvers leave; 0: never.
        diagnose_every: rounds between measurements of what the convergence theorems speak of; 0: never.
        checkpoint_every: rounds between checkpoints of a run that has a folder; there is one after the last round.
        partition_hash: hash of who owns which samples. A run writes it down, and config.toml is refused where the
            clients would get others; empty accepts any.

    """

    rounds: int = field(default=200, metadata={"min": 1})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**63 - 1})
    clients_per_round: float = field(default=1.0, metadata={"above": 0})
    unseen: float = field(default=0.0, metadata={"min": 0, "below": 1})
    unseen_share: float = field(default=1.0, metadata={"min": 0, "max": 1})
    device: str = "auto"
    engine: str = field(default="auto", metadata={"choices": ENGINES})
    chunk_size: int = field(default=0, metadata={"min": 0})
    dtype: str = field(default="float32", metadata={"choices": ("float32", "float64")})
    precision: str = field(default="tf32", metadata={"choices": PRECISIONS})
    local_layers: str = field(default="none", metadata={"choices": ("none", "batch_norm")})
    label_shares: bool = False
    fine_tune_epochs: int = field(default=0, metadata={"min": 0})
    fine_tune_rate: float = field(default=0.0, metadata={"min": 0})
    unseen_epochs: int = field(default=5, metadata={"min": 1})
    evaluate_every: int = field(default=10, metadata={"min": 0})
    measure_alpha_every: int = field(default=0, metadata={"min": 0})
    diagnose_every: int = field(default=0, metadata={"min": 0})
    checkpoint_every: int = field(default=10, metadata={"min": 1})
    partition_hash: str = ""

    def is_due(self, every: int, done: int) -> bool:
        """Whether something is due after ``done`` rounds: each ``every`` rounds, 0 being never, and after the last."""
        return bool(every) and (done == self.rounds or done % every == 0)

    def is_scored(self, done: int) -> bool:
        """Whether clients are scored after ``done`` rounds: each ``evaluate_every`` and, even if 0, after the last."""
        return done == self.rounds or self.is_due(self.evaluate_every, done)


Kinds = tuple[type[Settings], ...]


def _rows(table: Mapping[str, type[Settings]]) -> dict[str, Kinds]:
    return {name: (kind,) for name, kind in table.items()}


class _MethodKinds(Mapping[str, Kinds]):
    """The table of methods as it is at any moment: users may add rows of their own."""

    def __getitem__(self, name: str) -> Kinds:
        row = METHODS[name]
        return row.algorithm, row.mixer

    def __iter__(self) -> Iterator[str]:
        return iter(METHODS)

    def __len__(self) -> int:
        return len(METHODS)


# A section's values belong to one kind of settings or, for a method, to its algorithm's and its mixer's.
UNNAMED: dict[str, Kinds] = {"run": (RunSettings,), "batching": (Batching,), "compression": (Compression,)}
NAMED: dict[str, Mapping[str, Kinds]] = {
    "data": _rows(DATA),
    "partition": _rows(PARTITIONS),
    "method": _MethodKinds(),
    "graph": _rows(GRAPHS),
    "model": _rows(MODELS),
    "loss": _rows(LOSSES),
    "solver": _rows(SOLVERS),
    "schedule": _rows(SCHEDULES),
}
WITHOUT_SETTINGS: dict[tuple[str, str], str] = {
    ("data", GIVEN): "Passed from Python.",
    ("partition", GIVEN): "Passed from Python, as part of the data.",
    ("graph", NO_GRAPH): "Clients talk to a server, or to nobody.",
    ("model", GIVEN): "Passed from Python.",
    ("loss", "auto"): "The one that fits the targets: squared_error for numbers, logistic for two classes, "
    "cross_entropy for more.",
}
"""Names beside those with settings, and what they stand for."""

ABOUT: dict[str, str] = {
    "run": "How a run goes: rounds, who takes part, where it is computed, when it is scored.",
    "batching": "How a client walks through its samples in a round.",
    "compression": "What the messages of a server and its clients leave out.",
    "data": "Where the samples come from.",
    "partition": "How samples become clients'; by default as is usual for the data.",
    "method": "What is trained, and how clients' work is put together.",
    "graph": "Who averages with whom where there is no server.",
    "model": "The network that each component, or each client, has.",
    "loss": "What is minimised: the negative log-likelihood of the targets.",
    "solver": "How a client takes its local steps.",
    "schedule": "The learning rate of each round.",
}
"""A line on each section."""

DEFAULTS: Sections = {
    "data": {"name": "synthetic"},
    "method": {"name": "fedem"},
    "graph": {"name": NO_GRAPH},
    "model": {"name": "linear"},
    "loss": {"name": "auto"},
    "solver": {"name": "sgd"},
    "schedule": {"name": "step"},
}


def kinds_of(section: str, values: Mapping[str, Any]) -> Kinds:
    """Return the classes that describe a section's values; none when it has none to set."""
    if section in UNNAMED:
        return UNNAMED[section]
    name = values.get("name")
    if isinstance(name, str) and (section, name) in WITHOUT_SETTINGS:
        return ()
    if not isinstance(name, str) or name not in NAMED[section]:
        raise unknown(section, name, NAMED[section])
    return NAMED[section][name]


def complete_section(section: str, values: Mapping[str, Any]) -> Values:
    """Check a section's values and fill in the defaults."""
    kinds = kinds_of(section, values)
    own = {key: value for key, value in values.items() if key != "name" or section in UNNAMED}
    named = {} if section in UNNAMED else {"name": values["name"]}
    if not kinds:
        if own:
            raise UserError(f"[{section}] has {next(iter(own))!r}, but {values['name']!r} takes no settings.")
        return named
    return named | complete(section, own, *kinds)


def overlay(*layers: Layer) -> Sections:
    """Merge section by section; a layer that changes a section's name keeps the old values that the new one has too."""
    merged: Sections = {}
    for layer in layers:
        for section, given in layer.items():
            values = dict(given)
            if section == "method" and "name" in values:
                values["name"] = ALIASES.get(values["name"], values["name"])
            old = merged.get(section, {})
            default = DEFAULTS.get(section, {}).get("name")
            if old and "name" in values and old.get("name", default) != values["name"]:
                known = names_of(*kinds_of(section, values))
                old = {key: value for key, value in old.items() if key in known}
            merged[section] = old | values
    return merged
