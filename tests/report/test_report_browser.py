"""A report in a real browser: on a screen, on a phone, in the dark and on paper."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Tab, browsing
from report_runs import METHODS, compared, trained

from fedem.report.page import build_page
from fedem.report.pictures import FIGURES
from fedem.report.runs import gather

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
PHONE = 390
# What is to be seen of each figure: its title, its sentence and the size of its drawing.
SEEN = """[...document.querySelectorAll("figure")].map(figure => [
  figure.querySelector("h3").innerText,
  figure.querySelector(".see").innerText,
  Math.min(...["width", "height"].map(side => figure.querySelector("svg").getBoundingClientRect()[side])),
])"""
HEADLINE = """[...document.querySelectorAll("#scores tbody tr")].map(row => row.cells[0].innerText)"""
# The colours of letters, on the page and in its drawings, and the ground below them.
COLOURS = """[
  ...["p.see", "td", "summary", "caption"].map(kind => getComputedStyle(document.querySelector(kind)).color),
  ...[...document.querySelector("figure").querySelectorAll("svg text")].map(text => getComputedStyle(text).fill),
  getComputedStyle(document.body).backgroundColor,
]"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two data sets, one of them with all figures."""
    folder = compared(tmp_path_factory.mktemp("runs") / "comparison")
    trained(folder / "other", "local", 0, data={"num_clients": 6}, unseen=0.0)
    page = folder.parent / "report.html"
    page.write_text(build_page(gather([folder])))
    return page


@pytest.fixture
def page(tab: Tab, report: Path) -> Tab:
    tab.prefer()
    tab.resize(1200)
    tab.open(report)
    return tab


def problems(tab: Tab) -> list[str]:
    """What went wrong, and whatever was loaded besides the page itself."""
    found = []
    for event in tab.events:
        told = event["params"]
        if event["method"] == "Network.requestWillBeSent" and told["type"] != "Document":
            found += [told["request"]["url"]] if not told["request"]["url"].startswith("data:") else []
        elif event["method"] == "Runtime.exceptionThrown":
            found.append(told["exceptionDetails"]["text"])
        elif event["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled"):
            found.append(json.dumps(told))
    return found


def luminance(colour: str) -> float:
    """Of the Web Content Accessibility Guidelines, from 0 to 1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_all_parts_are_shown(page: Tab) -> None:
    titles = page.ask(HEADLINE)
    assert titles.count("Local") == 2
    assert {"FedEM (M=3)", "FedAvg", "oracle"} <= set(titles)
    assert len(titles) == len(METHODS) + 1 + 2
    found = page.ask(SEEN)
    assert len([title for title, _, _ in found if "num_clients=14" in title]) == len(FIGURES)
    assert all("synthetic (" in title and sentence.endswith(".") for title, sentence, _ in found)
    assert min(size for _, _, size in found) > 100


def test_nothing_is_loaded_and_nothing_goes_wrong(page: Tab) -> None:
    assert problems(page) == []
    assert page.ask("document.scripts.length") == 0


@pytest.mark.parametrize("width", [PHONE, 800, 1200])
def test_a_page_is_no_wider_than_the_screen(page: Tab, width: int) -> None:
    page.resize(width)
    assert page.ask("document.documentElement.scrollWidth") == width
    page.ask('document.querySelectorAll("details").forEach(each => each.open = true)')
    assert page.ask("document.documentElement.scrollWidth") == width


def test_nothing_is_cut_off_at_1200_pixels(page: Tab) -> None:
    page.ask('document.querySelectorAll("details").forEach(each => each.open = true)')
    cut = '[...document.querySelectorAll(".wide, pre")].filter(each => each.scrollWidth > each.clientWidth).length'
    assert page.ask(cut) == 0


def test_letters_of_drawings_stay_legible_on_a_phone(page: Tab) -> None:
    page.resize(PHONE)
    heights = page.ask('[...document.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height)')
    assert min(heights) > 7


@pytest.mark.parametrize(("media", "scheme"), [("screen", "light"), ("screen", "dark"), ("print", "dark")])
def test_letters_stand_out_from_the_ground(page: Tab, media: str, scheme: str) -> None:
    page.prefer(media, scheme)
    *letters, ground = page.ask(COLOURS)
    assert len(letters) > 10
    assert (luminance(ground) < 0.1) == (media == "screen" and scheme == "dark")
    for colour in letters:
        dark, light = sorted((luminance(colour), luminance(ground)))
        assert (light + 0.05) / (dark + 0.05) > 4.5, (colour, ground)


def test_paper_has_the_configuration_and_nothing_to_click(page: Tab) -> None:
    visible = '[...document.querySelectorAll("details pre")].map(each => each.checkVisibility())'
    assert not any(page.ask(visible))
    page.prefer("print")
    assert all(page.ask(visible))
    assert page.ask('getComputedStyle(document.querySelector("nav")).display') == "none"
    assert base64.b64decode(page.call("Page.printToPDF")["data"]).startswith(b"%PDF")


def test_what_is_looked_for_would_be_found(tab: Tab, tmp_path: Path) -> None:
    place = tmp_path / "bad.html"
    place.write_text(
        '<!doctype html><meta name="viewport" content="width=device-width">'
        '<img src="http://127.0.0.1:9/elsewhere.png"><script>missing()</script><div style="width: 2000px">wide</div>'
    )
    tab.resize(PHONE)
    tab.open(place)
    found = problems(tab)
    assert "http://127.0.0.1:9/elsewhere.png" in found
    assert any("Uncaught" in line for line in found)
    assert tab.ask("document.documentElement.scrollWidth") > PHONE
