"""``fedem data``: the public data sets (list, prepare), and what a federation's data look like (describe)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Group
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID
from rich.text import Text
from typer import Argument, Option, Typer

from fedem.cli import options
from fedem.cli.options import Assignments, Quiet, asked, given, named_data, own_table, taking
from fedem.core.errors import UserError, unknown
from fedem.core.files import write_atomically
from fedem.core.settings import complete
from fedem.data import PUBLIC, store
from fedem.report import described
from fedem.report.console import display, errors, labelled_table, say, simple_table, waiting, words, writing
from fedem.runs.config import Config, Values, parse_assignment
from fedem.runs.folder import RunFolder

data_group = Typer(help="Public data sets: what there is, and how to get it.", no_args_is_help=True)


@data_group.command("list")
def list_all() -> None:
    """List the public data sets: what they are, where they are prepared, and where they come from."""
    table = simple_table("data set", bold="data set")
    for heading in ("samples", "clients", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what it is, where it is, where it comes from")
    for kind in PUBLIC.values():
        addresses = [Text(remote.address, style="dim", overflow="fold") for remote in kind.links]
        for *cells, where in _rows(kind):
            table.add_row(*cells, Group(Text(kind.title), Text(where, overflow="fold"), *addresses))
    display(table)


@data_group.command("prepare")
def prepare_one(
    name: Annotated[str, Argument(help=f"One of: {', '.join(PUBLIC)}.")],
    source: Annotated[
        Path | None,
        Option("--from", help="The raw file or folder, or an npz (x, y, client); found or downloaded otherwise."),
    ] = None,
    window: Annotated[int | None, Option(help="shakespeare: characters seen before the one to predict.")] = None,
    again: Annotated[bool, Option("--again", help="Convert again what is prepared already.")] = False,
    quiet: Quiet = False,
) -> None:
    """Download a public data set if need be, and convert it to the form that training reads.

    Examples:
      fedem data prepare cifar10

      fedem data prepare emnist --from gzip.zip
    """
    if name not in PUBLIC:
        raise unknown("data set", name, PUBLIC)
    data = PUBLIC[name](**complete("data", given(window=window), PUBLIC[name]))
    columns = (words("{task.description}"), BarColumn(), words("{task.fields[count]}"))
    tasks: dict[str, TaskID] = {}
    # A bar for each file that is downloaded, and how many samples are converted.
    with Progress(*columns, console=errors, disable=quiet) as bars:

        def listen(what: str, done: int, total: int | None) -> None:
            count = f"{done:,}" if what == "samples" else f"{decimal(done)}{f' of {decimal(total)}' if total else ''}"
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, count=count)
            bars.update(tasks[what], completed=done, total=total, count=count)

        place = store.prepare(data, source, again, listen)
    if quiet:
        return
    about = data.opened()[1]
    values = {
        about.name: "",
        "samples": f"{about.samples:,} of shape {about.files['inputs']['shape'][1:]}, {about.files['inputs']['dtype']}",
        "classes": f"{len(about.labels)}",
        "clients": f"{len(about.owners):,}" if about.owners else "none of its own",
        "size": decimal(about.num_bytes),
        "fingerprint": about.fingerprint,
        "folder": str(place),
    }
    folded = {label: Text(value, overflow="fold") for label, value in values.items()}
    display(labelled_table(folded, bold=about.name))


def _rows(kind: type[store.Public]) -> Iterator[tuple[str, ...]]:
    """Yield name, samples, clients, size and place of a data set that is prepared, in one or several places."""
    if not (places := store.prepared(kind)):
        yield kind.name, "", "", "", f"not prepared: {kind().command}"
    for place in places:
        try:
            about = store.read_about(place)
        except (OSError, ValueError):
            yield place.name, "", "", "", f"{place} is damaged or outdated: {kind().command} --again"
        else:
            clients = f"{len(about.owners):,}" if about.owners else "-"
            yield about.name, f"{about.samples:,}", clients, decimal(about.num_bytes), str(place)


@data_group.command()
@partial(taking, own_table)
def describe(
    own: Values,
    data: Annotated[str, Argument(help="A data set's name, or a file or folder of your own.")],
    seed: Annotated[int, Option(help="Decides partition and split, as in training.")] = 0,
    settings: Assignments = None,
    run: Annotated[Path | None, Option(help="The folder of a run: say which of the clients it has trained.")] = None,
    out: Annotated[Path | None, Option(help="Also draw the clients, to this file (.png or .svg).")] = None,
    force: options.Force = False,
    quiet: Quiet = False,
) -> None:
    """Describe a data set's clients: sizes, labels, how much they differ, and what is made of a table's columns."""
    if out is not None and out.suffix not in (".png", ".svg"):
        raise UserError(f"--out is {out}; allowed: a file ending in .png or .svg.")
    options.check_new(force, *([out] if out else []))
    trained = [] if run is None else RunFolder(run).check().load().facts["clients"]
    layer = asked(named_data(own, data), seed=seed)
    config = Config.build(layer, *map(parse_assignment, settings or []))
    with waiting("Making the data", quiet):
        found = described.describe(config.make_data(), Path(data).name)
    if not quiet:
        display(described.sizes_table(found), *([] if found.counts is None else [described.labels_table(found)]))
        for line in described.remarks(found):
            say(line)
    if run is not None:
        known = described.known_clients(found.names, run, trained)
        say(known or f"No client took part in the training of {run}.")
    if out is not None:
        with writing(out):
            write_atomically(out, described.draw_clients(found, out.suffix.removeprefix(".")))
        say(f"Picture: {out}")
