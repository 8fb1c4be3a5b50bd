"""The leaderboard as a page of documentation."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fedem.core.errors import counted
from fedem.report.console import rendered
from fedem.report.studies import experiment_markdown, figure_heading, gap_text, made_with, markdown_table, spread_text
from fedem.runs.config import assignment
from fedem.studies.board import (
    COSTS,
    DATA,
    METHOD,
    REFERENCE,
    TOLERANCE,
    Board,
    Cell,
    Plain,
    Published,
    Section,
    Verdict,
)
from fedem.studies.experiments import USUAL, Experiment, in_percent, metric_of
from fedem.studies.sweep import Gap, reason

_MEGABYTE = 1e6
_AUTO = "auto"  # the device that is found, and need not be asked for


def board_page(found: Sequence[Board | Plain], place: Path = USUAL) -> str:
    """Return all boards, then all plain tables, of experiments in ``place``, as one page in Markdown."""
    boards = [each for each in found if isinstance(each, Board)]
    run, cells = (sum(each) for each in zip(*(board.counts for board in boards), strict=True)) if boards else (0, 0)
    where = "" if place == USUAL else f" --experiments {shlex.quote(str(place))}"  # at the end of commands
    shown = [
        {"called": _called(board.experiment), "about": board.about, "counts": board.counts}
        | {"title": board.experiment.title}
        | {"sections": [_section(board.experiment, section, where) for section in board.sections]}
        for board in boards
    ]
    plain = [_plain(each, where) for each in found if isinstance(each, Plain)]
    facts = {"reference": REFERENCE, "tolerance": f"{TOLERANCE:g}", "run": run, "cells": cells, "plain": plain}
    return rendered("leaderboard.md", boards=shown, **facts).rstrip("\n") + "\n"


def _called(experiment: Experiment) -> str:
    """Return what a heading calls an experiment: by its place in the paper, if it has one."""
    return experiment.place or experiment.name


def _plain(found: Plain, where: str) -> dict[str, Any]:
    return {
        "called": _called(found.experiment),
        "title": found.experiment.title,
        "count": f"{len(found.lines)} of {counted(found.num_lines, 'line')} run",
        "command": f"fedem experiment run {found.experiment.name}{where}",
        "table": experiment_markdown(found.experiment, found.lines).rstrip("\n") if found.lines else "",
    }


def _section(experiment: Experiment, section: Section, where: str) -> dict[str, Any]:
    figures = [name for name in experiment.figures if in_percent(name)]
    headings = [METHOD, "seeds"]
    for number, name in enumerate(figures):
        headings += [figure_heading(name), "paper", *([] if number else [f"to {REFERENCE}, points ± s.e."])]
    headings += ["s a round", "device", "MB up", "MB down"]
    rows = (_row(figures, cell) for cell in section.cells)
    run = sum(cell.is_run for cell in section.cells)
    return {
        "data": section.data,
        "count": f"{run} of {counted(len(section.cells), 'cell')} run",
        "table": markdown_table(headings, rows, [METHOD]) if run else [],
        "verdict": "" if section.verdict is None else _verdict(section.verdict, figures[0]),
        "partition": section.partition,
        "sentences": list(_sentences(figures, section)),
        "published": [
            [source, ", ".join(map(_figures, own)), partition]
            for (source, partition), own in groupby(section.published, lambda each: (each.source, each.partition))
        ],
        "figures": " / ".join(map(figure_heading, figures)),
        "commands": [command + where for command in _commands(experiment, section)],
        "missing": [command + where for command in _missing(experiment, section)],
        "remarks": [reason(cell.method, cell.line.failed) for cell in section.cells if cell.line.failed],
    }


def _figures(published: Published) -> str:
    return f"{published.method} {' / '.join(f'{figure:.1f}' for figure in published.figures)}"


def _row(figures: Sequence[str], cell: Cell) -> Iterator[str]:
    line = cell.line
    yield cell.method
    yield ", ".join(map(str, line.seeds))
    for number, name in enumerate(figures):
        ours, paper = line.ours[name], line.paper[name]
        if line.failed and not number:
            yield f"failed: {next(iter(line.failed.values())).phrase}"
        else:
            yield "" if ours.mean is None else spread_text(ours, lambda value: f"{100 * value:.1f}")
        yield "" if paper is None else f"{paper:.1f}"
        if not number:
            yield _to_reference(cell, name)
    seconds, *sizes = (cell.costs[name].mean for name in COSTS)
    yield "" if seconds is None else f"{seconds:.3f}"
    yield ", ".join(cell.devices)
    for size in sizes:
        yield "" if size is None else f"{size / _MEGABYTE:,.{1 if size > 10 * _MEGABYTE else 3}f}"


def _to_reference(cell: Cell, figure: str) -> str:
    return "" if cell.gap is None else _distance(cell.gap, cell.by_clients, figure)


def _distance(gap: Gap, by_clients: bool, figure: str) -> str:
    metric = metric_of(figure)
    if gap.mean is None or metric is None:
        return ""
    return f"{gap_text(gap, metric)} ({counted(gap.num_seeds, 'client' if by_clients else 'seed')})"


def _verdict(verdict: Verdict, figure: str) -> str:
    """Say whether a form of FedEM is first, and how far another method is behind it or ahead."""
    distance = _distance(verdict.gap, verdict.by_clients, figure)
    form, other = (
        f"{cell.method} ({100 * (cell.line.ours[figure].mean or 0):.1f})" for cell in (verdict.form, verdict.other)
    )
    level = ", within the standard error" if verdict.is_within_error else ""
    if verdict.form_leads:
        return f"Yes: {form}. Of the other methods {other} comes next: {distance}{level}."
    return f"No: {other} is ahead of the best form, {form}: {distance}{level}."


def _sentences(figures: Sequence[str], section: Section) -> Iterator[str]:
    """Say of each cell that is not the paper's why it is not, as far as somebody has written it down."""
    for cell in section.cells:
        if cell.differs:
            far = ", ".join(f"{cell.distances[name]:+.1f}" for name in figures if name in cell.distances)
            yield f"{cell.method} ({far}): {cell.why or 'not explained yet.'}"


