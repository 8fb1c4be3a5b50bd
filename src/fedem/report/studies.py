"""Sweeps as bars of progress, tables and pictures: comparisons, experiments, searches, studies of the theorems."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table

from fedem.core.errors import UserError, counted
from fedem.core.files import write_atomically
from fedem.methods import METHODS
from fedem.models.metrics import Metric, find_metric, known_metric
from fedem.report.console import Rows, console, errors, rendered, score_text, simple_table, words
from fedem.report.pictures.canvas import (
    COLOURS,
    INK,
    Picture,
    alone,
    bytes_unit,
    inked,
    logarithmic,
    look,
    panels,
)
from fedem.report.pictures.curves import DIAGNOSED, recorded
from fedem.runs.config import Config, assignment
from fedem.runs.evaluate import Record
from fedem.runs.trainer import Listener, Trainer
from fedem.studies.comparison import Comparison, data_name
from fedem.studies.experiments import SLASH, Experiment, Line, in_percent, metric_of
from fedem.studies.sweep import Entry, Gap, Spread, reason
from fedem.studies.theory import QUANTITIES, Study, Trend
from fedem.studies.tuning import RATE, Tuned

_Watch = Callable[[Entry], AbstractContextManager[Listener]]
_NONE = "-"
_DECISIVE = "test\naverage"
_PAIRED = "to the best, ± s.e."  # differences seed by seed, and the standard error of their mean
# Names of an experiment's figures that their parts do not make.
_NAMES = {
    "bottom_decile": "bottom decile, %",
    "recovery.cluster_accuracy": "assigned rightly, %",
    "recovery.component_distances": "cosine distance",
    "recovery.weight_distance": "distance of Pi",
    "recovery.optimal_weight_distance": "... most likely Pi",
    "weights_entropy": "entropy, took part",
    "unseen_weights_entropy": "entropy, unseen",
    "seconds_per_round": "s a round",
    "seconds_total": "s in all",
    "num_parameters": "parameters",
}


def chosen_by_data(asked: Config, settled: Config) -> str:
    """Say what the data decided of a run's steps; nothing where all was given."""
    said = []
    if asked.batching != settled.batching:
        batching = settled.batching
        batches = f"batches of {batching.batch_size}" if batching.batch_size else "all samples in one batch"
        said.append(f"{batches}, {counted(batching.local_epochs, 'pass', 'passes')} over each client's samples a round")
    if asked.schedule.learning_rate == 0:
        said.append(f"learning rate {settled.schedule.learning_rate:g}")
    return f"{', '.join(said)} (chosen from the data)" if said else ""


def model_in_words(trainer: Trainer) -> str:
    """Say what model a run trains, how large it is and, where the data decided that, why it is this one."""
    model, name = trainer.recipe.model, trainer.config.name("model")
    size = counted(model.num_parameters, "parameter")
    if name in ("linear", "mlp"):
        weights = [shape for shape in model.leaf_shapes.values() if len(shape) == 2]
        size = f"{' x '.join(map(str, [weights[0][1], *(shape[0] for shape in weights)]))}, {size}"
    return f"model {name} ({size})" + (f"; {trainer.why}" if trainer.why else "")


def _table(title: str, headings: Iterable[str], rows: Rows, left: Container[str], whole: str = "") -> Table:
    """Return a table; columns are aligned to the right but for those in ``left``, and ``whole`` is never wrapped.

    In a narrow terminal those in ``left`` are as wide as their longest word, so that none is cut and taken for another.
    """
    lines = [list(row) for row in rows]
    table = simple_table(*headings, rows=lines, title=title, whole=(whole,))
    table.show_edge, table.title_style = False, None
    is_wide = console.measure(table, options=console.options.update(width=1000)).maximum > console.width
    for index, column in enumerate(table.columns):
        is_left = column.header in left
        column.justify = "left" if is_left else "right"
        if is_left and is_wide and column.header != whole:
            texts = (str(column.header), *(line[index] for line in lines))
            column.width = max(len(word) for text in texts for word in text.split())
    return table


def markdown_table(headings: Sequence[str], rows: Rows, left: Container[str]) -> list[str]:
    """Return the lines of a table in Markdown; columns are aligned to the right but for those in ``left``."""
    rules = ["---" if heading in left else "---:" for heading in headings]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows)]


