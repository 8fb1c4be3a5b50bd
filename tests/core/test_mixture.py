"""The EM mathematics against closed forms, scipy and its own definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from torch import Tensor
from torch.func import vmap

from fedem.core.em import (
    fit_leaving_out,
    fit_log_weights,
    log_responsibilities,
    mix,
    negative_log_likelihood,
    uniform_log_weights,
    update_log_weights,
)


def _log_weights(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64).log()


finite_losses = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=st.floats(-5, 50))


@given(finite_losses, st.integers(0, 2**31))
def test_responsibilities_are_bayes_rule(losses: np.ndarray, seed: int) -> None:
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(losses)) * 3)
    joint = weights[:, None] * np.exp(-losses)
    found = log_responsibilities(torch.from_numpy(losses), torch.from_numpy(np.log(weights))).exp()
    np.testing.assert_allclose(found.numpy(), joint / joint.sum(0), rtol=1e-9, atol=1e-12)


@given(
    arrays(np.float32, (3, 4), elements=st.floats(0, width=32, allow_nan=False, allow_infinity=True)),
    st.sampled_from([(0.2, 0.3, 0.5), (1.0, 1e-30, 1e-38), (1.0, 0.0, 0.0)]),
)
@settings(max_examples=200)
def test_responsibilities_survive_any_losses(losses: np.ndarray, weights: tuple[float, ...]) -> None:
    log_weights = torch.tensor(weights).log()
    found = log_responsibilities(torch.from_numpy(losses), log_weights)
    assert not bool(found.isnan().any())
    torch.testing.assert_close(found.exp().sum(0), torch.ones(4), rtol=0, atol=1e-5)
    updated = update_log_weights(found, torch.ones(4, dtype=torch.bool))
    assert not bool(updated.isnan().any())
    torch.testing.assert_close(updated.exp().sum(), torch.tensor(1.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("common", [0.0, 1e4, 1e30, math.inf])
def test_a_loss_common_to_all_components_changes_nothing(common: float) -> None:
    losses = torch.full((2, 3), common)
    expected = torch.tensor([0.25, 0.75])[:, None].expand(2, 3)
    torch.testing.assert_close(log_responsibilities(losses, torch.tensor([0.25, 0.75]).log()).exp(), expected)


def test_weights_do_not_underflow_over_many_rounds() -> None:
    losses, log_weights = torch.tensor([[0.0] * 5, [60.0] * 5]), torch.tensor([0.5, 0.5]).log()
    for _ in range(30):
        log_weights = update_log_weights(log_responsibilities(losses, log_weights), torch.ones(5, dtype=torch.bool))
    # exp(-1800) is far below the smallest float; its logarithm is not.
    assert float(log_weights[1]) == pytest.approx(-1800, rel=1e-5)
    # And a component that fell so low still comes back when the data change.
    losses = torch.tensor([[5000.0] * 5, [0.0] * 5])
    log_weights = update_log_weights(log_responsibilities(losses, log_weights), torch.ones(5, dtype=torch.bool))
    assert float(log_weights[1]) == pytest.approx(0, abs=1e-6)


def test_weights_are_the_mean_responsibility_and_ignore_padding() -> None:
    q = torch.tensor([[0.9, 0.2, 0.5], [0.1, 0.8, 0.5]], dtype=torch.float64)
    everything = update_log_weights(q.log(), torch.ones(3, dtype=torch.bool)).exp()
    torch.testing.assert_close(everything, q.mean(1))
    masked = update_log_weights(q.log(), torch.tensor([True, True, False])).exp()
    torch.testing.assert_close(masked, q[:, :2].mean(1))


def test_negative_log_likelihood_is_that_of_the_mixture() -> None:
    losses, weights = torch.tensor([[0.1, 3.0], [2.0, 0.5]], dtype=torch.float64), _log_weights(0.3, 0.7)
    expected = -torch.log(0.3 * torch.exp(-losses[0]) + 0.7 * torch.exp(-losses[1]))
    torch.testing.assert_close(negative_log_likelihood(losses, weights), expected)


def test_negative_log_likelihood_stays_finite() -> None:
    found = negative_log_likelihood(
        torch.tensor([[math.inf, 1.0], [math.inf, math.inf]]), torch.tensor([0.5, 0.5]).log()
    )
    assert bool(torch.isfinite(found).all())
    assert float(found[1]) == pytest.approx(1 + math.log(2))


def test_predictions_mix_probabilities_and_not_logits() -> None:
    logits = torch.tensor([[[10.0, 0.0]], [[0.0, 2.0]]], dtype=torch.float64)
    weights = _log_weights(0.4, 0.6)
    mixed = mix(torch.softmax(logits, -1), weights)
    expected = 0.4 * torch.softmax(logits[0], -1) + 0.6 * torch.softmax(logits[1], -1)
    torch.testing.assert_close(mixed, expected)
    of_logits = torch.softmax(0.4 * logits[0] + 0.6 * logits[1], -1)
    assert mixed.argmax() != of_logits.argmax()  # the trap would even predict another class


PRIORS = st.sampled_from([0.0, 0.1, 1.0, 30.0])


def _posterior(losses: Tensor, log_weights: Tensor, prior: float) -> float:
    """The negative logarithm of the posterior under Dirichlet(1 + prior / M), a sample."""
    likelihood = negative_log_likelihood(losses, log_weights).sum()
    density = prior * log_weights.mean() if prior else torch.tensor(0.0)
    return float(likelihood - density) / (losses.shape[1] + prior)


def _gap(losses: np.ndarray, weights: np.ndarray, prior: float) -> float:
    """By how much the best direction into the simplex improves the likelihood: max_m mean_i p_im / p_i - 1.

    It is not positive at the optimum. Among the prior's samples p_im / p_i is 1 / pi_m for one of M.
    """
    num_components, count = losses.shape
    finite = np.minimum(losses, 1e300)
    likelihoods = np.exp(finite.min(axis=0) - finite)
    sums = (likelihoods / (weights @ likelihoods)).sum(axis=1) + (prior / num_components / weights if prior else 0)
    return float(sums.max()) / (count + prior) - 1


@given(st.integers(2, 4), st.integers(1, 40), PRIORS, st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_fitted_weights_reach_the_optimum_that_scipy_finds(
    num_components: int, count: int, prior: float, seed: int
) -> None:
    losses = torch.from_numpy(np.random.default_rng(seed).exponential(2, (num_components, count)))

    def objective(logits: np.ndarray) -> float:
        return _posterior(losses, torch.log_softmax(torch.from_numpy(logits), 0), prior)

    best = min(
        minimize(objective, start, method="Nelder-Mead", options={"maxiter": 4000, "fatol": 1e-9, "xatol": 1e-6}).fun
        for start in (np.zeros(num_components), np.random.default_rng(0).normal(size=num_components))
    )
    assert _posterior(losses, fit_log_weights(losses, prior=prior), prior) <= best + 2e-6


@pytest.mark.parametrize("kind", ["plain", "twins", "hopeless", "huge"])
@given(st.integers(2, 7), st.integers(1, 60), st.floats(-3, 2), PRIORS, st.integers(0, 2**31))
@settings(max_examples=40)
def test_fitted_weights_are_optimal_by_their_own_certificate(
    kind: str, num_components: int, count: int, exponent: float, prior: float, seed: int
) -> None:
    losses = np.random.default_rng(seed).exponential(10**exponent, (num_components, count))
    losses[1] = losses[0] if kind == "twins" else losses[1]
    losses[0] += {"hopeless": 1000, "huge": 1e30}.get(kind, 0)
    weights = fit_log_weights(torch.from_numpy(losses), prior=prior).exp().numpy()
    assert weights.sum() == pytest.approx(1)
    assert _gap(losses, weights, prior) <= 1.1e-6


KINDS = ("plain", "alike", "twins", "far apart", "huge", "infinite")


def _draw_losses(rng: np.random.Generator, kind: str, num_components: int, count: int) -> np.ndarray:
    losses = rng.exponential(2, (num_components, count))
    if kind == "alike":
        losses[:] = losses[:, :1]  # samples with identical losses
    elif kind == "twins":
        losses[-1] = losses[0]
    elif kind == "far apart":
        losses *= 1e4
    elif kind == "huge":
        losses += 1e4
    elif kind == "infinite":
        losses[0] = np.inf
    return losses


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 5),
    PRIORS,
    st.sampled_from([None, 1, 3]),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_clients_fitted_together_have_the_weights_that_they_have_alone(
    clients: list[tuple[str, int]], num_components: int, prior: float, updates: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    drawn = [torch.from_numpy(_draw_losses(rng, kind, num_components, count)) for kind, count in clients]
    width = max(count for _, count in clients)
    padded = torch.from_numpy(rng.exponential(100, (len(clients), num_components, width)))  # and anything besides
    mask = torch.arange(width) < torch.tensor([[count] for _, count in clients])
    for row, losses in zip(padded, drawn, strict=True):
        row[:, : losses.shape[1]] = losses
    together = vmap(lambda losses, mask: fit_log_weights(losses, updates, prior, mask))(padded, mask)
    torch.testing.assert_close(together.exp().sum(1), torch.ones(len(clients), dtype=torch.float64))
    for losses, fitted in zip(drawn, together, strict=True):
        alone = fit_log_weights(losses, updates, prior)
        torch.testing.assert_close(fitted.exp(), alone.exp(), rtol=0, atol=1e-8)
        values = [_posterior(losses, each, prior if updates is None else 0.0) for each in (fitted, alone)]
        assert values[0] <= values[1] + 1e-9 * abs(values[1])
        if updates is None:
            assert _gap(losses.numpy(), fitted.exp().numpy(), prior) <= 1.1e-6


def test_a_single_component_has_all_the_weight() -> None:
    assert torch.equal(fit_log_weights(torch.tensor([[3.0, 1e4]])), torch.zeros(1))


def test_fitted_weights_have_the_type_of_the_losses() -> None:
    losses = torch.tensor([[[0.5, 2.0], [1.0, 0.1]]])
    assert vmap(fit_log_weights)(losses).dtype == torch.float32
    torch.testing.assert_close(vmap(fit_log_weights)(losses).double(), vmap(fit_log_weights)(losses.double()))


def test_samples_that_are_certainly_of_one_component_are_counted_and_the_priors_with_them() -> None:
    component = torch.tensor([0, 0, 0, 2, 2, 0])
    losses = torch.where(torch.arange(4)[:, None] == component, 0.0, 800.0).double()
    fitted = fit_log_weights(losses, prior=2.0).exp()
    torch.testing.assert_close(fitted, (torch.tensor([4, 0, 2, 0]) + 2 / 4).double() / 8, atol=2e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "gain"), [(1, 0.2), (3, 0.02), (10, 0.005)])
def test_the_prior_helps_clients_with_few_samples_to_predict_others(count: int, gain: float) -> None:
    """Components that emit their own of three symbols with 0.8, clients by Dirichlet(0.4)."""
    rng = np.random.default_rng(0)
    emitted = np.full((3, 3), 0.1) + 0.7 * np.eye(3)
    surprise = dict.fromkeys((0.0, 1.0), 0.0)
    for _ in range(300):
        truth = rng.dirichlet(np.full(3, 0.4)) @ emitted
        losses = torch.from_numpy(-np.log(emitted[:, rng.choice(3, size=count, p=truth)]))
        for prior in surprise:
            predicted = fit_log_weights(losses, prior=prior).exp().numpy() @ emitted
            surprise[prior] -= float(truth @ np.log(predicted)) / 300
    assert surprise[1.0] < surprise[0.0] - gain


def test_fitted_weights_recover_planted_ones() -> None:
    rng = np.random.default_rng(0)
    truth = np.array([0.7, 0.1, 0.2])
    component = rng.choice(3, size=20_000, p=truth)
    # Well separated components: the right one explains its sample far better.
    losses = torch.from_numpy(np.where(np.arange(3)[:, None] == component, 0.1, 6.0))
    fitted = fit_log_weights(losses).exp().numpy()
    np.testing.assert_allclose(fitted, truth, atol=0.01)


def test_one_iteration_is_one_e_step_from_uniform() -> None:
    losses = torch.tensor([[0.2, 1.5], [1.0, 0.3]], dtype=torch.float64)
    expected = torch.softmax(-losses, 0).mean(1)
    torch.testing.assert_close(fit_log_weights(losses, max_iterations=1).exp(), expected)


def test_no_samples_leave_the_weights_uniform() -> None:
    torch.testing.assert_close(fit_log_weights(torch.zeros(4, 0)).exp(), torch.full((4,), 0.25))
    torch.testing.assert_close(uniform_log_weights(2, torch.zeros(0)).exp(), torch.full((2,), 0.5))


@pytest.mark.parametrize("seed", range(3))
def test_without_a_component_the_others_are_fitted_as_if_they_were_alone(seed: int) -> None:
    columns = 4 * torch.rand(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found = fit_leaving_out(columns, torch.ones(12, dtype=torch.bool), updates=500)
    for out, row in enumerate(found[1:]):
        kept = [m for m in range(4) if m != out]
        alone = fit_log_weights(columns[kept], prior=1.0)
        assert row[out] == -math.inf
        # With the prior's sample, a share of which is certainly of each component.
        objectives = [
            negative_log_likelihood(columns[kept], weights).sum() - weights.sum() / len(kept)
            for weights in (row[kept], alone)
        ]
        assert float(objectives[0]) == pytest.approx(float(objectives[1]), abs=1e-3)


def test_a_twin_takes_all_the_weight_of_the_other() -> None:
    losses = 3 * torch.rand(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    twins, mask = torch.cat([losses, losses[:1]]), torch.ones(40, dtype=torch.bool)
    found = fit_leaving_out(twins, mask, prior=1e-9, updates=500)
    likelihoods = torch.stack([negative_log_likelihood(twins, row).mean() for row in found])
    assert likelihoods[[1, 4]].tolist() == pytest.approx([float(likelihoods[0])] * 2, abs=1e-6)
    assert float(found[1, 3].exp()) == pytest.approx(float(found[0, [0, 3]].exp().sum()), abs=1e-3)
    assert float(likelihoods[[2, 3]].min()) > float(likelihoods[0]) + 1e-3


def test_padding_counts_for_nothing_when_components_are_left_out() -> None:
    losses = torch.rand(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    padded, mask = torch.cat([losses, torch.full((3, 4), 7.0, dtype=torch.float64)], 1), torch.arange(13) < 9
    torch.testing.assert_close(fit_leaving_out(padded, mask), fit_leaving_out(losses, mask[:9]))
    assert fit_leaving_out(losses[:, :0], mask[:0]).exp()[:2].tolist() == [[1 / 3] * 3, [0, 0.5, 0.5]]
