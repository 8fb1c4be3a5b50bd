from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import advance, make_federation, make_personalizer, make_training, scores_of
from sklearn.metrics import accuracy_score, log_loss

from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.data import Synthetic
from fedem.data.federation import Federation
from fedem.data.samples import Pool, Samples
from fedem.engines import OneByOne, Stacked
from fedem.runs.evaluate import Scores, evaluate, evaluate_oracle, name_scores, predict
from fedem.runs.measures import cosine_distance, optimal_distance, recover
from fedem.runs.personalize import Predictors
from fedem.runs.rounds import State, Training


def _scores(
    values: list[float], weights: list[int], metric: str = "accuracy", counts: list[int] | None = None
) -> Scores:
    present = torch.tensor(counts or [5] * len(values))
    return Scores(metric, torch.tensor(weights), present, torch.tensor(values), torch.tensor(values))


def test_averages_by_hand() -> None:
    scores = _scores([0.5, 1.0, 0.0], [1, 3, 0])
    assert scores.average == pytest.approx(0.875)
    assert scores.unweighted == pytest.approx(0.5)
    assert scores.loss == pytest.approx(0.875)


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (5, 1), (10, 1), (11, 2), (20, 2), (300, 30)])
def test_the_bottom_decile_is_the_worst_tenth_client(count: int, rank: int) -> None:
    values = np.random.default_rng(0).permutation(count) / count
    assert _scores(values.tolist(), [1] * count).bottom_decile == pytest.approx((rank - 1) / count, abs=1e-6)
    worst_is_largest = _scores(values.tolist(), [1] * count, "mean_squared_error").bottom_decile
    assert worst_is_largest == pytest.approx((count - rank) / count, abs=1e-6)


def test_clients_without_samples_are_left_out() -> None:
    nan = float("nan")
    scores = _scores([0.5, nan, 1.0], [1, 50, 1], counts=[5, 0, 5])
    assert (scores.average, scores.unweighted, scores.bottom_decile) == pytest.approx((0.75, 0.75, 0.5))


def test_the_bottom_decile_is_of_clients_with_five_samples_or_more() -> None:
    values, counts = np.linspace(0, 1, 40).tolist(), [4] * 3 + [0] * 2 + [5] * 35
    scores = _scores(values, [1] * 40, counts=counts)
    kept = sorted(value for value, count in zip(values, counts, strict=True) if count >= 5)
    assert scores.bottom_decile == pytest.approx(kept[3], abs=1e-6)
    named = name_scores({"test": scores})
    assert named["bottom_decile_left_out"] == 3, "those without samples have no score at all"
    assert "bottom_decile_left_out" not in name_scores({"test": _scores(values, [1] * 40)})
    assert np.isnan(_scores([0.5], [1], counts=[4]).bottom_decile)


@pytest.mark.parametrize("engine", [OneByOne(), Stacked(), Stacked(2)], ids=["one_by_one", "stacked", "chunks"])
def test_scores_agree_with_scikit_learn(engine: OneByOne | Stacked) -> None:
    training = make_training("fedem")
    state, federation = advance(training), training.federation
    found = scores_of(training, state, engine)["train"]
    for position in range(federation.num_clients):
        inputs, targets = federation.train.client(position)
        mixture = training.algorithm.predictor(tree_index(state.shared, 0), tree_index(state.personal, position))
        probabilities = predict(training.algorithm.model, mixture, inputs)
        assert float(found.values[position]) == pytest.approx(accuracy_score(targets, probabilities.argmax(1)))
        assert float(found.losses[position]) == pytest.approx(log_loss(targets, probabilities, labels=[0, 1]))


def test_parts_without_samples_are_not_scored() -> None:
    federation = Federation.from_parts([(np.ones((2, 4)), [0, 1])])
    training = make_training("fedem", federation)
    assert list(scores_of(training, training.init())) == ["train"]


def test_a_client_without_test_samples_among_others() -> None:
    pairs = [(np.ones((2, 4)), [0, 1]), (np.ones((3, 4)), [0, 1, 1])]
    tests = [(np.ones((0, 4)), np.zeros(0, dtype=int)), (np.ones((1, 4)), [1])]
    federation = Federation.from_parts(pairs, None, tests)
    training = make_training("fedem", federation)
    for engine in (OneByOne(), Stacked()):
        scores = scores_of(training, training.init(), engine)["test"]
        assert scores.counts.tolist() == [0, 1]
        assert np.isfinite(scores.average)


def _unseen(count: int) -> Samples:
    inputs, targets = make_federation(sizes=(40,), seed=5).train.client(0)
    return Samples(Pool(inputs[:count], targets[:count]), torch.tensor([0, count]))


def _fit(training: Training, state: State, samples: Samples, iterations: int | None = None) -> Predictors:
    return make_personalizer(training).personalize(state, samples, torch.zeros(1, dtype=torch.int64), iterations)


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_unseen_clients_from_any_number_of_samples(count: int) -> None:
    training = make_training("fedem")
    state = advance(training)
    weights = _fit(training, state, _unseen(count)).personal["log_weights"].exp()
    assert weights.shape == (1, 3)
    assert float(weights.sum()) == pytest.approx(1)
    if count == 0:
        torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3, dtype=torch.float64))
    else:
        assert not torch.allclose(weights, torch.full((1, 3), 1 / 3, dtype=torch.float64))


