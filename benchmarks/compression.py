"""``python -m benchmarks.compression``: what smaller messages cost in accuracy, FedEM on the paper's synthetic mixture.

Runs are folders; those that are done are read and not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

import fedem
from fedem.runs.config import Config

_BOTH = {"updates": "int8", "downloads": "int8"}
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "bfloat16 up": {"updates": "bfloat16"},
    "bfloat16 both ways": {"updates": "bfloat16", "downloads": "bfloat16"},
    "int8 up": {"updates": "int8"},
    "int8 both ways": _BOTH,
    **{f"... above {threshold}": _BOTH | {"threshold": threshold} for threshold in (0.001, 0.01, 0.05, 0.1, 0.2)},
}
SMALL: dict[str, Any] = {"num_clients": 6, "dimension": 6, "num_test": 20, "num_validation": 0}


class Point(NamedTuple):
    """One setting over all seeds."""

    accuracies: tuple[float, ...]
    """test accuracy of each seed, in points"""
    sent: tuple[float, ...]
    """bytes up and down a round, of each seed, by those of the same seed with the compression off"""
    bytes_up: float
    bytes_down: float

    def change(self, reference: Point) -> list[float]:
        """Return the points of accuracy gained, seed by seed."""
        return [after - before for before, after in zip(reference.accuracies, self.accuracies, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all settings, print a table and draw a picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/compression"), help="where the runs are")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny data; its figures mean nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw it here")
    options = parser.parse_args(arguments)
    points = measure(options.folder, range(options.seeds), options.quick)
    _print(Console(highlight=False), points)
    if options.picture:
        draw(points, options.picture)


def measure(folder: Path, seeds: Sequence[int], quick: bool) -> dict[str, Point]:
    """Train every setting with every seed."""
    found: dict[str, list[Mapping[str, Any]]] = {title: [] for title in SETTINGS}
    for seed in seeds:
        runs = [(_path(folder, settings, seed), _config(settings, seed, quick)) for settings in SETTINGS.values()]
        waiting = [(out, config) for out, config in runs if not (out / "summary.json").exists()]
        if waiting:
            # The settings of a seed share its data.
            dataset = waiting[0][1].make_data()
            for out, config in waiting:
                out.parent.mkdir(parents=True, exist_ok=True)
                fedem.run(config, dataset, out=out, resume=out.exists())
        for title, (out, _) in zip(SETTINGS, runs, strict=True):
            found[title].append(json.loads((out / "summary.json").read_text(encoding="utf-8")))
    whole = [_traffic(summary) for summary in found["off"]]
    return {
        title: Point(
            tuple(100 * summary["test_accuracy"] for summary in summaries),
            tuple(_traffic(summary) / off for summary, off in zip(summaries, whole, strict=True)),
            statistics.mean(summary["bytes_up_per_round"] for summary in summaries),
            statistics.mean(summary["bytes_down_per_round"] for summary in summaries),
        )
        for title, summaries in found.items()
    }


def _path(folder: Path, settings: Mapping[str, Any], seed: int) -> Path:
    values = [f"{key}-{value}" for key, value in settings.items()]
    return folder / "-".join([*(values or ["off"]), f"seed-{seed}"])


def _config(settings: Mapping[str, Any], seed: int, quick: bool) -> Config:
    run = {"seed": seed, "evaluate_every": 0, "checkpoint_every": 100, "device": "cpu"} | (
        {"rounds": 3} if quick else {}
    )
    return Config.build({"run": run, "data": SMALL if quick else {}, "compression": settings})


def _traffic(summary: Mapping[str, Any]) -> int:
    return int(summary["bytes_up_per_round"] + summary["bytes_down_per_round"])


def _print(console: Console, points: Mapping[str, Point]) -> None:
    table = Table(box=box.ASCII2)
    for title in ("", "test accuracy", "change, points", "kB up a round", "kB down", "times fewer bytes"):
        table.add_column(title, justify="right" if title else "left")
    reference = points["off"]
    for title, point in points.items():
        change = point.change(reference)
        table.add_row(
            title,
            f"{statistics.mean(point.accuracies):.2f}",
            f"{statistics.mean(change):+z.2f} ({min(change):+z.2f} to {max(change):+z.2f})",
            f"{point.bytes_up / 1000:,.1f}",
            f"{point.bytes_down / 1000:,.1f}",
            f"{1 / statistics.mean(point.sent):.2f}",
        )
    console.print(table)


def draw(points: Mapping[str, Point], path: Path) -> None:
    """Draw the change of accuracy against bytes saved."""
    from fedem.report.pictures.canvas import COLOURS, Picture, alone, inked, legend, panels

    with inked():
        figure, (axes,) = panels(1, height=3.4)
        axes.axhline(0, linewidth=0.8, color="grey")
        labels = {False: "rounding alone", True: "int8 both ways, components above a weight"}
        for title, point in list(points.items())[1:]:
            change, saved, few = point.change(points["off"]), 1 / statistics.mean(point.sent), title.startswith("...")
            axes.plot([saved, saved], [min(change), max(change)], color=COLOURS[few], linewidth=1.2)
            axes.plot(
                saved, statistics.mean(change), "o", color=COLOURS[few], markersize=5, label=labels.pop(few, None)
            )
            name = title.removeprefix("... ")
            axes.annotate(name, (saved, max(change)), (0, 6), textcoords="offset points", fontsize=7, rotation=75)
        low, high = axes.get_ylim()
        axes.set_ylim(min(-0.1, low), max(0.2, high + 0.1))
        axes.set_xlabel("times fewer bytes, up and down together")
        axes.set_ylabel("change of test accuracy, points")
        legend(figure, axes)
    picture = Picture("What smaller messages cost", "The change of accuracy against bytes saved.", figure)
    path.write_bytes(alone(picture, path.suffix.removeprefix(".")))


if __name__ == "__main__":
    main()
