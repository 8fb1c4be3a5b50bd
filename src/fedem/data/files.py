"""A user's own samples: tables from files and data frames, torch data sets, Hugging Face data sets.

A table is split among its clients and encoded by what its training rows say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from fedem.core.errors import UserError, check_known, needed
from fedem.core.random import client_keys
from fedem.data.dataset import Dataset, Pooled
from fedem.data.encoding import IMPUTE, TASKS, Encoding, Target
from fedem.data.federation import PARTS, Federation, check_names
from fedem.data.partitions import Collection, Natural, Partition, fingerprint, from_arrays
from fedem.data.recognition import ungrouped, unneeded
from fedem.data.samples import Pool, check_finite, check_inputs
from fedem.data.tables import (
    BOOLEAN,
    DECIMALS,
    ENDINGS,
    TEXT,
    Column,
    Dialect,
    Piece,
    Table,
    check_encoding,
    frame_column,
    joined,
    read_frame,
    read_table,
)
from fedem.data.texts import AUTO, SEPARATORS

_NAMED = 30  # columns of a table that an error lists


@dataclass(frozen=True)
class FromFile(Pooled):
    """Samples of several clients in a file or a folder of files.

    Attributes:
        target_column: name of the column of targets.
        client_column: name of the column of clients' names; other partitions than natural do without.
        split_by: name of a column of numbers or dates (2024-05-31, 2024-05-31T09:30) by which each client's rows are
            ordered and then cut: the first are for training, the next for validation, the last for testing. The column
            is no input. Empty: rows are split at random, which lets a model of a series see what comes later.
        ignore: names of columns to leave out, with commas between.
        keep: names of columns to take whatever they look like, with commas between.
        recognize: whether columns are taken for what they look like. Numbers may have thousands separators; dates
            become days and places in cycles; numbers that are 0 and 1 alone stay as they are; identifiers, saved
            indices and columns of one value are left out; whole numbers as targets are classes by rules of their own.
        task: what the targets are, when the guess is wrong. "auto" takes text, true and false, and few different whole
            numbers for classes, and other numbers for a regression.
        impute: what becomes of features' missing values. "median" fills in that of the training rows, and for text the
            most frequent value; "mode" always the latter; "indicator" is the first of these, and an input for each
            column that says where.
        clip_outliers: whether numbers and dates that lie more than 1,000 quartile ranges from the training rows'
            median become the least or largest of the others, in later files as well. They are named in any case.
            Targets are never cut off.
        standardize: whether numbers are brought to mean 0 and deviation 1 by the training rows of all clients together,
            the targets of a regression as well.
        max_categories: different values that a column of text may have.
        separator: what stands between the fields of a CSV file; "auto": found out.
        decimal: the decimal sign of its numbers; likewise.
        encoding: of its text, such as utf-8, cp1252 or utf-16; likewise.
        max_memory: GiB that a file may take once it is unpacked and read; 0: half of what is free, and at most 200
            times the size of a packed file, from 256 MiB on.
        path: where the file or folder is; ``--data PATH`` sets it.
        table: what was read already, in place of a path.
    """

    target_column: str = "y"
    client_column: str = "client"
    split_by: str = ""
    ignore: str = ""
    keep: str = ""
    recognize: bool = field(default=True, metadata={"before": False})
    task: str = field(default="auto", metadata={"choices": TASKS})
    impute: str = field(default="refuse", metadata={"choices": IMPUTE})
    clip_outliers: bool = field(default=False, metadata={"came_later": True})
    standardize: bool = True
    max_categories: int = field(default=100, metadata={"min": 2})
    separator: str = field(default=AUTO, metadata={"choices": (AUTO, *SEPARATORS), "before": ","})
    decimal: str = field(default=AUTO, metadata={"choices": (AUTO, *DECIMALS), "before": "."})
    encoding: str = field(default=AUTO, metadata={"before": "utf-8"})
    max_memory: float = field(default=0.0, metadata={"min": 0, "came_later": True})
    path: str = ""
    table: Table | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_encoding(self.encoding)

    def read(self) -> Table:
        if self.table is not None:
            return replace(self.table, order=self.split_by)
        if not self.path:
            raise UserError(f"data.path is empty; allowed: a file ending in {ENDINGS}, or a folder of such files.")
        return read_table(Path(self.path), self.target_column, self.client_column, self.split_by, self.dialect)

    @property
    def dialect(self) -> Dialect:
        return Dialect(self.separator, self.decimal, self.encoding, self.max_memory)

    @property
    def cut(self) -> dict[str, Any]:
        return super().cut | ({"gap": 0} if self.split_by else {})

    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        """Read, deal to clients, split, and encode by what the training rows of clients that train say."""
        partition = partition or Natural(min_samples=1)
        table, target, dropped = self._checked(owned=isinstance(partition, Natural))
        collection = _collection(table, target)
        assignment = partition.assign(collection, seed)
        federation = self._split(collection, assignment, seed)
        train_rows = federation.hold_out(unseen, seed).train.rows
        assert train_rows is not None, "a federation made of a pool has rows"
        how = (self.standardize, self.max_categories, self.impute, self.recognize, self.clip_outliers)
        encoding = Encoding.fit(table, train_rows.numpy(), target, *how)
        ignored = (*_names(self.ignore, but=self.split_by), *dropped, *([self.split_by] if self.split_by else []))
        encoding = replace(encoding, ignored=ignored, notes=(*table.notes, *encoding.notes))
        made = Dataset(_encoded(federation, table, encoding), encoding=encoding, seed=seed, unseen=unseen)
        made = made._replace(partition_hash=fingerprint(assignment, collection))
        return made._replace(feature_names=encoding.input_names, label_names=encoding.target.classes)

    def make_by(self, encoding: Encoding, seed: int, owner: str | None = None) -> Federation:
        """Read and split as :meth:`make` does, but fit nothing; ``owner`` has the rows where no column says whose."""
        # What was text among all rows stays so among a few, and rows go by their content.
        table = encoding.taken(self.read())
        self._check_columns(table, "the name of the client is needed then" if owner is None else "")
        if owner is not None and table.client not in table.columns:
            table = table.owned_by(owner)
        collection = _collection(table, replace(encoding.target, mean=0.0, deviation=1.0))
        return _encoded(self._split(collection, Natural(min_samples=1).assign(collection, seed), seed), table, encoding)

    def _checked(self, *, owned: bool) -> tuple[Table, Target, tuple[str, ...]]:
        """Return the table as it is taken, what its targets are, and the columns that say nothing of a row."""
        if owned and (both := self.target_column) == self.client_column:
            raise UserError(f"data.target_column and data.client_column are both {both!r}; allowed: two columns.")
        table = self.read()
        self._check_columns(table, "clients are needed, or a partition that deals the rows" if owned else "")
        if not len(table):
            raise UserError("A federation needs at least one client; got none.")
        ignored, kept = _names(self.ignore, but=self.split_by), _names(self.keep)
        for key, names in (("ignore", ignored), ("keep", kept)):
            if strange := [name for name in names if name not in table.columns or name == table.target]:
                raise UserError(f"data.{key} names {strange[0]!r}; allowed: {', '.join(table.features) or 'none'}.")
        table = table.without(ignored)
        if table.array is None and not table.features:
            raise UserError(f"data.ignore is {self.ignore!r}, which are all features; at least one is needed.")
        dropped: dict[str, str] = {}
        if self.recognize and table.array is None:
            table, grouped = ungrouped(table, [*table.features, table.target])
            dropped = {name: why for name, why in unneeded(table) if name not in kept}
            table = _told(table.without([*dropped]), grouped, dropped)
        table.complete([name for name in table.columns if self.impute == "refuse" or name not in table.features])
        limit, recognize = self.max_categories, self.recognize
        return table, Target.fit(table, task=self.task, max_categories=limit, recognize=recognize), tuple(dropped)

    def _check_columns(self, table: Table, clients: str) -> None:
        """Refuse a table without targets, what orders its rows or, where there is a reason, ``clients``."""
        self._need(table, table.target, "targets are needed to train")
        if self.split_by in (table.target, table.client):
            what = "targets" if self.split_by == table.target else "clients"
            raise UserError(f"data.split_by is {self.split_by!r}, the column of {what}; allowed: one of its own.")
        if self.split_by:
            self._need(table, self.split_by, "rows are to be ordered by it", "data.split_by, --split-by")
        if clients:
            self._need(table, table.client, clients)

    def _need(self, table: Table, column: str, why: str, option: str = "") -> None:
        if column in table.columns:
            return
        close = get_close_matches(column, table.columns, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        option = option or "data.target_column, --target-column, and data.client_column, --client-column"
        said = f"{f'{self.path} has' if self.path else 'The data have'} no column {column!r} (see {option}); {why}"
        raise UserError(f"{said}. There are: {', '.join([*table.columns][:_NAMED])}.{hint}")


def _names(text: str, but: str = "") -> tuple[str, ...]:
    """Return the names that are listed with commas."""
    return tuple(name for part in text.split(",") if (name := part.strip()) not in ("", but))


def _told(table: Table, grouped: Sequence[str], dropped: Mapping[str, str]) -> Table:
    """Note what was recognised; refuse a table of which nothing is left."""
    reasons = [f"{name!r} ({why})" for name, why in dropped.items()]
    named = ",".join(filter(None, dropped))
    said = ", ".join(reasons) + (f"; data.keep={named} takes them all the same" if named else "")
    if not table.features:
        raise UserError(f"No column is left as a feature: {said}.")
    notes = [f"numbers with thousands separators: {', '.join(map(repr, grouped))}"] if grouped else []
    notes += [f"left out: {said}"] if dropped else []
    return replace(table, notes=(*table.notes, *notes))


def _encoded(federation: Federation, table: Table, encoding: Encoding) -> Federation:
    pool = Pool(_finite(table, encoding.inputs(table)), torch.from_numpy(encoding.target.encode(table)))
    train, validation, test = (replace(federation.part(part), pool=pool) for part in PARTS)
    return replace(federation, train=train, validation=validation, test=test, origin=encoding.fingerprint)


def _collection(table: Table, target: Target) -> Collection:
    """Return a table's samples without inputs, with ids that hash the columns as read: to be dealt before encoding."""
    if table.array is not None:
        content = _finite(table, table.array).numpy()
    else:
        content = np.stack([_words(table, name).view(np.int64) for name in sorted(table.features)], axis=1)
    times = table.times()
    # Rows that differ in time alone are told apart by it.
    further = () if times is None else (times.astype(np.float64),)
    made = from_arrays(content, target.encode(table), table.owners(), *further)
    order = None if times is None else torch.from_numpy(times)
    return replace(made, pool=made.pool._replace(inputs=torch.zeros(len(table), 0)), order=order)


