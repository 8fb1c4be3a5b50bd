"""Data that are in memory already: data frames, torch data sets, Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from fedem.data.base import Dataset
from fedem.data.files import Tabular
from fedem.data.tables.columns import Column, Piece, Table, joined
from fedem.data.tables.readers import frame_column, needed, read_frame
from fedem.errors import UserError, unknown
from fedem.federation import Federation


@dataclass(frozen=True)
class _Given(Tabular):
    """A table that was read already."""

    table: Table | None = None

    def read(self) -> Table:
        assert self.table is not None
        return self.table


def from_frame(
    frame: Any, target: str = "y", client: str = "client", *, seed: int = 0, unseen: float = 0.0, **options: Any
) -> Dataset:
    """Build from a pandas data frame (or what turns into one: polars, arrow), a row a sample.

    Args:
        frame: columns of numbers, booleans or text.
        target: name of the column of targets.
        client: name of the column of clients' names.
        seed: decides the split; train with the same.
        unseen: share of the clients that training will hold out, by the same seed: nothing is fitted on their rows.
        **options: those of :class:`~fedem.data.files.FromFile`: ``standardize``, ``task``, ``test``, ...

    """
    return _made(read_frame(frame, target, client), seed, unseen, options)


def from_datasets(datasets: Sequence[Any], names: Sequence[str] | None = None, **options: Any) -> Federation:
    """Build from torch data sets, one a client, whose items are pairs (input, target); each is read once.

    ``options`` are those of :meth:`Federation.from_clients`.
    """
    if not isinstance(datasets, Sequence):
        raise UserError(f"The data sets are a {type(datasets).__name__}; allowed: a list, one data set a client.")
    labels = [str(position) for position in range(len(datasets))] if names is None else list(map(str, names))
    if len(labels) != len(datasets):
        raise UserError(f"Got {len(labels)} names for {len(datasets)} data sets; allowed: one name each.")
    pairs = [_read_dataset(name, dataset) for name, dataset in zip(labels, datasets, strict=True)]
    return Federation.from_clients(pairs, labels, **options)


def _read_dataset(name: str, dataset: Any) -> tuple[Tensor, Tensor]:
    """Return all items of one client's data set, ``[n, ...]`` and ``[n]``."""
    # Without __iter__ a data set would be read until it raises an IndexError, which not all do.
    walk = dataset if isinstance(dataset, IterableDataset) else (dataset[row] for row in range(len(dataset)))
    columns: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, item in enumerate(walk):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(
                f"Client {name!r}, item {row} is a {type(item).__name__}"
                f"{f' of {len(item)}' if isinstance(item, tuple | list) else ''}; allowed: a pair (input, target)."
            )
        for what, value, column in zip(("input", "target"), item, columns, strict=True):
            try:
                column.append(value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value)))
            except TypeError:
                raise UserError(
                    f"Client {name!r}, item {row} has an {what} of type {type(value).__name__}; "
                    "allowed: numbers, arrays or tensors (a transform can make them)."
                ) from None
            if (column[row].shape, column[row].dtype) != (column[0].shape, column[0].dtype):
                raise UserError(
                    f"Client {name!r}, item {row} has an {what} of shape {list(column[row].shape)} and type "
                    f"{column[row].dtype}; allowed: {list(column[0].shape)} and {column[0].dtype}, as the first has."
                )
    if not columns[0]:
        raise UserError(f"Client {name!r} has an empty data set; at least 1 item is needed.")
    return torch.stack(columns[0]), torch.stack(columns[1])


