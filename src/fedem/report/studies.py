"""A comparison -> a bar while it goes on, a table on a terminal, and one in Markdown."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedem.core.files import write_atomically
from fedem.methods import METHODS
from fedem.report.console import metric_of
from fedem.runs.config import Config
from fedem.runs.evaluate import Record
from fedem.runs.measures import Diagnosis
from fedem.runs.trainer import Listener
from fedem.studies.comparison import Comparison, Row, Spread
from fedem.studies.experiments import SLASH, Entry, Experiment, Line
from fedem.studies.theory import QUANTITIES, Study, Trend
from fedem.studies.tuning import RATE, Trial, Tuned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
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


# Pictures of a comparison: the test score against the rounds.

# Ten colours that differ in hue or lightness, the first ones most; then the same with other strokes and markers.
COLOURS = (
    "#0b5fa5",
    "#d95f02",
    "#1b8a5a",
    "#c2185b",
    "#6a4fb3",
    "#8c5a2b",
    "#17a2b8",
    "#b8a000",
    "#5b6770",
    "#e06fb5",
)
_STROKES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = "os^DvPX<>p*h"
SETTINGS: dict[str, Any] = {"font.size": 9, "svg.hashsalt": "fedem"}


def draw(comparison: Comparison) -> dict[str, bytes]:
    """Return the picture as PNG and SVG, by ending: the same bytes for the same figures; none without test scores.

    A line a method, the mean over the seeds, in a band of one standard deviation on either side. A method looks the
    same in every picture.
    """
    if not any(row.curve for row in comparison.rows):
        return {}
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", SETTINGS]):
        # A figure that no window knows of: nothing is shown, and nothing global is changed.
        figure = Figure(figsize=(8, max(4.5, 0.3 * len(comparison.rows))), facecolor="white")
        axes = figure.add_subplot()
        _lines(axes, comparison)
        _frame(axes, comparison)
        return {"png": saved(figure, "png", dpi=160), "svg": saved(figure, "svg", metadata={"Date": None})}


def _lines(axes: Axes, comparison: Comparison) -> None:
    scale = 100 if comparison.metric == "accuracy" else 1
    best = comparison.oracle.get(f"test_{comparison.metric}")
    if best is not None and best.mean is not None:
        label = f"oracle  {scale * best.mean:.1f}"
        axes.axhline(scale * best.mean, color="black", linewidth=1, linestyle=(0, (2, 3)), label=label, zorder=1.5)
    # Many bands on top of each other would hide the lines.
    haze = 0.13 if len(comparison.rows) <= 6 else 0.05
    # The better lie above the worse; the legend stays in the order of the scores.
    for height, row in zip(range(len(comparison.rows), 0, -1), comparison.rows, strict=True):
        points = [(point.round, point.spread) for point in row.curve if point.spread.mean is not None]
        rounds = [number for number, _ in points]
        means = [scale * (spread.mean or 0.0) for _, spread in points]
        widths = [scale * (spread.deviation or 0.0) for _, spread in points]
        how = look(row.method)
        every = max(1, len(points) // 8)
        axes.plot(
            rounds, means, label=_label(row, comparison), zorder=2 + height / 100, markevery=every, markersize=4, **how
        )
        low, high = ([mean + sign * width for mean, width in zip(means, widths, strict=True)] for sign in (-1, 1))
        axes.fill_between(rounds, low, high, color=how["color"], alpha=haze, linewidth=0, zorder=1)


def look(method: str) -> dict[str, Any]:
    """Return a method's colour, line and marker, the same in every picture."""
    return look_at(list(METHODS).index(method))


