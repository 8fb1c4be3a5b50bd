"""``fedem compare``."""

from __future__ import annotations

import shlex
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

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
from fedem.core.errors import UserError
from fedem.core.files import write_atomically, write_json
from fedem.methods import METHODS, resolve_method
from fedem.report.console import console, errors, progress, waiting, writing
from fedem.report.studies import (
    cells_progress,
    comparison_markdown,
    comparison_remarks,
    comparison_table,
    draw,
    draw_study,
    experiment_markdown,
    experiment_table,
    experiments_table,
    status_table,
    study_remarks,
    study_table,
    trials_table,
    tuning_remarks,
)
from fedem.runs.config import Config, Layer, parse_assignment, to_toml
from fedem.runs.folder import RunFolder, new_folder
from fedem.studies.comparison import Comparison, summarize
from fedem.studies.experiments import Entry, Experiment, LatestData, check, find, read, tabulate, work_off
from fedem.studies.experiments import listed as names_in
from fedem.studies.experiments import plan as plan_entries
from fedem.studies.experiments import sort_settings as sort_entry_settings
from fedem.studies.sweep import Cell, check_folder, plan, prepare, resolve_methods, sort_settings
from fedem.studies.theory import ASSUMED, SMALL, study
from fedem.studies.tuning import SAMPLERS, Search, Tuned, read_grids, usual_grids
from fedem.studies.tuning import tune as carry_out


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


# ``fedem experiment``: list, run, status, table.

experiment_group = typer.Typer(
    help="The paper's tables and figures, declared: list, run, status, table.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="The experiment; fedem experiment list tells them.", show_default=False)]
Place = Annotated[Path, typer.Option("--experiments", help="The folder of the experiments.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Leave out other choices: axis=label,label. May be repeated.")
]
DataAxis = Annotated[str | None, typer.Option(help="Short for --only data=...: data sets, with commas between them.")]
Seeds = Annotated[str | None, typer.Option(help="How many seeds, or which: 0,4,7; as declared when not given.")]
Asked = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting, of all runs or of those with a label: EMNIST:partition.share=0.7."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A short trial of the whole: its figures mean nothing.")]
Out = Annotated[Path | None, typer.Option(help="Where all runs are; runs/experiments/NAME when not given.")]


@experiment_group.command("list")
def list_experiments(place: Place = Path("experiments")) -> None:
    """List the experiments."""
    console.print(experiments_table([read(place / name) for name in names_in(place)]))


@experiment_group.command()
def run(
    name: Name,
    data: DataAxis = None,
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


@experiment_group.command()
def status(
    name: Name,
    data: DataAxis = None,
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


@experiment_group.command()
def table(
    name: Name,
    data: DataAxis = None,
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
    shared, own = sort_entry_settings(experiment, settings or [])
    numbers = read_seeds(seeds if seeds is not None else "1" if quick else str(experiment.seeds))
    folder = out or Path("runs") / "experiments" / (f"{name}-quick" if quick else name)
    asked = [{"run": given(rounds=rounds, device=device)}, *shared]
    return experiment, plan_entries(experiment, folder, numbers, chosen, asked, own, quick), folder


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


# ``fedem tune``.

_TRIALS = 20
_SEARCH_OPTIONS = {"run.seed": "--seeds", "method.name": "--method"}


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
    layers = (asked, *map(_search_setting, settings or []))
    number = _TRIALS if trials is None and sampler != "grid" else trials
    grids = read_grids(grid) if grid else usual_grids(name, *layers)
    search = Search(layers, grids, sampler, number, tuple(read_seeds(seeds)))
    search.check()
    place = out or new_folder(Path("runs"), f"tune-{Path(data).stem if data else 'synthetic'}-{name}")
    total = search.count * len(search.seeds) * search.base.run.rounds
    with progress(METHODS[name].title, total, quiet) as listener:
        tuned = carry_out(search, place, resume=resume, listener=listener)
    _save_search(tuned, place)
    if not quiet:
        console.print(trials_table(tuned))
        for line in tuning_remarks(tuned):
            console.print(line, highlight=False, markup=False)
    if tuned.best is None:
        raise UserError(f"No trial came to an end, so nothing is chosen. {tuned.trials[0].error}")
    console.print(f"Chosen settings: {place / 'chosen.toml'}", soft_wrap=True, highlight=False)


def _save_search(tuned: Tuned, place: Path) -> None:
    command = shlex.join(["fedem", *(word for word in sys.argv[1:] if word != "--resume")])
    with writing(place):
        write_json(place / "tune.json", {"command": command, **tuned.record()})
        if tuned.best is not None:
            chosen = to_toml(tuned.search.chosen_layer(tuned.best.values))
            told = "# Chosen by the validation part; tune.json tells how."
            write_atomically(place / "chosen.toml", f"{told}\n\n{chosen}".encode())


def _search_setting(text: str) -> Layer:
    """Parse a setting; refuse one that an option gives."""
    layer = parse_assignment(text)
    ((section, values),) = layer.items()
    option = _SEARCH_OPTIONS.get(f"{section}.{next(iter(values))}")
    if option is not None:
        raise UserError(f"--set got {text!r}; allowed: settings other than those of {option}.")
    return layer


# ``fedem theory``.

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