def _commands(experiment: Experiment, section: Section) -> Iterator[str]:
    """Return the commands that make the runs: one for the methods with the same seeds, settings and device."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in section.cells:
        if cell.is_run:
            seeds = _seeds(sorted({*cell.line.seeds, *cell.line.failed}))
            device = next((each for each in cell.asked if each != _AUTO), "")
            key = (seeds, made_with(cell.line.departures), device)
            groups.setdefault(key, []).append(cell)
    for (seeds, _, device), cells in groups.items():
        settings = [assignment(*item) for item in cells[0].line.departures.items() if item[1] is not None]
        yield _command(experiment, section, (cell.method for cell in cells), seeds, settings, device)


def _missing(experiment: Experiment, section: Section) -> Iterator[str]:
    """Return the command for what is not run, if anything, with the settings that all runs of this data set have."""
    run, left = ([cell for cell in section.cells if cell.is_run is answer] for answer in (True, False))
    if not left:
        return
    common = [
        assignment(place, value)
        for place, value in (run[0].line.departures if run else {}).items()
        if value is not None and all(cell.line.departures.get(place) == value for cell in run)
    ]
    devices = {each for cell in run for each in cell.asked}
    device = next(iter(devices)) if len(devices) == 1 and _AUTO not in devices else ""
    yield _command(experiment, section, (cell.method for cell in left) if run else (), "", common, device)


def _seeds(numbers: Sequence[int]) -> str:
    """Return seeds as the option takes them: how many, or which, with a comma."""
    if list(numbers) == list(range(len(numbers))):
        return str(len(numbers))
    return ",".join(map(str, numbers)) + ("" if len(numbers) > 1 else ",")


def _command(
    experiment: Experiment, section: Section, methods: Iterable[str], seeds: str, settings: Sequence[str], device: str
) -> str:
    named = set(methods)
    chosen = ",".join(name for name in experiment.axes[METHOD] if name in named)
    words = ["fedem", "experiment", "run", experiment.name, f"--{DATA}", section.data]
    words += ["--only", f"{METHOD}={chosen}"] if chosen else []
    words += ["--seeds", seeds] if seeds else []
    words += [word for each in settings for word in ("--set", each)]
    words += ["--device", device] if device else []
    return shlex.join(words)
