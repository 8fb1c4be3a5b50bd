"""Folders for ``flwr run``: complete, accepted by Flower, and no samples in them."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import deployments
import pytest

import fedem
from fedem.core.errors import UserError
from fedem.deploy.flower.project import write_app
from fedem.deploy.plan import Plan, RunConfig
from fedem.methods.wrappers.defences import Clip, Median

Run = Callable[..., tuple[int, str, str]]
COLUMNS = ("--target-column", "sold", "--client-column", "shop")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of a package that Flower calls
def test_init_writes_what_flower_takes(tmp_path: Path, run: Run) -> None:
    config = pytest.importorskip("flwr.common.config")
    from flwr.cli.build import build_fab_from_disk

    sample = deployments.write_sample(tmp_path)
    code, said, _ = run("deploy", "init", "Our Shops", "--data", sample, *COLUMNS, "--set", "run.rounds=7")
    assert (code, said.strip()) == (0, "App folder: Our Shops")
    app = tmp_path / "Our Shops"
    found = config.get_project_config(app)
    assert config.validate_config(found, project_dir=app) == (True, [], [])
    assert found["project"]["dependencies"] == []
    values = RunConfig.read(found["tool"]["flwr"]["app"]["config"])
    assert (values.experiment, values.rounds, values.continued) == ("our-shops", 0, False)
    assert Plan.load(app / "plan").config.run.rounds == 7
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        names = set(bundle.namelist())
        content = b"".join(bundle.read(name) for name in names)
    assert {"app.py", "plan/config.toml", "plan/plan.json", "pyproject.toml"} <= names
    assert not any(name.encode() in content for name in (*deployments.NAMES, str(tmp_path)))


def test_the_app_that_is_written_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from flower_grid import LocalGrid, equal, node_configs, simulated
    from flwr.app import Context, RecordDict

    from fedem.runs.result import Result

    sample = deployments.write_sample(tmp_path)
    plan, trainer = deployments.make_plan(sample, run={"dtype": "float64"})
    monkeypatch.syspath_prepend(write_app(tmp_path / "app", plan))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    app = import_module("app")
    settings = deployments.run_config(tmp_path)
    grid = LocalGrid(app.client, node_configs(tmp_path, sample, trainer.federation.names), settings)
    app.server(grid, Context(1, 1, {}, RecordDict(), settings))
    equal(Result.load(tmp_path / "server" / "trial").state().shared, simulated(trainer).shared)
    monkeypatch.delitem(sys.modules, "app")


def test_a_run_configuration_is_taken_over(tmp_path: Path, run: Run) -> None:
    sample = deployments.write_sample(tmp_path)
    config, _ = deployments.configure(sample, method={"name": "fedprox"})
    (tmp_path / "run.toml").write_text(config.to_toml())
    assert run("deploy", "init", "app", "--config", "run.toml", "--rounds", "9", "--quiet")[0] == 0
    plan = Plan.load(tmp_path / "app" / "plan")
    assert (plan.config.name("method"), plan.config.run.rounds) == ("fedprox", 9)


def test_what_init_refuses(tmp_path: Path, run: Run) -> None:
    sample = deployments.write_sample(tmp_path)
    code, _, told = run("deploy", "init", "app", "--data", sample, *COLUMNS, "--method", "local")
    assert (code, "Method local needs Alone" in told) == (2, True)
    assert not (tmp_path / "app").exists()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "notes.txt").touch()
    code, _, told = run("deploy", "init", "app", "--data", sample, *COLUMNS)
    assert (code, "app is there already" in told) == (2, True)


@pytest.mark.parametrize(("folder", "name"), [("2024 Trial!", "app-2024-trial"), ("___", "federation")])
def test_any_folder_gets_a_name_that_flower_takes(tmp_path: Path, folder: str, name: str) -> None:
    plan, _ = deployments.make_plan(deployments.write_sample(tmp_path))
    write_app(tmp_path / folder, plan)
    assert f'name = "{name}"' in (tmp_path / folder / "pyproject.toml").read_text()
    with pytest.raises(UserError, match="is there already"):
        write_app(tmp_path / folder, plan)


def test_uploads_are_clipped_unless_something_else_is_said(tmp_path: Path, run: Run) -> None:
    sample = deployments.write_sample(tmp_path)
    data = ["--data", str(sample), "--target-column", "sold", "--client-column", "shop", "--quiet"]
    config, dataset = deployments.configure(sample)
    trained = tmp_path / "trained"
    fedem.run(config.replace("run", rounds=1), dataset, out=trained)
    mine = tmp_path / "mine.toml"
    mine.write_text('[defence]\nname = "none"\n')
    cases: list[tuple[list[str], Any]] = [
        ([*data], Clip()),
        ([*data, "--set", "defence.max_weight=0.5"], Clip(max_weight=0.5)),
        ([*data, "--set", "defence.name=median"], Median()),
        ([*data, "--set", "defence.name=none"], None),
        ([*data, "--config", str(mine)], None),
        ([*data, "--config", str(trained / "config.toml")], Clip()),  # its "none" is what every run writes
        ([*data, "--method", "scaffold"], None),
    ]
    for number, (words, expected) in enumerate(cases):
        folder = tmp_path / f"app{number}"
        code, _, err = run("deploy", "init", str(folder), *words)
        assert code == 0, err
        assert Plan.load(folder / "plan").config.defence == expected, words
