"""Least squares worked out in numpy, and what tests of the methods share."""

from __future__ import annotations

import numpy as np
import torch
from helpers import make_training

from fedem.core.tree import Tree, tree_flat
from fedem.data.federation import Federation
from fedem.engines import Batching
from fedem.runs.rounds import Training
from fedem.solvers import Newton

WHOLE = Batching(0, local_steps=4)


def assert_same(first: Tree, second: Tree, tolerance: float = 1e-12) -> None:
    assert first.keys() == second.keys()
    for name, leaf in second.items():
        torch.testing.assert_close(first[name], leaf, rtol=0, atol=tolerance)


def change_of(first: Tree, second: Tree) -> float:
    return float((tree_flat(first) - tree_flat(second)).abs().max())


def design(federation: Federation, position: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's inputs after a column of ones, and targets; parameters are then [bias, weight]."""
    inputs, targets = federation.train.client(position)
    return np.hstack([np.ones((len(targets), 1)), inputs.numpy()]), targets.numpy()


def vector(tree: Tree) -> np.ndarray:
    return tree_flat(tree, 1).numpy()


def proximal(federation: Federation, position: int, centre: np.ndarray, pull: float) -> np.ndarray:
    """argmin of the client's mean squared error / 2 + pull/2 |w - centre|^2."""
    a, y = design(federation, position)
    return np.linalg.solve(a.T @ a / len(y) + pull * np.eye(a.shape[1]), a.T @ y / len(y) + pull * centre)


def slope(federation: Federation, position: int, point: np.ndarray) -> np.ndarray:
    a, y = design(federation, position)
    return a.T @ (a @ point - y) / len(y)


def mean_square(federation: Federation, position: int, point: np.ndarray) -> float:
    a, y = design(federation, position)
    return float(((a @ point - y) ** 2).mean() / 2 + np.log(2 * np.pi) / 2)


def shares(federation: Federation) -> np.ndarray:
    return federation.train.sizes.numpy() / len(federation.train)


def exact_training(method: str, federation: Federation, **settings: object) -> Training:
    return make_training(
        method, federation, loss="squared_error", solver=Newton(), batching=Batching(0, local_steps=2), **settings
    )


def conflict() -> Federation:
    """Two clients who want opposite things; the second has more to lose and fewer samples."""
    rng = np.random.default_rng(5)
    pairs = []
    for size, scale in ((40, 1.0), (20, -3.0)):
        x = rng.normal(size=(size, 4))
        pairs.append((x, x @ np.array([scale, scale, 0.0, 0.0]) + 0.1 * rng.normal(size=size)))
    return Federation.from_parts(pairs, pairs, pairs, ("ann", "bob"))


def quadratic_problem(sizes: tuple[int, ...]) -> tuple[Federation, np.ndarray]:
    """Clients with different Hessians, all well conditioned, and different optima; and the optimum of all samples."""
    rng = np.random.default_rng(2)
    pairs = []
    for index, size in enumerate(sizes):
        basis, _ = np.linalg.qr(np.hstack([np.ones((size, 1)), rng.normal(size=(size, 4))]))
        x = basis[:, 1:] * np.sqrt(size) * np.where(np.arange(4) == index % 4, 1.5, 1.0)
        pairs.append((x, x @ (3 * rng.normal(size=4)) + rng.normal() + 0.1 * rng.normal(size=size)))
    federation = Federation.from_parts(pairs, names=[f"client {index}" for index in range(len(sizes))])
    designs = [design(federation, position) for position in range(len(sizes))]
    a, y = (np.concatenate(parts) for parts in zip(*designs, strict=True))
    return federation, np.linalg.lstsq(a, y, rcond=None)[0]