def spread_text(spread: Spread, show: Callable[[float], str], deviation: Callable[[float], str] | None = None) -> str:
    """Return a mean and, of several seeds, its deviation."""
    if spread.mean is None:
        return _NONE
    more = "" if spread.deviation is None else f" ±{(deviation or show)(spread.deviation)}"
    return show(spread.mean) + more


def gap_text(gap: Gap, metric: Metric) -> str:
    """Return a difference and, where it is known, its standard error."""
    error = "" if gap.error is None else f" ±{metric.text(gap.error, '.2f', '.2g')}"
    return metric.text(gap.mean, "+.2f", "+.3g") + error


def over_seeds(seeds: Sequence[int], what: str = "mean ± deviation over ") -> str:
    """Say which seeds figures are of, after ``what`` where they are several."""
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"{what}the seeds {', '.join(map(str, seeds))}"


@contextmanager
def runs_progress(pending: Sequence[Entry], quiet: bool, titles: Mapping[str, str]) -> Iterator[_Watch]:
    """Show one bar over all rounds, and a line for each run that is done; yields a context of each run's listener."""
    done: list[int] = []  # rounds of each run that is over
    columns = (words("{task.description}"), BarColumn(), words("{task.fields[count]}"), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=sum(entry.config.run.rounds for entry in pending), count="")

        @contextmanager
        def watch(entry: Entry) -> Iterator[Listener]:
            before, latest, outcome = sum(done), Record(), "stopped"
            title = f"{titles.get(entry.title, entry.title):20s}"
            bar.update(task, description=title, count=f"run {len(done) + 1} of {len(pending)}")

            def listen(record: Record) -> None:
                latest.update(record)
                bar.update(task, completed=before + record["round"])

            try:
                yield listen
                # The best state may count, and not the last one.
                outcome = score_text(entry.folder.summary() or latest) or "done"
            except UserError:
                outcome = "failed"
                raise
            finally:
                done.append(entry.config.run.rounds)
                if not quiet:
                    bar.print(f"{title} {outcome}", highlight=False)

        yield watch


def _columns(comparison: Comparison) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return figures by headings: of the deciding metric and costs; of further ones; of all test rows together."""
    decisive, (unit, _), known = comparison.metric, _bytes_unit(comparison), comparison.rows[0].figures
    columns = {
        _DECISIVE: f"test_{decisive}",
        "bottom\ndecile": "bottom_decile",
        "unseen\naverage": f"unseen_test_{decisive}",
        "train\naverage": f"train_{decisive}",
        "s per\nround": "seconds_per_round",
        f"{unit}\nup": "bytes_up_per_round",
        f"{unit}\ndown": "bytes_down_per_round",
    }
    further, pooled = dict[str, str](), dict[str, str]()
    for name in known:
        metric = known_metric(name.removeprefix("test_")) if name.startswith("test_") else None
        for key, place, where in ((name, further, "test"), (f"{name}_pooled", pooled, "all test rows")):
            if metric is None or key not in known or key == f"test_{decisive}":
                continue
            own = f"{key}_in_units" if f"{key}_in_units" in known else ""
            place[f"{where}\n{metric.unit}{', own units' if own else ''}"] = own or key
    return {heading: name for heading, name in columns.items() if name in known}, further, pooled


def comparison_rows(comparison: Comparison, brief: bool = False) -> list[dict[str, str]]:
    """Return cells by headings: of methods, failed ones, references, the oracle; ``brief`` costs lack deviations."""
    (_, size), decisive = _bytes_unit(comparison), find_metric(comparison.metric)
    columns, further, pooled = _columns(comparison)

    def amount(value: float) -> str:
        return f"{value / size:,.0f}" if value / size >= 100 else f"{value / size:.1f}"

    def cell(name: str, figures: Mapping[str, Spread]) -> str:
        if name not in figures:
            return ""
        if name.startswith(("seconds", "bytes")):
            cost = figures[name]._replace(deviation=None) if brief else figures[name]
            return spread_text(cost, "{:.3f}".format if name.startswith("seconds") else amount)
        plain = name.removeprefix("test_").removesuffix("_in_units").removesuffix("_pooled")
        metric = known_metric(plain) or decisive
        return spread_text(figures[name], partial(metric.text, plain=".3g"), partial(metric.text, plain=".2g"))

    def cells(title: str, figures: Mapping[str, Spread]) -> dict[str, str]:
        shown = {heading: cell(name, figures) for heading, name in (columns | further | pooled).items()}
        return {"method": title} | shown

    rows = [cells(row.title, row.figures) for row in comparison.rows]
    nothing = dict.fromkeys(comparison.rows[0].figures, Spread(None, None))
    rows += [cells(each.title, nothing) | {_DECISIVE: each.phrase} for each in comparison.failed]
    rows += [cells(row.title, row.figures) for row in comparison.references]
    return rows + ([cells("oracle", comparison.oracle)] if comparison.oracle else [])


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Return a row for each method, reference and the oracle, in eighty columns; tables of further metrics follow."""
    # There is no room for the deviations of a round's costs; the files have them.
    rows = comparison_rows(comparison, brief=True)
    titles, tables = (_comparison_title(comparison), "Averages over clients", "All clients' test rows together"), []
    for chosen, title in zip(_columns(comparison), titles, strict=True):
        cells = [[row["method"], *(row[heading] for heading in chosen)] for row in rows]
        if chosen:
            headings = [heading if title == titles[0] else heading.partition("\n")[2] for heading in chosen]
            tables.append(_table(title, ["method", *headings], cells, ["method"], "method"))
    for table in tables:
        tried = len(comparison.rows) + len(comparison.failed)
        for end in (tried, tried + len(comparison.references)):
            table.rows[end - 1].end_section = end < len(rows)
    return tables


