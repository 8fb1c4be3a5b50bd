"""The command line. It parses, calls the library and prints; nothing is computed here.

A command's module is imported once the command is called: what trains needs torch, which takes seconds to load, and
help and version do not.
"""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand, TyperGroup

from fedem.core import VERSION
from fedem.core.deadline import StoppedError
from fedem.core.errors import Notice, UserError

_STOPPED, _INTERRUPTED = 3, 130

# Where each command is, and the first line of its help, in the order in which the help lists them.
_COMMANDS = {
    "train": ("train.train", "Train a federation and write its run to a folder."),
    "compare": (
        "train.compare",
        "Train several methods on the same data and splits, for several seeds, and put their figures side by side.",
    ),
    "choose": (
        "choose.choose",
        "Find out what suits these clients, one model for all or models of their own, and train it.",
    ),
    "tune": ("train.tune", "Choose settings by the validation part; the test part is dropped before training."),
    "theory": (
        "train.theory",
        "Put the paper's convergence theorems to the test: how the means over K rounds fall with K.",
    ),
    "report": (
        "runs.report",
        "Put the results of runs on one page: tables, figures and what there is to see in them, the configuration.",
    ),
    "plot": (
        "runs.plot",
        "Write a report's figures to files of their own, OUT/NAME.svg; with several data sets, OUT/DATA/NAME.svg.",
    ),
    "methods": (
        "about.methods",
        "List the methods; with a NAME, show all of one: its origin, its settings, and what is shipped with it.",
    ),
    "graphs": (
        "about.graphs",
        "List the graphs over which clients average without a server; with a NAME, show all of one.",
    ),
    "settings": (
        "about.settings",
        "List the sections of settings; with a SECTION, show all that can be set there: --set section.key=value.",
    ),
    "show": ("runs.show", "Show a run's table again."),
    "check": (
        "check.check",
        "Read everything in a run's folder, or in a folder of runs: what is damaged or missing, and what follows.",
    ),
    "evaluate": (
        "runs.evaluate",
        "Make a run's data again and score its saved states afresh, or score new rows; the run stays as it is.",
    ),
    "personalize": (
        "runs.personalize",
        "Give clients unseen in training a model of their own, by the method's rule; what others share stays as it is.",
    ),
    "predict": (
        "runs.predict",
        "Predict with each client's own mixture: classes and their probabilities, or means for regression.",
    ),
    "export": (
        "runs.export",
        "Write a client's model to files: to load again, or to use where fedem is not installed.",
    ),
    "version": ("version", "Print the version."),
    "data": ("data.data_group", "Public data sets: what there is, and how to get it."),
    "experiment": ("train.experiment_group", "The paper's tables and figures: list, run, status, table, board, pages."),
    "peer": (
        "deploy.peer_group",
        "Train with peers until the plan's rounds are done; the same command again goes on where this client was.",
    ),
    "deploy": ("deploy.deploy_group", "Training over a network, behind a Flower server."),
}


class _Commands(TyperGroup):
    """Knows of its commands what help lists, and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        listed = {name: TyperCommand(name, help=text) for name, (_, text) in _COMMANDS.items()}
        super().__init__(**attributes | {"commands": listed})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, further = super().resolve_command(ctx, args)
        return name, command if name is None else _load(name), further


def _load(name: str) -> click.Command:
    """Import a command."""
    module, _, attribute = f"{__name__}.{_COMMANDS[name][0]}".rpartition(".")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Commands,
    help="Federated learning of personalised models as mixtures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> None:
    """Print the version."""
    typer.echo(VERSION)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _start(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Refuse several processes where they would all do the same, into the same files."""
    command = context.invoked_subcommand
    if command in ("train", "version"):
        return
    from fedem.engines.processes import number_started

    if (started := number_started()) > 1:
        raise UserError(f"fedem {command} was started as {started} processes; allowed: one, or fedem train.")


def _noting(show: Callable[..., None]) -> Callable[..., None]:
    """Return what shows a warning: what the user is meant to read as a note, others as ``show`` does."""

    def shown(message: Warning | str, category: type[Warning], *where: Any, **further: Any) -> None:
        if issubclass(category, Notice):
            typer.echo(f"note: {message}", err=True)
        else:
            show(message, category, *where, **further)

    return shown


def main() -> None:
    """Run the command line: errors are one sentence, exit code 2, no traceback."""
    warnings.showwarning = _noting(warnings.showwarning)
    try:
        # When it is interrupted, typer returns this code instead of raising.
        if app(standalone_mode=False) == _INTERRUPTED:
            raise KeyboardInterrupt
    except click.exceptions.NoArgsIsHelpError as error:
        typer.echo(error.format_message())
        sys.exit(2)
    except (click.ClickException, UserError, OSError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        end = "." if isinstance(error, OSError) else ""
        typer.echo(f"error: {message}{end}", err=True)
        sys.exit(2)
    except StoppedError as stop:
        typer.echo(f"{stop} The same command goes on with it, train, compare and tune with --resume.", err=True)
        sys.exit(_STOPPED)
    except (KeyboardInterrupt, click.Abort):
        typer.echo("Stopped; a run that was going on can be continued with --resume.", err=True)
        sys.exit(_INTERRUPTED)
