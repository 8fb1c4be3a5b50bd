"""How threads wait for each other: said before torch is loaded, and only where nobody has said it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


def _found(**said: str) -> subprocess.CompletedProcess[str]:
    """What the variable is after fedem was imported, and (standard error) what OpenMP read when it was loaded."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = kept | {"OMP_DISPLAY_ENV": "verbose"} | said
    look = "import os, fedem; print(os.environ['OMP_WAIT_POLICY'])"
    return subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True)


def test_threads_sleep_while_they_wait() -> None:
    done = _found()
    assert done.stdout.strip() == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in done.stderr or "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


def test_what_a_user_has_said_counts() -> None:
    assert _found(OMP_WAIT_POLICY="ACTIVE").stdout.strip() == "ACTIVE"
