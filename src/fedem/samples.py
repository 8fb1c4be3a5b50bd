"""Samples of several clients as flat arrays with offsets, nothing padded.

Shapes: T clients, N samples of all clients together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedem.errors import UserError


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of several clients, one client after the other.

    Attributes:
        inputs: ``[N, ...]``
        targets: ``[N]`` integers (classes) or floats, or ``[N, D]`` floats.
        offsets: ``[T + 1]`` int64 on the CPU; client ``t`` owns rows ``offsets[t]`` up to ``offsets[t + 1]``.

    """

    inputs: Tensor
    targets: Tensor
    offsets: Tensor

    @property
    def num_clients(self) -> int:
        """T."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> Tensor:
        """Number of samples of each client, ``[T]`` int64."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.targets)

    def client(self, position: int) -> tuple[Tensor, Tensor]:
        """Return one client's inputs and targets, as views."""
        rows = slice(int(self.offsets[position]), int(self.offsets[position + 1]))
        return self.inputs[rows], self.targets[rows]

    def take(self, clients: Tensor) -> Samples:
        """Return the samples of ``clients`` (positions) in that order; only their rows are read."""
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
        rows = torch.from_numpy(np.arange(int(offsets[-1])) + shift).to(self.inputs.device)
        return Samples(self.inputs.index_select(0, rows), self.targets.index_select(0, rows), offsets)

    def to(self, device: torch.device) -> Samples:
        """Move inputs and targets to ``device``; integer inputs stay as small as they are."""
        return Samples(self.inputs.to(device), self.targets.to(device), self.offsets)

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs and targets."""
        return sum(x.numel() * x.element_size() for x in (self.inputs, self.targets))


def offsets_of(sizes: Tensor) -> Tensor:
    """Return where each client's rows start, and where the last one's end. ``[T] -> [T + 1]``."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
