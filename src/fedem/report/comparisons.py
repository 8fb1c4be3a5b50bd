"""A comparison -> a table on a terminal, or in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedem.cells import Cell
from fedem.comparison import Comparison, Spread
from fedem.methods import METHODS
from fedem.records import Record
from fedem.report.tables import metric_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOTHING = "-"


def comparison_table(comparison: Comparison) -> Table:
    """Return a row a method, and the oracle's when it is known; eighty columns hold it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    columns = _columns(comparison)
    table = Table(title=_title(comparison), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in columns:
        # Two short lines rather than one long one.
        table.add_column(heading.replace(" ", "\n"), justify="right")
    for number, (title, cells) in enumerate(_rows(comparison, columns, together=False)):
        if number == len(comparison.rows):
            table.add_section()
        table.add_row(title, *cells)
    return table


def comparison_remarks(comparison: Comparison) -> list[str]:
    """Return what the table does not say by itself, a line each."""
    name = f"unseen_test_{comparison.metric}"
    silent = [row.title for row in comparison.rows if name in row.figures and row.figures[name].mean is None]
    return [f"Clients held out have no model of: {', '.join(silent)}."] if silent else []


def comparison_markdown(comparison: Comparison, command: str) -> str:
    """Return the table in Markdown, under the command that made it."""
    columns = _columns(comparison)
    lines = [
        f"# {_title(comparison)}",
        "",
        "```",
        command,
        "```",
        "",
        f"{_facts(comparison)}. Scores are averages over clients, weighted by their training samples; ± is the standard "
        "deviation of the sample of seeds.",
        "",
        _line(["method", *columns]),
        _line(["---", *("---:" for _ in columns)]),
        *(_line([title, *cells]) for title, cells in _rows(comparison, columns, together=True)),
        "",
        *(f"{remark}\n" for remark in comparison_remarks(comparison)),
    ]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _title(comparison: Comparison) -> str:
    unit = "accuracy in %" if comparison.metric == "accuracy" else "mean squared error"
    return f"{comparison.data}: {unit} after {comparison.rounds} rounds, {_seeds(comparison)}"


def _seeds(comparison: Comparison) -> str:
    return f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"


def _facts(comparison: Comparison) -> str:
    held_out = f" and {comparison.num_unseen_clients} held out" if comparison.num_unseen_clients else ""
    seeds = ", ".join(map(str, comparison.seeds))
    return f"{comparison.num_clients} clients{held_out}; {comparison.rounds} rounds; seeds {seeds}"


def _columns(comparison: Comparison) -> dict[str, str]:
    """Return the names of the figures by their headings."""
    metric = comparison.metric
    columns = {
        "test average": f"test_{metric}",
        "bottom decile": "bottom_decile",
        "unseen average": f"unseen_test_{metric}",
        "train average": f"train_{metric}",
        "s/ round": "seconds_per_round",
        "kB up/round": "bytes_up_per_round",
        "kB down/round": "bytes_down_per_round",
    }
    return {heading: name for heading, name in columns.items() if name in comparison.rows[0].figures}
