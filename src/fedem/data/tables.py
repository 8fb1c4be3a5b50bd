"""Tables of named columns, read from files and data frames: what is wrong is said by column and line.

- CSV with a header, and Parquet: a column of targets, a column of client names, every other column a feature. How a CSV
  file is written (separator, decimal sign, encoding, compression) is found out, or told by a :class:`Dialect`.
- npz: arrays ``x`` (inputs), ``y`` (targets, optional where only predictions are wanted), ``client`` (optional); one
  that orders the rows in time, where it is named.
- A folder of files of one of these kinds: without a column of client names each file is a client, named by its stem.
- A pandas data frame, or what turns into one.

Missing values are refused by column and line once it is known which columns are used. In CSV these are empty fields
and, where all other fields of a column are numbers (or true and false), NA, N/A, NaN, None, null, ? and -, in capitals
or not; in a column of text they are categories.

Shapes: n rows, d features, D target dimensions.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedem.core.errors import UserError
from fedem.data.archives import read_arrays
from fedem.data.limits import check_memory
from fedem.data.texts import AUTO, PACKED, SEPARATORS, Source, Texts, Unsplit, different, of_each, scan

BOOLEAN, WHOLE, NUMBER, TEXT = "boolean", "whole", "number", "text"  # What a column may hold
LARGEST = float(np.finfo(np.float32).max)  # of single precision
_WHOLE = re.compile(r"\s*[+-]?\d{1,18}\s*")
_BOOLEANS = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}
_NOTHING = frozenset(("na", "n/a", "nan", "none", "null", "?", "-"))
_NAMED = 5  # columns with missing values that an error lists
DECIMALS = (".", ",")
_POINT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+|\d{1,3}(?:,\d{3})+(?:\.\d*)?)(?:[eE][+-]?\d+)?")
_COMMA = re.compile(r"[+-]?(?:\d+,?\d*|,\d+|\d{1,3}(?:[.' \u00a0\u202f]\d{3})+(?:,\d*)?)(?:[eE][+-]?\d+)?")
_WITH_POINT = str.maketrans({",": "."} | dict.fromkeys(".' \u00a0\u202f", None))
_BLOCK, _MOST = 4 << 20, 1 << 30  # bytes of CSV that are read together, and at most: a row lies in one block
_TEXT_TIMES = 16  # bytes of memory that a byte of CSV takes until it is a federation, at most, by measurement
_COLUMN = 10 << 10  # ... and each column besides, however few rows it has
_PARQUET_TIMES = 4  # ... and a value of Parquet, which is in memory as arrow's, pandas' and ours
_LONGEST = 1000  # characters of a client's name


Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Column:
    """One column, as it was read."""

    values: NDArray[Any] | Texts  # [n] booleans, integers, floats or texts (objects); a target may be floats [n, D]
    blank: NDArray[np.bool_]  # [n], where nothing stands
    written: bool = False  # whether these are the texts of a file without types, so that the content says what they are

    @classmethod
    def of_text(cls, texts: Sequence[str]) -> Column:
        return cls(np.array(texts, dtype=object), np.zeros(len(texts), dtype=bool))

    @cached_property
    def missing(self) -> NDArray[np.bool_]:
        """``[n]``, where no value stands, or a word for that (NA, None, ?, ...) among numbers, or true and false."""
        if not self.written:
            return self.blank
        missing = self.blank | of_each(self.values, is_nothing, bool)
        return missing if missing.all() or self._kind_of(~missing) != TEXT else self.blank

    @cached_property
    def kind(self) -> str:
        if self.values.dtype != object:
            return {"b": BOOLEAN, "f": NUMBER}.get(self.values.dtype.kind, WHOLE)
        return self._kind_of(~self.missing) if self.written and not self.missing.all() else TEXT

    def _kind_of(self, rows: NDArray[np.bool_]) -> str:
        """Return what the texts of ``rows`` are: one that is not a number makes them text."""
        texts = self.values[rows]
        if all(text.strip().lower() in ("true", "false") for text in different(texts)):
            return BOOLEAN
        if np.isnan(self.parsed[rows]).any():
            return TEXT
        return WHOLE if all(map(_WHOLE.fullmatch, different(texts))) else NUMBER

    @cached_property
    def parsed(self) -> NDArray[np.float64]:
        """``[n]``, NaN for what is not a number."""
        if isinstance(self.values, Texts) or self.values.dtype == object:
            return of_each(self.values, _parse, np.float64)
        return self.values.astype(np.float64)

    def texts(self, kind: str) -> list[str]:
        """Return the values as text, one text per value however it was written: 1.0 and "+1" are the number 1."""
        if kind == TEXT or self.values.dtype != object:
            return [_written(value) for value in self.values.tolist()]
        way = {BOOLEAN: _as_boolean}.get(kind, _as_number)
        return of_each(self.values, way, object).tolist()


class Dialect(NamedTuple):
    """How a file is to be read: how CSV is written ("auto": to be found out), and the GiB that it may take.

    0: half of what is free.
    """

    separator: str = AUTO
    decimal: str = AUTO
    encoding: str = AUTO
    max_memory: float = 0.0


_FOUND_OUT = Dialect()


class Piece(NamedTuple):
    """Where some rows stand that follow each other."""

    source: str
    rows: int
    line: Callable[[int], int] | None = None  # the line of a row in a file of lines


@dataclass(frozen=True, eq=False)
class Table:
    """Samples as read: named columns, or an array of inputs beside the columns of targets and clients."""

    columns: Mapping[str, Column]  # by name, in the file's order
    target: str  # name of the column of targets, whether it is there or not
    client: str  # name of the column of client names; likewise
    pieces: tuple[Piece, ...]  # where the rows come from
    array: NDArray[np.generic] | None = None  # [n, ...], inputs that have no columns
    order: str = ""  # name of the column that orders the rows in time, which is no feature; empty: none does
    notes: tuple[str, ...] = ()  # what was found out of how the files are written, where it is not the usual

    def __len__(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if name not in (self.target, self.client, self.order))

    def without(self, names: Sequence[str]) -> Table:
        gone = set(names)
        return replace(self, columns={name: column for name, column in self.columns.items() if name not in gone})

    def alone(self, name: str) -> Table:
        """Return one column: whatever is done for each of many columns must not copy the list of all."""
        return replace(self, columns={name: self.columns[name]})

    def as_text(self, names: Sequence[str]) -> Table:
        texts = {name: replace(self.columns[name], written=False) for name in names if name in self.columns}
        return replace(self, columns={**self.columns, **texts})

    def owned_by(self, clients: str | Sequence[str]) -> Table:
        owners = Column.of_text([clients] * len(self) if isinstance(clients, str) else clients)
        return replace(self, columns={**self.columns, self.client: owners})

    def place(self, row: int) -> str:
        """Say where a row stands: its file and line, or its position counted from 0."""
        for piece in self.pieces:
            if row < piece.rows:
                return f"{piece.source}, line {piece.line(row)}" if piece.line else f"{piece.source}, row {row}"
            row -= piece.rows
        raise IndexError(row)

    def complete(self, names: Sequence[str]) -> Table:
        """Refuse missing values in the columns called ``names``."""
        if missing := {name: rows for name in names if (rows := self.columns[name].missing).any()}:
            found = ", ".join(
                f"{rows.sum()} in column {name!r} (first: {self.place(int(rows.argmax()))})"
                for name, rows in islice(missing.items(), _NAMED)
            )
            more = f" and {len(missing) - _NAMED} columns more" if len(missing) > _NAMED else ""
            mend = "Fill them in, or leave those rows or columns out"
            if set(missing) <= set(self.features):
                mend += "; training with --impute median, mode or indicator (data.impute) fills them"
            raise UserError(f"Missing values: {found}{more}. {mend}.")
        return self

    def filled(self, fills: Mapping[str, float | str]) -> Table:
        """Put a value, by the column's name, where none stands."""
        columns = dict(self.columns)
        for name, value in fills.items():
            if (missing := (column := columns[name]).missing).any():
                texts = np.array(column.texts(TEXT), dtype=object)
                texts[missing] = _written(value)
                written = column.written or column.values.dtype != object or isinstance(value, float)
                columns[name] = Column(texts, np.zeros(len(texts), dtype=bool), written)
        return replace(self, columns=columns)

    def owners(self) -> NDArray[np.str_] | None:
        """Return the client of each row, ``[n]``; None without such a column."""
        if self.client not in self.columns:
            return None
        names = self.complete([self.client]).columns[self.client].texts(TEXT)
        if len(longest := max(names, key=len, default="")) > _LONGEST:
            said = f"{self.place(names.index(longest))}, column {self.client!r}: {longest[:20]!r}... has"
            raise UserError(f"{said} {len(longest):,} characters; allowed in a client's name: {_LONGEST:,}.")
        found = np.array(names, dtype=str)
        if (empty := found == "").any():
            said = f"{self.place(int(empty.argmax()))}, column {self.client!r}: a client's name is empty"
            raise UserError(f"{said}; allowed: one character or more.")
        return found

    def numbers(self, name: str, cut: Callable[[Floats], Floats] | None = None) -> Floats:
        """Return a column of numbers, ``[n]``, after ``cut`` has done with them what it does.

        Refuse text and what is not finite in single precision.
        """
        column = self.complete([name]).columns[name]
        if column.kind == TEXT or (column.kind == BOOLEAN and column.written):
            row = int(np.isnan(column.parsed).argmax()) if column.written else 0
            raise self.refusal(name, row, "is not a number")
        numbers = column.parsed if cut is None else cut(column.parsed)
        if (large := ~(np.abs(numbers) <= LARGEST)).any():
            raise self.refusal(name, int(np.argwhere(large)[0, 0]), "is not finite in single precision")
        return numbers

    def times(self) -> NDArray[np.int64] | NDArray[np.float64] | None:
        """Return what orders the rows in time, ``[n]``: numbers, or dates in microseconds; None if nothing does."""
        if not self.order:
            return None
        column = self.complete([self.order]).columns[self.order]
        if column.kind == WHOLE:  # exact, also beyond what a float holds
            return np.array([int(text) for text in column.texts(WHOLE)], dtype=np.int64)
        if column.kind != TEXT:
            return self.numbers(self.order)
        import pandas

        texts = pandas.Series(column.texts(TEXT), dtype=object)
        dates = pandas.to_datetime(texts, format="ISO8601", utc=True, errors="coerce")
        if (wrong := dates.isna().to_numpy()).any():
            raise self.refusal(self.order, int(wrong.argmax()), "is neither a number nor a date such as 2024-05-31")
        return dates.to_numpy(dtype="datetime64[us]").astype(np.int64)

    def booleans(self, name: str) -> NDArray[np.float64]:
        """Return a column of true and false (or 1 and 0) as 1 and 0, ``[n]``."""
        column = self.complete([name]).columns[name]
        if None in (values := [_BOOLEANS.get(text.strip().lower()) for text in column.texts(TEXT)]):
            raise self.refusal(name, values.index(None), "is neither true nor false")
        return np.array(values, dtype=np.float64)

    def stacked(self) -> NDArray[np.generic]:
        """Return the inputs as they are: the array, or all features as numbers in the file's order, ``[n, d]``."""
        if self.array is not None:
            return self.array
        return np.stack([self.numbers(name) for name in self.features], axis=1).astype(np.float32)

    def refusal(self, name: str, row: int, why: str) -> UserError:
        value = self.columns[name].values[row]
        shown = value if isinstance(value, str) else np.asarray(value).tolist()
        return UserError(f"{self.place(row)}, column {name!r}: {shown!r} {why}.")


