"""The methods that are given by a surrogate, against what they must equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import DIMENSION, advance, distance, make_federation, make_model, make_training, scores_of
from hypothesis import given, settings
from hypothesis import strategies as st
from least_squares import assert_same, mean_square, proximal, shares, vector
from scipy.special import softmax
from scipy.stats import entropy
from sklearn.linear_model import LogisticRegression
from torch import nn

from fedem.core.errors import UserError
from fedem.core.random import COMPONENTS, derive
from fedem.core.tree import Tree, take_prefix, tree_index, tree_map
from fedem.data.federation import Federation
from fedem.engines import Batching, Engine, OneByOne, Stacked
from fedem.methods.base import Algorithm, Batch, Local
from fedem.methods.fedem import FedEM
from fedem.methods.mixer import Star
from fedem.methods.pfedme import PFedMe
from fedem.methods.surrogate import Surrogate
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.runs.rounds import State, Training
from fedem.solvers import SGD, Newton
from fedem.solvers.schedules import Constant
from fedem.surrogates import optimise
from fedem.surrogates.instances import MoreauEnvelope, QuadraticBound
from fedem.surrogates.optimising import OneClient

ZERO = torch.zeros((), dtype=torch.int64)
SIMILAR = (20, 12, 15)  # stacked together


def one_step(algorithm: Surrogate, seed: int = 0, rate: float = 0.3) -> tuple[Local, Local]:
    """A client's state after two steps on half of its samples: the method's own, and the one all surrogates have."""
    federation = make_federation()
    inputs, targets = federation.train.client(3)
    shared = algorithm.init_shared(seed)
    personal = algorithm.init_personal(shared, torch.tensor(7))
    mask = torch.ones(len(targets), dtype=torch.bool)
    local, columns = algorithm.begin(shared, personal, algorithm.score(shared, inputs, targets), mask)
    count = len(targets) // 2
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    half = tree_map(lambda leaf: leaf[..., :count], columns)
    batch, length = Batch(inputs[:count], targets[:count], weights, half, ZERO), torch.tensor(rate, dtype=torch.float64)
    own, derived = algorithm.step(local, batch, length), Surrogate.step(algorithm, local, batch, length)
    return algorithm.step(own, batch, length), Surrogate.step(algorithm, derived, batch, length)


@pytest.mark.parametrize("solver", [SGD(), SGD(0.1, momentum=0.9, nesterov=True)])
def test_fedem_takes_the_step_of_every_surrogate(solver: SGD) -> None:
    own, derived = one_step(FedEM(make_model(), solver))
    assert_same(own.shared, derived.shared)
    assert_same(own.solver_state, derived.solver_state)


def test_the_objective_of_fedem_is_the_likelihood_that_is_reported() -> None:
    federation, algorithm = make_federation(), FedEM(make_model(), SGD(0.01, momentum=0.9))
    outcome = optimise(algorithm, federation, rounds=3, learning_rate=0.2, steps=2, batch_size=4)
    training = make_training(federation=federation, batching=Batching(4, local_steps=2))
    assert distance(outcome.state, advance(training)) == 0
    assert outcome.history[-1] == pytest.approx(scores_of(training, outcome.state)["train"].loss, rel=1e-14)


@settings(max_examples=20, deadline=None)
@given(seeds=st.tuples(*[st.integers(0, 1000)] * 3))
def test_the_gaps_of_fedem_are_divergences(seeds: tuple[int, int, int]) -> None:
    """The paper's lemmas: g - f is the mean KL(q | posterior), and d(v0, v) = KL(v | v0)."""
    algorithm, federation = FedEM(make_model(), SGD()), make_federation()
    inputs, targets = federation.train.client(2)
    client = OneClient(algorithm, inputs, targets)
    start, there = algorithm.init_shared(seeds[0]), algorithm.init_shared(seeds[1])
    first, other = (algorithm.init_personal(start, torch.tensor(seed)) for seed in seeds[1:])

    def posterior(shared: Tree, personal: Tree) -> np.ndarray:
        losses = algorithm.model.component_losses(shared, inputs, targets).numpy()
        return softmax(personal["log_weights"].numpy()[:, None] - losses, axis=0)

    fixed = client.fix(start, first)
    apart = float(client.majorant(there, other, fixed) - client.objective(there, other))
    divergence = entropy(posterior(start, first), posterior(there, other), axis=0).mean()
    assert apart == pytest.approx(divergence, abs=1e-12)
    least = client.minimise(there, first, fixed)
    gap = float(client.majorant(there, first, fixed) - client.majorant(there, least, fixed))
    assert gap == pytest.approx(entropy(*(tree["log_weights"].exp().numpy() for tree in (least, first))), abs=1e-12)


