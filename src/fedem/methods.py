"""The only table of names: a method is an algorithm and a mixer."""

from __future__ import annotations

from typing import NamedTuple

from fedem.algorithms.base import Algorithm
from fedem.algorithms.fedavg import FedAvg
from fedem.algorithms.fedem import FedEM
from fedem.errors import unknown
from fedem.mixing.alone import Alone
from fedem.mixing.base import Mixer
from fedem.mixing.star import Star


class Method(NamedTuple):
    """A row of the table."""

    algorithm: type[Algorithm]
    mixer: type[Mixer]
    title: str
    summary: str


METHODS: dict[str, Method] = {
    "fedem": Method(FedEM, Star, "FedEM", "M shared components, private mixture weights"),
    "fedavg": Method(FedAvg, Star, "FedAvg", "one model for all, averaged each round"),
    "local": Method(FedAvg, Alone, "Local", "a model for each client, trained alone"),
}


def find_method(name: str) -> Method:
    """Return the row called ``name``."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
