"""The command line tells of itself: its commands, the methods and their settings."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

import fedem
from fedem import cli
from fedem.core.settings import names_of
from fedem.data import DATA
from fedem.report.reference import settings_of, shipped

PROGRAM: Any = cli.typer.main.get_command(cli.app)
CONTEXT = cli.click.Context(PROGRAM)


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", PROGRAM.commands)
def test_every_command_has_help_that_teaches(run, command: str, option: str) -> None:
    code, out, _ = run(command, option)
    assert code == 0
    assert "Usage" in out


@pytest.mark.parametrize("command", PROGRAM.commands)
def test_what_help_lists_is_the_first_line_of_a_command_s_own_help(command: str) -> None:
    _, loaded, _ = PROGRAM.resolve_command(CONTEXT, [command])
    assert PROGRAM.commands[command].help == loaded.help.partition("\n")[0]


def test_commands_of_commands_take_h(run) -> None:
    code, out, _ = run("data", "describe", "-h")
    assert code == 0
    assert "data describe" in out


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"], ["version"], ["trian"], []], ids=" ".join)
def test_help_and_version_do_without_torch(words: list[str]) -> None:
    script = "import sys\nfrom fedem.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
    script += "print([name for name in ('torch', 'numpy', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    *said, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    expected = {"trian": "Did you mean 'train'?", "--version": fedem.__version__, "version": fedem.__version__}
    assert expected.get(" ".join(words), "Train a federation and write its run") in "\n".join([*said, done.stderr])


def test_methods_are_listed_within_eighty_columns(run) -> None:
    code, out, err = run("methods")
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    words = " ".join(out.split())
    for name, row in fedem.METHODS.items():
        assert f"\n {name} " in out
        assert row.summary in words
        assert row.paper in words
        assert all(word in words for part in (row.personal, row.sent, row.unseen) for word in part.split())


@pytest.mark.parametrize("name", fedem.METHODS)
def test_a_method_is_told_in_full(run, name: str) -> None:
    code, out, err = run("methods", name)
    assert (code, err) == (0, "")
    row, words = fedem.METHODS[name], " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())
    for fact in (row.title, row.summary, row.paper, row.personal, row.sent, row.unseen, row.algorithm.__module__):
        assert fact in words
    for key in names_of(row.algorithm, row.mixer):
        assert f" {key} " in words
    told = shipped(name)
    for data in DATA:
        config = fedem.Config.build({"method": {"name": name}, "data": {"name": data}})
        values = told.get(data, told["any data"])
        assert values["schedule.learning_rate"] == config.schedule.learning_rate
        assert values["solver.name"] == config.name("solver")
    usual = told.pop("any data")["schedule.learning_rate"]
    shown = words.partition("schedule.learning_rate ")[2]
    assert shown.split()[0] == str(usual)
    for data, values in told.items():
        rate = values["schedule.learning_rate"]
        assert (re.search(rf"{re.escape(str(rate))} for [a-z0-9, ]*{data}", shown) is None) == (rate == usual)


def test_settings_are_told_with_defaults_ranges_and_meanings(run) -> None:
    _, out, _ = run("methods", "ditto")
    assert "pull 0.1 at least 0 lambda; 0 trains each client's model alone." in " ".join(out.split())
    _, out, _ = run("methods", "fedem")
    assert "initial_weights random random or uniform" in " ".join(out.split())
    assert "Mixture of Distributions, NeurIPS 2021." in " ".join(out.split())
    assert settings_of(fedem.METHODS["apfl"].algorithm)[1].default == "true"
    _, out, _ = run("methods", "fedavg+")
    assert "run.fine_tune_epochs 1" in " ".join(out.split())
    _, alias, _ = run("methods", "hypcluster")
    assert alias == run("methods", "ifca")[1]


def test_python_m_fedem_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "fedem", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fedem.__version__
