"""The leaderboard's page: what is on it, that its commands are right, and that the committed one is up to date."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from kept import declare_made_up, keep

from fedem.cli.options import read_seeds
from fedem.report.board import board_page
from fedem.studies.board import gather
from fedem.studies.experiments import find

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "leaderboard.md"
NOTES = """
about = "All on a made-up machine."

[partition]
Here = "Yes, the same."

[why.Here]
FedAvg = "Because it is made up."

[[published]]
source = "Somebody"
partition = "other clients"
figures = { Here = { Theirs = [71.5], FedEM = [70.3, 60] } }
"""


def section(page: str, data: str) -> str:
    (found,) = (part for part in page.split("\n### ") if part.startswith(f"Table 9, {data}\n"))
    return found


def test_a_page_has_figures_costs_notes_and_commands(tmp_path: Path) -> None:
    made_up, out = declare_made_up(tmp_path, NOTES), tmp_path / "made-up/results"
    keep(made_up, out, "Here", "FedEM", [0.7, 0.7, 0.7, 0.7])
    keep(made_up, out, "Here", "FedEM", [0.72, 0.72, 0.72, 0.72], seed=1)
    keep(made_up, out, "Here", "FedAvg", [0.75, 0.65, 0.85, 0.75], data_noise_scale=0.5, run_device="cuda")
    keep(made_up, out, "There", "FedEM", [0.5] * 5)
    page = board_page(gather(tmp_path))
    assert "**3 of 6 cells run.**" in page
    assert "3 of 6 cells run. All on a made-up machine.\n" in page
    here, there = section(page, "Here"), section(page, "There")
    assert "2 of 3 cells run." in here
    assert "| FedEM | 0, 1 | 71.0 ±1.4 | 70.0 |  | 71.0 ±1.4 |  | 0.250 | cpu | 2.000 | 3.500 |" in here
    assert "| FedAvg | 0 | 75.0 | 60.0 |  | 65.0 | 50.0 | 0.250 | cpu | 2.000 | 3.500 |" in here, "other data: no pair"
    assert "| Local |  |  |  |  |  |  |  |  |  |  |" in here
    assert here.index("| FedAvg |") < here.index("| FedEM |") < here.index("| Local |")
    assert "- FedAvg (+15.0, +15.0): Because it is made up.\n" in here
    assert "- FedEM" not in here, "within a point"
    assert "**Is the paper's partition ours?** Yes, the same.\n" in here
    assert "| Somebody | Theirs 71.5, FedEM 70.3 / 60.0 | other clients |" in here
    assert (
        "fedem experiment run made-up --data Here --only method=FedAvg --seeds 1 --set data.noise_scale=0.5"
        " --device cuda\n" in here
    )
    assert "fedem experiment run made-up --data Here --only method=FedEM --seeds 2\n" in here
    assert "fedem experiment run made-up --data Here --only method=Local\n" in here
    assert "- FedEM (-20.0, -10.0): not explained yet.\n" in there
    assert "Published" not in there
    assert "fedem experiment run made-up --data There --only method=Local,FedAvg\n" in there


def test_differences_say_what_they_are_over(tmp_path: Path) -> None:
    made_up, out = declare_made_up(tmp_path), tmp_path / "made-up/results"
    for seed, score in {0: 0.6, 1: 0.7}.items():
        keep(made_up, out, "Here", "FedEM", [score] * 4, seed)
        keep(made_up, out, "Here", "FedAvg", [score + 0.1 * (seed + 1)] * 4, seed)
    keep(made_up, out, "Here", "Local", [0.5, 0.7, 0.5, 0.5])
    here = section(board_page(gather(tmp_path)), "Here")
    assert "| +15.00 ±5.00 (2 seeds) |" in here
    assert "| -5.00 ±5.00 (4 clients) |" in here


def test_the_best_form_of_fedem_stands_beside_the_best_of_the_others(tmp_path: Path) -> None:
    made_up, out = declare_made_up(tmp_path), tmp_path / "made-up/results"
    keep(made_up, out, "Here", "FedEM", [0.7, 0.7, 0.7, 0.7])
    assert "first?" not in section(board_page(gather(tmp_path)), "Here"), "nothing to compare it with"
    keep(made_up, out, "Here", "Local", [0.5, 0.5, 0.5, 0.5])
    keep(made_up, out, "Here", "FedAvg", [0.65, 0.7, 0.65, 0.7])
    here = section(board_page(gather(tmp_path)), "Here")
    said = "Yes: FedEM (70.0). Of the other methods FedAvg (67.5) comes next: -2.50 ±1.44 (4 clients).\n"
    assert f"**Is a form of FedEM first?** {said}" in here
    assert "first?" not in section(board_page(gather(tmp_path)), "There")


@pytest.mark.parametrize(
    ("scores", "distance"),
    [
        ([0.6, 0.6, 0.5, 0.5], "+5.00 ±2.89 (4 clients)."),
        ([0.6, 0.6, 0.6, 0.22], "+0.50 ±9.50 (4 clients), within the standard error."),
    ],
)
def test_it_is_said_where_another_method_is_ahead(scores: list[float], distance: str, tmp_path: Path) -> None:
    made_up, out = declare_made_up(tmp_path), tmp_path / "made-up/results"
    keep(made_up, out, "Here", "FedEM", [0.5] * 4)
    keep(made_up, out, "Here", "FedAvg", scores)
    said = f"({100 * sum(scores) / 4:.1f}) is ahead of the best form, FedEM (50.0): {distance}\n"
    assert f"**Is a form of FedEM first?** No: FedAvg {said}" in section(board_page(gather(tmp_path)), "Here")


def test_seeds_are_named_as_the_option_takes_them(tmp_path: Path) -> None:
    made_up, out = declare_made_up(tmp_path), tmp_path / "made-up/results"
    keep(made_up, out, "Here", "FedEM", [0.5] * 4, seed=2)
    for seed in (1, 4):
        keep(made_up, out, "Here", "FedAvg", [0.5] * 4, seed)
    here = section(board_page(gather(tmp_path)), "Here")
    assert "--only method=FedEM --seeds 2,\n" in here
    assert "--only method=FedAvg --seeds 1,4\n" in here


def test_a_run_that_failed_is_told(run, tmp_path: Path) -> None:
    made_up, out = declare_made_up(tmp_path), tmp_path / "out"
    keep(made_up, out, "Here", "FedEM", [0.5] * 4)
    entry = keep(made_up, out, "Here", "FedAvg", [0.5] * 4, run_device="cuda")
    (entry.folder.path / "summary.json").unlink()
    (entry.folder.path / "failed.json").write_text('{"phrase": "diverged", "message": "It went wrong."}')
    code, page, _ = run("experiment", "board", "made-up", "--out", out, "--experiments", tmp_path)
    assert code == 0
    assert "| FedAvg |  | failed: diverged |" in page
    assert "FedAvg failed with seed 0: It went wrong." in page
    assert f"--only method=FedAvg --seeds 1 --device cuda --experiments {tmp_path}\n" in page, "where they are"
    assert "clients)" not in page, "nothing is compared with it"


def test_an_experiment_that_is_not_the_papers_is_called_by_its_name(tmp_path: Path) -> None:
    made_up, out = declare_made_up(tmp_path), tmp_path / "made-up/results"
    path = tmp_path / "made-up" / "experiment.toml"
    path.write_text(path.read_text().replace('place = "Table 9"\n', ""))
    keep(made_up, out, "Here", "FedEM", [0.5] * 4)
    page = board_page(gather(tmp_path))
    assert "\n## made-up: Made up\n" in page
    assert "\n### made-up, Here\n" in page


def test_a_folder_that_is_not_there_is_refused(run, tmp_path: Path) -> None:
    declare_made_up(tmp_path)
    code, page, err = run("experiment", "board", "made-up", "--out", tmp_path / "none", "--experiments", tmp_path)
    assert (code, page) == (2, "")
    assert "none holds no runs: there is no such folder" in err


def test_the_committed_page_is_what_the_command_prints(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, page, _ = run("experiment", "board")
    assert code == 0
    assert page == PAGE.read_text(encoding="utf-8"), "make it anew: fedem experiment board > docs/leaderboard.md"
    assert "leaderboard.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def _made() -> list[str]:
    blocks = re.findall(r"^These commands made the runs:\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("command", _made())
def test_a_command_on_the_page_makes_the_runs_that_are_kept(run, command: str) -> None:
    """With its settings the kept runs are accepted, all methods that it names with all its seeds."""
    words = shlex.split(command)
    assert words[:3] == ["fedem", "experiment", "run"]
    place = ROOT / "experiments"
    options = [*words[3:], "--experiments", place, "--out", place / find(place, words[3]).home / "results"]
    code, out, err = run("experiment", "status", *options)
    assert (code, err) == (0, "")
    methods = next(word for word in words if word.startswith("method=")).removeprefix("method=").split(",")
    seeds = read_seeds(words[words.index("--seeds") + 1])
    assert out.count("complete") == len(methods) * len(seeds)
    assert "to do" not in out
