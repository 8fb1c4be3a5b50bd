"""Files that are there whole or not at all, locks between processes, and values written as TOML."""

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedem.core.errors import UserError


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file whole or not at all, even if the machine crashes; a ``private`` one is never readable by others."""
    temporary = path.with_name(f".{path.name}.tmp")
    if private:
        temporary.unlink(missing_ok=True)  # one that a killed process left keeps the mode that it has
    with open(temporary, "wb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The move itself must reach the disk before anything that relies on it is done.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of a process that was killed while it wrote."""
    for path in folder.glob(".*.tmp"):
        path.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinities become null."""
    write_atomically(path, (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode())


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write CSV atomically; a row may lack some of the ``columns``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


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
