"""A set of runs: planned from axes and seeds, checked before any work starts, worked off, and read over the seeds.

A comparison is such a set with one axis, the methods; a declared experiment has several; a search of settings draws its
axis while it goes on. Each entry is an ordinary run in a folder of its own. What is complete is never run again, what
failed only where that is asked for, and several processes may work on one set.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from scipy.special import stdtrit

from fedem.core.errors import UserError, naming
from fedem.core.files import holding, is_empty, locked
from fedem.data.dataset import Dataset
from fedem.models.metrics import find_metric
from fedem.runs.config import ON_THE_WAY, Config, Layer, parse_assignment
from fedem.runs.evaluate import Record, has_diverged
from fedem.runs.folder import CONFIG, DIVERGED, Failure, RunFolder
from fedem.runs.rounds import DivergedError
from fedem.runs.trainer import Listener, Trainer, carry_out

Labels = Mapping[str, str]  # the label of the choice on each axis
# What the paper says of its own runs.
PAPER: dict[str, Any] = tomllib.loads(files("fedem.studies").joinpath("paper.toml").read_text(encoding="utf-8"))


class Entry(NamedTuple):
    """One run of the set."""

    labels: Labels
    seed: int
    config: Config
    folder: RunFolder

    @property
    def title(self) -> str:
        return _title(self.labels, self.seed)

    @property
    def is_complete(self) -> bool:
        return self.folder.summary() is not None

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.folder.failure() is not None

    @property
    def failure(self) -> Failure | None:
        """Why there is no outcome that counts; None where there is one, or the run is not over."""
        if (summary := self.folder.summary()) is None:
            return self.folder.failure()
        if not has_diverged(summary):
            return None
        return Failure(DIVERGED, f"Training diverged: the loss on the training samples is {summary['train_loss']}.")

    @property
    def departures(self) -> dict[str, Any]:
        """What the run was made with in place of the settings planned, by ``section.key``; None: it lacks that key."""
        if not self.folder.exists():
            return {}
        made = self.folder.config()
        # Nobody sets what the data decided, such as the hash that says who owns which samples.
        planned = self.config.settled_like(made)
        places = (place for place in self.folder.departures(planned) if place != "run.partition_hash")
        return {place: made.sections[place.partition(".")[0]].get(place.partition(".")[2]) for place in places}

    @property
    def clients_key(self) -> tuple[Any, ...]:
        """What runs have in common that have the same clients, with the same samples."""
        config = self.folder.config() if self.folder.exists() else self.config
        return *_data_key(config), config.run.partition_hash


class Spread(NamedTuple):
    """A figure over the seeds."""

    mean: float | None
    deviation: float | None  # of the sample; None for one seed

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Sum up one value per seed; a figure that some seed lacks has no mean, which would flatter it."""
        known = list(values)
        numbers = [float(value) for value in known if value is not None]
        if not numbers or len(numbers) < len(known):
            return cls(None, None)
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)

    def rank(self, metric: str) -> float:
        """Return a key that sorts the best by ``metric`` first, and what has no mean last."""
        return math.inf if self.mean is None else -self.mean if find_metric(metric).larger_is_better else self.mean


class Gap(NamedTuple):
    """How far a figure is from another one, over the seeds that both have."""

    mean: float | None  # of the differences seed by seed
    error: float | None  # the standard error of that mean; None for one seed
    num_seeds: int

    @classmethod
    def of(
        cls,
        values: Mapping[Any, float | None],
        others: Mapping[Any, float | None],
        weights: Mapping[Any, float] | None = None,
    ) -> Gap:
        """Subtract seed by seed: what a seed's data do to both falls out. So it may be done client by client.

        With weights w that sum to one, d = sum_i w_i d_i has the standard error
        sqrt(n / (n - 1) sum_i w_i^2 (d_i - d)^2), which is s / sqrt(n) where all weigh the same.
        """
        pairs = ((seed, value, others.get(seed)) for seed, value in values.items())
        both = {seed: value - other for seed, value, other in pairs if value is not None and other is not None}
        weighed = dict.fromkeys(both, 1.0) if weights is None else {seed: weights[seed] for seed in both}
        if not (total := math.fsum(weighed.values())):
            return cls(None, None, 0)
        shares, count = {seed: weight / total for seed, weight in weighed.items()}, len(both)
        mean = math.fsum(shares[seed] * each for seed, each in both.items())
        squares = math.fsum((shares[seed] * (each - mean)) ** 2 for seed, each in both.items())
        return cls(mean, math.sqrt(count / (count - 1) * squares) if count > 1 else None, count)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean, by Student's t; None for one seed."""
        if self.mean is None or self.error is None:
            return None
        half = float(stdtrit(self.num_seeds - 1, 0.975)) * self.error
        return self.mean - half, self.mean + half


