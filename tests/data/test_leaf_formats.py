"""FEMNIST and Shakespeare as LEAF, NIST and Project Gutenberg write them: every sample once, with its owner."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import ids_of, images, join, write, zipped
from numpy.typing import NDArray
from PIL import Image

from fedem.core.errors import UserError
from fedem.data import Femnist, Shakespeare
from fedem.data.images import CHARACTERS, _image
from fedem.data.shakespeare import LETTERS, UNKNOWN, encode, plays
from fedem.data.store import prepare


def leaf(users: dict[str, tuple[NDArray[np.uint8], list[int]]]) -> bytes:
    data = {user: {"x": (x.reshape(-1, 784) / 255).tolist(), "y": y} for user, (x, y) in users.items()}
    counts = [len(y) for _, y in users.values()]
    return json.dumps({"users": list(users), "num_samples": counts, "user_data": data}).encode()


def png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return buffer.getvalue()


def by_owner(source: Path) -> dict[str | None, list[tuple[int, bytes]]]:
    """Each writer's samples, whatever their order."""
    found: dict[str | None, list[tuple[int, bytes]]] = {}
    for block in Femnist().read(source):
        pairs = zip(block.targets.tolist(), block.inputs, strict=True)
        found.setdefault(block.owner, []).extend((label, image.tobytes()) for label, image in pairs)
    return {owner: sorted(samples) for owner, samples in found.items()}


X = images(6, 28, 28)
Y = [0, 10, 36, 61, 9, 35]
WRITERS = ["f0001_01", "f0002_02", "f0002_02", "f0001_01", "f0003_03", "f0002_02"]
EXPECTED = {
    writer: sorted(
        (label, image.tobytes()) for image, label, owner in zip(X, Y, WRITERS, strict=True) if owner == writer
    )
    for writer in WRITERS
}


def users(rows: list[int]) -> bytes:
    chosen = sorted({WRITERS[row] for row in rows})
    return leaf({w: (X[own], [Y[r] for r in own]) for w in chosen if (own := [r for r in rows if WRITERS[r] == w])})


