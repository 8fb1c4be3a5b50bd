"""Files that are damaged, or odd, in thousands of ways: each is read, or refused in words; nothing else comes up.

Files of every kind are made from a seed and then changed by somebody who knows how they are built: headers that lie,
sizes that are wrong, other types, cut ends, flipped bits. ``python tests/data/test_fuzzed_files.py 2000`` tries many.
"""

from __future__ import annotations

import gzip
import io
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from fedem.core.errors import UserError
from fedem.data.files import FromFile

Draw = np.random.Generator
DTYPES = [
    "<f8",
    "<f4",
    "<i8",
    "|u1",
    "<u8",
    "<U5",
    "|S3",
    "|b1",
    "<c16",
    "<M8[s]",
    "<m8[ns]",
    "|O",
    "|V4",
    "<f2",
    ">f8",
    "|V0",
    "<U0",
]
SHAPES = ("(12, 2)", "(12,)", "()", "(0, 2)", "(12, 0)", "(-12, -2)", "(10**15, 4)", "(10**30,)", "(12, 2, 2, 2)", "12")
DESCRS = ("'<f8'", "'|O'", "'<f4'", "'<x9'", "[('a', '<f8')]", "'<U1000000000'", "None", "''", "'<i8'", "0")
CELLS = [
    b"",
    b"\0",
    b'"',
    b'""',
    b"\xff",
    b"\xc3",
    b"1e400",
    b"-inf",
    b"nan",
    b"\r",
    b"\n",
    b",,",
    b"=1+1",
    b"x" * 3000,
]
CELLS += [
    "ü".encode(),
    "ü".encode("cp1252"),
    b"9" * 400,
    b"1_0",
    b"2024-13-45",
    b"2024-05-31",
    b"0x10",
    b"'",
    b"\t",
    b";",
]
COLUMNS: list[Callable[[], Any]] = [
    lambda: pandas.array([1, None] * 6, dtype="Int8"),
    lambda: pandas.date_range("2024-01-01", periods=12, tz="Asia/Tokyo"),
    lambda: pandas.timedelta_range("1h", periods=12),
    lambda: [[1, 2]] * 12,
    lambda: [{"a": 1}] * 12,
    lambda: [b"\xff"] * 12,
    lambda: [None] * 12,
    lambda: pandas.Categorical(["a", "b", None] * 4),
    lambda: np.array([2**64 - 1] * 12, dtype=np.uint64),
    lambda: [1e300, np.inf, -np.inf, np.nan] * 3,
    lambda: ["a\0b", "", " ", "NA"] * 3,
    lambda: [True, None] * 6,
]


def _flipped(content: bytes, draw: Draw) -> bytes:
    """Change some bytes, cut some off, or put some in."""
    changed = bytearray(content)
    for _ in range(int(draw.integers(1, 5))):
        # Headers and footers say most.
        place = int(
            draw.choice([draw.integers(len(changed)), draw.integers(min(80, len(changed))), -1 - draw.integers(80)])
        )
        place = max(-len(changed), min(place, len(changed) - 1))
        match int(draw.integers(4)):
            case 0:
                changed[place] ^= 1 << int(draw.integers(8))
            case 1:
                changed[place] = int(draw.choice([0, 255, draw.integers(256)]))
            case 2:
                changed = changed[:place] or changed
            case _:
                changed[place:place] = draw.bytes(int(draw.integers(1, 9)))
    return bytes(changed)


def _npy(draw: Draw, rows: int) -> bytes:
    """Return an array as numpy writes it, of a type drawn; perhaps with a header that lies."""
    dtype = np.dtype(str(draw.choice(DTYPES)))
    width = int(draw.choice([0, 1, 2]))
    array = draw.integers(0, 3, (rows, width) if draw.random() < 0.5 else rows)
    file = io.BytesIO()
    np.save(file, array.astype(dtype) if dtype.kind not in "VMm" else np.zeros(array.shape, dtype), allow_pickle=True)
    content = file.getvalue()
    if draw.random() < 0.5:
        shape, descr = str(draw.choice(SHAPES)), str(draw.choice(DESCRS))
        shape = shape.replace("10**15", str(10**15)).replace("10**30", str(10**30))
        header = f"{{'descr': {descr}, 'fortran_order': {draw.choice(['True', 'False', '2'])}, 'shape': {shape}, }}\n"
        header = header if draw.random() < 0.9 else header[: int(draw.integers(len(header)))]
        version = bytes(draw.choice([[1, 0], [2, 0], [3, 0], [9, 9]]).tolist())
        length = struct.pack("<H" if version[0] == 1 else "<I", len(header))
        content = b"\x93NUMPY" + version + length + header.encode() + array.tobytes()
    return content


