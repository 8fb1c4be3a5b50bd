"""What the command line prints: runs as tables and remarks, bars of progress, and the two consoles."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text, TextType

from fedem.core.errors import UserError, counted
from fedem.core.files import plain, write_atomically
from fedem.data.federation import PARTS
from fedem.models.metrics import Metric, known_metric
from fedem.runs.evaluate import LEFT_OUT, has_diverged, metrics_of
from fedem.runs.folder import RunFolder
from fedem.studies.comparison import run_title

Summary = Mapping[str, Any]
Rows = Iterable[Iterable[str]]  # cells of a table

_SHOWN = 30  # clients that a table lists one by one
_IDLE = 0.01  # a mean mixture weight below which a component is hardly used

# No markup, no emoji: names of columns, clients and files may have brackets and colons.
console = Console(markup=False, emoji=False)
errors = Console(stderr=True, markup=False, emoji=False)
words = partial(TextColumn, markup=False)  # of a bar


def say(text: str) -> None:
    """Print a line as it is, however long: what was asked for, such as a path."""
    console.print(text, highlight=False, soft_wrap=True)


def aside(text: str) -> None:
    """Print a line beside what was asked for, as it is, however long."""
    errors.print(text, highlight=False, soft_wrap=True)


def display(*pages: RenderableType) -> None:
    """Print tables and paragraphs, as wide as the terminal."""
    for page in pages:
        console.print(page, highlight=False)


def figures_table(title: TextType, *headings: str) -> Table:
    """Return a table in a frame: names in its first column, figures in the others."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right" if table.columns else "left")
    return table


def simple_table(*headings: str, rows: Rows = (), title: str = "", bold: str = "", whole: Sequence[str] = ()) -> Table:
    """Return a table without a frame; column ``bold``, by which rows are looked up, and ``whole`` are not wrapped."""
    edges: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    table = Table(title=title or None, title_justify="left", title_style="bold", **edges)
    for heading in headings:
        table.add_column(heading, no_wrap=heading in (bold, *whole), style="bold" if heading == bold else None)
    for row in rows:
        table.add_row(*row)
    return table


def labelled_table(values: Mapping[str, RenderableType], bold: str = "") -> Table:
    """Return a row for each label and its value."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for label, value in values.items():
        table.add_row(label, value, style="bold" if label == bold else "")
    return table


def show_run(folder: RunFolder) -> None:
    """Print a run's table, with its baselines; or where it stands when it is not complete."""
    if (summary := folder.summary()) is not None:
        others = [other for place in folder.baselines() if (other := place.summary()) is not None]
        display(*summary_pages([summary, *others, *folder.references()]))
        return
    if (failure := folder.failure()) is not None:
        display(f"This run failed: {failure.message}")
        return
    lines, rounds = folder.metrics(), folder.config().run.rounds
    done = lines[-1]["round"] if lines else 0
    recorded = f"{done} of {counted(rounds, 'round is', 'rounds are')} recorded"
    facts, _ = folder.standing()  # a deployment's server says under which plan it trains
    way = "with --resume" if "plan" not in facts else "by `flwr run` with continue=true in its run config"
    text = f"This run is not complete: {recorded}; go on {way}."
    if scored := next((line for line in reversed(lines) if "test_loss" in line), None):
        text += f" After round {scored['round']}: {score_text(scored)}."
    display(text)


