"""A convolution and its normalisation are one in evaluation mode; fixed statistics and a rectifier always."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedem.core.tree import tree_stack
from fedem.methods.wrappers.label_shares import shifted
from fedem.models import MODELS
from fedem.models.base import Model, leaves_of
from fedem.models.folding import find_folds, join_activations
from fedem.models.layers import training_pass
from fedem.models.losses import CrossEntropy
from fedem.models.normalisation import FixedBatchNorm, normalised_by
from fedem.models.stackable import make_stackable


def _settled(module: nn.Module) -> nn.Module:
    """Give normalisations statistics, scales and shifts as training would leave them."""
    draw = torch.Generator().manual_seed(1)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.1, generator=draw)
            part.running_var.uniform_(0.5, 2, generator=draw)
            if part.affine:
                nn.init.uniform_(part.weight, 0.5, 2, generator=draw)
                nn.init.normal_(part.bias, 0, 0.1, generator=draw)
    return module


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "efficientnet_lite0"])
def test_shipped_networks_put_out_the_same_with_all_folded(name: str) -> None:
    model = Model(lambda: MODELS[name]().build((3, 32, 32), 4), CrossEntropy())
    plain = _settled(model.build()).eval()
    assert len(find_folds(model.evaluation)) == sum(isinstance(part, nn.BatchNorm2d) for part in plain.modules())
    inputs = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    state = {name: leaf.detach() for name, leaf in leaves_of(plain).items()}
    with torch.no_grad():
        torch.testing.assert_close(model.outputs(state, inputs), plain(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "joined"), [("mobilenet_v2", 35), ("efficientnet_lite0", 33), ("resnet18", 1)])
def test_networks_whose_rectifiers_are_joined_are_the_same(name: str, joined: int) -> None:
    """Of ResNet-18 only the stem's rectifier is called once."""
    plain = _settled(normalised_by("fixed", MODELS[name]().build((3, 32, 32), 4)))
    other = join_activations(deepcopy(plain))
    layers = [part for part in other.modules() if isinstance(part, FixedBatchNorm)]
    assert sum(part.bounds[0] == 0 for part in layers) == joined
    inputs, slopes = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)), []
    for network in (plain, other):
        make_stackable(network).train()
        with training_pass(None, torch.zeros((), dtype=torch.int64)):
            slopes.append(torch.autograd.grad(network(inputs).square().sum(), list(network.parameters())))
    torch.testing.assert_close(slopes[0], slopes[1])
    model = Model(lambda: deepcopy(other), CrossEntropy())
    assert len(find_folds(model.evaluation)) == len(layers)
    with torch.no_grad():
        torch.testing.assert_close(model.outputs(leaves_of(other), inputs), plain.eval()(inputs), rtol=1e-4, atol=1e-4)


def test_a_network_with_a_shift_is_folded_as_without() -> None:
    plain = partial(MODELS["efficientnet_lite0"]().build, (3, 32, 32), 4)
    counts = [len(find_folds(Model(build, CrossEntropy()).evaluation)) for build in (plain, shifted(plain, 4))]
    assert counts[0] == counts[1] > 0


class _Own(nn.Module):
    """A convolution with a bias, one that is called twice, and a normalisation of no convolution's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.twice, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, affine=False)
        self.three = nn.BatchNorm2d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(self.first(inputs))
        hidden = self.two(self.twice(self.twice(hidden)))
        return self.three(torch.relu(hidden)).flatten(2).mean(-1)


class _Deciding(_Own):
    """What it does depends on its inputs, so nothing can be said beforehand."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


@pytest.mark.parametrize(("kind", "count"), [(_Own, 1), (_Deciding, 0)])
def test_what_can_not_be_folded_stays(kind: type[nn.Module], count: int) -> None:
    model = Model(kind, CrossEntropy())
    assert len(find_folds(model.evaluation)) == count
    plain = _settled(kind()).eval()
    inputs = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model.outputs({name: leaf.detach() for name, leaf in leaves_of(plain).items()}, inputs)
        torch.testing.assert_close(found, plain(inputs), rtol=1e-5, atol=1e-5)


def test_stacked_models_fold_each_for_itself() -> None:
    model = Model(_Own, CrossEntropy())
    inputs = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    states = [model.init(seed) | {"one.running_mean": torch.full((3,), float(seed))} for seed in range(3)]
    found = vmap(model.outputs, in_dims=(0, None))(tree_stack(states), inputs)
    torch.testing.assert_close(found, torch.stack([model.outputs(state, inputs) for state in states]))


def test_the_memory_of_training_counts_what_is_folded() -> None:
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 3)
    model = Model(nn.Sequential(*layers), CrossEntropy())
    model.probe(torch.rand(4, 1, 5, 5))
    assert model.bytes_per_sample == 4 * (18 + 18 + 3 + 2 * 18)  # flattening puts out what it got
