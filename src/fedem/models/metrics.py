"""Metrics by name: what a client's predictions are judged by.

A metric is either a mean over samples (accuracy, squared error), which engines sum up while they stream batches, or a
function of all of a client's predictions (ROC-AUC, R2), for which they are collected. Over a client it may be
undefined, such as the ROC-AUC of a client whose samples are all of one class.

Shapes: n samples, K classes, D target dimensions. Predictions are class probabilities ``[n, K]`` or means ``[n, D]``,
targets ``[n]`` or ``[n, D]``.
"""

import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedem.core.errors import UserError, unknown
from fedem.models.losses import CLASSES, NUMBERS, Loss, log_loss

_TOP = re.compile(r"top_([1-9]\d*)_accuracy")
_BINS = 15
# What people also decide by. A class is rare below this share of what it would have if all were equally frequent.
_FURTHER = {NUMBERS: ("r2", "rmse", "mae"), CLASSES: ("roc_auc", "average_precision", "recall", "f1")}
_RARE = 0.2
_SHARE, _ERROR = (0.0, 1.0), (0.0, math.inf)  # the values that shares and errors can have


@dataclass(frozen=True)
class Metric:
    """How predictions are judged, and how the figure is read.

    Attributes:
        name: as settings and files have it; ``test_NAME`` is a figure of summary.json.
        task: what is predicted, CLASSES or NUMBERS.
        per_sample: ``(predictions, targets) -> [n]``, whose mean over a client's samples is the client's value; pure,
            as it runs under vmap.
        over_client: ``(predictions, targets) -> number`` for all samples of a client, None where it is undefined; on
            the CPU, in float64. A metric has one of the two functions.
        larger_is_better: whether the best has the largest value.
        in_percent: format of the figure: a percentage, or a plain number.
        title: in tables and sentences.
        needs_sklearn: whether it is scikit-learn's, which the extra "metrics" brings.
        least_classes: the smallest number of classes for which it says anything.
        has_units: whether it is in the targets' units, in which targets that were standardised are not.
        bounds: the least and the largest value that it can have; what lies outside was not measured.
    """

    name: str
    task: str
    per_sample: Callable[[Tensor, Tensor], Tensor] | None = None
    over_client: Callable[[Tensor, Tensor], float | None] | None = None
    _: KW_ONLY
    larger_is_better: bool = True
    in_percent: bool = False
    title: str = ""
    needs_sklearn: bool = False
    least_classes: int = 2
    has_units: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)

    def __post_init__(self) -> None:
        if (self.per_sample is None) == (self.over_client is None):
            raise UserError(f"Metric {self.name!r} must have one of per_sample and over_client.")
        object.__setattr__(self, "title", self.title or self.name.replace("_", " "))

    @property
    def unit(self) -> str:
        """The title with the unit of the figures in tables."""
        return f"{self.title} in %" if self.in_percent else self.title

    @property
    def scale(self) -> int:
        """What a value is multiplied by to be in that unit."""
        return 100 if self.in_percent else 1

    def text(self, value: float | None, percent: str = ".1f", plain: str = ".4g") -> str:
        """Format a value for a table, by one of two format specifications; "-" where there is none."""
        return "-" if value is None else format(self.scale * value, percent if self.in_percent else plain)


def _is_right(predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions.argmax(-1) == targets).to(predictions.dtype)


def _squared(predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions - targets.reshape(predictions.shape)).square().mean(-1)


def _absolute(predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions - targets.reshape(predictions.shape)).abs().mean(-1)


def _rmse(predictions: Tensor, targets: Tensor) -> float:
    return float(_squared(predictions, targets).mean().sqrt())


def _r2(predictions: Tensor, targets: Tensor) -> float | None:
    """1 - residual / total sum of squares, the mean over the D targets; undefined where a target never differs."""
    wanted = targets.reshape(predictions.shape)
    total = (wanted - wanted.mean(0)).square().sum(0)
    return None if bool((total == 0).any()) else float((1 - (predictions - wanted).square().sum(0) / total).mean())


def _calibration_error(predictions: Tensor, targets: Tensor) -> float:
    """Mean gap between confidence and accuracy over 15 bins of the confidence, weighted by their samples (ECE)."""
    confidence, guess = predictions.max(-1)
    # A bin has its upper end: (0, 1/15], (1/15, 2/15], ...
    place = (confidence * _BINS).ceil().long().clamp(1, _BINS) - 1
    gaps = confidence - (guess == targets).to(confidence.dtype)
    return float(torch.zeros(_BINS, dtype=gaps.dtype).index_add(0, place, gaps).abs().sum() / len(guess))


def _by_class(score: str, predictions: Tensor, targets: Tensor) -> float | None:
    """One class against the rest, the mean over the classes that occur; of two, the second against the first."""
    from sklearn import metrics

    there = one_hot(targets, predictions.shape[1])
    classes = there.any(0).nonzero().flatten()
    if len(classes) < 2:
        return None  # undefined where all samples are of one class
    columns = classes if predictions.shape[1] > 2 else classes[1]
    return float(getattr(metrics, score)(there[:, columns].numpy(), predictions[:, columns].numpy()))


def _by_guess(score: str, predictions: Tensor, targets: Tensor) -> float:
    """Return a score of the most probable classes, the mean over classes."""
    from sklearn import metrics

    # Balanced accuracy is the mean recall of the classes that occur.
    only = {"labels": targets.unique().numpy()} if score == "recall_score" else {}
    guesses = predictions.argmax(1).numpy()
    return float(getattr(metrics, score)(targets.numpy(), guesses, average="macro", zero_division=0, **only))


