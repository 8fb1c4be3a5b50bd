"""Columns of texts that take little memory, and files of text read block by block: the same as Python's own."""

from __future__ import annotations

import csv
import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.errors import UserError
from fedem.data import tables, texts
from fedem.data.files import FromFile, from_frame
from fedem.data.tables import Dialect, Table, read_table
from fedem.data.texts import Texts, scan

LISTS = st.lists(st.text(max_size=5) | st.sampled_from(["a", "b", ""]), max_size=40)
ENCODED = ("utf-8", "utf-8-sig", "utf-16", "cp1252")


def held(values: list[str], chunk: int = 7) -> Texts:
    pieces = [values[start : start + chunk] for start in range(0, len(values), chunk)]
    return Texts.of(pyarrow.chunked_array(pieces, pyarrow.large_string()))


@given(LISTS, LISTS, st.data())
def test_they_are_a_list_of_texts(first: list[str], second: list[str], data: st.DataObject) -> None:
    own, both = held(first), Texts.joined([held(first), held(second)])
    assert (list(own), own.tolist(), len(own)) == (first, first, len(first))
    assert both.tolist() == first + second
    assert sorted(both.different()) == sorted({*first, *second})
    assert both.of_each(len, int).tolist() == [*map(len, first + second)]
    assert both.changed(str.upper).tolist() == [text.upper() for text in first + second]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(both), max_size=len(both))), dtype=bool)
    chosen = both[mask]
    assert chosen.tolist() == [text for text, taken in zip(first + second, mask, strict=True) if taken]
    assert set(chosen.different()) == set(chosen.tolist())
    for row in range(len(first)):
        assert own[row] == first[row]


def test_each_different_text_is_looked_at_once() -> None:
    calls: list[str] = []
    held(["a", "b", "a", "a"] * 50).of_each(lambda text: calls.append(text) or 0, int)
    assert sorted(calls) == ["a", "b"]


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_blocks_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, block: int) -> None:
    """Within a letter, a mark, a quotation or a line."""
    rows = [["ä", "y", "client"], *([f'ü "{row}",\r\n€', str(row % 2), f"é{row % 3}"] for row in range(30))]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    (tmp_path / "t.csv").write_bytes(text.getvalue().encode(encoding))
    monkeypatch.setattr(texts, "BLOCK", block)
    monkeypatch.setattr(tables, "_BLOCK", max(block, 64))
    table = read_table(tmp_path / "t.csv")
    found = [list(table.columns[name].values) for name in rows[0]]
    assert [list(row) for row in zip(*found, strict=True)] == rows[1:]
    assert table.place(29) == f"{tmp_path / 't.csv'}, line {1 + 2 * 30}"


def test_rows_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BLOCK", 64)
    long = "x" * 1000
    (tmp_path / "t.csv").write_text(f"a,y\n1,0\n{long},1\n")
    assert list(read_table(tmp_path / "t.csv").columns["a"].values) == ["1", long]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,y\n1,0\n2\0,1\n", "line 3 has a byte of zeros"),
        ("a,y\n1,0\n".encode("utf-16-le"), "line 1 has a byte of zeros.*UTF-16 without its mark"),
        ("a,y\nä,0\n".encode("utf-16-le"), "line 2 has bytes that are no text .see --encoding."),
        ("a,y\nü,0\nö,1\nä,1\n".encode() + "é,0\n".encode("cp1252"), "line 5 has bytes that are not in UTF-8"),
        (b'a,y\n"1,0\n2,1\n', "unexpected end of data"),
        (b"a,y\n1,0\n2,1,3\n", "line 3: 3 fields; allowed: 2"),
        (b"a,y\n1,0\n2\n", "line 3: 1 fields; allowed: 2"),
        (b"a,y\n", "has 1 lines; allowed: a header and at least one row"),
        (b"y,client\n1,ann\n", "at least one feature is needed"),
        (b"a,,\n1,2,3\n", "has the column '' more than once"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError, match=rf"t\.csv.*{message}"):
        read_table(tmp_path / "t.csv")


def test_more_columns_than_a_field_has_letters(tmp_path: Path) -> None:
    """By the wrong separator the header is one field, longer than Python's reader takes."""
    names = [f"{number}{'x' * 1000}" for number in range(150)]
    (tmp_path / "t.csv").write_text(";".join(names) + "\n" + ";".join("1" * len(names)) + "\n")
    assert tuple(read_table(tmp_path / "t.csv").columns) == tuple(names)


class Name(str):
    """The name of a column that counts how often it is compared with another."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self


@pytest.mark.parametrize("options", [{}, {"impute": "median"}, {"ignore": "c7", "keep": "c9"}])
def test_work_grows_with_the_columns(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Twice as many columns are twice the work, not four times: no list of all is gone through for each."""
    handled = 0
    filled = Table.filled

    def counting(self: Table, fills: Any) -> Table:
        nonlocal handled
        handled += len(self.columns)
        return filled(self, fills)

    monkeypatch.setattr(Table, "filled", counting)
    draw, work = np.random.default_rng(0), []
    for width in (100, 400):
        frame = pandas.DataFrame(draw.normal(size=(24, width)), columns=[Name(f"c{place}") for place in range(width)])
        frame.iloc[3, 5] = np.nan if "impute" in options else 0
        Name.compared = handled = 0
        made = from_frame(frame.assign(y=[0, 1] * 12, client=["a", "b"] * 12), **options)
        assert made.federation.input_shape == (width - ("ignore" in options),)
        work.append((Name.compared + 1, handled + 1))
    for few, many in zip(*work, strict=True):
        assert many < 6 * few


def test_texts_take_little_memory(tmp_path: Path) -> None:
    """Less than a third of what as many objects of Python's would."""
    numbers = np.random.default_rng(0).normal(size=20_000)
    frame = pandas.DataFrame({"a": numbers.round(6), "b": ["red", "green"] * 10_000, "y": [0, 1] * 10_000})
    frame.assign(client="ann").to_csv(tmp_path / "t.csv", index=False)
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    table = read_table(tmp_path / "t.csv")
    ours = tracemalloc.get_traced_memory()[0] + pyarrow.total_allocated_bytes() - before
    tracemalloc.stop()
    objects = sum(8 * len(table) + sum(map(tracemalloc_size, column.values)) for column in table.columns.values())
    assert ours < objects / 3


def tracemalloc_size(text: str) -> int:
    return 49 + len(text)


def test_a_files_text_is_scanned_without_being_held(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,y\n" + b"1,0\n" * (4 << 20))
    tracemalloc.start()
    source = scan(tmp_path / "t.csv", "auto", 0, 1)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert (source.encoding, source.size, source.odd_quotes) == ("utf-8", 4 + (16 << 20), False)


def test_names_of_clients_have_an_end(tmp_path: Path) -> None:
    """One array holds all names, each as wide as the longest."""
    (tmp_path / "t.csv").write_text(f"a,y,client\n1,0,ann\n2,1,{'x' * 5000}\n")
    with pytest.raises(UserError, match=r"line 3, column 'client': 'x+'\.\.\. has 5,000 characters; allowed"):
        FromFile(path=str(tmp_path / "t.csv")).make(0)


def test_the_same_text_in_every_row_of_a_file(tmp_path: Path) -> None:
    dialect = Dialect(separator=",", decimal=".", encoding="utf-8")
    (tmp_path / "t.csv").write_text("a,y\n" + "7,1\n" * 100)
    assert read_table(tmp_path / "t.csv", dialect=dialect).numbers("a").tolist() == [7.0] * 100
