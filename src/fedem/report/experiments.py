"""Experiments as tables: what there is, how far it has come, and our figures beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedem.comparison import Spread
from fedem.experiments import Entry, Experiment, Line
from fedem.experiments.declared import SLASH

if TYPE_CHECKING:
    from rich.table import Table

_SHARES = ("accuracy", "bottom_decile")
_NAMES = {
    "test_accuracy": "test, %",
    "train_accuracy": "train, %",
    "bottom_decile": "bottom decile, %",
    "unseen_test_accuracy": "unseen, test, %",
    "unseen_test_loss": "unseen, test loss",
    "unseen_train_accuracy": "unseen, train, %",
    "recovery.cluster_accuracy": "assigned rightly, %",
    "recovery.component_distances": "cosine distance",
    "test_loss": "test loss",
    "train_loss": "train loss",
    "weights_entropy": "entropy, took part",
    "unseen_weights_entropy": "entropy, unseen",
    "seconds_per_round": "s a round",
    "seconds_total": "s in all",
    "num_parameters": "parameters",
}


def experiments_table(experiments: Sequence[Experiment]) -> Table:
    """Return a row an experiment."""
    table = _table("")
    for heading in ("name", "in the paper", "what", "runs"):
        table.add_column(heading, no_wrap=heading == "name")
    for experiment in experiments:
        sizes = " x ".join(f"{len(choices)} {axis}" for axis, choices in experiment.axes.items())
        table.add_row(experiment.name, experiment.place, experiment.title, f"{sizes} x {experiment.seeds} seeds")
    return table


def status_table(entries: Sequence[Entry]) -> Table:
    """Return a row a run: how far it has come."""
    table = _table("")
    for heading in ("run", "rounds", "state"):
        table.add_column(heading)
    for entry in entries:
        lines = entry.folder.metrics() if entry.folder.exists() else []
        done = lines[-1]["round"] if lines else 0
        state = "complete" if entry.is_complete else "begun" if entry.folder.exists() else "to do"
        table.add_row(entry.title, f"{done} of {entry.config.run.rounds}", state)
    return table


def experiment_table(experiment: Experiment, lines: Sequence[Line]) -> Table:
    """Return a row for each choice: ours, the paper's, and the difference."""
    table = _table(f"{experiment.title} ({experiment.place or 'not in the paper'})")
    for heading in _headings(experiment):
        table.add_column(heading, justify="left" if heading in experiment.axes else "right")
    for cells in _rows(experiment, lines):
        table.add_row(*cells)
    return table


def experiment_markdown(experiment: Experiment, lines: Sequence[Line]) -> str:
    """Return the same for a README."""
    headings = _headings(experiment)
    rules = ["---" if heading in experiment.axes else "---:" for heading in headings]
    rows = [headings, rules, *_rows(experiment, lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _headings(experiment: Experiment) -> list[str]:
    """A heading each; where the paper has no figures, none for them."""
    columns = []
    for name in experiment.figures:
        figure, _, reference = experiment.parted(name)
        heading = _NAMES.get(figure, figure) + (f"{SLASH}{reference}" if reference else "")
        columns += [heading, *(("paper", "diff.") if experiment.paper else ())]
    return [*experiment.axes, "seeds", *columns]


def _rows(experiment: Experiment, lines: Sequence[Line]) -> list[list[str]]:
    rows = []
    for line in lines:
        cells = [*line.labels.values(), str(line.num_seeds)]
        for name in experiment.figures:
            ours, paper = line.ours[name], line.paper[name]
            scale = 100 if name.endswith(_SHARES) else 1
            cells.append(_spread(ours, scale))
            if experiment.paper:
                known = ours.mean is not None and paper is not None
                form = "{:+.1f}" if scale == 100 else "{:+.2g}"
                cells.append("-" if paper is None else f"{paper:g}")
                cells.append(form.format(scale * (ours.mean or 0) - (paper or 0)) if known else "-")
        rows.append(cells)
    return rows


def _spread(spread: Spread, scale: int) -> str:
    if spread.mean is None:
        return "-"
    mean = scale * spread.mean
    text = f"{mean:.1f}" if scale == 100 else f"{mean:,.0f}" if abs(mean) >= 1000 else f"{mean:.3g}"
    if spread.deviation is None:
        return text
    return f"{text} ±{100 * spread.deviation:.1f}" if scale == 100 else f"{text} ±{spread.deviation:.2g}"


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
