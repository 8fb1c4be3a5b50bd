"""The page and the two commands that write it and its figures."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
import xml.etree.ElementTree
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest
import typer
from click.testing import Result as Outcome
from report_runs import METHODS, SEEDS, compared, gathered, regressed
from typer.testing import CliRunner

from fedem.cli.runs import plot, report
from fedem.core.errors import UserError
from fedem.report import page as page_module
from fedem.report.page import build_page
from fedem.report.pictures import FIGURES
from fedem.report.runs import gather

SHOWN = ("test_accuracy", "bottom_decile", "unseen_test_accuracy", "train_accuracy")
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """What is on a page; refuses one whose tags are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("runs") / "comparison")


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return build_page(gather([folder]))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def call(*words: object) -> Outcome:
    app = typer.Typer()
    app.command()(report)
    app.command()(plot)
    return CliRunner().invoke(app, list(map(str, words)))


def refusal(*words: object) -> str:
    outcome = call(*words)
    assert isinstance(outcome.exception, UserError), outcome.output
    return str(outcome.exception)


def test_ids_are_unique_and_every_reference_leads_somewhere(text: str, page: Page) -> None:
    names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(names) == len(set(names))
    wanted = [attributes[key] for _, attributes in page.tags for key in ("href", "xlink:href") if key in attributes]
    local = [place for place in wanted if place is not None and not place.startswith("data:")]
    assert local
    assert all(place.startswith("#") and place[1:] in names for place in local)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(names)


def test_nothing_is_loaded_from_elsewhere(text: str, page: Page) -> None:
    assert "http" not in text
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "img"}
    assert "@import" not in text
    assert "@font-face" not in text
    sources = [attributes[key] for _, attributes in page.tags for key in ("src", "srcset") if key in attributes]
    assert sources == []


def test_every_figure_has_a_title_a_sentence_and_a_drawing(text: str, page: Page) -> None:
    pieces = re.findall(r'<figure id="figure-(\w+)">(.*?)</figure>', text, re.DOTALL)
    assert [name for name, _ in pieces] == list(FIGURES)
    for name, piece in pieces:
        assert re.search(rf'<h3 id="{name}-title">[^<]+</h3>', piece)
        assert re.search(r'<p class="see">[^<]+\.</p>', piece)
        assert f'<svg role="img" aria-labelledby="{name}-title"' in piece
        # Text stays text.
        assert "<text" in piece


def test_the_headline_says_what_the_summaries_say(text: str, folder: Path) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", text[: text.index('<section id="figures">')], re.DOTALL)
    cells = {found[0]: found[1:] for row in rows if (found := re.findall(r"<td>(.*?)</td>", row))}
    assert len(cells) == len(METHODS) + 1
    titles = {"fedem": "FedEM (M=3)", "fedavg": "FedAvg", "local": "Local"}
    for method in METHODS:
        summaries = [json.loads((folder / f"{method}-seed{seed}/summary.json").read_text()) for seed in SEEDS]
        for cell, name in zip(cells[titles[method]], SHOWN, strict=False):
            values = [summary.get(name) for summary in summaries]
            if None in values:
                assert cell == "-"
            else:
                assert cell == f"{100 * statistics.fmean(values):.1f} ±{100 * statistics.stdev(values):.1f}"
    oracle = [json.loads((folder / f"fedem-seed{seed}/summary.json").read_text())["oracle_accuracy"] for seed in SEEDS]
    assert cells["oracle"][0].startswith(f"{100 * statistics.fmean(oracle):.1f} ±")


def test_colours_are_the_page_s_in_light_and_dark(text: str) -> None:
    style, drawings = re.search(r"<style>(.*?)</style>", text, re.DOTALL).group(1), text[text.index("<svg") :]
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    assert used
    light, dark = re.findall(r":root \{(.*?)\}", style)
    for declared in (light, dark):
        assert used <= set(re.findall(r"(--[\w-]+):", declared))
    assert "currentColor" in drawings
    assert "#20262c" not in drawings


