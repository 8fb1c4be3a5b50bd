"""Runs as they are kept, made up: the configuration, the summary and the clients' scores, without any training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedem.studies.experiments import Experiment, plan, read
from fedem.studies.sweep import Entry

MADE_UP = """
title = "Made up"
place = "Table 9"
figures = ["test_accuracy", "bottom_decile"]

[settings]
"data.name" = "synthetic"
"run.rounds" = 2

[axes.data]
Here = { "data.num_clients" = 4 }
There = { "data.num_clients" = 5 }

[axes.method]
Local = { "method.name" = "local" }
FedAvg = { "method.name" = "fedavg" }
FedEM = { "method.name" = "fedem" }

[paper]
"Here / FedAvg" = [60.0, 50.0]
"Here / FedEM" = [70.0, ""]
"There / FedEM" = [70.0, 60.0]
"""


def declare_made_up(place: Path, notes: str = "", name: str = "made-up") -> Experiment:
    (place / name).mkdir(parents=True, exist_ok=True)
    (place / name / "experiment.toml").write_text(MADE_UP)
    if notes:
        (place / name / "notes.toml").write_text(notes)
    return read(place / name)


def keep(
    experiment: Experiment,
    out: Path,
    data: str,
    method: str,
    scores: Sequence[float],
    seed: int = 0,
    weights: Sequence[int] = (),
    partition_hash: str = "",
    **settings: Any,
) -> Entry:
    """Keep a run whose clients have these scores; ``settings`` such as run_rounds are other than declared."""
    layers = [{name.partition("_")[0]: {name.partition("_")[2]: value}} for name, value in settings.items()]
    (entry,) = plan(experiment, out, [seed], {"data": [data], "method": [method]}, layers)
    numbers = list(weights) or [10] * len(scores)
    mean = float(np.average(scores, weights=numbers))
    head = {"method": entry.config.name("method"), "data": "synthetic", "rounds": 2, "seed": seed, "device": "cpu"}
    figures = {"num_clients": len(scores), "num_components": 1, "test_accuracy": mean, "test_loss": 0.5}
    costs = {"seconds_per_round": 0.25, "bytes_up_per_round": 2_000_000, "bytes_down_per_round": 3_500_000}
    rows = [
        {"client": str(t), "role": "train", "train_samples": number, "test_samples": 5, "test_accuracy": score}
        for t, (number, score) in enumerate(zip(numbers, scores, strict=True))
    ]
    with entry.folder.created(entry.config.replace("run", partition_hash=partition_hash)):
        entry.folder.finish(head | figures | {"bottom_decile": min(scores)} | costs, rows)
    return entry
