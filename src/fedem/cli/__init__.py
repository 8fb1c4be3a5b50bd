"""The command line. It parses, calls the library and prints; nothing is computed here."""

import sys

import click
import typer

from fedem.cli import about, data, deploy, runs, train
from fedem.core.errors import UserError
from fedem.engines.processes import number_started
from fedem.report.console import aside, display

_INTERRUPTED = 130

app = typer.Typer(
    help="Federated learning of personalised models as mixtures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _start(context: typer.Context) -> None:
    """Refuse several processes where they would all do the same, into the same files."""
    command, started = context.invoked_subcommand, number_started()
    if started > 1 and command != train.train.__name__:
        raise UserError(f"fedem {command} was started as {started} processes; allowed: one, or fedem train.")


# In the order in which the help lists them.
_TRAINING = (train.train, train.compare, train.tune, train.theory, runs.report, runs.plot)
_ABOUT = (about.methods, about.graphs, about.settings)
_RUNS = (runs.show, runs.evaluate, runs.personalize, runs.predict, runs.export, about.version)
for command in (*_TRAINING, *_ABOUT, *_RUNS):
    app.command()(command)
data.data_group.command()(data.describe)
app.add_typer(data.data_group, name="data")
app.add_typer(train.experiment_group, name="experiment")
app.add_typer(deploy.peer_group, name="peer")
app.add_typer(deploy.deploy_group, name="deploy")


def main() -> None:
    """Run the command line: errors are one sentence, exit code 2, no traceback."""
    try:
        # When it is interrupted, typer returns this code instead of raising.
        if app(standalone_mode=False) == _INTERRUPTED:
            raise KeyboardInterrupt
    except click.exceptions.NoArgsIsHelpError as error:
        display(error.format_message())
        sys.exit(2)
    except (click.ClickException, UserError, OSError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        end = "." if isinstance(error, OSError) else ""
        aside(f"error: {message}{end}")
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        aside("Stopped; a run that was going on can be continued with --resume.")
        sys.exit(_INTERRUPTED)
