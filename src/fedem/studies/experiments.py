"""Experiments that are declared, not programmed: a file says which runs a table of the paper is made of.

A TOML file has the settings of all runs, the choices on one or several axes, the figures to show, and what the paper
has for them. The runs are a sweep; our figures then stand beside the paper's.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedem.core.errors import UserError, check_known, unknown
from fedem.core.schema import read_toml
from fedem.data.store import Public
from fedem.models.metrics import Metric, known_metric
from fedem.runs.config import Layer
from fedem.runs.evaluate import LEFT_OUT, Record
from fedem.runs.folder import Failure
from fedem.studies import sweep
from fedem.studies.sweep import Entry, Gap, Labels, SharedData, Spread, failures, outcomes

USUAL = Path("experiments")  # the folder that experiments lie in
FILE = "experiment.toml"
RESULTS = "results"  # the folder beside it, of runs that are kept
SLASH = " / "  # between labels, and between a figure and the label of what it is the ratio to
ALL = "all"  # in [quick], all runs
ROUNDS = "rounds"  # what an experiment may be drawn along besides its axes
_Axes = Mapping[str, Mapping[str, tuple[Layer, ...]]]  # the choices: axis -> label -> settings
_METHODS = "method"  # the axis whose choices are compared
_NEEDED = ("title", "figures", "axes")
_WORDS = {"place": "", "runs": "", "along": ""}
_OPTIONAL: Record = {**_WORDS, "seeds": 1, "settings": {}, "without": [], "paper": {}, "quick": {}}


@dataclass(frozen=True)
class Experiment:
    """What a file declares."""

    name: str  # of its folder
    title: str
    place: str  # where the paper has it
    runs: str  # the experiment beside it whose runs are its own, under the same labels; empty: it has runs by itself
    along: str  # the axis that the figures are drawn along, or ROUNDS; empty: there is no picture
    seeds: int  # how many the paper has
    # Of a summary; "recovery.weight_distance" lies deeper, "test_loss / FedAvg" is a ratio to that label's run.
    figures: Sequence[str]
    settings: tuple[Layer, ...]
    axes: _Axes
    without: Sequence[Labels]  # combinations that are left out
    paper: Mapping[str, tuple[float | None, ...]]  # by the labels, in the order of the axes, joined with " / "
    quick: Mapping[str, tuple[Layer, ...]]  # settings of a short trial, of the runs with a label or of "all"

    @property
    def home(self) -> str:
        """The name of the experiment that has its runs."""
        return self.runs or self.name

    @property
    def labels(self) -> list[str]:
        return [label for choices in self.axes.values() for label in choices]


def read(folder: Path) -> Experiment:
    """Read the experiment declared in ``folder``."""
    path = folder / FILE
    try:
        content = read_toml(path, "an experiment")
    except FileNotFoundError:
        raise UserError(f"{path} can't be read as an experiment: there is no such file.") from None
    check_known(f"key in {path}", content, (*_NEEDED, *_OPTIONAL))
    for key in _NEEDED:
        if key not in content:
            raise UserError(f"{path} has no {key!r}; it is needed.")
    content = _OPTIONAL | content
    for key in ("settings", "axes", "paper", "quick"):
        _check(path, key, content[key], isinstance(content[key], Mapping), "a table")
    for axis, choices in content["axes"].items():
        _check(path, f"axes.{axis}", choices, isinstance(choices, Mapping) and bool(choices), "a table of choices")
    axes = {
        axis: {label: _layers(settings, f"{path}, axes.{axis}") for label, settings in choices.items()}
        for axis, choices in content["axes"].items()
    }
    labels = [label for choices in axes.values() for label in choices]
    for label in labels:
        named = not any(mark in label for mark in (",", ":", SLASH))
        _check(path, "label", label, named, f"labels without ',', ':' and '{SLASH}', which part them in options")
    figures, seeds, without = content["figures"], content["seeds"], content["without"]
    _check(path, "seeds", seeds, type(seeds) is int and seeds > 0, "a whole number from 1")
    words = isinstance(figures, list) and all(isinstance(name, str) for name in figures)
    _check(path, "figures", figures, words and bool(figures), "a list of names")
    check_known(f"label in {path}, figures", [name.partition(SLASH)[2] for name in figures if SLASH in name], labels)
    gaps = isinstance(without, list) and all(
        isinstance(gap, Mapping) and gap and all(label in list(axes.get(axis, ())) for axis, label in gap.items())
        for gap in without
    )
    _check(path, "without", without, gaps, f"tables of labels by axis ({', '.join(axes)})")
    check_known(f"label in {path}, quick", content["quick"], (*labels, ALL))
    content |= {key: str(content[key]) for key in ("title", *_WORDS)}
    check_known(f"axis in {path}, along", [content["along"]] if content["along"] else [], (*axes, ROUNDS))
    if content["along"] == ROUNDS and ROUNDS not in axes:
        allowed = "names of what is recorded of a round, such as test_accuracy"
        _check(path, "figures", figures, not any(SLASH in name for name in figures), f"{allowed}, along {ROUNDS!r}")
    content["settings"] = _layers(content["settings"], f"{path}, settings")
    content["paper"] = {key: _paper(path, key, values, axes, figures) for key, values in content["paper"].items()}
    content["quick"] = {label: _layers(values, f"{path}, quick") for label, values in content["quick"].items()}
    found = Experiment(folder.name, **content | {"axes": axes})
    if found.runs:
        _check_runs(path, found, find(folder.parent, found.runs))
    return found


def _check_runs(path: Path, experiment: Experiment, other: Experiment) -> None:
    """Refuse an experiment whose runs are said to be another's, and are not."""
    same = experiment.settings == other.settings and list(experiment.axes) == list(other.axes) and not other.runs
    for axis, choices in experiment.axes.items():
        same = same and choices.items() <= other.axes[axis].items()
    allowed = "an experiment with runs by itself that has the same settings, axes and choices, and perhaps more choices"
    _check(path, "runs", experiment.runs, same, allowed)


