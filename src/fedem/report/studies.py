"""Sweeps as tables and pictures: comparisons, experiments, searches of settings and studies of the theorems.

Also a bar while runs are trained, and a run's diagnostics against the rounds.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedem.core.files import write_atomically
from fedem.methods import METHODS
from fedem.models.metrics import Metric, find_metric, known_metric
from fedem.report.console import errors
from fedem.runs.evaluate import Record, metrics_of
from fedem.runs.trainer import Listener
from fedem.studies.comparison import Comparison, Row, data_name
from fedem.studies.experiments import SLASH, Experiment, Line
from fedem.studies.sweep import Entry, Spread
from fedem.studies.theory import QUANTITIES, Study, Trend
from fedem.studies.tuning import RATE, Tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ten colours that differ in hue or lightness, the first ones most; then the same with other strokes and markers.
COLOURS = ("#0b5fa5", "#d95f02", "#1b8a5a", "#c2185b", "#6a4fb3", "#8c5a2b", "#17a2b8", "#b8a000", "#5b6770", "#e06fb5")
SETTINGS: dict[str, Any] = {"font.size": 9, "svg.hashsalt": "fedem"}
TITLES = {
    "objective": "objective f",
    "gradient_norm2": "|grad f|^2",
    "improvement": "gain of the weights",
    "weights_kl": "KL of the weights",
    "consensus": "distance to consensus",
    "dissimilarity": "mean |grad f_t|^2",
}
_STROKES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = "os^DvPX<>p*h"
_NONE = "-"
# Names of an experiment's figures that their parts do not make.
_NAMES = {
    "bottom_decile": "bottom decile, %",
    "recovery.cluster_accuracy": "assigned rightly, %",
    "recovery.component_distances": "cosine distance",
    "weights_entropy": "entropy, took part",
    "unseen_weights_entropy": "entropy, unseen",
    "seconds_per_round": "s a round",
    "seconds_total": "s in all",
    "num_parameters": "parameters",
}

# --- what all have in common


def look(method: str) -> dict[str, Any]:
    """Return a method's colour, line and marker, the same in every picture."""
    return look_at(list(METHODS).index(method))


def look_at(position: int) -> dict[str, Any]:
    """Return the colour, line and marker at a ``position`` of the list of looks."""
    stroke, marker = _STROKES[position // len(COLOURS) % len(_STROKES)], _MARKERS[position % len(_MARKERS)]
    return {"color": COLOURS[position % len(COLOURS)], "linestyle": stroke, "marker": marker, "linewidth": 1.6}


def saved(figure: Figure, ending: str, **how: Any) -> bytes:
    """Return the picture's bytes."""
    content = io.BytesIO()
    figure.savefig(content, format=ending, bbox_inches="tight", **how)
    return content.getvalue()


def _table(
    title: str | None, headings: Iterable[str], rows: Iterable[Sequence[str]], left: Container[str], whole: str = ""
) -> Table:
    """Return a table; columns are aligned to the right but for those in ``left``, and ``whole`` is never wrapped."""
    edges: dict[str, Any] = {"show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **edges)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading == whole)
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Container[str]) -> list[str]:
    rules = ["---" if heading in left else "---:" for heading in headings]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows)]


def _spread(spread: Spread, show: Callable[[float], str], deviation: Callable[[float], str] | None = None) -> str:
    if spread.mean is None:
        return _NONE
    more = "" if spread.deviation is None else f" ±{(deviation or show)(spread.deviation)}"
    return show(spread.mean) + more


def _over(seeds: Sequence[int], what: str = "mean ± deviation over ") -> str:
    return "one seed" if len(seeds) == 1 else f"{what}{len(seeds)} seeds"


