"""Optimising with a surrogate of a user's own, the one that the guide shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_federation, make_model
from least_squares import vector
from robust import USE, load, make_lines
from scipy.optimize import minimize
from scipy.stats import t as student
from torch import nn

from fedem.core.random import COMPONENTS, derive
from fedem.data.federation import Federation
from fedem.methods.decentralised import Graph
from fedem.methods.fedem import FedEM
from fedem.methods.mixer import Alone
from fedem.models import Model
from fedem.models.losses import SquaredError
from fedem.solvers import SGD, Newton
from fedem.surrogates import Outcome, optimise

RobustRegression = load()["RobustRegression"]
LINE = Model(lambda: nn.Linear(3, 1), SquaredError(), torch.float64)


def optimum(federation: Federation) -> tuple[np.ndarray, np.ndarray, float]:
    """The line [bias, weight], the scales and the least f, by a general optimiser on scipy's density."""
    clients = [federation.train.client(position) for position in range(federation.num_clients)]
    constant = -student.logpdf(0, df=3.0)

    def objective(point: np.ndarray) -> float:
        line, scales = point[:4], np.exp(point[4:])
        residuals = [y.numpy() - x.numpy() @ line[1:] - line[0] for x, y in clients]
        terms = [-student.logpdf(r, df=3.0, scale=s).sum() for r, s in zip(residuals, scales, strict=True)]
        return sum(terms) / len(federation.train) - constant

    found = minimize(objective, np.zeros(4 + len(clients)), method="BFGS", options={"gtol": 1e-9})
    return found.x[:4], np.exp(found.x[4:]), found.fun


def test_the_guide_runs_and_finds_the_known_answer(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = load() | {"federation": make_lines()}
    exec(USE, names)
    line, scales, least = optimum(names["federation"])
    outcome = names["outcome"]
    np.testing.assert_allclose(vector(outcome.state.shared)[0], line, atol=1e-5)
    np.testing.assert_allclose(outcome.state.personal["log_scale"].exp().numpy(), scales, atol=1e-5)
    assert outcome.history[-1] == pytest.approx(least, abs=1e-10)
    assert "RobustRegression: no violation found within radius 10000 of u0" in capsys.readouterr().out


def test_f_never_rises_with_small_steps() -> None:
    outcome = optimise(RobustRegression(LINE, SGD()), make_lines(), rounds=12, learning_rate=0.05)
    assert len(outcome.history) == 13
    assert max(np.diff(outcome.history)) < 0


def test_an_exact_local_solver_is_iteratively_reweighted_least_squares() -> None:
    """One client: Newton's step on the parabola g is the weighted least squares solution."""
    federation = make_lines((50,))
    outcome = optimise(RobustRegression(LINE, Newton(ridge=0.0)), federation, rounds=3, learning_rate=1.0)
    x, y = (part.numpy() for part in federation.train.client(0))
    design, scale = np.hstack([np.ones((50, 1)), x]), 1.0
    start = LINE.init(int(derive(0, COMPONENTS)))
    line = np.concatenate([start["bias"].numpy(), start["weight"].numpy()[0]])
    for _ in range(3):
        squares = (y - design @ line) ** 2
        trust = 4 / (3 + squares / scale**2)
        scale = np.sqrt((trust * squares).mean())
        line = np.linalg.solve(design.T @ (trust[:, None] * design), design.T @ (trust * y))
    np.testing.assert_allclose(vector(outcome.state.shared)[0], line, rtol=1e-9)
    assert float(outcome.state.personal["log_scale"].exp()) == pytest.approx(scale, rel=1e-9)


@pytest.mark.slow
def test_neighbours_in_a_graph_agree_on_the_optimum() -> None:
    federation = make_lines((20, 24, 22, 18))
    outcome = optimise(RobustRegression(LINE, SGD()), federation, rounds=150, learning_rate=0.1, mixer=Graph())
    line, _, least = optimum(federation)
    everybody = vector(outcome.state.shared)
    assert everybody.shape == (4, 4)
    np.testing.assert_allclose(everybody.mean(0), line, atol=0.1)
    # Each still leans to its own samples a little, so f may even be less than at the common optimum.
    assert outcome.history[-1] == pytest.approx(least, abs=0.02)
    apart = optimise(RobustRegression(LINE, SGD()), federation, rounds=50, learning_rate=0.1, mixer=Alone())
    assert np.ptp(everybody, 0).max() < np.ptp(vector(apart.state.shared), 0).max() / 2


def test_sampling_batches_and_steps() -> None:
    heard: list[tuple[int, float]] = []

    def run(**options: Any) -> Outcome:
        whole: dict[str, Any] = {"rounds": 2, "learning_rate": 0.1, "steps": 3, "batch_size": 4, "clients_per_round": 2}
        return optimise(FedEM(make_model(), SGD()), make_federation(), **(whole | options))

    outcome = run(listener=lambda count, value: heard.append((count, value)))
    assert heard == list(enumerate(outcome.history))
    assert run().history == outcome.history
    for other in ({"seed": 1}, {"steps": 2}, {"batch_size": 0}, {"clients_per_round": 3}):
        assert run(**other).history != outcome.history


def test_models_that_can_not_be_stacked_are_run_one_by_one() -> None:
    class Looking(nn.Module):
        """Asks for a value, which vmap does not allow."""

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.line(inputs) if float(inputs.detach().sum()) < torch.inf else inputs

    pair = [
        optimise(RobustRegression(model, SGD()), make_lines(), rounds=3, learning_rate=0.1)
        for model in (LINE, Model(Looking, SquaredError(), torch.float64))
    ]
    assert pair[0].history == pytest.approx(pair[1].history, rel=1e-12)