def from_huggingface(
    partitions: Any,
    target: str = "label",
    features: str | Sequence[str] | None = None,
    *,
    names: Sequence[str] | None = None,
    seed: int = 0,
    unseen: float = 0.0,
    **options: Any,
) -> Dataset:
    """Build from Hugging Face data sets, one a client, such as ``FederatedDataset.load_partition`` of Flower returns.

    Args:
        partitions: a list of ``datasets.Dataset``, or a mapping from the clients' names to them.
        target: name of the column of targets; the names of a ``ClassLabel`` are kept.
        features: a column of images or arrays, which stay as they are, or columns of a table, which are encoded; all
            but the target when not given.
        names: of the clients; "0", "1", ... when not given.
        seed: decides the split; train with the same.
        unseen: share of the clients that training will hold out, by the same seed: nothing is fitted on their rows.
        **options: those of :class:`~fedem.data.files.FromFile`: ``standardize``, ``task``, ``test``, ...

    """
    needed("Reading Hugging Face data sets", "datasets", extra="huggingface")
    from datasets import Dataset as HuggingFace

    if isinstance(partitions, Mapping):
        names, partitions = list(map(str, partitions)), list(partitions.values())
    clients = [partitions] if isinstance(partitions, HuggingFace) else list(partitions)
    labels = [str(position) for position in range(len(clients))] if names is None else list(map(str, names))
    if len(labels) != len(clients):
        raise UserError(f"Got {len(labels)} names for {len(clients)} data sets; allowed: one name each.")
    if len(set(labels)) != len(labels):
        raise UserError(f"The clients' names must differ; got {', '.join(labels)}.")
    strange = next((entry for entry in clients if not isinstance(entry, HuggingFace)), None)
    if strange is not None or not clients:
        raise UserError(f"A client's data are a {type(strange).__name__}; allowed: datasets.Dataset, at least one.")
    tables = [_read_huggingface(name, entry, target, features) for name, entry in zip(labels, clients, strict=True)]
    return _made(joined(tables), seed, unseen, options)


def _read_huggingface(name: str, data: Any, target: str, features: str | Sequence[str] | None) -> Table:
    """Return one client's table, with a column that names the client."""
    for wanted in (target, *([features] if isinstance(features, str) else features or ())):
        if wanted not in data.column_names:
            raise unknown(f"column of client {name!r}", wanted, data.column_names)
    columns = [column for column in data.column_names if column != target] if features is None else features
    columns = [columns] if isinstance(columns, str) else list(columns)
    client = "client" if "client" not in (target, *columns) else "(client)"
    owner = Column(np.array([name] * len(data), dtype=object), np.zeros(len(data), dtype=bool))
    source, pieces = f"client {name!r}", (Piece(f"client {name!r}", len(data)),)
    targets = _column(source, data, target)
    if len(columns) == 1 and not _is_value(data.features[columns[0]]):
        inputs = data.select_columns(columns).with_format("numpy")[:][columns[0]]
        return Table(
            {target: targets, client: owner}, target, client, pieces, _array(name, inputs, data.features[columns[0]])
        )
    if column := next((column for column in columns if not _is_value(data.features[column])), None):
        raise UserError(
            f"Client {name!r}, column {column!r} holds {data.features[column]}; allowed beside other features: numbers "
            f"and text. features={column!r} takes it alone."
        )
    found = {column: _column(source, data, column) for column in columns}
    return Table({**found, target: targets, client: owner}, target, client, pieces)


def _column(source: str, data: Any, name: str) -> Column:
    """Return one column; that of a ClassLabel by the labels' names."""
    series = data.select_columns([name]).to_pandas()[name]
    kind = data.features[name]
    if not hasattr(kind, "int2str"):
        return frame_column(source, name, series)
    codes = series.fillna(-1).astype(int).tolist()
    texts = np.array([kind.int2str(code) if code >= 0 else "" for code in codes], dtype=object)
    return Column(texts, np.array([code < 0 for code in codes]))


def _is_value(feature: Any) -> bool:
    return hasattr(feature, "int2str") or type(feature).__name__ == "Value"


def _array(name: str, inputs: Any, feature: Any) -> NDArray[np.generic]:
    array = np.asarray(inputs)
    if array.dtype == object:
        raise UserError(f"Client {name!r} has inputs of different shapes; allowed: one shape for all.")
    # All integers come as int64, also those of an array that is declared smaller.
    return array.astype(feature.dtype) if type(feature).__name__.startswith("Array") else array


def _made(table: Table, seed: int, unseen: float, options: Mapping[str, Any]) -> Dataset:
    if not 0 <= unseen < 1:
        raise UserError(f"unseen is {unseen}; allowed: at least 0 and below 1.")
    given = _Given(table=table, target_column=table.target, client_column=table.client, **options)
    return given.make(seed, unseen=unseen)
