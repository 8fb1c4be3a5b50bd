"""Files, folders and data frames -> tables.

- CSV with a header; Parquet: a column of targets, a column of client names, every other column a feature.
- npz: arrays ``x`` (inputs), ``y`` (targets, optional where only predictions are wanted), ``client`` (optional).
- A folder of files of one of these kinds: without a column of client names each file is a client, named by its stem.
- A pandas data frame, or what turns into one.

Missing values are refused by column and line once it is known which columns are used. In CSV these are empty fields
and, where all other fields of a column are numbers (or true and false), NA, N/A, NaN, None, null, ? and -, in capitals
or not; in a column of text they are categories.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedem.data.tables.columns import Column, Piece, Table, is_nothing, joined, written
from fedem.errors import UserError

# What numpy and zipfile raise for an archive that is damaged.
_DAMAGED = (
    *(OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error),
    RuntimeError,  # zipfile's, for a password or a compression that it does not know
)

_WHOLE = np.iinfo(np.int64)


def read_table(path: Path, target: str = "y", client: str = "client") -> Table:
    """Read a file of samples, whose ending says how, or a folder of such files."""
    if path.is_dir():
        return _read_folder(path, target, client)
    if path.suffix.lower() not in READERS:
        raise UserError(f"{path} ends in {path.suffix!r}; allowed: {', '.join(READERS)}, or a folder of such files.")
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    return READERS[path.suffix.lower()](path, target, client)


def _read_folder(folder: Path, target: str, client: str) -> Table:
    # Names that start so are bookkeeping of whatever wrote the folder.
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_")))
    endings = sorted({path.suffix.lower() for path in paths})
    if len(endings) != 1 or endings[0] not in READERS:
        raise UserError(
            f"The folder {folder} holds {', '.join(map(repr, endings)) or 'no'} files; "
            f"allowed: files of one kind, {', '.join(READERS)}."
        )
    tables = [read_table(path, target, client) for path in paths]
    if not any(client in table.columns for table in tables):
        stems = np.repeat(np.array([path.stem for path in paths], dtype=object), [len(table) for table in tables])
        whole = joined(tables)
        owner = Column(stems, np.zeros(len(stems), dtype=bool))
        return Table({**whole.columns, client: owner}, target, client, whole.pieces, whole.array)
    return joined(tables)


def _read_npz(path: Path, target: str, client: str) -> Table:
    names = ("x", target, client)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = {name: np.asarray(archive[name]) for name in names if name in archive}
            present = ", ".join(archive.files)
    except _DAMAGED as error:
        raise UserError(
            f"{path} is no npz archive of plain arrays, or it is damaged ({type(error).__name__})."
        ) from None
    if "x" not in found:
        raise UserError(f"{path} has no array 'x' (it has: {present}); allowed: x, {target} and {client}.")
    for name, array in found.items():
        if array.ndim == 0:
            raise UserError(f"{path}: the array {name!r} is a single value; allowed: one entry a sample.")
    inputs = found.pop("x")
    for name, what in ((target, "targets"), (client, "clients")):
        if name in found and len(found[name]) != len(inputs):
            raise UserError(f"{path} has {len(inputs)} inputs but {len(found[name])} {what}; allowed: as many of each.")
    if client in found and found[client].ndim > 1:
        raise UserError(f"{path}: there must be one client name a row: got shape {found[client].shape}.")
    columns = {name: _array_column(path, name, array, text=name == client) for name, array in found.items()}
    return Table(columns, target, client, (Piece(str(path), len(inputs)),), inputs)


def _array_column(path: Path, name: str, array: NDArray[Any], *, text: bool) -> Column:
    if array.dtype.kind not in "biufUS":
        raise UserError(f"{path}: the array {name!r} is of type {array.dtype}; allowed: numbers, booleans or text.")
    if array.dtype.kind in "US":
        texts = array.astype(str).astype(object)
        return Column(texts, np.array([text == "" for text in texts], dtype=bool))
    if array.dtype == np.uint64:
        if text:
            return Column(array.astype(str).astype(object), np.zeros(len(array), dtype=bool))
        array = _whole(str(path), name, array.reshape(-1).tolist()).reshape(array.shape)
    blank = array != array  # NaN alone differs from itself
    return Column(array, blank.any(tuple(range(1, array.ndim))))


def _read_csv(path: Path, target: str, client: str) -> Table:
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
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise UserError(f"{path}, line {line}: {len(row)} fields; allowed: {len(header)}, as in the header.")
    columns = {}
    for name, texts in zip(header, zip(*(row for _, row in rows[1:]), strict=True), strict=True):
        # A client may well be called Null, or a blank.
        empty = [(text if name == client else text.strip()) == "" for text in texts]
        columns[name] = Column(np.array(texts, dtype=object), np.array(empty), written=name != client)
    return _checked(str(path), header, columns, target, client, [line for line, _ in rows[1:]])


def _read_parquet(path: Path, target: str, client: str) -> Table:
    needed(path, "pyarrow", "pandas")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        # One file as it is: folders named like key=value do not become columns.
        frame = ParquetFile(path).read().to_pandas()
    except (OSError, ArrowException) as error:
        raise UserError(f"{path} can't be read as Parquet: {error}.") from None
    return read_frame(frame, target, client, str(path))


def read_frame(frame: Any, target: str = "y", client: str = "client", source: str = "the data frame") -> Table:
    """Read a pandas data frame, or what turns into one (polars, arrow)."""
    if hasattr(frame, "to_pandas"):
        frame = frame.to_pandas()
    if not is_frame(frame):
        raise UserError(f"The data are a {type(frame).__name__}; allowed: a pandas data frame.")
    names = [str(name) for name in frame.columns]
    series = (frame.iloc[:, position] for position in range(len(names)))
    columns = {
        name: frame_column(source, name, entry, text=name == client) for name, entry in zip(names, series, strict=True)
    }
    if len(frame) == 0:
        raise UserError(f"{source} has no rows; allowed: at least one.")
    return _checked(source, names, columns, target, client, None)


def is_frame(values: Any) -> bool:
    """Whether these are named columns, and not an array."""
    return hasattr(values, "to_pandas") or (hasattr(values, "iloc") and hasattr(values, "columns"))


def frame_column(source: str, name: str, series: Any, *, text: bool = False) -> Column:
    """Read one column of a data frame, a pandas series; ``text``: numbers are names, however large."""
    import pandas

    types, missing = pandas.api.types, series.isna().to_numpy(dtype=bool)
    text = text or isinstance(series.dtype, pandas.CategoricalDtype)
    for holds, dtype, blank in (
        (types.is_bool_dtype, bool, False),
        (types.is_integer_dtype, np.int64, 0),
        (types.is_float_dtype, np.float64, np.nan),
    ):
        if holds(series.dtype) and not text:
            if str(series.dtype).lower() == "uint64":  # the one type that int64 does not hold
                _whole(source, name, series.fillna(0).tolist())
            return Column(series.to_numpy(dtype=dtype, na_value=blank), missing)
    values = [None if gone else value for value, gone in zip(series.tolist(), missing, strict=True)]
    present = [value for value in values if value is not None]
    strange = next((value for value in present if isinstance(value, list | dict | set | bytes | np.ndarray)), None)
    if strange is not None:
        raise UserError(
            f"{source}, column {name!r} holds a {type(strange).__name__}; allowed: numbers, true or false, text."
        )
    # In a column of Python objects the values say what they are.
    told = [value for value in present if not is_nothing(value)]
    for kinds in ((bool,), (int,), (int, float, Decimal)):
        if told and not text and all(_is(value, kinds) for value in told):
            gone = np.array([value is None or is_nothing(value) for value in values])
            numbers = [0 if none else value for none, value in zip(gone, values, strict=True)]
            return Column(_numbers(source, name, numbers, kinds), gone)
    return Column(np.array(["" if value is None else written(value) for value in values], dtype=object), missing)


def _numbers(source: str, name: str, values: list[Any], kinds: tuple[type, ...]) -> NDArray[Any]:
    """Turn Python's numbers, of any size, into an array ``[n]``."""
    if kinds == (int,):
        return _whole(source, name, values)
    if kinds == (bool,):
        return np.array(values, dtype=bool)
    numbers = np.zeros(len(values))
    for row, value in enumerate(values):
        try:
            numbers[row] = value
        except OverflowError:
            raise UserError(f"{source}, row {row}, column {name!r}: {value} does not fit in a float.") from None
    return numbers