def look_at(position: int) -> dict[str, Any]:
    """Return the colour, line and marker at a ``position`` of the list of looks."""
    return {
        "color": COLOURS[position % len(COLOURS)],
        "linestyle": _STROKES[position // len(COLOURS) % len(_STROKES)],
        "marker": _MARKERS[position % len(_MARKERS)],
        "linewidth": 1.6,
    }


def _label(row: Row, comparison: Comparison) -> str:
    final = row.figures[f"test_{comparison.metric}"].mean
    if final is None:
        return f"{row.title}  -"
    return f"{row.title}  {100 * final:.1f}" if comparison.metric == "accuracy" else f"{row.title}  {final:.4g}"


def _frame(axes: Axes, comparison: Comparison) -> None:
    from matplotlib.ticker import LogLocator

    accuracy = comparison.metric == "accuracy"
    axes.set_xlabel("communication rounds")
    axes.set_ylabel("test accuracy in %, average over clients" if accuracy else "test mean squared error")
    if not accuracy:
        # Errors differ by factors, and those of a method that diverges by many.
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlim(left=0, right=comparison.rounds * 1.02)
    axes.locator_params(axis="x", integer=True)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    count = len(comparison.seeds)
    over = "one seed" if count == 1 else f"mean ± standard deviation over {count} seeds"
    axes.set_title(f"{comparison.data}, {comparison.num_clients} clients: {over}", loc="left", fontsize=10)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0,
        frameon=False,
        handlelength=3.2,
        title="after the last round",
        alignment="left",
    )


def saved(figure: Figure, ending: str, **how: Any) -> bytes:
    """Return the picture's bytes."""
    content = io.BytesIO()
    figure.savefig(content, format=ending, bbox_inches="tight", **how)
    return content.getvalue()


# Experiments as tables: what there is, how far it has come, and our figures beside the paper's.

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
    for cells in _entry_rows(experiment, lines):
        table.add_row(*cells)
    return table


