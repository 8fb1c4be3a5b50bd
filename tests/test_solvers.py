"""Solvers against torch.optim and scikit-learn; schedules against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import make_federation, make_model
from sklearn.linear_model import LogisticRegression

from fedem.errors import UserError
from fedem.schedules import Constant, Cosine, InverseSqrt, Step
from fedem.solvers import SGD, Adam, Newton, Solver


def _objective(tree):
    value = (tree["a"] ** 4).sum() + (tree["a"][0] * tree["b"]).sum() + (tree["b"] ** 2).sum()
    return value, {}


@pytest.mark.parametrize(
    ("solver", "reference"),
    [
        (SGD(), lambda p: torch.optim.SGD(p, 0.01)),
        (SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1)),
        (SGD(momentum=0.5, nesterov=True), lambda p: torch.optim.SGD(p, 0.01, momentum=0.5, nesterov=True)),
        (Adam(0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
        (Adam(beta1=0.5, beta2=0.9), lambda p: torch.optim.Adam(p, 0.01, betas=(0.5, 0.9))),
    ],
)
def test_steps_are_those_of_torch_optim(solver: Solver, reference) -> None:
    parameters = {"a": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}
    twins = {name: leaf.clone().requires_grad_() for name, leaf in parameters.items()}
    optimizer = reference(list(twins.values()))
    memory = solver.init(parameters)
    for _ in range(6):
        parameters, memory, _ = solver.step(_objective, parameters, memory, torch.tensor(0.01, dtype=torch.float64))
        optimizer.zero_grad()
        _objective(twins)[0].backward()
        optimizer.step()
        for name, leaf in parameters.items():
            torch.testing.assert_close(leaf, twins[name].detach(), rtol=1e-12, atol=1e-12)


def test_newton_finds_scikit_learns_logistic_regression() -> None:
    federation, model = make_federation(sizes=(80,)), make_model()
    inputs, targets = federation.train.client(0)

    # scikit-learn leaves the intercept unpenalised, so the penalty is part of this objective and not weight decay.
    def objective(tree):
        return model.losses(tree, inputs, targets).sum() + tree["weight"].square().sum() / 2, {}

    parameters = model.init(0)
    for _ in range(30):
        parameters, _, _ = Newton().step(objective, parameters, {}, torch.tensor(1.0))
    reference = LogisticRegression(C=1.0, tol=1e-12, max_iter=1000).fit(inputs.numpy(), targets.numpy())
    np.testing.assert_allclose(parameters["weight"].numpy(), reference.coef_, atol=1e-5)
    np.testing.assert_allclose(parameters["bias"].numpy(), reference.intercept_, atol=1e-5)


def test_newton_solves_a_quadratic_in_one_step_and_then_stays() -> None:
    target = torch.tensor([3.0, -1.0], dtype=torch.float64)

    def quadratic(tree):
        return ((tree["a"] - target) ** 2 * torch.tensor([1.0, 10.0])).sum(), {}

    start = {"a": torch.zeros(2, dtype=torch.float64)}
    once, _, _ = Newton().step(quadratic, start, {}, torch.tensor(1.0))
    torch.testing.assert_close(once["a"], target, rtol=0, atol=1e-8)
    twice, _, _ = Newton().step(quadratic, once, {}, torch.tensor(1.0))
    torch.testing.assert_close(twice["a"], target, rtol=0, atol=1e-8)


def test_newton_never_climbs_even_where_the_curvature_is_negative() -> None:
    def wavy(tree):
        return torch.cos(tree["a"]).sum() + 0.01 * tree["a"].square().sum(), {}

    for start in np.linspace(-4, 4, 33):
        parameters = {"a": torch.tensor([start])}
        moved, _, _ = Newton().step(wavy, parameters, {}, torch.tensor(1.0))
        assert float(wavy(moved)[0]) <= float(wavy(parameters)[0])


@pytest.mark.parametrize("rounds", range(1, 10))
def test_the_step_schedule_starts_at_its_rate_and_passes_each_stage_in_time(rounds: int) -> None:
    rates = [Step(1.0).rate(k, rounds) for k in range(rounds)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert [rate < 0.5 for rate in rates] == [k >= rounds / 2 for k in range(rounds)]
    assert [rate < 0.05 for rate in rates] == [k >= 0.75 * rounds for k in range(rounds)]


def test_schedules_count_rounds() -> None:
    assert [Constant(0.3).rate(k, 4) for k in range(4)] == [0.3] * 4
    assert [round(Step(1.0).rate(k, 8), 10) for k in range(8)] == [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    assert [Cosine(2.0).rate(k, 2) for k in range(2)] == pytest.approx([2.0, 1.0])
    assert {InverseSqrt(3.0).rate(k, 9) for k in range(9)} == {1.0}
    assert Step(1.0).rate(100, 200) == pytest.approx(0.1)
    assert Step(1.0).rate(150, 200) == pytest.approx(0.01)
    assert Cosine(1.0).rate(50, 200) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(momentum=1.0), "SGD.momentum is 1.0; allowed: at least 0 and below 1"),
        (lambda: SGD(-1.0), "SGD.weight_decay is -1.0"),
        (lambda: SGD(nesterov=True), "needs a momentum above 0"),
        (lambda: SGD(momentum="much"), "SGD.momentum is 'much'; allowed: a number"),
        (lambda: Constant(0.0), "Constant.learning_rate is 0.0; allowed: above 0"),
        (lambda: Constant(float("nan")), "finite"),
    ],
)
def test_bad_hyper_parameters_are_refused(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
