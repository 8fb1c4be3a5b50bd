"""Columns as they were read, before anything is made of them: what is wrong is said by column and row.

Shapes: n rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedem.errors import UserError

BOOLEAN, WHOLE, NUMBER, TEXT = "boolean", "whole", "number", "text"
"""What a column may hold."""

_WHOLE = re.compile(r"\s*[+-]?\d{1,18}\s*")
_BOOLEANS = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}
LARGEST = float(np.finfo(np.float32).max)
"""of single precision"""
_NAMED = 5
_NOTHING = frozenset(("na", "n/a", "nan", "none", "null", "?", "-"))


@dataclass(frozen=True, eq=False)
class Column:
    """One column.

    Attributes:
        values: ``[n]`` booleans, integers, floats or texts (objects); a target may be floats ``[n, D]``.
        blank: ``[n]`` booleans, where nothing stands.
        written: whether these are the texts of a file without types, so that the content says what they are.

    """

    values: NDArray[Any]
    blank: NDArray[np.bool_]
    written: bool = False

    @cached_property
    def missing(self) -> NDArray[np.bool_]:
        """``[n]``, where no value stands.

        Words for that (NA, None, ?, ...) count where all others are numbers, or true and false; a column of text has
        them as categories.
        """
        if not self.written:
            return self.blank
        words = np.array([is_nothing(text) for text in self.values], dtype=bool)
        rest = ~(self.blank | words)
        return self.blank | words if not rest.any() or self._kind_of(rest) != TEXT else self.blank

    @cached_property
    def kind(self) -> str:
        """What the column holds: a number anywhere that is none makes it text."""
        if self.values.dtype != object:
            return {"b": BOOLEAN, "f": NUMBER}.get(self.values.dtype.kind, WHOLE)
        return self._kind_of(~self.missing) if self.written and not self.missing.all() else TEXT

    def _kind_of(self, rows: NDArray[np.bool_]) -> str:
        """Return what the texts of some rows are."""
        texts = self.values[rows]
        if all(text.strip().lower() in ("true", "false") for text in texts):
            return BOOLEAN
        if np.isnan(self.parsed[rows]).any():
            return TEXT
        return WHOLE if all(map(_WHOLE.fullmatch, texts)) else NUMBER

    @cached_property
    def parsed(self) -> NDArray[np.float64]:
        """``[n]``, NaN for what is no number."""
        if self.values.dtype != object:
            return self.values.astype(np.float64)
        return np.array([_parse(text) for text in self.values], dtype=np.float64)

    def texts(self, kind: str) -> list[str]:
        """Return the values as text, one text a value however it was written: 1.0 and "+1" are the number 1."""
        if kind != TEXT and self.values.dtype == object:
            if kind == BOOLEAN:
                return [text.strip().lower() for text in self.values]
            whole = (_WHOLE.fullmatch(text) for text in self.values)
            return [
                str(int(text)) if exact else written(number)
                for text, exact, number in zip(self.values, whole, self.parsed.tolist(), strict=True)
            ]
        return [written(value) for value in self.values.tolist()]


class Piece(NamedTuple):
    """Where some rows stand that follow each other."""

    source: str
    rows: int
    lines: Sequence[int] | None = None
    """the line of each in a file of lines"""


@dataclass(frozen=True, eq=False)
class Table:
    """Samples as read: named columns, or an array of inputs beside the columns of targets and clients.

    Attributes:
        columns: by name, in the file's order.
        target: name of the column of targets, whether it is there or not.
        client: name of the column of client names; likewise.
        pieces: where the rows come from.
        array: ``[n, ...]`` inputs that have no columns.

    """

    columns: Mapping[str, Column]
    target: str
    client: str
    pieces: tuple[Piece, ...]
    array: NDArray[np.generic] | None = None

    def __len__(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns that are neither targets nor clients."""
        return tuple(name for name in self.columns if name not in (self.target, self.client))

    def without(self, names: Sequence[str]) -> Table:
        """Leave columns out; those that are not there are not missed."""
        return replace(self, columns={name: column for name, column in self.columns.items() if name not in names})

    def as_text(self, names: Sequence[str]) -> Table:
        """Take columns for text, whatever stands in them."""
        texts = {name: replace(self.columns[name], written=False) for name in names if name in self.columns}
        return replace(self, columns={**self.columns, **texts})

    def owned_by(self, client: str) -> Table:
        """Give all rows to one client."""
        owner = Column(np.array([client] * len(self), dtype=object), np.zeros(len(self), dtype=bool))
        return replace(self, columns={**self.columns, self.client: owner})

    def place(self, row: int) -> str:
        """Say where a row stands: its file and line, or its position counted from 0."""
        for piece in self.pieces:
            if row < piece.rows:
                return f"{piece.source}, line {piece.lines[row]}" if piece.lines else f"{piece.source}, row {row}"
            row -= piece.rows
        raise IndexError(row)

    def complete(self, names: Sequence[str]) -> Table:
        """Refuse missing values in the columns called ``names``: all such columns are named, with their numbers."""
        counts = {name: int(self.columns[name].missing.sum()) for name in names}
        found = [
            f"{count} in column {name!r} (first: {self.place(int(self.columns[name].missing.argmax()))})"
            for name, count in counts.items()
            if count
        ]
        if found:
            more = f" and {len(found) - _NAMED} columns more" if len(found) > _NAMED else ""
            raise UserError(
                f"Missing values: {', '.join(found[:_NAMED])}{more}. Fill them in, or leave those rows or columns out."
            )
        return self

    def owners(self) -> NDArray[np.str_] | None:
        """Return the client of each row, ``[n]``; None without such a column."""
        if self.client not in self.columns:
            return None
        column = self.complete([self.client]).columns[self.client]
        return np.array(column.texts(TEXT), dtype=str)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column of numbers, ``[n]``; refuse text and what is not finite in single precision."""
        column = self.complete([name]).columns[name]
        if column.kind == TEXT or (column.kind == BOOLEAN and column.written):
            row = int(np.isnan(column.parsed).argmax()) if column.written else 0
            raise self.refusal(name, row, "is no number")
        numbers = column.parsed
        large = ~(np.abs(numbers) <= LARGEST)
        if large.any():
            raise self.refusal(name, int(np.argwhere(large)[0, 0]), "is not finite in single precision")
        return numbers

    def booleans(self, name: str) -> NDArray[np.float64]:
        """Return a column of true and false (or 1 and 0) as 1 and 0, ``[n]``."""
        column = self.complete([name]).columns[name]
        values = [_BOOLEANS.get(text.strip().lower()) for text in column.texts(TEXT)]
        if None in values:
            raise self.refusal(name, values.index(None), "is neither true nor false")
        return np.array(values, dtype=np.float64)

    def stacked(self) -> NDArray[np.generic]:
        """Return the inputs as they are: the array, or all features as numbers in the file's order, ``[n, d]``."""
        if self.array is not None:
            return self.array
        return np.stack([self.numbers(name) for name in self.features], axis=1).astype(np.float32)

    def refusal(self, name: str, row: int, why: str) -> UserError:
        """Return the error for one value."""
        value = self.columns[name].values[row]
        shown = value if isinstance(value, str) else np.asarray(value).tolist()
        return UserError(f"{self.place(row)}, column {name!r}: {shown!r} {why}.")