@contextmanager
def runs_progress(
    pending: Sequence[Entry], quiet: bool, titles: Mapping[str, str]
) -> Iterator[Callable[[Entry], AbstractContextManager[Listener]]]:
    """Show one bar over all rounds that are to be trained, and a line for each run that is done, unless ``quiet``.

    Yields a context for each run, which yields the listener of its rounds.
    """
    done: list[Entry] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=sum(entry.config.run.rounds for entry in pending), count="")

        @contextmanager
        def watch(entry: Entry) -> Iterator[Listener]:
            before, latest, outcome = sum(other.config.run.rounds for other in done), Record(), "stopped"
            title = f"{titles.get(entry.title, entry.title):20s}"
            bar.update(task, description=title, count=f"run {len(done) + 1} of {len(pending)}")

            def listen(record: Record) -> None:
                latest.update(record)
                bar.update(task, completed=before + record["round"])

            try:
                yield listen
                metric = metrics_of(latest)[0]
                value = latest.get(f"test_{metric.name}")
                outcome = "done" if value is None else f"test {metric.title} {value:.4f}"
            finally:
                done.append(entry)
                if not quiet:
                    bar.print(f"{title} {outcome}", highlight=False)

        yield watch


# --- comparisons


def comparison_table(comparison: Comparison) -> Table:
    """Return one row per method, and the oracle's when it is known; eighty columns hold it."""
    # There is no room for the deviations of a round's costs; the files have them.
    rows, headings = _comparison_rows(comparison, brief=True), ["method", *_columns(comparison)]
    table = _table(_comparison_title(comparison), headings, rows, ["method"], "method")
    if comparison.oracle:
        table.rows[-2].end_section = True
    return table


def comparison_markdown(comparison: Comparison, command: str) -> str:
    """Return the table in Markdown, under the command that made it."""
    unit, size = _bytes_unit(comparison)
    held_out = f" and {comparison.num_unseen_clients} held out" if comparison.num_unseen_clients else ""
    headings = ["method", *(heading.replace("\n", " ") for heading in _columns(comparison))]
    lines = [
        f"# {_comparison_title(comparison)}",
        "",
        f"    {command}",
        "",
        f"{comparison.num_clients} clients{held_out}; {comparison.rounds} rounds; seeds "
        f"{', '.join(map(str, comparison.seeds))}. Averages over clients are weighted by training samples; ± is the "
        f"sample standard deviation over the seeds; seconds and {unit} ({size:,} bytes; all clients together) are "
        "those of a round.",
        "",
        *_markdown(headings, _comparison_rows(comparison), ["method"]),
        *(text for remark in comparison_remarks(comparison) for text in ("", remark)),
    ]
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


def _comparison_title(comparison: Comparison) -> str:
    unit, over = find_metric(comparison.metric).unit, _over(comparison.seeds)
    return f"{comparison.data}, {comparison.rounds} rounds: {unit}, {over}"


def _columns(comparison: Comparison) -> dict[str, str]:
    metric, (unit, _) = comparison.metric, _bytes_unit(comparison)
    columns = {
        "test\naverage": f"test_{metric}",
        "bottom\ndecile": "bottom_decile",
        "unseen\naverage": f"unseen_test_{metric}",
        "train\naverage": f"train_{metric}",
        **{f"test\n{further.unit}": name for name, further in _further(comparison).items()},
        "s per\nround": "seconds_per_round",
        f"{unit}\nup": "bytes_up_per_round",
        f"{unit}\ndown": "bytes_down_per_round",
    }
    return {heading: name for heading, name in columns.items() if name in comparison.rows[0].figures}


def _further(comparison: Comparison) -> dict[str, Metric]:
    """Return the metrics besides the one that decides, by the names of their figures on the test part."""
    names = [name for name in comparison.rows[0].figures if name.startswith("test_")]
    found = {name: known_metric(name.removeprefix("test_")) for name in names}
    return {name: metric for name, metric in found.items() if metric is not None and metric.name != comparison.metric}


def _comparison_rows(comparison: Comparison, brief: bool = False) -> Iterator[list[str]]:
    """Yield the methods' rows and the oracle's; if ``brief``, costs are without their deviation."""
    (_, size), first, further = _bytes_unit(comparison), find_metric(comparison.metric), _further(comparison)

    def cell(name: str, spread: Spread) -> str:
        if name.startswith(("seconds", "bytes")):
            cost = spread._replace(deviation=None) if brief else spread
            return _spread(cost, "{:.3f}".format if name.startswith("seconds") else amount)
        metric = further.get(name, first)
        return _spread(spread, partial(metric.text, plain=".3g"), partial(metric.text, plain=".2g"))

    def amount(value: float) -> str:
        return f"{value / size:,.0f}" if value / size >= 100 else f"{value / size:.1f}"

    oracle = [("oracle", comparison.oracle)] if comparison.oracle else []
    for title, figures in [*((row.title, row.figures) for row in comparison.rows), *oracle]:
        names = _columns(comparison).values()
        yield [title, *(cell(name, figures[name]) if name in figures else "" for name in names)]