def comparison_markdown(comparison: Comparison, command: str) -> str:
    """Return the table in Markdown, under the command that made it."""
    (unit, size), rows = _bytes_unit(comparison), comparison_rows(comparison)
    table = markdown_table([heading.replace("\n", " ") for heading in rows[0]], map(dict.values, rows), ["method"])
    known = {"title": _comparison_title(comparison), "remarks": comparison_remarks(comparison), "counted": counted}
    about: dict[str, Any] = {"command": command, "unit": unit, "size": size, "table": table, **known}
    return rendered("comparison.md", comparison=comparison, **about)


def comparison_remarks(comparison: Comparison) -> list[str]:
    """Return what the table does not say by itself, a line each."""
    rows, metric, unseen = comparison.rows, find_metric(comparison.metric), f"unseen_test_{comparison.metric}"
    silent = [row.title for row in rows if unseen in row.figures and row.figures[unseen].mean is None]
    paired = {row.title: comparison.gaps[row.method] for row in (*rows[1:], *comparison.references)}
    gaps = [f"{title} {gap_text(gap, metric)}" for title, gap in paired.items() if gap.error is not None]
    differing = []  # the value that most methods have, and who has another
    for key in dict.fromkeys(key for row in rows for key in row.training):
        holders: dict[Any, list[str]] = {}
        for row in rows:
            holders.setdefault(row.training.get(key), []).append(row.title)
        usual, *others = sorted(holders, key=lambda value: -len(holders[value]))
        if others:
            exceptions = ", ".join(f"{value} for {', '.join(holders[value])}" for value in others)
            differing.append(f"{key} is {usual}, but {exceptions}")
    failed = [reason(each.title, each.failures) for each in comparison.failed]
    known = {"gaps": gaps, "silent": silent, "differing": differing, "failed": failed, "notes": comparison.notes}
    few = _left_out(*comparison.left_out, comparison.num_clients)
    return rendered("comparison.txt", best=rows[0].title, left_out=few, **known).splitlines()


def _left_out(fewest: int, most: int, clients: int) -> str:
    """Say how many clients the bottom decile leaves out; empty where it is none."""
    number = f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}"
    return f"{number} of {counted(clients, 'client')}" if most else ""


def _comparison_title(comparison: Comparison) -> str:
    metric, over = find_metric(comparison.metric), over_seeds(comparison.seeds)
    rate = comparison.rows[0].figures.get("test_base_rate") if metric.name == "accuracy" else None
    base = "" if rate is None else f" (base rate {metric.text(rate.mean)})"
    return f"{comparison.data}, {counted(comparison.rounds, 'round')}: {metric.unit}{base}, {over}"


