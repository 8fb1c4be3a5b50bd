"""Nearest neighbours beside a model (kNN-Per): their mathematics, how much they count, and runs with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import LOSSES, StopError, advance, make_federation, make_model, make_personalizer, make_training, stop_at
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from small_runs import SMALL, small_config, small_run
from torch import Tensor

import fedem
from fedem.core.errors import UserError
from fedem.core.tree import tree_stack
from fedem.data.federation import Federation
from fedem.deploy.plan import Plan
from fedem.export import export_client
from fedem.methods.base import Mixture
from fedem.models import MLP, Model
from fedem.models.losses import CrossEntropy
from fedem.runs.evaluate import evaluate
from fedem.runs.neighbours import (
    WEIGHTS,
    Neighbours,
    choose_weights,
    losses_by_weight,
    nearest,
    predict,
    scale_of,
)
from fedem.runs.outputs import features_of
from fedem.runs.trainer import reassess

RNG = np.random.default_rng(3)
REMEMBERED, ASKED = RNG.normal(size=(40, 4)), RNG.normal(size=(25, 4))
SCALE = 0.7


def _weights(distances: np.ndarray) -> np.ndarray:
    return np.exp(-distances / SCALE)


def _neighbours(targets: np.ndarray, number: int, weight: float = 1.0, count: int = 40) -> Neighbours:
    features = torch.from_numpy(REMEMBERED[:count])
    return Neighbours(features, torch.from_numpy(targets[:count]), SCALE, weight, number)


@pytest.mark.parametrize("number", [1, 3, 10, 40])
@pytest.mark.parametrize("loss", ["logistic", "cross_entropy"])
def test_votes_are_those_of_scikit_learn(loss: str, number: int) -> None:
    num_classes = {"logistic": 2, "cross_entropy": 3}[loss]
    labels = RNG.integers(0, num_classes, size=40)
    labels[:num_classes] = range(num_classes)  # scikit-learn knows no class that it has not seen
    reference = KNeighborsClassifier(number, weights=_weights).fit(REMEMBERED, labels)
    votes = _neighbours(labels, number).vote(make_model(loss), torch.from_numpy(ASKED), num_classes)
    np.testing.assert_allclose(votes.numpy(), reference.predict_proba(ASKED), atol=1e-12)
    torch.testing.assert_close(votes.sum(1), torch.ones(25).double())


@pytest.mark.parametrize("number", [1, 7])
@pytest.mark.parametrize("dimensions", [(), (2,)])
def test_means_are_those_of_scikit_learn(number: int, dimensions: tuple[int, ...]) -> None:
    targets = RNG.normal(size=(40, *dimensions))
    reference = KNeighborsRegressor(number, weights=_weights).fit(REMEMBERED, targets).predict(ASKED)
    votes = _neighbours(targets, number).vote(make_model("squared_error"), torch.from_numpy(ASKED), *dimensions or (1,))
    np.testing.assert_allclose(votes.numpy(), reference.reshape(25, -1), atol=1e-12)


def test_more_neighbours_than_samples_are_all_of_them() -> None:
    labels, asked = RNG.integers(0, 3, size=40), torch.from_numpy(ASKED)
    model = make_model("cross_entropy")
    some, many = (_neighbours(labels, number, count=6).vote(model, asked, 3) for number in (6, 1000))
    assert torch.equal(some, many)


def test_a_single_sample_is_everybodys_neighbour() -> None:
    votes = _neighbours(np.array([2]), 5, count=1).vote(make_model("cross_entropy"), torch.from_numpy(ASKED), 3)
    assert torch.equal(votes, torch.tensor([0.0, 0.0, 1.0]).double().expand(25, 3))
    assert scale_of(torch.from_numpy(REMEMBERED[:1])) == 1.0
    assert scale_of(torch.zeros(4, 3)) == 1.0  # all alike


@pytest.mark.parametrize("own", [False, True])
def test_tables_cut_into_pieces_have_the_same_neighbours(own: bool) -> None:
    features, place = torch.from_numpy(REMEMBERED), torch.arange(40)
    asked = (features, place) if own else (torch.from_numpy(ASKED), None)
    whole = nearest(asked[0], features, 5, asked[1])
    for entries in (1, 90, 800):
        pieces = nearest(asked[0], features, 5, asked[1], entries)
        assert torch.equal(pieces.positions, whole.positions)
        torch.testing.assert_close(pieces.distances, whole.distances, rtol=0, atol=1e-12)
    labels, model = RNG.integers(0, 3, size=40), make_model("cross_entropy")
    near = _neighbours(labels, 5)
    torch.testing.assert_close(near.vote(model, *_pair(asked, 3), entries=40), near.vote(model, *_pair(asked, 3)))


def _pair(asked: tuple[Tensor, Tensor | None], width: int) -> tuple[Tensor, int, Tensor | None]:
    return asked[0], width, asked[1]


def test_distances_are_exact_where_they_are_small_beside_the_features() -> None:
    """As by differences, though they are found by products."""
    features = (1000 + 1e-3 * torch.from_numpy(REMEMBERED)).float()
    exact = torch.cdist(features.double(), features.double(), compute_mode="donot_use_mm_for_euclid_dist")
    exact.fill_diagonal_(torch.inf)
    found = nearest(features, features, 3, torch.arange(40))
    torch.testing.assert_close(found.distances, exact.sort(1).values[:, :3], rtol=1e-4, atol=1e-9)
    assert scale_of(features) == pytest.approx(float(exact.min(1).values.mean()), rel=1e-4)


def test_a_sample_is_not_its_own_neighbour() -> None:
    features = torch.from_numpy(REMEMBERED)
    found = nearest(features, features, 39, torch.arange(40))
    assert not bool((found.positions == torch.arange(40)[:, None]).any())
    assert not _neighbours(np.zeros(1, np.int64), 3, count=1).is_heard(torch.arange(1))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_weight_of_zero_is_the_model_to_the_bit_and_one_the_neighbours_alone(loss: str) -> None:
    model = make_model(loss)
    mixture = Mixture(tree_stack([model.init(0), model.init(1)]), torch.tensor([0.3, 0.7]).double().log())
    targets = RNG.normal(size=40) if loss == "squared_error" else RNG.integers(0, 2, size=40)
    asked = torch.from_numpy(ASKED)
    alone = predict(model, mixture, asked)
    assert torch.equal(predict(model, mixture, asked, _neighbours(targets, 4, 0.0)), alone)
    near = _neighbours(targets, 4, 1.0)
    votes = near.vote(model, asked, alone.shape[1])
    assert torch.equal(predict(model, mixture, asked, near), votes)
    half = predict(model, mixture, asked, replace(near, weight=0.5))
    torch.testing.assert_close(half, (alone + votes) / 2)
    if loss != "squared_error":
        torch.testing.assert_close(half.sum(1), torch.ones(25).double())


def test_squared_distances_of_mixtures_are_means_by_the_weights() -> None:
    model = Model(lambda: MLP(hidden=5).build((4,), 3), CrossEntropy(), torch.float64)
    components, inputs = [model.init(seed) for seed in range(3)], torch.from_numpy(ASKED)
    weights = torch.tensor([0.5, 0.5, 0.0]).double()
    features = features_of(model, Mixture(tree_stack(components), weights.log()), inputs)
    apart = [torch.cdist(*2 * (model.features(each, inputs),)).square() for each in components]
    torch.testing.assert_close(torch.cdist(features, features).square(), (apart[0] + apart[1]) / 2)


def test_a_mixture_of_linear_models_keeps_its_inputs_once() -> None:
    model = make_model()
    mixture = Mixture(tree_stack([model.init(0), model.init(1)]), torch.tensor([0.3, 0.7]).double().log())
    assert torch.equal(features_of(model, mixture, torch.from_numpy(ASKED)), torch.from_numpy(ASKED))


# How much they count.


def test_losses_by_weight_are_those_of_the_mixed_predictions() -> None:
    model, targets = make_model("squared_error"), torch.from_numpy(RNG.normal(size=(5, 1)))
    predictions, votes = (torch.from_numpy(RNG.normal(size=(5, 1))) for _ in range(2))
    found = losses_by_weight(model, predictions, votes, targets)
    assert found.shape == (len(WEIGHTS), 5)
    for weight, row in zip(WEIGHTS.tolist(), found, strict=True):
        mean = weight * votes + (1 - weight) * predictions
        expected = -torch.distributions.Normal(mean, 1.0).log_prob(targets).squeeze(1)
        torch.testing.assert_close(row, expected)


def test_weights_go_from_a_clients_own_best_to_everybodys() -> None:
    sums = 100 * (WEIGHTS - torch.tensor([[0.0], [0.8]])).square()
    curve = (WEIGHTS - 0.4).square()
    assert choose_weights(sums, curve, 0.0).tolist() == [0.0, 0.8]
    assert choose_weights(sums, curve, 100.0).tolist() == pytest.approx([0.2, 0.6])
    assert choose_weights(sums, curve, 1e9).tolist() == pytest.approx([0.4, 0.4])
    nothing = torch.zeros(3, len(WEIGHTS)).double()
    assert choose_weights(nothing, curve).tolist() == pytest.approx([0.4] * 3)  # who has no validation samples
    assert choose_weights(nothing, nothing[0]).tolist() == [0.0] * 3  # of several the smallest: the model


def _circles(flip: float = 0.0, seed: int = 0, count: int = 8, size: int = 60, opposite: bool = False) -> Federation:
    """Clients whose classes are rings, which no linear model tells apart, with a share of labels drawn at random.

    Where they are ``opposite``, what holds for training samples is wrong for the others.
    """
    rng, pairs = np.random.default_rng(seed), []
    for _ in range(count):
        x = rng.uniform(-1, 1, size=(3 * size, 2))
        y = (np.linalg.norm(x, axis=1) > 0.75).astype(np.int64)
        noise = rng.random(3 * size) < flip
        y[noise] = rng.integers(0, 2, size=int(noise.sum()))
        pairs.append((x, y))
    train, *others = ([(x[at::3], y[at::3]) for x, y in pairs] for at in range(3))
    others = [[(x, 1 - y if opposite else y) for x, y in part] for part in others]
    return Federation.from_parts(train, *others, [f"client {position}" for position in range(count)])


def test_neighbours_that_help_are_heard() -> None:
    federation = _circles()
    plain = fedem.train(federation, "fedavg", rounds=5, evaluate_every=0)
    result = fedem.train(federation, "fedavg", rounds=5, evaluate_every=0, neighbours=5)
    assert result.summary["neighbours_weight"] > 0.6
    assert result.summary["test_accuracy"] > plain.summary["test_accuracy"] + 0.15
    assert result.summary["test_loss"] < plain.summary["test_loss"] - 0.2
    for position, name in enumerate(result.names):
        inputs, targets = federation.test.client(position)
        right = (result.predict(name, inputs).argmax(1) == targets).double().mean()
        assert float(right) == pytest.approx(float(result.clients[position]["test_accuracy"]))


def test_neighbours_that_mislead_are_not_heard() -> None:
    federation = _circles(opposite=True)
    plain = fedem.train(federation, "fedavg", rounds=5, evaluate_every=0)
    result = fedem.train(federation, "fedavg", rounds=5, evaluate_every=0, neighbours=3)
    assert {row["neighbours_weight"] for row in result.clients} == {0.0}
    for key in ("test_accuracy", "test_loss", "train_loss", "validation_loss"):
        assert result.summary[key] == pytest.approx(plain.summary[key], rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_scores_are_those_of_the_predictions(loss: str) -> None:
    """On training samples too, where a sample is not its own neighbour, and a client with one sample has none."""
    training = make_training("fedem", loss=loss, num_components=2)
    federation, algorithm = training.federation, training.algorithm
    found = make_personalizer(training, neighbours=3).predictors(advance(training), federation)
    assert found.memory is not None
    weights = torch.tensor([0.3, 0.9, 0.0, 0.5, 0.1]).double()
    found = found._replace(memory=replace(found.memory, weights=weights))
    scores = evaluate(algorithm, training.engine, found, federation)
    for position in range(federation.num_clients):
        mixture, near = found.of(algorithm, position), found.neighbours(position)
        assert near is not None
        inputs, targets = federation.test.client(position)
        predictions = predict(algorithm.model, mixture, inputs, near)
        train_inputs, train_targets = federation.train.client(position)
        left_out = []
        for row in range(len(train_targets)):
            rest = [other for other in range(len(train_targets)) if other != row]
            others = replace(near, features=near.features[rest], targets=near.targets[rest]) if rest else None
            left_out.append(predict(algorithm.model, mixture, train_inputs[row : row + 1], others))
        for part, found_here, wanted in (("test", predictions, targets), ("train", torch.cat(left_out), train_targets)):
            if loss == "squared_error":
                expected = (found_here.squeeze(1) - wanted).square().mean()
            else:
                expected = (found_here.argmax(1) == wanted).double().mean()
                surprise = algorithm.model.loss.surprise(found_here, wanted).mean()
                assert float(scores[part].losses[position]) == pytest.approx(float(surprise), rel=1e-9)
            assert float(scores[part].values[position]) == pytest.approx(float(expected), rel=1e-9)


# Runs.


def test_a_trained_run_is_scored_as_if_it_had_asked_neighbours(tmp_path: Path) -> None:
    asked = small_run(None, unseen=0.25, neighbours=4)
    plain = small_run(tmp_path / "run", unseen=0.25)
    again = reassess(tmp_path / "run", neighbours=4)
    for key in ("test_loss", "validation_loss", "unseen_test_loss", "neighbours_weight", "unseen_neighbours_weight"):
        assert again.summary[key] == asked.summary[key]
    assert reassess(tmp_path / "run").summary["test_loss"] == plain.summary["test_loss"]  # the run is as it was
    assert "neighbours_weight" not in plain.summary
    # What is scored so may be kept, and predicts without any data.
    again.save(tmp_path / "kept")
    inputs = np.ones((3, SMALL["dimension"]), np.float32)
    kept = fedem.Result.load(tmp_path / "kept")
    assert torch.equal(kept.predict(kept.names[2], inputs), asked.predict(asked.names[2], inputs))


@pytest.mark.parametrize("method", ["fedavg", "local", "fedavg+", "ditto"])
def test_any_method_has_neighbours(method: str) -> None:
    training = make_training(method)
    found = make_personalizer(training, neighbours=2).predictors(advance(training), training.federation)
    scores = evaluate(training.algorithm, training.engine, found, training.federation)
    assert bool(torch.isfinite(scores["test"].losses).all())
    assert found.memory is not None
    assert found.memory.weights.shape == (5,)


def test_a_saved_run_predicts_without_its_data(tmp_path: Path) -> None:
    result = small_run(tmp_path / "run", neighbours=3)
    loaded = fedem.Result.load(tmp_path / "run")
    inputs = np.linspace(-1, 1, 4 * SMALL["dimension"], dtype=np.float32).reshape(4, -1)
    for which in ("last", "best"):
        for name in result.names[:3]:
            assert torch.equal(loaded.predict(name, inputs, which), result.predict(name, inputs, which))
    stored = [float(row["neighbours_weight"]) for row in loaded.clients]
    assert stored == pytest.approx(result.memories["last"].weights.tolist())


def test_a_run_that_was_stopped_has_no_memory_yet(tmp_path: Path) -> None:
    config = small_config(neighbours=3)
    with pytest.raises(StopError):
        fedem.run(config, config.data.make(0), out=tmp_path / "run", listener=stop_at(3))
    stopped = fedem.Result.load(tmp_path / "run")
    with pytest.raises(UserError, match="once the run is complete"):
        stopped.client(stopped.names[0])
    resumed = fedem.run(config, config.data.make(0), out=tmp_path / "run", resume=True)
    whole = small_run(None, neighbours=3)
    assert resumed.summary["test_loss"] == whole.summary["test_loss"]


# Clients unseen in training.


def test_an_unseen_client_without_validation_samples_takes_everybodys_weight() -> None:
    federation, new = _circles(), _circles(seed=1, count=1)
    result = fedem.train(federation, "fedavg", rounds=5, evaluate_every=0, neighbours=5)
    (inputs, targets), (asked, wanted) = new.train.client(0), new.test.client(0)
    personal = result.personalize(inputs, targets)
    assert personal.neighbours is not None
    assert personal.neighbours.weight == float(WEIGHTS[result.memories["last"].curve.argmin()])
    assert float((personal.predict(asked).argmax(1) == wanted).double().mean()) > 0.8
    assert result.personalize(inputs[:0], targets[:0]).neighbours is None
    assert result.newcomer().neighbours is None


def test_unseen_clients_with_validation_samples_choose_for_themselves(tmp_path: Path) -> None:
    """Everybody's neighbours help; those of a client whose labels are drawn at random do not, and it notices."""
    result = fedem.train(_circles(), "fedavg", rounds=5, evaluate_every=0, neighbours=5)
    good, bad = _circles(seed=1, count=1), _circles(1.0, seed=2, count=1, size=600)
    weights = []
    for federation in (good, bad):
        fitted = result.with_unseen(federation)
        weights.append(fitted.summary["neighbours_weight"])
        again = fedem.Result.load(fitted.save(tmp_path / f"run-{len(weights)}"))
        inputs = federation.test.client(0)[0]
        assert torch.equal(again.predict("client 0", inputs), fitted.predict("client 0", inputs))
    assert weights[0] > 0.6
    assert weights[1] < 0.3


