"""How well local solvers solve: the paper's alpha, and FedEM with whatever solver its clients have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from centralised_em import CentralizedEM, EMState
from commands import TINY
from helpers import DIMENSION, LOSSES, SIZES, advance, make_federation, make_model, make_training, scores_of
from scipy.optimize import minimize
from torch import nn

import fedem
from fedem.core.em import log_responsibilities
from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.engines import Batching, OneByOne, Stacked
from fedem.methods import METHODS
from fedem.methods.fedavg import FedAvg
from fedem.methods.fedem import FedEM
from fedem.models import Model
from fedem.report.console import remarks
from fedem.runs.measures import Inexactness, choose_clients, measure_alpha
from fedem.runs.rounds import State
from fedem.solvers import LBFGS, SGD, Newton, Solver, Various

DECAY = 0.01
SOLVERS: dict[str, Solver] = {
    "sgd": SGD(DECAY, momentum=0.9),
    "lbfgs": LBFGS(DECAY, iterations=3),
    "newton": Newton(DECAY, iterations=6),
    "various": Various(DECAY),
}


def _measured(solver: Solver, method: str = "fedem", **settings: object) -> Inexactness:
    training = make_training(method, solver=solver, **settings)
    return measure_alpha(training, advance(training, 1))


def _alpha_by_scipy(state: State, after: State, inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray, m: int):
    """Alpha of component ``m`` of a federation of one client, from the formulas alone."""
    signs = 2 * targets - 1

    def objective(vector: np.ndarray) -> float:
        losses = np.logaddexp(0, -signs * (inputs @ vector[:-1] + vector[-1]))
        return float((weights * losses).mean() + DECAY / 2 * (vector**2).sum())

    def flat(tree: State) -> np.ndarray:
        component = tree.shared["weight"][0, m], tree.shared["bias"][0, m]
        return np.concatenate([leaf.flatten().numpy() for leaf in component])

    start, end = objective(flat(state)), objective(flat(after))
    least = minimize(objective, np.zeros(DIMENSION + 1), method="BFGS", options={"gtol": 1e-9}).fun
    return (end - least) / (start - least)


@pytest.mark.parametrize("solver", [SOLVERS["sgd"], LBFGS(DECAY, iterations=1), Newton(DECAY, iterations=1)], ids=str)
def test_alpha_is_what_scipy_says_it_is(solver: Solver) -> None:
    federation = make_federation(sizes=(40,))
    training = make_training("fedem", federation, solver=solver)
    state = advance(training, 1)
    after, _ = training.step(state)
    inputs, targets = federation.train.client(0)
    losses = training.algorithm.score(tree_index(state.shared, 0), inputs, targets)["losses"]
    posterior = log_responsibilities(losses, state.personal["log_weights"][0]).exp().numpy()
    expected = [
        _alpha_by_scipy(state, after, inputs.numpy(), targets.numpy(), row, m) for m, row in enumerate(posterior)
    ]
    np.testing.assert_allclose(measure_alpha(training, state).alphas[0].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", ["fedem", "fedavg"])
def test_alpha_is_zero_for_an_exact_solver_and_between_for_others(method: str, loss: str) -> None:
    federation = make_federation(loss, sizes=(7, 12))
    exact = _measured(Newton(DECAY, iterations=20), method, federation=federation, loss=loss)
    assert exact.max is not None
    assert 0 <= exact.max <= 1e-6
    for solver in (LBFGS(DECAY, iterations=2), SGD(DECAY)):
        some = _measured(solver, method, federation=federation, loss=loss)
        assert bool(((some.alphas > 0) & (some.alphas < 1)).all())


@pytest.mark.slow
def test_alpha_falls_with_more_iterations() -> None:
    for kind, counts in ((LBFGS, (1, 4, 16)), (Newton, (1, 2, 4))):
        state = advance(make_training(), 1)
        means = [measure_alpha(make_training(solver=kind(DECAY, iterations=count)), state).mean for count in counts]
        assert means == sorted(means, reverse=True)
        assert means[-1] < 1e-3 < means[0] < 1
    passes = [
        measure_alpha(make_training(solver=SGD(DECAY), batching=Batching(0, local_epochs=count)), state).mean
        for count in (1, 4, 16)
    ]
    assert passes == sorted(passes, reverse=True)


def test_alpha_of_various_solvers_is_each_clients_own() -> None:
    federation = make_federation()
    state = advance(make_training("fedem", federation), 1)
    together = measure_alpha(make_training("fedem", federation, solver=Various(DECAY)), state)
    for member, positions in Various(DECAY).among(federation.keys):
        alone = measure_alpha(make_training("fedem", federation, solver=member), state)
        torch.testing.assert_close(together.alphas[positions], alone.alphas[positions], rtol=1e-6, atol=1e-12)


def test_alpha_does_not_depend_on_the_engine_or_on_who_else_is_measured() -> None:
    trainings = [make_training(engine=engine) for engine in (OneByOne(), Stacked())]
    state = advance(trainings[0], 1)
    first, second = (measure_alpha(training, state) for training in trainings)
    torch.testing.assert_close(first.alphas, second.alphas, rtol=1e-8, atol=0)
    some = measure_alpha(trainings[1], state, torch.tensor([1, 3]))
    assert some.clients.tolist() == [1, 3]
    torch.testing.assert_close(some.alphas, first.alphas[[1, 3]], rtol=1e-8, atol=0)


def test_who_has_nothing_to_gain_has_no_alpha() -> None:
    federation = make_federation(sizes=(40,))
    training = make_training("fedavg", federation, solver=Newton(DECAY, iterations=30))
    found = measure_alpha(training, advance(training, 2))
    assert bool(found.alphas.isnan().all())
    assert (found.mean, found.max) == (None, None)
    mixed = Inexactness(torch.arange(2), torch.tensor([[0.5, torch.nan], [0.25, 0.0]]), torch.ones(2, 2))
    assert (mixed.mean, mixed.max) == (0.25, 0.5)


def test_curvatures_of_least_squares_are_those_of_the_samples() -> None:
    """The Hessian of a mean squared error is the mean of x x', wherever it is taken."""
    federation = make_federation("squared_error", sizes=(40, 30))
    found = _measured(SGD(DECAY), "fedavg", federation=federation, loss="squared_error")
    for client, extremes in enumerate(found.curvatures.numpy()):
        inputs = federation.train.client(client).inputs.numpy()
        rows = np.hstack([inputs, np.ones((len(inputs), 1))])
        values = np.linalg.eigvalsh(rows.T @ rows / len(rows)) + DECAY
        np.testing.assert_allclose(extremes, values[[0, -1]], rtol=1e-9)
    least, largest = float(found.curvatures[:, 0].min()), float(found.curvatures[:, 1].max())
    record = found.record(beta2=2.0)
    assert record["alpha_bound"] == pytest.approx(0.5 * (least / largest) ** 4)
    assert found.record(beta2=0.5)["alpha_bound"] == pytest.approx((least / largest) ** 4)  # beta is 1 at least


