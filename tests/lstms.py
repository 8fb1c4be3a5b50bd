"""Small LSTMs that several test files use: torch's own and ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedem.models.recurrence import StackableLSTM

TIMES, SAMPLES, INPUTS, HIDDEN = 5, 4, 3, 2
Tree = dict[str, Tensor]


def make_pair(**settings: Any) -> tuple[nn.LSTM, nn.LSTM]:
    """torch's own and ours, of the same parameters."""
    torch.manual_seed(0)
    modules = [nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64, **settings) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    modules[1].__class__ = StackableLSTM
    return modules[0], modules[1]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw_parameters(module: nn.Module, *stack: int) -> Tree:
    return {name: draw(*stack, *leaf.shape) for name, leaf in module.state_dict().items()}


def everything(output: Any) -> Tensor:
    """A number that depends on all that an LSTM returns, in no symmetric way."""
    outputs, (hidden, cell) = output
    return sum((part.sin() * torch.arange(part.numel()).view(part.shape)).sum() for part in (outputs, hidden, cell))


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
