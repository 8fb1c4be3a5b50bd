"""The page of conclusions says nothing that no other page has measured."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("docs/leaderboard.md", "docs/results.md", "experiments/table2/README.md", "experiments/table3/README.md")
FIGURE = re.compile(r"[-+]?\d[\d,]*\.\d+(?: ±\d+\.\d+)?")


def test_every_figure_of_the_conclusions_is_on_a_page_of_results() -> None:
    known = {found for path in SOURCES for found in FIGURE.findall((ROOT / path).read_text(encoding="utf-8"))}
    # A page may have a deviation behind what is concluded from.
    known |= {figure.partition(" ±")[0] for figure in known}
    said = FIGURE.findall((ROOT / "docs" / "conclusions.md").read_text(encoding="utf-8"))
    assert len(said) >= 40
    assert not [figure for figure in said if figure not in known]


def test_every_question_has_figures() -> None:
    _, *questions = (ROOT / "docs" / "conclusions.md").read_text(encoding="utf-8").split("\n## ")
    assert len(questions) >= 6
    for question in questions:
        assert len(FIGURE.findall(question)) >= 2, question.splitlines()[0]
