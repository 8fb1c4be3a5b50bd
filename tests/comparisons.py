"""Two methods side by side on the command line, and what is left of them."""

from __future__ import annotations

import csv
from pathlib import Path

from commands import TINY

TWO = ["compare", "--methods", "local,fedavg", "--seeds", "2", *TINY, "--set", "run.checkpoint_every=1"]


def table_of(folder: Path) -> list[dict[str, str]]:
    """The lines of comparison.csv without what a clock says."""
    lines = csv.DictReader((folder / "comparison.csv").read_text().splitlines())
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]
