"""The command line refuses in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import SMALL


@pytest.mark.parametrize(
    ("name", "content"),
    [("summary.json", "{"), ("checkpoints/checkpoint.json", "{}"), ("checkpoints/checkpoint.json", "[")],
)
def test_damaged_folders_are_refused_in_a_sentence(run, tmp_path: Path, name: str, content: str) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    (tmp_path / "r" / name).write_text(content)
    command = "show" if name == "summary.json" else "evaluate"
    code, out, err = run(command, tmp_path / "r")
    assert (code, out) == (2, "")
    assert "can't be read" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--method", "ifca", "--components", "2"],
            "method ifca has no components; allowed with: fedem, dfedem, bfedem, ensemble, fedem-heads.",
        ),
        (["train", "--method", "fedm"], "Did you mean 'fedem'?"),
        (["train", "--data", "mnist"], "Unknown data 'mnist'"),
        (["train", "--data", "none.csv"], "/none.csv."),
        (["train", "--rounds", "0"], "run.rounds is 0; allowed: at least 1"),
        (["train", "--rounds", "many"], "'many' is not a valid int"),
        (["train", "--components", "0"], "method.num_components is 0"),
        (["train", "--method", "local", "--components", "2"], "has no components; allowed with: fedem"),
        (["train", "--clients-per-round", "-1"], "run.clients_per_round is -1.0; allowed: above 0"),
        (["train", "--unseen", "1"], "run.unseen is 1.0; allowed: at least 0 and below 1"),
        (["train", "--set", "momentum=3"], "--set got 'momentum=3'; allowed: section.key=value"),
        (["train", "--set", "solver.momentun=0.3"], "Did you mean 'momentum'?"),
        (["train", "--set", "solvr.momentum=0.3"], "Unknown section 'solvr'"),
        (["train", "--set", "solver.momentum=1"], "solver.momentum is 1; allowed: at least 0 and below 1"),
        (["train", "--device", "tpu"], "Unknown device 'tpu'"),
        (["train", "--baselines", "fedavg,nothing"], "Unknown method 'nothing'"),
        (["train", "--resume"], "--resume needs the folder"),
        (["train", "--resume", "--out", "nowhere"], "nowhere holds no run"),
        (["train", "none.toml"], "There is no configuration file none.toml"),
        (["train", "bad.toml"], "bad.toml can't be read as TOML"),
        (["train", "unknown.toml"], "Unknown section in unknown.toml 'rnu'"),
        (["train", "--out", "bad.toml/run"], "can't be written"),
        (["train", "--nonsense"], "No such option"),
        (["methods", "fedm"], "Did you mean 'fedem'?"),
        (["show", "nowhere"], "nowhere holds no run"),
        (["evaluate", "nowhere"], "nowhere holds no run"),
        (["predict", "nowhere", "--client", "a", "--data", "x.csv", "--out", "p.csv"], "nowhere holds no run"),
        (["predict", "nowhere", "--client", "a", "--data", "x.csv", "--out", "p.txt"], "ending in .csv or .npz"),
        (["personalize", "nowhere", "--data", "x.csv", "--out", "p"], "nowhere holds no run"),
        (["personalize", "nowhere"], "Missing option"),
    ],
)
def test_errors_are_one_sentence_with_exit_code_two(run, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "bad.toml").write_text("[run\n")
    (tmp_path / "unknown.toml").write_text("[rnu]\nrounds = 1\n")
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_errors_of_a_run_that_is_there(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    np.savez(tmp_path / "wide.npz", x=np.ones((2, 9)), y=[0, 1])
    np.savez(tmp_path / "fits.npz", x=np.ones((2, 6), dtype=np.float32), y=[0, 1])
    cases = [
        (["train", *SMALL, "--out", "r"], "r holds a run already"),
        (["train", "--out", "r", "--resume", "--seed", "9"], "other settings (run.seed)"),
        (["predict", "r", "--client", "zoe", "--data", "fits.npz", "--out", "p.csv"], "Unknown client 'zoe'"),
        (
            ["predict", "r", "--client", "1", "--data", "wide.npz", "--out", "p.csv"],
            "can't take inputs of shape [2, 9]",
        ),
        (["predict", "r", "--client", "1", "--data", "fits.npz", "--out", "no/where.csv"], "can't be written"),
        (
            ["predict", "r", "--client", "1", "--data", "fits.npz", "--out", "p.csv", "--which", "first"],
            "Unknown state",
        ),
        (["personalize", "r", "--data", "wide.npz", "--out", "p"], "can't take inputs of shape [9]"),
        (["personalize", "r", "--data", "fits.npz", "--out", "r"], "r holds a run already"),
    ]
    for arguments, message in cases:
        code, out, err = run(*arguments)
        assert (code, out) == (2, ""), arguments
        assert message in err
        assert "Traceback" not in err
