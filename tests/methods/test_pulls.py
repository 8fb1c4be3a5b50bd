"""Methods that pull models together, against ridge regression in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import advance, make_federation, make_training, scores_of
from least_squares import WHOLE, assert_same, change_of, exact_training, proximal, shares, slope, vector

from fedem.core.tree import take_prefix
from fedem.engines import Batching
from fedem.solvers import SGD, Newton
from fedem.solvers.schedules import Constant


@pytest.mark.parametrize("mu", [0.05, 1.0, 40.0])
def test_fedprox_with_an_exact_solver_solves_ridge_regression_around_what_it_received(mu: float) -> None:
    federation = make_federation("squared_error")
    training = exact_training("fedprox", federation, mu=mu)
    state = training.init()
    for _ in range(3):
        u = vector(state.shared)[0]
        expected = shares(federation) @ [proximal(federation, t, u, mu) for t in range(5)]
        state, _ = training.step(state)
        np.testing.assert_allclose(vector(state.shared)[0], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("pull", [0.05, 1.0, 40.0])
def test_dittos_own_models_solve_ridge_regression_around_what_they_received(pull: float) -> None:
    federation = make_federation("squared_error", sizes=(7, 12, 30))
    training = exact_training("ditto", federation, pull=pull)
    state = training.init()
    for _ in range(3):
        u = vector(state.shared)[0]
        state, _ = training.step(state)
        np.testing.assert_allclose(
            vector(take_prefix("own", state.personal)),
            [proximal(federation, t, u, pull) for t in range(3)],
            rtol=0,
            atol=1e-8,
        )
        # The shared model is trained without the pull.
        shared = shares(federation) @ [proximal(federation, t, u, 0.0) for t in range(3)]
        np.testing.assert_allclose(vector(state.shared)[0], shared, rtol=0, atol=1e-7)


def test_dittos_own_models_under_an_infinite_pull_are_what_they_received() -> None:
    federation = make_federation()
    training = make_training("ditto", federation, solver=Newton(), batching=WHOLE, pull=1e6)
    before = advance(training, 1)
    after, _ = training.step(before)
    for name, leaf in take_prefix("own", after.personal).items():
        torch.testing.assert_close(leaf, before.shared[name].expand_as(leaf), rtol=0, atol=1e-5)
        assert float((leaf - after.shared[name]).abs().max()) > 1e-2


@pytest.mark.parametrize(("pull", "server_rate"), [(0.5, 1.0), (3.0, 1.0), (3.0, 0.4), (20.0, 1.7)])
def test_pfedme_descends_the_moreau_envelopes(pull: float, server_rate: float) -> None:
    federation, rate, num_steps = make_federation("squared_error"), 0.04, 3
    training = make_training(
        "pfedme",
        federation,
        loss="squared_error",
        solver=Newton(),
        batching=Batching(0, local_steps=num_steps),
        schedule=Constant(rate),
        pull=pull,
        server_rate=server_rate,
        inner_steps=2,
    )
    state = training.init()
    u = vector(state.shared)[0]
    for _ in range(3):
        ends, own = [], []
        for position in range(5):
            w = u
            for _ in range(num_steps):
                theta = proximal(federation, position, w, pull)
                w = w - rate * pull * (w - theta)
            ends.append(w)
            own.append(theta)
        u = (1 - server_rate) * u + server_rate * (shares(federation) @ ends)
        state, _ = training.step(state)
        np.testing.assert_allclose(vector(state.shared)[0], u, rtol=0, atol=1e-8)
        np.testing.assert_allclose(vector(take_prefix("own", state.personal)), own, rtol=0, atol=1e-8)


def test_pfedmes_inner_steps_are_the_solvers_on_the_proximal_problem() -> None:
    federation, rate, inner_rate, pull = make_federation("squared_error", sizes=(9,)), 0.05, 0.1, 2.0
    training = make_training(
        "pfedme",
        federation,
        loss="squared_error",
        solver=SGD(),
        batching=Batching(0, local_steps=2),
        schedule=Constant(rate),
        pull=pull,
        inner_rate=inner_rate,
        inner_steps=3,
    )
    state = training.init()
    w = vector(state.shared)[0]
    theta = w  # and from then on each batch begins where the last one ended
    for _ in range(2):
        for _ in range(3):
            theta = theta - inner_rate * (slope(federation, 0, theta) + pull * (theta - w))
        w = w - rate * pull * (w - theta)
    after, _ = training.step(state)
    np.testing.assert_allclose(vector(after.shared)[0], w, rtol=0, atol=1e-13)
    np.testing.assert_allclose(vector(take_prefix("own", after.personal))[0], theta, rtol=0, atol=1e-13)


def test_pfedme_under_an_infinite_pull_is_fedavg() -> None:
    """The envelope's gradient pull (w - v) tends to f's as the pull grows, and v to w."""
    federation, rate = make_federation(), 1e-6
    settings = {"batching": WHOLE, "schedule": Constant(rate)}
    pfedme = make_training("pfedme", federation, solver=Newton(), pull=1e4, inner_steps=3, **settings)
    fedavg = make_training("fedavg", federation, solver=SGD(), **settings)
    start = fedavg.init()
    first, second = advance(pfedme, 3), advance(fedavg, 3)
    moved = change_of(second.shared, start.shared)
    assert change_of(first.shared, second.shared) < 1e-3 * moved
    for name, leaf in take_prefix("own", first.personal).items():
        torch.testing.assert_close(leaf, second.shared[name].expand_as(leaf), rtol=0, atol=1e-3)
    losses = [scores_of(t, state)["test"].losses for t, state in ((pfedme, first), (fedavg, second))]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-3)


def test_pfedme_never_passes_the_proximal_point() -> None:
    federation = make_federation("squared_error", sizes=(9,))
    training = make_training(
        "pfedme",
        federation,
        loss="squared_error",
        solver=Newton(),
        batching=Batching(0, local_steps=1),
        schedule=Constant(5.0),
        pull=3.0,
    )
    after = advance(training, 1)
    assert_same(after.shared, take_prefix("own", after.personal))
