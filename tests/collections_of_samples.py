"""Small collections, and who owns what of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedem.data.partitions import Assignment, Collection, Partition, from_arrays


def collection_of(sizes: list[int], parts: int = 3) -> Collection:
    """``sizes[l]`` samples of label ``l``, ``parts`` fine labels to a coarse one; owners of 1, 3, 5, ... samples."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    names = np.array([f"writer {math.isqrt(row)}" for row in range(len(labels))])
    collection = from_arrays(np.arange(len(labels), dtype=np.int64)[:, None], labels, names)
    return replace(collection, coarse=torch.from_numpy(labels // parts))


EVEN = collection_of([20] * 12)
UNEVEN = collection_of([17, 3, 40, 1, 25, 30, 5, 9])


def permuted(collection: Collection, order: Any, names: Any) -> Collection:
    """The same samples with rows in another ``order``, and their owners with ``names`` in another one."""
    rows, places = torch.as_tensor(order), np.argsort(names)
    assert collection.owners is not None
    assert collection.coarse is not None
    return replace(
        collection,
        pool=collection.pool.read(rows),
        ids=collection.ids[rows],
        owners=torch.from_numpy(places)[collection.owners[rows]],
        owner_names=tuple(collection.owner_names[name] for name in names),
        coarse=collection.coarse[rows],
    )


def rows_of(assignment: Assignment) -> dict[str, NDArray[np.int64]]:
    parts = assignment.rows.tensor_split(assignment.offsets[1:-1])
    return {name: part.numpy() for name, part in zip(assignment.names, parts, strict=True)}


def owned(assignment: Assignment, collection: Collection) -> dict[str, list[int]]:
    return {name: sorted(collection.ids.numpy()[rows].tolist()) for name, rows in rows_of(assignment).items()}


def counts_of(assignment: Assignment, values: torch.Tensor) -> NDArray[np.int64]:
    """How often each value stands at each client, ``[T, values]``."""
    width = int(values.max()) + 1
    return np.stack([np.bincount(values.numpy()[rows], minlength=width) for rows in rows_of(assignment).values()])


def counts_over_seeds(partition: Partition, collection: Collection, seeds: int) -> NDArray[np.int64]:
    targets = collection.pool.targets
    return np.stack([counts_of(partition.assign(collection, seed), targets) for seed in range(seeds)])
