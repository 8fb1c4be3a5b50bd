"""The methods beside FedEM: limits in which they must agree, closed forms, and their formulas worked out anew."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from helpers import LOSSES, advance, make_federation, make_model, make_training, scores_of
from torch import Tensor
from torch.func import grad

from fedem.algorithms.apfl import APFL
from fedem.algorithms.base import Batch
from fedem.algorithms.fedfomo import FedFOMO
from fedem.algorithms.perfedavg import PerFedAvg
from fedem.engines import Batching, Stacked
from fedem.federation import Federation
from fedem.models import Linear, Model
from fedem.models.losses import SquaredError
from fedem.randomness import COMPONENTS, MIXER, derive
from fedem.rounds import State, Training
from fedem.schedules import Constant
from fedem.solvers import SGD, Newton
from fedem.tree import Tree, tree_flat, tree_map, tree_repeat, tree_stack

every_loss = pytest.mark.parametrize("loss", LOSSES)
WHOLE = Batching(0, local_steps=4)


def _same(first: Tree, second: Tree, tolerance: float = 1e-12) -> None:
    assert first.keys() == second.keys()
    for name, leaf in second.items():
        torch.testing.assert_close(first[name], leaf, rtol=0, atol=tolerance)


def _moved(first: Tree, second: Tree) -> float:
    return float((tree_flat(first) - tree_flat(second)).abs().max())


# FedAvg as a limit.


@cache
def _fedavgs(cohort_size: int) -> State:
    return advance(make_training("fedavg", cohort_size=cohort_size))


@pytest.mark.parametrize("cohort_size", [5, 2])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedprox", {"mu": 0.0}),
        ("qffl", {"q": 0.0}),
        ("clustered", {"mean_tolerance": 1e-300}),
        ("clustered", {"member_tolerance": 1e300}),
        ("clustered", {"min_members": 3}),
        ("apfl", {"alpha": 0.0, "adaptive": False}),
        ("apfl", {"alpha": 0.3}),
        ("ditto", {"pull": 2.0}),
        ("perfedavg", {"inner_rate": 0.0, "independent": False}),
        ("perfedavg", {"inner_rate": 0.0, "independent": False, "hessian_free": True}),
        ("fedavg+", {}),
    ],
    ids=str,
)
def test_methods_whose_shared_model_is_fedavgs(method: str, settings: dict[str, object], cohort_size: int) -> None:
    other = advance(make_training(method, cohort_size=cohort_size, **settings))
    _same(other.shared, _fedavgs(cohort_size).shared)


@every_loss
def test_ifca_with_one_cluster_is_fedavg(loss: str) -> None:
    ifca, fedavg = make_training("ifca", loss=loss, num_clusters=1), make_training("fedavg", loss=loss)
    # The same initial model: IFCA derives one seed a cluster.
    seed = int(derive(int(derive(fedavg.seed, COMPONENTS)), 0))
    start = State(0, tree_repeat(fedavg.algorithm.init_shared(seed), 1), {})
    first, second = advance(ifca), advance(fedavg, state=start)
    _same(tree_map(lambda leaf: leaf[:, 0], first.shared), second.shared)


def test_apfl_without_own_share_predicts_with_fedavgs_model() -> None:
    apfl, fedavg = make_training("apfl", alpha=0.0, adaptive=False), make_training("fedavg")
    first, second = (scores_of(training, advance(training)) for training in (apfl, fedavg))
    torch.testing.assert_close(first["test"].losses, second["test"].losses, rtol=0, atol=1e-12)


def test_scaffold_is_fedavg_in_its_first_round() -> None:
    for cohort_size in (5, 2):
        first, second = (advance(make_training(m, cohort_size=cohort_size), 1) for m in ("scaffold", "fedavg"))
        for name, leaf in second.shared.items():
            torch.testing.assert_close(first.shared[f"model/{name}"], leaf, rtol=0, atol=1e-12)


@every_loss
def test_scaffold_with_one_client_is_fedavg(loss: str) -> None:
    federation = make_federation(loss, sizes=(13,))
    solver = SGD(0.01)
    first, second = (advance(make_training(m, federation, loss=loss, solver=solver), 5) for m in ("scaffold", "fedavg"))
    for name, leaf in second.shared.items():
        torch.testing.assert_close(first.shared[f"model/{name}"], leaf, rtol=0, atol=1e-12)
    assert all(float(leaf.abs().max()) > 1e-3 for leaf in first.personal.values())  # the controls are there


def test_afl_that_does_not_climb_is_fedavg_with_clients_of_one_size() -> None:
    federation = make_federation(sizes=(8, 8, 8))
    for cohort_size in (3, 2):
        first, second = (
            advance(make_training(method, federation, cohort_size=cohort_size, **settings))
            for method, settings in (("afl", {"climb_rate": 0.0}), ("fedavg", {}))
        )
        _same(first.shared, second.shared)


@pytest.mark.parametrize("cohort_size", [3, 2])
def test_pfedhn_whose_network_says_nothing_is_fedavg(cohort_size: int) -> None:
    """The base is a model, and a step of 1 along the mean change is the mean; zero layers pass no gradient on."""
    federation = make_federation(sizes=(8, 3, 12))
    training = make_training("pfedhn", federation, server_rate=1.0, cohort_size=cohort_size)
    start = training.init()
    silent = State(0, start.shared, start.personal, tree_map(torch.zeros_like, start.memory))
    first = advance(training, state=silent)
    second = advance(make_training("fedavg", federation, cohort_size=cohort_size))
    _same(first.shared, second.shared)


def test_fedu_that_pulls_all_the_way_is_fedavg_with_clients_of_one_size() -> None:
    federation = make_federation(sizes=(8, 8, 8))
    first = advance(make_training("fedu", federation, penalty=1e9))
    second = advance(make_training("fedavg", federation))
    for name, leaf in second.shared.items():
        torch.testing.assert_close(first.shared[name], leaf.expand_as(first.shared[name]), rtol=0, atol=1e-12)


# Local as a limit.


@every_loss
def test_apfl_with_its_own_share_alone_is_local(loss: str) -> None:
    apfl = advance(make_training("apfl", loss=loss, alpha=1.0, adaptive=False))
    local = advance(make_training("local", loss=loss))
    for name, leaf in local.shared.items():
        torch.testing.assert_close(apfl.personal[f"own/{name}"], leaf, rtol=0, atol=1e-12)


@every_loss
def test_dittos_own_models_without_a_pull_are_locals(loss: str) -> None:
    ditto, local = advance(make_training("ditto", loss=loss, pull=0.0)), advance(make_training("local", loss=loss))
    _same(ditto.personal, local.shared)


@pytest.mark.parametrize("cohort_size", [5, 2])
def test_fedu_without_a_penalty_is_local(cohort_size: int) -> None:
    fedu, local = (
        advance(make_training(method, cohort_size=cohort_size, **settings))
        for method, settings in (("fedu", {"penalty": 0.0}), ("local", {}))
    )
    _same(fedu.shared, local.shared)


@pytest.mark.parametrize("cohort_size", [5, 2])
def test_l2sgd_without_a_penalty_is_local_with_as_many_steps(cohort_size: int) -> None:
    l2sgd = make_training("l2sgd", penalty=0.0, cohort_size=cohort_size)
    local = make_training("local", cohort_size=cohort_size)
    state = local.init()
    lengths = []
    for index in range(4):
        steps = l2sgd.mixer.num_steps(int(derive(l2sgd.seed, MIXER, index)))
        assert steps is not None
        lengths.append(steps)
        state, _ = replace(local, batching=Batching(4, local_steps=steps)).step(state)
    assert len(set(lengths)) > 1
    _same(advance(l2sgd, 4).shared, state.shared)


def test_fedfomo_alone_is_local_without_the_held_out_samples() -> None:
    """One client has no candidates; the whole batch without the held-out samples is the batch of the others."""
    federation = make_federation(sizes=(30,))
    fomo = make_training("fedfomo", federation, batching=WHOLE)
    state = fomo.init()
    inputs, targets = federation.train.client(0)
    _, samples = fomo.algorithm.begin(
        state.shared,
        tree_map(lambda leaf: leaf[0], state.personal),
        fomo.algorithm.score(state.shared, inputs, targets),
        torch.ones(30, dtype=torch.bool),
    )
    used = samples["used"] > 0
    assert 0 < int((~used).sum()) < 15
    fewer = Federation.from_parts([(inputs[used], targets[used])], names=federation.names)
    _same(advance(fomo).shared, advance(make_training("local", fewer, batching=WHOLE)).shared)


# Least squares, in closed form.


def _design(federation: Federation, position: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's inputs after a column of ones, and targets; parameters are then [bias, weight]."""
    inputs, targets = federation.train.client(position)
    return np.hstack([np.ones((len(targets), 1)), inputs.numpy()]), targets.numpy()


