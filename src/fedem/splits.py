"""Each client's samples, split at random into those to train on, to validate and to test.

Shapes: T clients, N samples of all clients together, P of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedem.errors import UserError
from fedem.randomness import SPLIT, client_keys, derive
from fedem.samples import Samples, offsets_of


def check_shares(validation: float, test: float) -> None:
    """Refuse shares that leave nothing to train on."""
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise UserError(
            f"The shares of validation and test are {validation} and {test}; allowed: not negative, together below 1."
        )


def cut(order: Tensor, validation: float, test: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a client's shuffled rows into train, validation and test, leaving at least one row to train on."""
    count = len(order)
    num_test = min(round(test * count), max(count - 1, 0))
    num_validation = min(round(validation * count), max(count - 1 - num_test, 0))
    num_train = count - num_validation - num_test
    train, valid, tested = order.split([num_train, num_validation, num_test])
    return train, valid, tested


def split_rows(
    names: Sequence[str], rows: Tensor, offsets: Tensor, ids: Tensor, validation: float, test: float, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Split every client's rows at random by the ids of its samples.

    Args:
        names: of the T clients.
        rows: ``[N]`` int64, rows of the pool, one client after the other.
        offsets: ``[T + 1]`` int64 of each client's rows.
        ids: ``[P]`` int64.
        validation: share of each client's samples.
        test: likewise. At least one sample always stays for training.
        seed: decides the split, together with the names and the ids.

    Returns:
        for train, validation and test: rows one client after the other, each one's ordered by ids, and their offsets
    """
    check_shares(validation, test)
    sizes = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    words = derive(client_keys(names), SPLIT, seed)[owner]
    # Whatever the pool's order, a client's samples stand in that of these words.
    rows = rows[torch.from_numpy(np.lexsort((derive(words, ids[rows]).numpy(), owner.numpy())))]
    rank = torch.arange(len(rows)) - offsets[:-1][owner]
    num_test = torch.minimum((test * sizes.double()).round().long(), (sizes - 1).clamp(min=0))
    num_validation = torch.minimum((validation * sizes.double()).round().long(), (sizes - 1 - num_test).clamp(min=0))
    first_validation = (sizes - num_validation - num_test)[owner]
    first_test = (sizes - num_test)[owner]
    chosen = (rank < first_validation, (rank >= first_validation) & (rank < first_test), rank >= first_test)
    counts = (sizes - num_validation - num_test, num_validation, num_test)
    return [(rows[mask], offsets_of(count)) for mask, count in zip(chosen, counts, strict=True)]


def thinned(samples: Samples, keys: Tensor, share: float, seed: int) -> Samples:
    """Keep a ``share`` of each client's samples, drawn at random by ``seed`` and the clients' ``keys`` ``[T]``.

    A smaller share is a part of a larger one. Counts are rounded, so a client may keep none.
    """
    sizes, offsets = samples.sizes, samples.offsets
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    position = torch.arange(len(owner)) - offsets[:-1][owner]
    words = derive(derive(keys, SPLIT, seed)[owner], position)
    order = torch.from_numpy(np.lexsort((words.numpy(), owner.numpy())))
    counts = (share * sizes.double()).round().long()
    kept = order[position < counts[owner]].sort().values.to(samples.pool.device)
    rows = kept if samples.rows is None else samples.rows.index_select(0, kept)
    return Samples(samples.pool, offsets_of(counts), rows)
