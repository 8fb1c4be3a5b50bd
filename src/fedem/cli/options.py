"""What the commands have in common: options, and how they are read."""

import inspect
import shlex
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fedem.core.errors import UserError, unknown
from fedem.data import DATA
from fedem.data.encoding import IMPUTE
from fedem.data.tables import DECIMALS, ENDINGS, READERS
from fedem.data.texts import SEPARATORS
from fedem.models.losses import CLASSES, NUMBERS
from fedem.models.metrics import METRICS
from fedem.runs.config import Sections, Values

_FILES = f"a file ending in {ENDINGS}, or a folder of such files"

_CLASSES, _NUMBERS = (
    ", ".join(metric.name for metric in METRICS.values() if metric.task == task) for task in (CLASSES, NUMBERS)
)
RunArgument = Annotated[Path, Argument(help="The folder of a run.")]
DataFile = Annotated[Path, Option("--data", help=f"Samples: {_FILES}.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress, no tables: only what is asked for.")]
Force = Annotated[bool, Option("--force", help="Write over what is there already.")]
Which = Annotated[str, Option(help="The state to use: last, or best by validation.")]
Device = Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")]
TargetColumn = Annotated[str | None, Option(help="Name of the target column; as in training when not given.")]
ClientColumn = Annotated[str | None, Option(help="Name of the column of client names; likewise.")]
OwnTarget = Annotated[str | None, Option("--target-column", help="For your own file: name of the target column (y).")]
OwnClient = Annotated[
    str | None, Option("--client-column", help="For your own file: name of the column of client names (client).")
]
SplitBy = Annotated[
    str | None,
    Option(help="For your own file: a column of numbers or dates in whose order each client's rows are cut."),
]
Separator = Annotated[
    str | None,
    Option(help=f"For CSV: what stands between fields: {', or '.join(SEPARATORS)}; found out when not given."),
]
Decimal = Annotated[str | None, Option(help=f"For CSV: the decimal sign, {' or '.join(DECIMALS)}; likewise.")]
TextEncoding = Annotated[str | None, Option("--encoding", help="For CSV: utf-8, cp1252, utf-16, ...; likewise.")]
MaxMemory = Annotated[
    float | None,
    Option(help="GiB that a file may take once it is read; half of what is free when not given.", min=0),
]
ClipOutliers = Annotated[
    bool | None,
    Option("--clip-outliers", help="For your own file: cut off numbers that are absurdly far from all others."),
]
Impute = Annotated[
    str | None,
    Option(help=f"For your own file: what becomes of missing values, {', '.join(IMPUTE)}. Refused when not given."),
]
Data = Annotated[str | None, Option(help=f"A data set ({', '.join(DATA)}) or your own: {_FILES}.")]
StopAfter = Annotated[
    float | None,
    Option(help="Stop at a checkpoint before so many seconds have passed, with exit code 3; go on with --resume."),
]
Rounds = Annotated[int | None, Option(help="Communication rounds.")]
ClientsPerRound = Annotated[
    float | None, Option(help="Share of the clients in each round (up to 1.0), or their number (from 2).")
]
Unseen = Annotated[float | None, Option(help="Share of the clients held out of training.")]
_METRICS = f"For classes: {_CLASSES}; for numbers: {_NUMBERS}."
Metrics = Annotated[
    str | None, Option(help=f"What to score by, with commas between them; the first decides what is best. {_METRICS}")
]
References = Annotated[
    bool,
    Option("--references", help="Also score plain predictors on the same rows: a constant, linear models, boosting."),
]
TrainingDevice = Annotated[str | None, Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Assignments = Annotated[
    list[str] | None, Option("--set", help="Any setting (fedem settings): section.key=value. May be repeated.")
]


def taking(reader: Callable[..., Any], command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of ``reader`` too; its first argument then is what the reader makes of them."""
    read, own = (list(inspect.signature(each).parameters.values()) for each in (reader, command))

    @wraps(command)
    def wrapped(**values: Any) -> Any:
        return command(reader(**{option.name: values.pop(option.name) for option in read}), **values)

    # What must be given comes first.
    parameters = sorted([*read, *own[1:]], key=lambda option: option.default is not option.empty)
    wrapped.__annotations__ = {option.name: option.annotation for option in parameters}
    vars(wrapped)["__signature__"] = inspect.Signature(parameters)  # which typer reads
    return wrapped


def dialect(
    separator: Separator = None,
    decimal: Decimal = None,
    encoding: TextEncoding = None,
    max_memory: MaxMemory = None,
) -> Values:
    """Return what these options say of how a file is to be read."""
    return given(separator=separator, decimal=decimal, encoding=encoding, max_memory=max_memory)


@partial(taking, dialect)
def own_table(
    dialect: Values,
    target_column: OwnTarget = None,
    client_column: OwnClient = None,
    split_by: SplitBy = None,
    impute: Impute = None,
    clip_outliers: ClipOutliers = None,
) -> Values:
    """Return what these options say of a table of the user's own."""
    columns = given(target_column=target_column, client_column=client_column, split_by=split_by)
    return columns | given(impute=impute, clip_outliers=clip_outliers) | dialect


@partial(taking, own_table)
def data_section(own: Values, data: Data = None) -> Values:
    """Return the [data] section that these options ask for."""
    return named_data(own, data)


def named_data(own: Values, data: str | None) -> Values:
    """Return the [data] section of data by their name or path, with what options say of a table."""
    if data is None:
        return own
    if data in DATA:
        return {"name": data, **own}
    if not Path(data).is_dir() and not data.lower().endswith(tuple(READERS)):
        raise unknown("data", data, (*DATA, _FILES))
    return {"name": "file", "path": str(Path(data).absolute()), **own}


def check_new(force: bool, *paths: Path) -> None:
    """Refuse to write over files, unless told to."""
    if not force and (taken := next((path for path in paths if path.exists()), None)) is not None:
        raise UserError(f"{taken} is there already; allowed: another --out, or --force to write over it.")


def asked(
    data: Values, method: str | None = None, graph: str | None = None, components: str | None = None, **run: Any
) -> Sections:
    """Return the sections that options ask for; ``run`` has those of [run]."""
    count: int | str | None = int(components) if components and components.isdecimal() else components
    named = given(name=method, num_components=count)
    found = {"run": given(**run), "method": named, "graph": given(name=graph), "data": data}
    return {section: values for section, values in found.items() if values}


def given(**values: Any) -> Values:
    """Leave out the options that were not given."""
    return {key: value for key, value in values.items() if value is not None}


def listed(text: str | None) -> list[str]:
    """Split what is listed with commas."""
    return [name.strip() for name in text.split(",")] if text else []


def read_seeds(text: str) -> list[int]:
    """Read how many seeds, or which."""
    try:
        numbers = [int(word) for word in listed(text.rstrip(", "))]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or ("," not in text and numbers[0] < 1):
        raise UserError(f"--seeds is {text!r}; allowed: how many (from 1), or which, such as 0,4,7.")
    return numbers if "," in text else list(range(numbers[0]))


def called() -> str:
    """Return the command that was called, but for what is said of going on."""
    going_on = ("--resume", "--retry-failed")
    return shlex.join(["fedem", *(word for word in sys.argv[1:] if word not in going_on)])
