"""Samples of several clients: rows of a pool, one client after the other, nothing padded and nothing copied.

Shapes: P samples of the pool, T clients, N samples of all clients together, n of some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedem.errors import UserError


class Pool(NamedTuple):
    """Inputs and targets that samples are rows of. They may be mapped from a file: only what is read costs memory."""

    inputs: Tensor
    """``[P, ...]``"""
    targets: Tensor
    """``[P]`` integers (classes) or floats, or ``[P, D]`` floats"""

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.inputs.device

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs and targets."""
        return sum(array.numel() * array.element_size() for array in self)

    def read(self, rows: Tensor) -> Pool:
        """Read ``rows`` (positions of any shape, on the pool's device)."""
        # index_select is several times faster than indexing on a CPU.
        inputs, targets = (
            array.index_select(0, rows.flatten()).reshape(*rows.shape, *array.shape[1:]) for array in self
        )
        return Pool(inputs, targets)

    def to(self, device: torch.device) -> Pool:
        """Move to ``device``; integers stay as small as they are."""
        return Pool(*(array.to(device) for array in self))


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of several clients, one client after the other.

    Attributes:
        pool: where the samples are.
        offsets: ``[T + 1]`` int64 on the CPU; client ``t`` owns samples ``offsets[t]`` up to ``offsets[t + 1]``.
        rows: ``[N]`` int64 on the pool's device: each sample's row of the pool; None when the samples are the pool, in
            its order.

    """

    pool: Pool
    offsets: Tensor
    rows: Tensor | None = None

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, offsets: Tensor) -> Samples:
        """Make samples of flat arrays that are in order already."""
        return cls(Pool(inputs, targets), offsets)

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
            raise UserError(
                f"Positions run from {int(clients.min())} to {int(clients.max())}; "
                f"allowed: 0 to {self.num_clients - 1}."
            )
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