def test_responsibilities_of_zero_add_nothing() -> None:
    federation, algorithm = make_federation(), FedEM(make_model(), SGD())
    shared = algorithm.init_shared(0)
    client = OneClient(algorithm, *federation.train.client(0))
    one_sided = {"log_weights": torch.tensor([0.0, -torch.inf, -torch.inf], dtype=torch.float64)}
    fixed = client.fix(shared, one_sided)
    expected = float(client.objective(shared, one_sided))
    assert float(client.majorant(shared, one_sided, fixed)) == pytest.approx(expected, rel=1e-14)
    uniform = {"log_weights": torch.full((3,), 1 / 3, dtype=torch.float64).log()}
    bound = float(client.majorant(shared, uniform, fixed))
    assert bound == pytest.approx(expected + np.log(3), rel=1e-14)


def run(algorithm: Algorithm, federation: Federation, rounds: int, engine: Engine) -> State:
    whole, rate, everybody = Batching(0, local_steps=1), Constant(0.3), federation.num_clients
    training = Training(algorithm, engine, whole, 0, Star(), rate, federation, rounds, everybody, torch.device("cpu"))
    return advance(training, rounds)


@pytest.mark.parametrize("loss", ["squared_error", "logistic"])
def test_envelopes_are_pfedme_with_exact_proximal_points(loss: str) -> None:
    model, federation = make_model(loss), make_federation(loss, SIMILAR)
    exact = run(MoreauEnvelope(model, SGD(), pull=2.0, iterations=6), federation, 1, Stacked())
    steps = run(PFedMe(model, SGD(), pull=2.0, inner_steps=200, inner_rate=0.2), federation, 1, Stacked())
    assert_same(exact.shared, steps.shared, 1e-9)
    assert_same(exact.personal, take_prefix("own", steps.personal), 1e-9)


def test_the_surrogate_of_an_envelope_lies_above_it_and_touches_it() -> None:
    """The paper's appendix: g(w) = F(theta0) + pull/2 |theta0 - w|^2; envelopes worked out in numpy."""
    federation, pull = make_federation("squared_error"), 1.5
    algorithm = MoreauEnvelope(make_model("squared_error"), SGD(), pull=pull, iterations=2)
    shared = algorithm.init_shared(0)
    origin = vector(tree_map(lambda leaf: leaf[None], shared))[0]
    client = OneClient(algorithm, *federation.train.client(2))
    fixed = client.fix(shared, shared)
    least = client.minimise(shared, shared, fixed)
    np.testing.assert_allclose(
        vector(tree_map(lambda leaf: leaf[None], least))[0], proximal(federation, 2, origin, pull)
    )

    def envelope(point: np.ndarray) -> float:
        theta = proximal(federation, 2, point, pull)
        return mean_square(federation, 2, theta) + pull / 2 * float(((theta - point) ** 2).sum())

    def bound(point: np.ndarray) -> float:
        there = {"bias": torch.tensor(point[:1]), "weight": torch.tensor(point[1:]).reshape(1, -1)}
        return float(client.majorant(there, least, fixed))

    assert bound(origin) == pytest.approx(envelope(origin), rel=1e-12)
    rng = np.random.default_rng(0)
    for width in (1e-3, 0.1, 1.0, 10.0):
        away = width * rng.normal(size=len(origin))
        assert 0 < bound(origin + away) - envelope(origin + away) <= pull / 2 * float(away @ away)  # no slope at w0