def test_without_strong_convexity_no_alpha_is_small_enough() -> None:
    """Fewer samples than parameters, and no weight decay: somewhere g is flat."""
    found = _measured(SGD(), "fedavg", federation=make_federation("squared_error", sizes=(3,)), loss="squared_error")
    assert found.condition == np.inf
    assert found.record()["alpha_bound"] == 0


def test_alpha_in_single_precision_is_that_in_double() -> None:
    trainings = [make_training(model=make_model(dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    state = advance(trainings[0], 1)
    double = State(state.round, *({k: v.double() for k, v in tree.items()} for tree in (state.shared, state.personal)))
    first, second = (measure_alpha(t, s) for t, s in zip(trainings, (state, double), strict=True))
    torch.testing.assert_close(first.alphas, second.alphas, rtol=0, atol=1e-3)


def test_few_clients_of_a_cohort_are_asked_and_by_their_names() -> None:
    names = tuple(f"client {k}" for k in range(30))
    federation = make_federation(sizes=(5,) * 30, names=names)
    training = make_training("fedem", federation, cohort_size=25)
    chosen = choose_clients(training, 0)
    assert len(chosen) == 20
    assert set(chosen.tolist()) <= set(training.sample(0).tolist())
    order = torch.arange(29, -1, -1)
    turned = choose_clients(make_training("fedem", federation.take(order), cohort_size=25), 0)
    assert {names[k] for k in chosen} == {names[order[k]] for k in turned}


# But for FedBN: batch normalisations do not do the same in training and in evaluation.
MEASURABLE = [name for name, row in METHODS.items() if row.algorithm in (FedEM, FedAvg) and name != "fedbn"]


@pytest.mark.parametrize("method", MEASURABLE)
def test_every_method_that_trains_so_can_be_measured(method: str) -> None:
    # Dropout that drops nothing is no hindrance.
    between = [nn.Linear(DIMENSION, DIMENSION), nn.Tanh()] if METHODS[method].needs_layers else []
    layers = nn.Sequential(*between, nn.Linear(DIMENSION, 1), nn.Dropout(0.0))
    model = Model(layers, LOSSES["logistic"], torch.float64)
    found = _measured(SGD(DECAY), method, model=model)
    assert found.alphas.shape == (len(SIZES), 3 if method in ("fedem", "dfedem") else 1)
    assert found.max is not None
    assert 0 <= found.max < 1


@pytest.mark.slow
def test_fedem_reaches_about_the_same_loss_with_every_solver() -> None:
    data = fedem.Synthetic(num_clients=5, dimension=4, num_test=10, max_samples=100).make(0)
    model = Model(lambda: nn.Linear(4, 1), LOSSES["logistic"], torch.float64)
    settings = {"model": model, "batching": Batching(16), "num_rounds": 12, "num_components": 2}
    losses = {}
    for name, solver in SOLVERS.items():
        training = make_training("fedem", data.federation, solver=solver, **settings)
        start, end = (scores_of(training, state)["train"].loss for state in (training.init(), advance(training, 12)))
        assert end < start - 0.01
        losses[name] = end
    assert max(losses.values()) - min(losses.values()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("solver", [Newton(0.05, iterations=20), LBFGS(0.05, iterations=60)], ids=str)
def test_solved_to_the_end_one_client_is_centralised_em(solver: Solver) -> None:
    federation = make_federation(sizes=(60,))
    training = make_training("fedem", federation, solver=solver)
    state = training.init()
    em = CentralizedEM(training.algorithm.model, weight_decay=0.05)
    start = EMState(tree_index(state.shared, 0), state.personal["log_weights"])
    for expected in list(em.steps(start, federation.train, 3))[1::2]:
        state, _ = training.step(state)
        for name, leaf in expected.components.items():
            torch.testing.assert_close(state.shared[name][0], leaf, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_run_records_alpha_when_it_is_due(tmp_path: Path) -> None:
    federation = make_federation(sizes=(7, 5))
    settings = {"rounds": 3, "measure_alpha_every": 2, "dtype": "float64", "batch_size": 4}
    result = fedem.train(federation, solver="lbfgs", iterations=2, out=tmp_path / "run", **settings)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "alpha_mean" in line] == [2, 3]
    assert all(0 < line["alpha_mean"] <= line["alpha_max"] for line in lines if "alpha_mean" in line)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["alpha_max"] == lines[-1]["alpha_max"] == result.summary["alpha_max"]
    measured = [line for line in lines if "alpha_mean" in line]
    met = sum(line["alpha_max"] < line["alpha_bound"] for line in measured)
    assert all(0 <= line["alpha_bound"] <= 1 for line in measured)
    assert (summary["alpha_rounds"], summary["alpha_rounds_within_bound"]) == (2, met)
    assert summary["alpha_bound"] == lines[-1]["alpha_bound"]
    without = fedem.train(federation, solver="lbfgs", iterations=2, **settings | {"measure_alpha_every": 0})
    assert "alpha_mean" not in without.summary
    assert without.summary["train_loss"] == result.summary["train_loss"]


def test_balanced_fedem_is_refused_before_work_starts(run, tmp_path: Path) -> None:
    arguments = ["--method", "bfedem", "--set", "run.measure_alpha_every=1", *TINY]
    code, _, err = run("train", "--data", "synthetic", *arguments, "--out", tmp_path / "run")
    assert code == 2
    assert "Alpha can't be measured for BalancedFedEM; allowed, since" in " ".join(err.split())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_exact_solver_is_within_the_bound_and_a_short_one_is_not(tmp_path: Path) -> None:
    federation = make_federation(sizes=(40, 30))
    settings = {"rounds": 2, "measure_alpha_every": 1, "diagnose_every": 1, "dtype": "float64", "weight_decay": 1.0}
    exact = fedem.train(federation, solver="newton", iterations=20, **settings).summary
    short = fedem.train(federation, solver="newton", iterations=1, **settings | {"weight_decay": 1e-3}).summary
    assert (exact["alpha_rounds"], exact["alpha_rounds_within_bound"]) == (2, 2)
    assert short["alpha_rounds_within_bound"] == 0
    (said,) = (line for line in remarks(short) if line.startswith("Local solutions"))
    assert "in 0 of 2 measured rounds" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "fedprox"}, "can't be measured for FedProx; allowed"),
        ({"model": lambda: nn.Sequential(nn.Linear(DIMENSION, 400), nn.Linear(400, 1))}, "of 2401 trained numbers"),
        ({"model": lambda: nn.Sequential(nn.Linear(DIMENSION, 1), nn.Dropout())}, "Dropout"),
        ({"model": lambda: nn.Sequential(nn.BatchNorm1d(DIMENSION), nn.Linear(DIMENSION, 1))}, "BatchNorm1d"),
    ],
)
def test_what_cant_be_measured_is_refused_before_work_starts(settings: dict[str, object], message: str) -> None:
    seen: list[object] = []
    options = {"rounds": 1, "measure_alpha_every": 1, "listener": seen.append} | settings
    with pytest.raises(UserError, match=message):
        fedem.train(make_federation(), **options)
    assert not seen
