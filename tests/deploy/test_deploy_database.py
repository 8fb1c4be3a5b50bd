"""What Flower has deleted from its database is gone from the file, too, once that is cleaned."""

from __future__ import annotations

import sqlite3
import stat
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories

from fedem.core.errors import UserError
from fedem.deploy.flower.database import clean, companions, make_private

UPLOAD = b"an upload by client north" * 4000
CUT_SHORT = b"an upload of a run that was interrupted" * 4000
KEY = b"-----BEGIN PUBLIC KEY----- of north"


def found(path: Path, content: bytes) -> bool:
    return any(content in file.read_bytes() for file in companions(path) if file.exists())


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database as a SuperLink leaves it: Flower's own, with an upload that was deleted, and one that was not."""
    path = tmp_path / "superlink.db"
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what Flower makes tables with
        objects, states = get_objectstore_linkstate_factories(str(path), get_federation_manager())
        state: Any = states.state()
        store: Any = objects.store()
    state.create_node("aid", "name", KEY, 30.0)
    for opened in (state, store):  # Flower has no way to close them
        opened._engine.dispose()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA secure_delete = OFF")  # SQLite's default, unless it was built otherwise
        columns = connection.execute("PRAGMA table_info(objects)").fetchall()
        assert {name for _, name, *_ in columns} >= {"object_id", "content"}
        for number, content in enumerate((UPLOAD, CUT_SHORT)):
            values = dict.fromkeys((name for _, name, *_ in columns), 0) | {
                "object_id": str(number),
                "content": content,
            }
            marks = ", ".join("?" for _ in values)
            connection.execute(f"INSERT INTO objects ({', '.join(values)}) VALUES ({marks})", list(values.values()))
        connection.commit()
        connection.execute("DELETE FROM objects WHERE object_id = '0'")
        connection.commit()
    return path


def test_nothing_deleted_is_left_and_what_is_registered_stays(database: Path, run) -> None:
    assert found(database, UPLOAD[:200]), "this is what cleaning is for"
    assert found(database, CUT_SHORT[:200])
    database.chmod(0o644)
    code, out, err = run("deploy", "clean", database)
    assert code == 0, err
    assert "bytes before" in out
    assert not found(database, UPLOAD[:25])
    assert not found(database, CUT_SHORT[:25])
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT public_key FROM node").fetchall() == [(KEY,)]
    before, after = clean(database)
    assert before == after == database.stat().st_size


def test_a_database_in_use_is_left_alone(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        # As Flower opens it; nothing is being read or written at the moment.
        assert connection.execute("PRAGMA journal_mode = WAL").fetchall() == [("wal",)]
        assert connection.execute("SELECT count(*) FROM node").fetchall() == [(1,)]
        content = database.read_bytes()
        with pytest.raises(UserError, match=r"can't be cleaned .*locked.*; stop the SuperLink"):
            clean(database)
        assert database.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough to be one" * 9])
def test_other_files_are_refused_and_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    path.chmod(0o644)
    with pytest.raises(UserError, match="is not the database of a SuperLink"):
        clean(path)
    assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_another_s_database_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE run (id INTEGER)")
    with pytest.raises(UserError, match="it has no message_ins, message_res, node, object_children"):
        clean(tmp_path / "other.db")
    with pytest.raises(UserError, match="There is no database"):
        clean(tmp_path / "none.db")


def test_a_new_database_is_private_with_all_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "superlink.db"
    make_private(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE run (id INTEGER)")
        files = [file for file in companions(path) if file.exists()]
        assert len(files) > 1
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
