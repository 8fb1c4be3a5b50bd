"""A run of a few rounds on a few clients."""

from __future__ import annotations

from pathlib import Path

import fedem

SMALL = {"num_clients": 12, "dimension": 6, "num_test": 40, "num_validation": 20}


def small_config(**run: object) -> fedem.Config:
    return fedem.Config.build({"run": {"rounds": 6, "evaluate_every": 2, "checkpoint_every": 2} | run, "data": SMALL})


def small_run(out: Path | None, resume: bool = False, **run: object) -> fedem.Result:
    config = small_config(**run)
    return fedem.run(config, config.data.make(config.run.seed), out=out, resume=resume)
