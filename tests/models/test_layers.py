"""Layers in forms that stack, against torch's own."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DIMENSION, SIZES, advance, distance, make_federation, make_training, stacked
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedem.core.errors import UserError
from fedem.engines import Batching, OneByOne
from fedem.models import Model
from fedem.models.layers import training_pass
from fedem.models.losses import Logistic
from fedem.models.normalisation import MaskedBatchNorm
from fedem.models.stackable import make_stackable

KEY = torch.tensor(11)


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSION, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))


def _drop(layer: nn.Module, inputs: Tensor, key: Tensor = KEY) -> Tensor:
    with training_pass(None, key):
        return make_stackable(layer)(inputs)


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 0.9])
def test_dropout_drops_so_many_and_keeps_the_mean(rate: float) -> None:
    kept = _drop(nn.Dropout(rate), torch.ones(500, 400))
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / (1 - rate))]
    number = int((kept > 0).sum())
    assert stats.binomtest(number, kept.numel(), 1 - rate).pvalue > 1e-4
    # Neither rows nor columns drop together.
    for counts in ((kept > 0).sum(0), (kept > 0).sum(1)):
        expected = (len(kept) * kept.shape[1] / len(counts)) * rate * (1 - rate)
        assert float(counts.double().var()) == pytest.approx(expected, rel=0.3)


def test_dropout_of_channels_drops_whole_ones() -> None:
    kept = _drop(nn.Dropout2d(0.4), torch.ones(200, 50, 2, 3)).flatten(2)
    assert bool(((kept > 0).all(-1) | (kept == 0).all(-1)).all())
    assert stats.binomtest(int((kept[:, :, 0] > 0).sum()), 10_000, 0.6).pvalue > 1e-4


def test_dropout_depends_on_the_key_and_the_place_alone() -> None:
    inputs = torch.ones(6, 7)
    first = _drop(nn.Dropout(0.5), inputs)
    assert torch.equal(first, _drop(nn.Dropout(0.5), inputs))
    assert not torch.equal(first, _drop(nn.Dropout(0.5), inputs, torch.tensor(12)))
    longer = _drop(nn.Dropout(0.5), torch.ones(9, 7))
    assert torch.equal(longer[:6], first)
    keys = torch.tensor([12, 11])
    together = vmap(lambda key: _drop(nn.Dropout(0.5), inputs, key))(keys)
    assert torch.equal(together[1], first)


def test_every_dropout_layer_and_call_draws_its_own() -> None:
    layer = nn.Dropout(0.5)
    both = _drop(nn.Sequential(layer, layer), torch.ones(40, 50))
    assert float((both > 0).float().mean()) == pytest.approx(0.25, abs=0.05)


def test_dropout_of_everything_leaves_nothing() -> None:
    assert not bool(_drop(nn.Dropout(1.0), torch.ones(3, 4)).any())


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2, (1, 0), "same"])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, (3, 5)])
def test_a_convolution_of_one_channel_is_torchs(kernel: Any, padding: Any, stride: int) -> None:
    if padding == "same" and (stride > 1 or kernel in (2, 4)):
        pytest.skip("torch refuses it, or warns of it")
    plain = nn.Conv2d(1, 3, kernel, stride, padding).double()
    form = make_stackable(deepcopy(plain)).train()
    for height, width in ((7, 8), (6, 5)):
        inputs = torch.randn(2, 1, height, width, dtype=torch.float64)
        torch.testing.assert_close(form(inputs), plain(inputs))
        torch.testing.assert_close(form.eval()(inputs), plain(inputs))
        form.train()


def test_dropout_is_off_in_the_e_step_and_in_evaluation() -> None:
    model = Model(_normalised, Logistic(), torch.float64)
    inputs, targets = make_federation().train.client(3)
    assert torch.equal(model.losses(model.init(0), inputs, targets), model.losses(model.init(0), inputs, targets))
    trained = [model.training_losses(model.init(0), inputs, targets, None, torch.tensor(key))[0] for key in (0, 0, 1)]
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (2, 3, 4, 5), (1, 3, 2, 2)])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
def test_masked_batch_norm_is_batch_norm_without_the_padding(
    shape: tuple[int, ...], momentum: float | None, affine: bool, padding: int
) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    generator = torch.Generator().manual_seed(0)
    layers = [kind(3, momentum=momentum, affine=affine).double() for _ in range(2)]
    make_stackable(layers[1])
    assert type(layers[1]) is MaskedBatchNorm
    for _ in range(3):
        inputs = torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        twin = inputs.detach().clone().requires_grad_()
        padded = torch.cat([twin, 100 * torch.ones(padding, *shape[1:], dtype=torch.float64)])
        mask = torch.arange(len(padded)) < shape[0] if padding else None
        with training_pass(mask, KEY):
            outputs = layers[1](padded)[: shape[0]]
        expected = layers[0](inputs)
        torch.testing.assert_close(outputs, expected)
        (outputs**3).sum().backward()
        (expected**3).sum().backward()
        torch.testing.assert_close(twin.grad, inputs.grad)
    for mine, theirs in zip(layers[1].state_dict().values(), layers[0].state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    for layer in layers:
        layer.eval()
    torch.testing.assert_close(layers[1](inputs), layers[0](inputs))


@pytest.mark.parametrize("padding", [0, 2])
def test_a_single_number_is_normalised_by_the_running_statistics(padding: int) -> None:
    layer = make_stackable(nn.BatchNorm1d(2)).train()
    layer.running_mean.copy_(torch.tensor([1.0, 2.0]))
    layer.running_var.copy_(torch.tensor([4.0, 9.0]))
    rows = torch.tensor([[3.0, 5.0]]).repeat(1 + padding, 1)
    with training_pass(torch.arange(len(rows)) < 1 if padding else None, KEY):
        outputs = layer(rows)
    torch.testing.assert_close(outputs[0], torch.tensor([1.0, 1.0]), rtol=0, atol=1e-5)
    assert layer.running_mean.tolist() == [1.0, 2.0]
    assert layer.running_var.tolist() == [4.0, 9.0]
    assert int(layer.num_batches_tracked) == 0


def test_batch_norm_without_running_statistics_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'1' \(BatchNorm1d\) keeps no running statistics"):
        Model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)), Logistic())


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        *((method, SIZES) for method in ("fedem", "fedavg", "local", "ditto", "pfedme", "apfl", "perfedavg", "ifca")),
        *((method, (1, 2, 4)) for method in ("fedem", "local", "ditto", "perfedavg")),
    ],
)
def test_loop_equals_stacked_with_batch_norm_and_dropout(method: str, sizes: tuple[int, ...]) -> None:
    model = Model(_normalised, Logistic(), torch.float64)
    federation = make_federation(sizes=sizes)
    model.probe(federation.train.inputs[:5])
    assert model.not_stackable is None
    states = [
        advance(make_training(method, federation, model=model, engine=engine), 2)
        for engine in (OneByOne(), stacked(3), stacked())
    ]
    assert distance(states[0], states[1]) < 1e-9
    assert distance(states[0], states[2]) < 1e-9


def test_batch_norm_carries_its_statistics_and_evaluation_uses_them() -> None:
    federation = make_federation(sizes=(12, 9, 30))
    model = Model(_normalised, Logistic(), torch.float64)
    training = make_training("fedem", federation, model=model, batching=Batching(0))
    start, state = training.init(), advance(training)
    assert not torch.equal(start.shared["1.running_mean"], state.shared["1.running_mean"])
    assert state.shared["1.num_batches_tracked"].tolist() == [[3, 3, 3]]  # counted, not averaged
    assert distance(state, advance(training)) == 0  # dropout draws by client and round, not from a global state
    component = {name: leaf[0, 1] for name, leaf in state.shared.items()}
    module = _normalised().double().eval()
    inputs = federation.test.inputs
    torch.testing.assert_close(model.outputs(component, inputs), functional_call(module, component, (inputs,)))


def test_running_statistics_are_averaged_by_samples() -> None:
    """One pass over whole batches: the shared mean is the pool's own mean of what the layer saw."""
    federation = make_federation(sizes=(12, 9, 30))
    model = Model(lambda: nn.Sequential(nn.BatchNorm1d(DIMENSION, momentum=1.0), nn.Linear(DIMENSION, 1)), Logistic())
    training = make_training("fedavg", federation, model=model, batching=Batching(0))
    state = advance(training, 1)
    torch.testing.assert_close(state.shared["0.running_mean"][0], federation.train.inputs.float().mean(0))
    assert math.isfinite(float(state.shared["0.running_var"].sum()))


def test_a_model_of_unknown_randomness_is_found_out() -> None:
    class Merged(nn.Module):
        """Lays time before samples, so that a sample's place depends on how many there are."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(2, 1), nn.Dropout(0.5)

        def forward(self, inputs: Tensor) -> Tensor:
            steps = inputs.reshape(-1, 2, 2).transpose(0, 1).reshape(-1, 2)
            return self.drop(self.layer(steps)).reshape(2, -1).T[:, 1:]

    model = Model(Merged, Logistic())
    model.probe(torch.from_numpy(np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)))
    assert "padding" in model.not_stackable
