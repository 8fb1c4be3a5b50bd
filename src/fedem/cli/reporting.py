"""``fedem report`` and ``fedem plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedem.checkpoint import write_atomically
from fedem.cli.options import Quiet, listed
from fedem.errors import UserError, unknown
from fedem.report.console import console, waiting, writing
from fedem.report.gathered import gather
from fedem.report.page import build_page
from fedem.report.pictures import FIGURES
from fedem.report.pictures.canvas import FORMATS, alone, paint

_ALL = "all"
Folders = Annotated[
    list[Path] | None,
    typer.Argument(help="Folders of runs, with their baselines, of comparisons or of experiments.", show_default=False),
]


def report(
    folders: Folders = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Put what came out of runs on one page: tables, figures and what there is to see in them, the configuration.

    The page needs nothing else: no network, no scripts, no data. Each data set has its table and its figures; runs of
    a method are told apart by what differs in their settings, and by their seeds.

    Examples:
      fedem report runs/compare-synthetic

      fedem report runs/fedem runs/fedavg --out both.html

    """
    if out.suffix != ".html":
        raise UserError(f"--out is {out}; allowed: a file ending in .html.")
    sets = gather(folders or [])
    with waiting("Drawing", quiet):
        page = build_page(sets)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.encode())
    console.print(f"Report: {out}", soft_wrap=True, highlight=False)


def plot(
    folders: Folders = None,
    figure: Annotated[str, typer.Option(help="Names of figures, with commas between them, or all that apply.")] = _ALL,
    out: Annotated[Path, typer.Option(help="The folder to write them to.")] = Path("figures"),
    ending: Annotated[str, typer.Option("--format", help=f"One of: {', '.join(FORMATS)}.")] = "svg",
    names: Annotated[bool, typer.Option("--list", help="Tell which figures there are, and draw nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a report's figures to files of their own, OUT/NAME.svg; with several data sets, OUT/DATA/NAME.svg.

    Examples:
      fedem plot --list

      fedem plot runs/compare-synthetic --figure clients,weights --format pdf

    """
    if names:
        for name, kind in FIGURES.items():
            console.print(f"{name:12s} {kind.shows} (needs {kind.needs})", soft_wrap=True, highlight=False)
        return
    if ending not in FORMATS:
        raise unknown("format", ending, FORMATS)
    asked = list(FIGURES) if figure == _ALL else list(dict.fromkeys(listed(figure)))
    for name in asked:
        if name not in FIGURES:
            raise unknown("figure", name, (*FIGURES, _ALL))
    sets = gather(folders or [])
    drawn: dict[Path, bytes] = {}
    found: set[str] = set()
    with waiting("Drawing", quiet):
        for data in sets:
            for name in asked:
                if (picture := paint(FIGURES[name].painter, data)) is not None:
                    drawn[out / data.place / f"{name}.{ending}"] = alone(picture, ending)
                    found.add(name)
    missing = [name for name in asked if name not in found]
    if missing and figure != _ALL:
        needs = "; ".join(f"{name} needs {FIGURES[name].needs}" for name in missing)
        raise UserError(f"These runs have nothing for {', '.join(missing)}: {needs}.")
    with writing(out):
        for path, content in drawn.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    told = ", ".join(name for name in asked if name in found)
    console.print(f"Figures: {told} in {out}", soft_wrap=True, highlight=False)
