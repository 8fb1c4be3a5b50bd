"""``fedem choose``: what should these clients use?"""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedem.cli import options
from fedem.cli.options import asked, called, named_data, own_table, taking
from fedem.core.files import write_atomically
from fedem.report.choice import choice_markdown, choice_pages, clients_sentences
from fedem.report.console import aside, display, say, waiting, writing
from fedem.runs.config import Config, Layer, Values, parse_assignment
from fedem.runs.folder import new_folder
from fedem.studies.choice import read_budget, search


@partial(taking, own_table)
def choose(
    own: Values,
    table: Annotated[str, Argument(help="Your table: a CSV or Parquet file, ...; or the name of a data set.")],
    budget: Annotated[str, Option(help="How long it may take, about: 90s, 10m, 2h.")] = "10m",
    rounds: options.Rounds = None,
    metrics: options.Metrics = None,
    seed: Annotated[int | None, Option(help="Decides everything that is random.")] = None,
    device: options.TrainingDevice = None,
    settings: options.Assignments = None,
    out: Annotated[Path | None, Option(help="Where all is written; runs/choose-TABLE when not given.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Find out what suits these clients, one model for all or models of their own, and train it.

    Methods with linear models and small networks are tried by validation, with the same rounds each; the better half
    goes on to longer trials. The winner is trained to the end, and the test part is read once, to compare it with plain
    alternatives. OUT/winner is a run like any other; OUT/choice.json holds every trial.

    Examples:
      fedem choose exams.csv --client-column school --target-column score

      fedem choose sensors.csv --client-column sensor --target-column failed --budget 2h --metrics roc_auc

      fedem predict runs/choose-exams/winner --data new.csv --out predicted.csv
    """
    seconds = read_budget(budget)
    data = named_data(own, table)
    layers: list[Layer] = [asked(data, rounds=rounds, metrics=metrics, seed=seed, device=device)]
    layers += map(parse_assignment, settings or [])
    config = Config.build(*layers)
    place = out or new_folder(Path("runs"), f"choose-{Path(table).stem}")
    with waiting("Making the data", quiet):
        dataset = config.make_data()
    if not quiet:
        if dataset.encoding is not None:
            aside(f"note: {dataset.encoding.describe()}")
            for line in dataset.encoding.notes:
                aside(f"  - {line}")
        for sentence in clients_sentences(dataset):
            say(sentence)
    watch = None if quiet else (lambda what: aside(f"trying {what}"))
    in_order = bool(config.values("data").get("split_by"))
    found = search(layers, dataset, seconds, place, in_order, watch)
    with writing(place):
        write_atomically(place / "choice.md", choice_markdown(found, called()).encode())
    if not quiet:
        display(*choice_pages(found))
    say(f"Chosen: {place / 'winner'}")
