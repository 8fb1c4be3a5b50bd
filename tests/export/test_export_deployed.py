"""What a deployed client or a peer keeps becomes an exported model, on any machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import small_run

import fedem
from fedem.core.tree import tree_index
from fedem.deploy.kept import Kept, kept_path
from fedem.deploy.plan import Plan
from fedem.export import load_exported
from fedem.runs.evaluate import predict

Run = Callable[..., tuple[int, str, str]]


def keep(result: fedem.Result, path: Path, **settings: str | int) -> Path:
    """Write what a peer keeps of client 3, its plan having other settings of the run."""
    state, plan = result.state(), Plan(result.config.replace("run", **settings), result.recipe.format)
    Kept(plan, state.round, tree_index(state.personal, 3), tree_index(state.shared, 0)).save(path)
    return path


def test_a_file_without_components(run: Run, tmp_path: Path) -> None:
    kept = Kept.load(keep(small_run(None), tmp_path / "kept"))
    Kept(kept.plan, kept.round, kept.personal).save(tmp_path / "early")
    code, _, err = run("export", tmp_path / "early", "--out", tmp_path / "m")
    assert (code, "has no components" in err) == (2, True)


def test_a_file_from_a_device_that_is_not_here(run: Run, tmp_path: Path) -> None:
    result = small_run(None)
    kept = keep(result, tmp_path / "kept", device="cuda:99")
    code, _, err = run("export", kept, "--out", tmp_path / "m")
    assert code == 0, err
    inputs = torch.randn(5, 6, dtype=result.recipe.format.input_dtype)
    torch.testing.assert_close(load_exported(tmp_path / "m").predict(inputs), result.predict("3", inputs))


def test_a_peer_s_file_is_of_the_model_before_it_is_fine_tuned(run: Run, tmp_path: Path) -> None:
    code, _, err = run("export", keep(small_run(None), tmp_path / "kept", fine_tune_epochs=2), "--out", tmp_path / "m")
    assert code == 2
    assert "run.fine_tune_epochs is 2" in err
    assert "allowed for a peer's file: 0" in " ".join(err.split())
    assert not (tmp_path / "m").exists()


def test_a_client_that_fine_tunes_exports_what_it_predicts_with(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from flower_grid import Deployed, simulated

    there = Deployed(tmp_path, method={"name": "fedavg+"}, run={"dtype": "float64"})
    there.serve()
    state, parts = simulated(there.trainer), there.trainer.recipe
    tuned = there.trainer.predictors(state)
    for position, name in enumerate(there.trainer.federation.names):
        code, _, err = run("export", kept_path(tmp_path / "state", "trial", name), "--out", tmp_path / f"m{position}")
        assert code == 0, err
        about = json.loads((tmp_path / f"m{position}" / "model.json").read_text())
        assert (about["client"], about["state"], about["round"]) == (name, "last", 3)
        inputs, _ = there.trainer.federation.train.client(position)
        found = load_exported(tmp_path / f"m{position}").predict(inputs)
        expected = predict(parts.model, tuned.of(parts.algorithm, position), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        plain = parts.algorithm.predictor(tree_index(state.shared, 0), tree_index(state.personal, position))
        assert not torch.allclose(found, predict(parts.model, plain, inputs))


def test_a_servers_folder_has_no_client_s_model(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from flower_grid import Deployed

    there = Deployed(tmp_path, run={"rounds": 1})
    there.serve()
    folder, name = there.run_folder, there.trainer.federation.names[0]
    assert (folder / "clients.csv").read_text() == "client,role\n"
    predict_all = ["predict", folder, "--data", there.sample, "--out", tmp_path / "p.csv"]
    commands = [
        ["export", folder, "--client", name, "--out", tmp_path / "m"],
        predict_all,
        [*predict_all, "--client", name],
        ["evaluate", folder],
    ]
    for words in commands:
        code, _, err = run(*words)
        assert (code, "clients' models and samples are on their nodes" in " ".join(err.split())) == (2, True)
    assert run("export", folder, "--components", "--out", tmp_path / "all")[0] == 0
