"""One column -> inputs: numbers standardised, text one-hot, true and false as 1 and 0; and columns that can't be.

Shapes: n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedem.data.tables.columns import BOOLEAN, LARGEST, NUMBER, TEXT, Table
from fedem.errors import UserError

_NAMED = 5


@dataclass(frozen=True)
class Feature:
    """How one column becomes inputs."""

    name: str
    kind: str
    """boolean, number or text"""
    mean: float = 0.0
    deviation: float = 1.0
    categories: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls, table: Table, name: str, rows: NDArray[np.int64], *, standardize: bool = True, max_categories: int = 100
    ) -> Feature:
        """Learn from the training ``rows`` of a column."""
        column = table.columns[name]
        if column.kind == BOOLEAN:
            return cls(name, BOOLEAN)
        if column.kind == TEXT:
            texts = column.texts(TEXT)
            categories = tuple(sorted({texts[row] for row in rows.tolist()}))
            if len(categories) > max_categories:
                raise too_many(table, name, len(categories), max_categories)
            return cls(name, TEXT, categories=categories)
        numbers = table.numbers(name)
        return cls(name, NUMBER, *(scale_of(numbers[rows]) if standardize else (0.0, 1.0)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that the column becomes."""
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


def scale_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation of ``values`` ``[n]``; equal values have deviation 1."""
    if values.min() == values.max():  # rounding may give them one of 1e-17
        return float(values[0]), 1.0
    return float(values.mean()), float(values.std()) or 1.0  # it is 0 where squares are too small for a float


def too_many(table: Table, name: str, count: int, allowed: int) -> UserError:
    """Return the error for a column of text that has too many categories."""
    column = table.columns[name]
    numbers = np.isfinite(column.parsed) if column.written else np.zeros(len(table), dtype=bool)
    odd = int((~numbers).argmax())
    hint = (
        f"{numbers.sum():,} of its values are numbers; the first that is none: {table.place(odd)}"
        if numbers.any()
        else f"such as {column.values[0]!r}; dates and identifiers are text as well"
    )
    return UserError(
        f"Column {name!r} is text with {count:,} categories ({hint}); allowed: at most {allowed} "
        f"(data.max_categories). Leave it out with data.ignore={name}, or turn it into numbers."
    )


def some(names: Sequence[str]) -> str:
    """Name the first few."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
