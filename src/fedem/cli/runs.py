"""Commands on runs: ``fedem show``, ``evaluate``, ``personalize``, ``predict``, ``export``, ``report``, ``plot``."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from typer import Argument, Option

from fedem.cli import options
from fedem.cli.options import (
    ClientColumn,
    DataFile,
    Device,
    Metrics,
    Quiet,
    RunArgument,
    TargetColumn,
    Which,
    dialect,
    listed,
    taking,
)
from fedem.core.errors import UserError, counted, unknown
from fedem.core.files import csv_bytes, write_atomically, write_csv, write_json
from fedem.data.encoding import plain_targets, some
from fedem.data.federation import Federation
from fedem.data.files import FromFile
from fedem.data.tables import Table, read_table, stem_of
from fedem.deploy.kept import Kept
from fedem.export import FORMATS, Exported, export_client, export_personal
from fedem.models.losses import CLASSES
from fedem.report.console import (
    aside,
    client_scores_table,
    display,
    put,
    say,
    show_run,
    summary_pages,
    waiting,
    writing,
)
from fedem.report.described import known_clients
from fedem.report.page import build_page
from fedem.report.pictures import FIGURES, canvas
from fedem.report.runs import gather
from fedem.runs.config import Values
from fedem.runs.evaluate import metrics_of
from fedem.runs.folder import RunFolder, check_here
from fedem.runs.result import Result
from fedem.runs.trainer import describe_inputs, reassess
from fedem.runs.unlabelled import UNLIKE, check_unlabelled

Folders = Annotated[
    list[Path] | None, Argument(help="Folders of runs, with their baselines, of comparisons or of experiments.")
]
Array = NDArray[np.generic]
_ALL = "all"
_UPDATES = "FedEM: updates of the mixture weights, 1 as in the paper, 0 until they converge."
_PASSES = "Methods whose newcomers train: passes over their samples."


def show(run_folder: RunArgument) -> None:
    """Show a run's table again."""
    show_run(RunFolder(run_folder).check())


@partial(taking, dialect)
def evaluate(
    written: Values,
    run_folder: RunArgument,
    data: Annotated[
        Path | None, Option("--data", help="Score these labelled rows, and not the run's own data: a file or folder.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Also write the scores to this JSON file; those of --data by client, to a .csv.")
    ] = None,
    fine_tune_epochs: Annotated[
        int | None, Option(help="Passes over its samples that each client trains for itself before it is scored.")
    ] = None,
    fine_tune_rate: Annotated[float | None, Option(help="Learning rate of these passes.")] = None,
    neighbours: Annotated[
        int | None, Option(help="How many of its nearest training samples each client asks beside its model; 0: none.")
    ] = None,
    unlabelled: Annotated[
        bool | None, Option("--unlabelled", help="Sum up clients' inputs, for clients that come later without labels.")
    ] = None,
    save: Annotated[
        Path | None, Option(help="Also write the run, with the clients' models as they are scored, to this new folder.")
    ] = None,
    metrics: Metrics = None,
    which: Annotated[str | None, Option(help="For --data, the state to use: last, or best by validation.")] = None,
    target_column: TargetColumn = None,
    client_column: ClientColumn = None,
    device: Device = "auto",
    force: options.Force = False,
    quiet: Quiet = False,
) -> None:
    """Make a run's data again and score its saved states afresh, or score new rows; the run stays as it is.

    With --data each row is predicted by its own client's model. Clients that took no part in training are scored by
    what the method has for a client without samples, such as the mean of all mixture weights; where it has nothing,
    they are left out. In the averages clients count by their rows.

    Examples:
      fedem evaluate runs/first

      fedem evaluate runs/first --metrics accuracy,roc_auc

      fedem evaluate runs/first --fine-tune-epochs 1 --fine-tune-rate 0.01

      fedem evaluate runs/first --neighbours 10 --save runs/first-neighbours

      fedem evaluate runs/first --unlabelled --save runs/first-unlabelled

      fedem evaluate runs/shops --data today.csv --out today-by-shop.csv
    """
    RunFolder(run_folder).check()
    options.check_new(force, *([out] if out else []))
    tuned = {"fine_tune_epochs": fine_tune_epochs, "fine_tune_rate": fine_tune_rate, "neighbours": neighbours}
    tuned |= {"unlabelled": unlabelled or None}
    if data is not None:
        _refuse("with --data", **tuned, save=save)
        if out is not None and out.suffix != ".csv":
            raise UserError(f"--out is {out}; allowed with --data: a file ending in .csv.")
        result = _loaded(run_folder, device)
        read = _read(result, data, target_column, client_column, written, quiet)
        _evaluate_rows(result, read, out, which, metrics, quiet)
        return
    _refuse("without --data", which=which, target_column=target_column, client_column=client_column, **written)
    other = options.given(**tuned, metrics=metrics)
    if save is not None:
        RunFolder(save).prepare()
    with waiting("Scoring", quiet):
        result = reassess(run_folder, device, **other)
    if not quiet:
        display(*summary_pages([result.summary]))
    if out:
        with writing(out):
            write_json(out, result.summary)
    if save:
        say(f"Run folder: {result.save(save)}")


