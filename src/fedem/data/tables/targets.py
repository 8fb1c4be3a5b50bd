"""The column of targets -> classes or numbers.

Shapes: n rows, D target dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedem.data.tables.columns import BOOLEAN, NUMBER, TEXT, WHOLE, Table
from fedem.data.tables.features import scale_of, some, too_many
from fedem.errors import UserError

_FEW = 20
"""distinct numbers that may well be classes"""

TASKS = ("auto", "classification", "regression")


@dataclass(frozen=True)
class Target:
    """How the column of targets becomes classes or numbers."""

    name: str
    kind: str
    """what the column held in training: boolean, whole, number or text"""
    distinct: int
    """number of different values"""
    classes: tuple[str, ...] | None
    """names of the classes, whose positions are the targets; None for regression"""
    mean: float = 0.0
    deviation: float = 1.0

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
            table.numbers(name)  # raises, naming the first value that is no number
        if task == "auto" and kind == TEXT and len(found) > max_categories:
            raise too_many(table, name, len(found), max_categories)
        regression = kind == NUMBER or (kind == WHOLE and len(found) > max_categories)
        if task == "regression" or (task == "auto" and regression):
            if len(found) < 2:
                value = next(iter(found), None)
                raise UserError(f"The target column {name!r} has one value only ({value!r}); allowed: at least two.")
            return cls(name, kind, len(found), None)
        if len(found) < 2:
            raise UserError(
                f"The target column {name!r} has one value only ({next(iter(found), None)!r}); "
                "allowed: at least two classes, or numbers (data.task=regression)."
            )
        order = sorted(found) if kind in (TEXT, BOOLEAN) else sorted(found, key=lambda text: (float(text), text))
        return cls(name, kind, len(found), tuple(order))

    def scaled(self, table: Table, rows: NDArray[np.int64]) -> Target:
        """Standardise numbers by the training ``rows``.

        A Gaussian likelihood of variance 1, by which samples are dealt to components, wants targets of that size.
        """
        if self.classes is not None or table.columns[self.name].values.ndim > 1:
            return self
        mean, deviation = scale_of(table.numbers(self.name)[rows])
        return replace(self, mean=mean, deviation=deviation)

    def encode(self, table: Table) -> NDArray[np.generic]:
        """Return positions of classes, ``[n]`` int64, or numbers, float32; the table says which column it is."""
        name = table.target
        if name not in table.columns:
            raise UserError(f"There is no column {name!r} of targets.")
        table = table.as_text([name]) if self.kind == TEXT else table
        column = table.complete([name]).columns[name]
        if self.classes is None:
            return ((table.numbers(name) - self.mean) / self.deviation).astype(np.float32)
        if self.kind in (WHOLE, NUMBER):
            table.numbers(name)
        places = {label: place for place, label in enumerate(self.classes)}
        codes = [places.get(text, -1) for text in column.texts(self.kind)]
        if -1 in codes:
            why = f"is none of the {len(places)} classes of training ({some(self.classes)})"
            raise table.refusal(name, codes.index(-1), why)
        return np.array(codes, dtype=np.int64)

    def describe(self) -> str:
        """Say what was made of the column."""
        if self.classes is not None:
            return f"target {self.name!r}: {len(self.classes)} classes ({some(self.classes)})"
        why = "whole numbers" if self.kind == WHOLE else "numbers"
        if self.kind == WHOLE or self.distinct <= _FEW:
            why += "; data.task=classification makes them classes"
        scale = ""
        if (self.mean, self.deviation) != (0.0, 1.0):
            scale = (
                f", standardised by mean {self.mean:.4g} and deviation {self.deviation:.4g}: an error of 1 is so much"
            )
        return f"target {self.name!r}: regression ({self.distinct:,} distinct {why}){scale}"


def plain_targets(table: Table) -> NDArray[np.generic]:
    """Return targets as they are, for a run that has no encoding: whole numbers ``[n]`` int64, or float32."""
    numbers = table.numbers(table.target)
    kind = table.columns[table.target].kind
    return numbers.astype(np.int64 if kind in (WHOLE, BOOLEAN) else np.float32)
