"""The small networks, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedem.models import CNN, MLP, LeafCNN


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _convolve(images: Tensor, layer: nn.Conv2d) -> Tensor:
    """A convolution as the matrix product that it is."""
    kernel = layer.kernel_size[0]
    padding = layer.padding[0]
    size = [side + 2 * padding - kernel + 1 for side in images.shape[-2:]]
    patches = nn.functional.unfold(images, kernel, padding=padding)
    return (layer.weight.flatten(1) @ patches + layer.bias[:, None]).unflatten(-1, size)


def _pool(images: Tensor) -> Tensor:
    height, width = images.shape[-2] // 2 * 2, images.shape[-1] // 2 * 2
    return images[..., :height, :width].unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).amax((-3, -1))


def _convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d)]


def _dense(module: nn.Module, features: Tensor) -> Tensor:
    first, last = (part for part in module.modules() if isinstance(part, nn.Linear))
    hidden = (features.flatten(1) @ first.weight.T + first.bias).relu()
    return hidden @ last.weight.T + last.bias


def test_the_papers_network_by_hand() -> None:
    module = CNN().build((9, 10), 5).double().eval()
    images = torch.rand(3, 9, 10, dtype=torch.float64)
    first, second = _convolutions(module)
    features = _pool(_convolve(_convolve(images[:, None], first).relu(), second).relu())
    torch.testing.assert_close(module(images), _dense(module, features))
    assert [type(part) for part in module if isinstance(part, nn.Dropout)] == [nn.Dropout] * 2
    assert [part.p for part in module if isinstance(part, nn.Dropout)] == [0.25, 0.5]


@pytest.mark.parametrize("same_padding", [True, False])
def test_leafs_network_by_hand(same_padding: bool) -> None:
    module = LeafCNN(same_padding=same_padding).build((2, 17, 18), 5).double()
    images = torch.rand(3, 2, 17, 18, dtype=torch.float64)
    first, second = _convolutions(module)
    features = _pool(_convolve(_pool(_convolve(images, first).relu()), second).relu())
    assert features.shape == ((3, 64, 4, 4) if same_padding else (3, 64, 1, 1))
    torch.testing.assert_close(module(images), _dense(module, features))


@pytest.mark.parametrize(
    ("spec", "shape", "parameters"),
    [
        # On 28 x 28 and 62 classes: the table of Reddi et al. (2021); LEAF's; the authors' of FedEM.
        (CNN(), (28, 28), 320 + 18_496 + 1_179_776 + 7_998),
        (LeafCNN(), (28, 28), 832 + 51_264 + 64 * 7 * 7 * 2048 + 2048 + 2049 * 62),
        (LeafCNN(same_padding=False), (28, 28), 832 + 51_264 + 64 * 4 * 4 * 2048 + 2048 + 2049 * 62),
        (MLP(), (28, 28), 785 * 200 + 201 * 200 + 201 * 62),
    ],
)
def test_small_networks_have_their_known_sizes(spec, shape: tuple[int, ...], parameters: int) -> None:
    assert sum(leaf.numel() for leaf in spec.build(shape, 62).parameters()) == parameters


def test_a_perceptron_by_hand() -> None:
    module = MLP(hidden=7, layers=3, dropout=0.5).build((2, 3), 4).eval()
    layers = [part for part in module if isinstance(part, nn.Linear)]
    assert [layer.out_features for layer in layers] == [7, 7, 7, 4]
    values = inputs = torch.randn(5, 2, 3)
    values = values.reshape(5, 6)
    for layer in layers[:-1]:
        values = (values @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(module(inputs), values @ layers[-1].weight.T + layers[-1].bias)
