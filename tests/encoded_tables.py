"""Small tables that several test files encode."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from shops import make_shops

from fedem.data.tables import Column, Piece, Table

ROWS = make_shops(10)


def table_of(target: str = "y", **columns: Any) -> Table:
    """A table of texts, as a CSV file has them."""
    made = {
        name: Column(np.array(list(map(str, values)), dtype=object), np.zeros(len(values), dtype=bool), written=True)
        for name, values in columns.items()
    }
    rows = len(next(iter(columns.values())))
    return Table(made, target, "client", (Piece("t.csv", rows, range(2, rows + 2).__getitem__),))


def all_rows(table: Table) -> NDArray[np.int64]:
    return np.arange(len(table))


def column(name: str, rows: list[dict[str, object]] = ROWS) -> list[object]:
    return [row[name] for row in rows]
