"""What is done with a run's folder: ``fedem show``, ``evaluate``, ``personalize`` and ``predict``."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedem.checkpoint import write_atomically, write_json
from fedem.cli.options import ClientColumn, DataFile, Device, Quiet, RunArgument, TargetColumn, Which
from fedem.data.files import Table, read_table
from fedem.errors import UserError
from fedem.federation import Federation
from fedem.report.console import console, print_summary, show_run, waiting, writing
from fedem.report.tables import metric_of
from fedem.result import Result
from fedem.runs import RunFolder
from fedem.training import reassess


def show(run_folder: RunArgument) -> None:
    """Show a run's table again."""
    folder = RunFolder(run_folder).check()
    show_run(folder)


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


def personalize(
    run_folder: RunArgument,
    data: DataFile,
    out: Annotated[Path, typer.Option(help="Folder to write the new clients' models to.", show_default=False)],
    iterations: Annotated[
        int,
        typer.Option(
            help="FedEM: updates of the mixture weights, 1 as in the paper, 0 until they converge. Methods whose "
            "newcomers train: passes over their samples, 0 for run.unseen_epochs.",
            min=0,
        ),
    ] = 0,
    which: Which = "last",
    target_column: TargetColumn = None,
    client_column: ClientColumn = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Give clients unseen in training a model of their own, by the method's rule; what others share stays as it is.

    For FedEM only their mixture weights are fitted. `fedem methods` tells the rules of the others.

    The folder written holds the new clients; `fedem predict` takes it like any run.
    """
    result = Result.load(run_folder, device=device)
    table = _read(result, data, target_column, client_column)
    if table.targets is None:
        raise UserError(f"{data} has no targets; they are needed to fit a model (see --target-column).")
    clients = np.full(len(table.inputs), data.stem) if table.clients is None else table.clients
    federation = Federation.from_arrays(table.inputs, table.targets, clients, validation=0, test=0)
    with waiting("Personalising", quiet):
        fitted = result.with_unseen(federation, max_iterations=iterations or None, which=which)
    fitted.save(out)
    if not quiet:
        metric = metric_of(fitted.summary)
        console.print(f"{federation.num_clients} clients; train {metric} {fitted.summary[f'train_{metric}']:.4f}")
    console.print(f"Run folder: {out}", soft_wrap=True, highlight=False)


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


def _read(result: Result, path: Path, target_column: str | None, client_column: str | None) -> Table:
    """Read a file with the columns that the run was trained on, unless others are named."""
    known = result.config.values("data")
    target = target_column or known.get("target_column", "y")
    client = client_column or known.get("client_column", "client")
    return read_table(path, target, client).arranged(result.shapes.features)
