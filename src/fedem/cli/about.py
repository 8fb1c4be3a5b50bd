"""What needs no run: ``fedem methods`` and ``fedem version``."""

from __future__ import annotations

from typing import Annotated

import typer

from fedem import __version__
from fedem.methods import resolve_method
from fedem.report.console import console
from fedem.report.methods import method_pages, methods_table


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


def version() -> None:
    """Print the version."""
    console.print(__version__, highlight=False)
