"""Names of columns, clients, classes and files that a console or a spreadsheet would take for something else."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest

import fedem
from fedem.report.console import display, figures_table, progress, simple_table, waiting
from fedem.runs.folder import RunFolder

Run = Callable[..., tuple[int, str, str]]
CLIENTS = ["[/b]a", "=cmd|' /C calc'!A0", "-x", "'@b [link=x]:smile:"]
NAMED = ["--client-column", "[bold]", "--target-column", "[/y]"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    size = draw.normal(size=80)
    labels, owners = np.where(size > 0, "=yes", "[/no]"), [CLIENTS[row % 4] for row in range(80)]
    columns = {"[/red]": size, "[b": draw.normal(size=80), "@k": ["[i]", "+1 a"] * 40, "[/y]": labels, "[bold]": owners}
    pandas.DataFrame(columns).to_csv(tmp_path / "[red]t.csv", index=False)
    return tmp_path / "[red]t.csv"


def test_markup_in_names_is_printed_as_it_is(run: Run, table: Path) -> None:
    fast = ["--rounds", "1", "--device", "cpu", "--set", "model.name=linear", "--baselines", "local"]
    commands = [
        (["data", "describe", table, *NAMED], ["[red]t.csv: samples of 4 clients", "[/no]"]),
        (["train", "--data", table, *NAMED, *fast, "--out", "[/b]x"], ["'[/y]': 2 classes", "Run folder: [/b]x"]),
        (["show", "[/b]x"], ["FedEM"]),
        (["predict", "[/b]x", "--data", table, "--out", "[p]p.csv"], ["80 predictions: [p]p.csv"]),
        (["evaluate", "[/b]x", "--data", table, "--out", "[e]e.csv"], ["'@b [link=x]:smile:"]),
        (["report", "[/b]x", "--out", "[r]r.html"], ["Report: [r]r.html"]),
    ]
    for words, expected in commands:
        code, told, err = run(*words)
        assert code == 0, (words, err)
        for text in expected:
            assert text in told + err, (text, told, err)
    assert [row["client"] for row in RunFolder(Path("[/b]x")).clients()] == sorted(CLIENTS)
    assert fedem.Result.load("[/b]x").names == tuple(sorted(CLIENTS))
    with Path("[p]p.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:2] == ["[bold]", "prediction"]
    assert {row[0] for row in rows} == {"[/b]a", "'=cmd|' /C calc'!A0", "'-x", "''@b [link=x]:smile:"}
    assert {row[1] for row in rows} <= {"'=yes", "[/no]"}


def test_titles_and_headings_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    framed = figures_table("[/b] title", "[/i]head", ":smile:")
    framed.add_row("[red]", "1")
    display(framed, simple_table("[/u]", rows=[["[bold]x"]], title="[/t]"), "[/p] text")
    with progress("[/m]", 1, quiet=False) as listen, waiting("[/w]", quiet=True):
        listen({"round": 1})
    told, err = capsys.readouterr()
    for text in ("[/b] title", "[/i]head", ":smile:", "[red]", "[/u]", "[bold]x", "[/t]", "[/p] text"):
        assert text in told
    assert "[/m]" in err
