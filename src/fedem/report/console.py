"""What the command line prints: tables, bars, and the two consoles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedem.errors import UserError
from fedem.report.tables import comparison, metric_of, remarks, states_table, unfinished
from fedem.runs import RunFolder

console = Console()
errors = Console(stderr=True)


def show_run(folder: RunFolder) -> None:
    """Print a run's table, with its baselines; or where it stands when it is not complete."""
    summary = folder.summary()
    if summary is None:
        console.print(unfinished(folder), highlight=False)
        return
    others = [other for place in folder.baselines() if (other := place.summary()) is not None]
    print_summary([summary, *others])


def print_summary(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of several runs, and what else there is to say of the first."""
    console.print(comparison(summaries))
    if summaries[0].get("best"):
        console.print(states_table(summaries[0]))
    for line in remarks(summaries[0]):
        console.print(line, highlight=False)


@contextmanager
def progress(title: str, rounds: int, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Show a bar that follows the rounds; yields what is to be told of each."""
    if quiet:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[score]}"), console=errors) as bar:
        task = bar.add_task(f"{title:8s}", total=rounds, score="")

        def listen(record: dict[str, Any]) -> None:
            metric = metric_of(record)
            if f"test_{metric}" in record:
                bar.update(task, score=f"test {metric.replace('_', ' ')} {record[f'test_{metric}']:.4f}")
            bar.update(task, completed=record["round"])

        yield listen


@contextmanager
def waiting(what: str, quiet: bool) -> Iterator[None]:
    """Show that something is going on."""
    if quiet:
        yield
        return
    with errors.status(f"{what} ..."):
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into an error for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}.") from None