class SharedData:
    """Makes the data of runs, and keeps those made last: runs with the same data come one after the other."""

    def __init__(self, make: Callable[[Config], Dataset] = Config.make_data, most: int = 1):
        self._make, self._most, self._kept = make, most, dict[Any, Dataset]()

    def of(self, config: Config) -> Dataset:
        wanted = _data_key(config)
        if wanted not in self._kept:
            while len(self._kept) >= self._most:  # first, lest one too many be in memory
                del self._kept[next(iter(self._kept))]
            self._kept[wanted] = self._make(config)
        return self._kept[wanted]


def _name(labels: Labels, seed: int) -> str:
    words = [re.sub(r"[^a-z0-9.+]+", "-", label.lower()).strip("-") for label in labels.values()]
    return "_".join([*words, f"seed{seed}"])


def plan(
    out: Path,
    axes: Mapping[str, Iterable[str]],
    seeds: Sequence[int],
    layers: Callable[[Labels], Iterable[Layer]],
    without: Sequence[Labels] = (),
    name: Callable[[Labels, int], str] = _name,
) -> list[Entry]:
    """Return a run for every seed and combination of the axes' labels, but for those ``without``, and check them."""
    check_seeds(seeds)
    entries = [
        _entry(out / name(labels, seed), labels, seed, layers) for labels in _combined(axes, without) for seed in seeds
    ]
    for entry in entries:
        if entry.is_complete and entry.failure is None:
            _check_same(entry)
    # Runs with the same seed and data come together.
    return sorted(entries, key=lambda entry: (seeds.index(entry.seed), repr(_data_key(entry.config))))


def kept(
    out: Path,
    axes: Mapping[str, Iterable[str]],
    seeds: Sequence[int] | None,
    layers: Callable[[Labels], Iterable[Layer]],
    without: Sequence[Labels] = (),
) -> list[Entry]:
    """Return the runs that lie in ``out``, whatever they were made with, and one that is not for what has none there.

    What they were made with in place of the planned settings is in their ``departures``, the same for all seeds. But
    some may be scored on the way and others not, where that decides nothing.
    """
    if seeds is not None:
        check_seeds(seeds)
    entries = []
    for labels in _combined(axes, without):
        stem = _name(labels, 0).removesuffix("0")
        numbers = (path.name.removeprefix(stem) for path in out.glob(f"{stem}*"))
        there = sorted(int(number) for number in numbers if number.isdecimal())
        chosen = there if seeds is None else seeds
        own = [_entry(out / _name(labels, seed), labels, seed, layers) for seed in chosen or [0]]
        begun = [entry for entry in own if entry.folder.exists()]
        for entry in begun[1:]:
            one, other = begun[0].departures, entry.departures
            differing = {key for key in {**one, **other} if one.get(key) != other.get(key)}
            if not any(each.folder.config().run.patience for each in (begun[0], entry)):
                differing.discard(ON_THE_WAY)
            if differing:
                settings = ", ".join(sorted(differing))
                what = f"{begun[0].title} and {entry.title} in {out} were made with different settings ({settings})"
                raise UserError(f"{what}; allowed: the same for all seeds. Name those to show with --seeds.")
        entries += own
    return entries


def _combined(axes: Mapping[str, Iterable[str]], without: Sequence[Labels]) -> list[Labels]:
    """Return every combination of the axes' labels, but for those ``without``; refuse to be left with none."""
    everything = (dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values()))
    found = [labels for labels in everything if not any(gap.items() <= labels.items() for gap in without)]
    if not found:
        raise UserError("No run is left: every one is excluded.")
    return list(found)


def _entry(path: Path, labels: Labels, seed: int, layers: Callable[[Labels], Iterable[Layer]]) -> Entry:
    with naming(_title(labels, seed)):
        config = Config.build(*layers(labels), {"run": {"seed": seed}})
    folder = RunFolder(path)
    if folder.exists():  # with what the data decided
        config = config.settled_like(folder.config())
    return Entry(labels, seed, config, folder)


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse no seeds, and the same one twice."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"The seeds are {', '.join(map(str, seeds)) or 'none'}; allowed: one or several, each once.")


