"""What tables have beside plain numbers and categories: thousands separators, dates, columns that say nothing of a row.

Shapes: n rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedem.data.tables import NUMBER, TEXT, WHOLE, Column, Table, is_nothing
from fedem.data.texts import different, of_each

ENOUGH = 20  # rows from which on columns of one value, or of nothing but different ones, mean something
_GROUPED = re.compile(r"[+-]?\d{1,3}([,'\u2019 \u00a0\u202f])\d{3}(?:\1\d{3})*(?:\.\d*)?")
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_NAMELESS = re.compile(r"Unnamed: \d+")  # what pandas calls an index that it reads from a file without knowing
_NAMED_ID = re.compile(r".*[a-z]I[dD]|(?i:(.*[\W_])?(id|index|key|uuid|guid|rownames?))")
ISO = "ISO8601"
_DAYS = ("%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
_MONTHS = ("%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%b %d, %Y", "%B %d, %Y")
_FORMS = (ISO, *(day + time for day in (*_DAYS, *_MONTHS) for time in ("", " %H:%M", " %H:%M:%S")))
_DATE = re.compile(
    r"\s*(\d{4}-\d\d(-.*)?|\d{4}[/.]\d{1,2}[/.].*"
    r"|\d{1,2}[-/. ](\d{1,2}|[A-Za-z]{3,9})[-/. ]\d{4}.*|[A-Za-z]{3,9} \d{1,2}, \d{4}.*)"
)


def ungrouped(table: Table, names: Sequence[str]) -> tuple[Table, tuple[str, ...]]:
    """Read text that is numbers with thousands separators (1,234 or 1 234 or 1'234) as numbers; also return where."""
    read = ((name, _ungrouped(table.columns[name])) for name in names if name in table.columns)
    found = {name: column for name, column in read if column is not None}
    return replace(table, columns={**table.columns, **found}), tuple(found)


def _ungrouped(column: Column) -> Column | None:
    if column.kind != TEXT:
        return None
    gone = column.blank | of_each(column.values, is_nothing, bool)
    signs: set[str] = set()
    for text in map(str.strip, different(column.values[~gone])):
        if match := _GROUPED.fullmatch(text):
            signs.add(match[1])
        elif not _PLAIN.fullmatch(text):
            return None
    if len(signs) != 1:
        return None
    values = np.array(column.values.tolist(), dtype=object)
    values[~gone] = [text.strip().replace(*signs, "") for text in values[~gone]]
    return replace(column, values=values, written=True)


def date_forms(column: Column) -> tuple[str, ...]:
    """Return how text is to be read as dates; none for other text, several where that makes them different dates."""
    if column.kind != TEXT or column.missing.all():
        return ()
    texts = column.values[~column.missing]
    if not all(map(_DATE.fullmatch, different(texts))):
        return ()
    texts = np.unique(np.array(list(different(texts)), dtype=str))
    found: dict[bytes, str] = {}
    for form in _FORMS:
        dates = read_dates(texts, form)
        if not np.isnat(dates).any():
            found.setdefault(dates.tobytes(), form)
    return tuple(found.values())


def read_dates(texts: Sequence[str] | NDArray[Any], form: str) -> NDArray[np.datetime64]:
    """Read dates, ``[n]``, in UTC; what is none is NaT."""
    import pandas

    stripped = pandas.Series([text.strip() for text in texts], dtype=object)
    dates = pandas.to_datetime(stripped, format=form, utc=True, errors="coerce")
    return dates.to_numpy(dtype="datetime64[us]")


def unneeded(table: Table) -> Iterator[tuple[str, str]]:
    """Yield columns that say nothing of a row, and why; a table of few rows has none but an index."""
    for name in (*([""] if "" in table.columns else []), *table.features):
        column = table.columns[name]
        if not name or (_NAMELESS.fullmatch(name) and column.kind == WHOLE and not column.missing.any()):
            yield name, "an index that was saved with the table" if column.kind == WHOLE else "it has no name"
        elif len(table) < ENOUGH or (column.missing.any() and not column.missing.all()):
            continue
        elif column.missing.all():
            yield name, "empty"
        elif len(distinct := set(column.parsed if column.kind == NUMBER else column.texts(column.kind))) == 1:
            yield name, f"always {distinct.pop()}"
        elif len(distinct) == len(table) and _is_identifier(name, column):
            yield name, "an identifier: it differs in every row"


def _is_identifier(name: str, column: Column) -> bool:
    """Whether values that all differ are text, or whole numbers that count rows or are called an id."""
    if column.kind == WHOLE:
        counts = column.parsed.max() - column.parsed.min() == len(column.parsed) - 1
        return bool(counts or _NAMED_ID.fullmatch(name))
    return column.kind == TEXT and not date_forms(column)
