"""References: what plain predictors score on exactly the rows of a run, by its metrics.

- constant: the class shares, or the mean, of all training rows;
- pooled linear model: one ridge or logistic regression on all training rows;
- linear model per client: one on each client's own rows. A client with few rows, or rows of one class, has the constant
  of its own rows. Probabilities of a client are mixed with one row's worth of everybody's class shares, so that a
  class it has not seen is not impossible;
- gradient boosting: one on all training rows, with the client as a categorical feature.

The strength of a linear model's penalty is chosen by cross-validation on the training rows. Validation and test rows
are only scored.

Shapes: n rows, d inputs, K classes or D target dimensions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.core.errors import UserError, counted, needed
from fedem.core.files import plain
from fedem.data.dataset import Dataset
from fedem.data.federation import PARTS, Federation
from fedem.data.samples import Samples
from fedem.models.losses import CLASSES, Loss
from fedem.models.metrics import METRICS, Metric
from fedem.runs.evaluate import Record, Scores, client_rows, judge, name_scores
from fedem.runs.trainer import Trainer

PREFIX = "reference:"  # of a reference's name beside those of methods
_FEWEST = 5  # training rows of a client for which a model of its own is fitted
_FOLDS = 3
_RIDGE, _LOGISTIC = 10.0 ** np.arange(-3, 5), 10.0 ** np.arange(-2, 3)  # strengths of the penalty that are tried
_MOST_CATEGORIES = 255  # that scikit-learn's trees take

Array = NDArray[np.float64]
Predict = Callable[["_Rows"], Array]


class _Rows(NamedTuple):
    inputs: Array  # [n, d]
    targets: NDArray[Any]  # [n] classes, or [n, D] numbers
    owners: NDArray[np.int64]  # [n] positions of clients

    def some(self, which: NDArray[Any]) -> _Rows:
        return _Rows(*(column[which] for column in self))


@dataclass(frozen=True, eq=False)
class Reference:
    """A plain predictor's scores, of the same kind as those of a run."""

    name: str
    title: str
    scores: dict[str, Scores]
    clients: list[Record]  # one record per client, as a run's clients.csv has them
    note: str = ""
    deviation: float | None = None  # by which targets were standardised

    @property
    def record(self) -> Record:
        """Its figures by the names that a run's summary has; None where one is undefined."""
        named = {"method": PREFIX + self.name, "title": f"ref. {self.title}", "num_components": 1}
        told = {"note": self.note} if self.note else {}
        return {**named, **plain(name_scores(self.scores, self.deviation)), **told}


def check_references() -> None:
    """Refuse references without the package that fits them."""
    needed("--references", "sklearn", extra="metrics")


def beside(trainer: Trainer) -> list[Reference]:
    """Return the references of a run that is prepared: the same rows, loss and metrics."""
    recipe = trainer.recipe
    dataset = Dataset(trainer.federation, encoding=recipe.format.encoding, label_names=recipe.format.labels)
    return references(dataset, recipe.loss, trainer.shown, recipe.config.run.seed)


def references(
    data: Dataset | Federation, loss: Loss, metrics: Sequence[Metric] = (), seed: int = 0
) -> list[Reference]:
    """Fit every reference on the training rows and score it on each part that there is; clients held out are not.

    By default with the loss's metric; ``seed`` decides the folds of the cross-validation.
    """
    check_references()
    dataset = data if isinstance(data, Dataset) else Dataset(data)
    federation, encoding = dataset.federation, dataset.encoding
    if federation.train.pool.inputs.dtype == torch.int64:
        allowed = "floats or bytes, which a linear model and trees can take"
        raise UserError(f"The inputs are whole numbers, perhaps words of a text; allowed for references: {allowed}.")
    task = _Task.of(federation, loss, dataset.label_names, seed)
    parts = {part: federation.part(part) for part in PARTS if len(federation.part(part))}
    raw = {part: _rows(samples, task) for part, samples in parts.items()}
    center, scale = raw["train"].inputs.mean(0), raw["train"].inputs.std(0)
    scale[scale == 0] = 1
    rows = {part: each._replace(inputs=(each.inputs - center) / scale) for part, each in raw.items()}
    deviation = None if encoding is None or encoding.target.classes is not None else encoding.target.deviation
    found = []
    for name, (title, fit) in _KINDS.items():
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # scikit-learn's, of few rows in a fold and of slow convergence
            predict, note = fit(task, rows["train"])
            predicted = {part: torch.from_numpy(predict(each)) for part, each in rows.items()}
        scores = {
            part: judge(
                values, task.losses(values, parts[part]), parts[part], federation.train.sizes, task.known(metrics)
            )
            for part, values in predicted.items()
        }
        alone = torch.zeros(federation.num_clients, 1)
        clients = client_rows("train", federation.names, scores, alone)
        found.append(Reference(name, title, scores, clients, note, deviation))
    return found