def joined(tables: Sequence[Table]) -> Table:
    """Lay tables of the same columns under each other, in the first one's order of columns."""
    first = tables[0]
    for table in tables[1:]:
        for name in sorted(set(first.columns) ^ set(table.columns)):
            one, other = (own.pieces[0].source for own in ((first, table) if name in first.columns else (table, first)))
            raise UserError(f"{one} has the column {name!r} and {other} has not; all files must have the same columns.")
    columns = {}
    for name in first.columns:
        pieces = [table.columns[name] for table in tables]
        blank = np.concatenate([column.blank for column in pieces])
        columns[name] = Column(_laid([*pieces]), blank, all(column.written for column in pieces))
    arrays = [table.array for table in tables if table.array is not None]
    kinds = {(array.shape[1:], array.dtype) for array in arrays}
    if len(kinds) > 1:
        raise UserError(f"The arrays of inputs differ in shape or type: {', '.join(sorted(map(str, kinds)))}.")
    places = tuple(piece for table in tables for piece in table.pieces)
    notes = tuple(dict.fromkeys(note for table in tables for note in table.notes))
    stacked = np.concatenate(arrays) if arrays else None
    return replace(first, columns=columns, pieces=places, array=stacked, notes=notes)


def _laid(columns: Sequence[Column]) -> NDArray[Any] | Texts:
    """Lay the values of columns under each other; where some are text, all are."""
    texts = [column.values for column in columns if isinstance(column.values, Texts)]
    if len(texts) == len(columns):
        return Texts.joined(texts)
    if texts or len({column.values.dtype == object for column in columns}) > 1:
        return np.concatenate([np.array(column.texts(TEXT), dtype=object) for column in columns])
    return np.concatenate([column.values for column in columns])


