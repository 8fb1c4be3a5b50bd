"""Flower's database once runs are over: what it deleted is still in the file, until it is cleaned."""

import os
import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path

from fedem.core.errors import UserError

_CONTENT = ("message_ins", "message_res", "objects", "object_children", "run_objects")  # what runs send to and fro
_TABLES = {"node", "run", *_CONTENT}  # that Flower's SuperLink keeps, among others
_COMPANIONS = ("-wal", "-shm", "-journal")  # files that SQLite keeps beside its own


def make_private(path: Path) -> None:
    """Make a database's file, empty, for its owner alone: SQLite gives the files beside it the same mode."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    path.chmod(0o600)


def companions(path: Path) -> list[Path]:
    """Return a database's file and those beside it."""
    return [path, *(path.with_name(path.name + ending) for ending in _COMPANIONS)]


def clean(path: Path) -> tuple[int, int]:
    """Drop what runs sent, and overwrite what was deleted; returns its size before and after, in bytes.

    The SuperLink must not run, so no run goes on: what an interrupted one left is dropped, too. Registered keys, the
    list of runs and their logs stay. The file becomes its owner's alone.
    """
    if not path.is_file():
        raise UserError(f"There is no database {path}.")
    before = _size(path)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=0)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if missing := sorted(_TABLES - tables):
                raise UserError(f"{path} is not the database of a SuperLink: it has no {', '.join(missing)}.")
            # The first drops the log of writes with what it holds, and fails where somebody else has the file open.
            for words in ("journal_mode = DELETE", "locking_mode = EXCLUSIVE", "secure_delete = ON"):
                connection.execute(f"PRAGMA {words}").fetchall()
            for table in _CONTENT:
                connection.execute(f"DELETE FROM {table}")
            connection.commit()
            connection.execute("VACUUM")
    except sqlite3.OperationalError as error:
        raise UserError(f"{path} can't be cleaned ({error}); stop the SuperLink that uses it first.") from None
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} is not the database of a SuperLink ({error}).") from None
    for file in companions(path):
        with suppress(FileNotFoundError):
            file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    return before, _size(path)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in companions(path) if file.exists())
