"""The work of an experiment: everything is checked, then what is not complete is trained, one run after the other.

What is complete is never run again, and several processes may work on one experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fedem.config import Config
from fedem.data.base import Dataset
from fedem.data.store import Public
from fedem.errors import UserError
from fedem.experiments.entries import Entry, recipe
from fedem.job import Job
from fedem.training import Listener, carry_out


class LatestData:
    """Makes data; those made last are kept, as runs with the same come one after the other."""

    def __init__(self, make: Callable[[Config], Dataset] = Config.make_data):
        self._make = make
        self._kept: tuple[Any, Dataset] | None = None

    def of(self, config: Config) -> Dataset:
        """Return a run's data."""
        wanted = recipe(config)
        if self._kept is None or self._kept[0] != wanted:
            self._kept = None  # lest two data sets be in memory
            self._kept = (wanted, self._make(config))
        return self._kept[1]


def check(entries: Sequence[Entry], data: LatestData) -> None:
    """Prepare every run that is not complete, and refuse all where one can't be trained; nothing is written."""
    pending = [entry for entry in entries if not entry.is_complete]
    _check_present(pending, entries)
    for entry in pending:
        if not entry.folder.exists():
            entry.folder.prepare()
    # In this order the data of the first run are those at hand when its turn comes.
    for entry in reversed(pending):
        try:
            begun = entry.folder.exists()
            job = Job.prepare(entry.config, data.of(entry.config), None, fresh=not begun)
            if begun:
                _check_begun(entry, job)
        except UserError as error:
            raise UserError(f"{entry.title}: {error}") from None


def _check_present(pending: Sequence[Entry], entries: Sequence[Entry]) -> None:
    """Refuse data sets that are not prepared, all of them at once and before any is made."""
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


def _check_begun(entry: Entry, job: Job) -> None:
    """Refuse a run that was begun with other settings or data; one that another process is training is left to it."""
    with _claimed(entry) as mine:
        if mine:
            with entry.folder.locked():
                entry.folder.reopen(job.config)


def work_off(
    entries: Sequence[Entry], watch: Callable[[Entry], AbstractContextManager[Listener | None]], data: LatestData
) -> dict[str, str]:
    """Train what is not complete, one run after the other; those that another process is training are left to it.

    Args:
        entries: of a plan, checked.
        watch: a context for each run, which yields what is told of its rounds.
        data: makes the runs' data.

    Returns:
        what went wrong, by the title of the run

    """
    failed: dict[str, str] = {}
    for entry in entries:
        if entry.is_complete:
            continue
        with _claimed(entry) as mine:
            if not mine or entry.is_complete:
                continue
            try:
                dataset, begun = data.of(entry.config), entry.folder.exists()
                with watch(entry) as listener:
                    # What is made at a run's start, such as a graph, was tried when all were checked.
                    job = Job.prepare(entry.config, dataset, None, fresh=False)
                    carry_out(job, out=entry.folder.path, resume=begun, listener=listener)
            except UserError as error:  # the others can go on without it
                failed[entry.title] = str(error)
    return failed


@contextmanager
def _claimed(entry: Entry) -> Iterator[bool]:
    """Yield whether the run is ours: no other process works on it as long as this one does."""
    place = entry.folder.path.parent / ".claims"
    place.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield True
        return
    with (place / entry.folder.path.name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