def _recall(predictions: Tensor, targets: Tensor) -> float | None:
    hits, _, there = _counted(predictions, targets)
    return _over_classes(hits, there)


def _f1(predictions: Tensor, targets: Tensor) -> float | None:
    hits, guessed, there = _counted(predictions, targets)
    return _over_classes(2 * hits, guessed + there)


def _counted(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many samples of each class are found, guessed and there, ``[K]`` each; of two classes the second."""
    guessed, there = (one_hot(each, predictions.shape[1]) for each in (predictions.argmax(1), targets))
    first = 1 if predictions.shape[1] == 2 else 0
    return (guessed * there).sum(0)[first:], guessed.sum(0)[first:], there.sum(0)[first:]


def _over_classes(parts: Tensor, wholes: Tensor) -> float | None:
    """Return the mean share over the classes that have a whole; undefined where none has."""
    known = wholes > 0
    return float((parts[known] / wholes[known].double()).mean()) if bool(known.any()) else None


def _is_among(k: int, predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions.topk(k, -1).indices == targets.unsqueeze(-1)).any(-1).to(predictions.dtype)


def _top(k: int) -> Metric:
    name, title = f"top_{k}_accuracy", f"top-{k} accuracy"
    judge = partial(_is_among, k)
    return Metric(name, CLASSES, judge, in_percent=True, title=title, least_classes=k + 1, bounds=_SHARE)


def _of_sklearn(name: str, judge: Callable[..., float | None], score: str, **options: Any) -> Metric:
    return Metric(name, CLASSES, None, partial(judge, score), needs_sklearn=True, bounds=_SHARE, **options)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", CLASSES, _is_right, in_percent=True, bounds=_SHARE),
        _of_sklearn("balanced_accuracy", _by_guess, "recall_score", in_percent=True),
        _of_sklearn("roc_auc", _by_class, "roc_auc_score", title="ROC-AUC"),
        _of_sklearn("average_precision", _by_class, "average_precision_score"),
        _of_sklearn("macro_f1", _by_guess, "f1_score", title="macro F1", in_percent=True),
        Metric("recall", CLASSES, None, _recall, in_percent=True, bounds=_SHARE),
        Metric("f1", CLASSES, None, _f1, title="F1", in_percent=True, bounds=_SHARE),
        _top(5),
        Metric("log_loss", CLASSES, log_loss, larger_is_better=False, bounds=_ERROR),
        Metric("calibration_error", CLASSES, None, _calibration_error, larger_is_better=False, bounds=_SHARE),
        Metric("mean_squared_error", NUMBERS, _squared, larger_is_better=False, bounds=_ERROR),
        Metric(
            "rmse",
            NUMBERS,
            None,
            _rmse,
            title="root mean squared error",
            larger_is_better=False,
            has_units=True,
            bounds=_ERROR,
        ),
        Metric(
            "mae",
            NUMBERS,
            _absolute,
            title="mean absolute error",
            larger_is_better=False,
            has_units=True,
            bounds=_ERROR,
        ),
        Metric("r2", NUMBERS, None, _r2, title="R2", bounds=(-math.inf, 1.0)),
    )
}
"""The metrics by name; a row may be added, and then be named like any other. ``top_K_accuracy`` has any K."""


def known_metric(name: str) -> Metric | None:
    """Return the metric called ``name``; None where there is none."""
    match = _TOP.fullmatch(name)
    return METRICS.get(name) or (_top(int(match[1])) if match else None)


def find_metric(name: str) -> Metric:
    """Return the metric called ``name``."""
    if (metric := known_metric(name)) is None:
        raise unknown("metric", name, METRICS)
    return metric


def choose_metrics(names: str, loss: Loss, num_outputs: int) -> tuple[Metric, ...]:
    """Return the metrics called ``names``, with commas between them; the loss's own one where none is named."""
    chosen = [find_metric(name) for name in names.split(",")] if names else [METRICS[loss.metric]]
    num_classes = max(2, num_outputs)
    fitting = [each.name for each in METRICS.values() if each.task == loss.task and each.least_classes <= num_classes]
    for metric in chosen:
        if metric.task != loss.task or metric.least_classes > num_classes:
            what = f"{num_classes} classes" if loss.task == CLASSES else NUMBERS
            why = f"does not fit the task, which is to predict {what}; allowed: {', '.join(fitting)}."
            raise UserError(f"Metric {metric.name!r} {why}")
        if metric.needs_sklearn and not _has_sklearn():
            why = "needs the package scikit-learn, which is not installed: pip install 'fedem[metrics]'."
            raise UserError(f"Metric {metric.name!r} {why}")
    return tuple({metric.name: metric for metric in chosen}.values())


def further_metrics(loss: Loss, targets: Tensor) -> tuple[Metric, ...]:
    """Return what else a table is judged by, given its targets: of classes where one is rare, or numbers.

    Those that need a package which is not installed are left out.
    """
    if loss.task == CLASSES:
        counts = targets.bincount()
        if int(counts[counts > 0].min()) >= _RARE * len(targets) / max(2, int((counts > 0).sum())):
            return ()
    metrics = (METRICS[name] for name in _FURTHER[loss.task])
    return tuple(metric for metric in metrics if not metric.needs_sklearn or _has_sklearn())


def _has_sklearn() -> bool:
    return importlib.util.find_spec("sklearn") is not None