@dataclass(frozen=True, eq=False)
class _Task:
    """What is predicted, and the models that can."""

    loss: Loss
    num_classes: int  # K; 0 for numbers
    num_clients: int
    seed: int

    @classmethod
    def of(cls, federation: Federation, loss: Loss, labels: Sequence[str] | None, seed: int) -> _Task:
        highest = max(int(federation.part(part).targets.max()) for part in PARTS if len(federation.part(part)))
        num_classes = max(2, len(labels or ()), highest + 1) if loss.task == CLASSES else 0
        return cls(loss, num_classes, federation.num_clients, seed)

    def known(self, metrics: Sequence[Metric]) -> Sequence[Metric]:
        return metrics or (METRICS[self.loss.metric],)

    def losses(self, predictions: Tensor, samples: Samples) -> Tensor:
        """Return the negative log-likelihood of each sample, ``[n]``."""
        targets = samples.targets.cpu()
        if not self.num_classes:
            return self.loss.negative_log_likelihood(predictions, targets)
        surprise = METRICS["log_loss"].per_sample
        assert surprise is not None
        return surprise(predictions, targets)

    def constant(self, rows: _Rows) -> Array:
        """Return the class shares ``[K]`` or the mean ``[D]``."""
        if not self.num_classes:
            return rows.targets.mean(0)
        return np.bincount(rows.targets, minlength=self.num_classes) / len(rows.targets)

    def folds(self, rows: _Rows) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield positions of the rows to fit on and of those held out, fold by fold."""
        from sklearn.model_selection import KFold

        count = min(_FOLDS, len(rows.owners))
        yield from KFold(count, shuffle=True, random_state=self.seed % 2**32).split(rows.inputs)

    def linear(self, rows: _Rows) -> Callable[[Array], Array]:
        """Fit a ridge regression or, on rows of several classes, a logistic one; its strength is cross-validated."""
        from sklearn.linear_model import RidgeCV

        if not self.num_classes:
            ridge = RidgeCV(alphas=_RIDGE).fit(rows.inputs, rows.targets)
            return lambda inputs: ridge.predict(inputs).reshape(len(inputs), -1)
        cuts = [(rows.some(others), rows.some(held)) for others, held in self.folds(rows)]

        def cost(penalty: float) -> float:
            chances = [
                self._logistic(train, penalty)(held.inputs)[np.arange(len(held.targets)), held.targets]
                for train, held in cuts
            ]
            return float(-np.log(np.maximum(np.concatenate(chances), 1e-6)).sum())

        return self._logistic(rows, min(_LOGISTIC.tolist(), key=cost))

    def _logistic(self, rows: _Rows, penalty: float) -> Callable[[Array], Array]:
        from sklearn.linear_model import LogisticRegression

        if len(np.unique(rows.targets)) < 2:  # in a fold
            return partial(_always, self.constant(rows))
        model = LogisticRegression(C=1 / penalty, max_iter=300).fit(rows.inputs, rows.targets)
        return lambda inputs: self.widened(model, inputs)

    def widened(self, model: Any, inputs: Array) -> Array:
        """Return probabilities of all classes ``[n, K]``; a classifier knows those of the rows it was fitted on."""
        chances = np.zeros((len(inputs), self.num_classes))
        chances[:, model.classes_] = model.predict_proba(inputs)
        return chances


def _rows(samples: Samples, task: _Task) -> _Rows:
    inputs, targets = samples.inputs.cpu().flatten(1).double().numpy(), samples.targets.cpu().numpy()
    owners = np.repeat(np.arange(samples.num_clients), samples.sizes.numpy())
    return _Rows(inputs, targets if task.num_classes else targets.reshape(len(targets), -1).astype(float), owners)


def _always(value: Array, inputs: Array) -> Array:
    return np.tile(value, (len(inputs), 1))


def _fit_constant(task: _Task, train: _Rows) -> tuple[Predict, str]:
    value = task.constant(train)
    return lambda rows: _always(value, rows.inputs), ""


def _fit_pooled(task: _Task, train: _Rows) -> tuple[Predict, str]:
    model = task.linear(train)
    return lambda rows: model(rows.inputs), ""


def _fit_each(task: _Task, train: _Rows) -> tuple[Predict, str]:
    everybody = task.constant(train)
    models: list[tuple[Callable[[Array], Array], float]] = []
    constants = 0
    for client in range(task.num_clients):
        own = train.some(train.owners == client)
        few = len(own.owners) < _FEWEST or (task.num_classes > 0 and len(np.unique(own.targets)) < 2)
        constants += few
        trust = len(own.owners) / (len(own.owners) + 1) if task.num_classes else 1.0
        models.append((partial(_always, task.constant(own)) if few else task.linear(own), trust))

    def predict(rows: _Rows) -> Array:
        found = np.zeros((len(rows.owners), len(everybody)))
        for client in np.unique(rows.owners):
            model, trust = models[client]
            theirs = rows.owners == client
            found[theirs] = trust * model(rows.inputs[theirs]) + (1 - trust) * everybody
        return found

    why = f"fewer than {_FEWEST} training rows" + (" or rows of one class" if task.num_classes else "")
    who = f"{constants} of {counted(task.num_clients, 'client')}"
    return predict, f"{who} with {why}: the constant of their own rows." if constants else ""


def _fit_trees(task: _Task, train: _Rows) -> tuple[Predict, str]:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.multioutput import MultiOutputRegressor

    if task.num_classes and len(np.unique(train.targets)) < 2:
        return _fit_constant(task, train)
    many = task.num_clients > _MOST_CATEGORIES
    kind = HistGradientBoostingClassifier if task.num_classes else HistGradientBoostingRegressor
    categories = None if many else [train.inputs.shape[1]]
    model = kind(random_state=task.seed % 2**32, early_stopping=False, categorical_features=categories)
    model = model if task.num_classes else MultiOutputRegressor(model)
    levels = _levels(task, train) if many else np.arange(task.num_clients)[:, None]
    # What a row's client is encoded by must not know the row's own target.
    own = _cross_fitted(task, train) if many else levels[train.owners]
    model.fit(np.column_stack([train.inputs, own]), train.targets)

    def predict(rows: _Rows) -> Array:
        inputs: Array = np.column_stack([rows.inputs, levels[rows.owners]]).astype(float)
        return task.widened(model, inputs) if task.num_classes else model.predict(inputs)

    return predict, f"More than {_MOST_CATEGORIES} clients: each is encoded by its mean target." if many else ""


def _levels(task: _Task, rows: _Rows) -> Array:
    """Return each client's class shares ``[T, K]`` or means ``[T, D]``, with one row's worth of everybody's."""
    values = np.eye(task.num_classes)[rows.targets] if task.num_classes else rows.targets
    sums = np.zeros((task.num_clients, values.shape[1]))
    np.add.at(sums, rows.owners, values)
    counts = np.bincount(rows.owners, minlength=task.num_clients)[:, None]
    return (sums + values.mean(0)) / (counts + 1)


def _cross_fitted(task: _Task, rows: _Rows) -> Array:
    """Return the level of each row's client by the rows of other folds, ``[n, K]`` or ``[n, D]``."""
    found = np.zeros((len(rows.owners), task.num_classes or rows.targets.shape[1]))
    for others, held in task.folds(rows):
        found[held] = _levels(task, rows.some(others))[rows.owners[held]]
    return found


_KINDS: dict[str, tuple[str, Callable[[_Task, _Rows], tuple[Predict, str]]]] = {
    "constant": ("constant", _fit_constant),
    "pooled_linear": ("linear", _fit_pooled),
    "client_linear": ("own linear", _fit_each),
    "boosting": ("boosting", _fit_trees),
}