def _refuse(when: str, **values: object) -> None:
    """Refuse options that mean nothing ``when`` others are given, or are not."""
    for name in options.given(**values):
        raise UserError(f"--{name.replace('_', '-')} is given {when}, where it has no meaning; leave it out.")


def _evaluate_rows(
    result: Result, read: tuple[Table, Array], out: Path | None, which: str | None, metrics: str | None, quiet: bool
) -> None:
    """Score labelled rows, by client and over all."""
    table, inputs = read
    check_here(result.names)
    targets, owners, state = _targets(result, table), table.owners(), which or "last"
    if owners is None:
        source = table.pieces[0].source
        raise UserError(f"{source} has no column {table.client!r} of clients' names (see --client-column).")
    if new := sorted(set(owners.tolist()) - set(result.names)):
        said = f"note: {counted(len(new), 'client')} took no part in training ({some(list(map(repr, new)))})"
        try:
            result.newcomer(state)
            aside(f"{said}: scored by what the method has for a client without samples.")
        except UserError as error:
            aside(f"{said}: left out. {error}")
            known = ~np.isin(owners, new)
            if not known.any():
                raise UserError("No row is left to score.") from None
            inputs, targets, owners = inputs[known], targets[known], owners[known]
    with waiting("Scoring", quiet):
        figures, rows = result.score_encoded(inputs, targets, owners, state, metrics or "")
    if not quiet:
        display(client_scores_table(figures, rows))
    if out:
        with writing(out):
            write_csv(out, rows[0], rows)


def _targets(result: Result, table: Table) -> Array:
    """Return a table's targets, encoded as in training."""
    if table.target not in table.columns:
        source, why = table.pieces[0].source, "they are needed to fit a model, or to score one"
        besides = "; `fedem personalize --unlabelled` fits mixture weights without"
        raise UserError(f"{source} has no targets; {why} (see --target-column){besides}.")
    encoding = result.recipe.format.encoding
    return plain_targets(table) if encoding is None else encoding.target.encode(table)