def test_envelopes_lead_to_their_minimum() -> None:
    """Least squares: the mean of the envelopes has a closed form, and its minimum too."""
    federation, pull = make_federation("squared_error", SIMILAR), 0.5
    algorithm = MoreauEnvelope(make_model("squared_error"), SGD(), pull=pull, iterations=1)
    outcome = optimise(algorithm, federation, rounds=40, learning_rate=1 / pull)

    def slope(point: np.ndarray) -> np.ndarray:
        """Of the mean of the envelopes, up to the factor ``pull``."""
        points = [proximal(federation, position, point, pull) for position in range(federation.num_clients)]
        return point - shares(federation) @ np.stack(points)

    # It is linear, so its values at zero and at the unit vectors tell it.
    constant = slope(np.zeros(DIMENSION + 1))
    matrix = np.stack([slope(row) - constant for row in np.eye(DIMENSION + 1)], axis=1)
    np.testing.assert_allclose(vector(outcome.state.shared)[0], np.linalg.solve(matrix, -constant), atol=1e-6)
    never_rises(outcome.history)


def never_rises(history: tuple[float, ...]) -> None:
    assert max(np.diff(history)) <= 1e-14


def test_a_parabola_is_a_step_of_gradient_descent() -> None:
    federation, model = make_federation(sizes=(30,)), make_model()
    bound = QuadraticBound(model, SGD(), smoothness=4.0)
    outcome = optimise(bound, federation, rounds=5, learning_rate=1.0)
    module = model.build().double()
    module.load_state_dict(bound.init_shared(int(derive(0, COMPONENTS))))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.25)
    inputs, targets = federation.train.client(0)
    for expected in outcome.history[:-1]:
        optimiser.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(module(inputs).squeeze(-1), targets.double())
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        loss.backward()
        optimiser.step()
    assert_same(tree_index(outcome.state.shared, 0), {name: leaf.detach() for name, leaf in module.named_parameters()})


def test_parabolas_lead_down_to_the_optimum() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(150, DIMENSION))
    targets = (rng.random(150) < 1 / (1 + np.exp(-inputs @ [1.0, -0.5, 0.0, 0.5]))).astype(np.int64)
    federation = Federation.from_parts([(inputs[some], targets[some]) for some in np.split(np.arange(150), [60, 100])])
    reference = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(inputs, targets)
    columns = np.hstack([np.ones((150, 1)), inputs])
    # The logistic loss curves by a quarter at most.
    smoothness = float(np.linalg.eigvalsh(columns.T @ columns / 150).max() / 4)
    algorithm = QuadraticBound(make_model(), SGD(), smoothness=smoothness)
    outcome = optimise(algorithm, federation, rounds=80, learning_rate=1.0)
    never_rises(outcome.history)
    found = vector(outcome.state.shared)[0]
    np.testing.assert_allclose(found, [*reference.intercept_, *reference.coef_[0]], atol=1e-5)


@pytest.mark.parametrize("kind", [MoreauEnvelope, QuadraticBound])
def test_loop_equals_stacked(kind: type[Surrogate]) -> None:
    algorithm, federation = kind(make_model(), SGD()), make_federation()
    states = [run(algorithm, federation, 2, engine) for engine in (OneByOne(), Stacked())]
    assert distance(*states) < 1e-12


def test_models_that_train_otherwise_than_they_predict_are_refused() -> None:
    inputs = make_federation().train.inputs
    for layer in (nn.Dropout(0.2), nn.BatchNorm1d(DIMENSION)):
        model = Model(lambda layer=layer: nn.Sequential(layer, nn.Linear(DIMENSION, 1)), Logistic(), torch.float64)
        with pytest.raises(UserError, match="no dropout and no batch normalisation"):
            QuadraticBound(model, SGD()).check(inputs)
        FedEM(model, SGD()).check(inputs)


def test_what_instances_can_not_do_is_refused() -> None:
    with pytest.raises(UserError, match=r"weight_decay is 0\.1; allowed: 0"):
        QuadraticBound(make_model(), SGD(0.1))
    wide = Model(lambda: nn.Linear(DIMENSION, 500), Logistic(), torch.float64)
    with pytest.raises(UserError, match="2500 trained numbers; allowed: at most 2000"):
        MoreauEnvelope(wide, SGD()).check(make_federation().train.inputs)


def test_local_solvers_serve_surrogates() -> None:
    """Newton's method reaches the lowest point of a surrogate that is a parabola, the proximal point, in one step."""
    algorithm = MoreauEnvelope(make_model(), Newton(ridge=0.0), iterations=6)
    federation = make_federation(sizes=(30,))
    outcome = optimise(algorithm, federation, rounds=1, learning_rate=1.0)
    assert_same(outcome.state.shared, outcome.state.personal, 1e-12)
    start, end = outcome.history
    assert end < start
