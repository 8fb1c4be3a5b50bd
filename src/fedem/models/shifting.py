"""A network whose outputs are shifted by a client's label shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from fedem.errors import UserError
from fedem.models.building import rebuilder

SHIFT = "label_shift"
"""name of the leaf"""


@final
class Shifted(nn.Module):
    """A network and a buffer ``label_shift`` that is added to its outputs, zero unless a client puts its own there.

    Shapes: n samples, K outputs.
    """

    label_shift: Tensor

    def __init__(self, network: nn.Module, num_outputs: int):
        super().__init__()
        self.network = network
        self.register_buffer(SHIFT, torch.zeros(num_outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, ...] -> [n, K]``."""
        outputs: Tensor = self.network(inputs)
        if outputs.shape[-1:] != self.label_shift.shape:
            raise UserError(
                f"The model puts out {outputs.shape[-1]} numbers a sample; allowed with run.label_shares: "
                f"{len(self.label_shift)}, as the classes that occur need."
            )
        return outputs + self.label_shift


def shifted(source: nn.Module | Callable[[], nn.Module], num_outputs: int) -> Callable[[], nn.Module]:
    """Return a function that builds what ``source`` is or builds, with room for a shift."""
    build = rebuilder(source) if isinstance(source, nn.Module) else source

    def built() -> nn.Module:
        network = build()
        return network if isinstance(network, Shifted) else Shifted(network, num_outputs)

    return built
