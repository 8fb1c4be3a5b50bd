"""The leaderboard: what is kept of the paper's tables, each method beside FedEM and beside the paper.

A cell is a method on a data set. It is paired with FedEM's: seed by seed where two or more seeds have both, else client
by client. Why a cell is not the paper's is a sentence in a file beside the experiment, ``notes.toml``. Experiments on
something else, such as the number of components, are there as their tables are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedem.core.errors import UserError, check_known
from fedem.core.schema import Listed, Number, Text, read_toml
from fedem.core.schema import Table as Names
from fedem.core.schema import check as check_kind
from fedem.methods.base import find_method
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder
from fedem.studies import experiments
from fedem.studies.experiments import SLASH, Experiment, Line, figure_of, in_percent, metric_of, tabulate
from fedem.studies.sweep import Entry, Gap, Spread, outcomes

DATA, METHOD = "data", "method"  # the axes of a table of the paper
REFERENCE = "FedEM"  # the method that the others are compared with
COSTS = ("seconds_per_round", "bytes_up_per_round", "bytes_down_per_round")
NOTES = "notes.toml"
TOLERANCE = 1.0  # points from the paper's figure beyond which a cell asks for a sentence
_UNSEEN = "unseen_"  # before figures of clients held out of training
_SENTENCES = Names(others=Text())
_PUBLISHED = Names(
    {"source": Text(), "partition": Text(), "figures": Names(others=Names(others=Listed(Number())))}, others=None
)
_KIND = Names(
    optional={
        "about": Text(),
        "partition": _SENTENCES,
        "why": Names(others=_SENTENCES),
        "published": Listed(_PUBLISHED),
    },
    others=None,
)


@dataclass(frozen=True)
class Published:
    """Figures that somebody else has published of a data set."""

    source: str
    partition: str  # whether they are of the same clients and samples as ours
    method: str
    figures: tuple[float, ...]  # in the order of the experiment's, perhaps not all


@dataclass(frozen=True)
class Notes:
    """What people have to say of an experiment's kept runs."""

    about: str
    partition: Mapping[str, str]  # by data set: whether the paper's clients and samples are ours
    why: Mapping[str, Mapping[str, str]]  # by data set and method: why the figures are not the paper's
    published: Mapping[str, Sequence[Published]]  # by data set


@dataclass(frozen=True)
class Cell:
    """A method on a data set."""

    line: Line
    gap: Gap | None  # to FedEM's, by the first figure; None where they have no run in common
    by_clients: bool  # whether the gap is one over clients, in place of seeds
    costs: Mapping[str, Spread]
    devices: tuple[str, ...]  # that the runs were made on
    asked: tuple[str, ...]  # ... and what was asked for: "auto" is none
    why: str

    @property
    def method(self) -> str:
        return self.line.labels[METHOD]

    @property
    def is_run(self) -> bool:
        return bool(self.line.seeds) or bool(self.line.failed)

    @property
    def distances(self) -> dict[str, float]:
        """How many points each figure is above the paper's, by the figure's name."""
        ours, paper = self.line.ours, self.line.paper
        both = ((name, ours[name].mean, theirs) for name, theirs in paper.items() if in_percent(name))
        return {name: 100 * own - theirs for name, own, theirs in both if own is not None and theirs is not None}

    @property
    def differs(self) -> bool:
        return any(abs(distance) > TOLERANCE for distance in self.distances.values())


@dataclass(frozen=True)
class Verdict:
    """The best form of FedEM beside the best of the other methods, by the first figure."""

    form: Cell
    other: Cell
    gap: Gap  # the other's to the form's
    by_clients: bool  # whether the gap is one over clients, in place of seeds

    @property
    def form_leads(self) -> bool:
        """Whether no other method is better, on the same clients and samples."""
        return (self.gap.mean or 0) <= 0

    @property
    def is_within_error(self) -> bool:
        return self.gap.error is not None and abs(self.gap.mean or 0) <= self.gap.error


@dataclass(frozen=True)
class Section:
    """All methods on one data set: those that were run, the best first, then the others."""

    data: str
    cells: Sequence[Cell]
    verdict: Verdict | None  # None where no form of FedEM, or no other method, has a run, or they have none in common
    partition: str
    published: Sequence[Published]


