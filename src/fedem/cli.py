"""The command line. It parses, calls the library and prints; nothing is computed here."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import numpy as np
import typer

from fedem import __version__
from fedem.checkpoint import write_atomically, write_json
from fedem.config import Config, Layer, Sections, parse_assignment, read_toml
from fedem.data import DATA
from fedem.data.files import Table, read_table
from fedem.errors import UserError, unknown
from fedem.federation import Federation
from fedem.job import Job
from fedem.methods import METHODS, find_method
from fedem.report.console import console, errors, print_summary, progress, show_run, waiting, writing
from fedem.report.tables import metric_of
from fedem.result import Result
from fedem.runs import RunFolder, new_folder
from fedem.training import carry_out, reassess

app = typer.Typer(
    help="Federated learning of personalised models as mixtures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]
DataFile = Annotated[Path, typer.Option("--data", help="Samples: npz (x, y, client) or CSV.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables: only what is asked for.")]
Which = Annotated[str, typer.Option(help="The state to use: last, or best by validation.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
TargetColumn = Annotated[str | None, typer.Option(help="Name of the target column; as in training when not given.")]
ClientColumn = Annotated[str | None, typer.Option(help="Name of the column of client names; likewise.")]


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file, such as a run's config.toml; options win over it.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help=f"A data set ({', '.join(DATA)}) or a file of your own (.npz, .csv).")
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = None,
    components: Annotated[int | None, typer.Option(help="M, the number of shared components.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    clients_per_round: Annotated[
        float | None, typer.Option(help="Share of the clients in each round (up to 1.0), or their number (from 2).")
    ] = None,
    unseen: Annotated[float | None, typer.Option(help="Share of the clients held out of training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything that is random.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/DATA-METHOD-seedN when not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out where it was stopped.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting: section.key=value. May be given several times.")
    ] = None,
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

    """
    if resume and out is None:
        raise UserError("--resume needs the folder of the run to go on with: give it as --out.")
    if data is not None and data not in DATA and not data.lower().endswith((".npz", ".csv")):
        raise unknown("data", data, (*DATA, "a file ending in .npz or .csv"))
    asked: Sections = {
        "run": _given(rounds=rounds, clients_per_round=clients_per_round, unseen=unseen, seed=seed, device=device),
        "method": _given(name=method, num_components=components),
        "data": _given(name=data)
        if data in DATA
        else {"name": "file", "path": str(Path(data).absolute())}
        if data
        else {},
    }
    layers: list[Layer] = [read_toml(config) if config else {}, asked, *map(parse_assignment, settings or [])]
    if resume and out is not None:
        layers.insert(0, RunFolder(out).config().sections)
    chosen = Config.build(*layers, preset=not resume)
    others = {name: _baseline(layers, name, out if resume else None) for name in _names(baselines)}
    name = f"{chosen.name('data')}-{chosen.name('method')}-seed{chosen.run.seed}"
    folder = RunFolder(out if out else new_folder(Path("runs"), name))
    folder.prepare(resume)
    with waiting("Making the data", quiet):
        dataset = chosen.data.make(chosen.run.seed)
    jobs = [(folder, Job.prepare(chosen, dataset, None))]
    jobs += [(RunFolder(folder.path / "baselines" / name), Job.prepare(c, dataset, None)) for name, c in others.items()]
    for place, job in jobs:
        _train(job, place, resume and place.exists(), quiet)
    if not quiet:
        show_run(folder)
    console.print(f"Run folder: {folder.path}", soft_wrap=True, highlight=False)


@app.command()
def show(run_folder: RunArgument) -> None:
    """Show a run's table again."""
    folder = RunFolder(run_folder).check()
    show_run(folder)