def _parse(text: str) -> float:
    try:
        return float(text.replace("_", " "))  # Python would read 1_0 as ten
    except ValueError:
        return float("nan")


def is_nothing(value: Any) -> bool:
    """Whether this is a word for no value."""
    return isinstance(value, str) and value.strip().lower() in _NOTHING


def _written(value: Any) -> str:
    """Write a value in one way: whole numbers without a point, booleans in small letters."""
    if isinstance(value, bool):
        return str(value).lower()
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if is_whole else value)


def _as_boolean(text: str) -> str:
    return text.strip().lower()


def _as_number(text: str) -> str:
    return str(int(text)) if _WHOLE.fullmatch(text) else _written(_parse(text))


def read_table(
    path: Path, target: str = "y", client: str = "client", order: str = "", dialect: Dialect = _FOUND_OUT
) -> Table:
    """Read a file of samples, whose ending says how, or a folder of such files."""
    if path.is_dir():
        # Names that start with a dot or an underscore are bookkeeping of whatever wrote the folder.
        paths = sorted(inside for inside in path.iterdir() if not inside.name.startswith((".", "_")))
        endings = sorted(set(map(ending_of, paths)))
        if len(endings) != 1 or endings[0] not in READERS:
            found, allowed = ", ".join(map(repr, endings)) or "no", f"files of one kind, {ENDINGS}"
            raise UserError(f"The folder {path} holds {found} files; allowed: {allowed}.")
        tables = [read_table(inside, target, client, order, dialect) for inside in paths]
        whole = joined(tables)
        owners = [stem_of(inside) for inside, table in zip(paths, tables, strict=True) for _ in range(len(table))]
        return whole if client in whole.columns else whole.owned_by(owners)
    if (ending := ending_of(path)) not in READERS:
        raise UserError(f"{path} ends in {ending!r}; allowed: {ENDINGS}, or a folder of such files.")
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    return READERS[ending](path, target, client, order, dialect)


