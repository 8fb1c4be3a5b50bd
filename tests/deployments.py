"""Small deployments that several test files use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shops

from fedem.data.dataset import Dataset
from fedem.deploy.plan import Plan
from fedem.runs.config import Config
from fedem.runs.trainer import Trainer

NAMES = ("shop A", "Shop a", "shop B")
"""of clients; two would share a file where capitals count for nothing"""


def write_sample(folder: Path, names: tuple[str, ...] = NAMES, rows: int = 20) -> Path:
    return shops.write_shops(folder / "shops.csv", shops.make_shops(rows, names=names))


def configure(sample: Path, **sections: dict[str, Any]) -> tuple[Config, Dataset]:
    """Return a short run over the sample, and its data."""
    data = {"name": "file", "path": str(sample), "target_column": "sold", "client_column": "shop"}
    run = {"rounds": 3, "device": "cpu"} | sections.pop("run", {})
    batching = {"batch_size": 8} | sections.pop("batching", {})
    config = Config.build({"data": data, "run": run, "batching": batching}, sections)
    return config, config.make_data()


def make_plan(sample: Path, **sections: dict[str, Any]) -> tuple[Plan, Trainer]:
    """Return a plan, and the same run as the simulator has it."""
    config, dataset = configure(sample, **sections)
    return Plan.make(config, dataset), Trainer.prepare(config, dataset)


def run_config(folder: Path, **values: Any) -> dict[str, Any]:
    """Return a run's configuration as Flower hands it over; whatever is written goes below ``folder``."""
    return {"experiment": "trial", "folder": str(folder / "server"), "min-clients": 1, "wait": 1.0} | values
