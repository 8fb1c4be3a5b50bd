"""The command line tells of itself: its commands, the methods and their settings."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import fedem
from fedem.core.settings import names_of
from fedem.data import DATA
from fedem.report.reference import settings_of, shipped


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "compare",
        "tune",
        "theory",
        "report",
        "plot",
        "methods",
        "settings",
        "graphs",
        "show",
        "evaluate",
        "personalize",
        "predict",
        "export",
        "deploy",
        "peer",
        "version",
    ],
)
def test_every_command_has_help_that_teaches(run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Usage" in out


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