def check_encoding(name: str) -> None:
    """Refuse an encoding of text that there is not."""
    try:
        if name != AUTO:
            "".encode(name)
    except (LookupError, ValueError):
        raise UserError(f"data.encoding is {name!r}; allowed: auto, utf-8, cp1252, utf-16, ...") from None


def ending_of(path: Path) -> str:
    """Return a file's ending in small letters, with that of its content before that of a compression: .csv.gz."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last in PACKED else last


def stem_of(path: Path) -> str:
    """Return a file's name without its ending."""
    return path.name[: len(path.name) - len(ending_of(path))]


def _read_npz(path: Path, target: str, client: str, order: str, dialect: Dialect) -> Table:
    found, names = read_arrays(path, ("x", target, client, *([order] if order else [])), dialect.max_memory)
    if "x" not in found:
        raise UserError(f"{path} has no array 'x' (it has: {', '.join(names)}); allowed: x, {target} and {client}.")
    inputs = found["x"]
    for name, array in found.items():
        if array.ndim and not array.size:
            problem = f"the array {name!r} has shape {list(array.shape)}, which holds nothing"
            raise UserError(f"{path}: {problem}; allowed: at least one row and one feature.")
        if array.ndim == 0:
            raise UserError(f"{path}: the array {name!r} is a single value; allowed: one entry per sample.")
        if len(array) != len(inputs):
            what = {client: "clients", target: "targets"}.get(name, f"of {name!r}")
            raise UserError(f"{path} has {len(inputs)} inputs but {len(array)} {what}; allowed: as many of each.")
    if inputs.dtype.kind not in "biuf":
        raise UserError(f"{path}: the array 'x' is of type {inputs.dtype}; allowed: numbers.")
    del found["x"]
    for name, what in ((client, "client name"), (order, f"{order!r}")):
        if name in found and found[name].ndim > 1:
            raise UserError(f"{path}: there must be one {what} per row: got shape {found[name].shape}.")
    columns = {name: _array_column(path, name, array, text=name == client) for name, array in found.items()}
    return Table(columns, target, client, (Piece(str(path), len(inputs)),), inputs, order)


