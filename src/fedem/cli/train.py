"""``fedem train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fedem.cli.options import (
    Assignments,
    ClientsPerRound,
    Data,
    Metrics,
    OwnClientColumn,
    OwnTargetColumn,
    Quiet,
    Rounds,
    TrainingDevice,
    Unseen,
    data_section,
    given,
    listed,
)
from fedem.core.errors import UserError
from fedem.core.settings import names_of
from fedem.engines.processes import Team, joined
from fedem.graphs import GRAPHS
from fedem.methods import METHODS, resolve_method
from fedem.report.console import console, errors, progress, show_run, waiting
from fedem.report.studies import plot_diagnostics
from fedem.runs.config import Config, Layer, Sections, parse_assignment, read_toml, unbound
from fedem.runs.folder import RunFolder, new_folder
from fedem.runs.trainer import Trainer, carry_out
from fedem.studies.comparison import configure, resolve_methods, without_own, without_shipped


class _Run(NamedTuple):
    """A run to be carried out."""

    folder: Path
    config: Config
    begun: bool
    """whether it is taken up again"""


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file, such as a run's config.toml; options win over it.")
    ] = None,
    data: Data = None,
    target_column: OwnTargetColumn = None,
    client_column: OwnClientColumn = None,
    method: Annotated[str | None, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = None,
    graph: Annotated[
        str | None, typer.Option(help=f"Average with neighbours, without a server: {', '.join(GRAPHS)}.")
    ] = None,
    components: Annotated[int | None, typer.Option(help="M, the number of shared components.")] = None,
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    unseen: Unseen = None,
    metrics: Metrics = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything that is random.")] = None,
    device: TrainingDevice = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/DATA-METHOD-seedN when not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out where it was stopped.")] = False,
    settings: Assignments = None,
    baselines: Annotated[
        str | None,
        typer.Option(help="Also train these methods, with the settings shipped for them, to compare: fedavg,local"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a federation and write its run to a folder.

    Examples:
      fedem train --data synthetic --method fedem --components 3 --rounds 200

      fedem train --data mine.csv --method fedem --set schedule.learning_rate=0.3

      fedem train --out runs/synthetic-fedem-seed0 --resume

      torchrun --nproc-per-node 4 -m fedem train --data synthetic

    """
    with joined() as team:
        runs = None
        if team.leads:  # it reads files and decides; the others are told
            if resume and out is None:
                raise UserError("--resume needs the folder of the run to go on with: give it as --out.")
            asked: Sections = {
                "run": given(
                    rounds=rounds,
                    clients_per_round=clients_per_round,
                    unseen=unseen,
                    metrics=metrics,
                    seed=seed,
                    device=device,
                ),
                "method": given(name=method, num_components=components),
                "graph": given(name=graph),
                "data": data_section(data, target_column, client_column),
            }
            options: list[Layer] = [asked, *map(parse_assignment, settings or [])]
            runs = _plan(config, options, listed(baselines) if baselines else [], out, resume)
        _carry_out(team.tell(runs), team, quiet or not team.leads)


def _plan(file: Path | None, options: list[Layer], baselines: list[str], out: Path | None, resume: bool) -> list[_Run]:
    """Say what is to be trained, the method and then its baselines, and in which folders.

    Of the ``options``, which win over the ``file``, the first are those with names of their own on the command line.
    """
    files: list[Layer] = [RunFolder(out).config().sections] if resume and out is not None else []
    files += [unbound(read_toml(file), *options)] if file else []
    layers = [*files, *options]
    if "num_components" in options[0].get("method", {}):
        _check_components(layers)
    chosen = Config.build(*layers, preset=not resume)
    names = resolve_methods(baselines) if baselines else []
    common = without_own([*(without_shipped(layer, chosen) for layer in files), *options])
    others = {name: _baseline(common, name, out if resume else None) for name in names}
    name = f"{chosen.name('data')}-{chosen.name('method')}-seed{chosen.run.seed}"
    folder = RunFolder(out if out else new_folder(Path("runs"), name))
    folder.prepare(resume)
    runs = [(folder, chosen)]
    runs += [(RunFolder(folder.path / "baselines" / name), other) for name, other in others.items()]
    return [_Run(place.path, settings, resume and place.exists()) for place, settings in runs]


def _carry_out(runs: list[_Run], team: Team, quiet: bool) -> None:
    """Make the data, prepare all runs, and only then train."""
    with waiting("Making the data", quiet), team.leader_first():
        dataset = runs[0].config.make_data()
    if dataset.encoding is not None and not quiet:
        errors.print(f"note: {dataset.encoding.describe()}", highlight=False, markup=False, soft_wrap=True)
    with waiting("Preparing", quiet):
        trainers = [Trainer.prepare(run.config, dataset, fresh=not run.begun, team=team) for run in runs]
    for run, trainer in zip(runs, trainers, strict=True):
        _train(trainer, run, quiet)
    folder = RunFolder(runs[0].folder)
    if not quiet:
        show_run(folder)
    if team.leads:
        console.print(f"Run folder: {folder.path}", soft_wrap=True, highlight=False)


def _baseline(common: list[Layer], name: str, resumed: Path | None) -> Config:
    """Return the same run with another method; solver and schedule are those shipped for it, not the main method's."""
    if resumed is not None and (place := RunFolder(resumed / "baselines" / name)).exists():
        return place.config()
    return configure(common, name)


def _train(trainer: Trainer, run: _Run, quiet: bool) -> None:
    title, leads = METHODS[trainer.config.name("method")].title, trainer.team.leads
    if trainer.note and leads:
        errors.print(f"note: {trainer.note}", highlight=False)
    with progress(title, trainer.config.run.rounds, quiet) as listener:
        carry_out(trainer, out=run.folder, resume=run.begun, listener=listener)
    if trainer.config.run.diagnose_every and leads:
        plot_diagnostics(RunFolder(run.folder).metrics(), run.folder / "diagnostics.png")


def _check_components(layers: list[Layer]) -> None:
    """Refuse --components for a method that has none."""
    named = [layer["method"]["name"] for layer in layers if "name" in layer.get("method", {})]
    method = resolve_method(named[-1] if named else "fedem")
    row = METHODS[method]
    if "num_components" not in names_of(row.algorithm, row.mixer):
        having = [name for name, other in METHODS.items() if "num_components" in names_of(other.algorithm, other.mixer)]
        raise UserError(
            f"--components is given, but method {method} has no components; allowed with: {', '.join(having)}. "
            f"`fedem methods {method}` tells its settings."
        )
