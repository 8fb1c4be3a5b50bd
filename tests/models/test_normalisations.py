"""What a network's batch normalisations may be replaced by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedem
from fedem.core.errors import UserError
from fedem.models import MODELS, Model
from fedem.models.losses import CrossEntropy
from fedem.models.normalisation import FixedBatchNorm, normalised_by

DEEP = ("mobilenet_v2", "resnet18")
KEY = torch.tensor(0)


def _images(count: int = 5) -> Tensor:
    return torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A file of a network that has seen some batches, so its statistics are not those that it starts with."""
    network = MODELS["resnet18"]().build((3, 8, 8), 4)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        network(torch.rand(8, 3, 8, 8, generator=generator))
    path = tmp_path / "weights.safetensors"
    save_file(network.state_dict(), path)
    return str(path)


def _fixed(weights: str) -> Model:
    def build() -> nn.Module:
        return MODELS["resnet18"](weights=weights, normalisation="fixed").build((3, 8, 8), 4)

    return Model(build, CrossEntropy(), torch.float64)


@pytest.mark.parametrize("name", DEEP)
def test_groups_of_channels_are_normalised_sample_by_sample(name: str) -> None:
    settings = {"normalisation": "group", "dropout": 0.0}
    model = Model(lambda: MODELS[name](**settings).build((3, 8, 8), 4), CrossEntropy(), torch.float64)
    tree, images = model.init(0), _images()
    model.probe(images)
    assert model.not_stackable is None
    assert not model.normalising  # nothing that clients would have to agree on
    trained, _ = model.training_outputs(tree, images, None, KEY)
    torch.testing.assert_close(trained[:1], model.training_outputs(tree, images[:1], None, KEY)[0])
    torch.testing.assert_close(trained, model.outputs(tree, images))


def test_a_group_has_mean_zero_and_deviation_one() -> None:
    layer = normalised_by("group", nn.Sequential(nn.BatchNorm2d(24, eps=1e-9)))  # four groups of six channels
    inputs = torch.rand(2, 24, 5, 5, dtype=torch.float64)
    groups = inputs.numpy().reshape(2, 4, -1)
    expected = (groups - groups.mean(2, keepdims=True)) / groups.std(2, keepdims=True)
    np.testing.assert_allclose(layer.double()(inputs).detach().numpy().reshape(2, 4, -1), expected, rtol=1e-6)


def test_fixed_statistics_stay_as_the_file_has_them_and_count_in_training(weights: str) -> None:
    model, images = _fixed(weights), _images()
    tree = model.init(0)
    trained, buffers = model.training_outputs(tree, images, None, KEY)
    torch.testing.assert_close(trained, model.outputs(tree, images))
    assert all(leaf.data_ptr() == tree[name].data_ptr() for name, leaf in buffers.items()), "nothing is copied"
    again = _fixed(weights).init(0)
    assert all(torch.equal(leaf, again[name]) for name, leaf in buffers.items())
    assert buffers["bn1.running_mean"].abs().min() > 0  # the file's, not those of a new network
    model.probe(images)
    assert model.not_stackable is None


def test_fixed_statistics_give_the_gradients_of_a_network_in_evaluation_mode(weights: str) -> None:
    model, images = _fixed(weights), _images()
    tree = model.init(0)

    def total(trained: dict[str, Tensor]) -> Tensor:
        return model.training_outputs(tree | trained, images, None, KEY)[0].square().sum()

    ours = torch.func.grad(total)({name: tree[name] for name in model.trainable})
    plain = MODELS["resnet18"]().build((3, 8, 8), 4).double().eval()
    plain.load_state_dict(tree)
    plain(images.double() / 255).square().sum().backward()
    for name, leaf in plain.named_parameters():
        torch.testing.assert_close(ours[name], leaf.grad, rtol=1e-5, atol=1e-8)


def test_clients_with_fixed_statistics_train_and_never_change_them(weights: str) -> None:
    images = _images(24)
    federation = fedem.Federation.from_arrays(images, torch.arange(24) % 4, torch.arange(24) % 3)
    result = fedem.train(federation, "fedavg", rounds=1, model="resnet18", weights=weights, normalisation="fixed")
    shared, start = result.state().shared, _fixed(weights).init(0)
    statistics = [name for name in start if "running" in name]
    assert len(statistics) == 40
    for name in statistics:
        torch.testing.assert_close(shared[name][0], start[name].float())
    assert not torch.equal(shared["conv1.weight"][0], start["conv1.weight"].float())


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_running_statistics_move_by_their_rate(rate: float) -> None:
    spec = MODELS["resnet18"](statistics_rate=rate)
    model, images = Model(lambda: spec.build((3, 8, 8), 4), CrossEntropy(), torch.float64), _images()
    tree = model.init(0)
    _, buffers = model.training_outputs(tree, images, None, KEY)
    network = spec.build((3, 8, 8), 4).double()
    network.load_state_dict(tree)
    with torch.no_grad():
        seen = network.conv1(network.images(images.double() / 255))  # what the first normalisation is shown
    expected = (1 - rate) * tree["bn1.running_mean"] + rate * seen.mean((0, 2, 3))
    torch.testing.assert_close(buffers["bn1.running_mean"], expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"statistics_rate": 0.0}, "statistics_rate"),
        ({"normalisation": "group", "statistics_rate": 0.5}, "no statistics move; allowed: batch"),
        ({"normalisation": "fixed"}, "no weights whose statistics could stay; allowed: batch, group"),
        ({"normalisation": "group", "weights": "x.pth"}, "allowed with weights: batch, fixed"),
        ({"normalisation": "layer"}, "normalisation 'layer'; allowed: batch, fixed, group"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        MODELS["mobilenet_v2"](**settings)


def test_layers_that_are_not_normalisations_are_left_alone() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    kinds = [type(part) for part in normalised_by("fixed", module)]
    assert kinds == [nn.Conv2d, FixedBatchNorm, nn.ReLU]
    assert [type(part) for part in normalised_by("batch", nn.Sequential(nn.BatchNorm2d(8)))] == [nn.BatchNorm2d]
