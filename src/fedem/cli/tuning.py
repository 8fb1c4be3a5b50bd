"""``fedem tune``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedem.checkpoint import write_atomically, write_json
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
    read_seeds,
)
from fedem.config import Config, parse_assignment
from fedem.errors import UserError
from fedem.methods import METHODS, resolve_method
from fedem.report.console import console, progress, writing
from fedem.report.tuning import trials_table, tuning_remarks
from fedem.runs import new_folder
from fedem.sections import Layer
from fedem.tuning import SAMPLERS, Search, Tuned, read_grids, usual_grids
from fedem.tuning import tune as carry_out

_TRIALS = 20
_OPTIONS = {"run.seed": "--seeds", "method.name": "--method"}


def tune(
    data: Data = None,
    target_column: OwnTargetColumn = None,
    client_column: OwnClientColumn = None,
    method: Annotated[str, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = "fedem",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Values to try of a setting: section.key=value,value,... May be given several times. When not given, "
            "the paper's grids: of the learning rate and, where the method has one, of the weight of its penalty."
        ),
    ] = None,
    sampler: Annotated[
        str,
        typer.Option(
            help=f"One of: {', '.join(SAMPLERS)}. A grid is tried as a whole; the others draw numbers between the "
            "least and the largest value."
        ),
    ] = "grid",
    trials: Annotated[int | None, typer.Option(help=f"For random and tpe: how many ({_TRIALS}).")] = None,
    seeds: Annotated[
        str, typer.Option(help="Runs of each trial: how many seeds (3 is 0, 1 and 2), or which: 100,101.")
    ] = "1",
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    unseen: Unseen = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting: section.key=value. May be given several times."),
    ] = None,
    device: TrainingDevice = None,
    out: Annotated[
        Path | None, typer.Option(help="Where all is written; runs/tune-DATA-METHOD when not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the search in --out; trials that are over are not made again.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Choose settings by the validation part; the test part is dropped before training.

    A trial is a run for each seed, in OUT/trials/NNN/seedS. Its score is the validation accuracy (or error) after the
    last round, averaged over the seeds. Writes tune.json, and chosen.toml for fedem train.

    Examples:
      fedem tune --data synthetic --method fedem --seeds 100,101

      fedem tune --method fedprox --sampler tpe --trials 30

      fedem train runs/tune-synthetic-fedem/chosen.toml

    """
    if resume and out is None:
        raise UserError("--resume needs the folder of the search to go on with: give it as --out.")
    name = resolve_method(method)
    asked: Layer = {
        "data": data_section(data, target_column, client_column),
        "method": {"name": name},
        "run": given(rounds=rounds, clients_per_round=clients_per_round, unseen=unseen, device=device),
    }
    layers = (asked, *map(_setting, settings or []))
    number = _TRIALS if trials is None and sampler != "grid" else trials
    grids = read_grids(grid) if grid else usual_grids(name, *layers)
    search = Search(layers, grids, sampler, number, tuple(read_seeds(seeds)))
    search.check()
    place = out or new_folder(Path("runs"), f"tune-{Path(data).stem if data else 'synthetic'}-{name}")
    total = search.count * len(search.seeds) * search.base.run.rounds
    with progress(METHODS[name].title, total, quiet) as listener:
        tuned = carry_out(search, place, resume=resume, listener=listener)
    _save(tuned, place)
    if not quiet:
        console.print(trials_table(tuned))
        for line in tuning_remarks(tuned):
            console.print(line, highlight=False, markup=False)
    if tuned.best is None:
        raise UserError(f"No trial came to an end, so nothing is chosen. {tuned.trials[0].error}")
    console.print(f"Chosen settings: {place / 'chosen.toml'}", soft_wrap=True, highlight=False)


def _save(tuned: Tuned, place: Path) -> None:
    command = shlex.join(["fedem", *(word for word in sys.argv[1:] if word != "--resume")])
    with writing(place):
        write_json(place / "tune.json", {"command": command, **tuned.record()})
        if tuned.best is not None:
            chosen = Config(tuned.search.chosen_layer(tuned.best.values)).to_toml()
            told = "# Chosen by the validation part; tune.json tells how."
            write_atomically(place / "chosen.toml", f"{told}\n\n{chosen}".encode())


def _setting(text: str) -> Layer:
    """Parse a setting; refuse one that an option gives."""
    layer = parse_assignment(text)
    ((section, values),) = layer.items()
    option = _OPTIONS.get(f"{section}.{next(iter(values))}")
    if option is not None:
        raise UserError(f"--set got {text!r}; allowed: settings other than those of {option}.")
    return layer