class TestFemnist:
    @pytest.mark.parametrize(
        "layout",
        [
            {"all_data_0.json": [0, 3], "all_data_1.json": [1, 2, 4, 5]},
            {"train/all_data_0_keep_0_train_9.json": [0, 1, 4], "test/all_data_0_keep_0_test_9.json": [2, 3, 5]},
            {"all_data/all_data_0.json": [0, 1, 2, 3, 4, 5], "train/a.json": [0, 1], "sampled_data/a.json": [3]},
        ],
    )
    def test_leafs_files_hold_every_sample_once(self, tmp_path: Path, layout: dict[str, list[int]]) -> None:
        write(tmp_path / "femnist", {name: users(rows) for name, rows in layout.items()})
        assert by_owner(tmp_path / "femnist") == EXPECTED

    def test_the_order_of_files_does_not_change_the_samples(self, tmp_path: Path) -> None:
        first = write(tmp_path / "a", {"all_data_0.json": users([0, 3]), "all_data_1.json": users([1, 2, 4, 5])})
        other = write(tmp_path / "b", {"all_data_0.json": users([5, 4, 2, 1]), "all_data_1.json": users([3, 0])})
        assert ids_of(tmp_path, Femnist, first) == ids_of(tmp_path, Femnist, other)

    def test_nists_archives_are_matched_by_content(self, tmp_path: Path) -> None:
        codes = [f"{ord(CHARACTERS[label]):02x}" for label in Y]
        by_class = {f"by_class/{code}/hsf_{k % 2}/hsf_{k % 2}_{k:05d}.png": png(X[k]) for k, code in enumerate(codes)}
        by_class["by_class/4a/train_4a/train_4a_00000.png"] = png(X[0])  # says J; only hsf folders count
        by_class["by_class/30/hsf_0.mit"] = b"an index"
        by_write = {f"by_write/hsf_0/{w}/d{w[1:]}/d{w[1:]}_{k:05d}.png": png(X[k]) for k, w in enumerate(WRITERS)}
        zipped(tmp_path / "by_class.zip", by_class)
        path = zipped(tmp_path / "by_write.zip", by_write)
        write(tmp_path / "unpacked", by_class | by_write)
        assert by_owner(path) == by_owner(tmp_path) == by_owner(tmp_path / "unpacked") == EXPECTED
        zipped(path, by_write | {"by_write/hsf_0/f9_9/d9_9/d9_9_00000.png": png(images(1, 28, 28)[0])})
        with pytest.raises(ValueError, match=r"d9_9_00000\.png of by_write is not in by_class"):
            by_owner(path)

    def test_a_tree_of_writers_and_classes(self, tmp_path: Path) -> None:
        files = {f"{w}/{ord(CHARACTERS[Y[k]]):02x}/{k}.png": png(X[k]) for k, w in enumerate(WRITERS)}
        assert by_owner(write(tmp_path / "tree", files)) == EXPECTED
        with pytest.raises(ValueError, match="'2b' is not a hexadecimal code of a digit or letter"):
            by_owner(write(tmp_path / "tree", {"f0001_01/2b/x.png": png(X[0])}))

    def test_large_images_are_made_small(self) -> None:
        flat = np.full((128, 128), 77, np.uint8)
        assert (_image(png(flat)) == 77).all()
        corner = np.full((128, 128, 3), 255, np.uint8)
        corner[:64, 64:] = 0  # upper right
        small = _image(png(corner))[0]
        assert small.shape == (28, 28)
        assert small[:12, 16:].max() < 20
        assert min(small[16:].min(), small[:, :12].min()) > 235

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ({"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0] * 784], "y": [1]}}}, "for 2 samples"),
            ({"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[2] * 784], "y": [1]}}}, "outside"),
            ({"users": ["a"], "num_samples": [1], "user_data": {}}, "KeyError"),
            ({"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0] * 784], "y": [62]}}}, "0 to 61"),
        ],
    )
    def test_other_contents_are_refused(self, tmp_path: Path, content: dict[str, Any], reason: str) -> None:
        write(tmp_path / "femnist", {"all_data_0.json": json.dumps(content).encode()})
        with pytest.raises(UserError, match=reason):
            prepare(Femnist(folder=str(tmp_path / "out")), tmp_path / "femnist")

    def test_a_folder_of_something_else_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="holds none of LEAF's json files"):
            list(Femnist().read(write(tmp_path / "x", {"readme.txt": b""})))


# --- Shakespeare

TEXT = """\ufeffA catalogue, first line
THE FIRST PLAY, OR SO

by William Shakespeare

DRAMATIS PERSONAE

  ANN. O that this too
    too solid  flesh,   would melt,
    Thaw.
<<A NOTICE>>
  Bob. No?
    Yes!
  Exit ANN
  BOB. \u00e9h.
    And so on, and so forth, until the end.
  CAT. One.
    Two.

THE COMEDY OF ERRORS


by William Shakespeare

ACT I. SCENE 1
ANN. One
two
<<A NOTICE>>
not spoken
DAN. three
ACT II. Where?
four
ANN. five
<<A NOTICE>>

A POEM
by William Shakespeare
    nobody says this
"""


class TestShakespeare:
    def test_plays_roles_and_lines(self) -> None:
        (first, roles), (second, others) = plays(TEXT)
        assert (first, second) == ("THE FIRST PLAY, OR SO", "THE COMEDY OF ERRORS")
        assert dict(roles) == {
            "ANN": ["O that this too", "too solid  flesh,   would melt,", "Thaw."],
            "BOB": ["No?", "Yes!", "\u00e9h.", "And so on, and so forth, until the end."],
            "CAT": ["One.", "Two."],
        }
        assert dict(others) == {"ANN": ["One", "two", "five"], "DAN": ["three"]}

    def test_windows_slide_over_a_roles_text(self, tmp_path: Path) -> None:
        (tmp_path / "pg100.txt").write_text(TEXT, encoding="utf-8")
        blocks = {block.owner: block for block in Shakespeare(window=10).read(tmp_path / "pg100.txt")}
        assert list(blocks) == ["THE_FIRST_PLAY__OR_SO_BOB", "THE_COMEDY_OF_ERRORS_ANN", "THE_FIRST_PLAY__OR_SO_ANN"]
        text = "O that this too too solid flesh, would melt, Thaw. "
        ann = blocks["THE_FIRST_PLAY__OR_SO_ANN"]
        assert ann.lines == 3
        assert ann.inputs.dtype == np.int8
        windows = ["".join(LETTERS[code] for code in row) for row in ann.inputs.tolist()]
        assert windows == [text[start : start + 10] for start in range(len(text) - 10)]
        assert "".join(LETTERS[code] for code in ann.targets) == text[10:]

    def test_codes_are_positions_among_leafs_letters(self) -> None:
        assert len(LETTERS) == len(set(LETTERS)) == 80
        assert encode(LETTERS).tolist() == list(range(80))
        assert encode("\u00e9\t\u20ac\U0001f600").tolist() == [UNKNOWN] * 4 == [LETTERS.index("}")] * 4

    @pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
    def test_compressed_texts_and_older_encodings(self, tmp_path: Path, encoding: str) -> None:
        content = TEXT.removeprefix("\ufeff").encode(encoding)
        plain, packed = tmp_path / "pg100.txt", tmp_path / "pg100.txt.gz"
        plain.write_bytes(content)
        packed.write_bytes(gzip.compress(content))
        archive = zipped(tmp_path / "1994-01-100.zip", {"100.txt": content})
        data = Shakespeare(window=5)
        expected = join(list(data.read(plain)))
        for path in (packed, archive):
            assert all(np.array_equal(a, b) for a, b in zip(expected, join(list(data.read(path))), strict=True))

    def test_another_text_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "other.txt").write_text("Call me Ishmael.\n" * 100)
        with pytest.raises(UserError, match=r"other\.txt has no plays in the layout"):
            list(Shakespeare().read(tmp_path / "other.txt"))