def _bytes_unit(comparison: Comparison) -> tuple[str, int]:
    """Return kB, or MB or GB where the figures would be too wide."""
    spreads = [spread for row in comparison.rows for name, spread in row.figures.items() if name.startswith("bytes")]
    largest = max((spread.mean or 0.0 for spread in spreads), default=0.0)
    return ("kB", 10**3) if largest < 10**7 else ("MB", 10**6) if largest < 10**10 else ("GB", 10**9)


def draw(comparison: Comparison) -> dict[str, bytes]:
    """Return the picture as PNG and SVG, by ending: the same bytes for the same figures; none without test scores.

    One line per method, the mean over the seeds, in a band of one standard deviation on either side. A method looks the
    same in every picture.
    """
    from fedem.report.pictures.canvas import INK, Picture, alone, inked, logarithmic, panels

    if not any(row.curve for row in comparison.rows):
        return {}
    metric, count = find_metric(comparison.metric), len(comparison.rows)
    score = f"test_{metric.name}"
    with inked():
        figure, (axes,) = panels(1)
        figure.set_size_inches(10, max(4.5, 0.3 * count))
        best = comparison.oracle.get(score, Spread(None, None)).mean
        if best is not None:
            how: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (2, 3)), "zorder": 1.5}
            axes.axhline(metric.scale * best, label=f"oracle  {metric.scale * best:.1f}", **how)
        for position, row in enumerate(comparison.rows):
            rounds = [point.round for point in row.curve]
            means = metric.scale * np.array([point.spread.mean or 0.0 for point in row.curve])
            widths = metric.scale * np.array([point.spread.deviation or 0.0 for point in row.curve])
            final, how = row.figures[score]._replace(deviation=None), look(row.method)
            how |= {"label": f"{row.title}  {_spread(final, metric.text)}", "markersize": 4}
            # The better lie above the worse; many bands on top of each other would hide the lines.
            axes.plot(rounds, means, zorder=2 + (count - position) / 100, markevery=max(1, len(rounds) // 8), **how)
            haze: dict[str, Any] = {"color": how["color"], "alpha": 0.13 if count <= 6 else 0.05, "linewidth": 0}
            axes.fill_between(rounds, means - widths, means + widths, zorder=1, **haze)
        averaged = ", average over clients" if metric.larger_is_better else ""
        axes.set(xlabel="communication rounds", ylabel=f"test {metric.unit}{averaged}")
        axes.set_xlim(left=0, right=comparison.rounds * 1.02)
        axes.locator_params(axis="x", integer=True)
        if not metric.larger_is_better:  # errors differ by factors, and those of a method that diverges by many
            logarithmic(axes, "y")
        figure.legend(loc="outside right upper", handlelength=3.2, title="after the last round", alignment="left")
    over = _over(comparison.seeds, "mean ± standard deviation over ")
    picture = Picture(f"{comparison.data}, {comparison.num_clients} clients: {over}", "", figure)
    return {ending: alone(picture, ending) for ending in ("png", "svg")}


# --- experiments


def experiments_table(experiments: Sequence[Experiment]) -> Table:
    """Return one row per experiment."""
    headings, rows = ("name", "in the paper", "what", "runs"), []
    for experiment in experiments:
        sizes = " x ".join(f"{len(choices)} {axis}" for axis, choices in experiment.axes.items())
        rows.append((experiment.name, experiment.place, experiment.title, f"{sizes} x {experiment.seeds} seeds"))
    return _table(None, headings, rows, headings, "name")


def status_table(entries: Sequence[Entry]) -> Table:
    """Return one row per run: how far it has come."""
    headings, rows = ("run", "rounds", "state"), []
    for entry in entries:
        lines = entry.folder.metrics() if entry.folder.exists() else []
        done = lines[-1]["round"] if lines else 0
        state = "complete" if entry.is_complete else "begun" if entry.folder.exists() else "to do"
        rows.append((entry.title, f"{done} of {entry.config.run.rounds}", state))
    return _table(None, headings, rows, headings)


def experiment_table(experiment: Experiment, lines: Sequence[Line]) -> Table:
    """Return one row for each choice: ours, the paper's, and the difference."""
    title = f"{experiment.title} ({experiment.place or 'not in the paper'})"
    return _table(title, _headings(experiment), _experiment_rows(experiment, lines), experiment.axes)


def experiment_markdown(experiment: Experiment, lines: Sequence[Line]) -> str:
    """Return the same for a README."""
    rows = _markdown(_headings(experiment), _experiment_rows(experiment, lines), experiment.axes)
    return "".join(f"{row}\n" for row in rows)


def _headings(experiment: Experiment) -> list[str]:
    columns = []
    for name in experiment.figures:
        figure, slash, reference = name.partition(SLASH)
        usual = figure.replace("unseen_", "unseen, ").replace("_accuracy", ", %").replace("_loss", " loss")
        heading = _NAMES.get(figure, usual) + slash + reference
        columns += [heading, *(("paper", "diff.") if experiment.paper else ())]
    return [*experiment.axes, "seeds", *columns]


def _is_share(name: str) -> bool:
    """Whether a figure is shown in percent: a bottom decile, or a score by such a metric."""
    words = name.rpartition(".")[2].split("_")
    known = (known_metric("_".join(words[start:])) for start in range(len(words)))
    return name.endswith("bottom_decile") or next((metric.in_percent for metric in known if metric), False)


def _experiment_rows(experiment: Experiment, lines: Sequence[Line]) -> Iterator[list[str]]:
    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    for line in lines:
        cells = [*line.labels.values(), str(line.num_seeds)]
        for name in experiment.figures:
            ours, paper, share = line.ours[name], line.paper[name], _is_share(name)
            cells.append(
                _spread(ours, lambda value: f"{100 * value:.1f}") if share else _spread(ours, number, "{:.2g}".format)
            )
            if experiment.paper:
                cells.append(_NONE if paper is None else f"{paper:g}")
                if ours.mean is None or paper is None:
                    cells.append(_NONE)
                else:
                    cells.append(f"{100 * ours.mean - paper:+.1f}" if share else f"{ours.mean - paper:+.2g}")
        yield cells


# --- searches of settings


def trials_table(tuned: Tuned) -> Table:
    """Return one row per trial, the best first."""
    base, grids, metric = tuned.search.base, tuned.search.grids, find_metric(tuned.metric)
    what = f"{METHODS[base.name('method')].title} on {data_name(base)}, {base.run.rounds} rounds"
    title = f"{what}: validation {metric.unit}, {_over(tuned.search.seeds)}"
    headings = ["trial", *(key.replace(".", "\n") for key in grids), "validation", "seconds"]
    rows = []
    for trial in tuned.trials:
        score = "failed" if trial.scores is None else _spread(trial.spread, partial(metric.text, percent=".2f"))
        seconds = _NONE if trial.seconds is None else f"{trial.seconds:.1f}"
        rows.append((f"{trial.number:03d}", *(_value(trial.values[key]) for key in grids), score, seconds))
    return _table(title, headings, rows, ())


def tuning_remarks(tuned: Tuned) -> list[str]:
    """Return what was chosen, how it stands to the grid's edges and to the paper, and what failed; a line each."""
    lines = []
    if tuned.best is not None:
        chosen = tuned.best.values
        lines.append(f"Chosen: {', '.join(f'{key} = {_value(value)}' for key, value in chosen.items())}.")
        for key, edge in tuned.edges.items():
            values = tuned.search.grids[key]
            lines.append(
                f"{key} is at the {edge} edge of what was searched, {_value(min(values))} to {_value(max(values))}: "
                f"the best may lie beyond, so widen it (--grid {key}=...)."
            )
        if tuned.paper_rate is not None:
            lines.append(_beside_paper(chosen[RATE], tuned.paper_rate))
    return lines + [f"Trial {trial.number:03d} failed: {trial.error}" for trial in tuned.trials if trial.error]


def _beside_paper(chosen: float, paper: float) -> str:
    if math.isclose(chosen, paper, rel_tol=1e-3):
        return f"The paper's learning rate is the same, {_value(paper)}."
    ratio = chosen / paper
    differs = f"{_value(ratio)} times as large" if ratio > 1 else f"{_value(1 / ratio)} times smaller"
    return f"The paper's learning rate is {_value(paper)}; the one chosen is {differs}."


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- studies of the convergence theorems, and a run's diagnostics


def study_table(study: Study) -> Table:
    """Return one row for each K, then the slopes beside the theorem's."""
    title = METHODS[study.config.name("method")].title
    rate = f"learning rate {study.initial_rate:g} / sqrt(K)"
    headings = ["K", "learning rate", *(TITLES[name] for name in QUANTITIES)]
    rows = [
        (str(point.rounds), f"{point.learning_rate:.3g}", *(f"{point.means[name]:.3g}" for name in QUANTITIES))
        for point in study.points
    ]
    trends = [_trend(study.trends[name]) for name in QUANTITIES]
    slopes = zip(("slope", "theorem", "tolerance", "holds"), [""] * 4, *trends, strict=True)
    table = _table(f"{title}, means over K rounds at {rate}, {_over(study.seeds, '')}", headings, [*rows, *slopes], ())
    table.rows[len(rows) - 1].end_section = True
    return table


def _trend(trend: Trend | None) -> tuple[str, str, str, str]:
    if trend is None:
        return "zero", "", "", ""
    rate = "" if trend.rate is None else f"{trend.rate:g}"
    return f"{trend.slope:.3f}", rate, f"{trend.tolerance:.3f}", {None: "", True: "yes", False: "no"}[trend.holds]


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
    from fedem.report.pictures.canvas import INK, Picture, alone, inked, logarithmic, panels

    fitted = {name: trend for name, trend in study.trends.items() if trend is not None}
    rounds = np.array([point.rounds for point in study.points], dtype=float)
    with inked():
        figure, places = panels(max(1, len(fitted)))
        for axes, colour, (name, trend) in zip(places, COLOURS, fitted.items(), strict=False):
            axes.plot(rounds, [point.means[name] for point in study.points], "o", color=colour)
            line = np.exp(trend.intercept) * rounds**trend.slope
            axes.plot(rounds, line, color=colour, label=f"slope {trend.slope:.2f} ± {trend.tolerance:.2f}")
            if trend.rate is not None:
                bound = line[0] * (rounds / rounds[0]) ** trend.rate
                axes.plot(rounds, bound, color=INK, linestyle=(0, (4, 3)), label=f"theorem {trend.rate:g}")
            axes.set(title=f"mean {TITLES[name]}", xlabel="K, communication rounds")
            for which in "xy":
                logarithmic(axes, which)
            axes.set_xticks(rounds, [f"{number:g}" for number in rounds])
            axes.set_xticks([], minor=True)
            axes.legend()
    return alone(Picture(f"{METHODS[study.config.name('method')].title}: means over K rounds", "", figure), "png")


def plot_diagnostics(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what was diagnosed in a run's ``metrics`` against the rounds, to a file ending in .png or .svg.

    What is zero throughout is left out, and so is what is not finite.
    """
    from fedem.report.pictures.canvas import Picture, alone, inked, logarithmic, panels

    known = {name: [(line["round"], line[name]) for line in metrics if line.get(name) is not None] for name in TITLES}
    found = {name: np.array(curve, dtype=float).reshape(-1, 2) for name, curve in known.items()}
    finite = {name: curve[np.isfinite(curve[:, 1])] for name, curve in found.items()}
    shown = {name: curve for name, curve in finite.items() if curve[:, 1].any()}
    with inked():
        figure, places = panels(max(1, len(shown)), columns=3, height=2.3)
        for axes, colour, (name, curve) in zip(places, COLOURS, shown.items(), strict=False):
            # All but f tend to zero; where one has arrived, a logarithmic axis has no place for it.
            falls = name != "objective"
            axes.plot(*curve[(curve[:, 1] > 0) | (not falls)].T, "o-", color=colour, markersize=2.5, linewidth=1.3)
            if falls:
                logarithmic(axes, "y")
            axes.set(title=TITLES[name], xlabel="communication rounds")
    write_atomically(path, alone(Picture("Diagnostics of convergence", "", figure), path.suffix.removeprefix(".")))
