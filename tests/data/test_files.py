"""A user's own tables: what stands in the file comes out, or the file, line and column are named."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from numpy.typing import NDArray
from sample_files import (
    CLIENTS,
    HEADER,
    INPUTS,
    TARGETS,
    owners_of,
    write_csv,
    write_npz,
    write_parquet,
    write_samples_csv,
    write_samples_parquet,
)

from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.data.tables import read_table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_samples_csv(tmp_path)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return write_samples_parquet(tmp_path)


class TestCsv:
    def test_columns_come_back(self, table: Path) -> None:
        read = read_table(table)
        assert read.stacked().tolist() == INPUTS.tolist()
        assert read.numbers("y").tolist() == TARGETS.tolist()
        assert owners_of(read) == CLIENTS.tolist()

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        numpy_strategies.arrays(
            np.float32,
            numpy_strategies.array_shapes(min_dims=2, max_dims=2, max_side=5),
            elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
        )
    )
    def test_single_precision_numbers_come_back_exactly(self, tmp_path: Path, inputs: NDArray[np.float32]) -> None:
        header = ",".join(f"x{column}" for column in range(inputs.shape[1]))
        lines = [",".join(repr(float(number)) for number in row) for row in inputs]
        assert np.array_equal(read_table(write_csv(tmp_path / "samples.csv", header, *lines)).stacked(), inputs)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\n"), min_size=1), min_size=1))
    def test_client_names_come_back(self, tmp_path: Path, names: list[str]) -> None:
        path = tmp_path / "samples.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["x", "client"], *([1, name] for name in names)])
        assert owners_of(read_table(path)) == names

    def test_columns_may_stand_in_any_order(self, tmp_path: Path) -> None:
        table = read_table(write_csv(tmp_path / "samples.csv", "client,second,y,first", "ann,2,1,1", "bob,4,0,3"))
        assert table.features == ("second", "first")
        assert table.stacked().tolist() == [[2, 1], [4, 3]]

    def test_files_as_spreadsheets_write_them(self, tmp_path: Path) -> None:
        (tmp_path / "t.CSV").write_bytes("\ufeffclient,a,y\r\nu,1.5,0\r\n\r\nv,2,1\r\n".encode())
        table = read_table(tmp_path / "t.CSV")
        assert owners_of(table) == ["u", "v"]
        assert table.stacked().tolist() == [[1.5], [2.0]]

    def test_numbers_may_have_exponents_and_signs(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", "x", "-1e-3", "+2.5E2")
        assert read_table(path).stacked().tolist() == [[pytest.approx(-0.001)], [250.0]]

    @pytest.mark.parametrize(
        ("texts", "kind"),
        [
            (("1", "+2", " 3"), "whole"),
            (("1.0", "2.0"), "number"),
            (("1", "2.5"), "number"),
            (("1_0", "2"), "text"),
            (("true", "False"), "boolean"),
            (("true", "1"), "text"),
            (("2024-01-05", "2024-01-06"), "text"),
        ],
    )
    def test_the_content_says_what_a_column_is(self, tmp_path: Path, texts: tuple[str, ...], kind: str) -> None:
        assert read_table(write_csv(tmp_path / "t.csv", "x", *texts)).columns["x"].kind == kind

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ((HEADER, "1,2,0,ann", "3,4,0", "5,6,1,bob"), r"samples\.csv, line 3: 3 fields; allowed: 4"),
            ((HEADER, "1,2,0,ann", "3,4,0,ann,5"), r"samples\.csv, line 3: 5 fields; allowed: 4"),
            ((HEADER,), "has 1 lines; allowed: a header and at least one row"),
            (("y,client", "1,ann"), "has the columns y, client; at least one feature"),
            (("a,a,y", "1,2,0"), "the column 'a' more than once"),
            (("a,y", '"1,2'), "can't be read as CSV"),
            (("a,y", '1,"2', "3,4", "5,6"), "can't be read as CSV"),
        ],
    )
    def test_tables_that_are_none_are_refused(self, tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
        with pytest.raises(UserError, match=message):
            read_table(write_csv(tmp_path / "samples.csv", *lines))

    @pytest.mark.parametrize("content", [b"", b"a,y\n\xff\0,1\n", "a,y\nü,1\né,0\n".encode() + b"\xff,1\n"])
    def test_files_that_are_no_text_are_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "samples.csv").write_bytes(content)
        with pytest.raises(UserError, match=r"samples\.csv can't be read as CSV: (Empty CSV file|line [24])"):
            read_table(tmp_path / "samples.csv")

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("tall", "is not a number"),
            ("inf", "is not finite"),
            ("-Infinity", "is not finite"),
            ("1e39", "is not finite"),
        ],
    )
    def test_what_is_no_number_is_named(self, tmp_path: Path, text: str, why: str) -> None:
        # A field of two lines: lines are counted, not rows.
        path = write_csv(tmp_path / "samples.csv", "first,second", '"1\n",2', f"1,{text}", "3,4")
        with pytest.raises(UserError, match=rf"samples\.csv, line 4, column 'second': '{text}' {why}"):
            read_table(path).numbers("second")


class TestParquet:
    def test_columns_come_back(self, parquet: Path) -> None:
        table = read_table(parquet)
        assert table.stacked().tolist() == INPUTS.tolist()
        assert owners_of(table) == CLIENTS.tolist()

    def test_types_say_what_a_column_is(self, tmp_path: Path) -> None:
        days = np.array(["2024-01-05", "2024-01-06"], dtype="datetime64[ns]")
        columns = {"whole": [1, 2], "number": [1.0, 2.0], "boolean": [True, False], "text": ["1", "2"], "date": days}
        table = read_table(write_parquet(tmp_path / "t.parquet", **columns))
        kinds = {name: column.kind for name, column in table.columns.items()}
        assert kinds == {name: name for name in columns} | {"date": "text"}

    def test_lists_are_refused(self, tmp_path: Path) -> None:
        path = write_parquet(tmp_path / "t.parquet", a=[[1, 2], [3]])
        with pytest.raises(UserError, match=r"column 'a' holds a (list|ndarray); allowed"):
            read_table(path)

    def test_a_file_that_is_none_is_refused(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        with pytest.raises(UserError, match=r"t\.parquet can't be read as Parquet"):
            read_table(write_csv(tmp_path / "t.parquet", "a", "1"))


class TestMissing:
    @pytest.mark.parametrize(
        "text", ["", " ", "nan", "NaN", "null", "NULL", "NA", "N/A", "n/a", "None", "?", "-", " NA "]
    )
    def test_columns_lines_and_counts_are_named(self, tmp_path: Path, text: str) -> None:
        lines = [HEADER, "1,2,0,ann", f"1,{text},1,ann", f"{text},{text},0,bob", "1,2,1,bob"]
        path = write_csv(tmp_path / "samples.csv", *lines)
        with pytest.raises(UserError) as caught:
            FromFile(path=str(path)).make(0)
        message = str(caught.value)
        assert f"1 in column 'first' (first: {path}, line 4)" in message
        assert f"2 in column 'second' (first: {path}, line 3)" in message

    @pytest.mark.parametrize("text", ["nan", "NULL", "NA", "n/a", "None", "?", "-"])
    def test_words_for_nothing_are_categories_among_text(self, tmp_path: Path, text: str) -> None:
        path = write_csv(tmp_path / "samples.csv", HEADER, "1,a,yes,ann", f"1,{text},{text},ann", f"1,7,yes,{text}")
        made = FromFile(path=str(path), validation=0, test=0).make(0)
        assert made.encoding is not None
        assert made.encoding.target.classes == tuple(sorted(["yes", text]))
        assert made.feature_names == ("first", *sorted([f"second={word}" for word in ("7", "a", text)]))
        assert text in made.federation.names

    @pytest.mark.parametrize(("others", "kind"), [("true", "boolean"), ("3", "whole"), ("low", "text")])
    def test_a_folder_decides_together(self, tmp_path: Path, others: str, kind: str) -> None:
        write_csv(tmp_path / "ann.csv", "a,y", "NA,0", "NA,1")
        write_csv(tmp_path / "bob.csv", "a,y", f"{others},0", f"{others},1")
        column = read_table(tmp_path).columns["a"]
        assert column.kind == kind
        assert column.missing.tolist() == [kind != "text"] * 2 + [False] * 2

    def test_rows_of_typed_files_count_from_nought(self, tmp_path: Path) -> None:
        path = write_parquet(tmp_path / "t.parquet", a=[1.0, None], b=["u", None], y=[0, 1], client=["u", "v"])
        with pytest.raises(UserError, match=r"1 in column 'a' \(first: .*t\.parquet, row 1\), 1 in column 'b'"):
            FromFile(path=str(path)).make(0)

    def test_a_row_without_a_client_is_named(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", HEADER, "1,2,0,ann", "1,2,1,")
        with pytest.raises(UserError, match=r"1 in column 'client' \(first: .*samples\.csv, line 3\)"):
            FromFile(path=str(path)).make(0)

    def test_all_features_may_not_be_left_out(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", HEADER, "1,2,0,ann", "2,3,1,ann")
        with pytest.raises(UserError, match=r"data\.ignore is 'first, second', which are all features"):
            FromFile(path=str(path), ignore="first, second").make(0)

    def test_columns_that_are_left_out_may_have_holes(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", HEADER, "1,,0,ann", "2,x,1,ann")
        assert FromFile(path=str(path), ignore="second").make(0).feature_names == ("first",)


class TestFolder:
    def test_each_file_is_a_client_when_no_column_says_otherwise(self, tmp_path: Path) -> None:
        for name, rows in {"bob": ["3,1"], "ann": ["1,0", "2,1"]}.items():
            write_csv(tmp_path / f"{name}.csv", "x,y", *rows)
        table = read_table(tmp_path)
        assert owners_of(table) == ["ann", "ann", "bob"]
        assert table.stacked().tolist() == [[1], [2], [3]]
        assert FromFile(path=str(tmp_path)).make(0).federation.names == ("ann", "bob")

    def test_a_column_of_clients_wins(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "may.csv", "x,client", "1,ann", "2,bob")
        write_csv(tmp_path / "june.csv", "client,x", "ann,3")
        table = read_table(tmp_path)
        assert owners_of(table) == ["ann", "ann", "bob"]
        assert table.stacked().tolist() == [[3], [1], [2]]

    @pytest.mark.parametrize("ending", ["npz", "parquet"])
    def test_other_kinds_are_read_as_well(self, tmp_path: Path, ending: str) -> None:
        for name, number in (("ann", 1.0), ("bob", 2.0)):
            path = tmp_path / f"{name}.{ending}"
            write_npz(path, x=[[number]], y=[0]) if ending == "npz" else write_parquet(path, x=[number], y=[0])
        assert owners_of(read_table(tmp_path)) == ["ann", "bob"]
        assert read_table(tmp_path).stacked().tolist() == [[1], [2]]

    def test_a_kind_is_decided_by_all_files(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "a.csv", "x", "01")
        write_csv(tmp_path / "b.csv", "x", "red")
        column = read_table(tmp_path).columns["x"]
        assert (column.kind, column.texts("text")) == ("text", ["01", "red"])

    def test_a_place_names_its_own_file(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "a.csv", "x", "1", "2")
        write_csv(tmp_path / "b.csv", "x", "3", "red")
        with pytest.raises(UserError, match=r"b\.csv, line 3, column 'x': 'red' is not a number"):
            read_table(tmp_path).numbers("x")

    def test_what_is_no_table_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            UserError, match=r"holds no files; allowed: files of one kind, \.csv, \.tsv, \.txt .*\.parquet, \.npz"
        ):
            read_table(tmp_path)
        write_csv(tmp_path / "a.csv", "x,y", "1,2")
        write_csv(tmp_path / "notes.txt", "x", "1")
        with pytest.raises(UserError, match=r"holds '\.csv', '\.txt' files"):
            read_table(tmp_path)
        (tmp_path / "notes.txt").rename(tmp_path / "b.csv")
        with pytest.raises(UserError, match=r"a\.csv has the column 'y' and .*b\.csv has not"):
            read_table(tmp_path)


class TestPath:
    @pytest.mark.parametrize("name", ["samples.xls", "samples", "samples.gz", "samples.npz.gz"])
    def test_another_ending_is_refused(self, tmp_path: Path, name: str) -> None:
        path = write_csv(tmp_path / name, "x", "1")
        ending = name.removeprefix("samples")
        with pytest.raises(UserError, match=rf"{name} ends in '{ending}'; allowed: \.csv, \.tsv, \.txt \(packed: \.gz"):
            read_table(path)

    @pytest.mark.parametrize("name", ["missing.csv", "missing.npz", "missing.parquet"])
    def test_a_missing_file_is_named(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match=rf"There is no file .*{name}"):
            read_table(tmp_path / name)
