"""What needs no run: ``fedem methods``, ``fedem settings`` and ``fedem graphs``."""

from typing import Annotated

from typer import Argument, Option, echo

from fedem.cli.options import given
from fedem.core.errors import UserError
from fedem.methods import resolve_method
from fedem.report import reference
from fedem.report.console import display, waiting
from fedem.runs.config import Config, parse_assignment


def methods(name: Annotated[str | None, Argument(help="One method, to show all of it.")] = None) -> None:
    """List the methods; with a NAME, show all of one: its origin, its settings, and what is shipped with it."""
    if name is None:
        display(reference.methods_table(), "fedem methods NAME shows a method's settings.")
    else:
        display(*reference.method_pages(resolve_method(name)))


def settings(
    name: Annotated[str | None, Argument(metavar="[SECTION[.NAME]]", help="One section, or one name in it.")] = None,
    markdown: Annotated[bool, Option("--markdown", help="All sections as a page of documentation.")] = False,
) -> None:
    """List the sections of settings; with a SECTION, show all that can be set there: --set section.key=value.

    Examples:
      fedem settings run

      fedem settings schedule.step
    """
    if markdown:
        if name is not None:
            raise UserError(f"--markdown is for all sections, but {name!r} was asked for; allowed: one of the two.")
        echo(reference.settings_page(), nl=False)
        return
    display(*(reference.sections_pages() if name is None else reference.section_pages(name)))


def graphs(
    name: Annotated[str | None, Argument(help="One graph, to show all of it.")] = None,
    clients: Annotated[
        int | None, Option(help="Build it for this number of clients, and show how fast they agree.", min=2)
    ] = None,
    seed: Annotated[int, Option(help="Decides whatever is random.")] = 0,
    settings: Annotated[
        list[str] | None, Option("--set", help="A setting of the graph: graph.key=value. May be repeated.")
    ] = None,
) -> None:
    """List the graphs over which clients average without a server; with a NAME, show all of one.

    Examples:
      fedem graphs erdos_renyi --clients 300

      fedem graphs ring --clients 20 --set graph.weights=metropolis --set graph.link_failure=0.1
    """
    if name is None:
        display(reference.graphs_table(), "fedem graphs NAME shows a graph's settings.")
        return
    topology = Config.build({"graph": given(name=name)}, *map(parse_assignment, settings or [])).graph
    if topology is None:
        display("none: clients talk to a server, or to nobody.")
    elif clients is None:
        display(*reference.graph_pages(name))
    else:
        with waiting("Finding the mixing matrix", quiet=False):
            found = reference.describe(topology, clients, seed)
        display(found)
