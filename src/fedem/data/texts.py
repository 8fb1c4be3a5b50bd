"""The text of CSV files: unpacked and turned into UTF-8 block by block, and columns of texts that take little memory.

Shapes: n rows.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedem.core.errors import UserError
from fedem.data.limits import check_memory

AUTO = "auto"
SEPARATORS = {",": ",", ";": ";", "tab": "\t", "|": "|"}  # between the fields of a CSV file, by their names
PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BLOCK = 1 << 20  # bytes that are looked at together
_TEXTS = 1 << 14  # texts that are Python's at the same time
_LOOKED_AT = 20  # lines that say which separator a file has
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
_NOT_IN_CP1252 = bytes((0x81, 0x8D, 0x8F, 0x90, 0x9D))


class Texts:
    """``[n]`` texts of a column. Each different one is held once, by arrow: its letters and eight bytes.

    A text of Python's own takes 50 bytes more.
    """

    dtype: ClassVar[np.dtype[Any]] = np.dtype(object)  # what an array of them would have
    ndim: ClassVar[int] = 1

    def __init__(self, letters: Any, codes: NDArray[np.integer]) -> None:
        """Take the different texts, an array of arrow's, each of some row, and which of them each row has, ``[n]``."""
        self._letters, self._codes = letters, codes

    @classmethod
    def of(cls, column: Any) -> Texts:
        """Take a chunked array of arrow's."""
        import pyarrow

        pieces = column.dictionary_encode().unify_dictionaries().chunks
        letters = pieces[0].dictionary if pieces else pyarrow.array([], pyarrow.large_string())
        smallest = np.min_scalar_type(len(letters))
        codes = [piece.indices.to_numpy().astype(smallest) for piece in pieces]
        return cls(letters, np.concatenate([np.zeros(0, smallest), *codes]))

    @classmethod
    def joined(cls, columns: Sequence[Texts]) -> Texts:
        """Lay columns under each other."""
        import pyarrow

        arrays = (pyarrow.DictionaryArray.from_arrays(own._codes.astype(np.int32), own._letters) for own in columns)
        return cls.of(pyarrow.chunked_array(list(arrays)))

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, rows: int) -> str: ...
    @overload
    def __getitem__(self, rows: NDArray[Any]) -> Texts: ...
    def __getitem__(self, rows: int | NDArray[Any]) -> str | Texts:
        if isinstance(rows, np.ndarray):
            if rows.dtype == bool and rows.all():
                return self
            used, places = np.unique(self._codes[rows], return_inverse=True)
            return Texts(self._letters.take(used), places)
        return str(self._letters[int(self._codes[rows])].as_py())

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _TEXTS):
            yield from self._letters.take(self._codes[start : start + _TEXTS]).to_pylist()

    def tolist(self) -> list[str]:
        return self.of_each(str, object).tolist()  # where texts are the same, the object is

    def different(self) -> Iterator[str]:
        """Go through the different texts."""
        for start in range(0, len(self._letters), _TEXTS):
            yield from self._letters.slice(start, _TEXTS).to_pylist()

    def of_each(self, function: Callable[[str], Any], dtype: DTypeLike) -> NDArray[Any]:
        """Return what ``function`` makes of each text, ``[n]``; it is called once for each different one."""
        return np.fromiter(map(function, self.different()), dtype, len(self._letters))[self._codes]

    def changed(self, function: Callable[[str], str]) -> Texts:
        """Return the texts that ``function`` makes of these."""
        import pyarrow

        return Texts(pyarrow.array(map(function, self.different()), pyarrow.large_string()), self._codes)


def different(values: Texts | NDArray[Any]) -> Iterable[Any]:
    """Go through values, each at least once."""
    return values.different() if isinstance(values, Texts) else values


def of_each(values: Texts | NDArray[Any], function: Callable[[Any], Any], dtype: DTypeLike) -> NDArray[Any]:
    """Return what ``function`` makes of each of the values, ``[n]``."""
    if isinstance(values, Texts):
        return values.of_each(function, dtype)
    return np.fromiter(map(function, values), dtype, len(values))


