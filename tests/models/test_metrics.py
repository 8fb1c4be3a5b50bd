"""Metrics against scikit-learn and closed forms, and which of them fit a task."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torch import Tensor

from fedem.core.errors import UserError
from fedem.models.losses import CLASSES, NUMBERS, CrossEntropy, Logistic, SquaredError
from fedem.models.metrics import METRICS, Metric, choose_metrics, find_metric


def _value(name: str, predictions: Tensor, targets: Tensor) -> float | None:
    metric = find_metric(name)
    if metric.over_client is not None:
        return metric.over_client(predictions, targets)
    assert metric.per_sample is not None
    return float(metric.per_sample(predictions, targets).mean())


def _classes(num_classes: int, count: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    targets = torch.randint(num_classes, (count,), generator=generator)
    logits = torch.randn(count, num_classes, generator=generator, dtype=torch.float64)
    return (logits + 1.5 * torch.eye(num_classes, dtype=torch.float64)[targets]).softmax(-1), targets


def _binary(score: Callable[..., float]) -> Callable[..., float]:
    return lambda targets, chances: score(targets, chances[:, 1])


def _guesses(score: Callable[..., float], **options: object) -> Callable[..., float]:
    return lambda targets, chances: score(targets, chances.argmax(1), **options)


def _one_against_rest(score: Callable[..., float]) -> Callable[..., float]:
    return lambda targets, chances: float(
        np.mean([score(targets == label, chances[:, label]) for label in range(chances.shape[1])])
    )


@pytest.mark.parametrize("num_classes", [2, 4, 7])
def test_classes_agree_with_scikit_learn(num_classes: int) -> None:
    predictions, targets = _classes(num_classes)
    by_class = _binary if num_classes == 2 else _one_against_rest
    expected: dict[str, Callable[..., float]] = {
        "accuracy": _guesses(sklearn.accuracy_score),
        "balanced_accuracy": _guesses(sklearn.balanced_accuracy_score),
        "macro_f1": _guesses(sklearn.f1_score, average="macro"),
        "recall": _guesses(sklearn.recall_score, average="binary" if num_classes == 2 else "macro"),
        "f1": _guesses(sklearn.f1_score, average="binary" if num_classes == 2 else "macro"),
        "roc_auc": by_class(sklearn.roc_auc_score),
        "average_precision": by_class(sklearn.average_precision_score),
        "log_loss": sklearn.log_loss,
    }
    if num_classes > 3:
        expected["top_3_accuracy"] = lambda targets, chances: sklearn.top_k_accuracy_score(targets, chances, k=3)
    for name, score in expected.items():
        assert _value(name, predictions, targets) == pytest.approx(score(targets.numpy(), predictions.numpy())), name


@pytest.mark.parametrize("dimensions", [1, 3])
def test_numbers_agree_with_scikit_learn(dimensions: int) -> None:
    generator = torch.Generator().manual_seed(dimensions)
    targets = torch.randn(50, dimensions, generator=generator, dtype=torch.float64)
    predictions = targets + 0.3 * torch.randn(50, dimensions, generator=generator, dtype=torch.float64)
    given = targets.squeeze(1)  # a single target may be flat
    y, found = targets.numpy(), predictions.numpy()
    assert _value("mean_squared_error", predictions, given) == pytest.approx(sklearn.mean_squared_error(y, found))
    assert _value("rmse", predictions, given) == pytest.approx(sklearn.mean_squared_error(y, found) ** 0.5)
    assert _value("mae", predictions, given) == pytest.approx(sklearn.mean_absolute_error(y, found))
    assert _value("r2", predictions, given) == pytest.approx(sklearn.r2_score(y, found))


def test_a_client_of_one_class_has_no_ranking() -> None:
    predictions, _ = _classes(2, 5)
    for label in (0, 1):
        targets = torch.full((5,), label)
        assert _value("roc_auc", predictions, targets) is None
        assert _value("average_precision", predictions, targets) is None
        assert _value("balanced_accuracy", predictions, targets) == _value("accuracy", predictions, targets)


def test_classes_that_a_client_lacks_are_left_out_of_its_ranking() -> None:
    predictions, targets = _classes(4)
    kept = targets < 3
    some, theirs = predictions[kept], targets[kept]
    expected = np.mean([sklearn.roc_auc_score(theirs.numpy() == label, some[:, label].numpy()) for label in range(3)])
    assert _value("roc_auc", some, theirs) == pytest.approx(expected)


def test_targets_that_never_differ_have_no_r2() -> None:
    assert _value("r2", torch.ones(4, 1), torch.ones(4)) is None


def test_the_calibration_error_by_hand() -> None:
    # Two samples of confidence 0.9, one of them right; two of 0.6, both right.
    first = torch.tensor([0.9, 0.9, 0.6, 0.6], dtype=torch.float64)
    targets = torch.tensor([0, 1, 0, 0])
    found = _value("calibration_error", torch.stack([first, 1 - first], 1), targets)
    assert found == pytest.approx((2 * abs(0.5 - 0.9) + 2 * abs(1 - 0.6)) / 4)
    sure = torch.eye(2, dtype=torch.float64)[targets]
    assert _value("calibration_error", sure, targets) == 0


def test_a_probability_of_zero_costs_a_finite_loss() -> None:
    found = _value("log_loss", torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert found is not None
    assert 80 < found < math.inf


def test_the_loss_s_own_metric_unless_others_are_named() -> None:
    assert [metric.name for metric in choose_metrics("", Logistic(), 1)] == ["accuracy"]
    assert [metric.name for metric in choose_metrics("", SquaredError(), 1)] == ["mean_squared_error"]
    named = choose_metrics("roc_auc,accuracy,top_2_accuracy,roc_auc,top_2_accuracy", CrossEntropy(), 3)
    assert [metric.name for metric in named] == ["roc_auc", "accuracy", "top_2_accuracy"]


@pytest.mark.parametrize(
    ("names", "loss", "outputs", "message"),
    [
        ("accuracy,r2", CrossEntropy(), 3, r"'r2' does not fit the task, which is to predict 3 classes; allowed: acc"),
        ("macro_f1", SquaredError(), 1, r"'macro_f1' does not fit .* numbers; allowed: mean_squared_error, rmse, mae"),
        (
            "top_5_accuracy",
            Logistic(),
            1,
            r"'top_5_accuracy' does not fit .* 2 classes; .*macro_f1, recall, f1, log_loss, cali",
        ),
        ("acuracy", Logistic(), 1, r"Unknown metric 'acuracy'; allowed: .* Did you mean 'accuracy'"),
    ],
)
def test_metrics_that_do_not_fit_are_refused(
    names: str, loss: CrossEntropy | Logistic | SquaredError, outputs: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        choose_metrics(names, loss, outputs)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"'roc_auc' needs the package scikit-learn.*fedem\[metrics\]"):
        choose_metrics("roc_auc", Logistic(), 1)
    without = [metric.name for metric in METRICS.values() if not metric.needs_sklearn]
    assert {"accuracy", "log_loss", "calibration_error", "top_5_accuracy", "rmse", "mae", "r2"} <= set(without)


def test_a_metric_has_one_function() -> None:
    with pytest.raises(UserError, match="one of per_sample and over_client"):
        Metric("mine", "classes")


@pytest.mark.parametrize("quality", [-50.0, 0.0, 50.0])
def test_values_lie_within_the_bounds_that_metrics_declare(quality: float) -> None:
    """The worst, the useless and the perfect predictor; shares and errors come as near to a bound as they can."""
    targets = torch.arange(40) % 6
    chances = (quality * torch.eye(6, dtype=torch.float64)[targets]).softmax(-1)
    numbers = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    found = {name: _value(name, chances, targets) for name, each in METRICS.items() if each.task == CLASSES}
    found |= {
        name: _value(name, numbers * quality / 50, numbers) for name, each in METRICS.items() if each.task == NUMBERS
    }
    for name, value in found.items():
        least, most = METRICS[name].bounds
        assert value is not None
        assert least <= value <= most + 1e-12
        assert least == 0 or name == "r2"
        best = most if METRICS[name].larger_is_better else least
        assert quality < 50 or value == pytest.approx(best, abs=1e-9)
