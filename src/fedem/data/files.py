"""A user's own samples: a table from a file, split among its clients and encoded by what its training rows say."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedem.arrays import check_inputs, first_not_finite, not_finite
from fedem.data.base import Dataset, Pooled
from fedem.data.collection import Collection, from_arrays
from fedem.data.partitions import Natural, Partition, fingerprint
from fedem.data.tables.columns import BOOLEAN, TEXT, Table
from fedem.data.tables.encoding import Encoding
from fedem.data.tables.readers import READERS, read_table
from fedem.data.tables.targets import TASKS, Target
from fedem.errors import UserError
from fedem.federation import PARTS, Federation
from fedem.randomness import client_keys
from fedem.samples import Pool

_NAMED = 30
"""columns of a table that an error lists"""


@dataclass(frozen=True)
class Tabular(Pooled):
    """A table of samples, one column with targets and one with the clients' names.

    Text is one-hot. Missing values are refused; a CSV file's words for them (NA, None, ?, ...) count as such among
    numbers and are categories among text.

    Attributes:
        target_column: name of the column of targets.
        client_column: name of the column of clients' names; other partitions than natural do without.
        ignore: names of columns to leave out, with commas between.
        task: what the targets are, when the guess is wrong. "auto" takes text, true and false, and few different whole
            numbers for classes, and other numbers for a regression.
        standardize: whether numbers are brought to mean 0 and deviation 1 by the training rows of all clients together,
            the targets of a regression as well.
        max_categories: different values that a column of text may have, and that whole numbers may have to be guessed
            classes.

    """

    target_column: str = "y"
    client_column: str = "client"
    ignore: str = ""
    task: str = field(default="auto", metadata={"choices": TASKS})
    standardize: bool = True
    max_categories: int = field(default=100, metadata={"min": 2})

    @abstractmethod
    def read(self) -> Table:
        """Read the table."""

    def collect(self) -> Collection:
        """Return all samples with their columns as numbers, not yet scaled: that needs to know who trains on what."""
        table, target = self._checked(owned=False)
        encoding = self._fit(table, np.arange(len(table)), target, standardize=False)
        return _collection(table, encoding.inputs(table), target)

    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        """Read, deal to clients, split, and encode by what the training rows of clients that train say."""
        partition = partition or Natural(min_samples=1)
        table, target = self._checked(owned=isinstance(partition, Natural))
        # Rows go by their content, so that they can be dealt and split before there are inputs.
        collection = _collection(table, np.zeros((len(table), 0), dtype=np.float32), target)
        assignment = partition.assign(collection, seed)
        federation = self._split(collection, assignment, seed)
        train_rows = federation.hold_out(unseen, seed).train.rows
        assert train_rows is not None, "a federation made of a pool has rows"
        encoding = self._fit(table, train_rows.numpy(), target, standardize=self.standardize)
        encoded = _encoded(federation, table, encoding)
        return Dataset(
            encoded,
            feature_names=encoding.input_names,
            encoding=encoding,
            partition_hash=fingerprint(assignment, collection),
            label_names=encoding.classes,
            seed=seed,
            unseen=unseen,
        )

    def make_by(self, encoding: Encoding, seed: int, owner: str | None = None) -> Federation:
        """Read and split as :meth:`make` does, but encode by what was learnt elsewhere: nothing is fitted.

        Args:
            encoding: of all clients.
            seed: decides the split, together with the clients' names and the content of their rows.
            owner: whose the rows are, where no column says so.

        """
        # What was text among all rows stays so among a few, and rows go by their content.
        texts = [feature.name for feature in encoding.features or () if feature.kind == TEXT]
        table = self.read().without(encoding.ignored).as_text(texts)
        if table.target not in table.columns:
            raise self._lacking(table, table.target, "targets are needed to train")
        if table.client not in table.columns:
            if owner is None:
                raise self._lacking(table, table.client, "the name of the client is needed then")
            table = table.owned_by(owner)
        unscaled = replace(encoding.target, mean=0.0, deviation=1.0)
        collection = _collection(table, np.zeros((len(table), 0), dtype=np.float32), unscaled)
        return _encoded(self._split(collection, Natural(min_samples=1).assign(collection, seed), seed), table, encoding)

    def _checked(self, *, owned: bool) -> tuple[Table, Target]:
        """Return the table without the columns left out, and what its targets are."""
        if owned and self.target_column == self.client_column:
            raise UserError(
                f"data.target_column and data.client_column are both {self.target_column!r}; allowed: two columns."
            )
        table = self.read()
        if table.target not in table.columns:
            raise self._lacking(table, table.target, "targets are needed to train")
        if owned and table.client not in table.columns:
            raise self._lacking(table, table.client, "clients are needed, or a partition that deals the rows")
        if not len(table):
            raise UserError("A federation needs at least one client; got none.")
        unknown = [name for name in self._ignored if name not in table.columns]
        if unknown or table.target in self._ignored:
            raise UserError(
                f"data.ignore names {(unknown or [table.target])[0]!r}; allowed: {', '.join(table.features) or 'none'}."
            )
        table = table.without(self._ignored)
        if table.array is None and not table.features:
            raise UserError(f"data.ignore is {self.ignore!r}, which are all features; at least one is needed.")
        table.complete(list(table.columns))
        return table, Target.fit(table, task=self.task, max_categories=self.max_categories)

    @property
    def _ignored(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.ignore.split(",") if name.strip())

    def _fit(self, table: Table, rows: NDArray[np.int64], target: Target, *, standardize: bool) -> Encoding:
        limit = self.max_categories
        return Encoding.fit(table, rows, target, standardize=standardize, max_categories=limit, ignored=self._ignored)

    @property
    def _source(self) -> str:
        return "The data have"

    def _lacking(self, table: Table, column: str, why: str) -> UserError:
        close = get_close_matches(column, table.columns, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return UserError(
            f"{self._source} no column {column!r} (see data.target_column, --target-column, and data.client_column, "
            f"--client-column); {why}. There are: {', '.join([*table.columns][:_NAMED])}.{hint}"
        )


@dataclass(frozen=True)
class FromFile(Tabular):
    """Samples of several clients in a file or a folder of files; each client's are split at random.

    Attributes:
        path: where the file or folder is; ``--data PATH`` sets it.

    """

    path: str = ""

    def read(self) -> Table:
        """Read the file."""
        if not self.path:
            raise UserError(f"data.path is empty; allowed: a file ending in {', '.join(READERS)}, or a folder of such.")
        return read_table(Path(self.path), self.target_column, self.client_column)

    @property
    def _source(self) -> str:
        return f"{self.path} has"


def _encoded(federation: Federation, table: Table, encoding: Encoding) -> Federation:
    """Return the federation with the table's rows as ``encoding`` makes them inputs and targets."""
    pool = Pool(_finite(table, encoding.inputs(table)), torch.from_numpy(encoding.targets(table)))
    train, validation, test = (replace(federation.part(part), pool=pool) for part in PARTS)
    return replace(federation, train=train, validation=validation, test=test, origin=encoding.fingerprint)