@dataclass(frozen=True)
class Board:
    """An experiment's kept runs."""

    experiment: Experiment
    about: str
    sections: Sequence[Section]

    @property
    def counts(self) -> tuple[int, int]:
        """How many cells are run, of how many."""
        cells = [cell for section in self.sections for cell in section.cells]
        return sum(cell.is_run for cell in cells), len(cells)


@dataclass(frozen=True)
class Plain:
    """The kept runs of an experiment that does not set methods beside FedEM on data sets."""

    experiment: Experiment
    lines: Sequence[Line]  # that were run
    num_lines: int  # ... and all


def gather(place: Path, names: Sequence[str] = (), out: Path | None = None) -> list[Board | Plain]:
    """Read the kept runs of the experiments called ``names`` in ``place``; without names, of all with runs or notes.

    Boards come first, and what is called a table in the paper before its figures and appendices.
    """
    check_known("experiment", names, known := experiments.listed(place))
    if out is not None and len(names) != 1:
        given = ", ".join(names) or "none"
        raise UserError(
            f"--out is where the runs of one experiment are, and the experiments are {given}; allowed: one."
        )
    if out is not None and not out.is_dir():
        raise UserError(f"{out} holds no runs: there is no such folder; allowed: one that `fedem experiment run` made.")
    belonging = {path.parent.name for kept in (experiments.RESULTS, NOTES) for path in place.glob(f"*/{kept}")}
    chosen = [experiments.read(place / name) for name in names or [name for name in known if name in belonging]]
    found = [
        (_board if _is_of_methods(each) else _plain)(place / each.name, out or place / each.home / experiments.RESULTS)
        for each in chosen
    ]
    return sorted(found, key=_rank)


def _rank(found: Board | Plain) -> tuple[bool, bool, str]:
    place = found.experiment.place
    return isinstance(found, Plain), not place.startswith("Table"), place


def _is_of_methods(experiment: Experiment) -> bool:
    """Whether it sets methods beside FedEM on data sets, by a score in percent."""
    first = experiment.figures[0]
    has_cells = set(experiment.axes) == {DATA, METHOD} and REFERENCE in experiment.axes[METHOD]
    return has_cells and metric_of(first) is not None and in_percent(first)


def _plain(folder: Path, out: Path) -> Plain:
    experiment = experiments.read(folder)
    if (folder / NOTES).exists():
        axes, allowed = ", ".join(experiment.axes), f"notes where methods are set beside {REFERENCE} on data sets"
        raise UserError(f"{folder / NOTES} is of an experiment with the axes {axes}; allowed: {allowed}.")
    lines = tabulate(experiment, experiments.kept(experiment, out))
    return Plain(experiment, [line for line in lines if line.seeds or line.failed], len(lines))


def _board(folder: Path, out: Path) -> Board:
    experiment = experiments.read(folder)
    notes = read_notes(folder / NOTES, experiment)
    entries = experiments.kept(experiment, out)
    known, by_line = outcomes(entries), dict[tuple[str, ...], list[Entry]]()
    for entry in entries:
        if entry.is_over:
            by_line.setdefault(tuple(entry.labels.values()), []).append(entry)
    sections: dict[str, list[Cell]] = {data: [] for data in experiment.axes[DATA]}
    figure = experiment.figures[0]
    for line in tabulate(experiment, entries):
        choice, data = tuple(line.labels.values()), line.labels[DATA]
        runs = by_line.get(choice, [])
        others = by_line.get(tuple((line.labels | {METHOD: REFERENCE}).values()), [])
        summaries = known[choice].values()
        gap, by_clients = (None, False) if line.failed else paired(runs, others, figure)
        cell = Cell(
            line,
            None if line.labels[METHOD] == REFERENCE else gap,
            by_clients,
            {name: Spread.of(summary.get(name) for summary in summaries) for name in COSTS},
            tuple(sorted({str(summary["device"]) for summary in summaries if "device" in summary})),
            tuple(sorted({entry.folder.config().run.device for entry in runs})),
            notes.why.get(data, {}).get(line.labels[METHOD], ""),
        )
        sections[data].append(cell)
    for cells in sections.values():
        _sort(cells, figure)
    found = [
        Section(
            data, cells, _verdict(cells, by_line, figure), notes.partition.get(data, ""), notes.published.get(data, ())
        )
        for data, cells in sections.items()
        if cells
    ]
    return Board(experiment, notes.about, found)


