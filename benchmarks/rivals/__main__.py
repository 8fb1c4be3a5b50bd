"""``python -m benchmarks.rivals``: FedAvg with fedem beside rival libraries, the same work in one run.

All sides have the same samples, first parameters, cohorts and local steps, and the same number of threads; each runs in
a process of its own, and they take turns. Batches are drawn in other orders, so what is compared is the training loss
after the last round, on the same samples for all. A rival's environment is built when it is first asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from benchmarks.measure import Disturbance, environment, show_disturbance
from benchmarks.rivals.environments import ROOT, UnavailableError, python_of
from benchmarks.rivals.fedem import SEED
from benchmarks.rivals.jobs import Job, make_job
from fedem.core.random import COHORT, choose, client_keys
from fedem.data.synthetic import Synthetic

RIVALS = ("pfl", "flwr", "fluke")
OURS = "fedem"
TITLES = {
    OURS: "fedem",
    "plain": "plain torch loop (pfl's inner loop)",
    "pfl": "pfl",
    "flwr": "Flower",
    "fluke": "fluke",
}
TOLERANCE = 0.2
"""of what fedem learnt, the fall of its loss: how far from its loss another side's may be after the last round"""
_LOOK_EVERY = 0.2  # seconds


class DisagreementError(RuntimeError):
    """Two sides did not learn the same, so comparing their speed means nothing."""


class Plan(NamedTuple):
    """Sizes of a run."""

    turns: int
    clients: tuple[int, int, int]
    """of the three jobs"""
    cohort: int
    rounds: tuple[int, int, int]
    """of each job; all but the last few of the first two don't count: fedem makes recordings on the way"""
    timed: tuple[int, int, int]
    samples: int
    side: int
    """pixels of an image's side"""


FULL = Plan(3, (300, 300, 1_000), 50, (24, 24, 3), (6, 6, 2), 50, 32)
QUICK = Plan(1, (6, 6, 6), 3, (2, 2, 2), (1, 1, 1), 10, 8)


def make_jobs(plan: Plan) -> dict[str, Job]:
    """Make the synthetic mixture with a linear model, classes around random centres with an MLP, and pfl's CIFAR-10.

    The images are random, too: each class has a random picture, under as much noise. Speed does not depend on them.
    """
    rng = np.random.default_rng(SEED)
    settings: list[dict[str, Any]] = [
        {"cohorts": _cohorts(count, plan.cohort, rounds), "warm_up": rounds - timed}
        for count, rounds, timed in zip(plan.clients, plan.rounds, plan.timed, strict=True)
    ]
    mixture = Synthetic(num_clients=plan.clients[0], num_validation=0, num_test=0).make(SEED).federation.train
    sizes = [[plan.samples] * count for count in plan.clients[1:]]
    labels = [torch.from_numpy(rng.integers(0, 10, sum(own))) for own in sizes]
    centres = rng.standard_normal((10, 64), dtype=np.float32)
    vectors = centres[labels[0]] + 2 * rng.standard_normal((len(labels[0]), 64), dtype=np.float32)
    shape = (3, plan.side, plan.side)
    pictures = rng.integers(0, 128, (10, *shape), dtype=np.uint8)
    images = pictures[labels[1]] + rng.integers(0, 128, (len(labels[1]), *shape), dtype=np.uint8)
    return {
        "linear": make_job(
            "linear",
            mixture.inputs,
            mixture.targets,
            mixture.sizes.tolist(),
            **settings[0],
            batch_size=128,
            learning_rate=0.1,
        ),
        "mlp": make_job(
            "mlp", torch.from_numpy(vectors), labels[0], sizes[0], **settings[1], batch_size=10, learning_rate=0.1
        ),
        "cnn": make_job(
            "cnn", torch.from_numpy(images), labels[1], sizes[1], **settings[2], batch_size=10, learning_rate=0.1
        ),
    }


def _cohorts(num_clients: int, size: int, rounds: int) -> list[list[int]]:
    """Draw the cohorts as fedem does, which can't be told otherwise."""
    keys = client_keys([str(position) for position in range(num_clients)])
    return [choose(keys, size, COHORT, SEED, index).tolist() for index in range(rounds)]


def find_sides(rivals: Sequence[str], device: str, console: Console) -> dict[str, Path]:
    """Return each side's interpreter; a rival that can't be had is named and left out.

    On a GPU only what is importable here takes part: the environments have torch for a CPU.
    """
    sides = {OURS: Path(sys.executable), "plain": Path(sys.executable)}
    for rival in rivals:
        if device != "cpu":
            if find_spec(rival):
                sides[rival] = Path(sys.executable)
            else:
                console.print(f"{TITLES[rival]} is left out: it can't be imported here.")
            continue
        try:
            sides[rival] = python_of(rival)
        except UnavailableError as error:
            console.print(f"{TITLES[rival]} is left out, it can't be installed here: {error}", soft_wrap=True)
    return sides


