"""A search -> a table of its trials, and what there is to say of the values chosen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedem.methods import METHODS
from fedem.tuning import Trial, Tuned
from fedem.tuning.grids import RATE

if TYPE_CHECKING:
    from rich.table import Table

_NONE = "-"


def trials_table(tuned: Tuned) -> Table:
    """Return a row a trial, the best first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    base, count = tuned.search.base, len(tuned.search.seeds)
    unit = "accuracy in %" if tuned.metric == "accuracy" else "mean squared error"
    over = f"mean ± deviation over {count} seeds" if count > 1 else "one seed"
    data = Path(base.values("data").get("path") or base.name("data")).name
    what = f"{METHODS[base.name('method')].title} on {data}, {base.run.rounds} rounds"
    title = f"{what}: validation {unit}, {over}"
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("trial", *(key.replace(".", "\n") for key in tuned.search.grids), "validation", "seconds"):
        table.add_column(heading, justify="right")
    for trial in tuned.trials:
        seconds = _NONE if trial.seconds is None else f"{trial.seconds:.1f}"
        values = (_value(trial.values[key]) for key in tuned.search.grids)
        table.add_row(f"{trial.number:03d}", *values, _score(trial, tuned.metric), seconds)
    return table


def tuning_remarks(tuned: Tuned) -> list[str]:
    """Return what was chosen, how it stands to the grid's edges and to the paper, and what failed; a line each."""
    lines = []
    if tuned.best is not None:
        chosen = ", ".join(f"{key} = {_value(value)}" for key, value in tuned.best.values.items())
        lines.append(f"Chosen: {chosen}.")
        lines += [_edge(tuned, key, edge) for key, edge in tuned.edges.items()]
        if tuned.paper_rate is not None:
            lines.append(_beside_paper(tuned.best.values[RATE], tuned.paper_rate))
    return lines + [f"Trial {trial.number:03d} failed: {trial.error}" for trial in tuned.trials if trial.error]


def _edge(tuned: Tuned, key: str, edge: str) -> str:
    values = tuned.search.grids[key]
    return (
        f"{key} is at the {edge} edge of what was searched, {_value(min(values))} to {_value(max(values))}: the best "
        f"may lie beyond, so widen it (--grid {key}=...)."
    )


def _beside_paper(chosen: float, paper: float) -> str:
    if math.isclose(chosen, paper, rel_tol=1e-3):
        return f"The paper's learning rate is the same, {_value(paper)}."
    ratio = chosen / paper
    differs = f"{_value(ratio)} times as large" if ratio > 1 else f"{_value(1 / ratio)} times smaller"
    return f"The paper's learning rate is {_value(paper)}; the one chosen is {differs}."


def _score(trial: Trial, metric: str) -> str:
    if trial.scores is None:
        return "failed"
    shown = [
        f"{100 * value:.2f}" if metric == "accuracy" else _value(value) for value in trial.spread if value is not None
    ]
    return " ±".join(shown)


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
