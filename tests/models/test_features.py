"""What the last trained layer of a model gets: the features of its samples."""

from __future__ import annotations

import pytest
import torch
from exports import CASES
from torch import Tensor, nn
from torch.nn.functional import linear

from fedem.core.errors import UserError
from fedem.core.tree import tree_stack
from fedem.models import LSTM, MLP, Linear, Model
from fedem.models.base import component_of
from fedem.models.losses import CrossEntropy


def _samples(shape: tuple[int, ...], dtype: torch.dtype, count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(count, *shape, generator=generator, dtype=dtype)
    return torch.randint(0, 10, (count, *shape), generator=generator, dtype=dtype)


@pytest.mark.parametrize("case", CASES)
def test_the_head_maps_features_to_outputs(case: str) -> None:
    """Features are whatever, given to the last layer, makes the outputs; so they are in evaluation mode."""
    _, spec, loss, shape, dtype, outputs = CASES[case]
    model = Model(lambda: spec.build(shape, outputs), loss)
    parameters, inputs = model.init(1), _samples(shape, dtype)
    features = model.features(parameters, inputs)
    assert features.shape[0] == 4
    assert features.ndim == 2
    prefix = f"{model.head_layer}." if model.head_layer else ""
    again = linear(features, parameters[f"{prefix}weight"], parameters[f"{prefix}bias"])
    torch.testing.assert_close(again, model.outputs(parameters, inputs), rtol=1e-4, atol=1e-5)


def test_a_linear_models_features_are_its_inputs_flattened() -> None:
    for shape in ((6,), (2, 3)):
        model = Model(lambda shape=shape: Linear().build(shape, 3), CrossEntropy(), torch.float64)
        inputs = _samples(shape, torch.float64)
        assert torch.equal(model.features(model.init(0), inputs), inputs.flatten(1))
        assert not model.body


def test_bytes_are_features_as_the_model_sees_them() -> None:
    model = Model(lambda: Linear().build((6,), 3), CrossEntropy())
    inputs = _samples((6,), torch.uint8)
    assert torch.equal(model.features(model.init(0), inputs), inputs.float() / 255)


def test_a_text_has_the_last_state_of_the_recurrence() -> None:
    spec = LSTM(vocabulary=11, hidden=6)
    model = Model(lambda: spec.build((5,), 11), CrossEntropy())
    assert model.head_layer == "head"
    assert model.features(model.init(0), _samples((5,), torch.int64)).shape == (4, 6)


def test_features_depend_on_the_body_alone() -> None:
    model = Model(lambda: MLP(hidden=5).build((3,), 3), CrossEntropy())
    assert model.body
    parameters, inputs = model.init(0), _samples((3,), torch.float32)
    before = model.features(parameters, inputs)
    head = model.leaves_called("head")
    other = {name: leaf + 1 if name in head else leaf for name, leaf in parameters.items()}
    assert torch.equal(model.features(other, inputs), before)
    body = {name: leaf if name in head else leaf + 1 for name, leaf in parameters.items()}
    assert not torch.equal(model.features(body, inputs), before)


def test_a_last_normalisation_gets_what_the_convolution_before_it_makes() -> None:
    """To score, the two are folded into one layer; the features are those of the network as it was built."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    model = Model(build, CrossEntropy(), torch.float64)
    assert model.head_layer == "1"
    parameters, inputs = model.init(0), _samples((2, 5, 5), torch.float64)
    parameters["1.running_mean"] += 2
    outputs, features = model.outputs_and_features(parameters, inputs)
    expected = torch.conv2d(inputs, parameters["0.weight"], parameters["0.bias"])
    torch.testing.assert_close(features, expected.flatten(1))
    torch.testing.assert_close(outputs, model.outputs(parameters, inputs))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", ["cnn", "mlp"])
def test_components_seen_together_are_those_seen_alone(case: str, *, shared: bool) -> None:
    _, spec, loss, shape, dtype, outputs = CASES[case]
    model = Model(lambda: spec.build(shape, outputs), loss)
    components, inputs = tree_stack([model.init(seed) for seed in range(3)]), _samples(shape, dtype)
    if shared:
        components = {name: leaf[:1] if name in model.body else leaf for name, leaf in components.items()}
    together = model.component_outputs_and_features(components, inputs)
    for m in range(3):
        alone = model.outputs_and_features(component_of(components, m), inputs)
        for some, own in zip(together, alone, strict=True):
            torch.testing.assert_close(some[m], own, rtol=1e-4, atol=1e-5)


class _Bypassed(nn.Module):
    """Uses its last layer's parameters without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.top = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(self.body(inputs), self.top.weight, self.top.bias)


def test_a_model_that_does_not_call_its_last_layer_is_refused() -> None:
    model = Model(_Bypassed, CrossEntropy())
    with pytest.raises(UserError, match="last trained layer, 'top', gets no tensor for 4 samples"):
        model.features(model.init(0), _samples((3,), torch.float32))
