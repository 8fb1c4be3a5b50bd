"""The table of methods: one row each, which a method's own file adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedem.core.errors import UserError, unknown
from fedem.core.settings import names_of
from fedem.methods.base import Algorithm
from fedem.methods.mixer import Mixer
from fedem.models.base import Model
from fedem.solvers import Solver


@dataclass(frozen=True)
class Method:
    """A row of the table: an algorithm, a mixer, and what to say of them."""

    name: str
    algorithm: type[Algorithm]
    mixer: type[Mixer]
    title: str
    summary: str
    paper: str = ""
    personal: str = "nothing"
    """what a client keeps to itself"""
    sent: str = "a model"
    """what goes up and down in a round"""
    unseen: str = "takes the shared model"
    """what a client unseen in training does"""
    aliases: tuple[str, ...] = ()
    """other names that users may say"""
    position: int = 1000
    """where it stands in lists; methods from outside come last"""

    def build(self, model: Model, solver: Solver, settings: dict[str, Any]) -> tuple[Algorithm, Mixer]:
        """Build the two from a user's checked settings."""
        for_mixer = {key: value for key, value in settings.items() if key in names_of(self.mixer)}
        rest = {key: value for key, value in settings.items() if key not in for_mixer}
        return self.algorithm(model, solver, **rest), self.mixer(**for_mixer)

    @property
    def goes_over_graph(self) -> bool:
        """Whether clients can average with their neighbours, in the simulator and among peers."""
        return self.algorithm.uploads_model and (self.mixer.is_server_mean or self.mixer.over_graph)

    @property
    def is_compressible(self) -> bool:
        """Whether messages may be compressed."""
        return self.algorithm.compressible and self.mixer.is_server_mean

    @property
    def takes_label_shares(self) -> bool:
        """Whether clients may shift outputs by the shares of their labels."""
        return self.algorithm.takes_label_shares and self.mixer.averages

    @property
    def is_diagnosable(self) -> bool:
        """Whether its rounds can be judged by the measures of the paper's theorems."""
        return self.algorithm.minimises_likelihood and self.mixer.seeks_consensus


METHODS: dict[str, Method] = {}
ALIASES: dict[str, str] = {}


def register(*methods: Method) -> None:
    """Add rows to the table, so that every command and function knows the methods by their names."""
    for method in methods:
        for name in (method.name, *method.aliases):
            if name in METHODS or name in ALIASES:
                raise UserError(f"There is a method {name!r} already; a new one needs another name.")
        METHODS[method.name] = method
        ALIASES.update(dict.fromkeys(method.aliases, method.name))


def names_where(holds: Callable[[Method], bool]) -> str:
    """Name the methods of which something holds, as messages list them."""
    return ", ".join(name for name, row in METHODS.items() if holds(row))


def find_method(name: str) -> Method:
    """Return the row called ``name``."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def resolve_method(name: str) -> str:
    """Return the name in the table that ``name`` stands for."""
    found = ALIASES.get(name, name)
    find_method(found)
    return found


def title_of(name: str) -> str:
    """Return a method's title; of one that is not here, such as the row of another program, its name."""
    return METHODS[name].title if name in METHODS else name