def experiment_markdown(experiment: Experiment, lines: Sequence[Line]) -> str:
    """Return the same for a README."""
    headings = _headings(experiment)
    rules = ["---" if heading in experiment.axes else "---:" for heading in headings]
    rows = [headings, rules, *_entry_rows(experiment, lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _headings(experiment: Experiment) -> list[str]:
    """A heading each; where the paper has no figures, none for them."""
    columns = []
    for name in experiment.figures:
        figure, _, reference = experiment.parted(name)
        heading = _NAMES.get(figure, figure) + (f"{SLASH}{reference}" if reference else "")
        columns += [heading, *(("paper", "diff.") if experiment.paper else ())]
    return [*experiment.axes, "seeds", *columns]


def _entry_rows(experiment: Experiment, lines: Sequence[Line]) -> list[list[str]]:
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


# Tables and pictures of how fast a run converges: its diagnostics, and a study of the convergence theorems.

TITLES = {
    "objective": "objective f",
    "gradient_norm2": "|grad f|^2",
    "improvement": "gain of the weights",
    "weights_kl": "KL of the weights",
    "consensus": "distance to consensus",
    "dissimilarity": "mean |grad f_t|^2",
}
_COLUMNS = 3


def study_table(study: Study) -> Table:
    """Return a row for each K, then the slopes beside the theorem's."""
    from rich.table import Table

    from fedem.methods import METHODS

    title = METHODS[study.config.name("method")].title
    seeds = "one seed" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds"
    table = Table(title=f"{title}, means over K rounds at learning rate {study.initial_rate:g} / sqrt(K), {seeds}")
    for heading in ("K", "learning rate", *(TITLES[name] for name in QUANTITIES)):
        table.add_column(heading, justify="right")
    for point in study.points:
        means = (f"{point.means[name]:.3g}" for name in QUANTITIES)
        table.add_row(str(point.rounds), f"{point.learning_rate:.3g}", *means)
    table.add_section()
    for heading, show in (("slope", _slope), ("theorem", _rate), ("tolerance", _tolerance), ("holds", _holds)):
        table.add_row(heading, "", *(show(study.trends[name]) for name in QUANTITIES))
    return table


def _slope(trend: Trend | None) -> str:
    return "zero" if trend is None else f"{trend.slope:.3f}"


def _rate(trend: Trend | None) -> str:
    return "" if trend is None or trend.rate is None else f"{trend.rate:g}"


def _tolerance(trend: Trend | None) -> str:
    return "" if trend is None else f"{trend.tolerance:.3f}"


def _holds(trend: Trend | None) -> str:
    return "" if trend is None or trend.holds is None else ("yes" if trend.holds else "no")


def study_remarks(study: Study) -> list[str]:
    """Return what else there is to say of a study, a line each."""
    constant, slope = study.dissimilarity
    lines = [
        f"Bounded dissimilarity at every measured round: mean |grad f_t|^2 <= G^2 + beta^2 |grad f|^2 with "
        f"G = {constant:.3g}, beta = {slope:.3g}."
    ]
    if any(trend is not None and trend.holds is False for trend in study.trends.values()):
        lines.append(
            "A theorem speaks of K that are large enough: where a slope is too flat, try more rounds, or a larger a0 "
            "if f still falls at the end of the shortest run."
        )
    return lines


def draw_study(study: Study) -> bytes:
    """Return a picture as PNG: each quantity against K on logarithmic axes, its fit and the theorem's slope."""
    from matplotlib import style
    from matplotlib.figure import Figure

    fitted = {name: trend for name, trend in study.trends.items() if trend is not None}
    rounds = np.array([point.rounds for point in study.points], dtype=float)
    with style.context(["default", SETTINGS]):
        figure = Figure(figsize=(3.4 * max(1, len(fitted)), 3.2), layout="constrained", facecolor="white")
        for position, (name, trend) in enumerate(fitted.items()):
            axes = figure.add_subplot(1, len(fitted), position + 1)
            means = np.array([point.means[name] for point in study.points])
            colour = COLOURS[position % len(COLOURS)]
            axes.loglog(rounds, means, "o", color=colour)
            line = np.exp(trend.intercept) * rounds**trend.slope
            axes.loglog(rounds, line, color=colour, label=f"slope {trend.slope:.2f} ± {trend.tolerance:.2f}")
            if trend.rate is not None:
                bound = line[0] * (rounds / rounds[0]) ** trend.rate
                axes.loglog(rounds, bound, color="black", linestyle=(0, (4, 3)), label=f"theorem {trend.rate:g}")
            _theory_frame(axes, f"mean {TITLES[name]}", "K, communication rounds")
            axes.set_xticks(rounds, [f"{number:g}" for number in rounds])
            axes.set_xticks([], minor=True)
            axes.legend(frameon=False)
        return saved(figure, "png", dpi=160)


def plot_diagnostics(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what was diagnosed in a run's ``metrics`` against the rounds, to a file ending in .png or .svg.

    What is zero throughout is left out, and so is what is not finite.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    curves = {name: _curve(metrics, name) for name in Diagnosis._fields}
    shown = {name: curve for name, curve in curves.items() if any(value != 0 for _, value in curve)}
    rows = math.ceil(len(shown) / _COLUMNS)
    with style.context(["default", SETTINGS]):
        figure = Figure(figsize=(3.4 * _COLUMNS, 2.8 * max(1, rows)), layout="constrained", facecolor="white")
        for position, (name, curve) in enumerate(shown.items()):
            axes = figure.add_subplot(rows, _COLUMNS, position + 1)
            # All but f tend to zero; where one has arrived, a logarithmic axis has no place for it.
            falling = name != "objective"
            points = [(number, value) for number, value in curve if value > 0 or not falling]
            axes.plot(*zip(*points, strict=True), color=COLOURS[position], marker="o", markersize=2.5, linewidth=1.3)
            axes.set_yscale("log" if falling else "linear")
            _theory_frame(axes, TITLES[name], "communication rounds")
        ending = path.suffix.removeprefix(".")
        how: dict[str, Any] = {"dpi": 160} if ending == "png" else {"metadata": {"Date": None}}
        write_atomically(path, saved(figure, ending, **how))


def _curve(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["round"], line[name]) for line in metrics if line.get(name) is not None and math.isfinite(line[name])]


def _theory_frame(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(below)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# A search -> a table of its trials, and what there is to say of the values chosen.


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
        table.add_row(f"{trial.number:03d}", *values, _trial_score(trial, tuned.metric), seconds)
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


def _trial_score(trial: Trial, metric: str) -> str:
    if trial.scores is None:
        return "failed"
    shown = [
        f"{100 * value:.2f}" if metric == "accuracy" else _value(value) for value in trial.spread if value is not None
    ]
    return " ±".join(shown)


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
