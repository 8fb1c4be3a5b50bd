"""Run folders and comparisons -> plain figures that pages and pictures are made of; the data are not needed.

Shapes: T clients, M components.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedem.cells import Cell
from fedem.checkpoint import MANIFEST
from fedem.comparison import Comparison, summarize
from fedem.config import Config
from fedem.errors import UserError
from fedem.methods import METHODS
from fedem.records import Record
from fedem.report.tables import metric_of
from fedem.runs import RunFolder
from fedem.sections import GIVEN

Numbers = NDArray[np.float64]

# What makes two runs' clients the same ones; and what may differ among the seeds of a method.
_DATA = ("data", "partition")
_PLACE = ("run.seed", "run.device", "run.engine", "run.chunk_size", "run.checkpoint_every", "run.partition_hash")


@dataclass(frozen=True)
class Clients:
    """Clients of a run, in the order of its clients.csv."""

    names: tuple[str, ...]
    sizes: Numbers
    """numbers of training samples, ``[T]``"""
    scores: Numbers
    """on the test part, ``[T]``; not a number where a client has no test samples"""
    weights: Numbers
    """of the mixture, ``[T, M]``; M is 0 where a client has one model"""

    @classmethod
    def of(cls, rows: Sequence[dict[str, str]], metric: str) -> Clients:
        """Read rows of clients.csv."""
        columns = [name for name in (rows[0] if rows else {}) if name.startswith("weight_")]
        weights = np.array([[_number(row[name]) for name in columns] for row in rows], dtype=np.float64)
        return cls(
            tuple(row["client"] for row in rows),
            np.array([_number(row.get("train_samples")) for row in rows], dtype=np.float64),
            np.array([_number(row.get(f"test_{metric}")) for row in rows], dtype=np.float64),
            weights.reshape(len(rows), len(columns)),
        )


@dataclass(frozen=True)
class Run:
    """A complete run."""

    folder: RunFolder
    config: Config
    summary: dict[str, Any]
    history: list[Record]
    clients: Clients
    """those that took part in training"""
    fingerprint: str | None
    """of the samples; None where the checkpoint was removed"""

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.summary["method"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.summary["seed"])

    def curve(self, name: str) -> tuple[Numbers, Numbers]:
        """Return rounds and the figure called ``name`` after them, where it is known and finite."""
        pairs = [(line["round"], line[name]) for line in self.history if line.get(name) is not None]
        found = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        found = found[np.isfinite(found[:, 1])]
        return found[:, 0], found[:, 1]

    @cached_property
    def sent(self) -> Numbers:
        """Bytes sent up and down, all clients together, by the end of each recorded round."""
        return np.cumsum([(line["bytes_up"] or 0) + (line["bytes_down"] or 0) for line in self.history], dtype=float)


@dataclass(frozen=True)
class Gathered:
    """Runs of one or several methods on the same data, every method with the same seeds."""

    comparison: Comparison
    runs: dict[str, list[Run]]
    """of each method, seed by seed; the best method first"""
    commands: list[str]
    """what was called, where the folders tell"""

    @property
    def titles(self) -> dict[str, str]:
        """What each method is called in tables, the best first."""
        return {row.method: row.title for row in self.comparison.rows}

    def name(self, method: str) -> str:
        """Return what a method is called in a sentence."""
        return METHODS[method].title

    @property
    def accuracy(self) -> bool:
        """Whether runs were scored by accuracy, and not by squared errors."""
        return self.comparison.metric == "accuracy"

    @property
    def score(self) -> str:
        """Name the score in a summary."""
        return f"test_{self.comparison.metric}"

    @property
    def label(self) -> str:
        """The score with its unit, for an axis."""
        return "test accuracy in %" if self.accuracy else "test mean squared error"

    def scaled(self, values: Numbers) -> Numbers:
        """Return scores in the unit of ``label``."""
        return 100 * values if self.accuracy else values

    def told(self, value: float) -> str:
        """Return a score as a sentence has it."""
        return f"{100 * value:.1f} %" if self.accuracy else f"{value:.4g}"

    def apart(self, better: float, worse: float) -> str:
        """Say how far the first score lies from the second."""
        if self.accuracy:
            points = 100 * (better - worse)
            return f"{abs(points):.1f} points {'above' if points >= 0 else 'below'}"
        return f"{abs(better - worse):.3g} {'above' if better >= worse else 'below'}"


def gather(paths: Sequence[Path]) -> Gathered:
    """Read the runs below ``paths``, each a run's folder (with its baselines) or a comparison's."""
    if not paths:
        raise UserError("No folders are given; allowed: one or several folders of runs or comparisons.")
    runs: dict[Path, Run] = {}
    for path in paths:
        for folder in _folders(path):
            runs.setdefault(folder.path.resolve(), _read(folder))
    found = list(runs.values())
    # A recipe makes other clients with another seed: each run is held against the first of all, and of its seed.
    firsts = {run.seed: run for run in reversed(found)}
    for run in found[1:]:
        _check_data(found[0], run)
        _check_data(firsts[run.seed], run)
    for previous, run in _pairs(found):
        _check_pair(previous, run)
    by_cell = {(run.method, run.seed): run for run in found}
    methods, seeds = list(dict.fromkeys(run.method for run in found)), sorted({run.seed for run in found})
    missing = [f"{method} with seed {seed}" for method in methods for seed in seeds if (method, seed) not in by_cell]
    if missing:
        raise UserError(
            f"There is no run of {', '.join(missing)} in {', '.join(map(str, paths))}; "
            "allowed: every method with the same seeds."
        )
    comparison = summarize(
        [
            Cell(method, seed, by_cell[method, seed].config, by_cell[method, seed].folder)
            for seed in seeds
            for method in methods
        ]
    )
    ordered = {row.method: [by_cell[row.method, seed] for seed in seeds] for row in comparison.rows}
    return Gathered(comparison, ordered, [command for path in paths for command in _commands(path)])


def _folders(path: Path) -> list[RunFolder]:
    """Return a run's folder and its baselines', or those of a comparison."""
    if not path.is_dir():
        raise UserError(f"There is no folder {path}; allowed: the folder of a run or of a comparison.")
    folder = RunFolder(path)
    if folder.exists():
        return [folder, *folder.baselines()]
    cells = [RunFolder(place.parent) for place in sorted(path.glob("*/config.toml"))]
    if not cells:
        raise UserError(f"{path} holds no run (no config.toml) and no comparison (no METHOD-seedS/config.toml).")
    return cells


def _read(folder: RunFolder) -> Run:
    summary = folder.summary()
    if summary is None:
        raise UserError(f"The run in {folder.path} is not complete; go on with it first (--resume).")
    if "num_unseen_clients" not in summary:
        raise UserError(f"{folder.path} holds clients fitted after training; allowed: runs of training.")
    rows = [row for row in folder.clients() if row["role"] == "train"]
    clients = Clients.of(rows, metric_of(summary))
    return Run(folder, folder.config(), summary, folder.metrics(), clients, _fingerprint(folder))


def _fingerprint(folder: RunFolder) -> str | None:
    path = folder.checkpoints / MANIFEST
    if not path.is_file():
        return None
    found = _json(path).get("facts", {}).get("data")
    return None if found is None else str(found)


def _check_data(first: Run, other: Run) -> None:
    """Refuse a run on other data than the first one's."""
    changed = [
        place
        for place in first.config.differences(other.config)
        if place.partition(".")[0] in _DATA or place == "run.unseen"
    ]
    same_clients = (
        first.clients.names == other.clients.names
        and np.array_equal(first.clients.sizes, other.clients.sizes)
        and len({run.fingerprint for run in (first, other)} - {None}) <= 1
    )
    # With another seed the same recipe may make other clients.
    if not changed and (same_clients or first.seed != other.seed):
        return
    what = ", ".join(changed) or "their clients"
    raise UserError(
        f"{first.folder.path} and {other.folder.path} are runs on different data ({what} differ); "
        "allowed: runs on the same data."
    )