def test_the_configuration_is_there_in_full(page: Page, folder: Path) -> None:
    whole = "\n".join(page.texts["pre"])
    for method in METHODS:
        assert (folder / f"{method}-seed0/config.toml").read_text().strip() in whole
    assert f"fedem train {folder / 'local-seed1/config.toml'}" in whole


def test_what_users_name_is_escaped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "FIGURES", {})
    data = gathered(folder)
    nasty = "<script>alert('&')</script>"
    runs = {"local": [dataclasses.replace(data.runs["local"][0], command=f"fedem {nasty}")]}
    named = dataclasses.replace(data.comparison, data=nasty)
    parsed = Page(build_page([dataclasses.replace(data, comparison=named, runs=data.runs | runs)]))
    assert not [tag for tag, _ in parsed.tags if tag == "script"]
    assert nasty in parsed.texts["h1"][0]
    assert f"fedem {nasty}" in "\n".join(parsed.texts["pre"])


def test_one_run_on_data_from_python_makes_a_page(tmp_path: Path) -> None:
    parsed = Page(build_page(gather([regressed(tmp_path / "run")])))
    assert "given: " in parsed.texts["h1"][0]


@pytest.mark.slow
def test_the_command_writes_the_page_the_same_each_time(tmp_path: Path, folder: Path, text: str) -> None:
    outcome = call("report", folder, "--out", tmp_path / "new/page.html")
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "new/page.html").read_text() == text
    assert "allowed: a file ending in .html" in refusal("report", folder, "--out", tmp_path / "page.pdf")
    assert "No folders are given" in refusal("report")


@pytest.mark.slow
def test_figures_are_files_of_their_own(tmp_path: Path, folder: Path) -> None:
    outcome = call("plot", folder, "--out", tmp_path / "all", "-q")
    assert outcome.exit_code == 0, outcome.output
    assert {path.name for path in (tmp_path / "all").iterdir()} == {f"{name}.svg" for name in FIGURES}
    for path in (tmp_path / "all").iterdir():
        assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")
    assert "Scores against rounds" in (tmp_path / "all/rounds.svg").read_text()
    for ending in ("png", "pdf"):
        assert call("plot", folder, "--figure", "clients", "--out", tmp_path, "--format", ending).exit_code == 0
    pixels = matplotlib.image.imread(tmp_path / "clients.png")
    assert min(pixels.shape[:2]) > 300
    assert (pixels[0, 0, :3] == 1).all()  # on white, wherever it is put
    assert (tmp_path / "clients.pdf").read_bytes().startswith(b"%PDF")


def test_figures_that_are_not_there_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "Did you mean 'rounds'?" in refusal("plot", folder, "--figure", "round")
    assert "Unknown format 'jpg'" in refusal("plot", folder, "--format", "jpg")
    single = [folder / f"fedavg-seed{seed}" for seed in SEEDS]
    told = refusal("plot", *single, "--figure", "rounds,simplex", "--out", tmp_path / "none")
    assert "nothing for simplex: simplex needs a mixture of three components" in told
    assert not (tmp_path / "none").exists()


def test_the_list_names_every_figure() -> None:
    outcome = call("plot", "--list")
    assert [line.split()[0] for line in outcome.output.splitlines()] == list(FIGURES)


def test_a_method_that_diverged_is_told_as_such(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "diverged")
    for seed in SEEDS:
        run = place / f"local-seed{seed}"
        summary = json.loads((run / "summary.json").read_text())
        gone = {key: None for key in summary if key.startswith(("test_", "train_", "bottom_"))}
        (run / "summary.json").write_text(json.dumps(summary | gone))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [
            {key: None if "_" in key and "bytes" not in key else value for key, value in line.items()} for line in lines
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        rows = (run / "clients.csv").read_text().splitlines()
        wide = len(rows[0].split(","))
        cut = [",".join([*row.split(",")[:3], *["nan"] * (wide - 3)]) for row in rows[1:]]
        (run / "clients.csv").write_text("\n".join([rows[0], *cut]) + "\n")
    found = build_page(gather([place]))
    Page(found)
    assert re.search(r"<tr><td>Local</td><td>failed: diverged</td><td>-</td>", found)
    assert "Failed, and so not ranked: Local." in found