def _sort(cells: list[Cell], figure: str) -> None:
    """Put the best first: by the difference to FedEM on the same clients, since means may be over different seeds."""
    reference = next((cell.line.ours[figure].mean for cell in cells if cell.method == REFERENCE), None) or 0.0

    def ahead(cell: Cell) -> float:
        if cell.gap is not None and cell.gap.mean is not None:
            return cell.gap.mean
        mean = cell.line.ours[figure].mean  # FedEM's own, or of other clients than FedEM's
        return -math.inf if mean is None else mean - reference

    cells.sort(key=lambda cell: (not cell.is_run, -ahead(cell)))


def _verdict(cells: Sequence[Cell], by_line: Mapping[tuple[str, ...], Sequence[Entry]], figure: str) -> Verdict | None:
    """Set the best form of FedEM, whatever is a mixture, beside the best of the others; the best cells come first."""
    best: dict[bool, tuple[Cell, Sequence[Entry]]] = {}
    for cell in cells:
        runs = by_line.get(tuple(cell.line.labels.values()), [])
        if runs and not cell.line.failed:
            is_form = find_method(runs[0].config.name("method")).algorithm.is_mixture
            best.setdefault(is_form, (cell, runs))
    if len(best) < 2:
        return None
    (form, ours), (other, theirs) = best[True], best[False]
    gap, by_clients = paired(theirs, ours, figure)
    return None if gap is None or gap.mean is None else Verdict(form, other, gap, by_clients)


def paired(runs: Sequence[Entry], others: Sequence[Entry], figure: str) -> tuple[Gap | None, bool]:
    """Return how far runs are from others with the same clients, and whether that is over clients, not over seeds.

    It is over seeds where two or more have both. With one, it is over its clients, weighted by their training samples
    as the figure is.
    """
    theirs = {entry.clients_key: entry for entry in others if entry.failure is None}
    both = [(entry, theirs[entry.clients_key]) for entry in runs if entry.clients_key in theirs]
    if not both:
        return None, False
    if len(both) == 1:
        (ours, weights), (reference, _) = (client_scores(entry.folder, figure) for entry in both[0])
        return Gap.of(ours, reference, weights), True
    mine, beside = (
        {entry.clients_key: figure_of(entry.folder.summary() or {}, figure) for entry in side}
        for side in zip(*both, strict=True)
    )
    return Gap.of(mine, beside), False


def client_scores(folder: RunFolder, figure: str) -> tuple[dict[str, float | None], dict[str, float]]:
    """Return a figure of each client, and what it weighs in their mean: its training samples."""
    role, column = ("unseen" if figure.startswith(_UNSEEN) else "train"), figure.removeprefix(_UNSEEN)
    # Clients that mean harm have scores, and no weight.
    rows = [row for row in folder.clients() if row["role"] == role and row.get("hostile", "") != "True"]
    scored = [row for row in rows if row.get(column) and float(row[column]) == float(row[column])]
    return (
        {row["client"]: float(row[column]) for row in scored},
        {row["client"]: float(row["train_samples"]) for row in scored},
    )


def read_notes(path: Path, experiment: Experiment) -> Notes:
    """Read what people have to say of an experiment; nothing where there is no such file."""
    try:
        content: Record = read_toml(path, "notes on an experiment")
    except FileNotFoundError:
        content = {}
    check_kind(path, content, _KIND)
    sets, methods = experiment.axes[DATA], experiment.axes[METHOD]
    partition, why = content.get("partition", {}), content.get("why", {})
    check_known(f"data set in {path}", [*partition, *why], sets)
    for sentences in why.values():
        check_known(f"method in {path}, why", sentences, methods)
    published: dict[str, list[Published]] = {}
    for each in content.get("published", []):
        check_known(f"data set in {path}, published", each["figures"], sets)
        for data, by_method in each["figures"].items():
            for method, figures in by_method.items():
                if not 1 <= len(figures) <= len(experiment.figures):
                    place = f"published figures of {data}{SLASH}{method}"
                    allowed = f"1 to {len(experiment.figures)} numbers, of {', '.join(experiment.figures)}"
                    raise UserError(f"{path} has {figures!r} as {place}; allowed: {allowed}.")
                found = Published(each["source"], each["partition"], method, tuple(figures))
                published.setdefault(data, []).append(found)
    return Notes(content.get("about", ""), partition, why, published)
