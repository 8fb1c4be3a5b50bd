"""Solvers against torch.optim and scikit-learn; schedules against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import DIMENSION, LOSSES, advance, distance, make_federation, make_model, make_training
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.func import vmap

from fedem.core.errors import UserError
from fedem.core.tree import tree_index, tree_stack
from fedem.engines import Batching, OneByOne
from fedem.models import Model
from fedem.solvers import LBFGS, SGD, Adam, Newton, Solver, Various
from fedem.solvers.schedules import Constant, Cosine, InverseSqrt, Step

ONE = torch.tensor(1.0)


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


def _descend(solver: Solver, objective, parameters, num_steps: int):
    """Parameters after each step, the start first."""
    memory, path = solver.init(parameters), [parameters]
    for _ in range(num_steps):
        parameters, memory, _ = solver.step(objective, parameters, memory, ONE)
        path.append(parameters)
    return path


def _quadratic(dimension: int = 12, scale: float = 1.0):
    """An ill-conditioned quadratic and its minimiser."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
    matrix = torch.from_numpy(basis * np.logspace(-2, 1, dimension) @ basis.T)
    shift = torch.from_numpy(rng.normal(size=dimension))

    def objective(tree):
        vector = torch.cat([tree["a"], tree["b"].flatten()])
        return scale * (vector @ matrix @ vector / 2 - shift @ vector), {}

    start = {"a": torch.ones(4, dtype=torch.float64), "b": torch.zeros(dimension // 2 - 2, 2, dtype=torch.float64)}
    return objective, start, torch.linalg.solve(matrix, shift)


def _flat(tree) -> torch.Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.values()])


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_lbfgs_solves_a_quadratic_whatever_its_scale(scale: float) -> None:
    objective, start, solution = _quadratic(scale=scale)
    torch.testing.assert_close(_flat(_descend(LBFGS(), objective, start, 80)[-1]), solution, rtol=0, atol=1e-5)


def test_lbfgs_finds_what_scipy_finds_for_logistic_regression() -> None:
    federation, model = make_federation(sizes=(80,)), make_model()
    inputs, targets = federation.train.client(0)

    def objective(tree):
        return model.losses(tree, inputs, targets).mean(), {}

    x, signs = inputs.numpy(), 2 * targets.numpy() - 1

    def reference(vector):
        margins = signs * (x @ vector[:-1] + vector[-1])
        return np.logaddexp(0, -margins).mean() + 0.05 * (vector**2).sum()

    found = minimize(reference, np.zeros(DIMENSION + 1), method="BFGS", options={"gtol": 1e-10}).x
    after = _descend(LBFGS(0.1), objective, model.init(0), 40)[-1]
    np.testing.assert_allclose(after["weight"].flatten().numpy(), found[:-1], atol=1e-6)
    np.testing.assert_allclose(after["bias"].numpy(), found[-1:], atol=1e-6)


def test_lbfgs_finds_the_minimum_of_a_valley_that_is_not_convex() -> None:
    def rosenbrock(tree):
        a = tree["a"]
        return (100 * (a[1:] - a[:-1] ** 2) ** 2 + (1 - a[:-1]) ** 2).sum(), {}

    start = {"a": torch.full((6,), -1.0, dtype=torch.float64)}
    path = _descend(LBFGS(), rosenbrock, start, 80)
    torch.testing.assert_close(path[-1]["a"], torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [LBFGS(0.1), LBFGS(0.1, history=1), LBFGS(0.1, num_trials=4), Newton(0.1)], ids=str)
def test_solvers_with_trial_steps_never_climb_beyond_rounding(solver: Solver, dtype: torch.dtype) -> None:
    def wavy(tree):
        return torch.cos(3 * tree["a"]).sum() + (tree["a"] ** 4).sum() + tree["a"].prod(), {}

    start = {"a": torch.linspace(-2, 1.5, 7, dtype=dtype)}
    path = _descend(solver, wavy, start, 30)
    values = torch.stack([wavy(tree)[0] + solver.weight_decay / 2 * tree["a"].square().sum() for tree in path])
    assert bool((values.diff() <= 16 * torch.finfo(dtype).eps * values[:-1].abs()).all())
    assert bool(values[-1] < values[0])


