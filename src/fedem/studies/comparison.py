"""Methods side by side: what came out of the runs of a comparison, over several seeds."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedem.core.errors import UserError
from fedem.core.files import write_atomically, write_json
from fedem.methods import title_of
from fedem.runs.config import Config
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder
from fedem.studies.sweep import Cell

_SCORES = ("test_{}", "bottom_decile", "unseen_test_{}", "train_{}")
_COSTS = ("seconds_per_round", "bytes_up_per_round", "bytes_down_per_round")


class Spread(NamedTuple):
    """A figure over the seeds."""

    mean: float | None
    deviation: float | None
    """of the sample; None for one seed"""

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Sum up one value a seed; a figure that some seed lacks has no mean, which would flatter it."""
        known = list(values)
        numbers = [float(value) for value in known if value is not None]
        if not numbers or len(numbers) < len(known):
            return cls(None, None)
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


class Point(NamedTuple):
    """The test score after a round."""

    round: int
    spread: Spread


@dataclass(frozen=True)
class Row:
    """A method's figures by their names in a summary, and its way there."""

    method: str
    title: str
    figures: dict[str, Spread]
    curve: list[Point]
    training: dict[str, Any] = field(default_factory=dict)
    """settings of how clients train, by their names, ``section.key``"""


@dataclass(frozen=True)
class Comparison:
    """What came out: a row a method, the best first."""

    data: str
    metric: str
    rounds: int
    num_clients: int
    num_unseen_clients: int
    seeds: list[int]
    rows: list[Row]
    oracle: dict[str, Spread]
    """empty when the truth is not known"""
    runs: list[Record]
    """a record a method and seed"""

    @property
    def larger_is_better(self) -> bool:
        """Whether the best has the largest score."""
        return self.metric == "accuracy"

    def save(self, folder: Path, command: str) -> None:
        """Write comparison.csv, a line a method and seed, and comparison.json, what they come to."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.runs[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.runs)
        write_atomically(folder / "comparison.csv", text.getvalue().encode())
        write_json(folder / "comparison.json", {"command": command} | self._plain())

    def _plain(self) -> Record:
        facts = ("data", "metric", "rounds", "num_clients", "num_unseen_clients", "seeds")
        return {name: getattr(self, name) for name in facts} | {
            "methods": [
                {"method": row.method, "title": row.title}
                | {"figures": {name: spread._asdict() for name, spread in row.figures.items()}}
                | {"curve": [{"round": point.round} | point.spread._asdict() for point in row.curve]}
                for row in self.rows
            ],
            "oracle": {name: spread._asdict() for name, spread in self.oracle.items()} or None,
        }


def summarize(cells: Sequence[Cell]) -> Comparison:
    """Read what came out of the cells, which are all complete."""
    summaries = {(cell.method, cell.seed): _outcome(cell.folder) for cell in cells}
    histories = {(cell.method, cell.seed): cell.folder.metrics() for cell in cells}
    methods, seeds = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("method", "seed"))
    first = summaries[methods[0], seeds[0]]
    metric = "accuracy" if any(key.endswith("_accuracy") for key in first) else "mean_squared_error"
    names = [name.format(metric) for name in _SCORES]
    if not any(names[2] in summary for summary in summaries.values()):
        del names[2]
    names += ["test_loss", *_COSTS]
    rows = []
    for method in methods:
        found = [summaries[method, seed] for seed in seeds]
        figures = {name: Spread.of(summary.get(name) for summary in found) for name in names}
        curve = list(_curve([histories[method, seed] for seed in seeds], f"test_{metric}"))
        training = _training(next(cell.config for cell in cells if cell.method == method))
        rows.append(Row(method, _title(found[0]), figures, curve, training))
    sign = -1 if metric == "accuracy" else 1
    rows.sort(key=lambda row: _rank(row.figures[f"test_{metric}"].mean, sign))
    known = {f"test_{metric}": f"oracle_{metric}", "bottom_decile": "oracle_bottom_decile", "test_loss": "oracle_loss"}
    oracle = {
        name: Spread.of(summaries[methods[0], seed].get(key) for seed in seeds)
        for name, key in known.items()
        if key in first
    }
    columns = [*names, *(key for key in known.values() if key in first)]
    runs = [
        {"method": row.method, "seed": seed, "rounds": summaries[row.method, seed]["rounds"]}
        | {name: summaries[row.method, seed].get(name) for name in columns}
        for row in rows
        for seed in seeds
    ]
    sizes = (first["rounds"], first["num_clients"], first.get("num_unseen_clients", 0))
    return Comparison(_data_name(cells[0]), metric, *sizes, seeds, rows, oracle, runs)


def _outcome(folder: RunFolder) -> dict[str, Any]:
    summary = folder.summary()
    if summary is None:
        raise UserError(f"The run in {folder.path} is not complete.")
    return summary


def _data_name(cell: Cell) -> str:
    path = cell.config.values("data").get("path")
    return Path(path).name if path else cell.config.name("data")


def _training(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section in ("batching", "solver", "schedule")
        for key, value in config.sections[section].items()
    }


def _title(summary: Mapping[str, Any]) -> str:
    components = f" (M={summary['num_components']})" if summary["num_components"] > 1 else ""
    return title_of(summary["method"]) + components


def _rank(mean: float | None, sign: int) -> float:
    return math.inf if mean is None else sign * mean


def _curve(histories: Sequence[Sequence[Record]], name: str) -> Iterator[Point]:
    """Yield the points at which every seed was scored."""
    scores = [{line["round"]: line[name] for line in lines if line.get(name) is not None} for lines in histories]
    for number in scores[0]:
        if all(number in entry for entry in scores):
            yield Point(number, Spread.of(entry[number] for entry in scores))
