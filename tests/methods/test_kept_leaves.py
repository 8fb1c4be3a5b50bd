"""Leaves that are not trained, batches that can't be taken, solvers that don't fit: what methods must leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import DIMENSION, make_federation
from torch import Tensor, nn

import fedem
from fedem.core.errors import UserError
from fedem.data.federation import Federation
from fedem.methods import METHODS

every_method = pytest.mark.parametrize("method", METHODS)


class Standardised(nn.Module):
    """A linear model behind a fixed scaling and a frozen layer."""

    mean: Tensor
    scale: Tensor

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.between = nn.Sequential(*between)
        self.features = nn.Linear(DIMENSION, 5)
        self.features.requires_grad_(False)
        self.register_buffer("mean", torch.full((DIMENSION,), 0.5))
        self.register_buffer("scale", torch.full((DIMENSION,), 2.0))
        self.register_buffer("version", torch.tensor(7))
        self.head = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.features((inputs - self.mean) / self.scale)
        out: Tensor = self.head(self.between(hidden))
        return out


@every_method
def test_frozen_parameters_and_fixed_buffers_stay_as_they_were_given(method: str) -> None:
    torch.manual_seed(0)
    given = Standardised(*([nn.Linear(5, 5), nn.BatchNorm1d(5)] if METHODS[method].needs_layers else []))
    result = fedem.train(make_federation(), method, model=given, rounds=2, learning_rate=0.1, loss="logistic")
    for name in ("ann", "dan"):
        components = result.client(name).mixture.components
        for leaf in ("features.weight", "features.bias", "mean", "scale", "version"):
            expected = given.state_dict()[leaf]
            for component in components[leaf]:
                torch.testing.assert_close(component, expected.to(component.dtype), rtol=0, atol=1e-6)
        assert bool((components["head.weight"] != 0).any())


@pytest.mark.slow
@every_method
def test_newcomers_of_any_size_train_where_layers_normalise_over_a_batch(method: str) -> None:
    if method in ("mocha", "local"):
        return  # linear models alone; nobody is welcome
    sizes = (6, 10, 14)
    federation = make_federation(sizes=sizes)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    result = fedem.train(federation, method, model=model, rounds=2, batch_size=4, learning_rate=0.1, loss="logistic")
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 5, 9):
        personal = result.personalize(rng.normal(size=(count, DIMENSION)), np.arange(count) % 2)
        assert bool(torch.isfinite(personal.predict(rng.normal(size=(3, DIMENSION)))).all())


@pytest.mark.parametrize("solver", ["adam", "newton", "lbfgs", "various"])
@pytest.mark.parametrize("method", ["scaffold", "qffl"])
def test_methods_that_read_gradients_off_the_steps_refuse_other_solvers(method: str, solver: str) -> None:
    with pytest.raises(UserError, match="allowed: solver sgd"):
        fedem.train(make_federation(), method, solver=solver, rounds=1)


def test_passes_of_a_newcomer_can_be_chosen_where_everybody_fine_tunes() -> None:
    federation = make_federation()
    result = fedem.train(federation, "fedavg+", rounds=2, learning_rate=0.05)
    one, many = (
        result.personalize(*federation.test.client(3), fine_tune_epochs=count).mixture.components["weight"]
        for count in (1, 20)
    )
    assert not torch.allclose(one, many)
    usual = result.personalize(*federation.test.client(3), unseen_epochs=9)
    assert torch.equal(usual.mixture.components["weight"], one)


def test_updates_of_weights_are_not_passes_over_samples() -> None:
    """With one component there are no weights to fit, so their updates change nothing, and fine-tuning does."""
    federation = make_federation()
    result = fedem.train(federation, "fedem", num_components=1, rounds=2, learning_rate=0.05, fine_tune_epochs=1)
    usual, many_updates, many_passes = (
        result.personalize(*federation.test.client(3), **asked).mixture.components["weight"]
        for asked in ({}, {"max_iterations": 20}, {"fine_tune_epochs": 20})
    )
    assert torch.equal(usual, many_updates)
    assert not torch.allclose(usual, many_passes)


@pytest.mark.parametrize(
    ("method", "asked", "message"),
    [
        (
            "ditto",
            {"max_iterations": 3},
            "max_iterations is 3, but method ditto has no mixture weights; allowed: unseen",
        ),
        ("fedem", {"max_iterations": -1}, "max_iterations is -1; allowed: from 1, or 0"),
        ("ditto", {"unseen_epochs": 0}, "unseen_epochs is 0"),
        ("fedem", {"fine_tune_epochs": -2}, "fine_tune_epochs is -2"),
    ],
)
def test_absurd_numbers_for_a_newcomer_are_refused(method: str, asked: dict[str, int], message: str) -> None:
    federation = make_federation()
    with pytest.raises(UserError, match=message):
        fedem.train(federation, method, rounds=1).personalize(*federation.test.client(3), **asked)


def test_the_other_name_of_ifca_works_from_python() -> None:
    federation: Federation = make_federation()
    results = [fedem.train(federation, name, rounds=2, num_clusters=2) for name in ("ifca", "hypcluster")]
    assert [result.config.name("method") for result in results] == ["ifca", "ifca"]


def test_clients_fitted_after_training_welcome_nobody() -> None:
    federation = make_federation()
    fitted = fedem.train(federation, "ditto", rounds=1).with_unseen(make_federation(seed=4))
    with pytest.raises(UserError, match="from the run that they were fitted from"):
        fitted.personalize(*federation.test.client(3))
