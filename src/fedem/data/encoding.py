"""How a table's columns become inputs and targets: learnt from the training rows, kept with the run.

- Numbers are standardised by the mean and deviation of the training rows; where these are 0 and 1 alone, they stay.
- Text is one-hot over the categories of the training rows; a category that was not there becomes all zeros.
- Dates are days since the first training row's, standardised, and their places in the year, the week and, where there
  are times, the day: sine and cosine of each.
- true and false are 1 and 0.
- Numbers and dates that lie absurdly far from all others are named, and cut off where that is asked for.
- Missing values are refused, or filled by what the training rows have; an input of its own may say where.
- Targets are classes (text, booleans, few different whole numbers) or numbers to regress on, standardised as well.

Shapes: n rows, d inputs, D target dimensions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedem.core import schema
from fedem.core.errors import UserError, counted
from fedem.core.schema import ANYTHING, Flag, Listed, Maybe, Number, Text, Whole
from fedem.data.recognition import ISO, date_forms, read_dates, ungrouped
from fedem.data.tables import BOOLEAN, LARGEST, NUMBER, TEXT, WHOLE, Column, Piece, Table, is_frame, read_frame
from fedem.data.texts import Texts

Usual = tuple[float, float, float, float]  # low and high ends of what is usual, the least and the largest between them
Rows = NDArray[np.int64]  # positions of rows of a table
DATE = "date"  # what a column of text may hold, too
TASKS = ("auto", "classification", "regression")
IMPUTE = ("refuse", "median", "mode", "indicator")  # what becomes of missing values
_NAMED = 5  # names that a message lists
_LISTED = 30  # columns that a message lists
_FEW = 20  # distinct numbers that may well be classes
_SURELY, _HARDLY = 10, 30  # different whole numbers that are classes up to here, and numbers beyond there
_EACH = 5  # rows that each of the numbers between must have to be a class
# Fields that older encodings have not.
_LATER = ("form", "first", "cycles", "fill", "indicator", "usual", "guess", "notes")
_DAY = np.timedelta64(1, "D")
_FEWEST = 8  # numbers whose quartiles mean something
_RARE = 0.05  # share of the values that may be mistakes
_FAR = 1000.0  # quartile ranges from the median beyond which a value is taken for a mistake


@dataclass(frozen=True)
class Feature:
    """How one column becomes inputs."""

    name: str
    kind: str  # boolean, number, text or date
    mean: float = 0.0
    deviation: float = 1.0
    categories: tuple[str, ...] = ()
    form: str = ""  # how dates are written, as strptime has it, or ISO8601
    first: str = ""  # the training rows' first date
    cycles: tuple[str, ...] = ()  # of dates: year, week, day
    fill: float | str | None = None  # what stands for a missing value; None: they are refused
    indicator: bool = False  # whether an input says where values were missing
    usual: Usual | None = None  # numbers, or days, outside are cut off; None: none are

    @classmethod
    def fit(
        cls,
        table: Table,
        name: str,
        rows: Rows,
        standardize: bool,
        max_categories: int,
        impute: str = "refuse",
        recognize: bool = True,
        clip_outliers: bool = False,
    ) -> Feature:
        table = table.alone(name)
        column = table.columns[name]
        forms = date_forms(column) if recognize and column.kind == TEXT else ()
        made = cls(name, DATE, form=forms[0]) if len(forms) == 1 else cls(name, _KINDS[column.kind])
        if impute != "refuse":
            missing = column.missing[rows]
            fill = made._typical(table, rows[~missing], impute)
            made = replace(made, fill=fill, indicator=impute == "indicator" and bool(missing.any()))
            table = table.filled({name: fill})
        if made.kind == DATE:
            dates = made._dates(table)[rows]
            has_times = bool((dates != dates.astype("datetime64[D]")).any())
            made = replace(made, first=str(dates.min()), cycles=("year", "week", *(["day"] if has_times else [])))
            made = made._clipped(table, rows) if clip_outliers else made
            return made._scaled(made._measured(table)[rows]) if standardize else made
        if made.kind == TEXT:
            texts = table.columns[name].texts(TEXT)
            categories = tuple(sorted({texts[row] for row in rows.tolist()}))
            if len(categories) > max_categories:
                raise _too_many(table, name, len(categories), max_categories, forms)
            return replace(made, categories=categories)
        if made.kind == BOOLEAN:
            return made
        made = made._clipped(table, rows) if clip_outliers else made
        numbers = made._measured(table)[rows]
        as_it_is = not standardize or (recognize and _is_binary(numbers[~column.missing[rows]]))
        return made if as_it_is else made._scaled(numbers)

    def _scaled(self, values: NDArray[np.float64]) -> Feature:
        mean, deviation = _scale_of(values)
        return replace(self, mean=mean, deviation=deviation)

    def _clipped(self, table: Table, rows: Rows) -> Feature:
        return replace(self, usual=usual_range(self.raw(table)[rows]))

    def raw(self, table: Table) -> NDArray[np.float64]:
        """Return numbers as they are written, or days since the first date, ``[n]``; NaN where there are none."""
        column = table.columns[self.name]
        return np.where(column.missing, np.nan, self._days(table) if self.kind == DATE else column.parsed)

    def _measured(self, table: Table) -> NDArray[np.float64]:
        """Return numbers, or days since the first date, as they are taken: finite, and cut off if they are to be."""
        cut = None if self.usual is None else partial(cut_off, usual=self.usual)
        if self.kind != DATE:
            return table.numbers(self.name, cut)
        days = self._days(table)
        return days if cut is None else cut(days)

    def far_out(self, table: Table, rows: Rows) -> NDArray[np.int64]:
        """Return the rows of a table whose values lie absurdly far from those of the training ``rows``."""
        if self.kind not in (NUMBER, DATE):
            return np.zeros(0, dtype=np.int64)
        values = self.raw(table)
        usual = usual_range(values[rows])
        return np.zeros(0, dtype=np.int64) if usual is None else outside(values, usual)

    def _typical(self, table: Table, rows: Rows, impute: str) -> float | str:
        """Return the median of ``rows``, none of which is missing, or what most of them have."""
        column = table.columns[self.name]
        if not len(rows):
            raise UserError(
                f"Column {self.name!r} has no value in the training rows; data.ignore={self.name} leaves it out."
            )
        if self.kind == NUMBER and impute != "mode":
            return float(np.median(column.parsed[rows]))
        if self.kind == DATE and impute != "mode":
            dates = self._dates(table)
            return str(column.values[sorted(rows.tolist(), key=dates.__getitem__)[(len(rows) - 1) // 2]])
        values = column.parsed.tolist() if self.kind == NUMBER else column.texts(self.kind)
        counts = Counter(values[row] for row in rows.tolist())
        return max(sorted(counts), key=counts.__getitem__)

    @property
    def inputs(self) -> tuple[str, ...]:
        names: tuple[str, ...] = (self.name,)
        if self.kind == TEXT:
            names = tuple(f"{self.name}={category}" for category in self.categories)
        elif self.kind == DATE:
            waves = (f"{self.name}: {wave} of the {cycle}" for cycle in self.cycles for wave in ("sine", "cosine"))
            names = (f"{self.name}: days", *waves)
        return (*names, f"{self.name} is missing") if self.indicator else names

    def encode(self, table: Table, out: NDArray[np.float32]) -> None:
        """Write the column to ``out`` ``[n, inputs]``, which holds zeros."""
        table = table.alone(self.name)
        if self.fill is not None:
            if self.indicator:
                out[:, -1] = table.columns[self.name].missing
            table = table.filled({self.name: self.fill})
        if self.kind == TEXT:
            places = {category: place for place, category in enumerate(self.categories)}
            codes = np.array([places.get(text, -1) for text in table.columns[self.name].texts(TEXT)], dtype=np.int64)
            known = (codes >= 0).nonzero()[0]
            out[known, codes[known]] = 1
        elif self.kind == BOOLEAN:
            out[:, 0] = table.booleans(self.name)
        else:
            with np.errstate(over="ignore"):
                scaled = (self._measured(table) - self.mean) / self.deviation
            if (large := np.abs(scaled) > LARGEST).any():
                raise table.refusal(self.name, int(large.argmax()), "is too large beside the training rows' deviation")
            out[:, 0] = scaled
        if self.kind == DATE:
            for place, phase in enumerate(self._phases(table)):
                out[:, 2 * place + 1], out[:, 2 * place + 2] = np.sin(2 * np.pi * phase), np.cos(2 * np.pi * phase)

    def _dates(self, table: Table) -> NDArray[np.datetime64]:
        """Read the column as dates, ``[n]``, NaT where it is missing; the form of training, or ISO's."""
        column = table.columns[self.name]
        texts = column.texts(TEXT)
        dates, iso = read_dates(texts, self.form), read_dates(texts, ISO)
        dates = np.where(np.isnat(dates), iso, dates)
        if (wrong := np.isnat(dates) & ~column.missing).any():
            how = "2024-05-31" if self.form == ISO else f"2024-05-31, or as {self.form} says"
            raise table.refusal(self.name, int(wrong.argmax()), f"is not a date such as {how}")
        return dates

    def _days(self, table: Table) -> NDArray[np.float64]:
        """Return days since the training rows' first date, ``[n]``."""
        return (self._dates(table) - np.datetime64(self.first)) / _DAY

    def _phases(self, table: Table) -> list[NDArray[np.float64]]:
        """Return how much of the year, the week (from Thursday on) and the day has gone at each date, ``[n]`` each."""
        dates = self._dates(table)
        days, years = dates.astype("datetime64[D]"), dates.astype("datetime64[Y]")
        gone = {
            "year": (days - years) / np.timedelta64(1, "D") / 365.25,
            "week": days.astype(np.int64) % 7 / 7,
            "day": (dates - days) / _DAY,
        }
        return [gone[cycle] for cycle in self.cycles]


