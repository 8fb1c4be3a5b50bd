"""How a table's columns become inputs and targets: learnt from the training rows, kept with the run.

- Numbers are standardised by the mean and deviation of the training rows.
- Text is one-hot over the categories of the training rows; a category that was not there becomes all zeros.
- true and false are 1 and 0.
- Targets are classes (text, booleans, few different whole numbers) or numbers to regress on, standardised as well.

Shapes: n rows, d inputs, D target dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedem.core.errors import UserError, counted
from fedem.data.tables import BOOLEAN, LARGEST, NUMBER, TEXT, WHOLE, Column, Piece, Table, is_frame, read_frame

Rows = NDArray[np.int64]  # positions of rows of a table
TASKS = ("auto", "classification", "regression")
_NAMED = 5  # names that a message lists
_FEW = 20  # distinct numbers that may well be classes


@dataclass(frozen=True)
class Feature:
    """How one column becomes inputs."""

    name: str
    kind: str  # boolean, number or text
    mean: float = 0.0
    deviation: float = 1.0
    categories: tuple[str, ...] = ()

    @classmethod
    def fit(cls, table: Table, name: str, rows: Rows, standardize: bool, max_categories: int) -> Feature:
        if (column := table.columns[name]).kind == BOOLEAN:
            return cls(name, BOOLEAN)
        if column.kind == TEXT:
            texts = column.texts(TEXT)
            categories = tuple(sorted({texts[row] for row in rows.tolist()}))
            if len(categories) > max_categories:
                raise _too_many(table, name, len(categories), max_categories)
            return cls(name, TEXT, categories=categories)
        numbers = table.numbers(name)
        return cls(name, NUMBER, *(_scale_of(numbers[rows]) if standardize else (0.0, 1.0)))

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(f"{self.name}={category}" for category in self.categories) if self.kind == TEXT else (self.name,)

    def encode(self, table: Table, out: NDArray[np.float32]) -> None:
        """Write the column to ``out`` ``[n, inputs]``, which holds zeros."""
        if self.kind == TEXT:
            places = {category: place for place, category in enumerate(self.categories)}
            codes = np.array([places.get(text, -1) for text in table.columns[self.name].texts(TEXT)], dtype=np.int64)
            known = (codes >= 0).nonzero()[0]
            out[known, codes[known]] = 1
        elif self.kind == BOOLEAN:
            out[:, 0] = table.booleans(self.name)
        else:
            with np.errstate(over="ignore"):
                scaled = (table.numbers(self.name) - self.mean) / self.deviation
            if (large := np.abs(scaled) > LARGEST).any():
                raise table.refusal(self.name, int(large.argmax()), "is too large beside the training rows' deviation")
            out[:, 0] = scaled


def _scale_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation of ``values`` ``[n]``; equal values have deviation 1."""
    if values.min() == values.max():  # rounding may give them one of 1e-17
        return float(values[0]), 1.0
    return float(values.mean()), float(values.std()) or 1.0  # it is 0 where squares are too small for a float


def _too_many(table: Table, name: str, count: int, allowed: int) -> UserError:
    column = table.columns[name]
    hint = f"such as {column.values[0]!r}; dates and identifiers are text as well"
    if column.written and (numbers := np.isfinite(column.parsed)).any():
        odd = table.place(int((~numbers).argmax()))
        hint = f"{numbers.sum():,} of its values are numbers; the first that is none: {odd}"
    said = f"Column {name!r} is text with {count:,} categories ({hint})"
    mend = f"Leave it out with data.ignore={name}, or turn it into numbers"
    return UserError(f"{said}; allowed: at most {allowed} (data.max_categories). {mend}.")


