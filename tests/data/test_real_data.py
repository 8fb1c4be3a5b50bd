"""Short trainings on the real data sets, where they are prepared in the folder that FEDEM_DATA names."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from fedem.core.errors import UserError
from fedem.data import PUBLIC
from fedem.data.dataset import Dataset
from fedem.runs.config import Config
from fedem.runs.result import Result
from fedem.runs.trainer import run

pytestmark = pytest.mark.slow

TINY: dict[str, dict[str, dict[str, Any]]] = {
    "emnist": {
        "partition": {"share": 0.004, "num_clients": 4},
        "batching": {"batch_size": 32},
        "schedule": {"learning_rate": 0.03},
    },
    "femnist": {
        "partition": {"share": 1.0, "max_clients": 4},
        "batching": {"batch_size": 32},
        "schedule": {"learning_rate": 0.03},
    },
    "cifar10": {
        "partition": {"share": 0.003, "num_clients": 3},
        "batching": {"batch_size": 32},
    },
    "cifar100": {
        "partition": {"num_clients": 3, "samples_per_client": 60},
        "batching": {"batch_size": 32},
    },
    "shakespeare": {
        "partition": {"share": 1.0, "max_clients": 3, "min_samples": 1000},
        "model": {"hidden": 32},
        "batching": {"batch_size": 64, "local_steps": 12},
        "schedule": {"learning_rate": 0.5},
    },
}
CLASSES = {"emnist": 62, "femnist": 62, "cifar10": 10, "cifar100": 100, "shakespeare": 80}


def _config(name: str, method: str = "fedem", rounds: int = 2) -> Config:
    asked = {"data": {"name": name}, "method": {"name": method}, **TINY[name]}
    return Config.build(asked, {"run": {"rounds": rounds, "device": "cpu", "evaluate_every": 1, "unseen": 0.25}})


def _made(name: str) -> Dataset:
    if not os.environ.get("FEDEM_DATA"):
        pytest.skip("FEDEM_DATA is not set")
    try:
        PUBLIC[name]().opened()
    except UserError as error:
        pytest.skip(str(error))
    return _config(name).make_data()


@pytest.fixture(scope="module")
def trained() -> dict[str, Result]:
    return {}


def _trained(name: str, trained: dict[str, Result]) -> Result:
    if name not in trained:
        trained[name] = run(_config(name), _made(name))
    return trained[name]


@pytest.mark.parametrize("name", TINY)
def test_fedem_learns(name: str, trained: dict[str, Result]) -> None:
    result = _trained(name, trained)
    losses = [line["train_loss"] for line in result.history]
    assert losses[-1] < losses[0]
    assert losses[-1] < math.log(CLASSES[name])  # below that of guessing
    assert result.summary["engine"] == "OneByOne"  # the faster one on a CPU
    assert 0 <= result.summary["test_accuracy"] <= 1
    if result.summary["num_unseen_clients"]:
        assert math.isfinite(result.summary["unseen_test_loss"])


@pytest.mark.parametrize("name", TINY)
def test_the_same_partition_comes_out_again(name: str) -> None:
    first, again = _made(name), _made(name)
    assert first.partition_hash == again.partition_hash != ""
    assert first.federation.fingerprint == again.federation.fingerprint
    other = _config(name).replace("run", seed=1).make_data()
    assert other.partition_hash != first.partition_hash


@pytest.mark.parametrize("name", TINY)
def test_samples_stay_small_and_in_their_file(name: str) -> None:
    federation = _made(name).federation
    pool = federation.train.pool
    assert pool.inputs.dtype == (torch.int8 if name == "shakespeare" else torch.uint8)
    # All parts are rows of one pool: nothing was copied.
    parts = (federation.train, federation.validation, federation.test)
    assert len({part.pool.inputs.data_ptr() for part in parts}) == 1
    rows = torch.cat([part.rows for part in parts])
    assert len(rows) == len(rows.unique()) <= len(pool.targets)
