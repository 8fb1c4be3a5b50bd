"""What the README shows runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pandas
import pytest
from shops import make_shops
from torch import nn

import fedem
from fedem import cli

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs, targets = np.random.default_rng(0).normal(size=(30, 20)).astype(np.float32), np.arange(30) % 10
    names = {
        "nn": nn,
        "new_inputs": inputs,
        "new_targets": targets % 2,
        "federation": fedem.Federation.from_clients([(inputs, targets)] * 3),
        "frame": pandas.DataFrame(make_shops()),
        "new_frame": pandas.DataFrame(make_shops(2, seed=1)),
    }
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert names["personal"].predict(inputs).shape == (30, 2)
    assert (tmp_path / "my-run" / "summary.json").exists()


def test_the_commands_are_understood(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every ``fedem ...`` line parses: each option exists and takes such a value."""
    lines = re.findall(r"^fedem .*$", README, flags=re.MULTILINE)
    assert len(lines) >= 7
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        cli.typer.main.get_command(cli.app).make_context("fedem", words[:1], resilient_parsing=False)
        command = cli.typer.main.get_command(cli.app).commands[words[0]]
        if words[0] == "data":
            words, command = words[1:], command.commands[words[1]]
        command.make_context(words[0], words[1:])


def test_the_two_commands_are_those_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for goal in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{goal}:", makefile, flags=re.MULTILINE)
