"""``fedem theory``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedem.checkpoint import write_atomically, write_json
from fedem.cli.options import Data, OwnClientColumn, OwnTargetColumn, Quiet, TrainingDevice, data_section, given, listed
from fedem.config import Config, parse_assignment
from fedem.errors import UserError
from fedem.methods import resolve_method
from fedem.report.console import console, progress, writing
from fedem.report.theory import draw_study, study_remarks, study_table
from fedem.runs import RunFolder, new_folder
from fedem.sections import Layer
from fedem.theory import ASSUMED, SMALL, study

_OPTIONS = {"run.rounds": "--rounds", "run.seed": "--seeds"}


def theory(
    data: Data = None,
    target_column: OwnTargetColumn = None,
    client_column: OwnClientColumn = None,
    method: Annotated[
        str, typer.Option(help="fedem or dfedem; fedavg and dsgd are mixtures of one, without weights to follow.")
    ] = "fedem",
    rounds: Annotated[
        str, typer.Option(help="The numbers K of rounds, with commas between them: three or more, increasing.")
    ] = "50,100,200,400",
    a0: Annotated[float, typer.Option("--a0", help="The learning rate of a run of K rounds is a0 / sqrt(K).")] = 20.0,
    every: Annotated[
        int, typer.Option(help="Rounds between two measurements at most; the first rounds are all measured.")
    ] = 10,
    seeds: Annotated[int, typer.Option(help="Runs of each length, whose means are taken.")] = 3,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting: section.key=value. May be given several times."),
    ] = None,
    device: TrainingDevice = None,
    out: Annotated[Path | None, typer.Option(help="Where all is written; runs/theory-METHOD when not given.")] = None,
    quiet: Quiet = False,
) -> None:
    """Put the paper's convergence theorems to the test: how the means over K rounds fall with K.

    Trains for several K at learning rate a0 / sqrt(K), with plain SGD, and fits the slopes of the squared gradient, the
    gain and the divergence of the mixture weights and the distance to consensus against K, on logarithmic axes. Writes
    theory.json and theory.png. Without --data, on a small synthetic federation.

    Examples:
      fedem theory

      fedem theory --method dfedem --rounds 50,100,200,400,800 --seeds 3

    """
    name = resolve_method(method)
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; allowed: at least 1.")
    lengths = _lengths(rounds)
    own = data_section(data, target_column, client_column)
    asked: Layer = {"method": {"name": name}, "data": own, "run": given(device=device)}
    small = SMALL if own.get("name", "synthetic") == "synthetic" else {}
    config = Config.build(ASSUMED, small, asked, *map(_setting, settings or []))
    place = out or new_folder(Path("runs"), f"theory-{name}")
    if (place / "theory.json").exists():
        raise UserError(f"{place} holds a study already; choose another folder.")
    RunFolder(place).prepare(resume=True)
    with progress(name, sum(lengths) * seeds, quiet) as listener:
        found = study(config, lengths, a0, every, range(seeds), listener)
    command = shlex.join(["fedem", *sys.argv[1:]])
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / "theory.json", {"command": command, **found.record()})
        write_atomically(place / "theory.png", draw_study(found))
    if not quiet:
        console.print(study_table(found))
        for line in study_remarks(found):
            console.print(line, highlight=False)
    console.print(f"Study: {place}", soft_wrap=True, highlight=False)


def _setting(text: str) -> Layer:
    """Parse a setting; refuse one that an option gives."""
    layer = parse_assignment(text)
    ((section, values),) = layer.items()
    (key,) = values
    option = "--a0" if section == "schedule" else _OPTIONS.get(f"{section}.{key}")
    if option is not None:
        raise UserError(f"--set got {text!r}; allowed: settings other than {section}.{key}, which {option} decides on.")
    return layer


def _lengths(text: str) -> list[int]:
    try:
        return [int(word) for word in listed(text)]
    except ValueError:
        raise UserError(f"--rounds is {text!r}; allowed: whole numbers, such as 50,100,200,400.") from None
