"""The same few samples in files of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedem.data.tables import Table

INPUTS = np.array([[1.5, -2.0], [0.25, 4.0], [3.0, 5.0], [6.0, -7.5], [8.0, 9.0], [0.0, 1.0]])
TARGETS = np.array([0, 1, 2, 1, 0, 2])
CLIENTS = np.array(["ann", "bob", "ann", "ann", "bob", "bob"])
HEADER = "first,second,y,client"


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def write_csv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame(columns).to_parquet(path)
    return path


def owners_of(table: Table) -> list[str]:
    owners = table.owners()
    assert owners is not None
    return owners.tolist()


def write_samples_npz(folder: Path) -> Path:
    return write_npz(folder / "samples.npz", x=INPUTS, y=TARGETS, client=CLIENTS)


def write_samples_csv(folder: Path) -> Path:
    rows = [f"{a},{b},{y},{client}" for (a, b), y, client in zip(INPUTS, TARGETS, CLIENTS, strict=True)]
    return write_csv(folder / "samples.csv", HEADER, *rows)


def write_samples_parquet(folder: Path) -> Path:
    first, second = INPUTS.T
    return write_parquet(folder / "samples.parquet", first=first, second=second, y=TARGETS, client=CLIENTS)
