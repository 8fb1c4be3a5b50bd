"""Files that are there whole or not at all, locks between processes, and values written as TOML."""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.errors import UserError, needed
from fedem.core.files import locked, read_csv, remove_leftovers, toml_literal, write_atomically, write_csv, write_json

_HOLD = """
import pathlib, sys
from fedem.core.files import locked
with locked(pathlib.Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""

values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()


@given(values | st.lists(values))
def test_values_come_back_from_toml(value: Any) -> None:
    assert tomllib.loads(f"key = {toml_literal(value)}")["key"] == value


def test_one_process_at_a_time_has_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "it.lock"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with locked(path) as mine:
            assert not mine
        other.kill()  # the system releases the lock of a process that is killed
        other.wait()
        with locked(path, wait=True) as mine:
            assert mine
            with locked(path) as again:
                assert not again
    with locked(path) as mine:
        assert mine


def test_a_lock_is_released_when_something_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path / "it.lock"):
        raise KeyError
    with locked(tmp_path / "it.lock") as mine:
        assert mine


def test_files_are_replaced_and_leftovers_removed(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    write_json(path, {"a": float("nan"), "b": (1, 2)})
    assert path.read_text() == '{\n  "a": null,\n  "b": [\n    1,\n    2\n  ]\n}\n'
    write_atomically(path, b"secret", private=True)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"secret", 0o600)
    (tmp_path / ".other.tmp").touch()
    remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["it.json"]


def test_what_is_not_installed_is_named() -> None:
    needed("It", "json")
    with pytest.raises(UserError, match=r"It needs the package no_such_thing.*: pip install 'fedem\[huggingface\]'"):
        needed("It", "json", "no_such_thing", extra="huggingface")
    with pytest.raises(UserError, match=r"pip install 'no_such_thing'"):
        needed("It", "no_such_thing")


TEXTS = st.text(max_size=6) | st.text("='+-@\t\r\n\"1.e, a", max_size=6)


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8), TEXTS.filter(lambda text: text not in ("b", "'b")))
def test_texts_come_back_from_files_for_people(rows: list[tuple[str, str]], heading: str) -> None:
    """Also what a spreadsheet would run, which no cell of the file begins with, unless it is a number."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_csv(path, [heading, "b"], [{heading: one, "b": other} for one, other in rows])
        assert read_csv(path) == [{heading: one, "b": other} for one, other in rows]
        with path.open(newline="", encoding="utf-8") as file:
            for cell in (cell for row in csv.reader(file) for cell in row):
                if cell.startswith(("=", "+", "-", "@", "\t", "\r")):
                    float(cell)


@pytest.mark.parametrize("value", [-5, -5.5, float("-inf"), "-5", "+1e-3", "-.5", "shop", "", "'tis", None])
def test_numbers_and_plain_texts_are_written_as_they_are(tmp_path: Path, value: object) -> None:
    write_csv(tmp_path / "t.csv", ["a", "b"], [{"a": value, "b": 1}])
    assert (tmp_path / "t.csv").read_text() == f"a,b\n{'' if value is None else value},1\n"
