"""Small complete runs that reports are made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedem
from fedem.report.pictures import FIGURES
from fedem.report.pictures.canvas import Picture, paint
from fedem.report.runs import Gathered, gather
from fedem.runs.config import Layer

METHODS = ("fedem", "fedavg", "local")
SEEDS = (0, 1)
TINY = {"num_clients": 14, "dimension": 5, "num_test": 30, "num_validation": 10, "min_samples": 12, "max_samples": 40}


def trained(
    out: Path,
    method: str,
    seed: int,
    data: dict[str, object] | None = None,
    sections: Layer | None = None,
    **run: object,
) -> fedem.Result:
    """Train a tiny synthetic federation into a folder."""
    settings = {"rounds": 4, "evaluate_every": 2, "seed": seed, "diagnose_every": 2 if method == "fedem" else 0}
    config = fedem.Config.build(
        {"method": {"name": method}, "data": TINY | (data or {}), "run": settings | {"unseen": 0.2} | run},
        sections or {},
    )
    return fedem.run(config, config.make_data(), out=out)


def compared(folder: Path) -> Path:
    """Train three methods with two seeds, as a comparison lays them out."""
    for seed in SEEDS:
        for method in METHODS:
            trained(folder / f"{method}-seed{seed}", method, seed)
    return folder


def regressed(folder: Path, test: float = 0.4) -> Path:
    """Train two methods on lines of several slopes, passed from Python; FedAvg is a baseline of the other."""
    generator = np.random.default_rng(0)
    clients = []
    for slope in range(11):
        inputs = generator.normal(size=(20 + slope, 2))
        clients.append((inputs, inputs[:, 0] * slope + 0.1 * generator.normal(size=len(inputs))))
    federation = fedem.Federation.from_clients(clients, test=test)
    for method, place in (("fedem", folder), ("fedavg", folder / "baselines/fedavg")):
        fedem.train(federation, method, out=place, rounds=2, learning_rate=0.05, loss="squared_error")
    return folder


def gathered(*paths: Path) -> Gathered:
    """Gather runs that are all on the same data."""
    (data,) = gather(paths)
    return data


def drawn(name: str, data: Gathered) -> Picture:
    """Draw a figure that applies."""
    picture = paint(FIGURES[name].painter, data)
    assert picture is not None
    return picture