@pytest.mark.parametrize("solver", [LBFGS(0.1), Newton(0.1)], ids=str)
def test_solvers_with_trial_steps_are_the_same_alone_and_under_vmap(solver: Solver) -> None:
    torch.manual_seed(0)
    centres = torch.randn(5, 3, dtype=torch.float64)
    starts = {"a": 3 * torch.randn(5, 3, dtype=torch.float64)}

    def run(parameters, centre):
        def objective(tree):
            return ((tree["a"] - centre) ** 4).sum() + torch.logsumexp(tree["a"], 0), {}

        memory = solver.init(parameters)
        for _ in range(6):
            parameters, memory, _ = solver.step(objective, parameters, memory, ONE)
        return parameters, memory

    together, memory = vmap(run)(starts, centres)
    alone = [run(tree_index(starts, k), centres[k]) for k in range(5)]
    torch.testing.assert_close(together, tree_stack([tree for tree, _ in alone]), rtol=0, atol=1e-10)
    shapes = {name: leaf.shape for name, leaf in solver.init(tree_index(starts, 0)).items()}
    assert {name: leaf.shape[1:] for name, leaf in memory.items()} == shapes


def test_lbfgs_goes_on_where_even_its_shortest_trial_is_too_long() -> None:
    def steep(tree):
        return 1e12 * (tree["a"] - 1e-7).square().sum(), {}

    path = _descend(LBFGS(num_trials=4), steep, {"a": torch.zeros(2, dtype=torch.float64)}, 30)
    torch.testing.assert_close(path[-1]["a"], torch.full((2,), 1e-7, dtype=torch.float64), rtol=1e-6, atol=0)


def test_lbfgs_learns_nothing_from_steps_without_curvature() -> None:
    def straight(tree):
        return tree["a"].sum(), {}

    solver, parameters = LBFGS(), {"a": torch.zeros(3, dtype=torch.float64)}
    memory = solver.init(parameters)
    for _ in range(5):
        parameters, memory, _ = solver.step(straight, parameters, memory, ONE)
    assert not bool(memory["inverses"].any())
    # The longest trial, 4, along the unit vector, each time.
    torch.testing.assert_close(parameters["a"], torch.full((3,), -20 / math.sqrt(3), dtype=torch.float64))


def test_lbfgs_trains_a_module_that_changes_its_buffers() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(DIMENSION, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    model = Model(build, LOSSES["logistic"], torch.float64)
    federation = make_federation(sizes=(8, 20))
    training = make_training("fedavg", federation, model=model, engine=OneByOne(), solver=LBFGS(iterations=4))
    before, after = training.init(), advance(training, 1)
    assert not torch.equal(before.shared["1.running_mean"], after.shared["1.running_mean"])


@pytest.mark.parametrize("kind", [Newton, LBFGS])
def test_iterations_are_steps_over_all_samples_whatever_the_batches(kind: type[Solver]) -> None:
    whole = advance(make_training(solver=kind(0.1), batching=Batching(0, local_steps=3)))
    for batching in (Batching(1, local_epochs=2), Batching(4, local_steps=7)):
        assert distance(advance(make_training(solver=kind(0.1, iterations=3), batching=batching)), whole) < 1e-12


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
        (lambda: LBFGS(history=0), "LBFGS.history is 0; allowed: at least 1"),
        (lambda: Newton(iterations=-1), "Newton.iterations is -1; allowed: at least 0"),
        (lambda: Various(members="sgd,lbgfs"), "'lbgfs'; allowed: adam, lbfgs, newton, sgd. Did you mean 'lbfgs'"),
        (lambda: Various(members="various"), "Unknown member of Various.members 'various'"),
        (lambda: Various(members=""), "Unknown member of Various.members ''"),
        (lambda: Constant(-0.1), "Constant.learning_rate is -0.1; allowed: at least 0"),
        (lambda: Constant(float("nan")), "finite"),
    ],
)
def test_bad_hyper_parameters_are_refused(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