class Source(NamedTuple):
    """A file of text, packed or not; what is read of it is in UTF-8."""

    path: Path
    encoding: str  # that it was written in
    odd_quotes: bool = False  # whether a quotation mark has no other
    size: int = 0  # bytes of the text

    def open(self) -> IO[bytes]:
        file = _unpacked(self.path)
        if self.encoding == "utf-8":
            return file
        # The buffer reads until it is full, and the text is recoded bit by bit.
        return io.BufferedReader(_Recoded(file, self.encoding), BLOCK)

    def lines(self, separator: str, *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
        """Go through the rows of a CSV file, the header among them: the line where each ends, and its fields."""
        # utf-8-sig: spreadsheets put a mark before the first column's name.
        with self.open() as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, strict=strict, delimiter=separator)
            yield from ((reader.line_num, fields) for fields in reader if fields)

    def separator(self) -> str:
        """Find out what separates the fields: a comma where it can, else what gives the first lines most fields."""
        counts = {separator: self._widths(separator) for separator in SEPARATORS.values()}
        even = {separator: own[0] for separator, own in counts.items() if own[0] > 1 and len(set(own)) == 1}
        if "," in even:
            return ","
        return max(even, key=even.__getitem__) if even else max(counts, key=lambda separator: counts[separator][0])

    def _widths(self, separator: str) -> list[int]:
        """Return how many fields the first lines have."""
        try:
            return [len(fields) for _, fields in islice(self.lines(separator), _LOOKED_AT)] or [0]
        except csv.Error:  # a field beyond all bounds, as a line is without its own separator
            return [0]


class Unsplit(io.RawIOBase):
    """A file of ``size`` bytes whose blocks end behind no carriage return, lest arrow drop a line feed that follows.

    Arrow takes the two for one end of a line wherever they meet between blocks, also within quotation marks.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size = file, size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        if size < 0 or size >= self._size:
            return self._file.read(size)
        block = self._file.read(size - min(64, size // 8))
        while block.endswith(b"\r") and len(block) < size and (further := self._file.read(1)):
            block += further
        return block


class _Recoded(io.RawIOBase):
    """A file of text in another encoding, in UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._text, self._left = io.TextIOWrapper(file, encoding, newline=""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or self._text.read(1 << 16).encode()
        part, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._text.close()
        super().close()


def _unpacked(path: Path) -> IO[bytes]:
    file: IO[bytes] = PACKED.get(path.suffix.lower(), open)(path, "rb")
    return file


def _blocks(path: Path) -> Iterator[bytes]:
    with _unpacked(path) as file:
        while block := file.read(BLOCK):
            yield block


def scan(path: Path, encoding: str, max_memory: float, times: int) -> Source:
    """Go through a file once, block by block: refuse what is no text, or too much of it, and find out its encoding.

    A text of ``size`` bytes takes about ``times`` as many in memory once it is a table.
    """
    try:
        return _scan(path, encoding, max_memory, times)
    except _DAMAGED as error:
        raise UserError(f"{path} can't be read as CSV: {error}.") from None


def _scan(path: Path, encoding: str, max_memory: float, times: int) -> Source:
    with _unpacked(path) as file:
        begin = file.read(2)
    # Two bytes before the text say that it is UTF-16, which spreadsheets call Unicode.
    likely = "utf-16" if begin in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    chosen = likely if encoding == AUTO else encoding
    decoder, size, lines, quotes = codecs.getincrementaldecoder(chosen)(), 0, 0, 0
    for block in chain(_blocks(path), [b""]):
        size += len(block)
        check_memory(path, times * size, max_memory, size)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeError as error:
            lines += block[: getattr(error, "start", 0)].count(b"\n")
            if encoding == AUTO and likely == "utf-8":
                return _scan(path, _other_encoding(path, lines + 1), max_memory, times)
            raise UserError(f"{path}, line {lines + 1}: the bytes are no text in {chosen} (data.encoding).") from None
        if "\0" in text:
            lines += text[: text.index("\0")].count("\n")
            said = f"{path} can't be read as CSV: line {lines + 1} has a byte of zeros, which no text has"
            raise UserError(f"{said} (see --encoding; UTF-16 without its mark has many).")
        lines += text.count("\n")
        quotes += text.count('"')
    return Source(path, chosen, bool(quotes % 2), size)


def _other_encoding(path: Path, line: int) -> str:
    """Return the encoding of a file that is not in UTF-8 from ``line`` on; refuse bytes that are damaged, or no text.

    Most letters that are not ASCII are wrong in UTF-8 if the text was never in it.
    """
    decoder, wrong, foreign, rare = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0, 0, False
    for block in chain(_blocks(path), [b""]):
        text = decoder.decode(block, final=not block)
        if b"\0" in block:
            raise UserError(f"{path} can't be read as CSV: line {line} has bytes that are no text (see --encoding).")
        wrong += text.count("\ufffd")
        foreign += sum(not sign.isascii() for sign in text)
        rare = rare or any(sign in block for sign in _NOT_IN_CP1252)
    if foreign > 2 * wrong:
        why = "not in UTF-8, as the rest of the file is"
        raise UserError(f"{path} can't be read as CSV: line {line} has bytes that are {why} (see --encoding).")
    return "latin-1" if rare else "cp1252"
