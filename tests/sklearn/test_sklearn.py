"""Estimators with scikit-learn's conventions, whose groups are the clients."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import sklearn
from sklearn.base import clone
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedem
from fedem.sklearn import FedEMClassifier, FedEMRegressor

RNG = np.random.default_rng(0)
X = 3 + RNG.normal(size=(240, 2))
GROUPS = np.arange(240) % 6
SIGN = np.where(GROUPS % 2, 1, -1)  # clients of two kinds, whose labels are opposite
Y = np.where(SIGN * (X[:, 0] - 3) > 0, "yes", "no")
NUMBERS = 100 + 10 * SIGN * (X[:, 0] - 3)
QUICK: dict[str, Any] = {"num_components": 2, "rounds": 20, "learning_rate": 2.0, "settings": {"local_steps": 5}}


@pytest.fixture(scope="module")
def model() -> FedEMClassifier:
    return FedEMClassifier(**QUICK).fit(X, Y, groups=GROUPS)


def test_each_group_is_predicted_by_its_own_model(model: FedEMClassifier) -> None:
    assert model.score(X, Y, groups=GROUPS) > 0.9
    assert model.score(X, Y) < 0.7  # without groups nobody knows which kind a row is of
    assert model.classes_.tolist() == ["no", "yes"]
    assert isinstance(model.result_, fedem.Result)
    for group in (0, 3):
        rows = group == GROUPS
        expected = model.result_.predict(str(group), pandas.DataFrame(X[rows], columns=["x0", "x1"])).numpy()
        np.testing.assert_allclose(model.predict_proba(X, groups=GROUPS)[rows], expected, rtol=1e-6)


def test_numbers_come_back_in_their_own_units() -> None:
    model = FedEMRegressor(**QUICK | {"learning_rate": 0.3}).fit(X, NUMBERS, groups=GROUPS)
    predicted = model.predict(X, groups=GROUPS)
    assert model.score(X, NUMBERS, groups=GROUPS) == r2_score(NUMBERS, predicted) > 0.9
    assert abs(predicted.mean() - 100) < 2


def test_unknown_groups_and_none_get_the_mean_weights(model: FedEMClassifier) -> None:
    weights = np.mean([model.result_.client(name).mixture_weights.numpy() for name in model.result_.names], axis=0)
    np.testing.assert_allclose(model.result_.newcomer().mixture_weights.numpy(), weights, rtol=1e-5)
    stranger = model.predict_proba(X, groups=["nobody"] * len(X))
    np.testing.assert_array_equal(stranger, model.predict_proba(X))
    mixed = model.predict_proba(X, groups=np.where(np.arange(240) < 120, GROUPS, 99))
    np.testing.assert_allclose(mixed[:120], model.predict_proba(X, groups=GROUPS)[:120], rtol=1e-5)
    np.testing.assert_allclose(mixed[120:], stranger[120:], rtol=1e-5)


def test_methods_without_mixtures_say_what_a_newcomer_gets() -> None:
    settings = {"rounds": 3, "settings": {"engine": "one_by_one"}}
    shared = FedEMClassifier("fedavg", **settings).fit(X, Y, groups=GROUPS)
    np.testing.assert_allclose(shared.predict_proba(X), shared.predict_proba(X, groups=GROUPS), rtol=1e-5)
    alone = FedEMClassifier("local", **settings).fit(X, Y, groups=GROUPS)
    assert alone.predict(X, groups=GROUPS).shape == (240,)
    with pytest.raises(fedem.UserError, match="leave nothing to share with an unseen client"):
        alone.predict(X)
    # One client: there is nobody else.
    assert FedEMClassifier("local", **settings).fit(X, Y).predict(X).shape == (240,)


def test_settings_are_those_of_train_and_clone() -> None:
    settings = {"batching.batch_size": 16, "solver": "adam", "solver.beta1": 0.8, "local_epochs": 2}
    model = clone(FedEMClassifier(model="mlp", rounds=1, random_state=7, settings=settings | {"model.hidden": 4}))
    config = model.fit(X, Y).result_.config
    assert (config.batching.batch_size, config.batching.local_epochs) == (16, 2)
    assert (config.name("solver"), config.solver.beta1, config.name("model"), config.run.seed) == (
        "adam",
        0.8,
        "mlp",
        7,
    )
    assert config.model.hidden == 4
    with pytest.raises(fedem.UserError, match="Unknown option 'batchsize'"):
        FedEMClassifier(settings={"batchsize": 1}).fit(X, Y)
    with pytest.raises(fedem.UserError, match="num_components"):
        FedEMClassifier("fedavg", num_components=2).fit(X, Y)


def test_a_data_frame_may_hold_text() -> None:
    frame = pandas.DataFrame({"kind": np.where(X[:, 0] > 3, "warm", "cold"), "y": X[:, 1], "client": X[:, 0]})
    model = FedEMClassifier(**QUICK).fit(frame, Y == "yes", groups=GROUPS)
    assert model.feature_names_in_.tolist() == ["kind", "y", "client"]
    assert model.result_.recipe.format.features == ("kind=cold", "kind=warm", "y", "client")
    assert model.predict(frame, groups=GROUPS).dtype == bool
    assert model.score(frame, Y == "yes", groups=GROUPS) > 0.9
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["y", "kind", "client"]], groups=GROUPS)
    with pytest.raises(fedem.UserError, match="Missing values: 240 in column 'y'"):
        model.predict(frame.assign(y=np.nan), groups=GROUPS)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (GROUPS[:-1], "groups has 239 labels; allowed: 240"),
        ([None, *GROUPS[1:]], "groups has no label at row 0"),
        (["1", *GROUPS[1:]], "differ but read alike"),
    ],
)
def test_wrong_groups_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(fedem.UserError, match=message):
        FedEMClassifier().fit(X, Y, groups=groups)


def test_labels_of_groups_may_be_anything_hashable() -> None:
    labels = [("ward", int(group)) for group in GROUPS]
    model = FedEMClassifier(**QUICK).fit(X, Y, groups=labels)
    assert model.score(X, Y, groups=labels) > 0.9


def test_pipelines_searches_and_folds_route_the_groups() -> None:
    with sklearn.config_context(enable_metadata_routing=True):
        inner = FedEMClassifier(**QUICK).set_fit_request(groups=True)
        inner = inner.set_predict_request(groups=True).set_score_request(groups=True)
        model = make_pipeline(StandardScaler(), inner).fit(X, Y, groups=GROUPS)
        assert accuracy_score(Y, model.predict(X, groups=GROUPS)) > 0.9
        # Folds of whole clients: those left out are newcomers, and nobody knows of which kind.
        scores = cross_val_score(model, X, Y, params={"groups": GROUPS}, cv=GroupKFold(2))
        assert scores.max() < 0.8
        # Folds of rows: everybody is known.
        search = GridSearchCV(model, {"fedemclassifier__num_components": [1, 2]}, cv=2, refit=False)
        search.fit(X, Y, groups=GROUPS)
        assert search.best_params_ == {"fedemclassifier__num_components": 2}
        assert search.best_score_ > 0.9


def test_without_routing_groups_choose_the_folds_alone() -> None:
    scores = cross_val_score(FedEMClassifier(**QUICK | {"rounds": 2}), X, Y, groups=GROUPS, cv=GroupKFold(3))
    assert scores.shape == (3,)


def test_scikit_learn_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("fedem.sklearn", "fedem.sklearn.estimators"):
        monkeypatch.delitem(sys.modules, name)
    missing = "fedem.sklearn needs the package sklearn, which is not installed: pip install 'fedem[sklearn]'."
    with pytest.raises(fedem.UserError, match=re.escape(missing)):
        import_module("fedem.sklearn")


def test_the_guide_s_code_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sklearn.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(block, names)
    assert names["model"].score(names["X"], names["y"], groups=names["groups"]) > 0.9
    assert names["scores"].min() > 0.9