def _array_column(path: Path, name: str, array: NDArray[Any], *, text: bool) -> Column:
    if array.dtype.kind not in "biufUS":
        raise UserError(f"{path}: the array {name!r} is of type {array.dtype}; allowed: numbers, booleans or text.")
    if array.dtype.kind in "US":
        if array.ndim > 1:
            raise UserError(f"{path}: the array {name!r} is text of shape {list(array.shape)}; allowed: one per row.")
        texts = array.astype(str).astype(object)
        return Column(texts, texts == "")
    if array.dtype == np.uint64:
        if text:
            return Column.of_text(array.astype(str).tolist())
        array = _whole(str(path), name, array.reshape(-1).tolist()).reshape(array.shape)
    blank = array != array  # NaN alone differs from itself
    return Column(array, blank.any(tuple(range(1, array.ndim))))


def _read_csv(path: Path, target: str, client: str, order: str, dialect: Dialect) -> Table:
    source = scan(path, dialect.encoding, dialect.max_memory, _TEXT_TIMES)
    separator = SEPARATORS.get(dialect.separator) or source.separator()
    header, texts = _fields(source, separator, dialect.max_memory)
    rows = len(next(iter(texts.values()), ()))
    if not rows:
        raise UserError(f"{path} has {len(header[:1])} lines; allowed: a header and at least one row.")
    commas = _decimal_commas({name: own for name, own in texts.items() if name != client}, dialect.decimal, separator)
    columns = {}
    for name, own in (texts | commas).items():
        # A client may well be called Null, or a blank.
        empty = own.of_each(partial(_is_empty, named=name == client), bool)
        columns[name] = Column(own, empty, written=name != client)
    line = partial(_line_of, source, separator)
    made = _checked(Piece(str(path), rows, line), header, columns, target, client, order)
    named = next(name for name, sign in SEPARATORS.items() if sign == separator)
    notes = [f"fields are separated by {named}"] if separator != "," else []
    notes += [f"the text is in {source.encoding}"] if source.encoding != "utf-8" else []
    notes += [f"numbers have decimal commas: {', '.join(map(repr, islice(commas, _NAMED)))}"] if commas else []
    return replace(made, notes=tuple(notes))


def _is_empty(text: str, *, named: bool) -> bool:
    return (text if named else text.strip()) == ""


def _fields(source: Source, separator: str, max_memory: float) -> tuple[list[str], dict[str, Texts]]:
    """Return the header of a CSV file, and its columns."""
    import pyarrow
    from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

    try:
        header = next((fields for _, fields in source.lines(separator)), [])
        check_memory(source.path, _TEXT_TIMES * source.size + _COLUMN * len(header), max_memory, source.size)
        form = ParseOptions(delimiter=separator, newlines_in_values=True)
        kinds = ConvertOptions(column_types=dict.fromkeys(header, pyarrow.large_string()), strings_can_be_null=False)
        for block in (_BLOCK, _MOST):  # a row must lie in one block
            with source.open() as file:
                try:
                    # One thread: those that read ahead would go on with a file that is closed.
                    how = ReadOptions(use_threads=False, block_size=min(max(source.size, 1), block))
                    found = read_csv(Unsplit(file, source.size), how, form, kinds)
                    break
                except pyarrow.ArrowInvalid:
                    if block == _MOST or source.size <= block:
                        raise
        if source.odd_quotes:  # a quotation mark without its end, or one inside a word
            _check_lines(source, separator)
    except csv.Error as error:
        raise UserError(f"{source.path} can't be read as CSV: {error}.") from None
    except pyarrow.ArrowException as error:
        _check_lines(source, separator)
        raise UserError(f"{source.path} can't be read as CSV: {error}.") from None
    if (width := found.num_columns) != len(header):
        raise UserError(f"{source.path} can't be read as CSV: the header has {len(header)} fields, its rows {width}.")
    columns = found.columns[::-1]
    del found  # what has been turned into texts is let go, column by column
    texts = {name: Texts.of(columns.pop()) for name in header}
    pyarrow.default_memory_pool().release_unused()
    return header, texts


