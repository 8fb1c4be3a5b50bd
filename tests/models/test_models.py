from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DIMENSION, advance, distance, make_federation, make_training, stacked
from torch import nn
from torch.func import vmap

import fedem
from fedem.core.errors import UserError
from fedem.core.tree import tree_stack
from fedem.engines import Engine, OneByOne, Stacked, choose_engine
from fedem.models import Linear, Model
from fedem.models.layers import FoldedLinear
from fedem.models.losses import CrossEntropy, Logistic


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSION, 6), nn.Tanh(), nn.Linear(6, 1))


class _FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIMENSION, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(inputs, 0.5, self.training))


class _RunningMean(nn.Module):
    """Keeps a statistic of its batches, without being a known kind of normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIMENSION, 1)
        self.register_buffer("mean", torch.zeros(DIMENSION))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * inputs.detach().mean(0))
        return self.layer(inputs - self.mean)


class _Views(nn.Module):
    """What works with nn.Linear and needs its output laid out as nn.Linear lays it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs.view(-1, 2, 2)).view(len(inputs), -1))


def _engine(model: Model) -> Engine:
    model.probe(make_federation(dtype=np.float32).train.inputs[:2])
    return choose_engine("auto", 0, model, torch.device("cpu"))


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIMENSION))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.scale).sum(-1, keepdim=True)


