"""Canonical data sets: whole or not there, and refused when damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import CLIENTS, X, Y, make_home, npz, tree, write_source

from fedem.cli.data import data_group as group
from fedem.core.errors import UserError
from fedem.data import Emnist, Femnist
from fedem.data.store import Block, data_folder, prepare, read_about


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_home(tmp_path, monkeypatch)


@pytest.fixture
def source(home: Path) -> Path:
    return write_source(home)


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
        with pytest.raises(UserError, match="'x' holds Python objects"):
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
