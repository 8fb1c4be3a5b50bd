"""FedEM with a sharpness: its mathematics by limits and orders, its training by FedAvg and by its own objective."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import advance, make_federation, make_training
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

import fedem
from fedem.core.em import log_responsibilities, negative_log_likelihood
from fedem.core.tree import tree_index
from fedem.engines import Batching
from fedem.methods.base import Mixture
from fedem.methods.fedem import FedEM
from fedem.runs.evaluate import predict
from fedem.runs.measures import diagnose
from fedem.runs.rounds import State, Training
from fedem.solvers import SGD, Newton
from fedem.solvers.schedules import Constant

sharpnesses = st.floats(1e-3, 50)


def _draw(seed: int) -> tuple[Tensor, Tensor]:
    """Losses ``[3, 5]`` and log weights ``[3]``."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.gamma(1.0, size=(3, 5))), torch.from_numpy(np.log(rng.dirichlet(np.ones(3) * 3)))


@given(st.integers(0, 2**31), sharpnesses)
def test_likelihoods_to_a_power_are_those_of_losses_times_it(seed: int, sharpness: float) -> None:
    losses, weights = _draw(seed)
    posterior, value = (
        log_responsibilities(losses, weights, sharpness),
        negative_log_likelihood(losses, weights, sharpness),
    )
    torch.testing.assert_close(posterior, log_responsibilities(sharpness * losses, weights))
    torch.testing.assert_close(value, negative_log_likelihood(sharpness * losses, weights) / sharpness)


@given(st.integers(0, 2**31), st.lists(sharpnesses, min_size=2, max_size=4, unique=True))
def test_the_objective_falls_from_the_mean_loss_to_the_least(seed: int, chosen: list[float]) -> None:
    losses, weights = _draw(seed)
    values = [negative_log_likelihood(losses, weights, sharpness) for sharpness in sorted(chosen)]
    order = [weights.exp() @ losses, *values, losses.amin(0)]
    assert all(bool((below <= above + 1e-9).all()) for above, below in pairwise(order))


def test_near_zero_it_is_the_mean_loss_and_large_it_is_the_least() -> None:
    losses, weights = _draw(0)
    torch.testing.assert_close(
        negative_log_likelihood(losses, weights, 1e-8), weights.exp() @ losses, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(negative_log_likelihood(losses, weights, 1e8), losses.amin(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(log_responsibilities(losses, weights, 1e-8).exp(), weights.exp()[:, None].expand(3, 5))
    assert torch.equal(log_responsibilities(losses, weights, 1e8).exp().argmax(0), losses.argmin(0))


def test_infinite_losses_stay_finite_at_any_sharpness() -> None:
    losses, weights = torch.tensor([[torch.inf, 1.0], [torch.inf, torch.inf]]), torch.tensor([0.5, 0.5]).log()
    for sharpness in (1e-6, 0.3, 1e6):
        assert bool(torch.isfinite(negative_log_likelihood(losses, weights, sharpness)).all())
        assert not bool(log_responsibilities(losses, weights, sharpness).isnan().any())


def test_near_zero_every_component_of_balanced_fedem_is_trained_as_fedavg_trains_it() -> None:
    """The weights stay uniform, and steps and means divide them out."""
    settings = {"sharpness": 1e-12, "initial_weights": "uniform", "num_components": 2}
    start = make_training("bfedem", **settings).init()
    found = advance(make_training("bfedem", **settings), 3, start)
    torch.testing.assert_close(found.personal["log_weights"].exp(), torch.full((5, 2), 0.5, dtype=torch.float64))
    for component in range(2):
        alone = State(0, {name: leaf[:, component] for name, leaf in start.shared.items()}, {})
        expected = advance(make_training("fedavg"), 3, alone)
        for name, leaf in expected.shared.items():
            torch.testing.assert_close(found.shared[name][:, component], leaf, rtol=0, atol=1e-9)


def _objective(training: Training, state: State) -> float:
    return diagnose(training, state, state).objective


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [0.2, 1.0, 4.0])
def test_exact_rounds_of_one_client_never_raise_its_own_objective(sharpness: float) -> None:
    training = make_training(
        "fedem",
        make_federation("squared_error", sizes=(40,)),
        loss="squared_error",
        solver=Newton(0.0),
        batching=Batching(0, local_epochs=8),
        sharpness=sharpness,
    )
    states = [training.init()]
    for _ in range(8):
        states.append(training.step(states[-1])[0])
    values = [_objective(training, state) for state in states]
    assert all(after <= before + 1e-12 for before, after in pairwise(values))
    assert values[-1] < values[0] - 0.01


@pytest.mark.parametrize("sharpness", [0.2, 4.0])
def test_a_round_of_one_step_follows_the_gradient_of_its_own_objective(sharpness: float) -> None:
    training = make_training(
        "fedem", solver=SGD(), batching=Batching(0), schedule=Constant(1e-3), sharpness=sharpness, num_components=2
    )
    start = training.init()
    moved = advance(training, 1, start)
    # At the weights that the round's first half arrives at, the gradient is of the responsibilities before it.
    leaves = {name: leaf[0].clone().requires_grad_() for name, leaf in start.shared.items()}
    algorithm, sizes = training.algorithm, training.federation.train.sizes.double()
    total = torch.zeros((), dtype=torch.float64)
    for position in range(training.federation.num_clients):
        inputs, targets = training.federation.train.client(position)
        losses = torch.stack([algorithm.model.losses(tree_index(leaves, m), inputs, targets) for m in range(2)])
        weights = start.personal["log_weights"][position].exp()
        mean = -((weights[:, None] * (-sharpness * losses).exp()).sum(0).log() / sharpness).mean()
        total = total + sizes[position] / sizes.sum() * mean
    gradients = torch.autograd.grad(total, list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(moved.shared[name][0], start.shared[name][0] - 1e-3 * gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("sharpness", [0.01, 2.0])
def test_an_unseen_client_has_the_weights_with_which_its_predictions_are_most_likely(sharpness: float) -> None:
    training = make_training("fedem", sharpness=sharpness, unseen_prior=0.0)
    state = advance(training)
    algorithm, shared = training.algorithm, tree_index(state.shared, 0)
    inputs, targets = training.federation.train.client(3)
    everything = torch.ones_like(targets, dtype=torch.bool)
    fitted = algorithm.adapt(shared, algorithm.score(shared, inputs, targets), everything, None)
    assert fitted is not None

    def value(log_weights: Tensor) -> float:
        predicted = predict(algorithm.model, Mixture(shared, log_weights), inputs)
        return -float(predicted.gather(1, targets.long()[:, None]).log().mean())

    best = minimize(
        lambda logits: value(torch.from_numpy(logits).log_softmax(0)),
        np.zeros(3),
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 5000},
    )
    assert value(fitted["log_weights"]) == pytest.approx(best.fun, abs=2e-6)


def test_it_is_a_setting_of_both_and_must_be_above_zero() -> None:
    result = fedem.train(make_federation(), "bfedem", rounds=2, sharpness=0.5)
    assert isinstance(result.recipe.algorithm, FedEM)
    assert result.recipe.algorithm.sharpness == 0.5
    with pytest.raises(fedem.UserError, match=r"sharpness.*0.*above 0"):
        fedem.train(make_federation(), "fedem", rounds=2, sharpness=0.0)
