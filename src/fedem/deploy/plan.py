"""What all sides of a deployment agree on, and what whoever starts it and each node may set for themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from reprlib import repr as shorten
from typing import Any, Self

from fedem.core.errors import UserError
from fedem.core.files import write_atomically, write_json
from fedem.core.schema import Table, read_json
from fedem.core.settings import Settings, complete, entries_of
from fedem.data.dataset import Dataset
from fedem.methods.base import AUTO, find_method
from fedem.runs.config import DEFAULTS, SECTIONS, Config, Layer, read_toml, unbound
from fedem.runs.recipe import FORMAT, FURTHER, Recipe
from fedem.runs.trainer import Trainer

CONFIG, PLAN = "config.toml", "plan.json"
SHAPES = Table(FORMAT, FURTHER)  # what plan.json holds
# [run]: they need all clients' data in one place
_SIMULATED = ("unseen", "neighbours", "unlabelled", "measure_alpha_every", "diagnose_every")
_GUARDED: Layer = {"defence": {"name": "clip"}}
_START = {"weights": "", "jitter": 0.0}  # [model]: they say what the server's first models are made of


@dataclass(frozen=True, eq=False)
class Plan(Recipe):
    """The recipe of a deployment; it holds nothing of any client."""

    @staticmethod
    def configure(file: Layer, *layers: Layer) -> Config:
        """Lay sections over each other for a server: uploads are clipped where the method can have it.

        So it is unless something else is said; the "none" that a run writes into its ``file`` says nothing.
        """
        if file.get("defence") == DEFAULTS["defence"] and "partition_hash" in file.get("run", {}):
            file = {name: values for name, values in file.items() if name != "defence"}
        file = unbound(file, *layers)
        config = Config.build(_GUARDED, file, *layers)
        takes_defence = find_method(config.method.name).takes_defence and config.graph is None
        return config if takes_defence else Config.build(file, *layers)

    @classmethod
    def make(cls, config: Config, dataset: Dataset) -> Plan:
        """Settle on sample data what the configuration leaves open, and try the model on them."""
        for key in _SIMULATED:
            if value := config.sections["run"][key]:
                nothing = "false" if value is True else 0
                raise UserError(f"run.{key} is {value}; allowed in a deployment, where no one has all data: {nothing}.")
        if config.attack is not None:
            problem = f"attack.name is {config.name('attack')!r}, which is for simulations"
            raise UserError(f"{problem}; allowed in a deployment: none, as nobody plans for clients to do harm.")
        if config.method.values.get("num_components") == AUTO:
            problem = f"method.num_components is {AUTO!r}, which goes by the losses of all clients at once"
            raise UserError(f"{problem}; allowed in a deployment: a number, at least 1, such as a simulation found.")
        if config.run.metrics:
            raise UserError(f"run.metrics is {config.run.metrics!r}; allowed in a deployment: the metric of its loss.")
        # How many clients there will be, the sample does not say; and who knows when to stop has all scores and states.
        trained = config.replace("run", clients_per_round=1.0, patience=0)
        recipe = Trainer.prepare(trained, dataset, fresh=False).recipe
        # Neither where the sample lies nor who owns which of its rows concerns those who get the plan.
        clients_per_round = config.run.clients_per_round
        settled = recipe.config.replace("run", clients_per_round=clients_per_round, partition_hash="")
        return cls(settled.replace("data", path="") if "path" in settled.sections["data"] else settled, recipe.format)

    def save(self, folder: Path) -> None:
        """Write config.toml and plan.json into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG, self.config.to_toml().encode())
        write_json(folder / PLAN, self.format.to_json())

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read what :meth:`save` wrote."""
        try:
            content = read_json(folder / PLAN, SHAPES)
        except FileNotFoundError:
            makers = "`fedem deploy init` makes one for a server, `fedem peer plan` one for peers"
            raise UserError(f"{folder} holds no plan (no {PLAN}); {makers}.") from None
        return cls.from_json({"config": read_toml(folder / CONFIG), "shapes": content})

    def on_node(self, device: str = "") -> Plan:
        """Return the plan as a client follows it: on its own device, and without weights in files to start from.

        Those are the server's: a client's models come by messages.
        """
        config = self.config.replace("run", device=device) if device else self.config
        start = {key: value for key, value in _START.items() if key in config.sections["model"]}
        return Plan(config.replace("model", **start), self.format)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that sides must agree on, 32 hexadecimal digits: not of what each may have its own way."""
        agreed = self.on_node("auto").to_json()
        # Plans that were made before a section came go on, unless it says something new.
        unsaid = {name for name, section in SECTIONS.items() if section.came_later}
        unsaid = {name for name in unsaid if agreed["config"][name] == DEFAULTS[name]}
        agreed["config"] = {name: _said(name, own) for name, own in agreed["config"].items() if name not in unsaid}
        content = json.dumps(agreed, sort_keys=True)
        return blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def rate(self, round_index: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        return self.config.schedule.rate(round_index, self.config.run.rounds)


def _said(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without settings that plans were made before, where they have their defaults."""
    entries = entries_of(*SECTIONS[section].kinds(values)) if values else {}
    later = {key: entry.default for key, entry in entries.items() if entry.metadata.get("came_later")}
    return {key: value for key, value in values.items() if key not in later or value != later[key]}


_KEYWORDS = {"continue": "continued"}  # keys that Python has no names for
_NAME, _LONGEST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*"), 100
MOST_ROUNDS = 10**6  # of a deployed run, where each takes seconds


def check_name(what: str, name: object) -> str:
    """Return the name of an experiment, or of a run of it; refuse one that can't be that of a folder everywhere."""
    if isinstance(name, str) and len(name) <= _LONGEST and _NAME.fullmatch(name):
        return name
    allowed = f"up to {_LONGEST} letters, digits, '-', '_' and '.'"
    raise UserError(f"{what} is {shorten(name)}; allowed: {allowed}, a letter, digit or '_' first.")


@dataclass(frozen=True)
class _Flat(Settings):
    """Settings in one flat table, as Flower has them; keys are written-so or written_so."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        plain = {key.replace("-", "_"): value for key, value in values.items()}
        title = f"{cls.__name__.removesuffix('Config').lower()} config"
        return cls(**complete(title, {_KEYWORDS.get(key, key): value for key, value in plain.items()}, cls))


@dataclass(frozen=True)
class RunConfig(_Flat):
    """What whoever starts a run may set, for the server and, in a simulation, for all clients."""

    experiment: str = "fedem"
    """what clients keep goes by this name, so a new run needs another one"""
    folder: str = "runs"
    """where the server writes the run, in a folder called like the experiment"""
    rounds: int = field(default=0, metadata={"min": 0, "max": MOST_ROUNDS})
    """0: as the plan says"""
    min_clients: int = field(default=2, metadata={"min": 1})
    """connected before a round starts, and good answers that it needs"""
    wait: float = field(default=600.0, metadata={"above": 0})
    """seconds that the server waits for them"""
    timeout: float = field(default=600.0, metadata={"above": 0})
    """seconds that clients have to answer"""
    continued: bool = False
    """"continue": go on after the last complete round"""
    max_samples: int = field(default=0, metadata={"min": 0})
    """of a client, to train on; an answer with more is refused. 0: not known"""
    max_ratio: float = field(default=1000.0, metadata={"min": 0})
    """... times the median of all clients' numbers of samples; 0: any"""
    max_norm: float = field(default=10.0, metadata={"min": 0})
    """of a client's update, times what is usual; one beyond is left out. 0: any"""
    min_cosine: float = field(default=-1.0, metadata={"min": -1, "below": 1})
    """between a client's update and the mean of the others; one below is left out. -1: any"""
    strikes: int = field(default=3, metadata={"min": 0})
    """rounds in a row with a refused or left out answer, after which a client is set aside; 0: never"""
    readmit: str = ""
    """clients' names or nodes' numbers, with commas between them: they were set aside, and take part again"""
    keep: int = field(default=3, metadata={"min": 1})
    """rounds whose checkpoints are kept, here and at the clients: the run can be rolled back to them"""
    data: str = ""
    """for Flower's simulation: a file of all clients"""
    state: str = ""
    """... and a folder for what they keep"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("run config.experiment", self.experiment)


@dataclass(frozen=True)
class NodeConfig(_Flat):
    """What a node sets for itself."""

    data: str = ""
    """a file, or a folder of files, with the client's samples"""
    client: str = ""
    """its name; may be left out where the data name one client alone"""
    state: str = ""
    """a folder for what the client keeps"""
    device: str = ""
    """auto, cpu, cuda, ...; as the plan says when left out"""
    partition_id: int = field(default=-1, metadata={"min": -1})
    num_partitions: int = field(default=0, metadata={"min": 0})

    def places(self, run: RunConfig) -> tuple[Path, Path]:
        """Return where the data are and where the state goes; in a simulation the run says so."""
        data, state, elsewhere = self.data, self.state, ""
        if self.partition_id >= 0:
            data, state, elsewhere = data or run.data, state or run.state, ", here or in a simulation's run config"
        for key, value in (("data", data), ("state", state)):
            if not value:
                raise UserError(f"The node config has no {key!r}; allowed: a path{elsewhere}.")
        return Path(data), Path(state)
