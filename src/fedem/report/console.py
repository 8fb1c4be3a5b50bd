"""What the command line prints: tables, bars, and the two consoles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedem.core.errors import UserError
from fedem.methods import title_of
from fedem.runs.evaluate import has_diverged
from fedem.runs.folder import RunFolder

if TYPE_CHECKING:
    from rich.table import Table


console = Console()
errors = Console(stderr=True)


def show_run(folder: RunFolder) -> None:
    """Print a run's table, with its baselines; or where it stands when it is not complete."""
    summary = folder.summary()
    if summary is None:
        console.print(unfinished(folder), highlight=False)
        return
    others = [other for place in folder.baselines() if (other := place.summary()) is not None]
    print_summary([summary, *others])


def print_summary(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of several runs, and what else there is to say of the first."""
    console.print(comparison(summaries))
    if summaries[0].get("best"):
        console.print(states_table(summaries[0]))
    for line in remarks(summaries[0]):
        console.print(line, highlight=False)


@contextmanager
def progress(title: str, rounds: int, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Show a bar that follows the rounds; yields what is to be told of each."""
    if quiet:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[score]}"), console=errors) as bar:
        task = bar.add_task(f"{title:8s}", total=rounds, score="")

        def listen(record: dict[str, Any]) -> None:
            metric = metric_of(record)
            if f"test_{metric}" in record:
                bar.update(task, score=f"test {metric.replace('_', ' ')} {record[f'test_{metric}']:.4f}")
            bar.update(task, completed=record["round"])

        yield listen


@contextmanager
def waiting(what: str, quiet: bool) -> Iterator[None]:
    """Show that something is going on."""
    if quiet:
        yield
        return
    with errors.status(f"{what} ..."):
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into an error for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}.") from None


# Run folders -> tables on a terminal.

Summary = Mapping[str, Any]

_IDLE = 0.01  # a mean mixture weight below which a component is hardly used


def metric_of(summary: Summary) -> str:
    """Return what the run was scored by: accuracy or mean_squared_error."""
    return "accuracy" if "test_accuracy" in summary or "train_accuracy" in summary else "mean_squared_error"


def comparison(summaries: Sequence[Summary]) -> Table:
    """Return one row a run (its last state), and one for the oracle when it is known."""
    from rich.table import Table

    metric = metric_of(summaries[0])
    accuracy = metric == "accuracy"
    table = Table(title=f"Test scores after the last round, {'in %' if accuracy else 'mean squared error'}")
    headings = ("average", "bottom decile", "loss", "train", "unseen", "s/round", "kB up/round")
    has_unseen = any(f"unseen_test_{metric}" in summary for summary in summaries)
    keep = [heading for heading in headings if has_unseen or heading != "unseen"]
    table.add_column("method", no_wrap=True)
    for heading in keep:
        table.add_column(heading, justify="right")

    def score(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value:.1f}" if accuracy else f"{value:.4f}"

    for summary in summaries:
        components = f" (M={summary['num_components']})" if summary["num_components"] > 1 else ""
        cells = {
            "average": score(summary.get(f"test_{metric}")),
            "bottom decile": score(summary.get("bottom_decile")),
            "loss": _number(summary.get("test_loss")),
            "train": score(summary.get(f"train_{metric}")),
            "unseen": score(summary.get(f"unseen_test_{metric}")),
            "s/round": _number(summary.get("seconds_per_round"), "{:.3f}"),
            "kB up/round": _number(summary.get("bytes_up_per_round"), "{:,.1f}", 1000),
        }
        table.add_row(title_of(summary["method"]) + components, *(cells[heading] for heading in keep))
    oracle = next((summary for summary in summaries if summary.get("oracle_accuracy") is not None), None)
    if oracle is not None:
        known = {
            "average": score(oracle["oracle_accuracy"]),
            "bottom decile": score(oracle["oracle_bottom_decile"]),
            "loss": _number(oracle["oracle_loss"]),
        }
        table.add_section()
        table.add_row("oracle", *(known.get(heading, "") for heading in keep))
    return table