def some(names: Sequence[str]) -> str:
    """Name the first few."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


@dataclass(frozen=True)
class Target:
    """How the column of targets becomes classes or numbers."""

    name: str
    kind: str  # what the column held in training: boolean, whole, number or text
    distinct: int  # number of different values
    classes: tuple[str, ...] | None  # names of the classes, whose positions are the targets; None for regression
    mean: float = 0.0
    deviation: float = 1.0  # how large an error of 1 is in the targets' own units

    @classmethod
    def fit(cls, table: Table, *, task: str = "auto", max_categories: int = 100) -> Target:
        """Find out from all rows what the targets are: classes that no training row has are classes too."""
        name = table.target
        column = table.complete([name]).columns[name]
        kind = column.kind
        if column.values.ndim > 1:
            if task == "classification":
                raise UserError(f"Targets {name!r} have shape {list(column.values.shape)}; allowed for classes: [n].")
            return cls(name, NUMBER, len(np.unique(column.values)), None)
        found = set(column.texts(kind))
        if task == "regression" and kind == TEXT:
            table.numbers(name)  # raises, naming the first value that is not a number
        if task == "auto" and kind == TEXT and len(found) > max_categories:
            raise _too_many(table, name, len(found), max_categories)
        many = kind == NUMBER or (kind == WHOLE and len(found) > max_categories)
        regression = task == "regression" or (task == "auto" and many)
        if len(found) < 2:
            value, least = next(iter(found), None), "at least two"
            least += "" if regression else " classes, or numbers (data.task=regression)"
            raise UserError(f"The target column {name!r} has one value only ({value!r}); allowed: {least}.")
        if regression:
            return cls(name, kind, len(found), None)
        order = sorted(found) if kind in (TEXT, BOOLEAN) else sorted(found, key=lambda text: (float(text), text))
        return cls(name, kind, len(found), tuple(order))

    def scaled(self, table: Table, rows: Rows) -> Target:
        """Standardise numbers by the training ``rows``, as the E-step's Gaussian of variance 1 wants them."""
        if self.classes is not None or table.columns[self.name].values.ndim > 1:
            return self
        mean, deviation = _scale_of(table.numbers(self.name)[rows])
        return replace(self, mean=mean, deviation=deviation)

    def encode(self, table: Table) -> NDArray[np.generic]:
        """Return positions of classes, ``[n]`` int64, or numbers, float32; the table says which column it is."""
        if (name := table.target) not in table.columns:
            raise UserError(f"There is no column {name!r} of targets.")
        table = table.as_text([name]) if self.kind == TEXT else table
        column = table.complete([name]).columns[name]
        if self.classes is None:
            return ((table.numbers(name) - self.mean) / self.deviation).astype(np.float32)
        if self.kind in (WHOLE, NUMBER):
            table.numbers(name)
        places = {label: place for place, label in enumerate(self.classes)}
        if -1 in (codes := [places.get(text, -1) for text in column.texts(self.kind)]):
            why = f"is none of the {counted(len(places), 'class', 'classes')} of training ({some(self.classes)})"
            raise table.refusal(name, codes.index(-1), why)
        return np.array(codes, dtype=np.int64)

    def describe(self) -> str:
        if self.classes is not None:
            return f"target {self.name!r}: {counted(len(self.classes), 'class', 'classes')} ({some(self.classes)})"
        why = "whole numbers" if self.kind == WHOLE else "numbers"
        if self.kind == WHOLE or self.distinct <= _FEW:
            why += "; data.task=classification makes them classes"
        said, size = f"target {self.name!r}: regression ({self.distinct:,} distinct {why})", f"{self.deviation:.4g}"
        if (self.mean, self.deviation) == (0.0, 1.0):
            return said
        return f"{said}, standardised by mean {self.mean:.4g} and deviation {size}: an error of 1 is {size}"