def _collection(table: Table, inputs: NDArray[np.generic], target: Target) -> Collection:
    """Return the samples of a table, with ids that hash the columns as they were read, whatever their order."""
    if table.array is not None:
        content = _finite(table, table.array).numpy()
    else:
        content = np.stack([_words(table, name).view(np.int64) for name in sorted(table.features)], axis=1)
    made = from_arrays(content, target.encode(table), table.owners())
    return replace(made, pool=made.pool._replace(inputs=torch.from_numpy(inputs)))


def _words(table: Table, name: str) -> NDArray[np.generic]:
    """Return a column as words of eight bytes: numbers, and text by its hash. ``[n]``."""
    column = table.columns[name]
    if column.kind == BOOLEAN:
        return table.booleans(name)
    if column.kind != TEXT:
        return column.parsed
    unique, codes = np.unique(np.array(column.texts(TEXT), dtype=str), return_inverse=True)
    return client_keys(unique.tolist()).numpy()[codes]


def _finite(table: Table, values: NDArray[np.generic]) -> torch.Tensor:
    inputs = check_inputs("(all)", values, finite=False)
    if (row := first_not_finite(inputs)) is not None:
        owners = table.owners()
        raise not_finite("(all)" if owners is None else str(owners[row]), "inputs", row)
    return inputs