_KINDS = {BOOLEAN: BOOLEAN, WHOLE: NUMBER, NUMBER: NUMBER, TEXT: TEXT}  # what features of a column's kind are


def usual_range(values: NDArray[np.float64]) -> Usual | None:
    """Return median -+ 1,000 (q3 - q1) of numbers, beyond which lie mistakes, and the least and largest between.

    Where most values are the same (counts that mostly are 0), the others say how far apart values are. None where
    quartiles say nothing, and if more than 5% lie outside: what many have is no mistake.
    """
    values = values[~np.isnan(values)]
    finite = values[np.isfinite(values)]
    if len(finite) < _FEWEST:
        return None
    middle = float(np.median(finite))
    scale = _quartile_range(finite)
    others = finite[finite != middle]
    if scale == 0 and len(others) >= _FEWEST:
        scale = max(_quartile_range(others), abs(float(np.median(others)) - middle))
    low, high = max(middle - _FAR * scale, -LARGEST), min(middle + _FAR * scale, LARGEST)
    between = finite[(finite >= low) & (finite <= high)]
    if scale == 0 or len(values) - len(between) > max(1, _RARE * len(values)):
        return None
    return low, high, float(between.min()), float(between.max())


def _quartile_range(values: NDArray[np.float64]) -> float:
    low, high = np.quantile(values, (0.25, 0.75), method="nearest")  # no mean of two numbers, which may overflow
    return float(high) - float(low)


