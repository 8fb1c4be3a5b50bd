"""Flower's own simulation engine runs the app that ``fedem deploy init`` writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deployments
import pytest
import torch
from patience import patient

from fedem.deploy.flower.project import write_app
from fedem.runs.result import Result

pytest.importorskip("ray", reason="Flower's simulation engine is not installed")

from fedem.deploy.flower.guard import Guard
from fedem.deploy.flower.trial import HOST, QUIET_FLOWER, Program, free_port

pytestmark = pytest.mark.network
SECONDS = 240


@pytest.fixture
def superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """A SuperLink that simulates its nodes; Flower would leave one of its own behind."""
    for key, value in {**QUIET_FLOWER, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    home, port = tmp_path / "flower", free_port()
    home.mkdir()
    monkeypatch.setenv("FLWR_HOME", str(home))
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{HOST}:{port}"\ninsecure = true\n'
        "options.num-supernodes = 3\noptions.backend.client-resources.num-cpus = 1\n"
    )
    command = ["flower-superlink", "--insecure", "--simulation", "--host", HOST, "--port", str(port)]
    command += ["--control-api-address", f"{HOST}:{free_port()}"]
    with Guard() as guard:
        program = Program("The SuperLink", command, tmp_path / "superlink.log", os.environ, guard)
        yield program
        program.end()


def test_the_simulation_engine_computes_what_ours_does(tmp_path: Path, superlink: Program) -> None:
    sample = deployments.write_sample(tmp_path)
    plan, trainer = deployments.make_plan(sample)
    app = write_app(tmp_path / "app", plan)
    superlink.wait_for("running", patient(60))
    paths = f"data='{sample}' state='{tmp_path / 'state'}' folder='{tmp_path / 'server'}' min-clients=3"
    done = subprocess.run(
        ["flwr", "run", str(app), "here", "--stream", "--run-config", paths],
        capture_output=True,
        text=True,
        timeout=patient(SECONDS),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    state = trainer.training.init()
    for _ in range(trainer.config.run.rounds):
        state, _ = trainer.training.step(state)
    found = Result.load(tmp_path / "server" / "app").state()
    assert found.round == state.round
    for name, leaf in state.shared.items():
        torch.testing.assert_close(found.shared[name], leaf, rtol=1e-5, atol=1e-6)
    assert len(list((tmp_path / "state").rglob("*.safetensors"))) == 3
