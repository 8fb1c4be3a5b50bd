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

from fedem.data import FromFile
from fedem.data.files import read_table
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


class TestNpz:
    def test_arrays_come_back(self, npz: Path) -> None:
        inputs, targets, clients = read_table(npz)[:3]
        assert inputs.tolist() == INPUTS.tolist()
        assert targets is not None
        assert targets.tolist() == TARGETS.tolist()
        assert clients is not None
        assert clients.tolist() == CLIENTS.tolist()

    @pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float64])
    def test_inputs_keep_their_type(self, tmp_path: Path, dtype: type) -> None:
        path = write_npz(tmp_path / "samples.npz", x=np.ones((3, 2, 2), dtype=dtype))
        assert read_table(path).inputs.dtype == dtype
        assert read_table(path).inputs.shape == (3, 2, 2)

    @pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
    def test_targets_keep_their_type(self, tmp_path: Path, dtype: type) -> None:
        targets = read_table(write_npz(tmp_path / "samples.npz", x=INPUTS, y=TARGETS.astype(dtype))).targets
        assert targets is not None
        assert targets.dtype == dtype

    def test_compressed_archives_are_read(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "samples.npz", x=INPUTS)
        assert read_table(tmp_path / "samples.npz").inputs.tolist() == INPUTS.tolist()

    def test_targets_and_clients_are_optional(self, tmp_path: Path) -> None:
        _, targets, clients = read_table(write_npz(tmp_path / "samples.npz", x=INPUTS))[:3]
        assert (targets, clients) == (None, None)

    def test_whole_numbers_may_name_clients(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS, client=np.array([7, 7, 8, 8, 9, 9]))
        clients = read_table(path).clients
        assert clients is not None
        assert clients.tolist() == ["7", "7", "8", "8", "9", "9"]

    def test_arrays_may_have_other_names(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS, label=TARGETS, hospital=CLIENTS, y=TARGETS + 1)
        _, targets, clients = read_table(path, "label", "hospital")[:3]
        assert targets is not None
        assert targets.tolist() == TARGETS.tolist()
        assert clients is not None
        assert clients.tolist() == CLIENTS.tolist()

    def test_an_archive_without_inputs_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            UserError, match=r"samples\.npz has no array 'x' \(it has: y\); allowed: x, label and hospital"
        ):
            read_table(write_npz(tmp_path / "samples.npz", y=TARGETS), "label", "hospital")

    def test_unequal_targets_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="6 inputs but 4 targets"):
            read_table(write_npz(tmp_path / "samples.npz", x=INPUTS, y=TARGETS[:4]))

    def test_unequal_clients_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="6 inputs but 5 clients"):
            read_table(write_npz(tmp_path / "samples.npz", x=INPUTS, client=CLIENTS[:5]))

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
        inputs, targets, clients = read_table(table)[:3]
        assert inputs.tolist() == INPUTS.tolist()
        assert targets is not None
        assert targets.tolist() == TARGETS.tolist()
        assert clients is not None
        assert clients.tolist() == CLIENTS.tolist()

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
        assert np.array_equal(read_table(write_csv(tmp_path / "samples.csv", header, *lines)).inputs, inputs)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\n"), min_size=1), min_size=1))
    def test_client_names_come_back(self, tmp_path: Path, names: list[str]) -> None:
        path = tmp_path / "samples.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["x", "client"], *([1, name] for name in names)])
        clients = read_table(path).clients
        assert clients is not None
        assert clients.tolist() == names

    def test_columns_may_stand_in_any_order(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", "client,second,y,first", "ann,2,1,1", "bob,4,0,3")
        inputs, targets, clients = read_table(path)[:3]
        assert inputs.tolist() == [[2, 1], [4, 3]]
        assert targets is not None
        assert targets.tolist() == [1, 0]
        assert clients is not None
        assert clients.tolist() == ["ann", "bob"]

    def test_columns_may_have_other_names(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", "y,label,hospital", "5,1,ann", "6,0,bob")
        inputs, targets, clients = read_table(path, "label", "hospital")[:3]
        assert inputs.tolist() == [[5], [6]]
        assert targets is not None
        assert targets.tolist() == [1, 0]
        assert clients is not None
        assert clients.tolist() == ["ann", "bob"]

    def test_targets_and_clients_are_optional(self, tmp_path: Path) -> None:
        _, targets, clients = read_table(write_csv(tmp_path / "samples.csv", "x", "1"))[:3]
        assert (targets, clients) == (None, None)

    def test_windows_line_endings_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "samples.csv").write_bytes(b"x,y\r\n1,0\r\n2,1\r\n")
        assert read_table(tmp_path / "samples.csv").inputs.tolist() == [[1], [2]]

    def test_numbers_may_have_exponents_and_signs(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.csv", "x", "-1e-3", "+2.5E2")
        assert read_table(path).inputs.tolist() == [[pytest.approx(-0.001)], [250.0]]

    def test_whole_targets_are_classes(self, tmp_path: Path) -> None:
        targets = read_table(write_csv(tmp_path / "samples.csv", "x,y", "1,0", "2,3")).targets
        assert targets is not None
        assert (targets.dtype, targets.tolist()) == (np.int64, [0, 3])

    def test_other_targets_are_numbers(self, tmp_path: Path) -> None:
        targets = read_table(write_csv(tmp_path / "samples.csv", "x,y", "1,0", "2,0.5")).targets
        assert targets is not None
        assert (targets.dtype.kind, targets.tolist()) == ("f", [0.0, 0.5])

    @pytest.mark.parametrize(("row", "count"), [("3,4,0", 3), ("3,4,0,ann,5", 5)])
    def test_a_ragged_line_is_named(self, tmp_path: Path, row: str, count: int) -> None:
        path = write_csv(tmp_path / "samples.csv", HEADER, "1,2,0,ann", row, "5,6,1,bob")
        with pytest.raises(UserError, match=rf"samples\.csv, line 3: {count} fields; allowed: 4"):
            read_table(path)

    @pytest.mark.parametrize(
        ("row", "column", "text"),
        [("3,tall,0,ann", "second", "tall"), ("3,,0,ann", "second", ""), ("3,4,cat,ann", "y", "cat")],
    )
    def test_text_in_a_column_of_numbers_is_named(self, tmp_path: Path, row: str, column: str, text: str) -> None:
        path = write_csv(tmp_path / "samples.csv", HEADER, "1,2,0,ann", "1,2,0,ann", row)
        with pytest.raises(UserError, match=rf"samples\.csv, line 4, column '{column}': '{text}' is no number"):
            read_table(path)

    @pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-Infinity", "1e999"])
    @pytest.mark.parametrize("column", ["second", "y"])
    def test_numbers_that_are_not_finite_are_named(self, tmp_path: Path, text: str, column: str) -> None:
        bad = {"second": f"3,{text},0,ann", "y": f"3,4,{text},ann"}[column]
        path = write_csv(tmp_path / "samples.csv", HEADER, "1,2,0,ann", bad)
        with pytest.raises(UserError, match=rf"samples\.csv, line 3, column '{column}': '{text}' is not finite"):
            read_table(path)

    def test_an_empty_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "samples.csv").touch()
        with pytest.raises(UserError, match=r"samples\.csv has 0 lines; allowed: a header and at least one row"):
            read_table(tmp_path / "samples.csv")

    def test_a_header_alone_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="has 1 lines; allowed: a header and at least one row"):
            read_table(write_csv(tmp_path / "samples.csv", HEADER))

    def test_a_file_without_features_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="has the columns y, client; at least one feature"):
            read_table(write_csv(tmp_path / "samples.csv", "y,client", "1,ann"))