def outside(values: NDArray[np.float64], usual: Usual) -> NDArray[np.int64]:
    """Return where values lie outside of what is usual; NaN does not."""
    return ((values < usual[0]) | (values > usual[1])).nonzero()[0]


def cut_off(values: NDArray[np.float64], usual: Usual) -> NDArray[np.float64]:
    """Put the least or largest usual value in place of those that lie outside; all others stay."""
    low, high, least, largest = usual
    return np.where(values < low, least, np.where(values > high, largest, values))


def _is_binary(values: NDArray[np.float64]) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _scale_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation of ``values`` ``[n]``; equal values have deviation 1."""
    if values.min() == values.max():  # rounding may give them one of 1e-17
        return float(values[0]), 1.0
    return float(values.mean()), float(values.std()) or 1.0  # it is 0 where squares are too small for a float


def _too_many(table: Table, name: str, count: int, allowed: int, forms: Sequence[str] = ()) -> UserError:
    column = table.columns[name]
    hint = f"such as {column.values[0]!r}; identifiers are text as well"
    if forms:
        hint = f"dates such as {column.values[0]!r} may be meant as {' or '.join(forms)}; 2024-05-31 is clear"
    elif column.written and (numbers := np.isfinite(column.parsed)).any():
        odd = table.place(int((~numbers).argmax()))
        hint = f"{numbers.sum():,} of its values are numbers; the first that is none: {odd}"
    said = f"Column {name!r} is text with {count:,} categories ({hint})"
    mend = f"Leave it out with data.ignore={name}, or turn it into numbers"
    return UserError(f"{said}; allowed: at most {allowed} (data.max_categories). {mend}.")


def some(names: Sequence[str], most: int = _NAMED) -> str:
    """Name the first few."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _unclear(values: NDArray[np.float64]) -> tuple[bool, str]:
    """Decide of whole numbers ``[n]`` that are neither few nor many: whether they are to be regressed on, and why."""
    found, counts = np.unique(values, return_counts=True)
    if found[0] not in (0, 1) or found[-1] - found[0] != len(found) - 1:
        return True, "which don't count from 0 or 1 without gaps"
    if counts.min() < _EACH:
        return True, f"some in fewer than {_EACH} rows"
    return False, f"they count from {found[0]:.0f} without gaps and each has {_EACH} rows or more"


