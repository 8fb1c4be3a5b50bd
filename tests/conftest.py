"""Settings for the whole suite."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from fedem import cli

# The same examples on every machine, and no limit on the time of one: the first use of torch alone takes a second.
for _profile, _examples in {"few": 15, "many": 50}.items():
    settings.register_profile(_profile, deadline=None, derandomize=True, max_examples=_examples)
# Few in the fast lane; `make test-all` asks for many.
settings.load_profile(os.environ.get("FEDEM_EXAMPLES", "few"))

# It adds a method to the table when it is imported, which looking for doctests in it would do for all tests.
collect_ignore = ["methods/outside_method.py"]

# Tensors as small as the tests' only wait for further threads.
torch.set_num_threads(1)
# What is imported stays, and little else makes circles: looking for them every few hundred objects costs a tenth.
gc.freeze()
gc.set_threshold(100_000, 50, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many as there are cores, and one more where networks are tried: those tests mostly wait."""
    is_fast_lane = config.option.markexpr.startswith("not")
    return (os.cpu_count() or 1) + (0 if is_fast_lane else 1)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Call ``fedem ...`` in this process, in an empty folder; returns (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedem", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
