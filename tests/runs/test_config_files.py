"""Configurations written to a file and read again are the same."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from configs import build, layers, write
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.errors import UserError
from fedem.runs.config import Config, read_config, read_toml


class TestToml:
    @given(layers)
    def test_reading_back_gives_the_same(self, layer: dict[str, dict[str, Any]]) -> None:
        config = build(layer)
        assert build(tomllib.loads(config.to_toml())) == config

    @given(layers)
    def test_reading_back_on_top_of_a_preset_gives_the_same(self, layer: dict[str, dict[str, Any]]) -> None:
        config = Config.build(layer)
        assert Config.build(tomllib.loads(config.to_toml())) == config

    @given(st.text(st.characters(max_codepoint=0x2100, codec="utf-8")))
    def test_any_path_comes_back(self, path: str) -> None:
        written = build({"data": {"name": "file", "path": path}}).to_toml()
        assert tomllib.loads(written)["data"]["path"] == path

    @pytest.mark.parametrize(
        "path",
        [
            'with "quotes"',
            "with 'quotes'",
            "C:\\data\\new",
            "line\nbreak",
            "\r\n",
            "\t",
            "\x00\x1f\x7f\x80",
            "naïve 数据 🙂",
            "# no comment",
            '"""',
            "\\u0041",
            "\u2028",
        ],
    )
    def test_an_awkward_path_comes_back_through_a_file(self, tmp_path: Path, path: str) -> None:
        config = build({"data": {"name": "file", "path": path}})
        assert build(read_toml(write(tmp_path / "run.toml", config.to_toml()))) == config

    @pytest.mark.parametrize("flag", [True, False])
    def test_flags_stay_flags(self, flag: bool) -> None:
        written = build({"solver": {"momentum": 0.5, "nesterov": flag}}).to_toml()
        assert tomllib.loads(written)["solver"]["nesterov"] is flag

    def test_whole_numbers_stay_whole(self) -> None:
        assert isinstance(tomllib.loads(build().to_toml())["run"]["rounds"], int)


class TestReadToml:
    def test_sections_come_back(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.toml", '[run]\nrounds = 3\n[solver]\nname = "adam"\n')
        assert read_toml(path) == {"run": {"rounds": 3}, "solver": {"name": "adam"}}

    def test_an_empty_file_changes_nothing(self, tmp_path: Path) -> None:
        assert build(read_toml(write(tmp_path / "run.toml", ""))) == build()

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no configuration file .*missing\.toml"):
            read_toml(tmp_path / "missing.toml")

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="can't be read as TOML"):
            read_toml(tmp_path)

    @pytest.mark.parametrize("text", ["[run", "[run]\nrounds = ", "[run]\nrounds = 1\nrounds = 2", "rounds"])
    def test_broken_toml_names_the_file_and_the_line(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(UserError, match=r"run\.toml can't be read as TOML: .*(line \d|end of document)"):
            read_toml(write(tmp_path / "run.toml", text))

    def test_a_file_in_another_encoding_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run.toml").write_bytes(b"[run]\ndevice = '\xe9'\n")
        with pytest.raises(UserError, match=r"run\.toml can't be read as TOML"):
            read_toml(tmp_path / "run.toml")

    def test_an_unknown_section_gets_a_suggestion(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"section in .*run\.toml 'solvers'.*Did you mean 'solver'\?"):
            read_toml(write(tmp_path / "run.toml", "[solvers]\nmomentum = 0.5\n"))

    def test_a_key_outside_the_sections_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="'learning_rate'"):
            read_toml(write(tmp_path / "run.toml", "learning_rate = 0.5\n"))

    @pytest.mark.parametrize("text", ["run = 3", "[[run]]\nrounds = 3"])
    def test_a_section_that_is_none_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(UserError, match=r"'run' in .*run\.toml is .*3.*; allowed: a section \[run\]"):
            read_toml(write(tmp_path / "run.toml", text))


def test_a_file_that_was_changed_or_is_seen_from_another_folder_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[method]\nname = "dfedem"\n[graph]\nname = "file"\npath = "links.csv"\n'
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        Path("config.toml").write_text(text, encoding="utf-8")
        first = read_config(Path("config.toml"))
        assert first.values("graph")["path"] == str(tmp_path / place / "links.csv")
        assert read_config(Path("config.toml")) is first
    Path("config.toml").write_text(text + "[run]\nrounds = 3\n", encoding="utf-8")
    assert read_config(Path("config.toml")).run.rounds == 3