def _vector(tree: Tree) -> np.ndarray:
    return tree_flat(tree, 1).numpy()


def _proximal(federation: Federation, position: int, centre: np.ndarray, pull: float) -> np.ndarray:
    """argmin of the client's mean squared error / 2 + pull/2 |w - centre|^2."""
    a, y = _design(federation, position)
    return np.linalg.solve(a.T @ a / len(y) + pull * np.eye(a.shape[1]), a.T @ y / len(y) + pull * centre)


def _slope(federation: Federation, position: int, point: np.ndarray) -> np.ndarray:
    a, y = _design(federation, position)
    return a.T @ (a @ point - y) / len(y)


def _loss(federation: Federation, position: int, point: np.ndarray) -> float:
    a, y = _design(federation, position)
    return float(((a @ point - y) ** 2).mean() / 2 + np.log(2 * np.pi) / 2)


def _shares(federation: Federation) -> np.ndarray:
    return federation.train.sizes.numpy() / len(federation.train)


def _exact(method: str, federation: Federation, **settings: object) -> Training:
    return make_training(
        method, federation, loss="squared_error", solver=Newton(), batching=Batching(0, local_steps=2), **settings
    )


@pytest.mark.parametrize("mu", [0.05, 1.0, 40.0])
def test_fedprox_with_an_exact_solver_solves_ridge_regression_around_what_it_received(mu: float) -> None:
    federation = make_federation("squared_error")
    training = _exact("fedprox", federation, mu=mu)
    state = training.init()
    for _ in range(3):
        u = _vector(state.shared)[0]
        expected = _shares(federation) @ [_proximal(federation, t, u, mu) for t in range(5)]
        state, _ = training.step(state)
        np.testing.assert_allclose(_vector(state.shared)[0], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("pull", [0.05, 1.0, 40.0])
def test_dittos_own_models_solve_ridge_regression_around_what_they_received(pull: float) -> None:
    federation = make_federation("squared_error", sizes=(7, 12, 30))
    training = _exact("ditto", federation, pull=pull)
    state = training.init()
    for _ in range(3):
        u = _vector(state.shared)[0]
        state, _ = training.step(state)
        np.testing.assert_allclose(
            _vector(state.personal), [_proximal(federation, t, u, pull) for t in range(3)], rtol=0, atol=1e-8
        )
        # The shared model is trained without the pull.
        shared = _shares(federation) @ [_proximal(federation, t, u, 0.0) for t in range(3)]
        np.testing.assert_allclose(_vector(state.shared)[0], shared, rtol=0, atol=1e-7)


def test_dittos_own_models_under_an_infinite_pull_are_what_they_received() -> None:
    federation = make_federation()
    training = make_training("ditto", federation, solver=Newton(), batching=WHOLE, pull=1e6)
    before = advance(training, 1)
    after, _ = training.step(before)
    for name, leaf in after.personal.items():
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
    u = _vector(state.shared)[0]
    for _ in range(3):
        ends, own = [], []
        for position in range(5):
            w = u
            for _ in range(num_steps):
                theta = _proximal(federation, position, w, pull)
                w = w - rate * pull * (w - theta)
            ends.append(w)
            own.append(theta)
        u = (1 - server_rate) * u + server_rate * (_shares(federation) @ ends)
        state, _ = training.step(state)
        np.testing.assert_allclose(_vector(state.shared)[0], u, rtol=0, atol=1e-8)
        np.testing.assert_allclose(_vector(state.personal), own, rtol=0, atol=1e-8)


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
    w = _vector(state.shared)[0]
    theta = w  # and from then on each batch begins where the last one ended
    for _ in range(2):
        for _ in range(3):
            theta = theta - inner_rate * (_slope(federation, 0, theta) + pull * (theta - w))
        w = w - rate * pull * (w - theta)
    after, _ = training.step(state)
    np.testing.assert_allclose(_vector(after.shared)[0], w, rtol=0, atol=1e-13)
    np.testing.assert_allclose(_vector(after.personal)[0], theta, rtol=0, atol=1e-13)


def test_pfedme_under_an_infinite_pull_is_fedavg() -> None:
    """The envelope's gradient pull (w - v) tends to f's as the pull grows, and v to w."""
    federation, rate = make_federation(), 1e-6
    settings = {"batching": WHOLE, "schedule": Constant(rate)}
    pfedme = make_training("pfedme", federation, solver=Newton(), pull=1e4, inner_steps=3, **settings)
    fedavg = make_training("fedavg", federation, solver=SGD(), **settings)
    start = fedavg.init()
    first, second = advance(pfedme, 3), advance(fedavg, 3)
    moved = _moved(second.shared, start.shared)
    assert _moved(first.shared, second.shared) < 1e-3 * moved
    for name, leaf in first.personal.items():
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
    _same(after.shared, after.personal)


# Fairness.


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
def test_qffls_server_takes_the_papers_step(q: float) -> None:
    federation, rate = make_federation("squared_error"), 0.05
    training = make_training(
        "qffl", federation, loss="squared_error", solver=SGD(), batching=WHOLE, schedule=Constant(rate), q=q
    )
    state = training.init()
    u = _vector(state.shared)[0]
    for _ in range(3):
        pushes, curvatures = [], []
        for position in range(5):
            w = u
            for _ in range(4):
                w = w - rate * _slope(federation, position, w)
            loss, change = _loss(federation, position, u), (u - w) / rate
            pushes.append(loss**q * change)
            curvatures.append(q * loss ** (q - 1) * change @ change + loss**q / rate)
        u = u - _shares(federation) @ pushes / (_shares(federation) @ curvatures)
        state, _ = training.step(state)
        np.testing.assert_allclose(_vector(state.shared)[0], u, rtol=0, atol=1e-12)


def _conflict() -> Federation:
    """Two clients who want opposite things; the second has more to lose and fewer samples."""
    rng = np.random.default_rng(5)
    pairs = []
    for size, scale in ((40, 1.0), (20, -3.0)):
        x = rng.normal(size=(size, 4))
        pairs.append((x, x @ np.array([scale, scale, 0.0, 0.0]) + 0.1 * rng.normal(size=size)))
    return Federation.from_parts(pairs, pairs, pairs, ("ann", "bob"))


def _final_losses(method: str, rounds: int, **settings: object) -> Tensor:
    training = make_training(
        method,
        _conflict(),
        loss="squared_error",
        solver=SGD(),
        batching=Batching(0),
        schedule=Constant(0.1),
        **settings,
    )
    return scores_of(training, advance(training, rounds))["train"].losses


def test_afl_equalises_the_losses_of_clients_in_conflict() -> None:
    fedavg, afl = _final_losses("fedavg", 40), _final_losses("afl", 40, climb_rate=0.04)
    assert float(afl.max()) < float(fedavg.max()) - 0.5
    assert float(afl.max() - afl.min()) < 0.3 * float(fedavg.max() - fedavg.min())


def test_qffl_lowers_the_largest_loss_of_clients_in_conflict() -> None:
    by_q = [float(_final_losses("qffl", 40, q=q).max()) for q in (0.0, 1.0, 4.0)]
    assert by_q[0] > by_q[1] + 0.1 > by_q[2] + 0.2


def test_afls_weights_move_towards_the_worst_client() -> None:
    training = make_training(
        "afl", _conflict(), loss="squared_error", solver=SGD(), batching=Batching(0), climb_rate=0.01
    )
    state = training.init()
    assert state.memory["weights"].tolist() == [0.5, 0.5]
    losses = scores_of(training, state)["train"].losses
    after, _ = training.step(state)
    # Projected back, each weight gains what its loss exceeds the mean by.
    expected = 0.5 + 0.01 * (losses - losses.mean())
    torch.testing.assert_close(after.memory["weights"], expected, rtol=0, atol=1e-12)
    assert float(after.memory["weights"][1]) > 0.51


# SCAFFOLD.


def _quadratic_problem(sizes: tuple[int, ...]) -> tuple[Federation, np.ndarray]:
    """Clients with different Hessians, all well conditioned, and different optima; and the optimum of all samples."""
    rng = np.random.default_rng(2)
    pairs = []
    for index, size in enumerate(sizes):
        design, _ = np.linalg.qr(np.hstack([np.ones((size, 1)), rng.normal(size=(size, 4))]))
        x = design[:, 1:] * np.sqrt(size) * np.where(np.arange(4) == index % 4, 1.5, 1.0)
        pairs.append((x, x @ (3 * rng.normal(size=4)) + rng.normal() + 0.1 * rng.normal(size=size)))
    federation = Federation.from_parts(pairs, names=[f"client {index}" for index in range(len(sizes))])
    designs = [_design(federation, position) for position in range(len(sizes))]
    a, y = (np.concatenate(parts) for parts in zip(*designs, strict=True))
    return federation, np.linalg.lstsq(a, y, rcond=None)[0]


def _error(method: str, sizes: tuple[int, ...], rate: float = 0.15, **settings: object) -> float:
    """How far from the optimum a method is after 40 rounds with several local steps over whole batches."""
    federation, optimum = _quadratic_problem(sizes)
    engine, batching = Stacked(record_after=4), Batching(0, local_steps=4)
    common = {"loss": "squared_error", "engine": engine, "batching": batching, "schedule": Constant(rate)}
    shared = advance(make_training(method, federation, **(common | {"solver": SGD()} | settings)), 40).shared
    model = {name.removeprefix("model/"): leaf for name, leaf in shared.items() if not name.startswith("control/")}
    return float(np.abs(_vector(model)[0] - optimum).max())


def test_scaffold_reaches_the_optimum_that_fedavg_misses() -> None:
    assert _error("fedavg", (10, 20, 30)) > 0.1
    assert _error("scaffold", (10, 20, 30)) < 1e-9


def test_scaffold_reaches_the_optimum_with_momentum() -> None:
    assert _error("scaffold", (10, 20, 30), 0.07, solver=SGD(momentum=0.5)) < 1e-6


def test_scaffold_reaches_the_optimum_with_shorter_steps_of_the_server() -> None:
    assert _error("scaffold", (10, 20, 30), server_rate=0.6) < 1e-3


def test_scaffold_reaches_the_optimum_with_sampled_clients_of_one_size() -> None:
    assert _error("fedavg", (20, 20, 20), cohort_size=2) > 0.1
    assert _error("scaffold", (20, 20, 20), cohort_size=2) < 1e-6


def test_scaffold_reaches_the_optimum_with_sampled_clients_of_several_sizes() -> None:
    """The server's control must stay the mean of the clients', by the same weights as the models'."""
    assert _error("scaffold", (10, 20, 30), cohort_size=2) < 1e-6


@pytest.mark.parametrize("cohort_size", [5, 2])
def test_scaffolds_control_is_the_mean_of_the_clients_controls(cohort_size: int) -> None:
    federation = make_federation()
    training = make_training("scaffold", federation, cohort_size=cohort_size)
    state = advance(training, 4)
    shares = federation.train.sizes.double() / len(federation.train)
    for name, leaf in state.personal.items():
        mean = torch.tensordot(shares, leaf, 1)
        torch.testing.assert_close(state.shared[f"control/{name}"][0], mean, rtol=0, atol=1e-12)


def test_scaffolds_controls_are_the_mean_gradients_of_the_local_steps() -> None:
    federation, rate = make_federation("squared_error", sizes=(9, 14)), 0.05
    training = make_training(
        "scaffold", federation, loss="squared_error", solver=SGD(), batching=WHOLE, schedule=Constant(rate)
    )
    state = training.init()
    for _ in range(3):
        model = _vector({name: state.shared[f"model/{name}"] for name in ("bias", "weight")})[0]
        control = _vector({name: state.shared[f"control/{name}"] for name in ("bias", "weight")})[0]
        expected = []
        for position in range(2):
            w, slopes = model, []
            for _ in range(4):
                slopes.append(_slope(federation, position, w))
                w = w - rate * (slopes[-1] + control - _vector(state.personal)[position])
            expected.append(np.mean(slopes, axis=0))
        state, _ = training.step(state)
        np.testing.assert_allclose(_vector(state.personal), expected, rtol=0, atol=1e-11)


# Per-FedAvg.


def _step(algorithm: PerFedAvg | APFL | FedFOMO, shared: Tree, personal: Tree, data: tuple[Tensor, Tensor]) -> Tree:
    """One step over the whole of ``data`` with a learning rate of 1; returns the trained copy of u."""
    mask = torch.ones(len(data[1]), dtype=torch.bool)
    local, samples = algorithm.begin(shared, personal, algorithm.score(shared, *data), mask)
    batch = Batch(*data, mask / mask.double().sum(), samples)
    return algorithm.step(local, batch, torch.ones((), dtype=torch.float64)).shared


@pytest.mark.parametrize("loss", LOSSES)
def test_per_fedavgs_gradient_is_that_of_the_loss_after_a_step(loss: str) -> None:
    model = make_model(loss)
    data = make_federation(loss, sizes=(14,)).train.client(0)
    start, alpha = model.init(3), 0.3

    def value(leaves: Tree) -> Tensor:
        return model.losses(leaves, *data).mean()

    def adapted(leaves: Tree) -> Tree:
        return tree_map(lambda w, g: w - alpha * g, leaves, grad(value)(leaves))

    exact = grad(lambda leaves: value(adapted(leaves)))(start)
    first_order = grad(value)(adapted(start))
    full = PerFedAvg(model, SGD(), inner_rate=alpha, hessian_free=True, difference=1e-4, independent=False)
    cheap = PerFedAvg(model, SGD(), inner_rate=alpha, hessian_free=False, independent=False)
    for name in start:
        taken = start[name] - _step(full, start, {}, data)[name]
        torch.testing.assert_close(taken, exact[name], rtol=0, atol=1e-7)
        taken = start[name] - _step(cheap, start, {}, data)[name]
        torch.testing.assert_close(taken, first_order[name], rtol=0, atol=1e-13)
    assert _moved(exact, first_order) > 1e-3


def test_per_fedavg_takes_its_two_gradients_over_different_halves() -> None:
    model = make_model()
    x, y = make_federation(sizes=(9,)).train.client(0)
    start, alpha = model.init(3), 0.3

    def value(leaves: Tree, half: int) -> Tensor:
        return model.losses(leaves, x[half::2], y[half::2]).mean()

    inner = grad(value)(start, 0)
    outer = grad(value)(tree_map(lambda w, g: w - alpha * g, start, inner), 1)
    after = _step(PerFedAvg(model, SGD(), inner_rate=alpha), start, {}, (x, y))
    for name, leaf in outer.items():
        torch.testing.assert_close(start[name] - after[name], leaf, rtol=0, atol=1e-13)


def test_per_fedavg_takes_a_single_sample_for_both_gradients() -> None:
    model = make_model()
    data = make_federation(sizes=(1,)).train.client(0)
    start = model.init(3)
    taken = [_step(PerFedAvg(model, SGD(), independent=independent), start, {}, data) for independent in (True, False)]
    _same(*taken, tolerance=1e-15)
    assert _moved(taken[0], start) > 1e-3


# APFL.


@pytest.mark.parametrize("alpha", [0.2, 0.7])
def test_apfls_share_follows_its_derivative(alpha: float) -> None:
    model = make_model()
    x, y = make_federation(sizes=(14,)).train.client(0)
    shared, own = model.init(1), model.init(2)
    algorithm = APFL(model, SGD(), alpha=alpha)
    personal = {f"own/{name}": leaf for name, leaf in own.items()} | {"alpha": torch.tensor(alpha, dtype=torch.float64)}
    mask = torch.ones(14, dtype=torch.bool)
    batch = Batch(x, y, mask.double() / 14, {})
    rate = torch.tensor(0.1, dtype=torch.float64)
    local, _ = algorithm.begin(shared, personal, {}, mask)
    once = algorithm.step(local, batch, rate)

    def value(share: float) -> float:
        return float(model.losses(tree_map(lambda v, w: share * v + (1 - share) * w, own, shared), x, y).mean())

    slope = (value(alpha + 1e-5) - value(alpha - 1e-5)) / 2e-5
    assert abs(slope) > 1e-2
    assert float(once.personal["alpha"]) == pytest.approx(alpha - 0.1 * slope, abs=1e-9)
    # Once a round, and never out of [0, 1].
    twice = algorithm.step(once, batch, rate)
    assert torch.equal(twice.personal["alpha"], once.personal["alpha"])
    assert not torch.equal(twice.personal["own/weight"], once.personal["own/weight"])
    far = algorithm.step(local, batch, torch.tensor(1e6, dtype=torch.float64)).personal["alpha"]
    assert float(far) == (0.0 if slope > 0 else 1.0)


def test_apfls_own_model_descends_the_blends_loss() -> None:
    model, alpha = make_model(), 0.3
    x, y = make_federation(sizes=(14,)).train.client(0)
    shared, own = model.init(1), model.init(2)
    algorithm = APFL(model, SGD(), alpha=alpha, adaptive=False)
    personal = {f"own/{name}": leaf for name, leaf in own.items()} | {"alpha": torch.tensor(alpha, dtype=torch.float64)}
    mask = torch.ones(14, dtype=torch.bool)
    local, _ = algorithm.begin(shared, personal, {}, mask)
    after = algorithm.step(local, Batch(x, y, mask.double() / 14, {}), torch.tensor(0.1, dtype=torch.float64))

    def value(leaves: Tree) -> Tensor:
        return model.losses(tree_map(lambda v, w: alpha * v + (1 - alpha) * w, leaves, shared), x, y).mean()

    slope = grad(value)(own)
    for name, leaf in slope.items():
        torch.testing.assert_close(after.personal[f"own/{name}"], own[name] - 0.1 * leaf, rtol=0, atol=1e-14)


def test_apfls_share_grows_where_clients_are_in_conflict() -> None:
    settings = {"loss": "squared_error", "solver": SGD(), "batching": WHOLE, "schedule": Constant(0.05)}
    state = advance(make_training("apfl", _conflict(), alpha=0.5, **settings), 10)
    assert float(state.personal["alpha"].min()) > 0.6


# FedFOMO.


def test_fedfomos_weights_are_the_papers() -> None:
    model = make_model("squared_error")
    x, y = make_federation("squared_error", sizes=(40,)).train.client(0)
    algorithm = FedFOMO(model, SGD(), held_out=0.3)
    shared = tree_stack([model.init(seed) for seed in (3, 0, 1, 2, 4, 5)])
    mask = torch.ones(40, dtype=torch.bool)
    local, samples = algorithm.begin(shared, {"key": torch.tensor(11)}, algorithm.score(shared, x, y), mask)
    held = (samples["used"] == 0).numpy()
    assert 3 < held.sum() < 25
    a, models = np.hstack([np.ones((40, 1)), x.numpy()]), _vector(shared)
    losses = ((models @ a[held].T - y.numpy()[held]) ** 2).mean(1) / 2
    gains = np.maximum(0, losses[0] - losses[1:]) / np.linalg.norm(models[1:] - models[0], axis=1)
    assert 0 < (gains > 0).sum() < 5
    weights = gains / gains.sum()
    np.testing.assert_allclose(local.context["weights"].numpy(), weights, rtol=0, atol=1e-13)
    moved = models[0] + weights @ (models[1:] - models[0])
    np.testing.assert_allclose(tree_flat(local.shared).numpy(), moved, rtol=0, atol=1e-13)


def test_fedfomo_stays_where_nobody_helps() -> None:
    model = make_model("squared_error")
    x, y = make_federation("squared_error", sizes=(40,)).train.client(0)
    algorithm = FedFOMO(model, SGD())
    own = model.init(0)
    shared = tree_map(lambda leaf: torch.stack([leaf, leaf, leaf + 100]), own)
    local, _ = algorithm.begin(
        shared, {"key": torch.tensor(3)}, algorithm.score(shared, x, y), torch.ones(40, dtype=torch.bool)
    )
    assert local.context["weights"].tolist() == [0.0, 0.0]
    _same(local.shared, own, tolerance=0)


def test_fedfomo_does_not_train_on_held_out_samples() -> None:
    """In the first round all models are alike, so only training could tell what the held-out targets are."""
    federation = make_federation("squared_error", sizes=(20, 30))
    training = make_training("fedfomo", federation, loss="squared_error", held_out=0.3)
    state = training.init()
    after, _ = training.step(state)
    served = training.mixer.serve(state.shared, state.memory, torch.arange(2), 0).shared
    for position in range(2):
        data = federation.train.client(position)
        one = tree_map(lambda leaf, position=position: leaf[position], served)
        key = {"key": state.personal["key"][position]}
        scores = training.algorithm.score(one, *data)
        _, samples = training.algorithm.begin(one, key, scores, torch.ones(len(data[1]), dtype=torch.bool))
        held = samples["used"] == 0
        assert 0 < int(held.sum()) < len(held) / 2
        data[1][held] += 1000.0  # a view: this changes the federation
    spoilt, _ = training.step(state)
    _same(spoilt.shared, after.shared, tolerance=0)
    federation.train.targets[:] += 1.0
    other, _ = training.step(state)
    assert _moved(other.shared, after.shared) > 1e-3


def test_fedfomo_moves_a_client_towards_the_peer_that_helps() -> None:
    rng = np.random.default_rng(1)
    theta = np.array([2.0, -1.0, 0.5, 1.0])
    pairs = []
    for size, sign in ((8, 1.0), (80, 1.0), (80, -1.0)):
        x = rng.normal(size=(size, 4))
        pairs.append((x, sign * (x @ theta) + 0.5 * rng.normal(size=size)))
    federation = Federation.from_parts(pairs, names=("ann", "bob", "cem"))
    settings = {"loss": "squared_error", "solver": SGD(), "schedule": Constant(0.05), "batching": Batching(0)}
    fomo = advance(make_training("fedfomo", federation, held_out=0.4, **settings), 8)
    local = advance(make_training("local", federation, **settings), 8)
    apart = [np.linalg.norm(_vector(state.shared)[0] - _vector(state.shared)[1]) for state in (fomo, local)]
    opposite = np.linalg.norm(_vector(fomo.shared)[0] - _vector(fomo.shared)[2])
    assert apart[0] < 0.5 * apart[1]
    assert apart[0] < 0.2 * opposite
    gains = fomo.memory["gains"]
    assert float(gains[0, 1]) > 2 * float(gains[0, 2])


# Whatever is pulled together stays the same on average.


@pytest.mark.parametrize("method", ["fedu", "l2sgd"])
def test_pulls_tie_the_models_together(method: str) -> None:
    spreads = []
    for penalty in (0.0, 0.3, 3.0):
        state = advance(make_training(method, penalty=penalty, solver=SGD()), 5)
        spreads.append(float(tree_flat(state.shared, 1).var(0).sum()))
    assert spreads[0] > spreads[1] > spreads[2]


def test_fedu_with_short_steps_solves_the_regularised_problem() -> None:
    """With short steps FedU minimises sum_t f_t(w_t) + penalty/2 times the sum over pairs of |w_t - w_s|^2 / T."""
    (federation, _), penalty, rate = _quadratic_problem((20, 30, 25)), 0.5, 0.05
    training = make_training(
        "fedu",
        federation,
        loss="squared_error",
        solver=SGD(),
        batching=Batching(0),
        schedule=Constant(rate),
        penalty=penalty,
        engine=Stacked(record_after=4),
    )
    found = _vector(advance(training, 120).shared).reshape(-1)
    blocks, sides = np.zeros((15, 15)), np.zeros(15)
    for position in range(3):
        a, y = _design(federation, position)
        rows = slice(5 * position, 5 * position + 5)
        blocks[rows, rows], sides[rows] = a.T @ a / len(y), a.T @ y / len(y)
    laplacian = np.kron(np.eye(3) - np.ones((3, 3)) / 3, np.eye(5))
    expected = np.linalg.solve(blocks + penalty * laplacian, sides)
    alone = np.linalg.solve(blocks, sides)
    assert np.abs(found - expected).max() < 0.1 * np.abs(alone - expected).max()


@pytest.mark.parametrize("hessian_free", [False, True])
def test_per_fedavg_learns_a_start_from_which_a_step_fits(hessian_free: bool) -> None:
    """Two clients whose optima are opposite: one parameter, f_t(w) = (w - c_t)^2 / 2 on whole batches."""
    x = np.ones((4, 1))
    pairs = [(x, np.full(4, centre)) for centre in (-1.0, 2.0)]
    federation = Federation.from_parts(pairs, names=("ann", "bob"))
    model = Model(lambda: Linear(bias=False).build((1,), 1), SquaredError(), torch.float64)
    training = make_training(
        "perfedavg",
        federation,
        model=model,
        solver=SGD(),
        batching=Batching(0),
        inner_rate=0.4,
        hessian_free=hessian_free,
        independent=False,
    )
    start = training.init()
    after, _ = training.step(start)
    # F_t(w) = (1 - a)^2 (w - c_t)^2 / 2; without the Hessian the gradient is (1 - a) (w - c_t).
    w = float(start.shared["weight"])
    slope = (0.6**2 if hessian_free else 0.6) * (w - 0.5)
    assert float(after.shared["weight"]) == pytest.approx(w - 0.2 * slope, abs=1e-9)
    assert float(advance(training, 150).shared["weight"]) == pytest.approx(0.5, abs=1e-4)
