"""A user's own arrays: what stands in the archive comes out, and nothing in it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_files import CLIENTS, HEADER, INPUTS, TARGETS, owners_of, write_csv, write_npz, write_samples_npz

from fedem.core.errors import UserError
from fedem.data.tables import read_table


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return write_samples_npz(tmp_path)


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
            ({"x": INPUTS, "client": CLIENTS[:, None]}, r"one client name per row: got shape \(6, 1\)"),
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
        with pytest.raises(UserError, match=r"samples\.npz is not an npz archive of plain arrays"):
            read_table(write_npz(tmp_path / "samples.npz", **arrays))

    def test_numbers_that_stand_for_no_letter_are_refused(self, tmp_path: Path) -> None:
        names = CLIENTS.copy()
        names.view(np.uint32)[-1] = 0x110000  # numpy takes it, and Python's own texts do not
        with pytest.raises(UserError, match=r"'client' has a letter 0x110000; allowed: up to 0x10ffff"):
            read_table(write_npz(tmp_path / "samples.npz", x=INPUTS, y=TARGETS, client=names))

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
        with pytest.raises(UserError, match=r"samples\.npz is not an npz archive of plain arrays"):
            read_table(npz)

    def test_a_file_that_is_no_archive_is_refused(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "samples.npz", HEADER, "1,2,0,ann")
        with pytest.raises(UserError, match=r"samples\.npz is not an npz archive of plain arrays"):
            read_table(path)


class _Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