def states_table(summary: Summary) -> Table:
    """Return the last state beside the one that was best by validation, on every part."""
    from rich.table import Table

    metric = metric_of(summary)
    best = summary.get("best")
    table = Table(title=f"Last round and best by validation ({metric.replace('_', ' ')}, loss)")
    table.add_column("part")
    table.add_column(f"last (round {summary['rounds']})", justify="right")
    if best:
        table.add_column(f"best (round {best['round']})", justify="right")
    for part in ("train", "validation", "test"):
        if f"{part}_{metric}" in summary:
            columns = [_pair(source, part, metric) for source in (summary, best) if source]
            table.add_row(part, *columns)
    return table


def _idle(summary: Summary) -> list[str]:
    """Say which components of FedEM are hardly used."""
    if summary["method"] not in ("fedem", "dfedem", "bfedem"):
        return []
    means = summary.get("weights_mean") or []
    idle = [f"{m} ({100 * mean:.2g}%)" for m, mean in enumerate(means) if mean < _IDLE]
    if not idle:
        return []
    starved = (
        " Or it starved while others learnt, which method bfedem is made against."
        if summary["method"] != "bfedem"
        else ""
    )
    return [
        f"Hardly used, by the mean mixture weight: component {', '.join(idle)}. The data may need fewer "
        f"(method.num_components).{starved}"
    ]


def remarks(summary: Summary) -> list[str]:
    """Return what else there is to say of a run, a line each."""
    lines = []
    if has_diverged(summary):
        lines.append(
            f"warning: The loss on the training samples is {_number(summary['train_loss'], '{:.3g}')}: training has "
            "diverged. A smaller schedule.learning_rate is needed."
        )
    lines += _idle(summary)
    if recovery := summary.get("recovery"):
        distances = ", ".join(f"{distance:.1e}" for distance in recovery["component_distances"])
        lines.append(
            f"Recovered components: cosine distance to the truth {distances}; "
            f"{100 * recovery['cluster_accuracy']:.1f}% of clients on their truly largest component."
        )
    if (p := summary.get("consensus_p")) is not None and summary["num_clients"] > 1:
        tau, about = summary["consensus_tau"], "about" if summary.get("consensus_is_estimate") else "at most"
        lines.append(
            f"Averaging over the graph leaves {about} {100 * (1 - p):.3g}% of the squared disagreement "
            f"{'each round' if tau == 1 else f'every {tau} rounds'}, on average."
        )
    if "dissimilarity_slope" in summary:
        constant, slope = summary["dissimilarity_constant"], summary["dissimilarity_slope"]
        lines.append(f"Dissimilarity of the clients' gradients: G = {constant:.3g}, beta = {slope:.3g}.")
    if summary.get("num_unseen_clients") and f"unseen_test_{metric_of(summary)}" not in summary:
        lines.append("Clients held out were not scored: this method shares nothing with them.")
    if deviation := summary.get("target_deviation"):
        part = "test" if "test_mean_squared_error" in summary else "train"
        error = deviation * summary[f"{part}_mean_squared_error"] ** 0.5
        lines.append(f"In the targets' own units: {part} root mean squared error {error:.4g}.")
    if note := summary.get("note"):
        lines.append(str(note))
    return lines


def unfinished(folder: RunFolder) -> str:
    """Say where a run that is not complete stands."""
    lines, rounds = folder.metrics(), folder.config().run.rounds
    done = lines[-1]["round"] if lines else 0
    scored = next((line for line in reversed(lines) if "test_loss" in line), None)
    text = f"This run is not complete: {done} of {rounds} rounds are recorded; go on with --resume."
    if scored:
        metric = metric_of(scored)
        text += f" After round {scored['round']}: test {metric.replace('_', ' ')} {scored[f'test_{metric}']:.4f}."
    return text


def _pair(source: Summary, part: str, metric: str) -> str:
    return f"{source[f'{part}_{metric}']:.4f}, {source[f'{part}_loss']:.4f}"


def _number(value: float | None, form: str = "{:.4f}", unit: float = 1) -> str:
    return "-" if value is None else form.format(value / unit)
