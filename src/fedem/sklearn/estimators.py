"""A classifier and a regressor for pipelines and searches of scikit-learn: one row per sample, one group per client.

Shapes: n rows, d columns, K classes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Self

import numpy as np
import pandas
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedem.core.errors import UserError
from fedem.data.dataset import Dataset
from fedem.data.encoding import Encoding, Target
from fedem.data.federation import Federation
from fedem.data.tables import NUMBER, TEXT, Column, is_frame, read_frame
from fedem.runs.config import overlay, route
from fedem.runs.recipe import ModelSource
from fedem.runs.trainer import train

Array = NDArray[Any]
_ALONE = "all"  # name of the one client where there are no groups


class _Estimator(BaseEstimator):
    """What the two have in common: rows and groups become a federation, and a group's own model predicts its rows."""

    def __init__(
        self,
        method: str = "fedem",
        *,
        num_components: int | str | None = None,
        rounds: int = 100,
        learning_rate: float | None = None,
        model: ModelSource | str | Mapping[str, Any] | None = None,
        random_state: Any = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.num_components = num_components
        self.rounds = rounds
        self.learning_rate = learning_rate
        self.model = model
        self.random_state = random_state
        self.settings = settings

    def _checked(self, X: Any, y: Any, numbers: bool = False) -> tuple[pandas.DataFrame, Array]:
        """Check what ``fit`` got as scikit-learn does; a data frame may hold text, so it is checked when it is read."""
        if is_frame(X):
            validate_data(self, X, y, skip_check_array=True)
            y = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype="numeric" if numbers else None)
            check_consistent_length(X, y)
        else:
            X, y = validate_data(self, X, y, y_numeric=numbers)
        return self._named(X), column_or_1d(y, warn=True)

    def _named(self, rows: Any) -> pandas.DataFrame:
        """Return rows as columns with the names of training; those of an array have none, and are x0, x1, ..."""
        frame = rows.to_pandas() if hasattr(rows, "to_pandas") else pandas.DataFrame(rows)
        return frame.set_axis(self._columns, axis=1)

    @property
    def _columns(self) -> list[str]:
        known = getattr(self, "feature_names_in_", None)
        return [f"x{column}" for column in range(self.n_features_in_)] if known is None else list(known)

    def _train(self, frame: pandas.DataFrame, targets: Array, groups: Any, classes: tuple[str, ...] | None) -> None:
        """Train on codes of ``classes``, or on numbers, which are standardised."""
        labels = [_ALONE] * len(frame) if groups is None else _labels(groups, len(frame))
        names = {label: str(label) for label in labels}
        if len(set(names.values())) < len(names):
            raise UserError("groups has labels that differ but read alike, such as 1 and '1'; allowed: one kind.")
        name, client = _free("y", frame.columns), _free("client", frame.columns)
        table = read_frame(frame.assign(**{name: targets}), name, client, "X")
        target = Target(name, NUMBER if classes is None else TEXT, len(np.unique(targets)), classes)
        encoding = Encoding.fit(table, np.arange(len(frame)), target)
        values = encoding.target.encode(table) if classes is None else targets
        clients = [names[label] for label in labels]
        federation = Federation.from_arrays(encoding.inputs(table), values, clients, validation=0, test=0)
        dataset = Dataset(federation, None, encoding.input_names, encoding, label_names=classes)
        sections = self._sections()
        own, model = sections.pop("method"), sections.pop("model", self.model)
        self.result_ = train(dataset, own.pop("name"), model=model, **own, **sections)
        self._names = {} if groups is None else names

    def _sections(self) -> dict[str, Any]:
        """Return all settings by section."""
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        named = {"num_components": self.num_components, "learning_rate": self.learning_rate}
        flat: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
        flat |= {"rounds": self.rounds, "seed": int(seed), "evaluate_every": 0}  # there is nothing to validate on
        if isinstance(self.model, str | Mapping):
            flat["model"] = self.model
        settings = self.settings or {}
        flat |= {key: value for key, value in settings.items() if "." not in key}
        words = [(key.partition("."), value) for key, value in settings.items() if "." in key]
        layers = [{section: {name: value}} for (section, _, name), value in words]
        return overlay(route(flat, self.method), *layers)

    def _predict(self, X: Any, groups: Any) -> Array:
        """Predict each row by its own group's model, ``[n, K]``; by that of a newcomer where the group is not known."""
        check_is_fitted(self, "result_")
        encoding = self.result_.recipe.format.encoding
        assert encoding is not None, "a fitted estimator has learnt how columns become inputs"
        rows = self._named(validate_data(self, X, reset=False, skip_check_array=is_frame(X)))
        inputs = encoding.inputs(read_frame(rows, encoding.target.name, encoding.client, "X"))
        if groups is None:
            # Where there were no groups in training either, everybody is the one client.
            clients = np.full(len(inputs), "" if self._names else _ALONE, dtype=object)
        else:
            clients = np.array([self._names.get(label, "") for label in _labels(groups, len(inputs))], dtype=object)
        parts = {name: (clients == name).nonzero()[0] for name in dict.fromkeys(clients.tolist())}
        models = {name: self.result_.client(name) if name else self.result_.newcomer() for name in parts}
        found = [models[name].predict(inputs[rows]).numpy() for name, rows in parts.items()]
        return np.concatenate(found)[np.concatenate(list(parts.values())).argsort()]


