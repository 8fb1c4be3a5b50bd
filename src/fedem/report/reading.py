"""Folders of complete runs -> plain figures; the data are not needed.

Shapes: T clients, M components.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedem.checkpoint import MANIFEST
from fedem.config import Config
from fedem.errors import UserError
from fedem.records import Record
from fedem.report.tables import metric_of
from fedem.runs import RunFolder
from fedem.sections import GIVEN

Numbers = NDArray[np.float64]


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
    command: str | None
    """what makes the run again; None for data or models passed from Python"""

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


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs below ``paths``, each once; a path is a run's folder (with its baselines) or one of many runs'."""
    if not paths:
        raise UserError("No folders are given; allowed: one or several folders of runs, comparisons or experiments.")
    runs: dict[Path, Run] = {}
    for path in paths:
        folders, command = _folders(path), _command(path)
        for folder in folders:
            if (place := folder.path.resolve()) not in runs:
                runs[place] = _read(folder, command)
    return list(runs.values())


def _folders(path: Path) -> list[RunFolder]:
    """Return a run's folder and its baselines', or those of a comparison or an experiment."""
    if not path.is_dir():
        raise UserError(f"There is no folder {path}; allowed: the folder of a run, a comparison or an experiment.")
    folder = RunFolder(path)
    if folder.exists():
        return [folder, *folder.baselines()]
    if (path / "search.json").is_file():
        raise UserError(
            f"{path} holds a search of settings (tune.json has its trials); allowed: runs, or folders of runs."
        )
    cells = [RunFolder(place.parent) for place in sorted(path.glob("*/config.toml"))]
    if not cells:
        raise UserError(f"{path} holds no run (no config.toml) and no runs in folders of their own (no */config.toml).")
    return cells


def _command(path: Path) -> str | None:
    """Return the command that made all runs of a folder, where it tells."""
    place = path / "comparison.json"
    return _json(place).get("command") if place.is_file() else None


def _read(folder: RunFolder, command: str | None) -> Run:
    summary = folder.summary()
    if summary is None:
        raise UserError(f"The run in {folder.path} is not complete; go on with it first (--resume).")
    everybody = folder.clients()
    rows = [row for row in everybody if row["role"] == "train"]
    if everybody and not rows:
        raise UserError(f"{folder.path} holds clients fitted after training; allowed: runs of training.")
    # A server has no scores of single clients; its run's file of them is empty.
    if rows and len(rows) != summary["num_clients"]:
        raise UserError(
            f"{folder.path}/clients.csv has {len(rows)} clients that were trained, and summary.json "
            f"{summary['num_clients']}: the file is damaged."
        )
    config, clients = folder.config(), Clients.of(rows, metric_of(summary))
    if command is None and GIVEN not in (config.name("data"), config.name("model")):
        command = shlex.join(["fedem", "train", str(folder.path / "config.toml")])
    return Run(folder, config, summary, folder.metrics(), clients, _fingerprint(folder), command)


def _fingerprint(folder: RunFolder) -> str | None:
    path = folder.checkpoints / MANIFEST
    if not path.is_file():
        return None
    found = _json(path).get("facts", {}).get("data")
    return None if found is None else str(found)


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
