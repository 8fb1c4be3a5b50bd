"""What needs no run: ``fedem methods``, ``fedem settings``, ``fedem graphs`` and ``fedem version``."""

from __future__ import annotations

from typing import Annotated

import typer

from fedem.cli.options import given
from fedem.core import VERSION
from fedem.core.errors import UserError
from fedem.methods import resolve_method
from fedem.report.console import console, waiting
from fedem.report.reference import (
    describe,
    graph_pages,
    graphs_table,
    method_pages,
    methods_table,
    section_pages,
    sections_pages,
    settings_page,
)
from fedem.runs.config import Config, parse_assignment


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, to be told all of it.", show_default=False)] = None,
) -> None:
    """List the methods; with a NAME, tell all of one: its origin, its settings, and what is shipped with it."""
    if name is None:
        console.print(methods_table())
        console.print("fedem methods NAME tells a method's settings.", highlight=False)
        return
    for page in method_pages(resolve_method(name)):
        console.print(page, highlight=False)


def settings(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[SECTION[.NAME]]", help="One section, or one name in it.", show_default=False),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="All sections as a page of documentation.")] = False,
) -> None:
    """List the sections of settings; with a SECTION, tell all that can be set there: --set section.key=value.

    Examples:
      fedem settings run

      fedem settings schedule.step

    """
    if markdown:
        if name is not None:
            raise UserError(f"--markdown is for all sections, but {name!r} was asked for; allowed: one of the two.")
        typer.echo(settings_page(), nl=False)
        return
    for page in sections_pages() if name is None else section_pages(name):
        console.print(page, highlight=False)


def graphs(
    name: Annotated[str | None, typer.Argument(help="One graph, to be told all of it.", show_default=False)] = None,
    clients: Annotated[
        int | None, typer.Option(help="Build it for so many clients, and tell how fast they agree.", min=2)
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides whatever is random.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the graph: graph.key=value. May be repeated.")
    ] = None,
) -> None:
    """List the graphs over which clients average without a server; with a NAME, tell all of one.

    Examples:
      fedem graphs erdos_renyi --clients 300

      fedem graphs ring --clients 20 --set graph.weights=metropolis --set graph.link_failure=0.1

    """
    if name is None:
        console.print(graphs_table())
        console.print("fedem graphs NAME tells a graph's settings.", highlight=False)
        return
    config = Config.build({"graph": given(name=name)}, *map(parse_assignment, settings or []))
    topology = config.graph
    if topology is None:
        console.print("none: clients talk to a server, or to nobody.", highlight=False)
        return
    if clients is None:
        for page in graph_pages(name):
            console.print(page, highlight=False)
        return
    with waiting("Finding the mixing matrix", quiet=False):
        table = describe(topology, clients, seed)
    console.print(table, highlight=False)


def version() -> None:
    """Print the version."""
    console.print(VERSION, highlight=False)
