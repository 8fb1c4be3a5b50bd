"""A user's own samples: what stands in the file comes out, or the file, line and column are named."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from numpy.typing import NDArray
from shops import make_shops, write_shops

from fedem.data import FromFile
from fedem.data.partitions import Natural, Uniform
from fedem.data.tables import Table, read_table
from fedem.errors import UserError
from fedem.federation import PARTS, Federation

INPUTS = np.array([[1.5, -2.0], [0.25, 4.0], [3.0, 5.0], [6.0, -7.5], [8.0, 9.0], [0.0, 1.0]])
TARGETS = np.array([0, 1, 2, 1, 0, 2])
CLIENTS = np.array(["ann", "bob", "ann", "ann", "bob", "bob"])
HEADER = "first,second,y,client"


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def write_csv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame(columns).to_parquet(path)
    return path


def owners_of(table: Table) -> list[str]:
    owners = table.owners()
    assert owners is not None
    return owners.tolist()


def samples_of(federation: Federation) -> set[tuple[Any, ...]]:
    """All samples as (client, target, input, ...), whatever part they are in."""
    return {
        (name, target, *row)
        for part in PARTS
        for position, name in enumerate(federation.names)
        for row, target in zip(*(x.tolist() for x in federation.part(part).client(position)), strict=True)
    }


EXPECTED = {
    (client, target, *row)
    for client, target, row in zip(CLIENTS.tolist(), TARGETS.tolist(), INPUTS.tolist(), strict=True)
}


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "samples.npz", x=INPUTS, y=TARGETS, client=CLIENTS)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [f"{a},{b},{y},{client}" for (a, b), y, client in zip(INPUTS, TARGETS, CLIENTS, strict=True)]
    return write_csv(tmp_path / "samples.csv", HEADER, *rows)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    first, second = INPUTS.T
    return write_parquet(tmp_path / "samples.parquet", first=first, second=second, y=TARGETS, client=CLIENTS)


class TestNpz:
    def test_arrays_come_back(self, npz: Path) -> None:
        table = read_table(npz)
        assert table.stacked().tolist() == INPUTS.tolist()
        assert table.columns["y"].values.tolist() == TARGETS.tolist()
        assert owners_of(table) == CLIENTS.tolist()

    @pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float64])
    def test_inputs_keep_their_type(self, tmp_path: Path, dtype: type) -> None:
        path = write_npz(tmp_path / "samples.npz", x=np.ones((3, 2, 2), dtype=dtype))
        assert read_table(path).stacked().dtype == dtype
        assert read_table(path).stacked().shape == (3, 2, 2)

    def test_compressed_archives_are_read(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "samples.npz", x=INPUTS)
        assert read_table(tmp_path / "samples.npz").stacked().tolist() == INPUTS.tolist()

    def test_targets_and_clients_are_optional(self, tmp_path: Path) -> None:
        assert not read_table(write_npz(tmp_path / "samples.npz", x=INPUTS)).columns

    def test_large_whole_numbers_do_not_wrap(self, tmp_path: Path) -> None:
        large = np.array([1, 2**64 - 1], dtype=np.uint64)
        path = write_npz(tmp_path / "a.npz", x=np.ones((2, 2)), client=large)
        assert owners_of(read_table(path)) == ["1", "18446744073709551615"]
        path = write_npz(tmp_path / "b.npz", x=np.ones((2, 2)), y=large)
        with pytest.raises(UserError, match=r"b\.npz, row 1, column 'y': 18446744073709551615 does not fit in 64 bits"):
            read_table(path)

    def test_whole_numbers_may_name_clients(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS, client=np.array([7, 7, 8, 8, 9, 9]))
        assert owners_of(read_table(path)) == ["7", "7", "8", "8", "9", "9"]

    def test_arrays_may_have_other_names(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS, label=TARGETS, hospital=CLIENTS, y=TARGETS + 1)
        table = read_table(path, "label", "hospital")
        assert table.columns["label"].values.tolist() == TARGETS.tolist()
        assert owners_of(table) == CLIENTS.tolist()
        assert "y" not in table.columns

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"y": TARGETS}, r"samples\.npz has no array 'x' \(it has: y\); allowed: x, y and client"),
            ({"x": INPUTS, "y": TARGETS[:4]}, "6 inputs but 4 targets"),
            ({"x": INPUTS, "client": CLIENTS[:5]}, "6 inputs but 5 clients"),
            ({"x": INPUTS, "client": CLIENTS[:, None]}, r"one client name a row: got shape \(6, 1\)"),
            ({"x": INPUTS, "y": np.array(1)}, "'y' is a single value"),
            ({"x": INPUTS, "y": TARGETS * 1j}, "'y' is of type complex128; allowed"),
        ],
    )
    def test_arrays_that_do_not_fit_are_refused(self, tmp_path: Path, arrays: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            read_table(write_npz(tmp_path / "samples.npz", **arrays))

    @pytest.mark.parametrize("name", ["x", "y", "client"])
    def test_pickled_objects_are_refused(self, tmp_path: Path, name: str) -> None:
        arrays = {"x": INPUTS, "y": TARGETS, "client": CLIENTS}
        arrays[name] = arrays[name].astype(object)
        with pytest.raises(UserError, match=r"samples\.npz is no npz archive of plain arrays"):
            read_table(write_npz(tmp_path / "samples.npz", **arrays))

    def test_a_pickle_is_not_run(self, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        malicious = np.empty(1, dtype=object)
        malicious[0] = _Touch(marker)
        path = write_npz(tmp_path / "samples.npz", x=malicious)
        with pytest.raises(UserError):
            read_table(path)
        assert not marker.exists()

    def test_a_damaged_archive_is_refused(self, npz: Path) -> None:
        content = bytearray(npz.read_bytes())
        content[content.index(INPUTS.tobytes())] ^= 0xFF
        npz.write_bytes(bytes(content))
        with pytest.raises(UserError, match=r"samples\.npz is no npz archive of plain arrays"):
            read_table(npz)

    def test_a_file_that_is_no_archive_is_refused(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.npz", HEADER, "1,2,0,ann")
        with pytest.raises(UserError, match=r"samples\.npz is no npz archive of plain arrays"):
            read_table(path)


class _Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


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
        ],
    )
    def test_tables_that_are_none_are_refused(self, tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
        with pytest.raises(UserError, match=message):
            read_table(write_csv(tmp_path / "samples.csv", *lines))

    @pytest.mark.parametrize("content", [b"", b"a,y\n\xff,1\n"])
    def test_files_that_are_no_text_are_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "samples.csv").write_bytes(content)
        with pytest.raises(UserError, match=r"samples\.csv (has 0 lines|can't be read as CSV)"):
            read_table(tmp_path / "samples.csv")

    @pytest.mark.parametrize(
        ("text", "why"),
        [("tall", "is no number"), ("inf", "is not finite"), ("-Infinity", "is not finite"), ("1e39", "is not finite")],
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

    def test_the_extra_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(UserError, match=r"needs the package pyarrow.*fedem\[tables\]"):
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
        assert made.encoding.classes == tuple(sorted(["yes", text]))
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
        with pytest.raises(UserError, match=r"b\.csv, line 3, column 'x': 'red' is no number"):
            read_table(tmp_path).numbers("x")

    def test_what_is_no_table_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"holds no files; allowed: files of one kind, \.csv, \.parquet, \.npz"):
            read_table(tmp_path)
        write_csv(tmp_path / "a.csv", "x,y", "1,2")
        write_csv(tmp_path / "notes.txt", "x", "1")
        with pytest.raises(UserError, match=r"holds '\.csv', '\.txt' files"):
            read_table(tmp_path)
        (tmp_path / "notes.txt").rename(tmp_path / "b.csv")
        with pytest.raises(UserError, match=r"a\.csv has the column 'y' and .*b\.csv has not"):
            read_table(tmp_path)


class TestPath:
    @pytest.mark.parametrize("name", ["samples.txt", "samples", "samples.csv.gz"])
    def test_another_ending_is_refused(self, tmp_path: Path, name: str) -> None:
        path = write_csv(tmp_path / name, "x", "1")
        with pytest.raises(UserError, match=rf"{name} ends in '{path.suffix}'; allowed: \.csv, \.parquet, \.npz"):
            read_table(path)

    @pytest.mark.parametrize("name", ["missing.csv", "missing.npz", "missing.parquet"])
    def test_a_missing_file_is_named(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match=rf"There is no file .*{name}"):
            read_table(tmp_path / name)


class TestFromFile:
    @pytest.mark.parametrize("kind", ["npz", "table", "parquet"])
    def test_every_sample_reaches_its_client(self, kind: str, request: pytest.FixtureRequest) -> None:
        federation, truth = FromFile(path=str(request.getfixturevalue(kind)), standardize=False).make(0)[:2]
        assert truth is None
        assert federation.names == ("ann", "bob")
        assert samples_of(federation) == EXPECTED

    def test_tables_of_any_kind_are_split_alike(self, table: Path, parquet: Path) -> None:
        first, second = (FromFile(path=str(path)).make(3).federation for path in (table, parquet))
        for part in PARTS:
            assert torch.equal(first.part(part).inputs, second.part(part).inputs)
            assert torch.equal(first.part(part).targets, second.part(part).targets)

    @pytest.mark.parametrize("kind", ["csv", "npz"])
    def test_the_order_of_rows_plays_no_part(self, tmp_path: Path, kind: str) -> None:
        rows = make_shops(12)
        found = []
        for name, some in (("forth", rows), ("back", rows[::-1])):
            path = tmp_path / f"{name}.{kind}"
            if kind == "csv":
                write_shops(path, some)
            else:
                x = [[row["price"], row["temperature"]] for row in some]
                write_npz(path, x=x, sold=[row["sold"] for row in some], shop=[row["shop"] for row in some])
            source = FromFile(path=str(path), target_column="sold", client_column="shop", standardize=False)
            found.append(source.make(1).federation)
        for part in PARTS:
            forth, back = (
                {(name, *row) for t, name in enumerate(one.names) for row in one.part(part).client(t).inputs.tolist()}
                for one in found
            )
            assert forth == back

    def test_the_encoding_is_part_of_the_fingerprint(self, table: Path) -> None:
        found = [FromFile(path=str(table), standardize=standardize).make(0) for standardize in (True, False)]
        assert found[0].federation.fingerprint != found[1].federation.fingerprint
        assert found[0].partition_hash == found[1].partition_hash
        assert found[0].label_names == ("0", "1", "2")

    def test_it_says_what_it_was_fitted_with(self, tmp_path: Path) -> None:
        path = write_shops(tmp_path / "shops.csv", make_shops(6))
        data = FromFile(path=str(path), target_column="sold", client_column="shop")
        made = data.make(3, unseen=0.25)
        assert (made.seed, made.unseen) == (3, 0.25)
        assert (data.make(3).seed, data.make(3).unseen) == (3, 0.0)

    def test_the_seed_decides_the_split(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=np.arange(40.0)[:, None], y=np.arange(40), client=["ann"] * 40)
        first, again, other = (FromFile(path=str(path)).make(seed).federation.test.targets for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_shares_take_effect(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=np.ones((10, 1)), y=np.arange(10), client=["ann"] * 10)
        federation = FromFile(path=str(path), validation=0.1, test=0.4).make(0).federation
        assert [len(federation.part(part)) for part in PARTS] == [5, 1, 4]

    def test_columns_take_effect(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", "x,label,hospital", "1,0,ann", "2,1,bob")
        source = FromFile(path=str(path), target_column="label", client_column="hospital", standardize=False)
        assert samples_of(source.make(0).federation) == {("ann", 0, 1.0), ("bob", 1, 2.0)}

    def test_a_partition_may_deal_the_rows_anew(self, table: Path) -> None:
        made = FromFile(path=str(table), standardize=False).make(0, Uniform(num_clients=3))
        assert made.federation.names == ("0", "1", "2")
        assert {row[1:] for row in samples_of(made.federation)} == {row[1:] for row in EXPECTED}
        assert made.partition_hash

    def test_a_table_without_clients_needs_such_a_partition(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", "a,y", "1,0", "2,1", "3,0")
        assert FromFile(path=str(path)).make(0, Uniform(num_clients=2)).federation.num_clients == 2
        for partition in (None, Natural()):
            with pytest.raises(UserError, match=r"samples\.csv has no column 'client'"):
                FromFile(path=str(path)).make(0, partition)

    @pytest.mark.parametrize("dtype", [np.uint8, np.float32])
    def test_arrays_stay_as_they_are(self, tmp_path: Path, dtype: type) -> None:
        images = np.arange(48).reshape(6, 2, 4).astype(dtype)
        path = write_npz(tmp_path / "samples.npz", x=images, y=TARGETS, client=CLIENTS)
        made = FromFile(path=str(path)).make(0).federation
        assert made.train.pool.inputs.numpy().dtype == dtype
        assert np.array_equal(made.train.pool.inputs.numpy(), images)

    def test_a_collection_holds_numbers_that_are_not_scaled(self, table: Path) -> None:
        collection = FromFile(path=str(table)).collect()
        assert collection.pool.inputs.tolist() == INPUTS.tolist()
        assert [collection.owner_names[code] for code in collection.owners] == CLIENTS.tolist()

    @pytest.mark.parametrize(("header", "missing"), [("a,b,client", "y"), ("a,b,y", "client"), ("a,b,target", "y")])
    def test_a_missing_column_is_named_in_csv(self, tmp_path: Path, header: str, missing: str) -> None:
        path = write_csv(tmp_path / "samples.csv", header, "1,2,0")
        with pytest.raises(UserError, match=rf"samples\.csv has no column '{missing}'"):
            FromFile(path=str(path)).make(0)

    @pytest.mark.parametrize(("present", "missing"), [("client", "y"), ("y", "client")])
    def test_a_missing_array_is_named_in_npz(self, tmp_path: Path, present: str, missing: str) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS, **{present: TARGETS})
        with pytest.raises(UserError, match=rf"samples\.npz has no column '{missing}'"):
            FromFile(path=str(path)).make(0)

    def test_npz_inputs_that_are_not_finite_name_their_client(self, tmp_path: Path) -> None:
        inputs = INPUTS.copy()
        inputs[4] = np.nan
        path = write_npz(tmp_path / "samples.npz", x=inputs, y=TARGETS, client=CLIENTS)
        with pytest.raises(UserError, match="Client 'bob' has NaN or infinite inputs, first in row 4"):
            FromFile(path=str(path)).make(0)

    def test_npz_targets_that_are_not_finite_are_named(self, tmp_path: Path) -> None:
        for value, message in ((np.nan, r"1 in column 'y' \(first: .*, row 4\)"), (np.inf, "row 4, column 'y': inf")):
            targets = TARGETS.astype(float)
            targets[4] = value
            path = write_npz(tmp_path / "samples.npz", x=INPUTS, y=targets, client=CLIENTS)
            with pytest.raises(UserError, match=message):
                FromFile(path=str(path)).make(0)

    def test_an_archive_without_rows_is_refused(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS[:0], y=TARGETS[:0], client=CLIENTS[:0])
        with pytest.raises(UserError, match="at least one client; got none"):
            FromFile(path=str(path)).make(0)

    def test_shares_that_leave_nothing_are_refused(self, npz: Path) -> None:
        with pytest.raises(UserError, match=r"are 0\.6 and 0\.5; allowed"):
            FromFile(path=str(npz), validation=0.6, test=0.5).make(0)

    @pytest.mark.parametrize("key", ["validation", "test"])
    @pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), "half"])
    def test_a_share_out_of_range_is_refused(self, key: str, value: Any) -> None:
        with pytest.raises(UserError, match=rf"FromFile\.{key} is {value!r}; allowed"):
            FromFile(path="samples.csv", **{key: value})

    @pytest.mark.parametrize("name", ["third", "y"])
    def test_columns_to_ignore_must_be_there(self, table: Path, name: str) -> None:
        with pytest.raises(UserError, match=rf"data\.ignore names '{name}'; allowed: first, second"):
            FromFile(path=str(table), ignore=f"first,{name}").make(0)

    def test_a_path_is_needed(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"data\.path is empty"):
            FromFile().make(0)
        with pytest.raises(UserError, match=r"There is no file .*missing\.csv"):
            FromFile(path=str(tmp_path / "missing.csv")).make(0)
