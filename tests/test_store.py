"""Canonical data sets: whole or not there, found where they are looked for, and refused when damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archives import images

from fedem.cli.datasets import group
from fedem.data import DATA, PUBLIC, Cifar10, Cifar100, Emnist, Femnist, Shakespeare
from fedem.data.blocks import ROWS, Block
from fedem.data.canonical import read_about
from fedem.data.collection import from_arrays
from fedem.data.store import cache_folder, data_folder, prepare, prepared
from fedem.errors import UserError

X = images(9, 28, 28)
Y = np.array([0, 1, 61, 3, 4, 5, 6, 7, 8])
CLIENTS = np.array(["ann", "bob", "ann", "ann", "bob", "cem", "cem", "ann", "bob"])
SHARED = Path(os.environ.get("FEDEM_DATA", ""))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.fixture
def source(home: Path) -> Path:
    return npz(home / "samples.npz", x=X, y=Y, client=CLIENTS)


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class TestConversion:
    @pytest.mark.parametrize("shape", [(28, 28), (28, 28, 1), (1, 28, 28)])
    def test_arrays_come_back(self, home: Path, shape: tuple[int, ...]) -> None:
        place = prepare(Emnist(), npz(home / "a.npz", x=X.reshape(9, *shape), y=Y.astype(np.uint8)))
        assert place == home / "data" / "canonical" / "emnist"
        found = Emnist().collect()
        assert torch.equal(found.pool.inputs, torch.from_numpy(X)[:, None])
        assert torch.equal(found.pool.targets, torch.from_numpy(Y))
        assert found.owners is None

    @pytest.mark.parametrize("last", [True, False])
    def test_channels_come_first(self, home: Path, last: bool) -> None:
        pixels = images(4, 3, 32, 32)
        prepare(Cifar10(), npz(home / "a.npz", x=np.moveaxis(pixels, 1, 3) if last else pixels, y=np.arange(4)))
        assert np.array_equal(Cifar10().collect().pool.inputs, pixels)

    def test_it_is_the_collection_of_the_same_arrays(self, source: Path) -> None:
        prepare(Femnist(), source)
        found, expected = Femnist().collect(), from_arrays(X[:, None], Y, CLIENTS)
        assert found.fingerprint == expected.fingerprint
        assert found.owner_names == expected.owner_names
        assert found.owners is not None
        assert expected.owners is not None
        order = np.argsort(CLIENTS, kind="stable")
        assert torch.equal(found.owners, expected.owners[order])
        assert torch.equal(found.ids, expected.ids[order])

    def test_samples_that_repeat_have_ids_of_their_own(self, home: Path) -> None:
        # More than a block holds, so that equal samples stand in several.
        rows = np.arange(ROWS + 50) % 9
        prepare(Emnist(), npz(home / "a.npz", x=X[rows], y=Y[rows]))
        ids = Emnist().collect().ids
        assert len(ids.unique()) == len(ids)
        assert Emnist().collect().fingerprint == from_arrays(X[rows][:, None], Y[rows]).fingerprint

    def test_classes_have_names(self, source: Path) -> None:
        prepare(Femnist(), source)
        names = Femnist().make(0).label_names
        assert names is not None
        assert (len(names), names[10], names[61]) == (62, "A", "z")

    def test_many_blocks_are_one_array(self, home: Path) -> None:
        pixels, labels = images(2 * ROWS + 5, 1, 28, 28), np.arange(2 * ROWS + 5) % 62
        prepare(Emnist(), npz(home / "a.npz", x=pixels, y=labels))
        found = Emnist().collect()
        assert np.array_equal(found.pool.inputs, pixels)
        assert np.array_equal(found.pool.targets, labels)
        assert found.fingerprint == from_arrays(pixels, labels).fingerprint

    def test_groups_of_labels_are_kept(self, home: Path) -> None:
        pixels = images(3, 3, 32, 32)
        prepare(Cifar100(), npz(home / "a.npz", x=pixels, y=[99, 0, 5], coarse=[13, 4, 7]))
        coarse = Cifar100().collect().coarse
        assert coarse is not None
        assert coarse.tolist() == [13, 4, 7]
        with pytest.raises(UserError, match=r"b\.npz has no array 'coarse' \(it has: x, y\)"):
            prepare(Cifar100(), npz(home / "b.npz", x=pixels, y=[99, 0, 5]), again=True)

    def test_about_says_what_is_there(self, source: Path) -> None:
        about = read_about(prepare(Femnist(), source))
        assert (about.samples, about.owners, len(about.labels)) == (9, ["ann", "bob", "cem"], 62)
        assert about.raw.keys() == {"samples.npz"}
        assert about.files["inputs"]["shape"] == [9, 1, 28, 28]
        assert about.files["inputs"]["dtype"] == "uint8"

    def test_writing_to_the_tensors_leaves_the_files_alone(self, source: Path) -> None:
        prepare(Femnist(), source)
        Femnist().collect().pool.inputs.zero_()
        assert int(Femnist().collect().pool.inputs.max()) > 0

    @pytest.mark.parametrize(
        ("arrays", "reason"),
        [
            ({"x": X.astype(np.float32)}, r"x is float32 of shape \(9, 28, 28\); allowed: uint8 images of 28 x 28"),
            ({"x": X[:, :27]}, "allowed: uint8 images of 28 x 28 with 1 channel"),
            ({"y": Y + 1}, "Labels run from 1 to 62; allowed: 0 to 61"),
            ({"y": Y / 2}, "y is float64"),
            ({"y": Y[:5]}, "9 images but 5 of 'y'"),
            ({"client": CLIENTS.astype(object)}, r"samples\.npz is damaged or of no known format"),
        ],
    )
    def test_other_arrays_are_refused(self, home: Path, arrays: dict[str, Any], reason: str) -> None:
        path = npz(home / "samples.npz", **({"x": X, "y": Y, "client": CLIENTS} | arrays))
        with pytest.raises(UserError, match=reason):
            prepare(Femnist(), path)
        assert Femnist().place() is None

    def test_owners_are_needed_where_clients_are_natural(self, home: Path) -> None:
        with pytest.raises(UserError, match="has no array 'client'"):
            prepare(Femnist(), npz(home / "a.npz", x=X, y=Y))


class TestMinimumOfLines:
    def test_roles_of_fewer_lines_are_left_out(self, home: Path) -> None:
        speeches = [f"  ROLE {'ABC'[k]}. {'word ' * 4}\n" + f"    {'more ' * 4}\n" * (3 + 2 * k) for k in range(3)]
        text = "THE PLAY\n\nby William Shakespeare\n\n" + "".join(speeches)
        (home / "data" / "pg100.txt").write_text(text)
        prepare(Shakespeare(window=7))
        whole = Shakespeare(window=7).collect()
        some = Shakespeare(window=7, min_lines=6).collect()
        assert whole.owner_names == ("THE_PLAY_ROLE_A", "THE_PLAY_ROLE_B", "THE_PLAY_ROLE_C")
        assert some.owner_names == ("THE_PLAY_ROLE_B", "THE_PLAY_ROLE_C")
        assert whole.owners is not None
        assert some.owners is not None
        stays = whole.owners > 0
        assert torch.equal(some.pool.inputs, whole.pool.inputs[stays])
        assert torch.equal(some.owners, whole.owners[stays] - 1)
        assert some.fingerprint != whole.fingerprint
        with pytest.raises(UserError, match=r"data\.min_lines is 9; allowed: at most 8"):
            Shakespeare(window=7, min_lines=9).collect()


class _BrokenOffError(BaseException):
    """Neither an error of reading nor of writing: as an interrupt is."""


class TestKilled:
    @pytest.mark.parametrize("blocks", [0, 1, 2])
    def test_nothing_half_made_is_left(self, home: Path, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
        def read(self: Emnist, source: Path) -> Iterator[Block]:
            for _ in range(blocks):
                yield Block(X[:, None], Y)
            raise _BrokenOffError

        monkeypatch.setattr(Emnist, "read", read)
        with pytest.raises(_BrokenOffError):
            prepare(Emnist(), home)
        assert tree(home) == ["data/canonical/.emnist.lock"]

    def test_what_was_there_stays_when_it_can_not_be_replaced(self, home: Path, source: Path) -> None:
        before = read_about(prepare(Emnist(), source))
        with pytest.raises(UserError, match="damaged or of no known format"):
            prepare(Emnist(), npz(home / "objects.npz", x=X.astype(object), y=Y), again=True)
        assert read_about(data_folder() / "canonical" / "emnist") == before

    def test_leftovers_of_a_killed_process_are_in_nobodys_way(self, home: Path, source: Path) -> None:
        for leftover in (".emnist.tmp", ".emnist.old"):
            (home / "data" / "canonical" / leftover).mkdir(parents=True)
            (home / "data" / "canonical" / leftover / "inputs.npy").write_bytes(b"half")
        place = prepare(Emnist(), source)
        assert sorted(path.name for path in place.parent.iterdir()) == [".emnist.lock", "emnist"]

    def test_several_at_once_make_one_data_set(self, source: Path) -> None:
        # Locks belong to open files, so threads keep each other out just as processes do.
        with ThreadPoolExecutor(4) as pool:
            places = list(pool.map(lambda _: prepare(Emnist(), source, again=True), range(8)))
        assert len(set(places)) == 1
        assert torch.equal(Emnist().collect().pool.targets, torch.from_numpy(Y[np.argsort(CLIENTS, kind="stable")]))
        assert sorted(path.name for path in places[0].parent.iterdir()) == [".emnist.lock", "emnist"]


class TestDamage:
    @pytest.mark.parametrize("name", ["inputs.npy", "targets.npy", "ids.npy", "owners.npy"])
    @pytest.mark.parametrize("how", ["missing", "truncated", "longer", "header"])
    def test_damaged_arrays_are_noticed(self, source: Path, name: str, how: str) -> None:
        path = prepare(Femnist(), source) / name
        content = path.read_bytes()
        path.unlink()
        changed = {"truncated": content[:-1], "longer": content + b"x", "header": content.replace(b"(9,", b"(8,", 1)}
        if how != "missing":
            path.write_bytes(changed[how])
        with pytest.raises(
            UserError, match=r"femnist is damaged or outdated .* run: fedem data prepare femnist --again"
        ):
            Femnist().collect()
        prepare(Femnist(), source, again=True)
        assert len(Femnist().collect().ids) == 9

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": 1}', b'{"format": 99}', b"\xff"])
    def test_a_damaged_description_is_noticed(self, source: Path, content: bytes) -> None:
        (prepare(Femnist(), source) / "about.json").write_bytes(content)
        with pytest.raises(UserError, match="fedem data prepare femnist --again"):
            Femnist().collect()

    def test_another_format_is_outdated(self, source: Path) -> None:
        path = prepare(Femnist(), source) / "about.json"
        # The first format had equal ids for equal samples.
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
        with pytest.raises(UserError, match=r"outdated \(about\.json is not of format 2\); run: .* --again"):
            Femnist().collect()

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("files", []),
            ("files", {}),
            ("files", {"inputs": []}),
            ("owners", ["ann"]),
            ("owners", []),
            ("owners", "ann"),
            ("owners", [1, 2, 3]),
            ("samples", "nine"),
            ("samples", 8),
            ("samples", True),
            ("labels", None),
            ("lines", [3]),
            ("raw", []),
            ("name", 3),
            ("more", 1),
        ],
    )
    def test_a_description_with_other_content_is_noticed(
        self, source: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any
    ) -> None:
        path = prepare(Femnist(), source) / "about.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        with pytest.raises(UserError, match=r"femnist is damaged .* run: fedem data prepare femnist --again"):
            Femnist().collect()
        group(["list"], standalone_mode=False)
        told = "".join(capsys.readouterr().out.split())
        # That some samples' owner has no name shows where they are read.
        assert "femnist" in told
        assert ("isdamagedoroutdated" in told) == ((key, value) != ("owners", ["ann"]))


class TestPlaces:
    def test_folders_follow_the_environment(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert (data_folder(), cache_folder()) == (home / "data", home / "cache" / "fedem")
        monkeypatch.delenv("FEDEM_DATA")
        assert data_folder() == home / "cache" / "fedem"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_folder() == Path.home() / ".cache" / "fedem"

    def test_a_data_folder_that_is_read_only_is_left_alone(self, home: Path, source: Path) -> None:
        (home / "data").chmod(0o555)
        try:
            assert prepare(Emnist(), source) == home / "cache" / "fedem" / "canonical" / "emnist"
            assert tree(home / "data") == []
            assert len(Emnist().collect().ids) == 9
        finally:
            (home / "data").chmod(0o755)

    @pytest.mark.parametrize("place", ["data", "data/shakespeare", "cache/fedem", "cache/fedem/shakespeare"])
    def test_raw_files_are_found(self, home: Path, place: str) -> None:
        text = "THE PLAY\n\nby William Shakespeare\n" + "  A. xxx\n    yyy\n    zzz\n  B. xxx\n    yyy\n    zzz\n"
        (home / place).mkdir(parents=True, exist_ok=True)
        (home / place / "pg100.txt").write_text(text)
        about = read_about(prepare(Shakespeare(window=3)))
        assert (about.name, about.owners, about.lines) == ("shakespeare-3", ["THE_PLAY_A", "THE_PLAY_B"], [3, 3])

    def test_a_file_with_an_official_name_must_be_the_official_one(self, home: Path) -> None:
        (home / "data" / "gzip.zip").write_bytes(b"something else")
        with pytest.raises(UserError, match=r"gzip\.zip is damaged or another file: its md5 is"):
            prepare(Emnist())

    def test_a_folder_of_ones_own(self, home: Path, source: Path) -> None:
        data = Emnist(folder=str(home / "elsewhere" / "mine"))
        assert prepare(data, source) == home / "elsewhere" / "mine"
        assert len(data.collect().ids) == 9
        assert Emnist().place() is None

    def test_what_is_not_prepared_says_how_to(self) -> None:
        with pytest.raises(
            UserError, match=r"'shakespeare-90' is not prepared in .*; run: .* shakespeare --window 90$"
        ):
            Shakespeare(window=90).collect()

    def test_what_is_prepared_is_not_replaced_by_accident(self, source: Path) -> None:
        place = prepare(Emnist(), source)
        written = (place / "about.json").stat().st_mtime_ns
        with pytest.raises(UserError, match=r"prepared already, in .*say --again"):
            prepare(Emnist(), source)
        assert prepare(Emnist()) == place
        assert (place / "about.json").stat().st_mtime_ns == written

    def test_a_source_that_is_not_there_is_named(self, home: Path) -> None:
        with pytest.raises(UserError, match=r"There is no file or folder .*nowhere\.npz"):
            prepare(Emnist(), home / "nowhere.npz")

    def test_the_table_knows_them_all(self) -> None:
        assert PUBLIC.keys() <= DATA.keys()
        assert all(kind.name == name for name, kind in PUBLIC.items())
        for window in (0, 1001):
            with pytest.raises(UserError, match=r"Shakespeare\.window"):
                Shakespeare(window=window)


def test_predictions_have_the_names_of_classes(home: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    rows = np.arange(90) % 9
    prepare(Femnist(), npz(home / "a.npz", x=X[rows], y=Y[rows], client=CLIENTS[rows]))
    small = ["--set", "model.name=linear", "--rounds", "1", "--unseen", "0", "--set", "partition.share=1.0"]
    code, _, err = run("train", "--data", "femnist", *small, "--out", home / "r", "-q")
    assert code == 0, err
    npz(home / "new.npz", x=X[:, None], client=CLIENTS)
    code, _, err = run("predict", home / "r", "--data", home / "new.npz", "--out", home / "p.csv", "-q")
    assert code == 0, err
    heading = (home / "p.csv").read_text().splitlines()[0].split(",")
    assert heading == ["client", "prediction", *(f"probability_{name}" for name in Femnist.labels)]


class TestCommands:
    def test_what_they_refuse(self) -> None:
        for arguments, reason in (
            (["femnist", "--window", "9"], "Unknown key in .data. 'window'"),
            (["emnits"], "Did you mean 'emnist'"),
            (["shakespeare", "--window", "0"], r"data\.window is 0; allowed: at least 1"),
        ):
            with pytest.raises(UserError, match=reason):
                group(["prepare", *arguments], standalone_mode=False)

    def test_what_they_print(self, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
        group(["prepare", "femnist", "--from", str(source)], standalone_mode=False)
        printed = capsys.readouterr().out
        assert read_about(prepared(Femnist)[0]).fingerprint in printed
        group(["list"], standalone_mode=False)
        printed = "".join(capsys.readouterr().out.split())
        for needed in ("femnist93", "cifar10CIFAR-10", "notprepared:fedemdataprepareemnist"):
            assert needed in printed
        (prepared(Femnist)[0] / "about.json").write_text("{")
        group(["list"], standalone_mode=False)
        assert "isdamaged" in "".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "shakespeare_pg100.txt.gz").is_file(), reason="FEDEM_DATA does not hold the text")
def test_shakespeare_has_leafs_figures() -> None:
    prepare(Shakespeare(), SHARED / "shakespeare_pg100.txt.gz")
    found = Shakespeare().collect()
    assert len(found.owner_names) == 1129
    assert tuple(found.pool.inputs.shape) == (4_226_158, 80)
    assert (found.pool.inputs.dtype, found.pool.targets.dtype) == (torch.int8, torch.int64)
    # A window is the last one moved on by the target, wherever the role stays the same.
    assert found.owners is not None
    same = found.owners[1:200_000] == found.owners[:199_999]
    inputs, targets = found.pool.inputs[:200_000], found.pool.targets[:200_000]
    assert torch.equal(inputs[1:, :-1][same], inputs[:-1, 1:][same])
    assert torch.equal(inputs[1:, -1][same].long(), targets[:-1][same])


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "emnist_byclass_test.npz").is_file(), reason="FEDEM_DATA does not hold the images")
def test_emnist_comes_back() -> None:
    prepare(Emnist(), SHARED / "emnist_byclass_test.npz")
    found = Emnist().collect()
    with np.load(SHARED / "emnist_byclass_test.npz") as archive:
        assert np.array_equal(found.pool.inputs[:, 0], archive["x"])
        assert np.array_equal(found.pool.targets, archive["y"])
    assert len(found.ids) == 116_323
