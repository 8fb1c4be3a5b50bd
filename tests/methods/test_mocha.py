"""MOCHA against scipy on the same convex problem, and its matrix of relations against the closed form."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import DIMENSION, LOSSES, advance, make_federation, make_training
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from scipy.optimize import minimize
from torch import Tensor, nn

from fedem.core.errors import UserError
from fedem.core.tree import Tree, take_prefix, tree_flat
from fedem.data.federation import Federation
from fedem.engines import Batching, Stacked
from fedem.methods.mocha import Relations, relations_of
from fedem.models import Model
from fedem.runs.rounds import State, Training
from fedem.solvers import Newton

SIZES = (9, 14, 6)
every_convex_loss = pytest.mark.parametrize("loss", ["logistic", "squared_error"])


def _training(loss: str, federation: Federation, **settings: object) -> Training:
    """Whole batches and a few Newton steps: the clients' problems are solved exactly."""
    return make_training(
        "mocha",
        federation,
        loss=loss,
        solver=Newton(),
        batching=Batching(0, local_steps=1 if loss == "squared_error" else 3),
        engine=Stacked(record_after=1000),  # recording takes longer than these runs
        **settings,
    )


def _sigma(count: int, seed: int = 0) -> Tensor:
    """A matrix of relations of which no two clients have the same."""
    factors = np.random.default_rng(seed).normal(size=(count, count + 2))
    matrix = factors @ factors.T + 0.5 * np.eye(count)
    return torch.from_numpy(matrix / np.trace(matrix))


def _related(training: Training, sigma: Tensor) -> State:
    """The first state, with given relations."""
    assert isinstance(training.mixer, Relations)
    start = training.init()
    shared = start.shared | {"stiffness": training.mixer._stiffness(sigma)}
    return State(0, shared, start.personal, start.memory | {"relations": sigma})


def _tasks(shared: Tree) -> np.ndarray:
    """Everybody's [bias, weight]."""
    return tree_flat(take_prefix("task", shared), 1).numpy()


def _designs(federation: Federation) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs = [federation.train.client(position) for position in range(federation.num_clients)]
    return [(np.hstack([np.ones((len(y), 1)), x.numpy()]), y.numpy().astype(float)) for x, y in pairs]