@partial(taking, dialect)
def personalize(
    written: Values,
    run_folder: RunArgument,
    data: DataFile,
    out: Annotated[Path, Option(help="Folder to write the new clients' models to.")],
    iterations: Annotated[int | None, Option(help=f"{_UPDATES} As in the run when not given.", min=0)] = None,
    unseen_epochs: Annotated[int | None, Option(help=f"{_PASSES} As in the run when not given.", min=1)] = None,
    fine_tune_epochs: Annotated[
        int | None, Option(help="Passes over their samples before they predict. As in the run when not given.", min=0)
    ] = None,
    unlabelled: Annotated[
        bool,
        Option("--unlabelled", help="Fit mixture weights to inputs alone; targets, if there are any, play no part."),
    ] = False,
    beside: Annotated[
        str | None, Option(help="A client that took part: start from what it has (without a server, its components).")
    ] = None,
    which: Which = "last",
    target_column: TargetColumn = None,
    client_column: ClientColumn = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Give clients unseen in training a model of their own, by the method's rule; what others share stays as it is.

    For FedEM only their mixture weights are fitted. `fedem methods` shows the rules of the others. Clients that took
    part in training are fitted as if they were new, and named.

    With --unlabelled rows need no targets: mixture weights are fitted to inputs, where these tell the components apart,
    and each client's novelty says how far its rows lie from those of training. That needs sums over the inputs of the
    run's clients. Where the run has none (run.unlabelled), they are made from its data.

    The folder written holds the new clients; `fedem predict` takes it like any run.
    """
    result = _loaded(run_folder, device)
    table, inputs = _read(result, data, target_column, client_column, written, quiet)
    targets, owners = None if unlabelled else _targets(result, table), table.owners()
    clients = np.full(len(table), stem_of(data)) if owners is None else owners
    if not quiet and (known := known_clients(tuple(np.unique(clients).tolist()), run_folder, result.names)):
        aside(f"note: {known}")
    if targets is None:
        _refuse("with --unlabelled", unseen_epochs=unseen_epochs, fine_tune_epochs=fine_tune_epochs, beside=beside)
        _check_unlabelled_rows(table)
        result = _with_statistics(result, run_folder, which, device, quiet)
        with waiting("Personalising", quiet):
            _say_unlabelled(result.with_unlabelled(inputs, clients, iterations, which), out, quiet)
        return
    federation = Federation.from_arrays(inputs, targets, clients, validation=0, test=0)
    with waiting("Personalising", quiet):
        epochs = {"unseen_epochs": unseen_epochs, "fine_tune_epochs": fine_tune_epochs}
        fitted = result.with_unseen(federation, iterations, which, beside, **epochs)
    fitted.save(out)
    if not quiet:
        metric = metrics_of(fitted.summary)[0].name
        say(f"{counted(federation.num_clients, 'client')}; train {metric} {fitted.summary[f'train_{metric}']:.4f}")
    say(f"Run folder: {out}")


def _check_unlabelled_rows(table: Table) -> None:
    """Refuse rows of which some have a target: they are for fitting with labels."""
    if table.target in table.columns and (missing := table.columns[table.target].missing).any() and not missing.all():
        some_rows = f"{int((~missing).sum())} of {counted(len(table), 'row')} have a target in column {table.target!r}"
        mend = "give the rows with targets alone, without --unlabelled, or no targets"
        raise UserError(f"{some_rows}, the others none; weights are fitted to labels or to inputs: {mend}.")


def _with_statistics(result: Result, run_folder: Path, which: str, device: str, quiet: bool) -> Result:
    """Return a run with sums over its clients' inputs, made from its data where it has none."""
    if which in result.statistics or result.recipe.is_fitted:
        return result
    check_unlabelled(result.config)
    try:
        with waiting("Summing up the run's inputs", quiet):
            statistics = describe_inputs(run_folder, device)
    except UserError as error:
        problem = f"{run_folder} has no sums over its clients' inputs, and they can't be made from its data"
        raise UserError(f"{problem} ({error}) Train with run.unlabelled=true.") from None
    if not quiet:
        keep = f"`fedem evaluate {run_folder} --unlabelled --save FOLDER` writes a run that keeps them"
        aside(f"note: {run_folder} has no sums over its clients' inputs; they were made from its data ({keep}).")
    return replace(result, statistics=statistics)


def _say_unlabelled(fitted: Result, out: Path, quiet: bool) -> None:
    """Write clients that were fitted without labels, and say what their inputs say."""
    fitted.save(out)
    if not quiet:
        say(f"{counted(len(fitted.names), 'client')} without labels. {fitted.summary['unlabelled']['note']}")
        if novel := [repr(row["client"]) for row in fitted.clients if row["is_novel"]]:
            say(f"{counted(len(novel), 'client is', 'clients are')} {UNLIKE}: {some(novel)}.")
    say(f"Run folder: {out}")


@partial(taking, dialect)
def predict(
    written: Values,
    run_folder: RunArgument,
    data: DataFile,
    out: Annotated[Path, Option(help="Where to write the predictions (.csv or .npz).")],
    client: Annotated[
        str | None, Option(help="Name of the client whose model predicts all rows; each row's own when not given.")
    ] = None,
    which: Which = "last",
    target_column: TargetColumn = None,
    client_column: ClientColumn = None,
    device: Device = "auto",
    force: options.Force = False,
    quiet: Quiet = False,
) -> None:
    """Predict with each client's own mixture: classes and their probabilities, or means for regression.

    Rows keep the file's order. A target column may be there or not; it plays no part.

    CSV: the clients' column, then prediction and the probability of each class. npz: predictions and, where there are
    such, client, prediction (positions of classes) and labels (their names).
    """
    if out.suffix not in (".csv", ".npz"):
        raise UserError(f"--out is {out}; allowed: a file ending in .csv or .npz.")
    options.check_new(force, out)
    result = _loaded(run_folder, device)
    check_here(result.names)
    table, inputs = _read(result, data, target_column, client_column, written, quiet)
    owners = table.owners() if client is None else None
    if client is not None:
        predictions = result.predict(client, inputs, which).numpy()
    elif owners is not None:
        predictions = _predict_each(result, inputs, owners, which)
    else:
        mend = "--client names the one whose model is to predict all rows"
        raise UserError(f"{data} has no column {table.client!r} of clients' names (see --client-column); {mend}.")
    with writing(out):
        write_atomically(out, _written(result, predictions, table.client, owners, out.suffix))
    if not quiet:
        say(f"{counted(len(predictions), 'prediction')}: {out}")


def _loaded(run_folder: Path, device: str) -> Result:
    """Load a run, and say so when it is still to be completed."""
    result = Result.load(run_folder, device=device)
    done, rounds = result.state().round, result.config.run.rounds
    if done < rounds and "stopped_after" not in result.origin:
        aside(f"note: The run is not complete: {done} of its {counted(rounds, 'round is', 'rounds are')} done.")
    return result


def _predict_each(result: Result, inputs: Array, owners: NDArray[np.str_], which: str) -> Array:
    """Predict every row with its own client's model, ``[n, K]``."""
    if unknown := sorted(set(owners.tolist()) - set(result.names)):
        mend = "Give them models of their own first (fedem personalize)"
        mend += ", or name a client whose model is to predict all rows (--client)."
        absent = f"{counted(len(unknown), 'client')} took no part in training"
        raise UserError(f"{absent}: {some(list(map(repr, unknown)))}. {mend}")
    parts = {name: (owners == name).nonzero()[0] for name in dict.fromkeys(owners.tolist())}
    found = [result.predict(name, inputs[rows], which).numpy() for name, rows in parts.items()]
    order = np.concatenate(list(parts.values())).argsort()
    return np.concatenate(found)[order]


def _written(result: Result, predictions: Array, client: str, owners: NDArray[np.str_] | None, ending: str) -> bytes:
    """Return the content of a file of predictions, beside the clients' column if there is one."""
    classes, named = result.recipe.loss.task == CLASSES, result.recipe.format.labels
    labels = np.array(named if named is not None else range(predictions.shape[1]))
    pairs = list(zip(labels.tolist(), predictions.T, strict=True))
    if ending == ".npz":
        arrays: dict[str, Any] = {"predictions": predictions}
        if classes:
            arrays |= {"prediction": predictions.argmax(1), "labels": labels}
        if owners is not None:
            arrays["client"] = owners
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue()
    columns: dict[str, NDArray[Any]] = {"prediction": labels[predictions.argmax(1)]} if classes else {}
    for label, column in pairs:
        several = "prediction" if len(labels) == 1 else f"prediction_{label}"
        columns[f"probability_{label}" if classes else several] = column
    if owners is not None:
        # All names of predictions start with other words than this one.
        columns = {"client" if client in columns else client: owners, **columns}
    return csv_bytes(columns, zip(*(column.tolist() for column in columns.values()), strict=True))


def _read(
    result: Result, path: Path, target: str | None, client: str | None, written: Values, quiet: bool
) -> tuple[Table, Array]:
    """Read a file, with the columns of training unless others are named, and encode its inputs as in training."""
    source = result.config.data
    usual = source if isinstance(source, FromFile) else FromFile()
    how = replace(usual, **written)
    form = how.dialect
    if (encoding := result.recipe.format.encoding) is None:
        table = read_table(path, target or "y", client or "client", dialect=form)
        return table, table.stacked()
    table = read_table(path, target or encoding.target.name, client or encoding.client, dialect=form)
    inputs = encoding.inputs(table)
    if quiet:
        return table, inputs
    for line in table.notes:
        aside(f"note: {path}: {line}.")
    if surplus := encoding.surplus(table):
        aside(f"note: columns that training had not are left out: {', '.join(map(repr, surplus))}.")
    for name, count in encoding.clipped(table).items():
        aside(f"note: column {name!r} has {counted(count, 'value')} far out, cut off as in training.")
    for name, categories in encoding.unseen(table).items():
        new = f"{counted(len(categories), 'category', 'categories')} that training had not ({some(categories)})"
        aside(f"note: column {name!r} has {new}, taken for none of those known.")
    return table, inputs


def export(
    source: Annotated[Path, Argument(help="The folder of a run, or the file that a deployed client keeps.")],
    out: Annotated[Path, Option(help="A new folder to write to.")],
    client: Annotated[str | None, Option(help="Name of the client whose model is wanted.")] = None,
    components: Annotated[
        bool, Option("--components", help="The components alone, uniformly weighted: nobody's in particular.")
    ] = False,
    formats: Annotated[
        str, Option("--format", help=f"Some of safetensors, {', '.join(FORMATS)}, with commas between.")
    ] = "safetensors",
    which: Which = "last",
    quiet: Quiet = False,
) -> None:
    """Write a client's model to files: to load again, or to use where fedem is not installed.

    Each file is loaded again and compared with the model before it counts as written.
    """
    chosen = [client is not None, components].count(True)
    if source.is_file() and chosen:
        raise UserError(f"{source} is one client's file; allowed without it: --client and --components.")
    if not source.is_file() and chosen != 1:
        given = "Both --client and --components are" if chosen else "Neither --client nor --components is"
        raise UserError(f"{given} given; allowed: one of them.")
    with waiting("Exporting", quiet), writing(out):
        if source.is_file():
            exported = _export_kept(source, out, listed(formats))
        else:
            exported = export_client(Result.load(source, device="cpu"), client, out, listed(formats), which)
    if not quiet:
        for name, difference in exported.differences.items():
            said = "the same to the bit" if difference == 0 else f"within {difference:.0e} of the largest prediction"
            say(f"{name}: {said}")
    say(f"Exported: {out}")
    if exported.refused:
        reasons = "; ".join(f"{name} ({why})" for name, why in exported.refused.items())
        raise UserError(f"{out} was written without the formats that the model does not allow: {reasons}.")


def _export_kept(source: Path, out: Path, formats: list[str]) -> Exported:
    kept = Kept.load(source)
    facts = {"client": kept.client or None, "state": "last", "round": kept.round}
    return export_personal(kept.model(source), kept.plan.config.replace("run", device="cpu"), out, formats, **facts)


def report(
    folders: Folders = None,
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    force: options.Force = False,
    quiet: Quiet = False,
) -> None:
    """Put the results of runs on one page: tables, figures and what there is to see in them, the configuration.

    The page needs nothing else: no network, no scripts, no data. Each data set has its table and its figures; runs of
    a method are distinguished by what differs in their settings, and by their seeds.

    Examples:
      fedem report runs/compare-synthetic

      fedem report runs/fedem runs/fedavg --out both.html
    """
    if out.suffix != ".html":
        raise UserError(f"--out is {out}; allowed: a file ending in .html.")
    options.check_new(force, out)
    sets = gather(folders or [])
    with waiting("Drawing", quiet):
        page = build_page(sets)
    put(out, page.encode())
    say(f"Report: {out}")


def plot(
    folders: Folders = None,
    figure: Annotated[str, Option(help="Names of figures, with commas between them, or all that apply.")] = _ALL,
    out: Annotated[Path, Option(help="The folder to write them to.")] = Path("figures"),
    ending: Annotated[str, Option("--format", help=f"One of: {', '.join(canvas.FORMATS)}.")] = "svg",
    force: options.Force = False,
    names: Annotated[bool, Option("--list", help="List the figures there are, and draw nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a report's figures to files of their own, OUT/NAME.svg; with several data sets, OUT/DATA/NAME.svg.

    Examples:
      fedem plot --list

      fedem plot runs/compare-synthetic --figure clients,weights --format pdf
    """
    if names:
        for name, kind in FIGURES.items():
            say(f"{name:12s} {kind.shows} (needs {kind.needs})")
        return
    if ending not in canvas.FORMATS:
        raise unknown("format", ending, canvas.FORMATS)
    asked = list(FIGURES) if figure == _ALL else list(dict.fromkeys(listed(figure)))
    for name in asked:
        if name not in FIGURES:
            raise unknown("figure", name, (*FIGURES, _ALL))
    sets = gather(folders or [])
    options.check_new(force, *(out / data.place / f"{name}.{ending}" for data in sets for name in asked))
    with waiting("Drawing", quiet):
        painted = {(data.place, name): canvas.paint(FIGURES[name].painter, data) for data in sets for name in asked}
        drawn = {key: canvas.alone(picture, ending) for key, picture in painted.items() if picture is not None}
    found = {name for _, name in drawn}
    if figure != _ALL and (missing := [name for name in asked if name not in found]):
        needs = "; ".join(f"{name} needs {FIGURES[name].needs}" for name in missing)
        raise UserError(f"These runs have nothing for {', '.join(missing)}: {needs}.")
    for (place, name), content in drawn.items():
        put(out / place / f"{name}.{ending}", content)
    say(f"Figures: {', '.join(name for name in asked if name in found)} in {out}")
