"""A user's own samples from a file: npz or CSV.

- npz: arrays ``x`` (inputs), ``y`` (targets, optional where only predictions are wanted), ``client`` (optional).
- CSV with a header: a column of targets, a column of client names, every other column a numeric feature.
"""

from __future__ import annotations

import csv
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedem.data.base import Dataset, DataSource
from fedem.errors import UserError
from fedem.federation import Federation

_WHOLE = re.compile(r"[+-]?\d{1,18}")
_LARGEST = float(np.finfo(np.float32).max)


class Table(NamedTuple):
    """Samples as read from a file."""

    inputs: NDArray[np.generic]
    targets: NDArray[np.generic] | None
    clients: NDArray[np.str_] | None
    features: tuple[str, ...] | None = None
    """names of the input columns, where the file has them"""

    def arranged(self, features: tuple[str, ...] | None) -> Table:
        """Return the table with its columns in the order of ``features``; refuse other columns."""
        if features is None or self.features is None or self.features == features:
            return self
        if set(self.features) != set(features):
            raise UserError(
                f"The columns are {', '.join(self.features)}; allowed: {', '.join(features)}, as in training."
            )
        return self._replace(inputs=self.inputs[:, [self.features.index(name) for name in features]], features=features)


def read_table(path: Path, target_column: str = "y", client_column: str = "client") -> Table:
    """Read a file of samples; its ending (.npz or .csv) says how."""
    readers = {".npz": _read_npz, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise UserError(f"{path} ends in {path.suffix!r}; allowed: {', '.join(readers)}.")
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    table = readers[path.suffix.lower()](path, target_column, client_column)
    for what, column in (("targets", table.targets), ("clients", table.clients)):
        if column is not None and len(column) != len(table.inputs):
            raise UserError(
                f"{path} has {len(table.inputs)} inputs but {len(column)} {what}; allowed: as many of each."
            )
    return table


def _read_npz(path: Path, target_column: str, client_column: str) -> Table:
    names = {"x": "x", "y": target_column, "client": client_column}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = {key: np.asarray(archive[name]) for key, name in names.items() if name in archive}
            present = ", ".join(archive.files)
        if "client" in found:
            found["client"] = found["client"].astype(str)
    # numpy and zipfile raise any of these for a damaged file; NotImplementedError is an unknown zip compression.
    except (OSError, ValueError, TypeError, EOFError, NotImplementedError, BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path} is no npz archive of plain arrays, or it is damaged ({type(error).__name__})."
        ) from None
    if "x" not in found:
        raise UserError(
            f"{path} has no array 'x' (it has: {present}); allowed: x, {target_column} and {client_column}."
        )
    for key, array in found.items():
        if array.ndim == 0:
            raise UserError(f"{path}: the array {names[key]!r} is a single value; allowed: one entry a sample.")
    return Table(found["x"], found.get("y"), found.get("client"))


def _read_csv(path: Path, target_column: str, client_column: str) -> Table:
    try:
        # utf-8-sig: spreadsheets put a mark before the first column's name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} can't be read as CSV: {error}.") from None
    if len(rows) < 2:
        raise UserError(f"{path} has {len(rows)} lines; allowed: a header and at least one row.")
    header = rows[0][1]
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise UserError(f"{path} has the column {twice!r} more than once; names must differ.")
    features = [name for name in header if name not in (target_column, client_column)]
    if not features:
        raise UserError(f"{path} has the columns {', '.join(header)}; at least one feature is needed besides.")
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise UserError(f"{path}, line {line}: {len(row)} fields; allowed: {len(header)}, as in the header.")
    columns = {name: [(line, row[index]) for line, row in rows[1:]] for index, name in enumerate(header)}
    inputs = np.stack([_numbers(path, name, columns[name]) for name in features], axis=1).astype(np.float32)
    targets = _targets(path, target_column, columns[target_column]) if target_column in columns else None
    clients = np.array([text for _, text in columns[client_column]]) if client_column in columns else None
    return Table(inputs, targets, clients, tuple(features))


def _targets(path: Path, name: str, column: list[tuple[int, str]]) -> NDArray[np.generic]:
    """Whole numbers, written without a point, are classes; anything else is a number to regress on."""
    if all(_WHOLE.fullmatch(text.strip()) for _, text in column):
        return np.array([int(text) for _, text in column], dtype=np.int64)
    return _numbers(path, name, column).astype(np.float32)


def _numbers(path: Path, name: str, column: list[tuple[int, str]]) -> NDArray[np.float64]:
    numbers = np.empty(len(column))
    for index, (line, text) in enumerate(column):
        try:
            numbers[index] = float(text.replace("_", " "))  # Python would read 1_0 as ten
        except ValueError:
            raise UserError(f"{path}, line {line}, column {name!r}: {text!r} is no number.") from None
        if not abs(numbers[index]) <= _LARGEST:
            raise UserError(f"{path}, line {line}, column {name!r}: {text!r} is not finite in single precision.")
    return numbers


@dataclass(frozen=True)
class FromFile(DataSource):
    """Samples of several clients in one file; each client's are split at random."""

    path: str = ""
    target_column: str = "y"
    client_column: str = "client"
    validation: float = field(default=0.2, metadata={"min": 0, "below": 1})
    test: float = field(default=0.2, metadata={"min": 0, "below": 1})

    def make(self, seed: int) -> Dataset:
        """Read and split."""
        if not self.path:
            raise UserError("data.path is empty; allowed: the path of a file ending in .npz or .csv.")
        table = read_table(Path(self.path), self.target_column, self.client_column)
        if table.targets is None or table.clients is None:
            missing = self.target_column if table.targets is None else self.client_column
            raise UserError(
                f"{self.path} has no column {missing!r} (see data.target_column and data.client_column); "
                "targets and clients are needed to train."
            )
        federation = Federation.from_arrays(
            table.inputs, table.targets, table.clients, validation=self.validation, test=self.test, seed=seed
        )
        return Dataset(federation, feature_names=table.features)