def _bytes_unit(comparison: Comparison) -> tuple[str, int]:
    """Return kB, or MB or GB where the figures would be too wide, and its size."""
    spreads = [spread for row in comparison.rows for name, spread in row.figures.items() if name.startswith("bytes")]
    return bytes_unit(max((spread.mean or 0.0 for spread in spreads), default=0.0) / 10)


def draw(comparison: Comparison) -> dict[str, bytes]:
    """Return the means over the seeds in bands of a standard deviation, as PNG and SVG; none without test scores."""
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
            rounds = list(row.curve)
            means = metric.scale * np.array([spread.mean or 0.0 for spread in row.curve.values()])
            widths = metric.scale * np.array([spread.deviation or 0.0 for spread in row.curve.values()])
            how = look(row.method) | {"label": f"{row.title}  {metric.text(row.figures[score].mean)}", "markersize": 4}
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
    over = over_seeds(comparison.seeds, "mean ± standard deviation over ")
    picture = Picture(f"{comparison.data}, {counted(comparison.num_clients, 'client')}: {over}", "", figure)
    return {ending: alone(picture, ending) for ending in ("png", "svg")}


def experiments_table(experiments: Sequence[Experiment]) -> Table:
    """Return one row per experiment."""
    headings, rows = ("name", "what, and where in the paper"), []
    for experiment in experiments:
        sizes = " x ".join(f"{len(choices)} {axis}" for axis, choices in experiment.axes.items())
        runs = f"{sizes} x {counted(experiment.seeds, 'seed')}"
        place = f"{experiment.place}: " if experiment.place else ""
        rows.append((experiment.name, f"{place}{experiment.title} ({runs})"))
    return simple_table(*headings, rows=rows, whole=("name",))


def status_table(entries: Sequence[Entry]) -> Table:
    """Return one row per run: how far it has come."""
    headings, rows = ("run", "rounds", "state"), []
    for entry in entries:
        lines = entry.folder.metrics() if entry.folder.exists() else []
        done = lines[-1]["round"] if lines else 0
        state = "complete" if entry.is_complete else "begun" if entry.folder.exists() else "to do"
        if (failure := entry.failure) is not None:
            state = f"failed: {failure.phrase}"
        rows.append((entry.title, f"{done} of {entry.config.run.rounds}", state))
    return _table("", headings, rows, headings)


def experiment_tables(experiment: Experiment, lines: Sequence[Line]) -> list[Table]:
    """Return one row for each choice: ours, the paper's, and the difference.

    Of several axes each choice on the first has a table of its own, which leaves room for the others in a terminal.
    """
    title = f"{experiment.title} ({experiment.place or 'not in the paper'})"
    headings, rows = _headings(experiment, lines), list(_experiment_rows(experiment, lines))
    if len(experiment.axes) == 1:
        return [_table(title, headings, rows, experiment.axes)]
    parts: dict[str, list[list[str]]] = {}
    for label, *cells in rows:
        parts.setdefault(label, []).append(cells)
    return [_table(f"{title}: {label}", headings[1:], part, experiment.axes) for label, part in parts.items()]


def experiment_markdown(experiment: Experiment, lines: Sequence[Line]) -> str:
    """Return the same for a README."""
    rows = _experiment_rows(experiment, lines)
    table = markdown_table(_headings(experiment, lines), rows, experiment.axes)
    return "\n".join([*table, *(f"\n{remark}" for remark in experiment_remarks(experiment, lines))]) + "\n"


def experiment_remarks(experiment: Experiment, lines: Sequence[Line]) -> list[str]:
    """Return what the table does not say by itself: failures, whom deciles leave out, other settings."""
    remarks = [reason(SLASH.join(line.labels.values()), line.failed) for line in lines if line.failed]
    most = max((line.left_out for line in lines), default=0)
    if most and any(name.endswith("bottom_decile") for name in experiment.figures):
        few = counted(most, "client has", "clients have")
        remarks.append(f"Bottom deciles leave out clients with fewer than five test samples: up to {few} so few.")
    return [*remarks, *_departures(lines)]


