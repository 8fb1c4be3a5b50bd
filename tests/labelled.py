"""Samples that say whose they are, and what federations of them are compared by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedem.data.federation import PARTS, Federation
from fedem.data.samples import Samples

Pair = tuple[NDArray[Any], NDArray[Any]]
client_sizes = st.lists(st.integers(1, 25), min_size=1, max_size=8)
share = st.floats(0, 1, exclude_max=True)
seeds = st.integers(0, 2**31)


def labelled(client: int, size: int) -> Pair:
    """Samples that say whose they are: inputs (client, row), target 1000 client + row."""
    rows = np.arange(size)
    return np.stack([np.full(size, client), rows], axis=1).astype(np.float64), 1000 * client + rows


def labelled_clients(sizes: list[int]) -> list[Pair]:
    return [labelled(client, size) for client, size in enumerate(sizes)]


def good(size: int = 6) -> Pair:
    return labelled(0, size)


def rows_of(federation: Federation, position: int, part: str) -> list[int]:
    """Which rows of the client's own samples stand in a part."""
    return [int(row) for row in federation.part(part).client(position)[0][:, 1]]


def split_of(federation: Federation, name: str) -> dict[str, list[int]]:
    return {part: rows_of(federation, federation.position(name), part) for part in PARTS}


def splits(federation: Federation) -> dict[str, dict[str, list[int]]]:
    return {name: split_of(federation, name) for name in federation.names}


def same_samples(first: Samples, second: Samples) -> bool:
    return all(torch.equal(getattr(first, field), getattr(second, field)) for field in ("inputs", "targets", "offsets"))


def same_federation(first: Federation, second: Federation) -> bool:
    return first.names == second.names and all(same_samples(first.part(part), second.part(part)) for part in PARTS)