def check_folder(what: str, out: Path, resume: bool, begun: bool) -> None:
    """Refuse a folder that can't be written, has nothing to resume, or else holds anything; changes nothing."""
    if RunFolder(out).exists():
        raise UserError(f"{out} holds a run, not a {what}; choose another folder.")
    if resume and not begun:
        raise UserError(f"There is no {what} to resume in {out}{'' if out.is_dir() else ' (no such folder)'}.")
    if not resume and out.is_dir() and not is_empty(out):
        raise UserError(f"{out} is not empty; go on with --resume, or choose another folder.")
    RunFolder(out).prepare(resume)


@contextmanager
def held(what: str, out: Path, resume: bool, begun: Callable[[], bool]) -> Iterator[None]:
    """Hold the folder of a set that one process works on: the lock comes first, then the look at what is there."""
    check_folder(what, out, resume, begun())  # leaves nothing behind where the answer is no already
    with holding(out, f"Another process is at work on the {what} in {out}."):
        check_folder(what, out, resume, begun())
        yield


def layers_of(values: Mapping[str, Any]) -> list[Layer]:
    """Return values by ``section.key`` as layers of a configuration."""
    return [{key.partition(".")[0]: {key.partition(".")[2]: value}} for key, value in values.items()]


def read_setting(text: str, options: Mapping[str, str], whose: str = "") -> tuple[str, str, Layer]:
    """Read ``section.key=value`` after ``whose``: section, section.key, layer; refuse what one of ``options`` gives."""
    layer = parse_assignment(text.removeprefix(whose))
    ((section, (key,)),) = layer.items()
    place = f"{section}.{key}"
    if option := options.get(place) or options.get(section):
        raise UserError(f"--set got {text!r}; {place} is given by {option}.")
    return section, place, layer


def check(entries: Sequence[Entry], data: SharedData, shared: bool = False) -> list[str]:
    """Prepare every run on its data, also complete ones unless the work is ``shared``; return what they note.

    A run that can't be trained has failed, which is written down; all are refused where none is left that can.
    """
    check_failed(entries)
    notes: list[str] = []
    refused: list[tuple[Entry, str]] = []
    todo = [entry for entry in entries if not (entry.is_over if shared else entry.failure)]
    for entry in todo:
        if not entry.folder.exists():
            try:
                entry.folder.prepare()
            except UserError:
                if not entry.folder.exists():  # else another process has begun it meanwhile
                    raise
    for entry in todo:
        with naming(entry.title):
            begun, dataset = entry.folder.exists(), data.of(entry.config)
            try:
                # Trainers are made again when their turn comes: on a GPU, each has a copy of the data.
                trainer = Trainer.prepare(entry.config, dataset, fresh=not begun, tries=False)
            except UserError as error:
                if not begun:
                    refused.append((entry, str(error)))
                    continue
                with _claimed(entry) as mine:
                    if mine and entry.failure is None:  # else another process has found the same
                        raise
                continue
            if begun:
                _check_begun(entry, trainer, shared)
        if trainer.engine.note and not entry.is_complete:
            notes.append(trainer.engine.note)
    if refused and not any(entry.is_complete for entry in entries) and len(refused) == len(todo):
        entry, why = refused[0]
        raise UserError(f"{entry.title}: {why}")
    for entry, why in refused:
        with _claimed(entry) as mine:
            if mine and not entry.folder.exists():  # else another process has found the same
                with entry.folder.created(entry.config):
                    entry.folder.fail(Failure("can't be trained", why))
    return list(dict.fromkeys(notes))


def work_off(
    entries: Sequence[Entry],
    watch: Callable[[Entry], AbstractContextManager[Listener | None]],
    data: SharedData,
    around: Path | None = None,
) -> dict[str, str]:
    """Train what is not over, but for runs that another process is training; return what went wrong, by title.

    A run that is complete and trains alike lends its training: one of the set, or of any in the folder ``around``. What
    is no fault of a run, such as a file that is gone, is not written down: the run is tried again when resumed.
    """
    failed: dict[str, str] = {}
    for entry in (entry for entry in entries if not entry.is_over):
        with _claimed(entry) as mine:
            if not mine or entry.is_over:
                continue
            try:
                dataset = data.of(entry.config)
                with watch(entry) as listener:
                    # What is made at a run's start, such as a graph, was tried when all were checked.
                    trainer = Trainer.prepare(entry.config, dataset, fresh=False)
                    begun = is_begun(entry, trainer, _around(entry.folder.path.parent, around))
                    carry_out(trainer, out=entry.folder.path, resume=begun, listener=listener)
            except DivergedError:  # its folder says so, and the others can go on without it
                continue
            except UserError as error:
                failed[entry.title] = str(error)
    return failed


