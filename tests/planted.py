"""Clients whose clusters are known."""

from __future__ import annotations

import numpy as np
from helpers import DIMENSION

from fedem.data.federation import Federation

THETAS = 5 * np.array([[1.0, 0, 0, 0], [0, 1, 0, 0.3], [-1, -1, 0.5, 0], [0, 0.2, -1, -1]])


def planted_federation(members: list[int], loss: str = "squared_error", size: int = 30, seed: int = 0) -> Federation:
    """Client t follows THETAS[members[t]]."""
    rng = np.random.default_rng(seed)
    pairs = []
    for group in members:
        x = rng.normal(size=(size, DIMENSION))
        signal = x @ THETAS[group] + 0.1 * rng.normal(size=size)
        pairs.append((x, signal if loss == "squared_error" else (signal > 0).astype(np.int64)))
    return Federation.from_parts(pairs, pairs, pairs, [f"client {position}" for position in range(len(members))])