def _loss_and_slope(loss: str, a: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum over a client's samples and its gradient."""
    outputs = a @ w
    if loss == "squared_error":
        return float(((outputs - y) ** 2).sum() / 2 + len(y) * np.log(2 * np.pi) / 2), a.T @ (outputs - y)
    value = np.logaddexp(0, (1 - 2 * y) * outputs).sum()
    return float(value), a.T @ (1 / (1 + np.exp(-outputs)) - y)


def _objective(
    loss: str, federation: Federation, penalty: float, sigma: np.ndarray, tasks: np.ndarray
) -> tuple[float, np.ndarray]:
    """sum_t sum_i loss + penalty tr(W Omega W^T), and its gradient; the rows of ``tasks`` are the tasks."""
    parts = [_loss_and_slope(loss, *data, w) for data, w in zip(_designs(federation), tasks, strict=True)]
    pulled = np.linalg.solve(sigma, tasks)
    value = sum(value for value, _ in parts) + penalty * float((tasks * pulled).sum())
    return value, np.array([slope for _, slope in parts]) + 2 * penalty * pulled


def _solution(loss: str, federation: Federation, penalty: float, sigma: np.ndarray) -> np.ndarray:
    shape = (federation.num_clients, DIMENSION + 1)

    def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = _objective(loss, federation, penalty, sigma, flat.reshape(shape))
        return value, slope.reshape(-1)

    found = minimize(function, np.zeros(shape).reshape(-1), jac=True, method="BFGS", options={"gtol": 1e-7})
    assert np.abs(found.jac).max() < 1e-5
    return found.x.reshape(shape)


@pytest.mark.parametrize("penalty", [0.1, 1.0])
@every_convex_loss
def test_unrelated_tasks_are_solved_in_one_round(loss: str, penalty: float) -> None:
    federation = make_federation(loss, sizes=SIZES)
    training = make_training(
        "mocha",
        federation,
        loss=loss,
        solver=Newton(),
        batching=Batching(0, local_steps=12),
        penalty=penalty,
        relations_every=0,
    )
    found = _tasks(advance(training, 1).shared)
    np.testing.assert_allclose(found, _solution(loss, federation, penalty, np.eye(3) / 3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("cohort_size", [3, 2])
@every_convex_loss
def test_related_tasks_are_those_that_scipy_finds(loss: str, cohort_size: int) -> None:
    federation, penalty, sigma = make_federation(loss, sizes=SIZES), 2.0, _sigma(3)
    training = _training(loss, federation, penalty=penalty, relations_every=0, cohort_size=cohort_size)
    after = advance(training, 15 if cohort_size == 3 else 25, _related(training, sigma))
    expected = _solution(loss, federation, penalty, sigma.numpy())
    np.testing.assert_allclose(_tasks(after.shared), expected, rtol=0, atol=1e-5)
    unrelated = _solution(loss, federation, penalty, np.eye(3) / 3)
    assert np.abs(unrelated - expected).max() > 0.05
    # The dual vectors are minus the gradients, and the tasks their combinations.
    slopes = [_loss_and_slope(loss, *data, w)[1] for data, w in zip(_designs(federation), expected, strict=True)]
    np.testing.assert_allclose(
        tree_flat(take_prefix("dual", after.shared), 1).numpy(), -np.array(slopes), rtol=0, atol=1e-4
    )
    assert torch.equal(after.memory["relations"], sigma)


@pytest.mark.slow
@every_convex_loss
def test_learnt_relations_and_tasks_are_a_stationary_point_of_the_joint_problem(loss: str) -> None:
    federation, penalty = make_federation(loss, sizes=SIZES), 0.2
    after = advance(_training(loss, federation, penalty=penalty, relations_every=1, floor=1e-9), 150)
    sigma, tasks = after.memory["relations"], torch.from_numpy(_tasks(after.shared))
    torch.testing.assert_close(relations_of(tasks, 0.0), sigma, rtol=0, atol=1e-3)
    np.testing.assert_allclose(tasks.numpy(), _solution(loss, federation, penalty, sigma.numpy()), rtol=0, atol=2e-3)
    assert float((sigma - torch.eye(3) / 3).abs().max()) > 0.05


@pytest.mark.slow
@every_convex_loss
def test_the_joint_objective_falls_over_the_alternation(loss: str) -> None:
    """The tasks are solved for given relations, then come the relations of these tasks, and so on."""
    federation, penalty, every = make_federation(loss, sizes=SIZES), 0.2, 8
    training = _training(loss, federation, penalty=penalty, relations_every=every, floor=1e-9)
    state, values = training.init(), []
    for index in range(4 * every):
        if index % every == every - 1:
            sigma = state.memory["relations"].numpy()
            values.append(_objective(loss, federation, penalty, sigma, _tasks(state.shared))[0])
        state, _ = training.step(state)
    assert all(after < before + 1e-6 for before, after in pairwise(values))
    assert values[-1] < values[0] - 0.05


@given(st.integers(1, 5), st.integers(0, 1000))
def test_relations_are_the_square_root_in_closed_form(count: int, seed: int) -> None:
    tasks = np.random.default_rng(seed).normal(size=(count, 6))
    root = np.real(sqrtm(tasks @ tasks.T))
    found = relations_of(torch.from_numpy(tasks), 0.0).numpy()
    np.testing.assert_allclose(found, root / np.trace(root), rtol=0, atol=1e-8)


@given(st.integers(0, 1000))
def test_no_other_relations_tie_the_tasks_more_cheaply(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tasks = rng.normal(size=(4, 6))

    def cost(sigma: np.ndarray) -> float:
        return float(np.trace(tasks.T @ np.linalg.solve(sigma, tasks)))

    found = relations_of(torch.from_numpy(tasks), 0.0).numpy()
    assert np.trace(found) == pytest.approx(1)
    least = cost(found)
    assert least == pytest.approx(np.linalg.norm(tasks, "nuc") ** 2)
    for closeness in (0.0, 0.9, 0.999):
        factors = rng.normal(size=(4, 5))
        other = factors @ factors.T
        assert cost(closeness * found + (1 - closeness) * other / np.trace(other)) > least


def test_relations_of_tasks_that_say_nothing_are_the_identity() -> None:
    assert torch.equal(relations_of(torch.zeros(4, 3), 0.1), torch.eye(4) / 4)


@given(st.floats(0, 1), st.integers(0, 100))
def test_relations_keep_their_trace_and_a_least_eigenvalue(floor: float, seed: int) -> None:
    tasks = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, 2)))  # of rank 2: relations would be singular
    sigma = relations_of(tasks, floor)
    assert float(sigma.trace()) == pytest.approx(1)
    assert float(torch.linalg.eigvalsh(sigma).min()) == pytest.approx(floor / 5, abs=1e-12)


def test_relations_need_a_floor() -> None:
    """The task of a client that has not taken part is zero; without a floor its row of the relations would be too."""
    with pytest.raises(UserError, match="floor"):
        make_training("mocha", floor=0.0)
    after = advance(make_training("mocha", floor=1e-9, cohort_size=2), 3)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in after.shared.values())


