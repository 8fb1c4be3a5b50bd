"""Files that ask for more memory than they should get: refused before they get it."""

from __future__ import annotations

import gzip
import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from sample_files import write_samples_csv, write_samples_npz, write_samples_parquet

from fedem.core.errors import UserError
from fedem.data import images, limits
from fedem.data.store import plain_images
from fedem.data.tables import Dialect, read_table

Run = Callable[..., tuple[int, str, str]]


def bomb(path: Path, shape: tuple[int, ...], zeros: int) -> Path:
    """Write an archive whose array says that it has ``shape``, and which holds so many bytes of zeros."""
    header = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        file.write(header.getvalue())
        block = bytes(1 << 20)
        for _ in range(zeros >> 20):
            file.write(block)
    return path


def refused(path: Path, message: str, dialect: Dialect | None = None) -> None:
    """Refuse to read, and take no memory to speak of."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message):
            read_table(path, dialect=dialect or Dialect())
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


class TestArchives:
    def test_a_small_file_that_unpacks_to_a_large_array(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = bomb(tmp_path / "t.npz", (20 << 17,), 20 << 20)
        assert len(read_table(path)) == 20 << 17  # it is too little to ask
        monkeypatch.setattr(limits, "_HARMLESS", 1 << 20)
        refused(
            path, r"t\.npz has .* asks for at least 20\.0 MiB once it is unpacked; allowed: 200 times .*--max-memory"
        )

    def test_it_is_read_once_the_user_says_how_much_it_may_take(self, tmp_path: Path) -> None:
        path = bomb(tmp_path / "t.npz", (4 << 17,), 4 << 20)
        assert len(read_table(path)) == 4 << 17  # of a few MiB nobody asks
        assert len(read_table(path, dialect=Dialect(max_memory=0.1))) == 4 << 17
        refused(
            path, r"needs about 4\.0 MiB of memory; allowed: 2\.0 MiB, data\.max_memory", Dialect(max_memory=2 / 1024)
        )

    def test_the_memory_that_is_free_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = bomb(tmp_path / "t.npz", (4 << 17,), 4 << 20)
        monkeypatch.setattr(limits, "free_host_bytes", lambda: 4 << 20)
        refused(path, r"needs about 4\.0 MiB of memory; allowed: 2\.0 MiB, half of what is free")

    @pytest.mark.parametrize("shape", [(10**12, 8), (10**30,), (-1, 4), (1 << 62, 4), (1 << 19, 2)])
    def test_headers_that_lie(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        refused(
            bomb(tmp_path / "t.npz", shape, 1 << 20), r"t\.npz is not an npz archive of plain arrays: 'x' says that"
        )

    def test_directories_that_lie(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "t.npz", x=np.zeros((4, 2)))
        content = bytearray((tmp_path / "t.npz").read_bytes())
        entry = content.index(b"PK\x01\x02")
        content[entry + 24 : entry + 28] = struct.pack("<I", 1 << 31)  # how large the member says that it is unpacked
        (tmp_path / "t.npz").write_bytes(content)
        refused(tmp_path / "t.npz", "'x' says that it is float64 of shape")

    def test_public_data_sets_in_archives(self, tmp_path: Path) -> None:
        path = bomb(tmp_path / "t.npz", (10**9, 28, 28), 1 << 20)
        with pytest.raises(UserError, match="'x' says that it is float64"):
            next(plain_images(path, (1, 28, 28), owned=False))


class TestTexts:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        with gzip.open(tmp_path / "t.csv.gz", "wb", compresslevel=1) as file:
            file.write(b"x,y,client\n")
            file.write(b"0,1,a\n" * (1 << 21))
        return tmp_path / "t.csv.gz"

    def test_a_small_file_that_unpacks_to_a_large_text(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "_HARMLESS", 1 << 20)
        refused(path, r"t\.csv\.gz has .* asks for at least .* allowed: 200 times its size")

    def test_what_is_free_is_checked_while_it_is_unpacked(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "free_host_bytes", lambda: 64 << 20)
        refused(path, r"t\.csv\.gz needs about .* allowed: 32\.0 MiB, half of what is free")

    @pytest.mark.parametrize("write", [write_samples_csv, write_samples_npz, write_samples_parquet])
    def test_every_reader_asks(self, tmp_path: Path, write: Callable[[Path], Path]) -> None:
        refused(
            write(tmp_path), r"samples\.\w+ needs about .*; allowed: 10 bytes, data", Dialect(max_memory=10 / (1 << 30))
        )


def test_a_column_of_parquet_that_says_the_same_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A billion equal values take a few bytes in such a file."""
    rows = 1 << 20
    columns = {"x": pyarrow.array(np.zeros(rows)), "y": pyarrow.array(np.zeros(rows, dtype=np.int64))}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 100_000
    monkeypatch.setattr(limits, "free_host_bytes", lambda: 64 << 20)
    refused(tmp_path / "t.parquet", r"t\.parquet needs about 64\.0 MiB of memory; allowed: 32\.0 MiB")


class TestImages:
    def test_entries_of_any_size(self) -> None:
        file = io.BytesIO(struct.pack(">HBBIII", 0, 8, 3, 1, 1 << 31, 1 << 31))
        with pytest.raises(ValueError, match="says that its entries have shape"):
            next(images.idx_blocks(file))

    def test_pictures_of_any_size(self) -> None:
        from PIL import Image

        file = io.BytesIO()
        Image.new("1", (4000, 4000)).save(file, "png")
        with pytest.raises(ValueError, match="16,000,000 pixels; allowed"):
            images._image(file.getvalue())


def test_the_limit_is_an_option_wherever_files_are_read(run: Run, tmp_path: Path) -> None:
    path = write_samples_csv(tmp_path)
    code, _, err = run("data", "describe", path, "--max-memory", "1e-9")
    assert code == 2
    assert "--max-memory" in err
    assert run("data", "describe", path, "--max-memory", "1")[0] == 0
