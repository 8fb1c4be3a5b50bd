"""Classes that count the same: in the local steps alone, for every engine, as scikit-learn weighs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_class_weight

import fedem
from fedem.core.errors import UserError
from fedem.models.losses import CrossEntropy, Logistic

LOSSES = {2: "logistic", 3: "cross_entropy"}


def federation(num_classes: int = 2, num_clients: int = 3) -> fedem.Federation:
    """Clients whose first class is the most frequent by far."""
    rng = np.random.default_rng(num_classes)
    clients = []
    for _ in range(num_clients):
        inputs = rng.normal(size=(90, 3))
        signal = inputs @ [1.0, -1.0, 0.5] + rng.logistic(size=90)
        clients.append((inputs, np.digitize(signal, np.quantile(signal, [0.85, 0.95][: num_classes - 1]))))
    return fedem.Federation.from_clients(clients, validation=0, test=0.1)


def test_weights_are_those_of_scikit_learn() -> None:
    targets = torch.tensor([0] * 50 + [1] * 5 + [3] * 10)
    loss = CrossEntropy(class_weights="balanced")
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=targets.numpy())
    found = loss.weights_of(targets, 5)
    assert [found[0], found[1], found[3]] == pytest.approx(expected)
    assert (found[2], found[4]) == (1, 1)
    assert CrossEntropy().weights_of(targets, 5) is None
    with pytest.raises(UserError, match="allowed: 0 to 1"):
        Logistic(class_weights="balanced").weights_of(targets, 2)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_optimum_is_that_of_a_weighted_regression(num_classes: int) -> None:
    data = federation(num_classes, num_clients=1)
    loss = {"name": LOSSES[num_classes], "class_weights": "balanced"}
    how = {"loss": loss, "solver": "newton", "learning_rate": 1.0, "batch_size": 0, "dtype": "float64"}
    result = fedem.train(data, "fedavg", rounds=8, schedule="constant", **how)
    inputs, targets = data.train.client(0)
    expected = LogisticRegression(C=1e9, class_weight="balanced", tol=1e-10, max_iter=10_000).fit(inputs, targets)
    new = data.test.client(0).inputs
    found = result.predict(data.names[0], new)
    np.testing.assert_allclose(found.numpy(), expected.predict_proba(new), atol=2e-3)
    plain = LogisticRegression(C=1e9).fit(inputs, targets).predict_proba(new)
    assert np.abs(found.numpy() - plain).max() > 0.1


@pytest.mark.parametrize("num_classes", [2, 3])
def test_responsibilities_go_by_likelihoods_as_they_are(num_classes: int) -> None:
    def one_round(weights: str) -> fedem.Result:
        loss = {"name": LOSSES[num_classes], "class_weights": weights}
        return fedem.train(federation(num_classes), "fedem", rounds=1, seed=3, loss=loss)

    plain, weighted = one_round("none"), one_round("balanced")
    mixtures = [[row[f"weight_{m}"] for row in each.clients for m in range(3)] for each in (plain, weighted)]
    # The E-step of the first round saw the same components.
    assert mixtures[0] == mixtures[1]
    leaves = [each.states["last"].shared for each in (plain, weighted)]
    assert any(not torch.equal(leaf, leaves[1][name]) for name, leaf in leaves[0].items())


@pytest.mark.parametrize("method", ["fedem", "ditto"])
def test_engines_agree(method: str) -> None:
    loss = {"name": "cross_entropy", "class_weights": "balanced"}
    found = [
        fedem.train(federation(3), method, rounds=3, engine=engine, loss=loss, dtype="float64").summary["train_loss"]
        for engine in ("stacked", "one_by_one")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_more_of_a_rare_class_is_found(run, tmp_path: Path) -> None:
    data = federation()
    rows = {"x": data.train.inputs.numpy(), "y": data.train.targets.numpy()}
    np.savez(tmp_path / "d.npz", **rows, client=np.repeat(np.arange(3), data.train.sizes.numpy()))
    recalls = []
    for weights in ("none", "balanced"):
        more = ("--set", "loss.name=logistic", "--set", f"loss.class_weights={weights}", "--metrics", "recall")
        code, _, err = run("train", "--data", "d.npz", "--rounds", "20", *more, "--out", weights, "-q")
        assert code == 0, err
        recalls.append(json.loads((tmp_path / weights / "summary.json").read_text())["train_recall_pooled"])
    assert recalls[1] > recalls[0] + 0.2
    loaded = fedem.Result.load(tmp_path / "balanced")
    assert loaded.recipe.model.class_weights == pytest.approx(loaded.recipe.format.class_weights)


def test_convergence_is_not_diagnosed_with_weights() -> None:
    loss = {"name": "logistic", "class_weights": "balanced"}
    for setting in ("diagnose_every", "measure_alpha_every"):
        with pytest.raises(UserError, match=r'weights of classes.*allowed: loss.class_weights = "none"'):
            fedem.train(federation(), rounds=1, loss=loss, **{setting: 1})