def _headings(experiment: Experiment, lines: Sequence[Line]) -> list[str]:
    headings = [*experiment.axes, "seeds", *([_PAIRED] if _are_paired(lines) else [])]
    for name in experiment.figures:
        headings += [figure_heading(name), *(("paper", "diff.") if experiment.paper else ())]
    return headings


def figure_heading(name: str) -> str:
    """Return what a column of an experiment's figure is called."""
    figure, slash, reference = name.partition(SLASH)
    usual = figure.replace("unseen_", "unseen, ").replace("_accuracy", ", %").replace("_loss", " loss")
    return _NAMES.get(figure, usual) + slash + reference


def made_with(departures: Mapping[str, Any]) -> str:
    """Return settings as options give them; those that a run does not have are left out."""
    return " ".join(assignment(place, value) for place, value in departures.items() if value is not None)


def _departures(lines: Sequence[Line]) -> Iterator[str]:
    """Say what runs were made with in place of what is declared, by a label where all of its runs were."""
    run = [line for line in lines if line.seeds or line.failed]
    groups: dict[str, list[Line]] = {}
    for line in run:
        if line.departures:
            groups.setdefault(made_with(line.departures), []).append(line)
    for settings, group in groups.items():
        names, left = [], group
        for label in dict.fromkeys(label for line in group for label in line.labels.values()):
            members = [line for line in run if label in line.labels.values()]
            if all(line in group for line in members) and any(line in left for line in members):
                names.append(label)
                left = [line for line in left if line not in members]
        names += [SLASH.join(line.labels.values()) for line in left]
        yield f"{', '.join(names)}: made with {settings}, other than declared."


def _are_paired(lines: Sequence[Line]) -> bool:
    return any(line.gap is not None and line.gap.mean is not None for line in lines)


def _experiment_rows(experiment: Experiment, lines: Sequence[Line]) -> Iterator[list[str]]:
    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    decisive = metric_of(experiment.figures[0])
    for line in lines:
        cells = [*line.labels.values(), ", ".join(map(str, line.seeds)) or _NONE]
        if decisive is not None and _are_paired(lines):
            known = line.ours[experiment.figures[0]].mean is not None
            cells.append(gap_text(line.gap, decisive) if line.gap is not None else "best" if known else _NONE)
        for name in experiment.figures:
            ours, paper, share = line.ours[name], line.paper[name], in_percent(name)
            ways = (lambda value: f"{100 * value:.1f}",) if share else (number, "{:.2g}".format)
            difference = _NONE
            if ours.mean is not None and paper is not None:
                difference = f"{100 * ours.mean - paper:+.1f}" if share else f"{ours.mean - paper:+.2g}"
            beside = (_NONE if paper is None else f"{paper:g}", difference) if experiment.paper else ()
            shown = spread_text(ours, *ways)
            if line.failed and name == experiment.figures[0]:
                shown = f"failed: {next(iter(line.failed.values())).phrase}"
            cells += [shown, *beside]
        yield cells


def trials_table(tuned: Tuned) -> Table:
    """Return one row per trial, the best first."""
    base, grids, metric = tuned.search.base, tuned.search.grids, find_metric(tuned.metric)
    what = f"{METHODS[base.name('method')].title} on {data_name(base)}, {counted(base.run.rounds, 'round')}"
    title = f"{what}: validation {metric.unit}, {over_seeds(tuned.search.seeds)}"
    headings = ["trial", *(key.replace(".", "\n") for key in grids), "validation", "seconds"]
    rows = []
    for trial in tuned.trials:
        score = "failed" if trial.scores is None else spread_text(trial.spread, partial(metric.text, percent=".2f"))
        seconds = _NONE if trial.seconds is None else f"{trial.seconds:.1f}"
        rows.append((f"{trial.number:03d}", *(_value(trial.values[key]) for key in grids), score, seconds))
    return _table(title, headings, rows, ())