@contextmanager
def progress(title: str, rounds: int, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show a bar that follows the rounds, unless ``quiet``; yields the function that takes each round's record."""
    columns = (words("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, words("{task.fields[score]}"), console=errors, disable=quiet) as bar:
        task = bar.add_task(f"{title:8s}", total=rounds, score="")

        def listen(record: dict[str, Any]) -> None:
            if score := score_text(record):
                bar.update(task, score=score)
            bar.update(task, completed=record["round"])

        yield listen
        if done := bar.tasks[0].completed:  # training may have come to its end before
            bar.update(task, total=done)


def waiting(what: str, quiet: bool) -> AbstractContextManager[object]:
    """Show that something is going on."""
    return nullcontext() if quiet else errors.status(Text(f"{what} ..."))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into an error for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}.") from None


def put(path: Path, content: bytes) -> None:
    """Write a file, and the folders above it that are missing; what goes wrong is an error for the user."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def summary_pages(summaries: Sequence[Summary]) -> Iterator[RenderableType]:
    """Yield the scores of the runs' last states, by further metrics too; then the first's best state and remarks."""
    first, *others = metrics_of(summaries[0])
    further = [(metric, f"test_{metric.name}") for metric in others]
    every = [(first, f"test_{first.name}"), *further]
    pooled = [(metric, f"{name}_pooled") for metric, name in every if f"{name}_pooled" in summaries[0]]
    rate = summaries[0].get("test_base_rate") if first.name == "accuracy" else None
    unseen = any(f"unseen_test_{first.name}" in summary for summary in summaries)
    rows = [
        {
            "average": _score(summary, first, "test"),
            "bottom decile": first.text(summary.get("bottom_decile"), plain=".4f"),
            "loss": _number(summary.get("test_loss")),
            "train": _score(summary, first, "train"),
            **({"unseen": _score(summary, first, "unseen_test")} if unseen else {}),
            "s/round": _number(summary.get("seconds_per_round"), "{:.3f}"),
            "kB up/round": _number(summary.get("bytes_up_per_round"), "{:,.1f}", 1000),
        }
        for summary in summaries
    ]
    known = (summary for summary in summaries if summary.get(f"oracle_{first.name}") is not None)
    if oracle := next(known, None):
        decile, loss = first.text(oracle.get("oracle_bottom_decile"), plain=".4f"), _number(oracle.get("oracle_loss"))
        rows.append({"average": _score(oracle, first, "oracle"), "bottom decile": decile, "loss": loss})
    base = "" if rate is None else f" (base rate {first.text(rate)})"
    which = "of the best states by validation" if "stopped_after" in summaries[0] else "after the last round"
    yield _scores_table(f"Test scores {which}, {first.unit}{base}", summaries, rows)
    for title, named in ((", averages over clients", further), (" of all clients' test rows together", pooled)):
        if named:
            yield _scores_table(f"Test scores{title}", summaries, _further(summaries, named, oracle))
    last = summaries[0]
    if best := last.get("best"):
        states, title = {f"last (round {last['rounds']})": last}, "Last round and best by validation"
        if "stopped_after" in last:  # they are the same
            states, title = {}, "Best by validation"
        states[f"best (round {best['round']})"] = best
        table = figures_table(f"{title} ({first.title}, loss)", "part", *states)
        for part in PARTS:
            names = (f"{part}_{first.name}", f"{part}_loss")
            if names[0] in last:
                table.add_row(part, *(", ".join(_number(state[name]) for name in names) for state in states.values()))
        yield table
    if count := last.get(LEFT_OUT):
        few = f"{count:,} of {counted(last['num_clients'], 'client')}"
        yield f"The bottom decile leaves out clients with fewer than five test samples: {few}."
    yield from remarks(last)
    yield from (
        f"{run_title(summary)}: {summary['note']}"
        for summary in summaries[1:]
        if "title" in summary and "note" in summary
    )


def _scores_table(title: str, summaries: Sequence[Summary], rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of a row for each summary and, if there is one more, one for the oracle."""
    table = figures_table(title, "method", *rows[0])
    table.columns[0].no_wrap = True
    for summary, row in zip(summaries, rows, strict=False):
        table.add_row(run_title(summary), *row.values())
    for row in rows[len(summaries) :]:
        table.add_section()
        table.add_row("oracle", *(row.get(heading, "") for heading in rows[0]))
    return table


def client_scores_table(figures: Summary, rows: Sequence[Summary]) -> Table:
    """Return the scores of clients on new samples, if there are not too many, and those over all."""
    metrics = [metric for name in figures if (metric := known_metric(name)) is not None]
    table = figures_table("Scores of new samples", "client", "samples", *(metric.unit for metric in metrics), "loss")

    def add(name: str, record: Summary) -> None:
        scores = (metric.text(plain(record[metric.name]), plain=".4f") for metric in metrics)
        table.add_row(name, f"{record['samples']:,}", *scores, _number(plain(record["loss"])))

    if len(rows) > _SHOWN:
        table.caption = "--out FILE.csv writes a row for each client."
    for row in rows if len(rows) <= _SHOWN else ():
        add(row["client"] + ("" if row["role"] == "known" else " (took no part)"), row)
    table.add_section()
    add(f"all {counted(figures['clients'], 'client')}", figures)
    return table


def _further(
    summaries: Sequence[Summary], named: Sequence[tuple[Metric, str]], oracle: Summary | None
) -> list[dict[str, str]]:
    """Return a row of cells for each summary, in the targets' own units where they are known, and for the oracle."""
    columns = {metric.unit: (metric, name) for metric, name in named}
    for metric, name in named:
        if f"{name}_in_units" in summaries[0]:
            columns[metric.unit] = (metric, f"{name}_in_units")
    told = {unit: f"{unit}, own units" if name.endswith("_in_units") else unit for unit, (_, name) in columns.items()}
    rows = [
        {told[unit]: metric.text(summary.get(name), plain=".4f") for unit, (metric, name) in columns.items()}
        for summary in summaries
    ]
    truth = {metric.unit: name.replace("test_", "oracle_", 1) for metric, name in named}
    if oracle is not None and any(name in oracle for name in truth.values()):
        rows.append({metric.unit: _score(oracle, metric, "oracle") for metric, _ in named})
    return rows


def _score(summary: Summary, metric: Metric, part: str) -> str:
    return metric.text(summary.get(f"{part}_{metric.name}"), plain=".4f")


def remarks(summary: Summary) -> Iterator[str]:
    """Yield what else there is to say of a run, a line each."""
    means = summary.get("weights_mean") or []
    idle = [f"{m} ({100 * mean:.2g}%)" for m, mean in enumerate(means) if mean < _IDLE]
    metrics = metrics_of(summary)
    counts = {metric.title: summary.get(f"test_{metric.name}_undefined") for metric in metrics}
    undefined = [f"{title} ({count})" for title, count in counts.items() if count]
    known: dict[str, Any] = {"diverged": has_diverged(summary), "tuned": _tuned(summary, metrics[0])}
    known |= {"idle": idle, "undefined": undefined, "metrics": metrics, "counted": counted}
    yield from rendered("run.txt", summary=summary, **known).splitlines()
    if note := summary.get("note"):
        yield str(note)


def _tuned(summary: Summary, metric: Metric) -> dict[str, Any] | None:
    """Return what fine-tuning did to the validation score; None where that is not known."""
    known, after = summary.get("fine_tuning", {}), summary.get(f"validation_{metric.name}")
    before = known.get(f"validation_{metric.name}_before")
    if before is None or after is None:
        return None
    harms = after != before and (after < before) == metric.larger_is_better
    return {**known, "metric": metric.title, "before": before, "after": after, "harms": harms}


def rendered(template: str, **values: Any) -> str:
    """Fill in one of the templates; what is put into HTML is escaped."""
    return _templates(template.endswith(".html")).get_template(template).render(values)


@cache
def _templates(escaped: bool) -> Any:
    """Return all templates, each of which is compiled when it is first asked for."""
    from jinja2 import Environment, PackageLoader

    how: dict[str, Any] = {"autoescape": escaped, "trim_blocks": True, "keep_trailing_newline": True}
    return Environment(loader=PackageLoader("fedem.report"), **how)


def score_text(record: Summary) -> str:
    """Return the first metric's score after a round, in words; empty where it was not scored."""
    metric = metrics_of(record)[0]
    value = record.get(f"test_{metric.name}")
    return "" if value is None else f"test {metric.title} {value:.4f}"


def _number(value: float | None, form: str = "", unit: float = 1) -> str:
    """Write a number; four digits after the point, or four in all of a million and more, where no form is given."""
    if value is None:
        return "-"
    return (form or ("{:.4f}" if abs(value) < 1e6 else "{:.4g}")).format(value / unit)