def _decimal_commas(texts: Mapping[str, Texts], decimal: str, separator: str) -> dict[str, Texts]:
    """Return the columns that hold numbers with decimal commas, with points instead.

    Where it is to be found out, they do if one of them is no number otherwise and no column needs a decimal point. If
    all could as well have thousands separators, they do where something else than commas separates the fields.
    """
    if decimal == "." or not any("," in text for own in texts.values() for text in own.different()):
        return {}
    looks = {name: _Look.at(own) for name, own in texts.items()}
    found = {name for name, look in looks.items() if look.some and look.commas}
    signed = {name for name in found if looks[name].signed}
    if decimal == AUTO:
        needed = any(look.some and look.points for name, look in looks.items() if name not in found)
        if needed or not signed or (all(looks[name].points for name in signed) and separator == ","):
            return {}
    return {name: own.changed(_with_point) for name, own in texts.items() if name in found and not looks[name].whole}


class _Look(NamedTuple):
    """What the values of a column look like."""

    some: bool = False  # whether there are any
    commas: bool = True  # all of them numbers with decimal commas
    points: bool = True  # ... with decimal points
    whole: bool = True  # ... without either
    signed: bool = False  # whether there is a comma

    @classmethod
    def at(cls, texts: Texts) -> _Look:
        look = cls()
        for text in filter(None, map(str.strip, texts.different())):
            if not is_nothing(text):
                look = cls(
                    True,
                    look.commas and bool(_COMMA.fullmatch(text)),
                    look.points and bool(_POINT.fullmatch(text)),
                    look.whole and bool(_WHOLE.fullmatch(text)),
                    look.signed or "," in text,
                )
        return look


def _with_point(text: str) -> str:
    return text.translate(_WITH_POINT) if _COMMA.fullmatch(text.strip()) else text


def _line_of(source: Source, separator: str, row: int) -> int:
    return next(line for line, _ in islice(source.lines(separator), row + 1, None))


def _check_lines(source: Source, separator: str) -> None:
    """Refuse the first line of a CSV file that is not like the others."""
    width = 0
    try:
        for line, fields in source.lines(separator, strict=True):
            width = width or len(fields)
            if len(fields) != width:
                said = f"{source.path}, line {line}: {len(fields)} fields; allowed: {width}, as in the header"
                raise UserError(f"{said}.")
    except csv.Error as error:
        raise UserError(f"{source.path} can't be read as CSV: {error}.") from None


def _read_parquet(path: Path, target: str, client: str, order: str, dialect: Dialect) -> Table:
    from pyarrow import ArrowException, types
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            about = file.metadata
            groups = [about.row_group(place).total_byte_size for place in range(about.num_row_groups)]
            needed = _PARQUET_TIMES * max(8 * about.num_rows * about.num_columns, *groups, sum(groups))
            check_memory(path, needed, dialect.max_memory)
            texts = [field.name for field in file.schema_arrow if types.is_string(field.type)]
        # One file as it is: folders named like key=value do not become columns. Texts are held once, however often
        # they stand there.
        with ParquetFile(path, read_dictionary=texts) as file:
            frame = file.read().to_pandas(split_blocks=True, self_destruct=True)
    except UserError:
        raise
    except (OSError, ArrowException, ValueError, TypeError, LookupError, AttributeError, MemoryError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} can't be read as Parquet: {why}.") from None
    return read_frame(frame, target, client, str(path), order)


