"""``fedem compare``."""

from __future__ import annotations

import shlex
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedem.cells import Cell, check_folder, plan, prepare, resolve_methods, sort_settings
from fedem.checkpoint import write_atomically
from fedem.cli.options import (
    ClientsPerRound,
    Data,
    OwnClientColumn,
    OwnTargetColumn,
    Quiet,
    Rounds,
    TrainingDevice,
    Unseen,
    data_section,
    given,
    listed,
    read_seeds,
)
from fedem.comparison import Comparison, summarize
from fedem.errors import UserError
from fedem.methods import METHODS
from fedem.report.comparisons import cells_progress, comparison_markdown, comparison_remarks, comparison_table
from fedem.report.console import console, errors, waiting, writing
from fedem.report.figures import draw
from fedem.runs import new_folder
from fedem.sections import Layer


def compare(
    data: Data = None,
    target_column: OwnTargetColumn = None,
    client_column: OwnClientColumn = None,
    methods: Annotated[
        str, typer.Option(help=f"Methods, with commas between them, or all. There are: {', '.join(METHODS)}.")
    ] = "local,fedavg,fedem",
    seeds: Annotated[
        str, typer.Option(help="How many seeds (3 is 0, 1 and 2), or which: 0,4,7. The seed 4 alone is written 4,")
    ] = "3",
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    unseen: Unseen = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting. Of all methods: data.num_clients=30, run..., batching..., model..., loss...; of one: "
            "fedem:schedule.learning_rate=0.5. May be given several times.",
        ),
    ] = None,
    device: TrainingDevice = None,
    out: Annotated[Path | None, typer.Option(help="Where all is written; runs/compare-DATA when not given.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the comparison in --out; what is complete is not run again.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods on the same data and splits, for several seeds, and put what comes out side by side.

    Each method has the settings shipped for it. OUT/METHOD-seedS is a run like any other. The table is saved as
    comparison.md, .csv and .json, and the test scores against the rounds as accuracy.png and .svg.

    Examples:
      fedem compare --methods local,fedavg,fedem --seeds 3 --unseen 0.2

      fedem compare --methods all --set fedem:schedule.learning_rate=0.5

      fedem compare --data mine.csv --out runs/mine --resume

    """
    if resume and out is None:
        raise UserError("--resume needs the folder of the comparison to go on with: give it as --out.")
    names = resolve_methods(listed(methods))
    asked: Layer = {
        "run": given(rounds=rounds, clients_per_round=clients_per_round, unseen=unseen, device=device),
        "data": data_section(data, target_column, client_column),
    }
    shared, own = sort_settings(settings or [], names)
    numbers = read_seeds(seeds)
    place = out or new_folder(Path("runs"), f"compare-{Path(data).stem if data else 'synthetic'}")
    cells = plan(place, names, numbers, [asked, *shared], own)
    check_folder(place, resume)
    with waiting("Making the data, checking every run", quiet):
        queue = deque(prepare(cells))
    for note in dict.fromkeys(entry.note for entry in queue if entry.note):
        errors.print(f"note: {note}", highlight=False)
    if not quiet and len(queue) < len(cells):
        errors.print(f"{len(cells) - len(queue)} of {len(cells)} runs are complete already.", highlight=False)
    failed: dict[str, str] = {}
    with cells_progress(errors, [entry.cell for entry in queue], quiet) as watch:
        while queue:
            # Once taken from the queue, a seed's data can go with its last run.
            entry = queue.popleft()
            try:
                with watch(entry.cell) as listener:
                    entry.carry_out(listener)
            except UserError as error:  # the other methods can go on without it
                failed.setdefault(entry.cell.method, f"{entry.cell.folder.path}: {error}")
    complete = [cell for cell in cells if cell.method not in failed]
    if complete:
        comparison = _save(complete, place)
        if not quiet:
            _print(comparison)
    if failed:
        raise UserError(f"{', '.join(failed)} left out of the table. {' '.join(failed.values())}")
    console.print(f"Comparison: {place}", soft_wrap=True, highlight=False)


def _print(comparison: Comparison) -> None:
    console.print(comparison_table(comparison))
    for line in comparison_remarks(comparison):
        console.print(line, highlight=False)


def _save(cells: Sequence[Cell], place: Path) -> Comparison:
    comparison = summarize(cells)
    command = shlex.join(["fedem", *(word for word in sys.argv[1:] if word != "--resume")])
    with writing(place):
        comparison.save(place, command)
        write_atomically(place / "comparison.md", comparison_markdown(comparison, command).encode())
        for ending, content in draw(comparison).items():
            write_atomically(place / f"{comparison.metric}.{ending}", content)
    return comparison
