"""The reference of settings: it is made of the code, leaves nothing out, and says what is so."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from fedem.core.settings import Settings
from fedem.report.console import console
from fedem.report.reference import Kind, kinds_in, settings_of, settings_page
from fedem.runs.config import SECTIONS, parse_assignment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
KINDS = [(section, kind) for section in SECTIONS for kind in kinds_in(section)]
CLASSES = sorted(
    {cls for section in SECTIONS.values() for name in section.table for cls in section.kinds({"name": name})},
    key=lambda cls: f"{cls.__module__}.{cls.__name__}",
)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal so wide that a row is a line."""
    monkeypatch.setattr(console, "width", 1000)


def _lines(printed: str) -> list[str]:
    return [" ".join(line.split()) for line in printed.splitlines()]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda cls: cls.__name__)
def test_every_setting_has_a_meaning(kind: type[Settings]) -> None:
    missing = [setting.name for setting in settings_of(kind) if not setting.meaning]
    assert not missing, f"{kind.__name__} needs lines on these under Attributes: in its docstring"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda cls: cls.__name__)
def test_no_meaning_is_of_a_setting_that_is_gone(kind: type[Settings]) -> None:
    told = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    assert set(re.findall(r"^    (\w+):", told, flags=re.MULTILINE)) <= {entry.name for entry in fields(kind)}


@pytest.mark.parametrize(("section", "kind"), KINDS, ids=lambda part: getattr(part, "name", part))
def test_all_keys_are_told_and_their_defaults_are_true(section: str, kind: Kind) -> None:
    """What is shown as a default, given to --set, is what holds when nothing is set."""
    values = SECTIONS[section].complete({"name": kind.name} if kind.name else {})
    values.pop("name", None)
    told = [parse_assignment(f"{section}.{setting.name}={setting.default}")[section] for setting in kind.settings]
    assert {key: value for assigned in told for key, value in assigned.items()} == values
    assert len(told) == len(values)


def test_sections_and_their_names_are_listed_within_eighty_columns(run) -> None:
    code, out, err = run("settings")
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert all(section.about for section in SECTIONS.values())
    words = re.split(r"[\s,]+", out)
    for section in SECTIONS:
        assert section in words
    for _, kind in KINDS:
        assert kind.name in words


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_told_in_full(run, wide: None, section: str) -> None:
    code, out, err = run("settings", section)
    assert (code, err) == (0, "")
    lines = _lines(out)
    assert SECTIONS[section].about in out
    for kind in kinds_in(section):
        assert not kind.name or any(line.startswith(f"{kind.name}: ") for line in lines)
        for setting in kind.settings:
            assert " ".join(setting) in lines


def test_a_name_is_told_alone(run, wide: None) -> None:
    code, out, err = run("settings", "schedule.step")
    assert (code, err) == (0, "")
    rows = [line.split()[0] for line in _lines(out) if " above 0 " in line or " at least 0 " in line]
    assert rows == ["learning_rate", "factor"]
    assert "three quarters of the run" in out
    assert "cosine" not in out
    assert "It has no settings" in run("settings", "loss.auto")[1]
    assert run("settings", "method.hypcluster") == run("settings", "method.ifca")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shedule"], "Unknown section 'shedule'; allowed: attack, batching, compression"),
        (["shedule.step"], "Did you mean 'schedule'?"),
        (["schedule.stp"], "Unknown schedule 'stp'; allowed: constant, cosine, inverse_sqrt, step. Did you mean"),
        (["schedule."], "Unknown schedule ''"),
        (["method.fedm"], "Did you mean 'fedem'?"),
        (["run.rounds"], "[run] has no names, but 'rounds' was asked for; allowed: fedem settings run."),
        (["run", "--markdown"], "--markdown is for all sections, but 'run' was asked for"),
    ],
)
def test_unknown_names_are_refused(run, arguments: list[str], message: str) -> None:
    code, out, err = run("settings", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_help_says_how_settings_are_set(run) -> None:
    code, out, _ = run("settings", "--help")
    assert code == 0
    assert "SECTION[.NAME]" in out
    assert "--set section.key=value" in out


def test_the_page_is_what_the_code_makes(run) -> None:
    code, out, err = run("settings", "--markdown")
    assert (code, err, out) == (0, "", settings_page())
    assert out == PAGE.read_text(encoding="utf-8"), "make it anew: fedem settings --markdown > docs/settings.md"


def test_the_page_has_every_key_in_a_table_of_four_columns() -> None:
    page = settings_page()
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in tables)
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    assert headings == ["Settings", *(title for section in SECTIONS for title in _headings(section))]
    for _, kind in KINDS:
        for setting in kind.settings:
            assert any(line.startswith(f"| `{setting.name}` | `{setting.default}` |") for line in tables)
    assert "settings.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def _headings(section: str) -> list[str]:
    return [section, *(f"{section}.{kind.name}" for kind in kinds_in(section) if kind.name)]


def test_the_readme_says_where_settings_are_explained() -> None:
    assert "`fedem settings`" in (ROOT / "README.md").read_text(encoding="utf-8")