def _words(table: Table, name: str) -> NDArray[np.generic]:
    """Return a column as words of eight bytes: numbers, and text by its hash; one for all missing values. ``[n]``."""
    if (missing := (column := table.columns[name]).missing).any():
        neutral = "false" if column.kind == BOOLEAN else "" if column.kind == TEXT else 0.0
        words = _words(table.alone(name).filled({name: neutral}), name).view(np.int64).copy()
        words[missing] = np.iinfo(np.int64).min
        return words
    if column.kind == BOOLEAN:
        return table.booleans(name)
    if column.kind != TEXT:
        return column.parsed
    texts = column.texts(TEXT)
    different = list(set(texts))
    hashes = dict(zip(different, client_keys(different).tolist(), strict=True))
    return np.fromiter((hashes[text] for text in texts), np.int64, len(texts))


def _finite(table: Table, values: NDArray[np.generic]) -> Tensor:
    inputs, owners = check_inputs("(all)", values, finite=False), table.owners()
    check_finite("(all)" if owners is None else owners, "inputs", inputs)
    return inputs


def from_frame(
    frame: Any, target: str = "y", client: str = "client", *, seed: int = 0, unseen: float = 0.0, **options: Any
) -> Dataset:
    """Build from a pandas data frame (or what turns into one: polars, arrow), one row per sample.

    Args:
        frame: columns of numbers, booleans or text.
        target: name of the column of targets.
        client: name of the column of clients' names.
        seed: decides the split; train with the same.
        unseen: share of the clients that training will hold out, by the same seed: nothing is fitted on their rows.
        **options: those of :class:`~fedem.data.files.FromFile`: ``split_by``, ``standardize``, ``task``, ``test``, ...
    """
    return _made(read_frame(frame, target, client), seed, unseen, options)


