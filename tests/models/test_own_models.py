"""Per-FedAvg, APFL, FedFOMO and FedU: gradients, shares and weights worked out anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import LOSSES, advance, make_federation, make_model, make_training
from least_squares import WHOLE, assert_same, change_of, conflict, design, quadratic_problem, vector
from torch import Tensor
from torch.func import grad

from fedem.core.errors import UserError
from fedem.core.tree import Tree, add_prefix, tree_flat, tree_map, tree_stack
from fedem.data.federation import Federation
from fedem.engines import Batching, Stacked
from fedem.methods.apfl import APFL
from fedem.methods.base import Batch
from fedem.methods.fedfomo import FedFOMO
from fedem.methods.perfedavg import PerFedAvg
from fedem.models import Linear, Model
from fedem.models.losses import SquaredError
from fedem.solvers import SGD
from fedem.solvers.schedules import Constant

KEY = torch.tensor(0)  # no layer draws

# Per-FedAvg.


def _step(algorithm: PerFedAvg | APFL | FedFOMO, shared: Tree, personal: Tree, data: tuple[Tensor, Tensor]) -> Tree:
    """One step over the whole of ``data`` with a learning rate of 1; returns the trained copy of u."""
    mask = torch.ones(len(data[1]), dtype=torch.bool)
    local, samples = algorithm.begin(shared, personal, algorithm.score(shared, *data), mask)
    batch = Batch(*data, mask / mask.double().sum(), samples, KEY)
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
    assert change_of(exact, first_order) > 1e-3


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
    assert_same(*taken, tolerance=1e-15)
    assert change_of(taken[0], start) > 1e-3


# APFL.


@pytest.mark.parametrize("alpha", [0.2, 0.7])
def test_apfls_share_follows_its_derivative(alpha: float) -> None:
    model = make_model()
    x, y = make_federation(sizes=(14,)).train.client(0)
    shared, own = model.init(1), model.init(2)
    algorithm = APFL(model, SGD(), alpha=alpha)
    start = algorithm.init_personal(shared, KEY)
    personal = start | add_prefix("own", own) | {"trained": torch.tensor(True)}
    mask = torch.ones(14, dtype=torch.bool)
    batch = Batch(x, y, mask.double() / 14, {}, KEY)
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
    start = algorithm.init_personal(shared, KEY)
    personal = start | add_prefix("own", own) | {"trained": torch.tensor(True)}
    mask = torch.ones(14, dtype=torch.bool)
    local, _ = algorithm.begin(shared, personal, {}, mask)
    after = algorithm.step(local, Batch(x, y, mask.double() / 14, {}, KEY), torch.tensor(0.1, dtype=torch.float64))

    def value(leaves: Tree) -> Tensor:
        return model.losses(tree_map(lambda v, w: alpha * v + (1 - alpha) * w, leaves, shared), x, y).mean()

    slope = grad(value)(own)
    for name, leaf in slope.items():
        torch.testing.assert_close(after.personal[f"own/{name}"], own[name] - 0.1 * leaf, rtol=0, atol=1e-14)


def test_apfls_share_grows_where_clients_are_inconflict() -> None:
    settings = {"loss": "squared_error", "solver": SGD(), "batching": WHOLE, "schedule": Constant(0.05)}
    state = advance(make_training("apfl", conflict(), alpha=0.5, **settings), 10)
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
    a, models = np.hstack([np.ones((40, 1)), x.numpy()]), vector(shared)
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
    assert_same(local.shared, own, tolerance=0)


def test_fedfomo_does_not_train_on_held_out_samples() -> None:
    """In the first round all models are alike, so only training could tell what the held-out targets are."""
    federation = make_federation("squared_error", sizes=(20, 30))
    training = make_training("fedfomo", federation, loss="squared_error", held_out=0.3)
    state = training.init()
    after, _ = training.step(state)
    served = training.mixer.read(state.shared, state.memory, torch.arange(2)).shared
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
    assert_same(spoilt.shared, after.shared, tolerance=0)
    federation.train.targets[:] += 1.0
    other, _ = training.step(state)
    assert change_of(other.shared, after.shared) > 1e-3


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
    apart = [np.linalg.norm(vector(state.shared)[0] - vector(state.shared)[1]) for state in (fomo, local)]
    opposite = np.linalg.norm(vector(fomo.shared)[0] - vector(fomo.shared)[2])
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
    (federation, _), penalty, rate = quadratic_problem((20, 30, 25)), 0.5, 0.05
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
    found = vector(advance(training, 120).shared).reshape(-1)
    blocks, sides = np.zeros((15, 15)), np.zeros(15)
    for position in range(3):
        a, y = design(federation, position)
        rows = slice(5 * position, 5 * position + 5)
        blocks[rows, rows], sides[rows] = a.T @ a / len(y), a.T @ y / len(y)
    laplacian = np.kron(np.eye(3) - np.ones((3, 3)) / 3, np.eye(5))
    expected = np.linalg.solve(blocks + penalty * laplacian, sides)
    alone = np.linalg.solve(blocks, sides)
    assert np.abs(found - expected).max() < 0.1 * np.abs(alone - expected).max()


def test_per_fedavgs_differences_are_refused_in_bfloat16() -> None:
    model = Model(lambda: Linear().build((2,), 1), SquaredError(), precision="bfloat16")
    with pytest.raises(UserError, match=r"lost in bfloat16; allowed with it: run\.precision tf32 or float32"):
        PerFedAvg(model, SGD(), hessian_free=True)


@pytest.mark.slow
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
