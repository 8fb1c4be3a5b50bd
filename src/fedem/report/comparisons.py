"""A comparison -> a bar while it goes on, a table on a terminal, and one in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from fedem.comparison import Comparison, Row, Spread
from fedem.config import Config
from fedem.records import Record
from fedem.report.tables import metric_of
from fedem.training import Listener

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Titled(Protocol):
    """A run that has a name of its own: a comparison's or an experiment's."""

    @property
    def title(self) -> str:
        """What it is called."""

    @property
    def config(self) -> Config:
        """What it does."""


Watch = Callable[[Any], AbstractContextManager[Listener | None]]
"""Follows a cell while it is trained."""

_NONE = "-"


def comparison_table(comparison: Comparison) -> Table:
    """Return a row a method, and the oracle's when it is known; eighty columns hold it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    columns = _columns(comparison)
    table = Table(title=_title(comparison), box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right")
    for title, figures in _rows(comparison):
        if not title:
            table.add_section()
            continue
        # There is no room for the deviations of what a round costs; the files have them.
        cells = [_cell(figures.get(name), name, comparison, brief="per_round" in name) for name in columns.values()]
        table.add_row(title, *cells)
    return table


def comparison_markdown(comparison: Comparison, command: str) -> str:
    """Return the table in Markdown, under the command that made it."""
    columns, (unit, size) = _columns(comparison), _unit(comparison)
    held_out = f" and {comparison.num_unseen_clients} held out" if comparison.num_unseen_clients else ""
    seeds = ", ".join(map(str, comparison.seeds))
    lines = [
        f"# {_title(comparison)}",
        "",
        f"    {command}",
        "",
        f"{comparison.num_clients} clients{held_out}; {comparison.rounds} rounds; seeds {seeds}. Averages over clients "
        "are weighted by training samples; ± is the sample standard deviation over the seeds; seconds and "
        f"{unit} ({size:,} bytes; all clients together) are those of a round.",
        "",
        _line(["method", *(heading.replace("\n", " ") for heading in columns)]),
        _line(["---", *("---:" for _ in columns)]),
    ]
    for title, figures in _rows(comparison):
        if title:
            lines.append(_line([title, *(_cell(figures.get(name), name, comparison) for name in columns.values())]))
    lines += [text for remark in comparison_remarks(comparison) for text in ("", remark)]
    return "\n".join(lines) + "\n"


def comparison_remarks(comparison: Comparison) -> list[str]:
    """Return what the table does not say by itself, a line each."""
    name = f"unseen_test_{comparison.metric}"
    silent = [row.title for row in comparison.rows if name in row.figures and row.figures[name].mean is None]
    remarks = [f"Without a model for clients held out: {', '.join(silent)}."] if silent else []
    if differing := _differing(comparison.rows):
        remarks.append(
            f"Methods train differently: {'; '.join(differing)}. `fedem tune` chooses settings by validation."
        )
    return remarks


def _differing(rows: Sequence[Row]) -> list[str]:
    """Say which settings of training differ: the value that most methods have, and who has another."""
    found = []
    for key in dict.fromkeys(key for row in rows for key in row.training):
        holders: dict[Any, list[str]] = {}
        for row in rows:
            holders.setdefault(row.training.get(key), []).append(row.title)
        values = sorted(holders, key=lambda value: -len(holders[value]))
        if len(values) > 1:
            others = ", ".join(f"{value} for {', '.join(holders[value])}" for value in values[1:])
            found.append(f"{key} is {values[0]}, but {others}")
    return found


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _title(comparison: Comparison) -> str:
    unit = "accuracy in %" if comparison.metric == "accuracy" else "mean squared error"
    count = len(comparison.seeds)
    over = f"mean ± deviation over {count} seeds" if count > 1 else "one seed"
    return f"{comparison.data}, {comparison.rounds} rounds: {unit}, {over}"


def _columns(comparison: Comparison) -> dict[str, str]:
    """Return the names of the figures by their headings."""
    metric, (unit, _) = comparison.metric, _unit(comparison)
    columns = {
        "test\naverage": f"test_{metric}",
        "bottom\ndecile": "bottom_decile",
        "unseen\naverage": f"unseen_test_{metric}",
        "train\naverage": f"train_{metric}",
        "s per\nround": "seconds_per_round",
        f"{unit}\nup": "bytes_up_per_round",
        f"{unit}\ndown": "bytes_down_per_round",
    }
    return {heading: name for heading, name in columns.items() if name in comparison.rows[0].figures}


def _rows(comparison: Comparison) -> Iterator[tuple[str, dict[str, Spread]]]:
    """Yield titles and figures; a row without a title stands for a line between them."""
    for row in comparison.rows:
        yield row.title, row.figures
    if comparison.oracle:
        yield "", {}
        yield "oracle", comparison.oracle


def _unit(comparison: Comparison) -> tuple[str, int]:
    """Return kB, or MB or GB where the figures would be too wide."""
    spreads = [spread for row in comparison.rows for name, spread in row.figures.items() if name.startswith("bytes")]
    largest = max((spread.mean or 0.0 for spread in spreads), default=0.0)
    return ("kB", 10**3) if largest < 10**7 else ("MB", 10**6) if largest < 10**10 else ("GB", 10**9)


def _cell(spread: Spread | None, name: str, comparison: Comparison, brief: bool = False) -> str:
    if spread is None:
        return ""
    if spread.mean is None:
        return _NONE
    mean = _number(spread.mean, name, comparison)
    if brief or spread.deviation is None:
        return mean
    return f"{mean} ±{_number(spread.deviation, name, comparison, digits=2)}"


def _number(value: float, name: str, comparison: Comparison, digits: int = 3) -> str:
    if name.startswith("seconds"):
        return f"{value:.3f}"
    if name.startswith("bytes"):
        amount = value / _unit(comparison)[1]
        return f"{amount:,.0f}" if amount >= 100 else f"{amount:.1f}"
    return f"{100 * value:.1f}" if comparison.metric == "accuracy" else f"{value:.{digits}g}"


@contextmanager
def cells_progress(console: Console, pending: Sequence[Titled], quiet: bool) -> Iterator[Watch]:
    """Show one bar over all rounds that are to be trained, and a line for each run that is done."""
    if quiet:
        yield _unwatched
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    total = sum(cell.config.run.rounds for cell in pending)
    done: list[Titled] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, count="")

        @contextmanager
        def watch(cell: Titled) -> Iterator[Listener]:
            name = cell.title
            before = sum(other.config.run.rounds for other in done)
            latest: Record = {}
            bar.update(task, description=f"{name:20s}", count=f"run {len(done) + 1} of {len(pending)}")

            def listen(record: Record) -> None:
                latest.update(record)
                bar.update(task, completed=before + record["round"])

            outcome = "stopped"
            try:
                yield listen
                outcome = _score(latest)
            finally:
                done.append(cell)
                bar.print(f"{name:20s} {outcome}", highlight=False)

        yield watch


def _score(record: Record) -> str:
    metric = metric_of(record)
    value = record.get(f"test_{metric}")
    return "done" if value is None else f"test {metric.replace('_', ' ')} {value:.4f}"


@contextmanager
def _unwatched(cell: Titled) -> Iterator[None]:
    yield None
