"""A user's own samples from a file: npz or CSV.

- npz: arrays ``x`` (inputs), ``y`` (targets, optional where only predictions are wanted), ``client`` (optional).
- CSV with a header: a column of targets, a column of client names, every other column a numeric feature.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedem.data.base import Dataset, DataSource
from fedem.errors import UserError
from fedem.federation import Federation


class Table(NamedTuple):
    """Samples as read from a file."""

    inputs: NDArray[np.generic]
    targets: NDArray[np.generic] | None
    clients: NDArray[np.str_] | None


def read_table(path: Path, target_column: str = "y", client_column: str = "client") -> Table:
    """Read a file of samples; its ending (.npz or .csv) says how."""
    readers = {".npz": _read_npz, ".csv": _read_csv}
    if path.suffix not in readers:
        raise UserError(f"{path} ends in {path.suffix!r}; allowed: {', '.join(readers)}.")
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    table = readers[path.suffix](path, target_column, client_column)
    for what, column in (("targets", table.targets), ("clients", table.clients)):
        if column is not None and len(column) != len(table.inputs):
            raise UserError(
                f"{path} has {len(table.inputs)} inputs but {len(column)} {what}; allowed: as many of each."
            )
    return table


def _read_npz(path: Path, target_column: str, client_column: str) -> Table:
    names = {"x": "x", "y": target_column, "client": client_column}
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {key: archive[name] for key, name in names.items() if name in archive}
    except (OSError, ValueError, BadZipFile) as error:
        raise UserError(f"{path} can't be read as npz: {error}") from None
    if "x" not in found:
        raise UserError(f"{path} has no array 'x'; allowed: x, {target_column} and {client_column}.")
    clients = found.get("client")
    return Table(found["x"], found.get("y"), None if clients is None else clients.astype(str))


def _read_csv(path: Path, target_column: str, client_column: str) -> Table:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if len(rows) < 2:
        raise UserError(f"{path} has {len(rows)} lines; allowed: a header and at least one row.")
    header, body = rows[0], rows[1:]
    features = [name for name in header if name not in (target_column, client_column)]
    if not features:
        raise UserError(f"{path} has the columns {', '.join(header)}; at least one feature is needed besides.")
    for line, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise UserError(f"{path}, line {line}: {len(row)} fields; allowed: {len(header)}, as in the header.")
    columns = dict(zip(header, zip(*body, strict=True), strict=True))
    inputs = np.stack([_numbers(path, name, columns[name]) for name in features], axis=1).astype(np.float32)
    targets = _numbers(path, target_column, columns[target_column]) if target_column in columns else None
    if targets is not None and (targets == np.round(targets)).all():
        targets = targets.astype(np.int64)
    clients = np.array(columns[client_column]) if client_column in columns else None
    return Table(inputs, targets, clients)


def _numbers(path: Path, name: str, column: tuple[str, ...]) -> NDArray[np.float64]:
    numbers = np.empty(len(column))
    for index, text in enumerate(column):
        try:
            numbers[index] = float(text)
        except ValueError:
            raise UserError(f"{path}, line {index + 2}, column {name!r}: {text!r} is no number.") from None
        if not np.isfinite(numbers[index]):
            raise UserError(f"{path}, line {index + 2}, column {name!r}: {text!r} is not finite.")
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
        table = read_table(Path(self.path), self.target_column, self.client_column)
        if table.targets is None or table.clients is None:
            missing = self.target_column if table.targets is None else self.client_column
            raise UserError(f"{self.path} has no column {missing!r}; targets and clients are needed to train.")
        federation = Federation.from_arrays(
            table.inputs, table.targets, table.clients, validation=self.validation, test=self.test, seed=seed
        )
        return Dataset(federation, None)
