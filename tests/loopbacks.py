"""Networks of Flower's programs on this machine, for tests: an app for them, and waiting for what they do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import patient

from fedem.deploy.flower import trial as loopback
from fedem.deploy.flower.project import write_app
from fedem.deploy.flower.trial import Program
from fedem.deploy.plan import Plan
from fedem.runs.checkpoints import MANIFEST
from fedem.runs.config import Config
from fedem.runs.folder import RunFolder

LIMIT = 300.0
"""Seconds after which a test gives up on an idle machine."""


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have programs of Flower start as slowly as this machine is."""
    wait_for = Program.wait_for

    def wait_longer(self: Program, text: str, seconds: float = loopback._STARTING) -> None:
        wait_for(self, text, patient(seconds))

    monkeypatch.setattr(Program, "wait_for", wait_longer)


def until(what: Callable[[], object], process: Program | None = None) -> None:
    """Wait for something to be true, and for no longer than the limit."""
    deadline = time.monotonic() + patient(LIMIT)
    while not what():
        if process is not None and process.process.poll() is not None and not what():
            raise process.failure("ended too early")
        assert time.monotonic() < deadline
        time.sleep(0.2)


def left_over(folder: Path) -> list[str]:
    """Return the processes that were started with this folder's settings of Flower and are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FLWR_HOME={folder.absolute() / 'flwr'}".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text())
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def checkpointed(folder: RunFolder) -> int:
    """Return the round of the last checkpoint; 0 before the first."""
    manifest = folder.checkpoints / MANIFEST
    return int(json.loads(manifest.read_text())["states"]["last"]["round"]) if manifest.exists() else 0


def prepare(folder: Path, rounds: int, **sections: dict[str, Any]) -> tuple[Config, Path]:
    """Make an app for the clients whose files are in folder/data."""
    config = Config.build(
        {
            "data": {"name": "file", "path": str(folder / "data")},
            "run": {"rounds": rounds, "evaluate_every": 0, "seed": 3},
            "method": {"name": "fedem", "num_components": 3},
        },
        sections,
    )
    return config, write_app(folder / "app", Plan.make(config, config.make_data()))
