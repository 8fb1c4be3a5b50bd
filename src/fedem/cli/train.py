"""``fedem train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fedem.cli import options
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
from fedem.studies.comparison import resolve_methods, without_own, without_shipped


class _Run(NamedTuple):
    folder: Path
    config: Config
    begun: bool  # whether it is taken up again


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file, such as a run's config.toml; options win over it.")
    ] = None,
    data: options.Data = None,
    target_column: options.OwnTargetColumn = None,
    client_column: options.OwnClientColumn = None,
    method: Annotated[str | None, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = None,
    graph: Annotated[
        str | None, typer.Option(help=f"Average with neighbours, without a server: {', '.join(GRAPHS)}.")
    ] = None,
    components: Annotated[int | None, typer.Option(help="M, the number of shared components.")] = None,
    rounds: options.Rounds = None,
    clients_per_round: options.ClientsPerRound = None,
    unseen: options.Unseen = None,
    metrics: options.Metrics = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything that is random.")] = None,
    device: options.TrainingDevice = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/DATA-METHOD-seedN when not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out where it was stopped.")] = False,
    settings: options.Assignments = None,
    baselines: Annotated[
        str | None,
        typer.Option(help="Also train these methods, with the settings shipped for them, to compare: fedavg,local"),
    ] = None,
    quiet: options.Quiet = False,
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
            own = {"rounds": rounds, "clients_per_round": clients_per_round, "unseen": unseen, "metrics": metrics}
            asked: Sections = {
                "run": options.given(**own, seed=seed, device=device),
                "method": options.given(name=method, num_components=components),
                "graph": options.given(name=graph),
                "data": options.data_section(data, target_column, client_column),
            }
            layers: list[Layer] = [asked, *map(parse_assignment, settings or [])]
            runs = _plan(config, layers, options.listed(baselines), out, resume)
        _carry_out(team.tell(runs), team, quiet or not team.leads)


def _plan(file: Path | None, asked: list[Layer], baselines: list[str], out: Path | None, resume: bool) -> list[_Run]:
    """Say what is to be trained, the method and then its baselines, and in which folders.

    Of what is ``asked``, which wins over the ``file``, the first has the options with names of their own.
    """
    files: list[Layer] = [RunFolder(out).config().sections] if resume and out is not None else []
    files += [unbound(read_toml(file), *asked)] if file else []
    if "num_components" in asked[0].get("method", {}):
        _check_components([*files, *asked])
    chosen = Config.build(*files, *asked, preset=not resume)
    common = without_own([*(without_shipped(layer, chosen) for layer in files), *asked])
    name = f"{chosen.name('data')}-{chosen.name('method')}-seed{chosen.run.seed}"
    folder = RunFolder(out if out else new_folder(Path("runs"), name))
    runs = [_Run(folder.path, chosen, resume)]
    for name in resolve_methods(baselines) if baselines else []:
        # The same run with another method; solver and schedule are those shipped for it, not the main method's.
        place = RunFolder(folder.path / "baselines" / name)
        begun = resume and place.exists()
        config = place.config() if begun else Config.build(*common, {"method": {"name": name}})
        runs.append(_Run(place.path, config, begun))
    folder.prepare(resume)
    return runs


def _carry_out(runs: list[_Run], team: Team, quiet: bool) -> None:
    """Make the data, prepare all runs, and only then train."""
    with waiting("Making the data", quiet), team.leader_first():
        dataset = runs[0].config.make_data()
    if dataset.encoding is not None and not quiet:
        errors.print(f"note: {dataset.encoding.describe()}", highlight=False, markup=False, soft_wrap=True)
    with waiting("Preparing", quiet):
        trainers = [Trainer.prepare(run.config, dataset, fresh=not run.begun, team=team) for run in runs]
    for run, trainer in zip(runs, trainers, strict=True):
        if trainer.note and team.leads:
            errors.print(f"note: {trainer.note}", highlight=False)
        with progress(METHODS[run.config.method.name].title, run.config.run.rounds, quiet) as listener:
            carry_out(trainer, out=run.folder, resume=run.begun, listener=listener)
        if run.config.run.diagnose_every and team.leads:
            plot_diagnostics(RunFolder(run.folder).metrics(), run.folder / "diagnostics.png")
    folder = RunFolder(runs[0].folder)
    if not quiet:
        show_run(folder)
    if team.leads:
        console.print(f"Run folder: {folder.path}", soft_wrap=True, highlight=False)


def _check_components(layers: list[Layer]) -> None:
    """Refuse --components for a method that has none."""
    named = [layer["method"]["name"] for layer in layers if "name" in layer.get("method", {})]
    method = resolve_method(named[-1] if named else "fedem")
    having = [name for name, row in METHODS.items() if "num_components" in names_of(row.algorithm, row.mixer)]
    if method not in having:
        raise UserError(
            f"--components is given, but method {method} has no components; allowed with: {', '.join(having)}. "
            f"`fedem methods {method}` shows its settings."
        )
