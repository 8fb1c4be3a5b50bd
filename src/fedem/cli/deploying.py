"""``fedem deploy``: folders for ``flwr run``, and trials of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedem.cli.options import Data, OwnClientColumn, OwnTargetColumn, Quiet, Rounds, data_section, given
from fedem.config import Config, parse_assignment, read_toml, unbound
from fedem.deploy.plan import Plan
from fedem.deploy.starting import write_app
from fedem.methods import METHODS
from fedem.report.console import console, waiting
from fedem.sections import Layer, Sections

group = typer.Typer(help="Training over a network, behind a Flower server.", no_args_is_help=True)


@group.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="A TOML file, such as a run's config.toml.")] = None,
    data: Data = None,
    target_column: OwnTargetColumn = None,
    client_column: OwnClientColumn = None,
    method: Annotated[str | None, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = None,
    rounds: Rounds = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting (fedem settings): section.key=value. May be repeated."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Make a folder that `flwr run` takes: the plan that all sides agree on, and an app of a few lines.

    The data are a sample that says what columns and classes there are; they are not copied.

    Examples:
      fedem deploy init hospitals --data sample.csv --target-column outcome --client-column hospital

    """
    asked: Sections = {
        "run": given(rounds=rounds),
        "method": given(name=method),
        "data": data_section(data, target_column, client_column),
    }
    options: list[Layer] = [asked, *map(parse_assignment, settings or [])]
    chosen = Config.build(unbound(read_toml(config), *options) if config else {}, *options)
    with waiting("Making the plan", quiet):
        write_app(folder, Plan.make(chosen, chosen.make_data()))
    console.print(f"App folder: {folder}", soft_wrap=True, highlight=False)