def test_related_tasks_are_those_that_are_alike() -> None:
    """Two pairs of clients, each pair with one direction: relations are large within pairs and small across."""
    rng = np.random.default_rng(4)
    directions = [
        np.array([3.0, 0, 0, 0]),
        np.array([3.0, 0, 0, 0]),
        np.array([0, 3.0, 0, 0]),
        np.array([0, 3.0, 0, 0]),
    ]
    pairs = []
    for theta in directions:
        x = rng.normal(size=(25, DIMENSION))
        pairs.append((x, x @ theta + 0.1 * rng.normal(size=25)))
    federation = Federation.from_parts(pairs, names=("ann", "bob", "cem", "dan"))
    training = _training("squared_error", federation, penalty=0.1, relations_every=1)
    sigma = advance(training, 15).memory["relations"]
    correlation = sigma / (sigma.diagonal().sqrt()[:, None] * sigma.diagonal().sqrt())
    assert float(torch.stack([correlation[0, 1], correlation[2, 3]]).min()) > 0.8
    assert float(correlation[:2, 2:].abs().max()) < 0.3


def test_the_steps_of_all_clients_at_once_are_safe() -> None:
    """sigma' of the paper: sigma' sum_t Sigma_tt |d_t|^2 bounds the sum over pairs of Sigma_ts <d_t, d_s>."""
    mixer, penalty = Relations(0.7), 0.7
    for seed in range(20):
        sigma = _sigma(5, seed)
        stiffness = mixer._stiffness(sigma)
        bound = torch.diag(1 / stiffness) - sigma / (2 * penalty)
        assert float(torch.linalg.eigvalsh(bound).min()) > -1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_linear_models_are_accepted(loss: str) -> None:
    training = make_training("mocha", loss=loss)
    training.algorithm.check(training.federation.train.inputs[:5])
    with pytest.raises(UserError, match="mocha trains linear models alone"):
        make_training("mocha", model=_network()).algorithm.check(training.federation.train.inputs[:5])


def _network() -> Model:
    return Model(
        lambda: nn.Sequential(nn.Linear(DIMENSION, 6), nn.Tanh(), nn.Linear(6, 1)), LOSSES["logistic"], torch.float64
    )


def test_a_network_without_bends_is_not_linear_in_its_parameters() -> None:
    deep = Model(lambda: nn.Sequential(nn.Linear(DIMENSION, 6), nn.Linear(6, 1)), LOSSES["logistic"], torch.float64)
    with pytest.raises(UserError, match="mocha trains linear models alone"):
        make_training("mocha", model=deep).algorithm.check(make_federation().train.inputs[:5])
    fixed = nn.Sequential(nn.Linear(DIMENSION, 6), nn.Tanh(), nn.Linear(6, 1))
    fixed[0].requires_grad_(False)
    make_training("mocha", model=Model(fixed, LOSSES["logistic"], torch.float64)).algorithm.check(
        make_federation().train.inputs[:5]
    )
