"""What a comparison runs: whose settings are whose, and what is refused before work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import TINY

import fedem
from fedem.studies.comparison import plan, resolve_methods, sort_settings


def test_settings_are_sorted_by_whose_they_are() -> None:
    texts = ["data.num_clients=6", "fedem:schedule.learning_rate=0.5", "hypcluster:method.num_clusters=2"]
    shared, own = sort_settings(texts, ["fedem", "ifca", "local"])
    assert shared == [{"data": {"num_clients": 6}}]
    assert own == {
        "fedem": [{"schedule": {"learning_rate": 0.5}}],
        "ifca": [{"method": {"num_clusters": 2}}],
        "local": [],
    }
    found = plan(Path("c"), ["fedem", "local"], [0], shared, own)
    assert [entry.config.schedule.learning_rate for entry in found] == [0.5, 0.1]
    assert all(entry.config.values("data")["num_clients"] == 6 for entry in found)
    alone = fedem.Config.build({"method": {"name": "local"}})
    assert set(found[1].config.differences(alone)) == {"data.num_clients"}
    assert sort_settings(["data.path=C:/x=y.csv"], ["local"])[0] == [{"data": {"path": "C:/x=y.csv"}}]


def test_methods_by_name() -> None:
    assert resolve_methods(["all"]) == list(fedem.METHODS)
    assert resolve_methods(["hypcluster", "local"]) == ["ifca", "local"]
    assert fedem.methods.resolve_method("hypcluster") == "ifca"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fedavg,nothing"], "Unknown method 'nothing'"),
        (["--methods", "fedavg,fedavg"], "The methods are fedavg, fedavg; allowed: all, or one or several, each once"),
        (["--methods", ""], "The methods are none"),
        (["--seeds", "0"], "--seeds is '0'; allowed: how many (from 1), or which, such as 0,4,7"),
        (["--seeds", "a"], "--seeds is 'a'"),
        (["--seeds", "1,-2"], "--seeds is '1,-2'"),
        (["--seeds", "4,4"], "The seeds are 4, 4; allowed: one or several, each once"),
        (["--data", "mnist"], "Unknown data 'mnist'"),
        (["--data", "none.csv"], "There is no file"),
        (["--rounds", "0"], "run.rounds is 0"),
        (["--unseen", "1"], "run.unseen is 1.0"),
        (["--set", "data.num_clients=0"], "data.num_clients is 0"),
        (["--set", "schedule.learning_rate=1"], "allowed: METHOD:schedule.key=value, such as fedem:schedule.learning"),
        (["--set", "ditto:method.pull=1"], "allowed before the colon: local, fedavg, fedem"),
        (["--set", "ditta:method.pull=1"], "Unknown method 'ditta'"),
        (["--set", "fedem:data.num_clients=3"], "data.num_clients is the same for all methods"),
        (["--set", "fedem:attack.name=noise"], "attack.name is the same for all methods"),
        (["--set", "fedem:run.unseen=0.5"], "run.unseen is the same for all methods"),
        (["--set", "fedem:method.pull=3"], "Unknown key in [method] 'pull'"),
        (["--set", "fedem:method.name=local"], "method.name is given by --methods"),
        (["--set", "run.seed=3"], "run.seed is given by --seeds"),
        (["--set", "nonsense"], "allowed: section.key=value"),
        ([*TINY, "--device", "tpu"], "Unknown device 'tpu'"),
        (["--resume"], "--resume needs the folder"),
        (["--resume", "--out", "nowhere"], "There is no comparison to resume in nowhere"),
        (["--out", "full"], "full is not empty; go on with --resume, or choose another folder"),
        (["--out", "full/file/c"], "can't be written"),
        (["--out", "run", "--resume"], "run holds a run, not a comparison"),
    ],
)
def test_bad_input_is_refused_before_work(run, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("compare", "--quiet", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_method_that_can_not_train_the_model_has_failed_if_others_can(run, tmp_path: Path) -> None:
    network = ["--seeds", "2", *TINY, "--set", "model.name=mlp", "--out", "c"]
    code, _, err = run("compare", "--methods", "mocha", *network)
    assert code == 2
    assert err.startswith("error: mocha, seed 0: Method mocha trains linear models alone;")
    assert not (tmp_path / "c").exists()
    code, out, err = run("compare", "--methods", "local,mocha", *network)
    assert code == 0
    assert err.startswith("note: mocha, seed 0 and 1 other run can't be trained: Method mocha trains linear models")
    assert "failed: can't be trained" in (tmp_path / "c/comparison.md").read_text()
    assert "MOCHA failed with seeds 0, 1: Method mocha trains linear models alone;" in " ".join(out.split())
    failed = json.loads((tmp_path / "c/mocha-seed1/failed.json").read_text())
    assert failed["message"].startswith("Method mocha trains linear models alone")
    page = tmp_path / "c.html"
    assert run("report", "c", "--out", page, "-q")[0] == 0
    assert "Failed, and so not ranked: MOCHA." in page.read_text()
    assert "<td>MOCHA</td><td>failed: can&#39;t be trained</td>" in page.read_text()


def test_other_settings_and_other_data_are_not_mixed_in(run, tmp_path: Path) -> None:
    def write(seed: int) -> None:
        rng = np.random.default_rng(seed)
        np.savez(tmp_path / "d.npz", x=rng.normal(size=(60, 3)), y=np.arange(60) % 2, client=np.arange(60) % 4)

    write(0)
    arguments = ["compare", "--data", "d.npz", "--methods", "local", "--seeds", "1", "--out", "c", "-q", "--rounds"]
    assert run(*arguments, "2")[0] == 0
    code, _, err = run(*arguments, "3", "--resume")
    assert code == 2
    assert "other settings (run.rounds)" in err
    write(1)
    code, _, err = run(*arguments, "2", "--resume")
    assert code == 2
    assert "The data are not those" in err
