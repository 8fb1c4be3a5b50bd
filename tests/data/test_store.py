"""Canonical data sets: what goes in comes out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archives import images
from stores import CLIENTS, X, Y, make_home, npz, write_source

from fedem.core.errors import UserError
from fedem.data import Cifar10, Cifar100, Emnist, Femnist, Shakespeare
from fedem.data.partitions import from_arrays
from fedem.data.store import ROWS, prepare, read_about

SHARED = Path(os.environ.get("FEDEM_DATA", ""))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_home(tmp_path, monkeypatch)


@pytest.fixture
def source(home: Path) -> Path:
    return write_source(home)


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
            ({"y": Y + 1}, "has labels from 1 to 62; allowed: 0 to 61"),
            ({"y": Y / 2}, "y is float64"),
            ({"y": Y[:5]}, "9 images but 5 of 'y'"),
            ({"client": CLIENTS.astype(object)}, r"samples\.npz is not .*: 'client' holds Python objects"),
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