def _labels(groups: Any, count: int) -> list[Hashable]:
    labels: list[Hashable] = list(groups) if isinstance(groups, Iterable) and not isinstance(groups, str) else []
    if len(labels) != count:
        raise UserError(f"groups has {len(labels)} labels; allowed: {count}, one for each row of X.")
    if (
        missing := next((row for row, label in enumerate(labels) if label is None or label != label), None)
    ) is not None:
        raise UserError(f"groups has no label at row {missing}; allowed: the name of a client in each row.")
    return labels


def _free(name: str, taken: Iterable[str]) -> str:
    """Return a name that no column has."""
    while name in taken:
        name += "_"
    return name


class FedEMClassifier(ClassifierMixin, _Estimator):
    """Classes by each client's own model; ``groups`` says whose sample a row is.

    Columns of numbers are standardised by the rows of ``fit``; in a data frame, text becomes one input per category.
    All rows are for training: nothing is held out.

    Args:
        method: a name from :data:`fedem.METHODS`.
        num_components: M, for methods that have components, or "auto"; None for the method's default, 3.
        rounds: communication rounds.
        learning_rate: of the first round; None for the one that is shipped for the method.
        model: as :func:`fedem.train` takes it; a linear model when not given.
        random_state: decides whatever is random; an integer is the run's seed.
        settings: any further ones, by name as :func:`fedem.train` takes them, or with their section:
            ``{"local_epochs": 2, "batching.batch_size": 32}``.

    Attributes:
        result_: the trained federation, a :class:`fedem.Result`.
        classes_: the K classes, ``[K]``.
        n_features_in_: d.
        feature_names_in_: names of the columns, ``[d]``, where X was a data frame.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows ``X`` ``[n, d]`` with classes ``y`` ``[n]`` of clients ``groups`` ``[n]``; None for one."""
        frame, labels = self._checked(X, y)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise UserError(f"y has one class only ({labels[0]!r}); allowed: at least two classes.")
        names = tuple(Column.of_text(self.classes_.tolist()).texts(TEXT))
        self._train(frame, codes, groups, names)
        return self

    def predict_proba(self, X: Any, groups: Any = None) -> Array:
        """Return the probabilities of the classes, ``[n, K]``; rows of unknown groups, or of none, as a newcomer's."""
        return self._predict(X, groups)

    def predict(self, X: Any, groups: Any = None) -> Array:
        """Return the most probable classes, ``[n]``."""
        probabilities = self.predict_proba(X, groups)
        return self.classes_[probabilities.argmax(1)]

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy."""
        return accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight)


class FedEMRegressor(RegressorMixin, _Estimator):
    """Numbers by each client's own model; ``groups`` says whose sample a row is.

    Columns of numbers, and y, are standardised by the rows of ``fit``; predictions are in y's own units. Arguments and
    attributes are those of :class:`FedEMClassifier`, but for the classes.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows ``X`` ``[n, d]`` with numbers ``y`` ``[n]`` of clients ``groups`` ``[n]``; None for one."""
        frame, numbers = self._checked(X, y, numbers=True)
        self._train(frame, numbers.astype(np.float64), groups, None)
        return self

    def predict(self, X: Any, groups: Any = None) -> Array:
        """Return the means, ``[n]``; rows of unknown groups, or of none, as a newcomer's."""
        return self._predict(X, groups)[:, 0]

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:
        """Return the coefficient of determination R2."""
        return r2_score(y, self.predict(X, groups), sample_weight=sample_weight)
