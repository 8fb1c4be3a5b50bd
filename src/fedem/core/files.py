"""Files that are there whole or not at all, their hashes, locks between processes, and values written as TOML."""

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import IO, Any

from fedem.core.errors import UserError

LOCK = ".lock"  # in a folder that one process at a time may write to
_PIECE = 1 << 22  # bytes that one thread hashes at a time
_THREADS = 8
_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # how a text begins that a spreadsheet runs; apostrophes may stand before
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Write a file whole or not at all, even if the machine crashes; a ``private`` one is never readable by others."""
    temporary = path.with_name(f".{path.name}.tmp")
    if private:
        temporary.unlink(missing_ok=True)  # one that a killed process left keeps the mode that it has
    with open(temporary, "w+b", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The move itself must reach the disk before anything that relies on it is done.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write the ``content`` of a file likewise."""
    with replacing(path, private=private) as file:
        file.write(content)


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary files of processes that were killed while they wrote."""
    return sorted(folder.glob(".*.tmp"))


def remove_leftovers(folder: Path) -> None:
    """Remove these files."""
    for path in leftovers(folder):
        path.unlink()


def digest(content: bytes) -> str:
    """Return the hash of a file's content, 64 hexadecimal digits: BLAKE2b over the BLAKE2b of pieces of 4 MiB.

    Pieces are hashed by several threads, so that it takes little beside reading the file.
    """
    view = memoryview(content)
    return _digest(len(content), lambda start: view[start : start + _PIECE])


def file_digest(file: IO[bytes]) -> str:
    """Return the :func:`digest` of an open file's content, which is never in memory as a whole."""
    number = file.fileno()
    return _digest(os.fstat(number).st_size, lambda start: os.pread(number, _PIECE, start))


def _digest(size: int, piece: Callable[[int], bytes | memoryview]) -> str:
    def hashed(start: int) -> bytes:
        return blake2b(piece(start), digest_size=32).digest()

    starts = range(0, size, _PIECE)
    if len(starts) < 2:
        digests = list(map(hashed, starts))
    else:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, _THREADS)) as threads:
            digests = list(threads.map(hashed, starts))
    return blake2b(b"".join(digests), digest_size=32).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinities become null."""
    write_atomically(path, to_json(plain(content)))


def to_json(content: Any) -> bytes:
    """Return :func:`plain` content as a file of JSON has it."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write CSV atomically; a row may lack some of the ``columns``."""
    names = list(columns)
    write_atomically(path, csv_bytes(names, ([row.get(name, "") for name in names] for row in rows)))


def csv_bytes(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> bytes:
    """Return the content of a CSV file for people: text that a spreadsheet would run is marked (:func:`marked`)."""
    lines = _Lines()
    writer = csv.writer(lines, lineterminator=_Lines.end)
    for row in chain([header], rows):
        writer.writerow([marked(cell) for cell in row])
    return "".join(lines).encode()


class _Lines(list[str]):
    """What a CSV writer writes to, a line at a time.

    One that ends lines by both signs puts a text with either in quotation marks, as not every Python does otherwise.
    """

    end = "\r\n"

    def write(self, line: str) -> None:
        self.append(line.removesuffix(self.end) + "\n")


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read a file that :func:`write_csv` wrote, with each text as it was."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, strict=True)
        reader.fieldnames = [*map(unmarked, reader.fieldnames or ())]
        # What a damaged row lacks, or has besides, is no text.
        return [{key: unmarked(cell) if isinstance(cell, str) else cell for key, cell in row.items()} for row in reader]


def marked(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would take for a formula; numbers stay.

    >>> marked("=1+1"), marked("'=x"), marked("-5"), marked("shop A"), marked(-5.0)
    ("'=1+1", "''=x", '-5', 'shop A', -5.0)
    """
    risky = isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return f"'{value}" if risky else value


def unmarked(text: str) -> str:
    """Return a text as it was before it was :func:`marked`."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def plain(content: Any) -> Any:
    """Replace NaN and infinities, which JSON does not know, by null."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: plain(value) for key, value in content.items()}
    return [plain(value) for value in content] if isinstance(content, list | tuple) else content


@contextmanager
def locked(path: Path, *, wait: bool = False, refusal: str = "") -> Iterator[bool]:
    """Hold the lock ``path`` of one process; where another has it: ``wait``, raise the ``refusal``, or yield False."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=-1 if wait else 0)  # released too where the process is killed
    with suppress(Timeout):
        lock.acquire()
    if refusal and not lock.is_locked:
        raise UserError(refusal)
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextmanager
def holding(folder: Path, refusal: str) -> Iterator[None]:
    """Hold a folder, which is made if it is not there, by a lock in it; raise the ``refusal`` where another does.

    A folder in which nothing was written is removed, with those above that were made for it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / LOCK, refusal=refusal))
        except OSError as error:
            raise UserError(f"The folder {folder} can't be written: {error.strerror}.") from None
        try:
            yield
        finally:
            if folder in made and is_empty(folder):
                with suppress(OSError):
                    (folder / LOCK).unlink()
                    for path in made:
                        path.rmdir()


def is_empty(folder: Path) -> bool:
    """Whether there is no such folder, or nothing in it but a lock."""
    return not folder.exists() or (folder.is_dir() and all(path.name == LOCK for path in folder.iterdir()))


def toml_literal(value: Any) -> str:
    """Write a value as TOML.

    >>> print(toml_literal(True), toml_literal(1e-3), toml_literal([1, "b"]))
    true 0.001 [1, "b"]
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_literal, value))}]"
    # A JSON string is a TOML basic string, but for the characters that TOML wants escaped and JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