@dataclass(frozen=True)
class Target:
    """How the column of targets becomes classes or numbers."""

    name: str
    kind: str  # what the column held in training: boolean, whole, number or text
    distinct: int  # number of different values
    classes: tuple[str, ...] | None  # names of the classes, whose positions are the targets; None for regression
    mean: float = 0.0
    deviation: float = 1.0  # how large an error of 1 is in the targets' own units
    guess: str = ""  # why they were taken for what they are, where that was not clear

    @classmethod
    def fit(cls, table: Table, *, task: str = "auto", max_categories: int = 100, recognize: bool = True) -> Target:
        """Find out from all rows what the targets are: classes that no training row has are classes too.

        ``recognize``: up to 10 different whole numbers are classes and more than 30 are not. Those between are if they
        count from 0 or 1 without gaps and each has five rows. Without it, and beside inputs that are an array, whose
        targets usually are labels, ``max_categories`` of them are.
        """
        name = table.target
        column = table.complete([name]).columns[name]
        kind = column.kind
        if not isinstance(column.values, Texts) and column.values.ndim > 1:
            if task == "classification":
                raise UserError(f"Targets {name!r} have shape {list(column.values.shape)}; allowed for classes: [n].")
            return cls(name, NUMBER, len(np.unique(column.values)), None)
        found = set(column.texts(kind))
        if task == "regression" and kind == TEXT:
            table.numbers(name)  # raises, naming the first value that is not a number
        if task == "auto" and kind == TEXT and len(found) > max_categories:
            raise _too_many(table, name, len(found), max_categories)
        many, guess = kind == NUMBER or (kind == WHOLE and len(found) > max_categories), ""
        if task == "auto" and kind == WHOLE and recognize and table.array is None:
            many = len(found) > _SURELY
            if _SURELY < len(found) <= _HARDLY:
                many, guess = _unclear(column.parsed)
        regression = task == "regression" or (task == "auto" and many)
        if len(found) < 2:
            value, least = next(iter(found), None), "at least two"
            least += "" if regression else " classes, or numbers (data.task=regression)"
            raise UserError(f"The target column {name!r} has one value only ({value!r}); allowed: {least}.")
        if regression:
            return cls(name, kind, len(found), None, guess=guess)
        order = sorted(found) if kind in (TEXT, BOOLEAN) else sorted(found, key=lambda text: (float(text), text))
        return cls(name, kind, len(found), tuple(order), guess=guess)

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
        table = table.as_text([name]) if self.kind == TEXT else ungrouped(table, [name])[0]
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
            said = f"target {self.name!r}: {counted(len(self.classes), 'class', 'classes')} ({some(self.classes)})"
            return f"{said}, for {self.guess}; data.task=regression regresses on them" if self.guess else said
        why = "whole numbers" if self.kind == WHOLE else "numbers"
        if self.kind == WHOLE or self.distinct <= _FEW:
            why += f", {self.guess}" if self.guess else ""
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
    notes: tuple[str, ...] = ()  # what was made of the columns beyond that, a sentence each

    @classmethod
    def fit(
        cls,
        table: Table,
        rows: Rows,
        target: Target | None = None,
        standardize: bool = True,
        max_categories: int = 100,
        impute: str = "refuse",
        recognize: bool = True,
        clip_outliers: bool = False,
    ) -> Encoding:
        """Learn from the training rows; ``target`` is found out from the table when it is not given."""
        target = target or Target.fit(table, max_categories=max_categories, recognize=recognize)
        target = target.scaled(table, rows) if standardize else target
        if table.array is not None:
            return cls(None, target, table.client)
        names = table.features if impute != "refuse" else table.complete(table.features).features
        how = (standardize, max_categories, impute, recognize, clip_outliers)
        features = tuple(Feature.fit(table, name, rows, *how) for name in names)
        notes = [*_notes(table, features, rows, recognize), *_far_out(table, features, target, rows)]
        return cls(features, target, table.client, notes=tuple(notes))

    @property
    def fingerprint(self) -> str:
        """A hash of all that was learnt, whatever words there are for it: 32 hexadecimal digits."""
        learnt = replace(self, notes=(), target=replace(self.target, guess=""))
        content = json.dumps(learnt.to_json(), sort_keys=True)
        return blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...] | None:
        """Names of the d inputs; None where they are an array."""
        features = self.features
        return None if features is None else tuple(name for feature in features for name in feature.inputs)

    def taken(self, table: Table) -> Table:
        """Return the columns of a new table that training had, each as what it was: text stays text."""
        features = {feature.name: feature.kind for feature in self.features or ()}
        own = table.without([name for name in (*self.ignored, *self.surplus(table)) if name != table.order])
        own = own.as_text([name for name, kind in features.items() if kind in (TEXT, DATE)])
        return ungrouped(own, [name for name, kind in features.items() if kind == NUMBER])[0]

    def surplus(self, table: Table) -> tuple[str, ...]:
        """Return the columns of a new table that training had not, which are left out."""
        if self.features is None:
            return ()
        known = {*self.ignored, *(feature.name for feature in self.features)}
        return tuple(name for name in table.features if name not in known)

    def inputs(self, table: Table) -> NDArray[np.generic]:
        """Encode a table's features, ``[n, d]`` float32; columns are found by their names, others are left out."""
        if self.features is None:
            return table.stacked()
        own = self.taken(table)
        names = tuple(feature.name for feature in self.features)
        if table.array is not None:
            raise UserError(f"The inputs are an array without names; allowed: the columns {some(names)}.")
        there = set(own.features)
        if missing := [name for name in names if name not in there]:
            found = some([name for name in table.features if name not in self.ignored], _LISTED)
            wanted = f"{some(names, _LISTED)}, as in training; missing: {some(missing, _LISTED)}"
            raise UserError(f"The columns are {found}; allowed: {wanted}.")
        own.complete([feature.name for feature in self.features if feature.fill is None])
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
        fills = {feature.name: feature.fill for feature in self.features or () if feature.fill is not None}
        own = self.taken(table).filled(fills)
        found = {
            feature.name: sorted(set(own.columns[feature.name].texts(TEXT)) - set(feature.categories))
            for feature in self.features or ()
            if feature.kind == TEXT
        }
        return {name: categories for name, categories in found.items() if categories}

    def clipped(self, table: Table) -> dict[str, int]:
        """Return, by column, how many values of a new table are cut off."""
        own = self.taken(table)
        bounded = ((feature, feature.usual) for feature in self.features or () if feature.usual is not None)
        counts = {feature.name: len(outside(feature.raw(own), usual)) for feature, usual in bounded}
        return {name: count for name, count in counts.items() if count}

    def describe(self) -> str:
        if self.features is None:
            return f"{self.target.describe()}; inputs as they are"
        said = [
            counted(count, f"{word} feature")
            for word, kind in (("numeric", NUMBER), ("true/false", BOOLEAN), ("date", DATE))
            if (count := sum(feature.kind == kind for feature in self.features))
        ]
        kinds = {f.name: len(f.categories) for f in self.features if f.kind == TEXT}
        if texts := [f"{name!r} with {counted(n, 'category', 'categories')}" for name, n in kinds.items()]:
            said.append(f"{len(texts)} categorical ({some(texts)})")
        return f"{self.target.describe()}; {', '.join(said)}; {counted(len(self.input_names or ()), 'input')} in all"

    def to_json(self) -> dict[str, Any]:
        features = None if self.features is None else [_needed(feature) for feature in self.features]
        return _needed(self) | {"features": features, "target": _needed(self.target)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Encoding:
        """Read what :meth:`to_json` returned, and a file held; it is of the kind ``ENCODING``."""
        features, target = content["features"], content["target"]
        if features is not None:
            features = tuple(Feature(**{key: _frozen(value) for key, value in entry.items()}) for entry in features)
        target = Target(**{key: _frozen(value) for key, value in target.items()})
        return cls(features, target, content["client"], tuple(content["ignored"]), tuple(content.get("notes", ())))


_SCALE = {"mean": Number(), "deviation": Number(above=0)}
_FEATURE = schema.Table(
    {"name": Text(), "kind": Text(choices=(BOOLEAN, NUMBER, TEXT, DATE))},
    {
        **_SCALE,
        "categories": Listed(Text()),
        "form": Text(),
        "first": Text(),
        "cycles": Listed(Text(choices=("year", "week", "day"))),
        "fill": ANYTHING,
        "indicator": Flag(),
        "usual": Listed(Number(), length=4),
    },
    others=None,
)
_TARGET = schema.Table(
    {
        "name": Text(),
        "kind": Text(choices=(BOOLEAN, WHOLE, NUMBER, TEXT)),
        "distinct": Whole(least=0),
        "classes": Maybe(Listed(Text())),
    },
    {**_SCALE, "guess": Text()},
    others=None,
)
ENCODING = schema.Table(
    {"features": Maybe(Listed(_FEATURE)), "target": _TARGET, "client": Text(), "ignored": Listed(Text())},
    {"notes": Listed(Text())},
)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _needed(entry: Feature | Target | Encoding) -> dict[str, Any]:
    """Return what an encoding says: of the fields that older ones have not, those that are not as in these."""
    defaults = {each.name: each.default for each in fields(entry) if each.name in _LATER}
    values = {each.name: getattr(entry, each.name) for each in fields(entry)}
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def _notes(table: Table, features: Sequence[Feature], rows: Rows, recognize: bool) -> Iterator[str]:
    """Say which columns are treated in ways of their own."""
    dates = [f"{feature.name!r} ({', '.join(feature.cycles)})" for feature in features if feature.kind == DATE]
    if dates:
        yield f"dates, as days since the first and as places in cycles: {some(dates)}"
    for name in table.features if recognize else ():
        if len(forms := date_forms(table.columns[name])) > 1:
            yield f"{name!r} is text: its dates may be meant as {' or '.join(forms)}; 2024-05-31 is clear"
    numbers = {each.name: table.columns[each.name] for each in features if each.kind == NUMBER}
    binary = [name for name, own in numbers.items() if _is_binary(own.parsed[rows][~own.missing[rows]])]
    if recognize and binary:
        yield f"nothing but 0 and 1, which stay as they are: {some(list(map(repr, binary)))}"
    gone = {each.name: int(table.columns[each.name].missing.sum()) for each in features if each.fill is not None}
    filled = [f"{each.name!r} ({gone[each.name]:,} by {each.fill})" for each in features if gone.get(each.name)]
    if filled:
        more = ", each with an input that says where" if any(each.indicator for each in features) else ""
        yield f"missing values, filled: {some(filled)}{more}"


def _far_out(table: Table, features: Sequence[Feature], target: Target, rows: Rows) -> Iterator[str]:
    """Name the values that lie absurdly far from all others: standardised, one of them makes the rest one number."""
    found: dict[str, NDArray[np.int64]] = {}
    for feature in features:
        if len(far := feature.far_out(table.alone(feature.name), rows)):
            found[feature.name] = far
    numeric = target.classes is None and table.columns[target.name].values.ndim == 1
    if numeric and len(far := Feature(target.name, NUMBER).far_out(table, rows)):
        found[target.name] = far
    if not found:
        return
    named = []
    for name, far in found.items():
        row = int(far[0])
        value = str(np.asarray(table.columns[name].values[row]).tolist())
        more = f", and {len(far) - 1:,} more" if len(far) > 1 else ""
        named.append(f"{name!r} ({value} in {table.place(row)}{more})")
    clipped = any(feature.usual is not None for feature in features)
    mend = (
        "cut off at the others' least and largest" if clipped else "--clip-outliers (data.clip_outliers) cuts them off"
    )
    if set(found) == {target.name}:
        mend = "targets stay as they are"
    yield f"far out, more than {_FAR:,.0f} quartile ranges from the median: {some(named)}; {mend}"


def plain_targets(table: Table) -> NDArray[np.generic]:
    """Return targets as they are, for a run that has no encoding: whole numbers ``[n]`` int64, or float32."""
    numbers, kind = table.numbers(table.target), table.columns[table.target].kind
    return numbers.astype(np.int64 if kind in (WHOLE, BOOLEAN) else np.float32)