def _pairs(runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Yield each run after another of its method, with the method's first."""
    firsts: dict[str, Run] = {}
    for run in runs:
        if run.method in firsts:
            yield firsts[run.method], run
        firsts.setdefault(run.method, run)


def _check_pair(first: Run, other: Run) -> None:
    """Refuse two runs of one method that are not the same but for their seeds."""
    places = f"{first.folder.path} and {other.folder.path} are both {first.method}"
    changed = set(first.config.differences(other.config)) - set(_PLACE)
    if changed:
        raise UserError(f"{places} with other settings ({', '.join(sorted(changed))}); allowed: other seeds alone.")
    if first.seed == other.seed:
        raise UserError(f"{places} with seed {first.seed}; allowed: each method and seed once.")


def _commands(path: Path) -> list[str]:
    """Return the commands that make a folder's runs again; none for data or models passed from Python."""
    place = path / "comparison.json"
    if place.is_file():
        return [command] if (command := _json(place).get("command")) else []
    return [
        shlex.join(["fedem", "train", str(folder.path / "config.toml")])
        for folder in _folders(path)
        if GIVEN not in (folder.config().name("data"), folder.config().name("model"))
    ]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}; allowed: an object, as fedem wrote it.")
    return content


def _number(text: str | None) -> float:
    return float(text) if text else float("nan")
