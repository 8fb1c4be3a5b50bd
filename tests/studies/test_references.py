"""References beside a run: fitted as scikit-learn would, on the run's own rows, and shown in its tables."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import RidgeCV

import fedem
from fedem.core.errors import UserError
from fedem.models.losses import Logistic, SquaredError
from fedem.models.metrics import METRICS
from fedem.studies.references import references

TITLES = ("ref. constant", "ref. linear", "ref. own linear", "ref. boosting")


def frame(kind: str, num_clients: int = 6, rows: int = 40) -> pd.DataFrame:
    """Clients with slopes of their own; the last one has few rows and is of one class."""
    rng = np.random.default_rng(3)
    clients = np.repeat(np.arange(num_clients), rows)[: num_clients * rows - rows + 4]
    inputs = rng.normal(size=(len(clients), 2))
    signal = (inputs * rng.normal(size=(num_clients, 2))[clients]).sum(1) + 0.3 * rng.normal(size=len(clients))
    targets = {"numbers": 500 + 20 * signal, "rare": (signal > np.quantile(signal, 0.93)).astype(int)}[kind]
    targets[clients == num_clients - 1] = targets.min()
    return pd.DataFrame({"client": clients, "a": inputs[:, 0], "b": inputs[:, 1], "y": targets})


def arrays(samples: fedem.data.samples.Samples) -> tuple[NDArray, NDArray, NDArray]:
    owners = np.repeat(np.arange(samples.num_clients), samples.sizes.numpy())
    return samples.inputs.double().numpy(), samples.targets.numpy(), owners


def average(federation: fedem.Federation, errors: NDArray) -> float:
    """Over clients, weighted by training samples."""
    owners = arrays(federation.test)[2]
    means = pd.Series(errors).groupby(owners).mean()
    return float(np.average(means, weights=federation.train.sizes.numpy()[means.index]))


def test_numbers_are_predicted_as_by_scikit_learn() -> None:
    federation = fedem.from_frame(frame("numbers"), target="y", client="client").federation
    found = {each.name: each.scores["test"] for each in references(federation, SquaredError(), seed=1)}
    x, y, owners = arrays(federation.train)
    new, wanted, whose = arrays(federation.test)
    center, scale = x.mean(0), x.std(0)
    x, new = (x - center) / scale, (new - center) / scale
    penalties = 10.0 ** np.arange(-3, 5)
    predicted = {"constant": np.full(len(wanted), y.mean()), "client_linear": np.zeros(len(wanted))}
    predicted["pooled_linear"] = RidgeCV(penalties).fit(x, y).predict(new)
    for client in range(federation.num_clients):
        own, theirs = owners == client, whose == client
        few = own.sum() < 5
        predicted["client_linear"][theirs] = (
            y[own].mean() if few else RidgeCV(penalties).fit(x[own], y[own]).predict(new[theirs])
        )
    trees = HistGradientBoostingRegressor(random_state=1, categorical_features=[2])
    predicted["boosting"] = trees.fit(np.column_stack([x, owners]), y).predict(np.column_stack([new, whose]))
    assert set(found) == set(predicted)
    for name, values in predicted.items():
        assert found[name].average == pytest.approx(average(federation, (values - wanted) ** 2), rel=1e-4), name
    assert found["client_linear"].average < found["pooled_linear"].average


def test_classes_are_predicted_by_the_rows_of_the_run() -> None:
    dataset = fedem.from_frame(frame("rare"), target="y", client="client")
    metrics = [METRICS[name] for name in ("accuracy", "roc_auc", "log_loss")]
    found = {each.name: each for each in references(dataset, Logistic(), metrics, seed=1)}
    federation = dataset.federation
    x, y, owners = arrays(federation.train)
    new, wanted, whose = arrays(federation.test)
    center, scale = x.mean(0), x.std(0)
    x, new = (x - center) / scale, (new - center) / scale
    constant = found["constant"].scores["test"]
    assert constant.average == pytest.approx(average(federation, wanted == 0))
    surprise = -np.log(np.where(wanted == 1, y.mean(), 1 - y.mean()))
    assert constant.loss == pytest.approx(average(federation, surprise))
    trees = HistGradientBoostingClassifier(random_state=1, categorical_features=[2], early_stopping=False)
    trees.fit(np.column_stack([x, owners]), y)
    guesses = trees.predict(np.column_stack([new, whose]))
    assert found["boosting"].scores["test"].average == pytest.approx(average(federation, guesses == wanted))
    each = found["client_linear"]
    lonely = sum(len(own) < 5 or own.nunique() < 2 for _, own in pd.Series(y).groupby(owners))
    assert each.note.startswith(f"{lonely} of 6 clients with fewer than 5 training rows or rows of one class")
    assert each.scores["test"].loss < constant.loss
    # A class that a client has not seen is not impossible.
    assert bool(torch.isfinite(each.scores["test"].losses).all())
    assert [row["client"] for row in each.clients] == list(federation.names)
    assert each.clients[0]["test_accuracy"] == pytest.approx(float(each.scores["test"].values[0]))


def test_more_clients_than_trees_take_as_categories() -> None:
    rng = np.random.default_rng(0)
    levels = rng.normal(size=300)
    clients = [(rng.normal(size=(6, 1)), np.full(6, level)) for level in levels]
    found = {each.name: each for each in references(fedem.Federation.from_clients(clients), SquaredError())}
    assert "255" in found["boosting"].note
    assert found["boosting"].scores["test"].average < 0.2 * found["constant"].scores["test"].average


def test_words_are_refused() -> None:
    federation = fedem.Federation.from_clients([(np.arange(12).reshape(6, 2), np.arange(6) % 2)])
    with pytest.raises(UserError, match=r"whole numbers.*allowed for references: floats or bytes"):
        references(federation, Logistic())


def test_train_shows_and_keeps_them(run, tmp_path: Path) -> None:
    frame("numbers").to_csv(tmp_path / "d.csv", index=False)
    code, out, err = run("train", "--data", "d.csv", "--rounds", "2", "--references", "--out", "r")
    assert code == 0, err
    assert all(title in out for title in TITLES)
    kept = json.loads((tmp_path / "r/references.json").read_text())
    assert [each["method"] for each in kept][:2] == ["reference:constant", "reference:pooled_linear"]
    assert len(kept[0]["clients"]) == 6
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    for record in (summary, *kept):
        assert record["test_mae_in_units"] == pytest.approx(summary["target_deviation"] * record["test_mae"])
        assert {"test_r2", "test_r2_pooled", "test_rmse_pooled_in_units", "bottom_decile"} <= set(record)
    assert f"{summary['test_mae_in_units']:.4f}" in out
    code, shown, _ = run("show", "r")
    assert code == 0
    assert all(title in shown for title in TITLES)


def test_compare_has_them_in_every_file(run, tmp_path: Path) -> None:
    frame("rare").to_csv(tmp_path / "d.csv", index=False)
    arguments = ("compare", "--data", "d.csv", "--methods", "fedavg", "--rounds", "2", "--seeds", "2", "--references")
    code, out, err = run(*arguments, "--out", "c")
    assert code == 0, err
    assert all(title in out for title in TITLES)
    with (tmp_path / "c/comparison.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["method"].startswith("reference:")]
    assert sorted(line["seed"] for line in lines) == ["0"] * 4 + ["1"] * 4
    content = json.loads((tmp_path / "c/comparison.json").read_text())
    row = next(row for row in content["references"] if row["method"] == "reference:boosting")
    values = {line["seed"]: float(line["test_accuracy"]) for line in lines if line["method"] == "reference:boosting"}
    assert row["figures"]["test_accuracy"]["mean"] == pytest.approx(np.mean(list(values.values())))
    best = {s: json.loads((tmp_path / f"c/fedavg-seed{s}/summary.json").read_text()) for s in values}
    gap = np.mean([value - best[s]["test_accuracy"] for s, value in values.items()])
    assert row["to_the_best"]["mean"] == pytest.approx(gap)
    markdown = (tmp_path / "c/comparison.md").read_text()
    assert all(f"| {title} |" in markdown for title in TITLES)
    constant = {line["seed"]: line["test_accuracy"] for line in lines if line["method"] == "reference:constant"}
    for seed, summary in best.items():
        assert summary["test_base_rate"] == pytest.approx(float(constant[seed]))
    assert "base rate" in out


def test_without_scikit_learn_they_are_refused_before_any_work(run, tmp_path: Path, monkeypatch) -> None:
    frame("rare").to_csv(tmp_path / "d.csv", index=False)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for command in ("train", "compare"):
        code, _, err = run(command, "--data", "d.csv", "--references", "--out", "r")
        assert code == 2
        assert "--references needs the package sklearn, which is not installed: pip install 'fedem[metrics]'." in err
        assert not (tmp_path / "r").exists()