def test_one_update_and_convergence_differ_and_convergence_is_at_least_as_likely() -> None:
    training = make_training("fedem")
    state, samples = advance(training), _unseen(40)
    federation = Federation(("new",), samples, samples, samples)
    losses = []
    for iterations in (1, None):
        found = _fit(training, state, samples, iterations)
        scores = evaluate(training.algorithm, training.engine, found, federation)
        losses.append(scores["train"].loss)
    assert losses[1] < losses[0] - 1e-4


@pytest.mark.slow
def test_an_unseen_copy_of_a_client_predicts_like_it() -> None:
    """Weights fitted to convergence are those that EM rounds with frozen components lead to."""
    training = make_training("fedem", make_federation(sizes=(7, 12, 30)), num_rounds=40)
    state = advance(training, 40)
    inputs, targets = training.federation.train.client(2)
    samples = Samples(Pool(inputs, targets), torch.tensor([0, len(targets)]))
    personal = _fit(training, state, samples).personal
    old = state.personal["log_weights"][2].exp()
    assert float((personal["log_weights"][0].exp() - old).abs().max()) < 0.1


def test_clients_alone_have_nothing_for_an_unseen_one() -> None:
    training = make_training("local")
    with pytest.raises(UserError, match="choose another method"):
        _fit(training, training.init(), _unseen(3))


def test_fedavg_hands_its_model_to_unseen_clients() -> None:
    training = make_training("fedavg")
    state = advance(training)
    found = _fit(training, state, _unseen(3))
    assert found.personal == {}
    assert all(torch.equal(found.shared[name], state.shared[name]) for name in found.shared)


def test_the_oracle_beats_every_other_weighting() -> None:
    federation, truth = Synthetic(num_clients=30, dimension=20, num_test=400).make(0)[:2]
    oracle = evaluate_oracle(truth, federation)
    flipped = type(truth)(truth.names, truth.components, truth.mixture_weights.flip(1), truth.noise_scale)
    other = evaluate_oracle(flipped, federation)
    assert oracle.average > other.average + 0.02
    assert oracle.loss < other.loss
    weights = torch.repeat_interleave(truth.mixture_weights, federation.test.sizes, dim=0)
    probabilities = truth.predict(federation.test.inputs, weights)
    by_sample = (probabilities.argmax(1) == federation.test.targets).double()
    expected = torch.stack([part.mean() for part in by_sample.split(400)])
    torch.testing.assert_close(oracle.values, expected)


def test_recovery_undoes_a_permutation_and_a_scale() -> None:
    rng = torch.Generator().manual_seed(0)
    components, weights = torch.randn(3, 8, generator=rng), torch.rand(50, 3, generator=rng).softmax(1)
    found = recover(2 * components[[2, 0, 1]], weights[:, [2, 0, 1]], components, weights)
    assert dict(found.matching) == {0: 2, 1: 0, 2: 1}
    assert max(found.component_distances) < 1e-6
    assert found.weight_distance == pytest.approx(0, abs=1e-9)
    assert found.cluster_accuracy == 1


def test_the_most_likely_weights_of_clusters_are_often_no_corner() -> None:
    data = Synthetic(num_clients=30, num_components=2, dimension=10, clustered=True, num_test=1, max_samples=80).make(0)
    federation, truth = data.federation, data.truth
    assert truth is not None
    grid = torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None]  # the first component's weight
    best = []
    for name, position in zip(federation.names, range(30), strict=True):
        inputs, targets = federation.train.client(position)
        one, other = (truth.predict(inputs, row.expand(len(inputs), 2)).double() for row in torch.eye(2))
        p, q = (each.gather(1, targets[:, None])[:, 0] for each in (one, other))
        best.append(float(grid[(grid * p + (1 - grid) * q).log().sum(1).argmax()]))
        assert name == truth.names[position]
    first = torch.tensor(best, dtype=torch.float64)
    by_hand, true = torch.stack([first, 1 - first], 1).flatten(), truth.mixture_weights.double().flatten()
    distance = float(1 - by_hand @ true / by_hand.norm() / true.norm())
    assert optimal_distance(truth, federation) == pytest.approx(distance, rel=1e-2)
    assert distance > 1e-3, "so no method that maximises the likelihood comes to the truth"
    mixed = Synthetic(num_clients=3, dimension=2, num_test=1).make(0)
    assert mixed.truth is not None
    assert optimal_distance(mixed.truth, mixed.federation) is None


def test_recovery_sees_a_wrong_client_and_an_extra_component() -> None:
    components = torch.eye(3)
    weights = torch.eye(3)[[0, 1, 2, 0]]
    wrong = weights.clone()
    wrong[3] = torch.tensor([0.0, 1.0, 0.0])
    assert recover(components, wrong, components, weights).cluster_accuracy == pytest.approx(0.75)
    more = torch.cat([components, -torch.ones(1, 3)])
    spread = torch.cat([weights, torch.zeros(4, 1)], dim=1)
    spread[0] = torch.tensor([0.1, 0.0, 0.0, 0.9])
    assert recover(more, spread, components, weights).cluster_accuracy == pytest.approx(0.75)


def test_cosine_distance_by_hand() -> None:
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0], [3.0, 0.0], [-1.0, 0.0]])
    torch.testing.assert_close(cosine_distance(a, b), torch.tensor([[1.0, 0.0, 2.0]]))