@dataclass(frozen=True)
class Encoding:
    """What was learnt of a table's columns."""

    features: tuple[Feature, ...] | None  # in the order of the inputs; None where these are an array, taken as it is
    target: Target
    client: str = "client"  # name of the column of clients
    ignored: tuple[str, ...] = ()  # names of columns that are left out

    @classmethod
    def fit(
        cls, table: Table, rows: Rows, target: Target | None = None, standardize: bool = True, max_categories: int = 100
    ) -> Encoding:
        """Learn from the training rows; ``target`` is found out from the table when it is not given."""
        target = target or Target.fit(table, max_categories=max_categories)
        target = target.scaled(table, rows) if standardize else target
        if table.array is not None:
            return cls(None, target, table.client)
        names = table.complete(table.features).features
        features = tuple(Feature.fit(table, name, rows, standardize, max_categories) for name in names)
        return cls(features, target, table.client)

    @property
    def fingerprint(self) -> str:
        """A hash of all that was learnt: 32 hexadecimal digits."""
        content = json.dumps(self.to_json(), sort_keys=True)
        return blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...] | None:
        """Names of the d inputs; None where they are an array."""
        features = self.features
        return None if features is None else tuple(name for feature in features for name in feature.inputs)

    def inputs(self, table: Table) -> NDArray[np.generic]:
        """Encode a table's features, ``[n, d]`` float32; columns are found by their names."""
        if self.features is None:
            return table.stacked()
        # What was text stays so, also where the new rows have numbers only.
        own = table.without(self.ignored).as_text([f.name for f in self.features if f.kind == TEXT])
        names = tuple(feature.name for feature in self.features)
        if table.array is not None:
            raise UserError(f"The inputs are an array without names; allowed: the columns {some(names)}.")
        if set(own.features) != set(names):
            raise UserError(f"The columns are {', '.join(own.features)}; allowed: {', '.join(names)}, as in training.")
        own.complete(names)
        widths = [len(feature.inputs) for feature in self.features]
        inputs = np.zeros((len(table), sum(widths)), dtype=np.float32)
        for feature, end, width in zip(self.features, np.cumsum(widths).tolist(), widths, strict=True):
            feature.encode(own, inputs[:, end - width : end])
        return inputs

    def decode(self, predictions: Tensor) -> Tensor:
        """Return predicted means in the targets' own units; probabilities ``[n, K]`` stay as they are."""
        return predictions * self.target.deviation + self.target.mean

    def accept(self, values: Any) -> Any:
        """Encode a data frame of new inputs; whatever else is given counts as encoded already."""
        return self.inputs(read_frame(values, self.target.name, self.client)) if is_frame(values) else values

    def accept_targets(self, values: ArrayLike) -> NDArray[np.generic]:
        """Encode new targets, given as in the table: names of classes, or numbers."""
        array = np.asarray(values)
        if array.dtype.kind in "US":
            array = array.astype(object)
        blank = [value is None or value != value for value in array.reshape(len(array), -1)[:, 0].tolist()]
        columns = {self.target.name: Column(array, np.array(blank, dtype=bool))}
        return self.target.encode(Table(columns, self.target.name, self.client, (Piece("the targets", len(array)),)))

    def unseen(self, table: Table) -> dict[str, list[str]]:
        """Return, by column, the categories that no training row had; their inputs are all zeros."""
        found = {
            feature.name: sorted(set(table.columns[feature.name].texts(TEXT)) - set(feature.categories))
            for feature in self.features or ()
            if feature.kind == TEXT
        }
        return {name: categories for name, categories in found.items() if categories}

    def describe(self) -> str:
        if self.features is None:
            return f"{self.target.describe()}; inputs as they are"
        said = [
            counted(count, f"{word} feature")
            for word, kind in (("numeric", NUMBER), ("true/false", BOOLEAN))
            if (count := sum(feature.kind == kind for feature in self.features))
        ]
        kinds = {f.name: len(f.categories) for f in self.features if f.kind == TEXT}
        if texts := [f"{name!r} with {counted(n, 'category', 'categories')}" for name, n in kinds.items()]:
            said.append(f"{len(texts)} categorical ({some(texts)})")
        return f"{self.target.describe()}; {', '.join(said)}; {counted(len(self.input_names or ()), 'input')} in all"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Encoding:
        features, target = content["features"], content["target"]
        if features is not None:
            features = tuple(Feature(**{**entry, "categories": tuple(entry["categories"])}) for entry in features)
        classes = None if target["classes"] is None else tuple(target["classes"])
        return cls(features, Target(**{**target, "classes": classes}), content["client"], tuple(content["ignored"]))


def plain_targets(table: Table) -> NDArray[np.generic]:
    """Return targets as they are, for a run that has no encoding: whole numbers ``[n]`` int64, or float32."""
    numbers, kind = table.numbers(table.target), table.columns[table.target].kind
    return numbers.astype(np.int64 if kind in (WHOLE, BOOLEAN) else np.float32)
