"""CSV files as people have them: compressed, other separators, decimal commas, other encodings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from shops import COLUMNS, make_shops

from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.data.dataset import Dataset
from fedem.data.tables import Dialect, read_table

Run = Callable[..., tuple[int, str, str]]
NAMED = ["--client-column", "Geschäft", "--target-column", "sold"]
FRAME = pandas.DataFrame(make_shops(10))[list(COLUMNS)].rename(columns={"shop": "Geschäft"})


def made(path: Path, **options: str) -> Dataset:
    return FromFile(path=str(path), target_column="sold", client_column="Geschäft", **options).make(0)


def same(one: Dataset, other: Dataset) -> bool:
    return torch.equal(one.federation.train.inputs, other.federation.train.inputs) and (
        one.encoding.fingerprint == other.encoding.fingerprint and one.partition_hash == other.partition_hash
    )


@pytest.fixture
def plain(tmp_path: Path) -> Dataset:
    FRAME.to_csv(tmp_path / "plain.csv", index=False)
    return made(tmp_path / "plain.csv")


@pytest.mark.parametrize("name", ["t.csv.gz", "T.CSV.GZ", "t.tsv.bz2", "t.txt.xz", "t.tsv", "t.txt", "t.csv"])
@pytest.mark.parametrize("sep", [",", ";", "\t", "|"])
def test_the_content_comes_back(tmp_path: Path, plain: Dataset, name: str, sep: str) -> None:
    kind = {"gz": "gzip", "bz2": "bz2", "xz": "xz"}.get(name.rsplit(".", 1)[1].lower())
    FRAME.to_csv(tmp_path / name, index=False, sep=sep, compression=kind)
    assert same(made(tmp_path / name), plain)


@pytest.mark.parametrize(("encoding", "said"), [("utf-8-sig", None), ("cp1252", "cp1252"), ("utf-16", "utf-16")])
def test_encodings_are_found_out(run: Run, tmp_path: Path, plain: Dataset, encoding: str, said: str | None) -> None:
    path = tmp_path / "t.csv"
    FRAME.to_csv(path, index=False, encoding=encoding)
    assert same(made(path), plain)
    code, told, err = run("data", "describe", path, *NAMED)
    assert code == 0, err
    assert ("the text is in" in told) == (said is not None)
    assert said is None or f"  - the text is in {said}" in told


def test_european_files_are_trained_on_and_predicted(run: Run, tmp_path: Path, plain: Dataset) -> None:
    path = tmp_path / "t.csv"
    FRAME.to_csv(path, index=False, sep=";", decimal=",", encoding="cp1252")
    assert same(made(path), plain)
    code, _, err = run("train", "--data", path, *NAMED, "--rounds", "1", "--device", "cpu", "--out", tmp_path / "r")
    assert code == 0, err
    for line in ("fields are separated by ;", "the text is in cp1252", "numbers have decimal commas: 'price', 'temp"):
        assert f"  - {line}" in err
    for name in ("t.csv", "plain.csv"):
        code, _, err = run("predict", tmp_path / "r", "--data", tmp_path / name, "--out", tmp_path / f"p_{name}")
        assert (code, "decimal commas" in err) == (0, name == "t.csv"), err
    assert (tmp_path / "p_t.csv").read_text() == (tmp_path / "p_plain.csv").read_text()


@pytest.mark.parametrize(
    ("sep", "texts", "options", "numbers"),
    [
        (";", ("1,5", "2"), {}, (1.5, 2)),
        (";", ("1.234,5", "2,25"), {}, (1234.5, 2.25)),
        (";", ("1,234", "2,345"), {}, (1.234, 2.345)),
        (",", ('"1,234"', '"2,345"'), {}, (1234, 2345)),
        (",", ('"1,23"', '"2,3"'), {}, (1.23, 2.3)),
        (",", ('"1,234"', '"2,345"'), {"decimal": ","}, (1.234, 2.345)),
        (";", ("1,234", "2,345"), {"decimal": "."}, (1234, 2345)),
        (";", ("1.5", "2"), {}, (1.5, 2)),
    ],
)
def test_the_decimal_sign(
    tmp_path: Path, sep: str, texts: tuple[str, ...], options: dict[str, str], numbers: tuple[float, ...]
) -> None:
    lines = [sep.join(("client", "a", "y")), *(sep.join(("ann", text, str(row))) for row, text in enumerate(texts))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found = FromFile(path=str(tmp_path / "t.csv"), standardize=False, **options).make(0)
    np.testing.assert_allclose(found.federation.train.pool.inputs[:, 0], numbers, rtol=1e-6)


def test_points_elsewhere_leave_commas_alone(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a;b\n1,5;1.5\n2,5;2.5\n")
    table = read_table(tmp_path / "t.csv")
    assert (table.columns["a"].kind, table.columns["b"].kind) == ("text", "number")
    table = read_table(tmp_path / "t.csv", dialect=Dialect(decimal=","))
    assert table.stacked().tolist() == [[1.5, 1.5], [2.5, 2.5]]


def test_a_folder_of_packed_files(tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        pandas.DataFrame({"x": [1, 2], "y": [0, 1]}).to_csv(tmp_path / f"{name}.csv.gz", index=False)
    owners = read_table(tmp_path).owners()
    assert owners is not None
    assert owners.tolist() == ["ann", "ann", "bob", "bob"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--separator", ";"],
            "plain.csv has no column 'sold' (see data.target_column, --target-column",
        ),
        (["--separator", "tabs"], "Unknown data.separator 'tabs'"),
        (["--decimal", ";"], "Unknown data.decimal ';'"),
        (["--encoding", "klingon"], "data.encoding is 'klingon'; allowed: auto, utf-8"),
        (["--encoding", "ascii"], "plain.csv, line 1: the bytes are no text in ascii"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Run, tmp_path: Path, plain: Dataset, options: list[str], message: str
) -> None:
    code, _, err = run("data", "describe", tmp_path / "plain.csv", *NAMED, *options)
    assert code == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a;b\n1;2\n3;4;5\n", r"t\.csv, line 3: 3 fields; allowed: 2, as in the header"),
        (
            "a,b\nü,1\nö,2\n".encode() + b"\xe4,3\n",
            r"t\.csv can't be read as CSV: line 4 has bytes that are not in UTF-8",
        ),
        (b"\xff\xfea", r"t\.csv, line 1: the bytes are no text in utf-16"),
    ],
)
def test_damage_is_named_by_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_table(tmp_path / "t.csv")


def test_a_packed_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "t.csv.gz", index=False)
    content = (tmp_path / "t.csv.gz").read_bytes()
    for damaged in (content[:-20], b"plain", content[:40] + b"????" + content[44:]):
        (tmp_path / "t.csv.gz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"t\.csv\.gz can't be read as CSV"):
            read_table(tmp_path / "t.csv.gz")


def test_lines_of_packed_files_are_named(tmp_path: Path) -> None:
    pandas.DataFrame({"ä": [1, "x"]}).to_csv(tmp_path / "t.csv.gz", index=False, encoding="cp1252")
    with pytest.raises(UserError, match=r"t\.csv\.gz, line 3, column 'ä': 'x' is not a number"):
        read_table(tmp_path / "t.csv.gz").numbers("ä")