def from_datasets(datasets: Sequence[Any], names: Sequence[str] | None = None, **options: Any) -> Federation:
    """Build from torch data sets, one per client, whose items are pairs (input, target); each is read once.

    ``options`` are those of :meth:`Federation.from_clients`.
    """
    if not isinstance(datasets, Sequence):
        raise UserError(f"The data sets are a {type(datasets).__name__}; allowed: a list, one data set per client.")
    labels = check_names(names, len(datasets), "data sets")
    pairs = [_read_dataset(name, dataset) for name, dataset in zip(labels, datasets, strict=True)]
    return Federation.from_clients(pairs, labels, **options)


def _read_dataset(name: str, dataset: Any) -> tuple[Tensor, Tensor]:
    # Without __iter__ a data set would be read until it raises an IndexError, which not all do.
    walk = dataset if isinstance(dataset, IterableDataset) else (dataset[row] for row in range(len(dataset)))
    columns: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, item in enumerate(walk):
        where = f"Client {name!r}, item {row}"
        if not isinstance(item, tuple | list) or len(item) != 2:
            kind = type(item).__name__ + (f" of {len(item)}" if isinstance(item, tuple | list) else "")
            raise UserError(f"{where} is a {kind}; allowed: a pair (input, target).")
        for what, value, column in zip(("input", "target"), item, columns, strict=True):
            try:
                column.append(value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value)))
            except TypeError:
                said = f"{where} has an {what} of type {type(value).__name__}"
                raise UserError(f"{said}; allowed: numbers, arrays or tensors (a transform can make them).") from None
            first, last = (f"{list(tensor.shape)} and type {tensor.dtype}" for tensor in (column[0], column[row]))
            if first != last:
                raise UserError(f"{where} has an {what} of shape {last}; allowed: {first}, as the first has.")
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
    """Build from Hugging Face data sets, one per client, such as ``FederatedDataset.load_partition`` of Flower returns.

    Args:
        partitions: a list of ``datasets.Dataset``, or a mapping from the clients' names to them.
        target: name of the column of targets; the names of a ``ClassLabel`` are kept.
        features: a column of images or arrays, which stay as they are, or columns of a table, which are encoded; all
            but the target when not given.
        names: of the clients; "0", "1", ... when not given.
        seed: decides the split; train with the same.
        unseen: share of the clients that training will hold out, by the same seed: nothing is fitted on their rows.
        **options: those of :class:`~fedem.data.files.FromFile`: ``split_by``, ``standardize``, ``task``, ``test``, ...
    """
    needed("Reading Hugging Face data sets", "datasets", extra="huggingface")
    from datasets import Dataset as HuggingFace

    if isinstance(partitions, Mapping):
        names, partitions = list(map(str, partitions)), list(partitions.values())
    clients = [partitions] if isinstance(partitions, HuggingFace) else list(partitions)
    labels = check_names(names, len(clients), "data sets")
    if (strange := next((entry for entry in clients if not isinstance(entry, HuggingFace)), None)) is not None:
        raise UserError(f"A client's data are a {type(strange).__name__}; allowed: datasets.Dataset.")
    order = options.get("split_by", "")
    tables = [_read_huggingface(*named, target, features, order) for named in zip(labels, clients, strict=True)]
    return _made(joined(tables), seed, unseen, options)


