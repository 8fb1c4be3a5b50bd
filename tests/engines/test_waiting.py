"""How threads wait for each other: said before torch is loaded, and only where nobody has said it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedem.core import WAITING

pytestmark = pytest.mark.processes
LOOK = "import os, fedem; print({name: os.environ.get(name) for name in fedem.WAITING})"


def _started(**said: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in WAITING}
    environment = kept | {"OMP_DISPLAY_ENV": "verbose"} | said
    return subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True)


def test_openmp_is_told_to_sleep_soon_before_it_is_loaded() -> None:
    done = _started()
    assert done.stdout.strip() == str(WAITING)
    if "GOMP_" in done.stderr:  # the GNU library says what it found when it was loaded
        assert f"GOMP_SPINCOUNT = '{WAITING['GOMP_SPINCOUNT']}'" in done.stderr
        assert "GOMP_SPINCOUNT = '300000'" not in done.stderr


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "7")])
def test_what_a_user_has_said_counts_alone(name: str, value: str) -> None:
    assert _started(**{name: value}).stdout.strip() == str(dict.fromkeys(WAITING) | {name: value})