def run_side(side: str, python: Path, job: Path, device: str, threads: int) -> dict[str, Any]:
    """Do a job in a process of its own; returns its figures, with the most memory that it and its children had."""
    unset = {"PYTHONPATH", "OMP_WAIT_POLICY"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    # What a side's children import is here; only fedem's own side needs more, where it is not installed.
    paths = [str(ROOT), *([str(ROOT / "src")] if side == OURS else [])]
    kept |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "figures.json", Path(folder) / "log.txt"
        command = [str(python), "-m", f"benchmarks.rivals.{side}", str(job), device, str(out)]
        with log.open("w") as lines:
            process = subprocess.Popen(command, cwd=folder, env=kept, stdout=lines, stderr=lines)
            peak = 0
            while process.poll() is None:
                peak = max(peak, _resident(process.pid))
                time.sleep(_LOOK_EVERY)
        if process.returncode:
            raise RuntimeError(f"{TITLES[side]} failed:\n{log.read_text()[-3000:]}")
        return json.loads(out.read_text()) | {"peak_bytes": peak}


def _resident(pid: int) -> int:
    """Return the resident memory of a process and all below it; 0 where the system does not tell (only Linux does)."""
    parents, pages = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may have spaces
        except OSError:  # it has ended meanwhile
            continue
        parents[int(path.parent.name)], pages[int(path.parent.name)] = int(fields[1]), int(fields[21])
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(pages.get(member, 0) for member in family) * os.sysconf("SC_PAGE_SIZE")


def run_all(plan: Plan, rivals: Sequence[str], device: str, threads: int, console: Console) -> dict[str, Any]:
    """Let the sides take turns at each job, check that they learn the same, and print a table."""
    figures: dict[str, Any] = {"environment": environment() | {"threads": threads, "cores": os.cpu_count()}, "jobs": {}}
    sides, disturbance = find_sides(rivals, device, console), Disturbance()
    with tempfile.TemporaryDirectory() as folder:
        for name, job in make_jobs(plan).items():
            path = Path(folder) / f"{name}.npz"
            job.save(path)
            turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for _ in range(plan.turns):
                for side, python in sides.items():
                    turns[side].append(run_side(side, python, path, device, threads))
            figures["jobs"][name] = {side: _summary(found) for side, found in turns.items()}
            check_agreement(name, figures["jobs"][name])
            path.unlink()
    figures["cores_busy_with_others"] = disturbance.cores()
    return figures


def _summary(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    medians = [statistics.median(turn["seconds"]) for turn in turns]
    return {
        "seconds": statistics.median(medians),
        "turns": medians,
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        "loss": statistics.median(turn["loss"] for turn in turns),
        "loss_before": turns[0]["loss_before"],
    }


def check_agreement(name: str, sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse losses that are farther from fedem's than the tolerance."""
    ours = sides[OURS]["loss"]
    learnt = sides[OURS]["loss_before"] - ours
    for side, row in sides.items():
        # Written so that NaN does not pass, nor anything where nothing was learnt.
        if not abs(row["loss"] - ours) <= TOLERANCE * learnt:
            raise DisagreementError(
                f"Job {name}: {TITLES[side]} has loss {row['loss']:.4f} and fedem {ours:.4f}; allowed: a difference of "
                f"{TOLERANCE:g} of what fedem learnt, {learnt:.4f}."
            )


def table(figures: Mapping[str, Any]) -> str:
    """Return all figures as a table in Markdown."""
    lines = [
        "| job | side | seconds a round | ratio to fedem | memory, MiB | loss |",
        "| --- | --- " + "| ---: " * 4 + "|",
    ]
    for name, sides in figures["jobs"].items():
        for side, row in sides.items():
            cells = f"{row['seconds']:.3f} | {row['seconds'] / sides[OURS]['seconds']:.2f}"
            memory = f"{row['peak_bytes'] / (1 << 20):,.0f}"
            lines.append(f"| {name} | {TITLES[side]} | {cells} | {memory} | {row['loss']:.4f} |")
    return "\n".join(lines)


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the seconds a round of each side, one panel for each job."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 2.8), layout="constrained")
    for axes, (name, sides) in zip(picture.subplots(1, len(figures["jobs"])), figures["jobs"].items(), strict=True):
        seconds = [row["seconds"] for row in sides.values()]
        bars = axes.barh([TITLES[side].partition(" (")[0] for side in sides], seconds)
        bars[0].set_color("tab:orange")
        axes.bar_label(bars, [f" {value:.2g}" for value in seconds])
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(title=name, xlabel="seconds a round")
    picture.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print and, if asked, write the figures and a picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--rivals", default=",".join(RIVALS), help="only these, separated by commas; may be empty")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each side")
    parser.add_argument("--turns", type=int, help="how often each side does each job")
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny data; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the seconds a round")
    options = parser.parse_args(arguments)
    rivals = [name for name in options.rivals.split(",") if name]
    if unknown := set(rivals) - set(RIVALS):
        parser.error(f"unknown rivals: {', '.join(sorted(unknown))}; allowed: {', '.join(RIVALS)}")
    plan = QUICK if options.quick else FULL
    console = Console(highlight=False)
    figures = run_all(
        plan._replace(turns=options.turns or plan.turns), rivals, options.device, options.threads, console
    )
    console.print("{cpu}, {cores} cores, {threads} threads, torch {torch}".format(**figures["environment"]))
    print(table(figures))
    show_disturbance(console, figures["cores_busy_with_others"])
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    if options.picture:
        draw(figures, options.picture)


if __name__ == "__main__":
    main()
