"""Canonical data sets: found where they are looked for, and listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from stores import make_home, tree, write_source

from fedem.cli.data import data_group as group
from fedem.core.errors import UserError
from fedem.data import DATA, PUBLIC, Emnist, Femnist, Shakespeare
from fedem.data.store import cache_folder, data_folder, prepare, prepared, read_about


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_home(tmp_path, monkeypatch)


@pytest.fixture
def source(home: Path) -> Path:
    return write_source(home)


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
        with pytest.raises(UserError, match=r"gzip\.zip is damaged or another file: its sha256 is"):
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