def joined(tables: Sequence[Table]) -> Table:
    """Lay tables of the same columns under each other, in the first one's order of columns."""
    first = tables[0]
    for table in tables[1:]:
        for name in sorted(set(first.columns) ^ set(table.columns)):
            having, lacking = (first, table) if name in first.columns else (table, first)
            raise UserError(
                f"{having.pieces[0].source} has the column {name!r} and {lacking.pieces[0].source} has not; "
                "all files of a folder must have the same columns."
            )
    columns = {name: _joined([table.columns[name] for table in tables]) for name in first.columns}
    arrays = [table.array for table in tables if table.array is not None]
    kinds = {(array.shape[1:], array.dtype) for array in arrays}
    if len(kinds) > 1:
        raise UserError(f"The arrays of inputs differ in shape or type: {', '.join(sorted(map(str, kinds)))}.")
    pieces = tuple(piece for table in tables for piece in table.pieces)
    return Table(columns, first.target, first.client, pieces, np.concatenate(arrays) if arrays else None)


def _joined(columns: Sequence[Column]) -> Column:
    """Join the parts of one column; where some are text, all are."""
    values = [column.values for column in columns]
    if len({array.dtype == object for array in values}) > 1:
        values = [np.array(column.texts(TEXT), dtype=object) for column in columns]
    blank = np.concatenate([column.blank for column in columns])
    return Column(np.concatenate(values), blank, all(column.written for column in columns))


def _parse(text: str) -> float:
    try:
        return float(text.replace("_", " "))  # Python would read 1_0 as ten
    except ValueError:
        return float("nan")


def is_nothing(value: Any) -> bool:
    """Whether this is a word for a value that is missing."""
    return isinstance(value, str) and value.strip().lower() in _NOTHING


def written(value: Any) -> str:
    """Write a value in one way: whole numbers without a point, booleans in small letters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)
