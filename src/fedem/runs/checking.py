"""What is wrong with the folder of a run, what follows from it, and what of it can be put right.

Nothing is deleted that can't be made again: what is damaged is moved aside, under a name that ends in ``.damaged``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from fedem.core.errors import UserError, counted
from fedem.core.files import LOCK, leftovers, locked
from fedem.runs.checkpoints import MANIFEST, PREVIOUS
from fedem.runs.folder import (
    CLIENTS_FILE,
    CONFIG,
    DAMAGED_LINES,
    FAILED_FILE,
    METRICS_FILE,
    REFERENCES_FILE,
    SUMMARY_FILE,
    RunFolder,
)

_NAMED = 5  # rounds or lines that a sentence names


class Finding(NamedTuple):
    """Something that is wrong."""

    path: Path  # the file
    problem: str  # a sentence that names it
    follows: str  # what follows from it
    mended: str = ""  # what was done about it
    is_harmless: bool = False  # what a killed process left, and the next one would remove

    @property
    def counts(self) -> bool:
        """Whether anything is still wrong."""
        return not (self.mended or self.is_harmless)


def check_run(folder: RunFolder, repair: bool = False) -> list[Finding]:
    """Read everything in a run's folder; what can be put right is, where that is asked for.

    Of a run that is being trained nothing is put right, and what its process has not finished writing is no finding.
    """
    with ExitStack() as stack:
        is_busy = False
        if repair:
            stack.enter_context(folder.locked())
        elif (folder.path / LOCK).exists() and os.access(folder.path / LOCK, os.W_OK):
            is_busy = not stack.enter_context(locked(folder.path / LOCK))
        found = [*_config(folder), *_checkpoints(folder, repair), *_metrics(folder, repair), *_outcome(folder, repair)]
        return found if is_busy else [*found, *_leftovers(folder, repair)]


def set_aside(path: Path) -> str:
    """Rename a damaged file; returns what was done."""
    other, number = path.with_name(f"{path.name}.damaged"), 1
    while other.exists():
        number += 1
        other = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(other)
    return f"moved to {other.name}"


def _config(folder: RunFolder) -> Iterator[Finding]:
    follows = "the run can't be gone on with, loaded or reported"
    if not folder.exists():
        yield Finding(folder.path / CONFIG, f"{folder.path / CONFIG} is missing.", follows)
        return
    try:
        folder.config()
    except UserError as error:
        yield Finding(folder.path / CONFIG, str(error), follows)


def _checkpoints(folder: RunFolder, repair: bool) -> Iterator[Finding]:
    saved = folder.saved
    if not saved.exist():
        return
    newest = saved.problems(MANIFEST)
    before = saved.problems(PREVIOUS) if (saved.path / PREVIOUS).exists() else {}
    if not newest:
        for path, problem in before.items():
            done = set_aside(path) if repair and path.exists() else ""
            yield Finding(path, problem, "the newest checkpoint is whole, but there is none before it", done)
        if repair and before and (saved.path / PREVIOUS).exists():
            set_aside(saved.path / PREVIOUS)
        return
    if before or not (saved.path / PREVIOUS).exists():
        follows = "nothing can be gone on with or loaded; without the folder checkpoints --resume trains from the start"
        for path, problem in (newest | before).items():
            yield Finding(path, problem, follows)
        return
    done = saved.manifest(PREVIOUS)["states"]["last"]["round"]
    follows = f"--resume goes on from the checkpoint before, of {counted(done, 'round')}, to the same bits"
    mended = {path: set_aside(path) for path in newest if repair and path.exists()}
    if repair:
        if (saved.path / MANIFEST).exists():
            set_aside(saved.path / MANIFEST)
        saved.step_back()
    for path, problem in newest.items():
        step = f"the checkpoint of {counted(done, 'round')} took its place"
        yield Finding(path, problem, follows, "; ".join(filter(None, [mended.get(path), step])) if repair else "")


def _metrics(folder: RunFolder, repair: bool) -> Iterator[Finding]:
    path = folder.path / METRICS_FILE
    good, damaged = folder.put_aside() if repair else folder.read_metrics()
    follows = "its round is missing from curves and means, and nothing else is"
    for line in damaged:
        yield Finding(path, line.why, follows, f"moved to {DAMAGED_LINES}" if repair else "")
    facts, last = folder.standing()
    if "data" not in facts and "run" not in facts:  # of clients fitted after training there are no rounds
        return
    lost = sorted({*range(1, facts.get("stopped_after", last) + 1)} - {record["round"] for record in good})
    if lost and not damaged and not (folder.path / DAMAGED_LINES).exists():
        which = ", ".join(map(str, lost[:_NAMED])) + (", ..." if lost[_NAMED:] else "")
        problem = f"{path} has no record of {counted(len(lost), 'round')} ({which})."
        yield Finding(path, problem, "they are missing from curves and means, and nothing else is")


def _outcome(folder: RunFolder, repair: bool) -> Iterator[Finding]:
    again = "--resume makes it again from the checkpoint"
    files: dict[str, tuple[Callable[[], object], str]] = {
        SUMMARY_FILE: (folder.summary, f"the outcome can't be shown or reported; {again}"),
        FAILED_FILE: (folder.failure, "why the run could not come to an end is not known"),
        REFERENCES_FILE: (folder.references, "the figures of plain predictors can't be shown"),
    }
    for name, (read, follows) in files.items():
        try:
            read()
        except UserError as error:
            path = folder.path / name
            yield Finding(path, str(error), follows, set_aside(path) if repair else "")
            if name == SUMMARY_FILE:
                return
    if (summary := folder.summary()) is None:
        return
    path, (_, last) = folder.path / CLIENTS_FILE, folder.standing()
    if folder.saved.newest() is not None and summary["rounds"] != last:
        problem = f"{folder.path / SUMMARY_FILE} is of round {summary['rounds']}, and the checkpoint of round {last}."
        yield Finding(folder.path / SUMMARY_FILE, problem, "its figures are not those of the states; --resume goes on")
    try:
        trained = sum(row["role"] == "train" for row in folder.clients())
        if trained not in (0, summary["num_clients"]):
            raise UserError(f"{path} has {trained} clients that were trained, the summary {summary['num_clients']}.")
    except UserError as error:
        yield Finding(path, str(error), f"the clients' figures can't be shown or reported; {again}")


def _leftovers(folder: RunFolder, repair: bool) -> Iterator[Finding]:
    for path in [*leftovers(folder.path), *leftovers(folder.checkpoints), *folder.saved.unnamed()]:
        if repair:
            path.unlink()
        problem, follows = f"{path} was left by a process that was killed.", "nothing follows from it"
        yield Finding(path, problem, follows, "removed" if repair else "", is_harmless=True)
