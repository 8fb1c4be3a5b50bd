"""``fedem data describe``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedem.checkpoint import write_atomically
from fedem.cli.options import OwnClientColumn, OwnTargetColumn, Quiet, data_section
from fedem.config import Config, parse_assignment
from fedem.errors import UserError
from fedem.report.clients import ENDINGS, draw_clients
from fedem.report.console import console, waiting, writing
from fedem.report.described import describe as describe_data
from fedem.report.described import labels_table, remarks, sizes_table
from fedem.sections import Sections


def describe(
    data: Annotated[str, typer.Argument(help="A data set's name, or a file or folder of your own.")],
    target_column: OwnTargetColumn = None,
    client_column: OwnClientColumn = None,
    seed: Annotated[int, typer.Option(help="Decides partition and split, as in training.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting (fedem settings): section.key=value. May be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also draw the clients, to this file (.png or .svg).")] = None,
    quiet: Quiet = False,
) -> None:
    """Describe a data set's clients: sizes, labels, how much they differ, and what is made of a table's columns."""
    if out is not None and out.suffix.removeprefix(".") not in ENDINGS:
        raise UserError(f"--out is {out}; allowed: a file ending in .{' or .'.join(ENDINGS)}.")
    asked: Sections = {"data": data_section(data, target_column, client_column), "run": {"seed": seed}}
    config = Config.build(asked, *map(parse_assignment, settings or []))
    with waiting("Making the data", quiet):
        found = describe_data(config.make_data(), Path(data).name)
    if not quiet:
        console.print(sizes_table(found))
        if found.counts is not None:
            console.print(labels_table(found))
        for line in remarks(found):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    if out is not None:
        with writing(out):
            write_atomically(out, draw_clients(found, out.suffix.removeprefix(".")))
        console.print(f"Picture: {out}", highlight=False, soft_wrap=True)
