"""How long tests wait for other programs: the longer, the slower or the busier this machine is."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache

_USUAL = 1.5
"""Seconds in which an idle machine of today starts Python and imports torch."""


@cache
def slowness() -> float:
    """How many times longer than usual a program takes to start here and now; at least 1."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (time.monotonic() - started) / _USUAL)


def patient(seconds: float) -> float:
    """Return how long to wait for what an idle machine has done within ``seconds`` by far."""
    return seconds * slowness()