class TestPath:
    @pytest.mark.parametrize("name", ["samples.txt", "samples.parquet", "samples", "samples.csv.gz"])
    def test_another_ending_is_refused(self, tmp_path: Path, name: str) -> None:
        path = write_csv(tmp_path / name, "x", "1")
        with pytest.raises(UserError, match=rf"{name} ends in '{path.suffix}'; allowed: \.npz, \.csv"):
            read_table(path)

    @pytest.mark.parametrize("name", ["missing.csv", "missing.npz"])
    def test_a_missing_file_is_named(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match=rf"There is no file .*{name}"):
            read_table(tmp_path / name)

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "folder.csv").mkdir()
        with pytest.raises(UserError, match=r"There is no file .*folder\.csv"):
            read_table(tmp_path / "folder.csv")


class TestFromFile:
    @pytest.mark.parametrize("kind", ["npz", "table"])
    def test_every_sample_reaches_its_client(self, kind: str, request: pytest.FixtureRequest) -> None:
        federation, truth = FromFile(path=str(request.getfixturevalue(kind))).make(0)[:2]
        assert truth is None
        assert federation.names == ("ann", "bob")
        assert samples_of(federation) == EXPECTED

    def test_both_formats_give_the_same_split(self, npz: Path, table: Path) -> None:
        first, second = (FromFile(path=str(path)).make(3).federation for path in (npz, table))
        for part in PARTS:
            assert torch.equal(first.part(part).inputs.float(), second.part(part).inputs.float())
            assert torch.equal(first.part(part).targets, second.part(part).targets)

    def test_the_split_is_that_of_from_arrays(self, npz: Path) -> None:
        made = FromFile(path=str(npz), validation=0.3, test=0.4).make(5).federation
        expected = Federation.from_arrays(INPUTS, TARGETS, CLIENTS, validation=0.3, test=0.4, seed=5)
        for part in PARTS:
            assert torch.equal(made.part(part).inputs, expected.part(part).inputs)
            assert torch.equal(made.part(part).offsets, expected.part(part).offsets)

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
        federation = FromFile(path=str(path), target_column="label", client_column="hospital").make(0).federation
        assert samples_of(federation) == {("ann", 0, 1.0), ("bob", 1, 2.0)}

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

    @pytest.mark.parametrize("name", ["x", "y"])
    def test_npz_numbers_that_are_not_finite_name_their_client(self, tmp_path: Path, name: str) -> None:
        arrays: dict[str, Any] = {"x": INPUTS.copy(), "y": TARGETS.astype(float), "client": CLIENTS}
        arrays[name][4] = np.nan
        what = {"x": "inputs", "y": "targets"}[name]
        with pytest.raises(UserError, match=f"Client 'bob' has NaN or infinite {what}"):
            FromFile(path=str(write_npz(tmp_path / "samples.npz", **arrays))).make(0)

    def test_an_archive_without_rows_is_refused(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS[:0], y=TARGETS[:0], client=CLIENTS[:0])
        with pytest.raises(UserError, match="at least one client; got none"):
            FromFile(path=str(path)).make(0)

    def test_a_matrix_of_clients_is_refused(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "samples.npz", x=INPUTS, y=TARGETS, client=CLIENTS[:, None])
        with pytest.raises(UserError, match=r"one client name a row: got shape \(6, 1\)"):
            FromFile(path=str(path)).make(0)

    def test_shares_that_leave_nothing_are_refused(self, npz: Path) -> None:
        with pytest.raises(UserError, match=r"are 0\.6 and 0\.5; allowed"):
            FromFile(path=str(npz), validation=0.6, test=0.5).make(0)

    @pytest.mark.parametrize("key", ["validation", "test"])
    @pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), "half"])
    def test_a_share_out_of_range_is_refused(self, key: str, value: Any) -> None:
        with pytest.raises(UserError, match=rf"FromFile\.{key} is {value!r}; allowed"):
            FromFile(path="samples.csv", **{key: value})

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"There is no file .*missing\.csv"):
            FromFile(path=str(tmp_path / "missing.csv")).make(0)
