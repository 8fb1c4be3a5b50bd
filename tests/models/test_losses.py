"""Losses against scipy and scikit-learn, and their gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import LOSSES, make_federation, make_model
from scipy import stats
from sklearn.metrics import log_loss
from torch.func import grad

from fedem.core.errors import UserError
from fedem.models.losses import CrossEntropy, Logistic, SquaredError, guess_loss
from fedem.models.metrics import METRICS


def test_cross_entropy_is_the_log_loss_of_its_probabilities() -> None:
    outputs, targets = torch.randn(50, 4, dtype=torch.float64), torch.arange(50) % 4
    loss = CrossEntropy()
    found = loss.negative_log_likelihood(outputs, targets).mean()
    assert float(found) == pytest.approx(log_loss(targets, loss.probabilities(outputs), labels=range(4)))


def test_logistic_is_the_log_loss_of_its_probabilities() -> None:
    outputs, targets = torch.randn(50, 1, dtype=torch.float64), torch.arange(50) % 2
    loss = Logistic()
    found = loss.negative_log_likelihood(outputs, targets).mean()
    assert float(found) == pytest.approx(log_loss(targets, loss.probabilities(outputs)))


def test_logistic_is_cross_entropy_with_a_zero_logit() -> None:
    outputs, targets = torch.randn(20, 1, dtype=torch.float64), torch.arange(20) % 2
    pair = torch.cat([torch.zeros_like(outputs), outputs], 1)
    torch.testing.assert_close(
        Logistic().negative_log_likelihood(outputs, targets), CrossEntropy().negative_log_likelihood(pair, targets)
    )


def test_logistic_stays_finite_at_extreme_logits() -> None:
    outputs, targets = torch.tensor([[1e4], [1e4], [-1e4], [-1e4]]), torch.tensor([0, 1, 0, 1])
    found = Logistic().negative_log_likelihood(outputs, targets)
    torch.testing.assert_close(found, torch.tensor([1e4, 0.0, 0.0, 1e4]))


@pytest.mark.parametrize("variance", [1.0, 0.25])
def test_squared_error_is_a_gaussian_likelihood(variance: float) -> None:
    outputs, targets = torch.randn(30, 2, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    expected = -stats.norm(outputs.numpy(), np.sqrt(variance)).logpdf(targets.numpy()).sum(1)
    found = SquaredError(variance).negative_log_likelihood(outputs, targets)
    np.testing.assert_allclose(found.numpy(), expected)


def test_squared_error_takes_flat_targets_too() -> None:
    outputs, targets = torch.randn(5, 1), torch.randn(5)
    assert SquaredError().negative_log_likelihood(outputs, targets).shape == (5,)
    torch.testing.assert_close(
        METRICS["mean_squared_error"].per_sample(outputs, targets), (outputs[:, 0] - targets) ** 2
    )


def test_the_mean_squared_error_is_a_mean_over_the_targets_too() -> None:
    outputs, targets = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 6.0]])
    assert METRICS["mean_squared_error"].per_sample(outputs, targets).tolist() == pytest.approx([14 / 3, 12.0])


def test_logistic_keeps_tiny_losses() -> None:
    found = Logistic().negative_log_likelihood(torch.tensor([[20.0], [-20.0]]), torch.tensor([1, 0]))
    assert found.tolist() == pytest.approx([np.log1p(np.exp(-20.0))] * 2, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_agree_with_finite_differences(loss: str) -> None:
    federation, model = make_federation(loss), make_model(loss)
    parameters = model.init(0)
    inputs, targets = federation.train.client(3)
    weights = torch.rand(len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def objective(tree: dict[str, torch.Tensor]) -> torch.Tensor:
        return (weights * model.training_losses(tree, inputs, targets, None, torch.tensor(0))[0]).sum()

    gradient = grad(objective)(parameters)
    for name, leaf in parameters.items():
        for index in np.ndindex(*leaf.shape):
            step = torch.zeros_like(leaf)
            step[index] = 1e-5
            up, down = (objective(parameters | {name: leaf + sign * step}) for sign in (1, -1))
            assert float(gradient[name][index]) == pytest.approx(float(up - down) / 2e-5, rel=1e-6, abs=1e-8)


def test_the_loss_is_guessed_from_the_targets() -> None:
    assert guess_loss(torch.tensor([0, 1, 1])) == Logistic()
    assert guess_loss(torch.tensor([0, 2, 1])) == CrossEntropy()
    assert guess_loss(torch.tensor([0.5])) == SquaredError()


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "message"),
    [
        (Logistic(), 1, torch.tensor([0, 2]), "0 to 1"),
        (CrossEntropy(), 3, torch.tensor([-1, 2]), "0 to 2"),
        (CrossEntropy(), 3, torch.tensor([0.5]), "integers"),
        (SquaredError(), 2, torch.zeros(3), r"\[n, 2\]"),
    ],
)
def test_targets_that_do_not_fit_are_refused(loss, outputs, targets, message) -> None:
    with pytest.raises(UserError, match=message):
        loss.check(outputs, targets)


def test_a_variance_must_be_positive() -> None:
    with pytest.raises(UserError, match=r"SquaredError\.variance is 0; allowed: above 0"):
        SquaredError(0)


@pytest.mark.parametrize("variance", [0.01, 1.0])
def test_no_loss_is_below_the_lowest(variance: float) -> None:
    outputs = torch.tensor([[-200.0, 200.0], [3.0, -1.0]], dtype=torch.float64)
    squared = SquaredError(variance)
    assert float(squared.negative_log_likelihood(outputs, outputs).min()) == pytest.approx(squared.lowest(2))
    assert float(squared.negative_log_likelihood(outputs, outputs + 0.1).min()) > squared.lowest(2)
    targets = torch.tensor([1, 0])
    assert CrossEntropy().lowest(2) == Logistic().lowest(1) == 0
    assert float(CrossEntropy().negative_log_likelihood(outputs, targets).min()) == pytest.approx(0, abs=1e-12)