def _check(path: Path, key: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise UserError(f"{path} has {key} = {value!r}; allowed: {allowed}.")


def _paper(path: Path, key: str, values: Any, axes: _Axes, figures: Sequence[str]) -> tuple[float | None, ...]:
    if key not in map(SLASH.join, itertools.product(*axes.values())):
        allowed = f"a label of each axis ({', '.join(axes)}) between '{SLASH}'"
        raise UserError(f"{path} has paper.{key!r}; allowed: {allowed}.")
    numbers = isinstance(values, list) and all(value == "" or type(value) in (int, float) for value in values)
    _check(path, f"paper.{key!r}", values, numbers and len(values) == len(figures), f'{len(figures)} numbers or ""')
    return tuple(None if value == "" else float(value) for value in values)


def find(place: Path, name: str) -> Experiment:
    """Return the experiment called ``name`` among those in ``place``."""
    check_known("experiment", [name], listed(place))
    return read(place / name)


def listed(place: Path) -> list[str]:
    """Return the names of the experiments in a folder."""
    names = sorted(path.parent.name for path in place.glob(f"*/{FILE}"))
    if not names:
        known = "the paper's are in the folder experiments of fedem's repository"
        said = f"There are no experiments in {place} (no */{FILE}); {known}"
        raise UserError(f"{said}. Go there, or name it with --experiments.")
    return names


def _layers(settings: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    if not isinstance(settings, Mapping):
        raise UserError(f'{where} has {settings!r}; allowed: {{ "section.key" = value }}.')
    for key, value in settings.items():
        if "." not in key or isinstance(value, Mapping):
            raise UserError(f'{where} has {key!r}; allowed: "section.key" = value.')
    return tuple(sweep.layers_of(settings))


def plan(
    experiment: Experiment,
    out: Path,
    seeds: Sequence[int],
    only: Mapping[str, Sequence[str]] = {},
    asked: Sequence[Layer] = (),
    own: Mapping[str, Sequence[Layer]] = {},
    quick: bool = False,
) -> list[Entry]:
    """Return the runs in folders of ``out``, with ``only`` these labels by axis.

    Settings are those declared (``quick`` ones too), those ``asked`` for all runs, the ``own`` of runs with a label.
    """
    layers = partial(_settings, experiment, asked=asked, own=own, quick=quick)
    return sweep.plan(out, _chosen(experiment, only), seeds, layers, experiment.without)


def kept(
    experiment: Experiment, out: Path, seeds: Sequence[int] | None = None, only: Mapping[str, Sequence[str]] = {}
) -> list[Entry]:
    """Return the runs that lie in ``out``, of all seeds that are there unless some are asked for.

    They may have been made with other settings than those declared, which are their ``departures``.
    """
    return sweep.kept(out, _chosen(experiment, only), seeds, partial(_settings, experiment), experiment.without)


def _chosen(experiment: Experiment, only: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    check_known("axis", only, experiment.axes)
    for axis, names in only.items():
        check_known(f"choice of {axis}", names, experiment.axes[axis])
    axes = experiment.axes.items()
    return {axis: [name for name in names if name in only.get(axis, names)] for axis, names in axes}


def _settings(
    experiment: Experiment,
    labels: Labels,
    asked: Sequence[Layer] = (),
    own: Mapping[str, Sequence[Layer]] = {},
    quick: bool = False,
) -> list[Layer]:
    declared = [experiment.settings, *(experiment.axes[axis][label] for axis, label in labels.items())]
    short = [experiment.quick.get(label, ()) for label in (ALL, *labels.values())] if quick else []
    further = [asked, *(own.get(label, ()) for label in labels.values())]
    return list(itertools.chain(*declared, *short, *further))


def sort_settings(experiment: Experiment, assignments: Sequence[str]) -> tuple[list[Layer], dict[str, list[Layer]]]:
    """Sort ``[LABEL:]section.key=value`` into the layers of all runs and those of the runs with a label."""
    shared: list[Layer] = []
    own: dict[str, list[Layer]] = {}
    for text in assignments:
        # A label may have an equals sign, "M = 3", and a value a colon.
        label = next((label for label in experiment.labels if text.startswith(f"{label}:")), None)
        whose = "" if label is None else f"{label}:"
        other, colon, _ = text.removeprefix(whose).partition("=")[0].rpartition(":")
        if colon:
            raise unknown(f"label in --set {text!r}", other, experiment.labels)
        *_, layer = sweep.read_setting(text, {"run.seed": "--seeds"}, whose)
        (shared if label is None else own.setdefault(label, [])).append(layer)
    return shared, own


def check(entries: Sequence[Entry], data: SharedData) -> list[str]:
    """Prepare every run that is not over; refuse all where none can be trained, or some data are not prepared."""
    pending = [entry for entry in entries if not entry.is_over]
    # All data sets that are missing at once, before any is made.
    missing: dict[str, set[str]] = {}
    for entry in pending:
        if isinstance(source := entry.config.data, Public):
            try:
                source.opened()
            except UserError as error:
                missing.setdefault(str(error), set()).add(entry.labels.get("data", ""))
    if missing:
        there = {entry.labels["data"] for entry in entries if "data" in entry.labels}.difference(*missing.values())
        hint = f" To run what is there: --data {','.join(sorted(there))}" if there else ""
        raise UserError(" ".join(f"{message}." for message in missing) + hint)
    # In this order the data of the first run are those at hand when its turn comes.
    return sweep.check(entries[::-1], data, shared=True)


class Line(NamedTuple):
    """A line of the table: one choice on every axis."""

    labels: dict[str, str]
    seeds: tuple[int, ...]  # complete ones
    ours: dict[str, Spread]
    paper: dict[str, float | None]
    failed: dict[int, Failure]  # by seed; with one of them a line has no figures, which would flatter it
    left_out: int  # clients whom the bottom decile of some seed leaves out, at most
    gap: Gap | None = None  # to the best of all methods, by the first figure if that is a score
    departures: Mapping[str, Any] = {}  # settings that the runs have in place of those planned


def tabulate(experiment: Experiment, entries: Sequence[Entry]) -> list[Line]:
    """Put our figures, over the seeds that are complete, beside the paper's."""
    known, failed, lines = outcomes(entries), failures(entries), list[Line]()
    begun = [entry for entry in entries if entry.folder.exists()]
    for choice, by_seed in known.items():
        labels = dict(zip(experiment.axes, choice, strict=True))
        ours, lost = {}, failed.get(choice, {})
        for name in experiment.figures:
            figure, slash, reference = name.partition(SLASH)
            values = [figure_of(summary, figure) for summary in by_seed.values()]
            if slash:  # over the seeds that both have
                axis = next(axis for axis, choices in experiment.axes.items() if reference in choices)
                others = known.get(tuple((labels | {axis: reference}).values()), {})
                both = [(by_seed[seed], other) for seed, other in others.items() if seed in by_seed]
                pairs = [(figure_of(own, figure), figure_of(other, figure)) for own, other in both]
                values = [a / b if a is not None and b else None for a, b in pairs]
            ours[name] = Spread.of([None] if lost else values)
        theirs = experiment.paper.get(SLASH.join(choice), (None,) * len(experiment.figures))
        seeds = tuple(seed for seed in by_seed if seed not in lost)
        left_out = max((summary.get(LEFT_OUT, 0) for summary in by_seed.values()), default=0)
        paper = dict(zip(experiment.figures, theirs, strict=True))
        own = next((entry.departures for entry in begun if tuple(entry.labels.values()) == choice), {})
        lines.append(Line(labels, seeds, ours, paper, lost, left_out, departures=own))
    decisive = experiment.figures[0]
    metric = metric_of(decisive) if _METHODS in experiment.axes and SLASH not in decisive else None
    if metric is None:
        return lines

    # A difference seed by seed is one of runs with the same clients.
    clients = {(tuple(entry.labels.values()), entry.seed): entry.clients_key for entry in entries}

    def scores(line: Line) -> dict[Any, float | None]:
        choice = tuple(line.labels.values())
        return {clients[choice, seed]: figure_of(each, decisive) for seed, each in known[choice].items()}

    def gap_to(line: Line, other: Line) -> Gap:
        return Gap.of(scores(line), scores(other))

    rivals: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        rivals.setdefault(_apart_from_method(line), []).append(line)
    best = {key: _best(group, gap_to, decisive, metric) for key, group in rivals.items()}
    return [
        line if first is line or line.failed else line._replace(gap=gap_to(line, first))
        for line, first in ((line, best[_apart_from_method(line)]) for line in lines)
    ]


def _apart_from_method(line: Line) -> tuple[str, ...]:
    """Return what a line has in common with those that its method is compared with."""
    return tuple(label for axis, label in line.labels.items() if axis != _METHODS)


def _best(rivals: Sequence[Line], gap_to: Callable[[Line, Line], Gap], figure: str, metric: Metric) -> Line:
    """Return the line that none is better than with the seeds that both have: means may be over different ones."""
    by_mean = sorted(rivals, key=lambda line: line.ours[figure].rank(metric.name))
    sign = 1 if metric.larger_is_better else -1
    leading = (
        line
        for line in by_mean
        if line.ours[figure].mean is not None
        and all(sign * (gap_to(other, line).mean or 0.0) <= 0 for other in rivals if not other.failed)
    )
    return next(leading, by_mean[0])


def metric_of(figure: str) -> Metric | None:
    """Return the metric that a figure is a score by, if it is."""
    words = figure.rpartition(".")[2].split("_")
    known = (known_metric("_".join(words[start:])) for start in range(len(words)))
    return next((metric for metric in known if metric), None)


def in_percent(figure: str) -> bool:
    """Whether tables have a figure, and the paper's beside it, in percent."""
    metric = metric_of(figure)
    return figure.endswith("bottom_decile") or (metric is not None and metric.in_percent)


def figure_of(summary: Record, name: str) -> float | None:
    """Find a figure by its name; of several numbers, such as a distance for each component, the largest."""
    value: Any = summary
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, list):
        value = max(value, default=None)
    return None if value is None else float(value)