def _whole(source: str, name: str, values: list[int]) -> NDArray[np.int64]:
    """Return whole numbers as int64, ``[n]``; refuse those that it does not hold."""
    for row, value in enumerate(values):
        if not _WHOLE.min <= value <= _WHOLE.max:
            raise UserError(
                f"{source}, row {row}, column {name!r}: {value} does not fit in 64 bits with a sign; "
                "allowed: smaller whole numbers, floats, or text."
            )
    return np.array(values, dtype=np.int64)


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _checked(
    source: str, header: list[str], columns: dict[str, Column], target: str, client: str, lines: list[int] | None
) -> Table:
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise UserError(f"{source} has the column {twice!r} more than once; names must differ.")
    rows = len(next(iter(columns.values())).missing) if columns else 0
    table = Table(columns, target, client, (Piece(source, rows, lines),))
    if not table.features:
        raise UserError(f"{source} has the columns {', '.join(header)}; at least one feature is needed besides.")
    return table


def needed(what: object, *packages: str, extra: str = "tables") -> None:
    """Refuse what needs packages that are not installed."""
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            raise UserError(
                f"{what} needs the package {package}, which is not installed: pip install 'fedem[{extra}]'."
            ) from None


READERS: dict[str, Callable[[Path, str, str], Table]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".npz": _read_npz,
}
