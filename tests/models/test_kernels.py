"""Kernels for many models at once, against torch's own, one model after the other.

Where there is no GPU, Triton's interpreter runs them on the CPU: slow, and the same arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import batch_norm, conv2d, pad

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

from fedem.core.precision import products
from fedem.core.tree import Tree, tree_index, tree_stack  # once Triton is there
from fedem.models import convolutions, kernels, layers
from fedem.models.base import Model
from fedem.models.convolutions import Geometry, Pair, StackableConv2d
from fedem.models.folding import join_activations
from fedem.models.layers import training_pass
from fedem.models.losses import CrossEntropy
from fedem.models.normalisation import normalised_by
from fedem.models.pooling import Side
from fedem.models.stackable import make_stackable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layers, "has_kernels", lambda images: images.dtype != torch.float64)
    with products("float32", torch.device(DEVICE)):
        yield


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


# Models, samples, channels, outputs, pixels; window, stride, padding, whether each channel is by itself, more padding.
CASES = {
    "3x3": (2, 3, 5, 7, (6, 5), Geometry((3, 3), (1, 1), (1, 1), False)),
    "uneven": (2, 2, 4, 9, (7, 8), Geometry((3, 2), (2, 1), (1, 0), False)),
    "more channels than a block": (2, 1, 37, 70, (3, 3), Geometry((3, 3), (1, 1), (1, 1), False)),
    "1x1, stride 2": (3, 2, 20, 6, (5, 5), Geometry((1, 1), (2, 2), (0, 0), False)),
    "1x1": (3, 2, 20, 6, (5, 4), Geometry((1, 1), (1, 1), (0, 0), False)),
    "depthwise, stride 2": (2, 3, 5, 5, (7, 6), Geometry((3, 3), (2, 2), (1, 1), True)),
    "depthwise 5x5": (2, 2, 6, 6, (6, 6), Geometry((5, 5), (1, 1), (2, 2), True)),
    "depthwise, nine beside": (2, 2, 5, 5, (4, 9), Geometry((3, 3), (1, 1), (1, 1), True)),
    "depthwise, three strips of 19": (1, 2, 33, 33, (3, 19), Geometry((3, 3), (1, 1), (1, 1), True)),
    "depthwise 5x5, stride 2, three strips of 34": (2, 1, 3, 3, (5, 34), Geometry((5, 5), (2, 2), (2, 2), True)),
    "depthwise, stride 3 and 2": (2, 2, 3, 3, (8, 11), Geometry((2, 4), (3, 2), (1, 2), True)),
    "depthwise, padded by more than its window": (2, 2, 3, 3, (3, 2), Geometry((1, 2), (1, 1), (1, 3), True)),
    "one model": (1, 2, 3, 4, (9, 9), Geometry((7, 7), (2, 2), (3, 3), False)),
    "one model, more below": (1, 2, 3, 4, (8, 7), Geometry((3, 3), (2, 2), (0, 1), False, (1, 0))),
    "more below and right": (2, 2, 5, 3, (8, 6), Geometry((3, 3), (2, 2), (0, 0), False, (1, 1))),
    "depthwise 5x5, more on the right": (2, 2, 6, 6, (7, 8), Geometry((5, 5), (2, 2), (2, 1), True, (0, 1))),
}


@pytest.mark.parametrize("busy", [1, kernels._BUSY])  # a program passes over all lines of an image, or over one
@pytest.mark.parametrize("case", CASES)
def test_a_convolution_and_its_gradients_are_those_of_each_model_alone(
    case: str, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BUSY", busy)
    models, samples, channels, outputs, size, geometry = CASES[case]
    inputs = _draw(models, samples, channels, *size).requires_grad_()
    weight = _draw(models, outputs, 1 if geometry.depthwise else channels, *geometry.window).requires_grad_()
    how = (None, geometry.stride, geometry.padding, 1, channels if geometry.depthwise else 1)
    below, right = geometry.more
    padded = pad(inputs, (0, right, 0, below))
    expected = torch.stack([conv2d(own, each, *how) for own, each in zip(padded, weight, strict=True)])
    found = convolutions._Convolution.apply(inputs, weight, geometry)
    torch.testing.assert_close(found, expected, **CLOSE)
    outer = _draw(*expected.shape, seed=1)
    ours, theirs = (torch.autograd.grad(each, (inputs, weight), outer) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, **CLOSE)


def _sides(down: tuple[int, int], across: tuple[int, int]) -> st.SearchStrategy[Pair]:
    return st.tuples(st.integers(*down), st.integers(*across))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    window=_sides((1, 3), (1, 6)),
    stride=_sides((1, 3), (1, 10)),
    padding=_sides((0, 2), (0, 7)),
    size=_sides((1, 4), (1, 18)),
    sides=st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([1, 3, 17])),
    busy=st.sampled_from([1, 8]),
    longest=st.sampled_from([1, 16]),
)
def test_each_channel_by_itself_in_any_geometry(
    window: Pair, stride: Pair, padding: Pair, size: Pair, sides: tuple[int, int, int], busy: int, longest: int
) -> None:
    assume(all(side + 2 * pad >= wide for side, pad, wide in zip(size, padding, window, strict=True)))
    models, samples, channels = sides
    inputs = _draw(models, samples, channels, *size).requires_grad_()
    weight = _draw(models, channels, 1, *window).requires_grad_()
    how = (None, stride, padding, 1, channels)
    expected = torch.stack([conv2d(own, each, *how) for own, each in zip(inputs, weight, strict=True)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_BUSY", busy)
        patch.setattr(kernels, "_LONGEST", longest)
        found = convolutions._Convolution.apply(inputs, weight, Geometry(window, stride, padding, True))
        torch.testing.assert_close(found, expected, **CLOSE)
        outer = _draw(*expected.shape, seed=1)
        ours = torch.autograd.grad(found, (inputs, weight), outer)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, (inputs, weight), outer), **CLOSE)


@pytest.mark.parametrize("case", ["3x3", "uneven", "depthwise, stride 2"])
def test_a_gradient_that_is_added_up_in_parts_is_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models, samples, channels, outputs, size, geometry = CASES[case]
    inputs, slopes = _draw(models, samples, *size, channels), _draw(models, samples, *geometry.shrink(size), outputs)
    whole = kernels.weight_gradient(inputs, slopes, geometry)
    monkeypatch.setattr(kernels, "_LONGEST", 1)
    monkeypatch.setattr(kernels, "_tile", lambda *_: (8, 4))
    monkeypatch.setattr(kernels, "_blocks", lambda *_: {"ROWS": 16, "COLUMNS": 16, "INNER": 16, "PRECISION": "ieee"})
    assert kernels._in_parts(1, 1, models, 5)[1] == 5
    torch.testing.assert_close(kernels.weight_gradient(inputs, slopes, geometry), whole, **CLOSE)


@pytest.mark.parametrize("groups", [1, 4])
def test_through_vmap_over_clients_and_components(groups: int) -> None:
    """Inputs of 3 clients, weights of 2 components of each; and gradients of second order."""
    layer = StackableConv2d(4, 4, 3, padding=1, groups=groups).to(DEVICE)
    plain = nn.Conv2d(4, 4, 3, padding=1, groups=groups).to(DEVICE)
    weight, bias = _draw(3, 2, *layer.weight.shape), _draw(3, 2, 4)
    inputs = _draw(3, 2, 4, 5, 5)

    def loss(module: nn.Module, weight: Tensor, bias: Tensor, inputs: Tensor) -> Tensor:
        return functional_call(module, {"weight": weight, "bias": bias}, (inputs,)).square().mean()

    def slope(module: nn.Module, weight: Tensor, bias: Tensor, inputs: Tensor) -> Tensor:
        return grad(loss, argnums=1)(module, weight, bias, inputs).square().sum()

    for function in (loss, slope):
        of_both = vmap(vmap(grad(function, argnums=(1, 2, 3)), (None, 0, 0, None)), (None, 0, 0, 0))
        found = of_both(layer, weight, bias, inputs)
        expected = [
            [grad(function, argnums=(1, 2, 3))(plain, *own, inputs[client]) for own in zip(*each, strict=True)]
            for client, each in enumerate(zip(weight, bias, strict=True))
        ]
        for place, leaf in enumerate(found):
            stacked = torch.stack([torch.stack([own[place] for own in client]) for client in expected])
            torch.testing.assert_close(leaf, stacked, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize(("window", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (5, 1, 2), (7, 2, 3), (4, 2, 1)])
def test_windows_wider_than_images_are_cropped_to_what_they_see(
    size: Pair, window: int, stride: int, padding: int
) -> None:
    if min(size) + 2 * padding < window:
        pytest.skip("such a window fits nowhere")
    plain = nn.Conv2d(3, 4, window, stride, padding).to(DEVICE)
    layer = make_stackable(nn.Conv2d(3, 4, window, stride, padding)).to(DEVICE)
    state, inputs = {"weight": _draw(2, *plain.weight.shape), "bias": _draw(2, 4)}, _draw(2, 3, 3, *size)

    def loss(module: nn.Module, state: Tree, inputs: Tensor) -> Tensor:
        return functional_call(module, state, (inputs,)).square().sum()

    found = vmap(grad(loss, argnums=(1, 2)), (None, 0, 0))(layer, state, inputs)
    for model in range(2):
        own = grad(loss, argnums=(1, 2))(plain, {name: leaf[model] for name, leaf in state.items()}, inputs[model])
        torch.testing.assert_close((tree_index(found[0], model), found[1][model]), own, **CLOSE)


@pytest.mark.parametrize(("window", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 0), ((2, 3), (1, 2), (1, 0))])
def test_pooling_and_its_derivatives_are_torchs(window: Side, stride: Side, padding: Side) -> None:
    layer = make_stackable(nn.MaxPool2d(window, stride, padding))
    inputs = _draw(2, 3, 5, 7, 8)
    inputs[0, 0, 0] = 1  # equals: the first one counts
    inputs[1, 1, 1, 3, 3] = float("nan")

    def value(layer: nn.Module, images: Tensor) -> Tensor:
        return layer(images).nan_to_num().square().sum()

    def slope(layer: nn.Module, images: Tensor) -> Tensor:
        return grad(value, argnums=1)(layer, images).pow(3).sum()

    plain = nn.MaxPool2d(window, stride, padding)
    torch.testing.assert_close(vmap(layer)(inputs), torch.stack([plain(own) for own in inputs]), equal_nan=True)
    for function in (value, slope):
        found = vmap(grad(function, argnums=1), (None, 0))(layer, inputs)
        expected = torch.stack([grad(function, argnums=1)(plain, own) for own in inputs])
        torch.testing.assert_close(found, expected, **CLOSE, equal_nan=True)


@pytest.mark.parametrize("window", [(16, 8), (12, 11), [12, 11]])  # 128 places and more
def test_pooling_by_wide_windows_is_torchs(window: Any) -> None:
    inputs = _draw(2, 1, 2, 17, 13)
    pooled = vmap(make_stackable(nn.MaxPool2d(window, 1)))(inputs)
    assert torch.equal(pooled, torch.stack([nn.MaxPool2d(window, 1)(own) for own in inputs]))


@pytest.mark.parametrize("masked", [False, True])
def test_moments_of_counted_rows(masked: bool) -> None:
    rows = 3 * _draw(2, 137, 5) + 1000
    counted = (_draw(2, 137) > 0) if masked else None
    mean, variance = kernels.moments(rows, counted)
    for model in range(2):
        own = rows[model].double() if counted is None else rows[model][counted[model]].double()
        torch.testing.assert_close(mean[model].double(), own.mean(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(variance[model].double(), own.var(0, correction=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_a_normalisation_is_torchs_over_the_rows_that_count(padded: bool, affine: bool) -> None:
    layer = make_stackable(nn.BatchNorm2d(3, affine=affine)).to(DEVICE).train()
    models, samples, real = 4, 5, 3 if padded else 5
    inputs, mask = 2 * _draw(models, samples, 3, 2, 2) + 3, torch.arange(samples, device=DEVICE) < real
    state = {name: leaf.expand(models, *leaf.shape).clone() for name, leaf in layer.state_dict().items()}
    if affine:
        state |= {"weight": _draw(models, 3), "bias": _draw(models, 3, seed=1)}
    outer = _draw(models, samples, 3, 2, 2, seed=2) * mask[:, None, None, None]

    def loss(
        leaves: dict[str, Tensor], inputs: Tensor, outer: Tensor
    ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        own = dict(leaves)
        with training_pass(mask if padded else None, torch.zeros((), dtype=torch.int64)):
            outputs = functional_call(layer, own, (inputs,))
        return (outputs * outer).sum(), (outputs, {name: own[name] for name in ("running_mean", "running_var")})

    trained = {name: leaf for name, leaf in state.items() if name in ("weight", "bias")}
    kept = {name: leaf for name, leaf in state.items() if name not in trained}

    def both(trained: dict[str, Tensor], kept: dict[str, Tensor], inputs: Tensor, outer: Tensor) -> object:
        def own_loss(own: dict[str, Tensor], inputs: Tensor) -> object:  # buffers change, so they are copies
            return loss(own | {name: leaf.clone() for name, leaf in kept.items()}, inputs, outer)

        return grad(own_loss, argnums=(0, 1), has_aux=True)(trained, inputs)

    (ours_trained, ours_inputs), (outputs, after) = vmap(both)(trained, kept, inputs, outer)
    for model in range(models):
        own = {name: leaf[model].clone().requires_grad_() for name, leaf in trained.items()}
        running = [kept[name][model].clone() for name in ("running_mean", "running_var")]
        rows = inputs[model, :real].clone().requires_grad_()
        expected = batch_norm(rows, *running, own.get("weight"), own.get("bias"), True, 0.1)
        torch.testing.assert_close(outputs[model, :real], expected, **CLOSE)
        gradients = torch.autograd.grad((expected * outer[model, :real]).sum(), [rows, *own.values()])
        torch.testing.assert_close(ours_inputs[model, :real], gradients[0], **CLOSE)
        for name, gradient in zip(own, gradients[1:], strict=True):
            torch.testing.assert_close(ours_trained[name][model], gradient, **CLOSE)
        for name, leaf in zip(("running_mean", "running_var"), running, strict=True):
            torch.testing.assert_close(after[name][model], leaf, **CLOSE)


# What is put out lies around 3 and spreads as far; 50 samples are more rows than a program passes over.
@pytest.mark.parametrize("samples", [5, 50])
@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU(), nn.ReLU6()])
def test_a_normalisation_by_fixed_statistics_is_torchs_in_evaluation(
    activation: nn.Module, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_tile", lambda rows, columns: (8, 2))
    network = normalised_by("fixed", nn.Sequential(nn.BatchNorm2d(3), activation))
    layer = make_stackable(join_activations(network)).to(DEVICE).train()
    models, inputs, outer = 4, 2 * _draw(4, samples, 3, 2, 2) + 3, _draw(4, samples, 3, 2, 2, seed=2)
    statistics = {"0.running_mean": _draw(models, 3, seed=3), "0.running_var": _draw(models, 3, seed=4).exp()}
    trained = {"0.weight": _draw(models, 3), "0.bias": _draw(models, 3, seed=1)}

    def loss(own: Tree, inputs: Tensor, kept: Tree, outer: Tensor) -> tuple[Tensor, Tensor]:
        with training_pass(None, torch.zeros((), dtype=torch.int64)):
            outputs = functional_call(layer, dict(own | kept), (inputs,))
        return (outputs * outer).sum(), outputs

    of_each = vmap(grad(loss, argnums=(0, 1), has_aux=True))
    (ours_trained, ours_inputs), outputs = of_each(trained, inputs, statistics, outer)
    for model in range(models):
        leaves = [leaf[model].clone().requires_grad_() for leaf in (inputs, *trained.values())]
        running = [leaf[model] for leaf in statistics.values()]
        expected = activation(batch_norm(leaves[0], *running, *leaves[1:], training=False))
        torch.testing.assert_close(outputs[model], expected, **CLOSE)
        slopes = torch.autograd.grad((expected * outer[model]).sum(), leaves)
        for ours, slope in zip((ours_inputs, *ours_trained.values()), slopes, strict=True):
            torch.testing.assert_close(ours[model], slope, **CLOSE)


def _network() -> nn.Module:
    """All kinds of convolutions, normalised, with a join; and a linear head."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6(),
        nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(),
        nn.Conv2d(6, 6, 3, 2, 1, groups=6, bias=False), nn.BatchNorm2d(6), nn.ReLU6(),
        nn.Conv2d(6, 5, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


# Triton's interpreter takes the bits of bfloat16 for whole numbers when it multiplies matrices.
_ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.mark.parametrize("precision", ["tf32", pytest.param("bfloat16", marks=_ON_GPU)])
def test_a_network_trains_stacked_as_it_does_without_kernels(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and statistics of 2 clients with 2 components, some rows of the second client being padding."""
    model = Model(_network, CrossEntropy(), precision=precision)
    components = tree_stack([tree_stack([model.init(2 * client + m) for m in range(2)]) for client in range(2)])
    components = {name: leaf.to(DEVICE) for name, leaf in components.items()}
    inputs, targets = _draw(2, 4, 3, 8, 8), torch.tensor([[0, 1, 2, 0], [2, 1, 0, 0]], device=DEVICE)
    mask = torch.tensor([[True] * 4, [True, True, False, False]], device=DEVICE)
    key = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def step(state: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> object:
        def loss(trained: Tree) -> tuple[Tensor, Tree]:
            losses, buffers = model.training_losses(state | trained, inputs, targets, mask, key)
            return (losses * mask).sum(), buffers

        return grad(loss, has_aux=True)({name: state[name] for name in model.trainable})

    both = vmap(vmap(step, (0, None, None, None)), (0, 0, 0, 0))
    ours = both(components, inputs, targets, mask)
    monkeypatch.setattr(layers, "has_kernels", lambda images: False)
    theirs = both(components, inputs, targets, mask)
    close = CLOSE if precision == "tf32" else {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(ours, theirs, **close)


class _Unfollowed(nn.Module):
    """A network that looks at shapes: what it does can't be followed, so none of its normalisations is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.normalisation = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs if inputs.shape[-1] > 1 else inputs.flip(0)
        return torch.relu(self.normalisation(self.convolution(images))).mean((2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["batch", "fixed"])
def test_stacked_networks_that_are_not_folded_are_scored_as_each_alone(kind: str, dtype: torch.dtype) -> None:
    model = Model(lambda: normalised_by(kind, _Unfollowed()), CrossEntropy(), dtype)
    drawn = {"normalisation.running_mean": _draw(3, 4), "normalisation.running_var": _draw(3, 4).square() + 0.5}
    states = [
        {name: leaf.to(DEVICE) for name, leaf in model.init(seed).items()}
        | {name: rows[seed].to(dtype) for name, rows in drawn.items()}
        for seed in range(3)
    ]
    inputs = _draw(3, 5, 2, 6, 6).to(dtype)
    found = vmap(model.outputs)(tree_stack(states), inputs)
    alone = [_Unfollowed().to(DEVICE, dtype).eval() for _ in states]
    expected = [functional_call(network, *given) for network, *given in zip(alone, states, inputs, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), **CLOSE)


@pytest.mark.parametrize("kind", ["batch", "fixed"])
def test_networks_are_scored_by_kernels_as_they_are_folded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda: join_activations(normalised_by(kind, _network())), CrossEntropy())
    states = tree_stack([{name: leaf.to(DEVICE) for name, leaf in model.init(seed).items()} for seed in range(3)])
    for name, leaf in states.items():
        if "running" in name:
            leaf.copy_(_draw(*leaf.shape) / 4 if name.endswith("mean") else _draw(*leaf.shape).square() + 0.5)
    inputs = _draw(5, 3, 8, 8)
    found = vmap(model.outputs_and_features, in_dims=(0, None))(states, inputs)
    monkeypatch.setattr(layers, "has_kernels", lambda images: False)
    expected = vmap(model.outputs_and_features, in_dims=(0, None))(states, inputs)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(("size", "samples", "programs"), [(5, 3, 1), (40, 18, 1), (40, 18, kernels._ALL)])
def test_an_lstm_runs_and_learns_as_it_does_without_kernels(
    size: int, samples: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_ALL", programs)  # which choose between large tiles and small ones
    layer = make_stackable(nn.LSTM(4, size, num_layers=2, batch_first=True)).to(DEVICE)
    state = tree_stack(
        [{name: _draw(*leaf.shape, seed=model) / 3 for name, leaf in layer.named_parameters()} for model in range(2)]
    )
    inputs, outer = _draw(2, samples, 6, 4), _draw(2, samples, 6, size, seed=1)

    def loss(state: Tree, inputs: Tensor, outer: Tensor) -> Tensor:
        outputs, (hidden, cell) = functional_call(layer, state, (inputs,))
        return (outputs * outer).sum() + hidden.square().sum() + cell.square().sum()

    both = vmap(grad(loss, argnums=(0, 1)))
    ours = both(state, inputs, outer)
    monkeypatch.setattr(layers, "has_kernels", lambda images: False)
    torch.testing.assert_close(ours, both(state, inputs, outer), rtol=1e-3, atol=1e-4)
