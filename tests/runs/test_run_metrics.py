"""Metrics that are chosen for a run: in its files, its tables and its report, and what is best by them."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import advance, make_personalizer, make_training
from sklearn.metrics import roc_auc_score

import fedem
from fedem.core.errors import UserError
from fedem.engines import OneByOne, Stacked
from fedem.models.metrics import METRICS
from fedem.runs.evaluate import evaluate, metrics_of

Run = Callable[..., tuple[int, str, str]]
TINY = ("--set", "data.num_clients=8", "--set", "data.num_test=6", "--set", "data.dimension=4", "--rounds", "2")


def _federation() -> fedem.Federation:
    """Clients of two classes, and one whose samples are all of one class."""
    generator = np.random.default_rng(0)
    clients = []
    for number in range(6):
        inputs = generator.normal(size=(40, 3))
        targets = (inputs[:, number % 3] > 0).astype(int) if number else np.ones(40, dtype=int)
        clients.append((inputs, targets))
    return fedem.Federation.from_clients(clients, validation=0.2, test=0.3)


def test_figures_are_those_of_the_clients_predictions() -> None:
    federation = _federation()
    result = fedem.train(federation, rounds=3, metrics=["roc_auc", "accuracy"], seed=1)
    values, pairs = [], []
    for position, name in enumerate(federation.names):
        inputs, targets = federation.test.client(position)
        chances = result.predict(name, inputs)[:, 1]
        pairs.append((targets, chances))
        values.append(roc_auc_score(targets, chances) if len(targets.unique()) > 1 else None)
    weights = federation.train.sizes.tolist()
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    summary = result.summary
    assert values[0] is None
    assert summary["test_roc_auc"] == pytest.approx(sum(v * w for v, w in known) / sum(w for _, w in known))
    assert summary["test_roc_auc_unweighted"] == pytest.approx(np.mean([value for value, _ in known]))
    assert summary["test_roc_auc_undefined"] == 1
    targets, chances = (torch.cat(column) for column in zip(*pairs, strict=True))
    assert summary["test_roc_auc_pooled"] == pytest.approx(roc_auc_score(targets, chances))
    assert summary["bottom_decile"] == pytest.approx(min(value for value, _ in known))
    assert [row["test_roc_auc"] for row in result.clients][1:] == pytest.approx([value for value, _ in known])
    assert [metric.name for metric in metrics_of(summary)] == ["roc_auc", "accuracy"]


def test_metrics_change_no_other_figure() -> None:
    usual = fedem.train(_federation(), rounds=3).summary
    more = fedem.train(_federation(), rounds=3, metrics="accuracy, log_loss,calibration_error").summary
    # What is measured differs from run to run; the state that is best has further figures.
    same = [key for key in usual if key != "best" and not key.startswith(("seconds", "peak"))]
    assert {key: more[key] for key in same} == {key: usual[key] for key in same}
    assert usual["best"].items() <= more["best"].items()
    assert more["test_log_loss"] == pytest.approx(more["test_loss"], rel=1e-5)


def test_the_first_metric_chooses_the_best_state() -> None:
    history = fedem.train(_federation(), rounds=6, metrics=["log_loss", "accuracy"], evaluate_every=1)
    losses = [line["validation_log_loss"] for line in history.history]
    assert history.summary["best"]["round"] == 1 + int(np.argmin(losses))
    assert history.summary["best"]["validation_log_loss"] == pytest.approx(min(losses))


def _table(share: float) -> fedem.Dataset:
    """A table of two classes, the second of which has this share of the rows."""
    rng = np.random.default_rng(1)
    rows = {"client": np.arange(200) % 4, "a": rng.normal(size=200), "y": np.arange(200) < 200 * share}
    return fedem.from_frame(pd.DataFrame(rows))


def _judged(summary: dict[str, object]) -> list[str]:
    return [metric.name for metric in metrics_of(summary)]


def test_a_table_with_a_rare_class_is_judged_by_more_than_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    rare = fedem.train(_table(0.08), rounds=2, evaluate_every=1)
    assert _judged(rare.summary) == ["accuracy", "roc_auc", "average_precision", "recall", "f1"]
    assert rare.summary["test_base_rate"] == pytest.approx(0.92, abs=0.05)
    # The accuracy alone decides what is best, and is all that rounds are scored by.
    assert _judged(rare.history[0]) == ["accuracy"]
    assert {"test_f1", "test_roc_auc_pooled"} <= set(rare.summary["best"])
    assert _judged(fedem.train(_table(0.4), rounds=1).summary) == ["accuracy"]
    assert _judged(fedem.train(_table(0.08), rounds=1, metrics=["log_loss"]).summary) == ["log_loss"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _judged(fedem.train(_table(0.08), rounds=1).summary) == ["accuracy", "recall", "f1"]


def test_a_table_of_numbers_is_judged_in_its_own_units() -> None:
    rng = np.random.default_rng(1)
    rows = {"client": np.arange(120) % 3, "a": (a := rng.normal(size=120)), "y": 1000 + 70 * a + rng.normal(size=120)}
    dataset = fedem.from_frame(pd.DataFrame(rows))
    result = fedem.train(dataset, rounds=2)
    assert _judged(result.summary) == ["mean_squared_error", "r2", "rmse", "mae"]
    test, target = dataset.federation.test, dataset.encoding.target
    errors = []
    for position, name in enumerate(dataset.federation.names):
        inputs, targets = test.client(position)
        errors.append(result.predict(name, inputs)[:, 0] - (targets * target.deviation + target.mean))
    rmse = float(torch.cat(errors).double().square().mean().sqrt())
    assert result.summary["test_rmse_pooled_in_units"] == pytest.approx(rmse, rel=1e-4)
    mae = [float(each.abs().mean()) for each in errors]
    assert result.summary["test_mae_in_units"] == pytest.approx(np.mean(mae), rel=1e-4)


@pytest.mark.parametrize("engine", [OneByOne(), Stacked(2)], ids=["one_by_one", "stacked"])
def test_engines_agree(engine: OneByOne | Stacked) -> None:
    training = make_training("fedem")
    found = make_personalizer(training).predictors(advance(training), training.federation)
    chosen = [METRICS[name] for name in ("calibration_error", "log_loss", "roc_auc")]
    scores = evaluate(training.algorithm, engine, found, training.federation, chosen)["train"]
    others = evaluate(training.algorithm, Stacked(), found, training.federation, chosen)["train"]
    for one, other in zip(scores.by_metric, others.by_metric, strict=True):
        torch.testing.assert_close(one.values, other.values, equal_nan=True)


def test_regression(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    clients = [((x := generator.normal(size=(30, 2))), x[:, 0] * slope) for slope in range(1, 5)]
    federation = fedem.Federation.from_clients(clients, test=0.3)
    result = fedem.train(federation, "local", rounds=5, learning_rate=0.1, metrics=["r2", "rmse", "mae"])
    position, name = 2, federation.names[2]
    inputs, targets = federation.test.client(position)
    errors = (result.predict(name, inputs)[:, 0] - targets).double()
    row = result.clients[position]
    assert row["test_rmse"] == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-5)
    assert row["test_mae"] == pytest.approx(float(errors.abs().mean()), rel=1e-5)
    assert row["test_r2"] == pytest.approx(1 - float(errors.square().mean() / targets.double().var(correction=0)))
    with pytest.raises(UserError, match="'accuracy' does not fit the task, which is to predict numbers"):
        fedem.train(federation, rounds=1, metrics=["accuracy"], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_metric_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = fedem.Metric("confidence", "classes", lambda predictions, targets: predictions.amax(-1))
    monkeypatch.setitem(fedem.METRICS, "confidence", mine)
    summary = fedem.train(_federation(), rounds=1, metrics=["confidence"]).summary
    assert 0.5 <= summary["test_confidence"] <= 1


def test_the_command_line_has_them_in_files_tables_and_report(run: Run, tmp_path: Path) -> None:
    names = "balanced_accuracy,roc_auc"
    code, out, err = run("train", *TINY, "--metrics", names, "--out", tmp_path / "run")
    assert code == 0, err
    assert "ROC-AUC" in out
    assert f'metrics = "{names}"' in (tmp_path / "run/config.toml").read_text()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {"test_balanced_accuracy", "test_roc_auc", "oracle_balanced_accuracy", "oracle_roc_auc"} <= set(summary)
    assert "test_accuracy" not in summary
    with (tmp_path / "run/clients.csv").open() as file:
        assert {"test_balanced_accuracy", "test_roc_auc"} <= set(next(csv.reader(file)))
    code, out, _ = run("evaluate", tmp_path / "run", "--metrics", "accuracy,top_1_accuracy", "--out", "again.json")
    assert code == 0
    again = json.loads(Path("again.json").read_text())
    assert again["test_accuracy"] == pytest.approx(again["test_top_1_accuracy"])
    assert "test_roc_auc" not in again
    code, _, err = run("report", tmp_path / "run", "--out", "page.html", "-q")
    assert code == 0, err
    page = Path("page.html").read_text()
    assert "test balanced accuracy in %" in page
    assert "test ROC-AUC" in page


@pytest.mark.slow
def test_compare_and_tune_follow_the_first(run: Run, tmp_path: Path) -> None:
    names = ("--metrics", "log_loss,macro_f1")
    code, out, err = run("compare", *TINY, *names, "--methods", "local,fedavg", "--seeds", "1", "--out", "c")
    assert code == 0, err
    assert "log loss" in out
    assert "macro F1" in out
    content = json.loads(Path("c/comparison.json").read_text())
    means = [row["figures"]["test_log_loss"]["mean"] for row in content["methods"]]
    assert content["metric"] == "log_loss"
    assert means == sorted(means)
    assert all("test_macro_f1" in row["figures"] for row in content["methods"])
    grid = "schedule.learning_rate=0.001,0.1"
    code, out, err = run("tune", *TINY, *names, "--method", "fedavg", "--grid", grid, "--out", "t")
    assert code == 0, err
    tuned = json.loads(Path("t/tune.json").read_text())
    assert tuned["metric"] == "validation_log_loss"
    scores = {trial["values"]["schedule.learning_rate"]: trial["scores"][0] for trial in tuned["trials"]}
    assert tuned["chosen"]["schedule.learning_rate"] == min(scores, key=lambda rate: scores[rate])


def test_refusals_of_the_command_line(run: Run) -> None:
    code, _, err = run("train", *TINY, "--metrics", "r2", "--out", "run")
    assert code == 2
    assert "Metric 'r2' does not fit the task, which is to predict 2 classes; allowed: accuracy, balanced" in err
    _, _, err = run("train", *TINY, "--metrics", "acc", "--out", "run")
    assert "Unknown metric 'acc'" in err
    assert not Path("run").exists()


def test_a_list_or_words_with_commas() -> None:
    listed = fedem.Config.build({"run": {"metrics": ["accuracy", "macro_f1"]}})
    assert listed.run.metrics == "accuracy,macro_f1"
    assert fedem.Config.build({"run": {"metrics": " accuracy , macro_f1"}}) == listed
    with pytest.raises(UserError, match=r"run.metrics is \[1\]"):
        fedem.Config.build({"run": {"metrics": [1]}})
