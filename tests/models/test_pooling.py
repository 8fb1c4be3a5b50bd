"""Max-pooling in a form that stacks, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedem.models.pooling import StackableMaxPool2d
from fedem.models.stackable import make_stackable

SETTINGS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "stride": (1, 2)},
    {"kernel_size": 2, "dilation": 2, "stride": 1},
    {"kernel_size": 2, "ceil_mode": True},
]


def _pair(settings: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    form = make_stackable(nn.MaxPool2d(**settings))
    assert type(form) is StackableMaxPool2d
    return form, nn.MaxPool2d(**settings)


def _gradient(layer: nn.Module) -> Any:
    return grad(lambda inputs: layer(inputs).pow(3).sum())


def _inputs(*shape: int) -> Tensor:
    # Rounded, so that there are ties.
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).round(decimals=1)


@pytest.mark.parametrize("settings", SETTINGS)
def test_values_and_gradients_are_torchs(settings: dict[str, Any]) -> None:
    form, plain = _pair(settings)
    for inputs in (_inputs(3, 2, 7, 9), _inputs(2, 7, 9)):
        assert torch.equal(form(inputs), plain(inputs))
        assert torch.equal(_gradient(form)(inputs), _gradient(plain)(inputs))


@pytest.mark.parametrize("settings", SETTINGS)
def test_stacked_once_and_twice(settings: dict[str, Any]) -> None:
    form, plain = _pair(settings)
    inputs = _inputs(4, 5, 3, 2, 7, 9)
    together = vmap(vmap(_gradient(form)))(inputs)
    for client in range(4):
        for component in range(5):
            alone = _gradient(plain)(inputs[client, component])
            assert torch.equal(together[client, component], alone)
    # However the stacked dimensions lie.
    moved = inputs.permute(2, 0, 1, 3, 4, 5)
    assert torch.equal(vmap(vmap(form, in_dims=1), in_dims=1)(moved), vmap(vmap(plain))(inputs))


def test_a_recording_gives_the_same() -> None:
    form, _ = _pair({"kernel_size": 2})
    function = vmap(vmap(_gradient(form)))
    recording = make_fx(lambda inputs: function(inputs))(_inputs(2, 3, 4, 2, 6, 6))
    other = 1 - _inputs(2, 3, 4, 2, 6, 6)
    assert torch.equal(recording(other), function(other))


@pytest.mark.parametrize("settings", SETTINGS)
def test_second_derivatives_are_torchs(settings: dict[str, Any]) -> None:
    form, plain = _pair(settings)
    inputs = _inputs(3, 2, 2, 7, 9)
    weights = _inputs(2, 2, 7, 9)

    def twice(layer: nn.Module) -> Any:
        return grad(lambda inputs: (weights * _gradient(layer)(inputs)).sum())

    for position in range(3):
        assert torch.equal(twice(form)(inputs[position]), twice(plain)(inputs[position]))
    assert torch.equal(vmap(twice(form))(inputs)[1], twice(plain)(inputs[1]))
