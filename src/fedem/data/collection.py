"""All samples of a data set, before anybody owns them.

Shapes: N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.randomness import client_keys
from fedem.samples import Pool

_ROWS = 1 << 16
_SEED = 20211206


@dataclass(frozen=True, eq=False)
class Collection:
    """Samples with what a partition may go by.

    Attributes:
        pool: the samples.
        ids: ``[N]`` int64, a hash of each sample's content, and of which one it is among equal ones: what is chosen by
            it does not depend on the file's order.
        fingerprint: a hash of all samples, whatever their order.
        owners: ``[N]`` int64, the position of each sample's own client (writer, role, ...) among ``owner_names``.
        owner_names: names of those clients; empty when the data set has none.
        coarse: ``[N]`` int64, the group that each sample's label belongs to; None when labels have no groups.
        features: names of the input columns, when they came from a table.

    """

    pool: Pool
    ids: Tensor
    fingerprint: str
    owners: Tensor | None = None
    owner_names: tuple[str, ...] = ()
    coarse: Tensor | None = None
    features: tuple[str, ...] | None = None


class Assignment(NamedTuple):
    """Who owns which samples of a collection."""

    names: tuple[str, ...]
    """of the T clients, all different"""
    rows: Tensor
    """``[n]`` int64, rows of the collection, one client after the other; none stands twice"""
    offsets: Tensor
    """``[T + 1]`` int64; client t owns ``rows[offsets[t]:offsets[t + 1]]``"""


def content_ids(*columns: NDArray[np.generic]) -> NDArray[np.int64]:
    """Hash each sample's content to a word: arrays ``[N, ...]`` of plain numbers -> ``[N]``.

    Each column is multiplied with odd random words, byte by byte, and the sum scrambled; equal samples have equal ids.
    """
    rng = np.random.default_rng(_SEED)
    ids = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        width = int(np.prod(column.shape[1:])) * column.dtype.itemsize
        factors = rng.integers(0, 1 << 63, size=-(-width // 8), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        for start in range(0, len(column), _ROWS):
            block = np.ascontiguousarray(column[start : start + _ROWS]).reshape(-1)
            content = np.zeros((len(block) * column.dtype.itemsize // max(width, 1), 8 * len(factors)), np.uint8)
            content[:, :width] = block.view(np.uint8).reshape(-1, width)
            words = _scramble(content.view(np.uint64))
            ids[start : start + _ROWS] += (words * factors).sum(1, dtype=np.uint64)
        ids = _scramble(ids)
    return ids.view(np.int64)


def numbered(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Hash into each id which one it is among those equal to it, counted from 0. ``[N] -> [N]``.

    Equal samples would otherwise be drawn together or not at all. They are interchangeable: in another order the same
    ids belong to the same content.
    """
    order = np.argsort(ids, kind="stable")
    places = np.arange(len(ids))
    first = np.ones(len(ids), dtype=bool)
    first[1:] = ids[order[1:]] != ids[order[:-1]]
    counts = np.empty(len(ids), dtype=np.int64)
    counts[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return content_ids(ids, counts)


def _scramble(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finaliser, so that a change of one bit changes them all."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


def fingerprint_of(ids: NDArray[np.int64]) -> str:
    """Hash all samples, whatever their order: 32 hexadecimal digits."""
    return blake2b(np.sort(ids).tobytes(), digest_size=16).hexdigest()


def from_arrays(
    inputs: NDArray[np.generic],
    targets: NDArray[np.generic],
    owners: NDArray[np.str_] | None = None,
    features: tuple[str, ...] | None = None,
) -> Collection:
    """Make a collection of arrays in memory; ``owners`` are names, one a sample."""
    ids = content_ids(inputs, targets)
    names: tuple[str, ...] = ()
    codes = None
    if owners is not None:
        unique, codes = np.unique(owners.astype(str), return_inverse=True)
        names = tuple(unique.tolist())
        ids = content_ids(ids, client_keys(names).numpy()[codes])
    ids = numbered(ids)
    return Collection(
        Pool(torch.from_numpy(inputs), torch.from_numpy(targets)),
        torch.from_numpy(ids),
        fingerprint_of(ids),
        None if codes is None else torch.from_numpy(codes.astype(np.int64)),
        names,
        features=features,
    )
