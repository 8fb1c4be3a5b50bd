"""Runs that several processes share, and what each of them saw: ``python teamwork.py FOLDER`` is one such process."""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import make_federation

import fedem
from fedem.core.tree import Tree, tree_index
from fedem.engines.processes import joined, placed

SIZES = (7, 3, 12, 30, 5, 9, 4, 16)
NAMES = ("ann", "bob", "cem", "dan", "eve", "fay", "gus", "hal")
DOUBLE: dict[str, Any] = {"dtype": "float64"}
CASES: dict[str, dict[str, Any]] = {
    "fedem": DOUBLE,
    "fedem in single precision": {"method": "fedem", "dtype": "float32"},
    "fedem, some clients": DOUBLE | {"method": "fedem", "clients_per_round": 5, "unseen": 0.125},
    "fedem, one by one": DOUBLE | {"method": "fedem", "engine": "one_by_one", "clients_per_round": 3},
    "fedem, judged": DOUBLE
    | {"method": "fedem", "measure_alpha_every": 3, "diagnose_every": 1, "clients_per_round": 2},
    "fedem, rounded both ways": DOUBLE
    | {"method": "fedem", "compression": {"updates": "int8", "downloads": "int8"}, "clients_per_round": 5},
    "fedem, its server stepping": DOUBLE | {"method": "fedem", "server": "adam", "clients_per_round": 5},
    "fedem, stepping and rounded both ways": DOUBLE
    | {"method": "fedem", "server": "yogi", "compression": {"updates": "int8", "downloads": "int8"}},
    "fedem, some colluding": DOUBLE
    | {"method": "fedem", "attack": {"name": "little", "share": 3}, "clients_per_round": 6},
    "fedem, some lying, and rounded": DOUBLE
    | {"method": "fedem", "attack": {"name": "lie_size", "share": 1}, "compression": {"updates": "int8"}},
    "fedavg, some with a mark": DOUBLE | {"method": "fedavg", "attack": {"name": "backdoor", "share": 2}},
    "fedem, clipped": DOUBLE | {"method": "fedem", "defence": {"name": "clip", "tightest": 1.0, "loosest": 1.0}},
    "fedavg, by medians": DOUBLE
    | {"method": "fedavg", "defence": {"name": "median", "max_weight": 0.2}, "server": "adam", "clients_per_round": 5},
    "fedavg, none above the others": DOUBLE | {"method": "fedavg", "defence": {"name": "mean", "max_weight": 0.2}},
    "dfedem, clipped": DOUBLE
    | {"method": "dfedem", "graph": "ring", "defence": {"name": "clip", "tightest": 1.0, "loosest": 1.0}},
    "fedavg": DOUBLE | {"unseen": 0.375},
    "fedavg+": DOUBLE | {"method": "fedavg", "fine_tune_epochs": 1, "unseen": 0.375},
    "local": DOUBLE,
    "scaffold": DOUBLE | {"clients_per_round": 4},
    "ifca": DOUBLE,
    "afl": DOUBLE,
    "clustered": DOUBLE | {"mean_tolerance": 100.0, "member_tolerance": 0.0},
    "dfedem": DOUBLE | {"graph": "ring"},
}
ROUNDS = 3
QUICK: dict[str, Any] = {"checkpoint_every": 1, "clients_per_round": 5}


class StoppedError(Exception):
    """What a listener may raise."""


def train(case: str, **more: Any) -> fedem.Result:
    options = {"method": case} | CASES[case] | {"rounds": ROUNDS, "learning_rate": 0.3, "batch_size": 4} | more
    return fedem.train(make_federation(sizes=SIZES, names=NAMES), **options)


def watch(record: dict[str, Any]) -> None:
    """Break off a run."""
    if record["round"] == 2:
        raise StoppedError("a listener's own error")


def outcome_of(call: Callable[[], object]) -> tuple[str, float]:
    """Say what a process raised, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "nothing", time.monotonic() - started


def exchange() -> Tree:
    """Put together rows of numbers of many kinds, each process having every other one."""
    with joined() as team:
        own = torch.arange(team.rank, 5, team.size)
        rows = {
            "log_weights": torch.tensor([-math.inf, -1.0, -2.0, -math.inf, 0.0])[own, None],
            "doubles": (torch.arange(5, dtype=torch.float64) / 3)[own],
            "counts": torch.tensor([-5, 4, -3, 2, -1])[own],
            "bytes": torch.tensor([0, 255, 1, 2, 3], dtype=torch.uint8)[own],
            "flags": torch.tensor([True, False, False, True, True])[own],
        }
        pieces = [(own[some], tree_index(rows, some)) for some in (slice(0, 1), slice(1, None))]
        return team.total(placed(pieces, 5))[0]


def main(folder: Path) -> None:
    with joined() as team:
        rank = team.rank
    seen: dict[str, Any] = {"results": {}, "exchanged": exchange()}
    for case in CASES:
        result = train(case)
        seen["results"][case] = (result.states, result.summary, result.clients, result.history)
    quick: dict[str, Any] = QUICK | {"out": folder / "run"}
    seen["stopped"] = outcome_of(lambda: train("fedem", listener=watch, **quick))
    told: list[int] = []
    resumed = train("fedem", resume=True, listener=lambda record: told.append(record["round"]), **quick)
    seen["resumed"], seen["told"] = resumed.states, told
    seen["taken up"] = train("fedem", resume=True, **QUICK, out=folder / "begun").states
    seen["cohort"] = outcome_of(lambda: train("fedem", clients_per_round=0.1))
    seen["seeds"] = outcome_of(lambda: train("fedem", seed=rank))
    seen["taken"] = outcome_of(lambda: train("fedem", **quick))
    (folder / f"seen-{rank}.pickle").write_bytes(pickle.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