def npz(draw: Draw) -> tuple[str, bytes]:
    rows, file = int(draw.choice([0, 1, 12, 12, 12, 12, 12, 12])), io.BytesIO()
    arrays = {"x": draw.normal(size=(rows, 2)), "y": np.arange(rows) % 2, "client": np.array(["a", "b"] * 6)[:rows]}
    how = int(draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, array in arrays.items():
            plain = io.BytesIO()
            np.save(plain, array)
            member = _npy(draw, rows) if draw.random() < 0.2 else plain.getvalue()
            if draw.random() < 0.97:
                archive.writestr(name if draw.random() < 0.1 else f"{name}.npy", member)
    content = bytearray(file.getvalue())
    if draw.random() < 0.15 and (entry := content.find(b"PK\x01\x02")) >= 0:  # the sizes that the directory has
        content[entry + 20 : entry + 28] = struct.pack("<II", *draw.integers(0, 2**32, 2).tolist())
    return "t.npz", bytes(content)


def table(draw: Draw) -> tuple[str, bytes]:
    separator = str(draw.choice([",", ";", "\t", "|"])).encode()
    rows = [[b"a", b"b", b"y", b"client"]]
    for row in range(int(draw.choice([0, 1, 12, 12, 30, 30]))):
        rows.append([f"{draw.normal():.3f}".encode(), [b"red", b"blue"][row % 2], str(row % 2).encode(), b"ann"])
    for _ in range(int(draw.integers(0, 3))):
        row = rows[int(draw.integers(len(rows)))]
        match int(draw.integers(4)):
            case 0 if row:
                row.pop(int(draw.integers(len(row))))
            case 1:
                row.insert(int(draw.integers(len(row) + 1)), CELLS[int(draw.integers(len(CELLS)))])
            case _ if row:
                row[int(draw.integers(len(row)))] = CELLS[int(draw.integers(len(CELLS)))]
    ending = [b"\n", b"\r\n", b"\r"][int(draw.choice([0, 0, 0, 1, 2]))]
    content = ending.join(map(separator.join, rows)) + ending
    content = draw.choice([b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe"]) + content
    if draw.random() < 0.1:
        content = content.decode("latin-1").encode("utf-16")
    return "t.csv", content


def packed(draw: Draw) -> tuple[str, bytes]:
    return "t.csv.gz", gzip.compress(table(draw)[1], mtime=0)


def parquet(draw: Draw) -> tuple[str, bytes]:
    rows, file = int(draw.choice([0, 1, 12, 12])), io.BytesIO()
    columns: dict[str, Any] = {
        "a": draw.normal(size=12),
        "b": ["red", "blue"] * 6,
        "y": np.arange(12) % 2,
        "client": "ann",
    }
    for name in list(columns):
        if draw.random() < 0.15:
            columns[name] = COLUMNS[int(draw.integers(len(COLUMNS)))]()
        elif draw.random() < 0.05:
            del columns[name]
    frame = pandas.DataFrame(columns).head(rows)
    compression = str(draw.choice(["none", "snappy", "gzip"]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pandas(frame), file, compression=compression)
    return "t.parquet", file.getvalue()


KINDS = (npz, table, packed, parquet)


def outcome(seed: int, folder: Path) -> str:
    """Make a file by a seed, change it, read it: "read" or "refused"; whatever else goes wrong is raised."""
    draw = np.random.default_rng(seed)
    name, content = KINDS[seed % len(KINDS)](draw)
    path = folder / name
    path.write_bytes(_flipped(content, draw) if content and draw.random() < 0.4 else content)
    said = ""
    try:
        FromFile(path=str(path)).make(0)
    except UserError as error:
        said = str(error)
    assert "\n" not in said, said
    assert not said or said.endswith((".", "?")), said
    return "refused" if said else "read"


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda kind: KINDS[kind].__name__)
def test_nothing_but_words(tmp_path: Path, kind: int) -> None:
    found = Counter(outcome(seed, tmp_path) for seed in range(kind, 60 * len(KINDS), len(KINDS)))
    assert found["read"] >= 3  # or nothing was tried beyond the first check
    assert found["refused"] >= 10


if __name__ == "__main__":
    warnings.simplefilter("error")
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        for number in range(int(sys.argv[1])):
            try:
                results[outcome(number, Path(place))] += 1
            except Exception as error:
                results["failed"] += 1
                print(number, KINDS[number % len(KINDS)].__name__, type(error).__name__, str(error)[:200])
                if results["failed"] <= 3:
                    traceback.print_exc()
    print(dict(results))
    sys.exit(bool(results["failed"]))
