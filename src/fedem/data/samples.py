"""Samples of several clients: rows of a pool, one client after the other, nothing padded and nothing copied.

They are checked on entry (what is wrong is said by the client's name) and split, at random or in order, into those to
train on, to validate and to test.

Shapes: P samples of the pool, T clients, N samples of all clients together, n of some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.random import SPLIT, derive

_SORTED_ROWS = 1 << 16


class Pool(NamedTuple):
    """Inputs and targets that samples are rows of. They may be mapped from a file: only what is read costs memory."""

    inputs: Tensor  # [P, ...]
    targets: Tensor  # [P] integers (classes) or floats, or [P, D] floats

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    @property
    def num_bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self)

    def read(self, rows: Tensor) -> Pool:
        """Read ``rows`` (positions of any shape, on the pool's device)."""
        # index_select is several times faster than indexing on a CPU.
        return Pool(*(array.index_select(0, rows.flatten()).reshape(*rows.shape, *array.shape[1:]) for array in self))

    def to(self, device: torch.device) -> Pool:
        """Move to ``device``; integers stay as small as they are."""
        return Pool(*(array.to(device) for array in self))


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of several clients, one client after the other."""

    pool: Pool
    offsets: Tensor
    """``[T + 1]`` int64 on the CPU; client ``t`` owns samples ``offsets[t]`` up to ``offsets[t + 1]``"""
    rows: Tensor | None = None
    """``[N]`` int64 on the pool's device: each sample's row of the pool; None when they are the pool, in its order"""

    @property
    def inputs(self) -> Tensor:
        """All inputs in order, ``[N, ...]``; read from the pool each time, unless the samples are the pool."""
        return self.pool.inputs if self.rows is None else self.pool.inputs.index_select(0, self.rows)

    @property
    def targets(self) -> Tensor:
        """All targets in order, ``[N]`` or ``[N, D]``; likewise."""
        return self.pool.targets if self.rows is None else self.pool.targets.index_select(0, self.rows)

    @property
    def num_clients(self) -> int:
        """T."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> Tensor:
        """Number of samples of each client, ``[T]`` int64."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, positions: Tensor) -> Pool:
        """Read the samples at ``positions`` ``[...]`` (among the N, on the pool's device)."""
        if self.rows is None:
            return self.pool.read(positions)
        return self.pool.read(self.rows.index_select(0, positions.flatten()).reshape(positions.shape))

    def span(self, start: int, end: int) -> Pool:
        """Read the samples from ``start`` up to ``end``; a view where the samples are the pool."""
        if self.rows is None:
            return Pool(*(array[start:end] for array in self.pool))
        return self.pool.read(self.rows[start:end])

    def client(self, position: int) -> Pool:
        """Return one client's inputs and targets."""
        return self.span(int(self.offsets[position]), int(self.offsets[position + 1]))

    def take(self, clients: Tensor) -> Samples:
        """Return the samples of ``clients`` (positions) in that order; nothing is read."""
        if len(clients) == self.num_clients and bool((clients == torch.arange(len(clients))).all()):
            return self
        if len(clients) and not 0 <= int(clients.min()) <= int(clients.max()) < self.num_clients:
            raise UserError(f"Positions are {clients.min()} to {clients.max()}; allowed: 0 to {self.num_clients - 1}.")
        sizes = self.sizes[clients]
        offsets = offsets_of(sizes)
        shift = np.repeat((self.offsets[clients] - offsets[:-1]).numpy(), sizes.numpy())
        rows = torch.from_numpy(np.arange(int(offsets[-1])) + shift).to(self.pool.device)
        return Samples(self.pool, offsets, rows if self.rows is None else self.rows.index_select(0, rows))

    def gathered(self) -> Samples:
        """Read all samples into a pool of their own."""
        return self if self.rows is None else Samples(self.pool.read(self.rows), self.offsets)

    def to(self, device: torch.device) -> Samples:
        """Move the samples, and no others, to ``device``."""
        if self.pool.device == device:
            return self
        own = self.gathered()
        return replace(own, pool=own.pool.to(device))

    @property
    def num_bytes(self) -> int:
        """Bytes of all inputs and targets."""
        return self.pool.num_bytes * len(self) // max(1, len(self.pool.targets))


def offsets_of(sizes: Tensor) -> Tensor:
    """Return where each client's rows start, and where the last one's end. ``[T] -> [T + 1]``."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def describe(x: Tensor) -> str:
    """Say what kind of array this is, such as "float32 of shape [n, 3]"."""
    return f"{str(x.dtype).removeprefix('torch.')} of shape [n, {', '.join(map(str, x.shape[1:]))}]".replace(", ]", "]")


def check_inputs(name: str, values: Any, *, finite: bool = True) -> Tensor:
    """Return one client's inputs as a tensor ``[n, ...]`` of an allowed kind; an array ``[n]`` has one feature."""
    inputs = _as_tensor(name, "inputs", values, finite)
    if inputs.dtype in (torch.int8, torch.int16, torch.int32):
        inputs = inputs.long()
    elif inputs.dtype not in (torch.uint8, torch.int64, torch.float32, torch.float64):
        raise UserError(f"Client {name!r} has inputs of type {inputs.dtype}; allowed: uint8, int64, float32, float64.")
    return inputs[:, None] if inputs.ndim == 1 else inputs


def check_pair(name: str, pair: tuple[Any, Any], *, finite: bool = True) -> tuple[Tensor, Tensor]:
    """Return one client's inputs and targets as tensors of allowed kinds, as many of each."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(f"Client {name!r} is a {type(pair).__name__}; allowed: a pair (inputs, targets).")
    inputs, targets = check_inputs(name, pair[0], finite=finite), _as_tensor(name, "targets", pair[1], finite)
    if targets.is_complex():
        raise UserError(f"Client {name!r} has targets of type {targets.dtype}; allowed: integers or floats.")
    if not targets.is_floating_point():
        targets, dtype = targets.long(), targets.dtype
        if dtype == torch.uint64 and bool((targets < 0).any()):
            raise UserError(f"Client {name!r} has integer targets above {2**63 - 1}, the largest allowed.")
    if targets.ndim > 2:
        raise UserError(f"Client {name!r} has targets of shape {list(targets.shape)}; allowed: [n] or [n, D].")
    if len(inputs) != len(targets):
        raise UserError(f"Client {name!r} has {len(inputs)} inputs but {len(targets)} targets; allowed: one for each.")
    return inputs, targets


def _as_tensor(name: str, what: str, values: Any, finite: bool) -> Tensor:
    try:
        if isinstance(values, Tensor):
            tensor = values.detach().cpu()
        else:  # torch wants arrays that may be written; a read-only one is copied
            array = np.asarray(values)
            tensor = torch.from_numpy(np.require(array, requirements=["C", "W"] if array.ndim else ["W"]))
    except (TypeError, ValueError) as error:
        raise UserError(f"Client {name!r} has {what} that are not an array of numbers ({error}).") from None
    if tensor.ndim == 0:
        raise UserError(f"Client {name!r} has a single number as {what}; allowed: an array of shape [n, ...].")
    if finite:
        check_finite(name, what, tensor)
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def check_finite(name: str | NDArray[np.str_], what: str, values: Tensor) -> None:
    """Refuse NaN and infinities in rows of a client called ``name``, or of clients, one name per row."""
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        row = int((~torch.isfinite(values.reshape(len(values), -1))).any(1).nonzero()[0])
        owner = name if isinstance(name, str) else str(name[row])
        raise UserError(f"Client {owner!r} has NaN or infinite {what}, first in row {row}; allowed: finite numbers.")


def split_rows(
    keys: Tensor,
    rows: Tensor,
    offsets: Tensor,
    ids: Tensor,
    validation: float = 0.2,
    test: float = 0.2,
    seed: int = 0,
    gap: int | None = None,
    order: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Split every client's rows at random, by the seed, the client's key ``[T]`` and the ids of its samples.

    ``rows`` ``[N]`` of the pool stand one client after the other, by ``offsets`` ``[T + 1]``; ``ids`` are ``[P]``;
    ``validation`` and ``test`` are shares of each client's samples, at least one of which stays for training. Returns
    for train, validation and test: rows one client after the other, and their offsets.

    With a ``gap`` nothing is drawn: each client's rows, in the order of ``order`` ``[P]`` (ids break ties) or as they
    stand in the pool, are cut into train, validation and test, with ``gap`` samples left out between two parts.
    """
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise UserError(f"The shares of validation and test are {validation} and {test}; allowed: at least 0, sum < 1.")
    if gap is not None and gap < 0:
        raise UserError(f"The gap between the parts is {gap} samples; allowed: at least 0.")
    sizes = offsets.diff()
    counts = _part_sizes(sizes, validation, test, gap or 0)
    # Whatever the pool's order, samples that are split at random stand in that of random words.
    times = None if gap is None else rows if order is None else order[rows]
    shuffled, owner, rank = _shuffled(keys, offsets, ids[rows], seed, times)
    starts = (torch.zeros_like(sizes), counts[0] + (gap or 0) * (counts[1] > 0), sizes - counts[2])
    chosen = [
        (rank >= first[owner]) & (rank < (first + count)[owner]) for first, count in zip(starts, counts, strict=True)
    ]
    return [(rows[shuffled][mask], offsets_of(count)) for mask, count in zip(chosen, counts, strict=True)]


def _part_sizes(sizes: Tensor, validation: float, test: float, gap: int) -> list[Tensor]:
    """Return how many samples of each client are for training, validation and test, ``[T]`` each.

    The shares are of what the gaps leave. Gaps take half of a client's samples at most: one with too few for that has
    no validation part, one with fewer still no test part either.
    """
    found = [sizes, torch.zeros_like(sizes), torch.zeros_like(sizes)]
    for shares in ((validation, 0.0), (0.0, test), (validation, test)):  # what fits last holds
        left = (sizes - gap * sum(share > 0 for share in shares)).clamp(min=0)
        num_test = torch.minimum((shares[1] * left.double()).round().long(), (left - 1).clamp(min=0))
        rest = (left - 1 - num_test).clamp(min=0)
        num_validation = torch.minimum((shares[0] * left.double()).round().long(), rest)
        fits = ((num_validation > 0) == (shares[0] > 0)) & ((num_test > 0) == (shares[1] > 0)) & (2 * left >= sizes)
        made = (left - num_validation - num_test, num_validation, num_test)
        found = [torch.where(fits, new, old) for new, old in zip(made, found, strict=True)]
    return found


def thinned(samples: Samples, keys: Tensor, share: float, seed: int) -> Samples:
    """Keep a ``share`` of each client's samples, by ``seed`` and ``keys`` ``[T]``: part of what a larger one keeps."""
    order, owner, rank = _shuffled(keys, samples.offsets, None, seed)
    counts = (share * samples.sizes.double()).round().long()  # may be none
    kept = order[rank < counts[owner]].sort().values.to(samples.pool.device)
    rows = kept if samples.rows is None else samples.rows.index_select(0, kept)
    return Samples(samples.pool, offsets_of(counts), rows)


def _shuffled(
    keys: Tensor, offsets: Tensor, ids: Tensor | None, seed: int, times: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Order samples by client, ``times``, and random words of ``ids`` or ranks; returns it, clients, ranks ``[N]``."""
    owner = torch.repeat_interleave(torch.arange(len(keys)), offsets.diff())
    rank = torch.arange(len(owner)) - offsets[:-1][owner]
    words = derive(derive(keys, SPLIT, seed)[owner], rank if ids is None else ids)
    columns = [column.numpy() for column in ((words, owner) if times is None else (words, times, owner))]
    # Clients stand one after the other, so some at a time are ordered by themselves, which takes no logarithm of all.
    starts = np.unique(offsets.numpy()[np.searchsorted(offsets.numpy(), np.arange(0, len(owner), _SORTED_ROWS))])
    ends = [*starts[1:].tolist(), len(owner)]
    orders = [
        first + np.lexsort([column[first:last] for column in columns])
        for first, last in zip(starts.tolist(), ends, strict=True)
    ]
    return torch.from_numpy(np.concatenate(orders) if orders else np.empty(0, np.int64)), owner, rank
