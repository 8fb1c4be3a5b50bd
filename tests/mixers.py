"""Mixers, uploads and rounds that the tests of mixing share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedem.core.random import client_keys
from fedem.core.tree import Tree, add_prefix
from fedem.graphs import Ring
from fedem.methods.afl import Agnostic
from fedem.methods.clustered import Clusters
from fedem.methods.decentralised import Graph
from fedem.methods.fedfomo import Candidates
from fedem.methods.mixer import Alone, Mixer, Round, Served, Star, Start
from fedem.methods.mocha import Relations
from fedem.methods.pfedhn import Hypernetwork
from fedem.methods.pulls import Laplacian, Loopless
from fedem.methods.qffl import ByMass

MIXERS: dict[str, Mixer] = {
    "star": Star(),
    "graph": Graph(Ring()),
    "alone": Alone(),
    "agnostic": Agnostic(0.1),
    "by_mass": ByMass(),
    "clusters": Clusters(),
    "candidates": Candidates(2),
    "hypernetwork": Hypernetwork(3, 4),
    "loopless": Loopless(),
    "laplacian": Laplacian(),
    "relations": Relations(),
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_uploads(count: int) -> Tree:
    return {"w": random_tensor(count, 2, 3), "steps": torch.arange(count)}


def make_round(sizes: list[int], clients: list[int] | None = None, total: int | None = None, key: int = 7) -> Round:
    here = list(range(len(sizes))) if clients is None else clients
    return Round(torch.tensor(here), torch.tensor(sizes), len(sizes) if total is None else total, 0.2, key)


def make_keys(count: int) -> Tensor:
    return client_keys([f"client {index}" for index in range(count)])


def all_at_once(uploads: Tree) -> list[tuple[Tensor, Tree]]:
    return [(torch.arange(len(next(iter(uploads.values())))), uploads)]


def in_pieces(uploads: Tree, order: list[list[int]]) -> list[tuple[Tensor, Tree]]:
    return [(torch.tensor(index), {name: leaf[index] for name, leaf in uploads.items()}) for index in order]


def first_state(mixer: Mixer, count: int) -> tuple[Tree, Tree]:
    """The first groups and memory of a mixer for a model with two leaves."""
    model = {"w": random_tensor(2, 3, seed=1), "b": random_tensor(3, seed=2)}
    if isinstance(mixer, Relations):
        dual = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
        model = add_prefix("task", model) | add_prefix("dual", dual)
        model |= {"stiffness": torch.zeros((), dtype=torch.float64)}
    return mixer.init(Start(model, frozenset("wb"), make_keys(count), 5))


def downloads(mixer: Mixer, shared: Tree, memory: Tree, clients: list[int], key: int = 0) -> Served:
    """What clients download in a round with this key."""
    return mixer.plan(shared, memory, make_round([1] * len(clients), clients, key=key)).downloads


def make_trained(mixer: Mixer, count: int, seed: int = 0) -> Tree:
    """Uploads of so many clients, as the mixer's method makes them."""
    model = {"w": random_tensor(count, 2, 3, seed=seed + 3), "b": random_tensor(count, 3, seed=seed + 4)}
    if isinstance(mixer, Agnostic):
        return add_prefix("model", model) | {"loss": random_tensor(count, seed=5).abs()}
    if isinstance(mixer, Candidates):
        return add_prefix("model", model) | {"weights": random_tensor(count, 2, seed=5).abs()}
    if isinstance(mixer, ByMass):
        return model | {"log_mass": random_tensor(count, seed=5)}
    return model