@app.command()
def evaluate(
    run_folder: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Also write the scores to this JSON file.")] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Make a run's data again and score its saved states afresh."""
    RunFolder(run_folder).check()
    with waiting("Scoring", quiet):
        result = reassess(run_folder, device)
    if not quiet:
        print_summary([result.summary])
    if out:
        with writing(out):
            write_json(out, result.summary)


@app.command()
def personalize(
    run_folder: RunArgument,
    data: DataFile,
    out: Annotated[Path, typer.Option(help="Folder to write the new clients' models to.", show_default=False)],
    iterations: Annotated[
        int, typer.Option(help="Updates of the mixture weights: 1 as in the paper, 0 until they converge.", min=0)
    ] = 0,
    which: Which = "last",
    target_column: TargetColumn = None,
    client_column: ClientColumn = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Give clients unseen in training a model of their own: the shared components stay, only their weights are fitted.

    The folder written holds the new clients; `fedem predict` takes it like any run.
    """
    result = Result.load(run_folder, device=device)
    table = _read(result, data, target_column, client_column)
    if table.targets is None:
        raise UserError(f"{data} has no targets; they are needed to fit the weights (see --target-column).")
    clients = np.full(len(table.inputs), data.stem) if table.clients is None else table.clients
    federation = Federation.from_arrays(table.inputs, table.targets, clients, validation=0, test=0)
    with waiting("Personalising", quiet):
        fitted = result.with_unseen(federation, max_iterations=iterations or None, which=which)
    fitted.save(out)
    if not quiet:
        metric = metric_of(fitted.summary)
        console.print(f"{federation.num_clients} clients; train {metric} {fitted.summary[f'train_{metric}']:.4f}")
    console.print(f"Run folder: {out}", soft_wrap=True, highlight=False)


@app.command()
def predict(
    run_folder: RunArgument,
    client: Annotated[str, typer.Option(help="Name of the client whose model predicts.", show_default=False)],
    data: DataFile,
    out: Annotated[Path, typer.Option(help="Where to write the predictions (.csv or .npz).", show_default=False)],
    which: Which = "last",
    target_column: TargetColumn = None,
    client_column: ClientColumn = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Predict with one client's own mixture: class probabilities, or means for regression."""
    if out.suffix not in (".csv", ".npz"):
        raise UserError(f"--out is {out}; allowed: a file ending in .csv or .npz.")
    result = Result.load(run_folder, device=device)
    personal = result.client(client, which)
    predictions = personal.predict(_read(result, data, target_column, client_column).inputs).numpy()
    classes = predictions.argmax(1) if personal.model.loss.metric == "accuracy" else None
    columns = {} if classes is None else {"prediction": classes}
    text = io.StringIO()
    if out.suffix == ".csv":
        writer = csv.writer(text, lineterminator="\n")
        heading = "probability" if columns else "mean"
        writer.writerow([*columns, *(f"{heading}_{index}" for index in range(predictions.shape[1]))])
        writer.writerows(zip(*(column.tolist() for column in columns.values()), *predictions.T.tolist(), strict=True))
        content = text.getvalue().encode()
    else:
        buffer = io.BytesIO()
        np.savez(buffer, predictions=predictions, **columns)
        content = buffer.getvalue()
    with writing(out):
        write_atomically(out, content)
    if not quiet:
        console.print(f"{len(predictions)} predictions: {out}", soft_wrap=True, highlight=False)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__, highlight=False)


def _read(result: Result, path: Path, target_column: str | None, client_column: str | None) -> Table:
    """Read a file with the columns that the run was trained on, unless others are named."""
    known = result.config.values("data")
    target = target_column or known.get("target_column", "y")
    client = client_column or known.get("client_column", "client")
    return read_table(path, target, client).arranged(result.shapes.features)


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _names(listing: str | None) -> list[str]:
    return [name.strip() for name in listing.split(",")] if listing else []


def _baseline(layers: list[Layer], name: str, resumed: Path | None) -> Config:
    """Return the same run with another method; solver and schedule are those shipped for it, not the main method's."""
    find_method(name)
    if resumed is not None and (place := RunFolder(resumed / "baselines" / name)).exists():
        return place.config()
    own = ("method", "solver", "schedule")
    shared = [{section: values for section, values in layer.items() if section not in own} for layer in layers]
    return Config.build(*shared, {"method": {"name": name}})


def _train(job: Job, folder: RunFolder, resume: bool, quiet: bool) -> None:
    title = METHODS[job.config.name("method")].title
    if job.note:
        errors.print(f"note: {job.note}", highlight=False)
    with progress(title, job.config.run.rounds, quiet) as listener:
        carry_out(job, out=folder.path, resume=resume, listener=listener)


def main() -> None:
    """Run the command line: errors are one sentence, exit code 2, no traceback."""
    try:
        app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        console.print(error.format_message(), highlight=False)
        sys.exit(2)
    except click.ClickException as error:
        errors.print(f"error: {error.format_message()}", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)
    except UserError as error:
        errors.print(f"error: {error}", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)
    except OSError as error:
        errors.print(f"error: {error}.", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        errors.print("Stopped; a run that was going on can be continued with --resume.", highlight=False)
        sys.exit(130)