def _read_huggingface(name: str, data: Any, target: str, features: str | Sequence[str] | None, order: str) -> Table:
    chosen = [features] if isinstance(features, str) else features
    times = [order] if order else []
    check_known(f"column of client {name!r}", (target, *times, *(chosen or ())), data.column_names)
    rest = [column for column in data.column_names if column not in (target, order)]
    columns = rest if chosen is None else [column for column in chosen if column != order]
    client = "client" if "client" not in (target, *times, *columns) else "(client)"
    source, owner = f"client {name!r}", Column.of_text([name] * len(data))
    pieces, targets = (Piece(source, len(data)),), _column(source, data, target)
    plain = {name for name, kind in data.features.items() if hasattr(kind, "int2str") or type(kind).__name__ == "Value"}
    if len(columns) == 1 and columns[0] not in plain:
        array = np.asarray(data.select_columns(columns).with_format("numpy")[:][columns[0]])
        if array.dtype == object:
            raise UserError(f"Client {name!r} has inputs of different shapes; allowed: one shape for all.")
        kind = data.features[columns[0]]  # all integers come as int64, also those of an array that is declared smaller
        array = array.astype(kind.dtype) if type(kind).__name__.startswith("Array") else array
        ordering = {column: _column(source, data, column) for column in times}
        return Table({**ordering, target: targets, client: owner}, target, client, pieces, array)
    if column := next((column for column in columns if column not in plain), None):
        said = f"Client {name!r}, column {column!r} holds {data.features[column]}"
        raise UserError(f"{said}; allowed beside other features: numbers and text. features={column!r} takes it alone.")
    found = {column: _column(source, data, column) for column in (*columns, *times)}
    return Table({**found, target: targets, client: owner}, target, client, pieces)


def _column(source: str, data: Any, name: str) -> Column:
    """Return one column; that of a ClassLabel by the labels' names."""
    series, kind = data.select_columns([name]).to_pandas()[name], data.features[name]
    if not hasattr(kind, "int2str"):
        return frame_column(source, name, series)
    codes = series.fillna(-1).astype(int).to_numpy()
    texts = [kind.int2str(code) if code >= 0 else "" for code in codes.tolist()]
    return Column(np.array(texts, dtype=object), codes < 0)


def _made(table: Table, seed: int, unseen: float, options: Mapping[str, Any]) -> Dataset:
    if not 0 <= unseen < 1:
        raise UserError(f"unseen is {unseen}; allowed: at least 0 and below 1.")
    source = FromFile(table=table, target_column=table.target, client_column=table.client, **options)
    return source.make(seed, unseen=unseen)
