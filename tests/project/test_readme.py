"""What the README and the page on the command line show runs as it stands; all documented commands parse."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module
from pathlib import Path
from pydoc import locate
from typing import Any

import numpy as np
import pandas
import pytest
from shops import make_shops
from torch import nn

import fedem
from fedem import cli

ROOT = Path(__file__).parents[2]
README, COMMANDS = ((ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "docs/command_line.md"))


def _run_python(page: str, count: int) -> dict[str, Any]:
    """Run the ``count`` blocks of Python on a page; return the names they leave."""
    inputs, targets = np.random.default_rng(0).normal(size=(30, 20)).astype(np.float32), np.arange(30) % 10
    names = {
        "fedem": fedem,
        "nn": nn,
        "new_inputs": inputs,
        "new_targets": targets % 2,
        "federation": fedem.Federation.from_clients([(inputs, targets)] * 3),
        "frame": pandas.DataFrame(make_shops()),
        "new_frame": pandas.DataFrame(make_shops(2, seed=1)),
    }
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == count
    for block in blocks:
        exec(block, names)
    return names


def test_the_readme_s_python_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = _run_python(README, count=1)
    assert names["personal"].predict(names["new_inputs"]).shape == (30, 2)
    assert (tmp_path / "my-run" / "summary.json").exists()


def test_the_page_s_python_code_runs() -> None:
    names = _run_python(COMMANDS, count=2)
    assert names["result"].predict("shop A", names["new_frame"]).shape == (24, 3)


@pytest.mark.parametrize(
    ("pages", "least"),
    [("README.md", 2), ("docs/command_line.md", 25), ("docs/*.md", 90), ("experiments/*/README.md", 30)],
)
def test_the_commands_are_understood(pages: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ``fedem ...`` line parses: each option exists and takes such a value."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pages))).replace("\\\n", "")
    lines = re.findall(r"^fedem .*$", text, flags=re.MULTILINE)
    assert len(lines) >= least
    monkeypatch.chdir(tmp_path)
    program: Any = cli.typer.main.get_command(cli.app)
    context = cli.click.Context(program)
    for line in lines:
        words = shlex.split(re.sub(r"\b(SEED|M)\b", "3", line), comments=True)[1:]
        command = program
        while words and words[0] in getattr(command, "commands", {}):
            name, command, words = command.resolve_command(context, words)
        command.make_context(name, words)


def test_the_names_that_pages_use_exist() -> None:
    """What the documents import, and every ``fedem.x.y`` they speak of, is there."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    names = set(re.findall(r"(?<![\w./-])fedem(?:\.\w+)+(?=[`(\s])", text))
    for module, imported in re.findall(r"^from (fedem[\w.]*) import (.+)$", text, flags=re.MULTILINE):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    assert len(names) >= 25
    assert not [name for name in sorted(names) if locate(name) is None]


def test_guides_and_the_gallery_import_public_names_only() -> None:
    """From the package or one of its subpackages, what it exports."""
    scripts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "gallery").glob("*.py")}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        scripts[page] = "\n".join(re.findall(r"^from fedem.*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    found = 0
    for path, script in scripts.items():
        for node in ast.walk(ast.parse(script)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedem":
                package = import_module(node.module or "")
                assert hasattr(package, "__path__"), f"{path.name} imports from {node.module}"
                assert {alias.name for alias in node.names} <= set(package.__all__), path.name
                found += 1
    assert found >= 10


def test_the_make_goals_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in (README, COMMANDS):
        goals = re.findall(r"^make ([\w-]+)", page, flags=re.MULTILINE)
        assert goals[:2] == ["train", "test"]
        for goal in goals:
            assert re.search(rf"^{goal}:", makefile, flags=re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900