class _Branching(nn.Module):
    """What vmap can't stack: it branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIMENSION, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) if inputs.sum() > -1e9 else inputs[:, :1]


@pytest.mark.parametrize("bias", [True, False])
def test_a_folded_linear_layer_is_a_linear_layer(bias: bool) -> None:
    plain, folded = nn.Linear(5, 3, bias=bias).double(), FoldedLinear(5, 3, bias=bias).double()
    folded.load_state_dict(plain.state_dict())
    for shape in ((7, 5), (2, 7, 5), (5,)):
        inputs = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        twin = inputs.detach().clone().requires_grad_()
        outputs, expected = folded(inputs), plain(twin)
        torch.testing.assert_close(outputs, expected)
        outputs.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(inputs.grad, twin.grad)
    for mine, theirs in zip(folded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_components_start_different_and_by_the_seed() -> None:
    model = Model(_network, Logistic())
    first, again, other = model.init(1), model.init(1), model.init(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first)


def test_a_module_given_as_such_is_initialised_afresh() -> None:
    module = _network()
    model = Model(module, Logistic())
    assert not torch.equal(model.init(1)["0.weight"], model.init(2)["0.weight"])
    assert not torch.equal(model.init(1)["0.weight"], module[0].weight)


def test_a_module_that_cannot_start_afresh_is_refused_by_the_name_of_its_part() -> None:
    with pytest.raises(UserError, match=r"'1' \(_Scale\).*pass a function"):
        Model(nn.Sequential(nn.Identity(), _Scale()), Logistic())


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Model(_network, Logistic()).init(5)
    assert torch.equal(torch.rand(1), expected)


def test_bytes_are_scaled_and_floats_converted() -> None:
    model = Model(lambda: nn.Linear(2, 1, bias=False), Logistic(), torch.float64)
    parameters = {"weight": torch.ones(1, 2, dtype=torch.float64)}
    assert float(model.outputs(parameters, torch.tensor([[255, 0]], dtype=torch.uint8))) == 1.0
    assert model.outputs(parameters, torch.ones(1, 2)).dtype == torch.float64


def test_a_network_stacks_and_agrees_with_the_loop() -> None:
    model = Model(_network, Logistic(), torch.float64)
    engine = _engine(model)
    assert isinstance(engine, Stacked)
    assert not engine.note
    for method in ("fedem", "fedavg", "local"):
        states = [advance(make_training(method, model=model, engine=e)) for e in (OneByOne(), stacked())]
        assert distance(*states) < 1e-12


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_Branching, "vmap"),
        (_FunctionalDropout, "random"),
        (_RunningMean, "training changes 'mean'"),
    ],
)
def test_what_cannot_be_stacked_runs_one_by_one_with_a_note(build, reason: str) -> None:
    model = Model(build, Logistic())
    engine = _engine(model)
    assert isinstance(engine, OneByOne)
    assert reason in engine.note
    with pytest.raises(UserError, match="use engine one_by_one or auto"):
        choose_engine("stacked", 0, model, torch.device("cpu"))


@pytest.mark.parametrize("build", [_FunctionalDropout, _RunningMean, _Branching])
@pytest.mark.parametrize("method", ["fedem", "fedavg"])
def test_what_cannot_be_stacked_still_trains_and_predicts(method: str, build, tmp_path: Path) -> None:
    federation = make_federation(sizes=(12, 8), dtype=np.float32)
    result = fedem.train(federation, method, model=build, rounds=2, batch_size=4, out=tmp_path / "r")
    assert "one by one" in result.summary["note"]
    inputs = federation.test.inputs
    expected = result.predict("ann", inputs)
    loaded = fedem.Result.load(tmp_path / "r", model=build)
    assert torch.equal(loaded.predict("ann", inputs), expected)


def test_a_linear_layers_output_can_be_viewed() -> None:
    model = Model(_Views, Logistic(), torch.float64)
    assert isinstance(_engine(model), Stacked)
    states = [advance(make_training("fedem", model=model, engine=e)) for e in (OneByOne(), stacked())]
    assert distance(*states) < 1e-12


def test_unknown_kinds_of_batch_norm_refuse_batches_of_one_by_the_clients_name() -> None:
    class Own(nn.BatchNorm1d):
        pass

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(DIMENSION, 6), Own(6), nn.Linear(6, 1))

    with pytest.raises(UserError, match="Client 'bob' would train on a batch of one sample; batching"):
        fedem.train(make_federation(sizes=(8, 9)), model=build, batch_size=4, rounds=1)
    fedem.train(make_federation(sizes=(8, 9)), model=build, batch_size=4, rounds=1, drop_short=True, fine_tune_epochs=1)
    with pytest.raises(UserError, match="Client 'bob' would train on a batch of one sample; another"):
        fedem.train(make_federation(sizes=(8, 1)), model=build, batch_size=4, rounds=1, drop_short=True)


def test_components_that_start_equal_are_refused() -> None:
    module = nn.Linear(DIMENSION, 1)
    with pytest.raises(UserError, match="All components start equal"):
        fedem.train(make_federation(), model=lambda: module, rounds=1)
    assert type(module) is nn.Linear  # the user's own module is left alone


def test_frozen_parts_keep_the_values_they_were_given() -> None:
    module = _network()
    module[0].requires_grad_(False)
    model = Model(module, Logistic())
    assert all(torch.equal(model.init(seed)["0.weight"], module[0].weight) for seed in (1, 2))
    assert not torch.equal(model.init(1)["2.weight"], model.init(2)["2.weight"])


def test_the_memory_of_activations_bounds_what_is_scored_at_once() -> None:
    wide = Model(lambda: nn.Sequential(nn.Linear(DIMENSION, 1000), nn.Tanh(), nn.Linear(1000, 1)), Logistic())
    wide.probe(make_federation(dtype=np.float32).train.inputs[:2])
    assert wide.bytes_per_sample == 4 * (1000 + 1000 + 1 + 2 * 1000)
    training = make_training("fedem", make_federation(dtype=np.float32), model=wide, engine=stacked(max_bytes=30_000))
    reference = make_training("fedem", make_federation(dtype=np.float32), model=wide, engine=stacked())
    assert distance(advance(training, 1), advance(reference, 1)) < 1e-5


def test_stacked_components_share_one_pass_over_the_inputs() -> None:
    """The folded layer gives the same as separate models, forwards and backwards."""
    model = Model(lambda: Linear().build((DIMENSION,), 3), CrossEntropy(), torch.float64)
    trees = [model.init(m) for m in range(4)]
    inputs, targets = torch.randn(10, DIMENSION, dtype=torch.float64), torch.arange(10) % 3
    stacked = tree_stack(trees)

    def objective(tree: dict[str, torch.Tensor]) -> torch.Tensor:
        return model.losses(tree, inputs, targets).sum()

    together = vmap(torch.func.grad(objective))(stacked)
    for m, tree in enumerate(trees):
        for name, leaf in torch.func.grad(objective)(tree).items():
            torch.testing.assert_close(together[name][m], leaf)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(3, 1), r"can't take inputs of shape \[4\]"),
        (lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), r"puts out shape"),
        (lambda: nn.Linear(4, 2), "puts out 2 numbers"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_training(build, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fedem.train(make_federation(), model=build, rounds=1)