def tuning_remarks(tuned: Tuned) -> list[str]:
    """Return what was chosen, how it stands to the grid's edges and to the paper, and what failed; a line each."""
    lines, paper = list[str](), tuned.paper_rate
    if tuned.best is not None:
        ratio = None if paper is None else tuned.best.values[RATE] / paper
        same = ratio is not None and math.isclose(ratio, 1, rel_tol=1e-3)
        lines = rendered("tuning.txt", tuned=tuned, ratio=ratio, same=same, value=_value).splitlines()
    return lines + [f"Trial {trial.number:03d} failed: {trial.error}" for trial in tuned.trials if trial.error]


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def study_table(study: Study) -> Table:
    """Return one row for each K, then the slopes beside the theorem's."""
    how = f"means over K rounds at learning rate {study.initial_rate:g} / sqrt(K), {over_seeds(study.seeds, '')}"
    headings = ["K", "learning rate", *(DIAGNOSED[name] for name in QUANTITIES)]
    rows = [
        (str(point.rounds), f"{point.learning_rate:.3g}", *(f"{point.means[name]:.3g}" for name in QUANTITIES))
        for point in study.points
    ]
    trends = (_trend(study.trends[name]) for name in QUANTITIES)
    slopes = zip(("slope", "95% interval", "theorem", "outcome"), [""] * 4, *trends, strict=True)
    table = _table(f"{METHODS[study.config.name('method')].title}, {how}", headings, [*rows, *slopes], ())
    table.rows[len(rows) - 1].end_section = True
    return table


def _trend(trend: Trend | None) -> tuple[str, str, str, str]:
    if trend is None:
        return "zero", "", "", ""
    rate = "" if trend.rate is None else f"{trend.rate:g}"
    return f"{trend.slope:.3f}", f"{trend.low:.3f} to {trend.high:.3f}", rate, trend.outcome or ""


def study_remarks(study: Study) -> list[str]:
    """Return what else there is to say of a study, a line each."""
    return rendered("study.txt", study=study).splitlines()


def draw_study(study: Study) -> bytes:
    """Return a picture as PNG: each quantity against K on logarithmic axes, its fit and the theorem's slope."""
    fitted = {name: trend for name, trend in study.trends.items() if trend is not None}
    rounds = np.array([point.rounds for point in study.points], dtype=float)
    with inked():
        figure, places = panels(max(1, len(fitted)))
        for axes, colour, (name, trend) in zip(places, COLOURS, fitted.items(), strict=False):
            axes.plot(rounds, [point.each[name] for point in study.points], "o", color=colour, markersize=3.2)
            line = np.exp(trend.intercept) * rounds**trend.slope
            axes.plot(rounds, line, color=colour, label=f"slope {trend.low:.2f} to {trend.high:.2f}")
            if trend.rate is not None:
                bound = line[0] * (rounds / rounds[0]) ** trend.rate
                label = f"theorem {trend.rate:g}: {trend.outcome}"
                axes.plot(rounds, bound, color=INK, linestyle=(0, (4, 3)), label=label)
            axes.set(title=f"mean {DIAGNOSED[name]}", xlabel="K, communication rounds")
            for which in "xy":
                logarithmic(axes, which)
            axes.set_xticks(rounds, [f"{number:g}" for number in rounds])
            axes.set_xticks([], minor=True)
            axes.legend()
    return alone(Picture(f"{METHODS[study.config.name('method')].title}: means over K rounds", "", figure), "png")


def plot_diagnostics(history: Sequence[Record], path: Path) -> None:
    """Draw what was diagnosed in a run, but for what is zero throughout or not finite, to a .png or .svg file."""
    shown = {name: curve for name in DIAGNOSED if (curve := recorded(history, name))[:, 1].any()}
    with inked():
        figure, places = panels(max(1, len(shown)), columns=3, height=2.3)
        for axes, colour, (name, curve) in zip(places, COLOURS, shown.items(), strict=False):
            # All but f tend to zero; where one has arrived, a logarithmic axis has no place for it.
            falls = name != "objective"
            axes.plot(*curve[(curve[:, 1] > 0) | (not falls)].T, "o-", color=colour, markersize=2.5, linewidth=1.3)
            if falls:
                logarithmic(axes, "y")
            axes.set(title=DIAGNOSED[name], xlabel="communication rounds")
    write_atomically(path, alone(Picture("Diagnostics of convergence", "", figure), path.suffix.removeprefix(".")))