def read_frame(
    frame: Any, target: str = "y", client: str = "client", source: str = "the data frame", order: str = ""
) -> Table:
    """Read a pandas data frame, or what turns into one (polars, arrow)."""
    if hasattr(frame, "to_pandas"):
        frame = frame.to_pandas()
    if not is_frame(frame):
        raise UserError(f"The data are a {type(frame).__name__}; allowed: a pandas data frame.")
    if len(frame) == 0:
        raise UserError(f"{source} has no rows; allowed: at least one.")
    names = [str(name) for name in frame.columns]
    columns = {
        name: frame_column(source, name, frame.iloc[:, position], text=name == client)
        for position, name in enumerate(names)
    }
    return _checked(Piece(source, len(frame)), names, columns, target, client, order)


def is_frame(values: Any) -> bool:
    """Whether these are named columns, and not an array."""
    return hasattr(values, "to_pandas") or (hasattr(values, "iloc") and hasattr(values, "columns"))


def frame_column(source: str, name: str, series: Any, *, text: bool = False) -> Column:
    """Read one column of a data frame, a pandas series; ``text``: numbers are names, however large."""
    import pandas

    missing = series.isna().to_numpy(dtype=bool)
    text = text or isinstance(series.dtype, pandas.CategoricalDtype)
    if series.dtype.kind in "biuf" and not text:
        if str(series.dtype).lower() == "uint64":  # the one type that int64 does not hold
            _whole(source, name, series.fillna(0).tolist())
        dtype, blank = {"b": (bool, False), "f": (np.float64, np.nan)}.get(series.dtype.kind, (np.int64, 0))
        return Column(series.to_numpy(dtype=dtype, na_value=blank), missing)
    values = [None if gone else value for value, gone in zip(series.tolist(), missing, strict=True)]
    strange = next((value for value in values if isinstance(value, list | dict | set | bytes | np.ndarray)), None)
    if strange is not None:
        kind = type(strange).__name__
        raise UserError(f"{source}, column {name!r} holds a {kind}; allowed: numbers, true or false, text.")
    # In a column of Python objects the values say what they are.
    gone = np.array([value is None or is_nothing(value) for value in values], dtype=bool)
    kinds = {type(value) for value, nothing in zip(values, gone, strict=True) if not nothing}
    numbers: list[Any] = [0 if nothing else value for value, nothing in zip(values, gone, strict=True)]
    if kinds and not text and all(issubclass(kind, bool) for kind in kinds):
        return Column(np.array(numbers, dtype=bool), gone)
    if kinds and not text and not any(issubclass(kind, bool) for kind in kinds):
        if all(issubclass(kind, int) for kind in kinds):
            return Column(_whole(source, name, numbers), gone)
        if all(issubclass(kind, int | float | Decimal) for kind in kinds):
            floats = np.zeros(len(values))
            for row, value in enumerate(numbers):
                try:
                    floats[row] = value
                except OverflowError:
                    raise UserError(f"{source}, row {row}, column {name!r}: {value} does not fit in a float.") from None
            return Column(floats, gone)
    return Column(np.array(["" if value is None else _written(value) for value in values], dtype=object), missing)


def _whole(source: str, name: str, values: list[int]) -> NDArray[np.int64]:
    for row, value in enumerate(values):
        if not -(2**63) <= value < 2**63:
            said = f"{source}, row {row}, column {name!r}: {value} does not fit in 64 bits with a sign"
            raise UserError(f"{said}; allowed: smaller whole numbers, floats, or text.")
    return np.array(values, dtype=np.int64)


def _checked(piece: Piece, header: list[str], columns: dict[str, Column], *named: str) -> Table:
    if (twice := next((name for name, count in Counter(header).items() if count > 1), None)) is not None:
        raise UserError(f"{piece.source} has the column {twice!r} more than once; names must differ.")
    target, client, order = named
    if not (table := Table(columns, target, client, (piece,), order=order)).features:
        raise UserError(f"{piece.source} has the columns {', '.join(header)}; at least one feature is needed besides.")
    return table


_TEXTS = (".csv", ".tsv", ".txt")
READERS = {
    **dict.fromkeys(_TEXTS, _read_csv),
    ".parquet": _read_parquet,
    ".npz": _read_npz,
    **dict.fromkeys([text + packed for text in _TEXTS for packed in PACKED], _read_csv),
}
ENDINGS = f"{', '.join(_TEXTS)} (packed: {', '.join(PACKED)}), .parquet, .npz"  # in words
