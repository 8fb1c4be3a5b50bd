"""``fedem experiment``: list, run, status, table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedem.checkpoint import write_atomically
from fedem.cli.options import Quiet, Rounds, TrainingDevice, given, listed, read_seeds
from fedem.errors import UserError
from fedem.experiments import Entry, Experiment, LatestData, check, find, plan, read, sort_settings, tabulate, work_off
from fedem.experiments import listed as names_in
from fedem.report.comparisons import cells_progress
from fedem.report.console import console, errors, waiting, writing
from fedem.report.experiments import experiment_markdown, experiment_table, experiments_table, status_table

group = typer.Typer(help="The paper's tables and figures, declared: list, run, status, table.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The experiment; fedem experiment list tells them.", show_default=False)]
Place = Annotated[Path, typer.Option("--experiments", help="The folder of the experiments.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Leave out other choices: axis=label,label. May be repeated.")
]
Data = Annotated[str | None, typer.Option(help="Short for --only data=...: data sets, with commas between them.")]
Seeds = Annotated[str | None, typer.Option(help="How many seeds, or which: 0,4,7; as declared when not given.")]
Asked = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting, of all runs or of those with a label: EMNIST:partition.share=0.7."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A short trial of the whole: its figures mean nothing.")]
Out = Annotated[Path | None, typer.Option(help="Where all runs are; runs/experiments/NAME when not given.")]


@group.command("list")
def list_experiments(place: Place = Path("experiments")) -> None:
    """List the experiments."""
    console.print(experiments_table([read(place / name) for name in names_in(place)]))


@group.command()
def run(
    name: Name,
    data: Data = None,
    only: Only = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    device: TrainingDevice = None,
    settings: Asked = None,
    quick: Quick = False,
    out: Out = None,
    place: Place = Path("experiments"),
    quiet: Quiet = False,
) -> None:
    """Train the runs that are not complete, and print our figures beside the paper's.

    All runs are checked before the first is trained. It may be stopped at any time and started again; several processes
    may share the work.

    Examples:
      fedem experiment run table2 --data Synthetic --seeds 3

      fedem experiment run table2 --only method=FedEM,FedAvg --set EMNIST:partition.share=0.7 --device cuda

    """
    experiment, entries, folder = _planned(name, place, data, only, seeds, rounds, device, settings, quick, out)
    pending = [entry for entry in entries if not entry.is_complete]
    if not quiet and len(pending) < len(entries):
        errors.print(f"{len(entries) - len(pending)} of {len(entries)} runs are complete already.", highlight=False)
    made = LatestData()
    with waiting("Making the data, checking every run", quiet):
        check(entries, made)
    with cells_progress(errors, pending, quiet) as watch:
        failed = work_off(pending, watch, made)
    _write(experiment, entries, folder)
    if not quiet:
        console.print(experiment_table(experiment, tabulate(experiment, entries)))
    if failed:
        raise UserError(" ".join(_told(failed)))
    left = sum(not entry.is_complete for entry in entries)
    if left:
        errors.print(f"{left} runs are being trained by other processes.", highlight=False)
    console.print(f"Experiment: {folder}", soft_wrap=True, highlight=False)


@group.command()
def status(
    name: Name,
    data: Data = None,
    only: Only = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    settings: Asked = None,
    quick: Quick = False,
    out: Out = None,
    place: Place = Path("experiments"),
) -> None:
    """Tell how far each run has come."""
    _, entries, _ = _planned(name, place, data, only, seeds, rounds, None, settings, quick, out)
    console.print(status_table(entries))


@group.command()
def table(
    name: Name,
    data: Data = None,
    only: Only = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    settings: Asked = None,
    quick: Quick = False,
    out: Out = None,
    place: Place = Path("experiments"),
) -> None:
    """Print our figures, of the runs that are complete, beside the paper's; nothing is trained."""
    experiment, entries, _ = _planned(name, place, data, only, seeds, rounds, None, settings, quick, out)
    console.print(experiment_table(experiment, tabulate(experiment, entries)))


def _planned(
    name: str,
    place: Path,
    data: str | None,
    only: list[str] | None,
    seeds: str | None,
    rounds: int | None,
    device: str | None,
    settings: list[str] | None,
    quick: bool,
    out: Path | None,
) -> tuple[Experiment, list[Entry], Path]:
    experiment = find(place, name)
    chosen: dict[str, list[str]] = {}
    for axis, labels in [*map(_only, only or []), *([] if data is None else [("data", listed(data))])]:
        chosen.setdefault(axis, []).extend(labels)
    shared, own = sort_settings(experiment, settings or [])
    numbers = read_seeds(seeds if seeds is not None else "1" if quick else str(experiment.seeds))
    folder = out or Path("runs") / "experiments" / (f"{name}-quick" if quick else name)
    asked = [{"run": given(rounds=rounds, device=device)}, *shared]
    return experiment, plan(experiment, folder, numbers, chosen, asked, own, quick), folder


def _told(failed: dict[str, str]) -> Iterator[str]:
    """Say what went wrong, once for all runs with which the same did."""
    for message in dict.fromkeys(failed.values()):
        titles = [title for title, own in failed.items() if own == message]
        others = f" and {len(titles) - 1} other runs" if len(titles) > 1 else ""
        yield f"{titles[0]}{others}: {message}"


def _only(text: str) -> tuple[str, list[str]]:
    axis, equals, labels = text.partition("=")
    if not equals or not labels.strip():
        raise UserError(f"--only got {text!r}; allowed: axis=label,label, such as method=FedEM,FedAvg.")
    return axis.strip(), listed(labels)


def _write(experiment: Experiment, entries: list[Entry], folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        content = experiment_markdown(experiment, tabulate(experiment, entries))
        write_atomically(folder / "table.md", content.encode())