def _around(place: Path, around: Path | None) -> Iterator[RunFolder]:
    """Yield the runs in ``place``, then those of all sets in ``around``."""
    found = [place.glob(f"*/{CONFIG}"), *([around.glob(f"*/*/{CONFIG}")] if around else [])]
    return (RunFolder(path.parent) for paths in found for path in sorted(paths))


def clear_failed(entries: Iterable[Entry]) -> None:
    """Remove runs that failed, so that they are trained again, from their start and perhaps with other settings."""
    for entry in entries:
        if entry.failure is not None:
            with _claimed(entry) as mine:
                if mine:
                    entry.folder.clear()


def check_failed(entries: Iterable[Entry]) -> None:
    """Refuse failed runs that had other settings than those asked for: these might do better."""
    for entry in entries:
        if entry.failure is not None:
            try:
                _check_same(entry)
            except UserError as error:
                raise UserError(f"{error} It failed; --retry-failed trains it with the settings asked for.") from None


def is_begun(entry: Entry, trainer: Trainer, others: Iterable[RunFolder]) -> bool:
    """Whether a run can be gone on with; one of the others that is complete and trains alike lends it its training."""
    if entry.folder.exists():
        return True
    for other in others:
        if _can_lend(other, trainer.config):
            trainer.take_over(other, entry.folder)
            return True
    return False


def _can_lend(folder: RunFolder, config: Config) -> bool:
    """Whether a run is complete, has states, and trains as ``config``, both with what the data decided."""
    try:
        return folder.summary() is not None and folder.saved.newest() is not None and folder.config().trains_as(config)
    except UserError:  # it can't be read, which whoever asks for it is told
        return False


def outcomes(entries: Iterable[Entry]) -> dict[tuple[str, ...], dict[int, Record]]:
    """Read what is complete: summaries by seed, for every combination of labels in the order of the plan."""
    found: dict[tuple[str, ...], dict[int, Record]] = {}
    for entry in entries:
        by_seed = found.setdefault(tuple(entry.labels.values()), {})
        if (summary := entry.folder.summary()) is not None:
            by_seed[entry.seed] = summary
    return found


def failures(entries: Iterable[Entry]) -> dict[tuple[str, ...], dict[int, Failure]]:
    """Read what failed, by seed, for the combinations of labels where something did."""
    found: dict[tuple[str, ...], dict[int, Failure]] = {}
    for entry in entries:
        if (failure := entry.failure) is not None:
            found.setdefault(tuple(entry.labels.values()), {})[entry.seed] = failure
    return found


def reason(name: str, failed: Mapping[int, Failure]) -> str:
    """Say with which seeds something failed, and why it did with the first of them."""
    seeds = f"seed{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
    return f"{name} failed with {seeds}: {next(iter(failed.values())).message}"


def _title(labels: Labels, seed: int) -> str:
    return ", ".join([*labels.values(), f"seed {seed}"])


def _data_key(config: Config) -> tuple[Any, ...]:
    return config.data, config.partition, config.run.seed, config.run.unseen


def _check_same(entry: Entry) -> None:
    """Refuse a run that is over with other settings than those asked for: its figures would pass for theirs."""
    made = entry.folder.config()
    # What was settled with the data in hand can't be known without them.
    settled = entry.config.replace("run", partition_hash=made.run.partition_hash)
    entry.folder.reopen(settled)


def _check_begun(entry: Entry, trainer: Trainer, shared: bool) -> None:
    """Refuse a run that was begun with other settings or data, or that another process trains if work isn't shared."""
    with _claimed(entry) as mine:
        if shared and not mine:
            return
        with entry.folder.locked():
            if not entry.folder.reopen(trainer.config):
                return
            _, saved = entry.folder.load()
    if saved.get("data") != trainer.federation.fingerprint:
        raise UserError(f"The data are not those that the run in {entry.folder.path} was trained on.")


def _claimed(entry: Entry) -> AbstractContextManager[bool]:
    """Yield whether the run is ours: no other process works on it as long as this one does."""
    place = entry.folder.path.parent / ".claims"
    place.mkdir(parents=True, exist_ok=True)
    return locked(place / entry.folder.path.name)