# Regression, from a table with units.


def test_numbers_are_predicted_in_their_own_units(tmp_path: Path) -> None:
    import pandas

    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(600, 1))
    frame = pandas.DataFrame({"x": x[:, 0], "y": 500 + 100 * np.sin(5 * x[:, 0]), "client": rng.integers(0, 3, 600)})
    dataset = fedem.from_frame(frame)
    settings = {"rounds": 5, "evaluate_every": 0, "model": "linear"}
    plain = fedem.train(dataset, "fedavg", **settings)
    result = fedem.train(dataset, "fedavg", neighbours=3, **settings)
    assert result.summary["test_mean_squared_error"] < 0.1 * plain.summary["test_mean_squared_error"]
    found = result.predict("1", pandas.DataFrame({"x": [0.2, -0.3]}))
    np.testing.assert_allclose(found[:, 0].numpy(), 500 + 100 * np.sin([1.0, -1.5]), atol=20)


# The command line, and what is refused.


def test_neighbours_are_asked_for_on_the_command_line(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    code, _, err = run("evaluate", "run", "--neighbours", "4", "--out", "scores.json")
    assert (code, err) == (0, "")
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["test_loss"] == reassess(tmp_path / "run", neighbours=4).summary["test_loss"]
    code, _, err = run("evaluate", "run", "--neighbours", "4", "--save", "kept", "--quiet")
    assert (code, err) == (0, "")
    kept, inputs = fedem.Result.load(tmp_path / "kept"), np.ones((2, SMALL["dimension"]), np.float32)
    asked = small_run(None, neighbours=4)
    assert torch.equal(kept.predict(kept.names[3], inputs), asked.predict(kept.names[3], inputs))
    code, _, err = run("evaluate", "run", "--neighbours", "4", "--save", "kept")
    assert (code, "kept holds a run already" in err) == (2, True), err
    code, _, err = run("evaluate", "run", "--neighbours", "-1")
    assert (code, "run.neighbours is -1" in err) == (2, True), err
    code, _, err = run("evaluate", "run", "--neighbours", "4", "--data", "new.csv")
    assert (code, "--neighbours is given with --data" in err) == (2, True), err


def test_a_run_with_neighbours_predicts_on_the_command_line(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    result = small_run(tmp_path / "run", neighbours=4)
    inputs = RNG.normal(size=(5, SMALL["dimension"])).astype(np.float32)
    owner, new = result.names[1], RNG.integers(0, 2, size=5)
    np.savez(tmp_path / "new.npz", x=inputs, y=new, client=np.array(["new"] * 5))
    code, _, err = run("predict", "run", "--data", "new.npz", "--client", owner, "--out", "found.npz")
    assert (code, err) == (0, "")
    np.testing.assert_array_equal(np.load(tmp_path / "found.npz")["predictions"], result.predict(owner, inputs).numpy())
    code, _, err = run("personalize", "run", "--data", "new.npz", "--out", "fitted", "--quiet")
    assert (code, err) == (0, "")
    code, _, err = run("predict", "fitted", "--data", "new.npz", "--out", "theirs.npz")
    assert (code, err) == (0, "")
    expected = fedem.Result.load(tmp_path / "fitted").predict("new", inputs).numpy()
    np.testing.assert_array_equal(np.load(tmp_path / "theirs.npz")["predictions"], expected)
    code, _, err = run("export", "run", "--client", owner, "--out", "model")
    assert (code, "run.neighbours is 4" in err) == (2, True), err


def test_a_model_with_neighbours_is_not_exported_but_the_components_are(tmp_path: Path) -> None:
    result = small_run(None, neighbours=4)
    with pytest.raises(UserError, match=r"run\.neighbours is 4: the client looks at its training samples"):
        export_client(result, result.names[0], tmp_path / "model")
    assert not (tmp_path / "model").exists()
    export_client(result, None, tmp_path / "components")
    assert (tmp_path / "components").is_dir()


def test_neighbours_are_refused_where_nothing_says_how_much_they_count() -> None:
    pairs = [(REMEMBERED, (REMEMBERED[:, 0] > 0).astype(np.int64))]
    federation = Federation.from_clients(pairs, validation=0, test=0.2)
    with pytest.raises(UserError, match=r"run\.neighbours is 5, but no client has validation samples"):
        fedem.train(federation, "fedavg", rounds=1, neighbours=5)


def test_neighbours_are_refused_in_a_deployment() -> None:
    config = small_config(neighbours=5)
    with pytest.raises(UserError, match=r"run\.neighbours is 5; allowed in a deployment"):
        Plan.make(config, config.data.make(0))


def test_clients_without_validation_samples_take_everybodys_weight() -> None:
    federation = make_federation()
    training = make_training(federation=federation)
    personalizer = make_personalizer(training, neighbours=3)
    found = personalizer.predictors(advance(training), federation)
    assert found.memory is not None
    again = personalizer.remembering(found._replace(memory=None), federation.train, None, found.memory.curve)
    assert again.memory is not None
    everybody = float(WEIGHTS[found.memory.curve.argmin()])
    assert again.memory.weights.tolist() == pytest.approx([everybody] * 5)
    nobody = federation.train.take(torch.arange(0))
    assert personalizer.remembering(found._replace(memory=None), nobody, None, found.memory.curve).memory is None
