"""The command line as a user meets it: what it prints, writes, and how it refuses."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedem
from fedem.data import DATA
from fedem.report.methods import settings_of, shipped
from fedem.settings import names_of

SMALL = ["--set", "data.num_clients=10", "--set", "data.dimension=6", "--set", "data.num_test=30", "--rounds", "4"]


def test_train_shows_progress_a_table_and_the_folder(run, tmp_path: Path) -> None:
    code, out, err = run("train", *SMALL, "--baselines", "fedavg,local", "--out", tmp_path / "r")
    assert code == 0
    assert all(name in out for name in ("FedEM (M=3)", "FedAvg", "Local", "oracle", "bottom"))
    assert f"Run folder: {tmp_path / 'r'}" in out
    assert "4/4" in err
    assert (tmp_path / "r/baselines/local/summary.json").exists()
    _, again, _ = run("show", tmp_path / "r")
    assert again in out


def test_quiet_prints_the_folder_alone(run, tmp_path: Path) -> None:
    code, out, err = run("train", *SMALL, "--out", tmp_path / "r", "--quiet")
    assert (code, out, err) == (0, f"Run folder: {tmp_path / 'r'}\n", "")


def test_folders_get_names_of_their_own(run, tmp_path: Path) -> None:
    for expected in ("synthetic-fedem-seed3", "synthetic-fedem-seed3-2"):
        code, out, _ = run("train", *SMALL, "--seed", "3", "-q")
        assert code == 0
        assert out.strip() == f"Run folder: runs/{expected}"


def test_options_win_over_a_file_and_set_over_all(run, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[run]\nrounds = 2\nseed = 5\n[method]\nname = "fedavg"\n')
    arguments = [
        "--seed",
        "6",
        "--set",
        "solver.momentum=0.5",
        "--set",
        "data.num_clients=5",
        "--set",
        "data.num_test=9",
    ]
    code, _, _ = run("train", tmp_path / "c.toml", *arguments, "--out", tmp_path / "r", "-q")
    assert code == 0
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert (summary["rounds"], summary["seed"], summary["method"], summary["num_clients"]) == (2, 6, "fedavg", 5)
    config = fedem.Result.load(tmp_path / "r").config
    assert config.solver.momentum == 0.5


def test_a_runs_config_trains_the_same_again(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "a", "-q")
    run("train", tmp_path / "a/config.toml", "--out", tmp_path / "b", "-q")
    first, second = (fedem.Result.load(tmp_path / name) for name in "ab")
    assert first.config == second.config
    assert first.summary["test_loss"] == second.summary["test_loss"]


def test_options_that_make_other_clients_free_a_file_of_its_partition(run, tmp_path: Path) -> None:
    lines = ["a,y,client", *(f"{row / 7:.3f},{row % 2},{row % 3}" for row in range(60))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    assert run("train", "--data", "t.csv", "--rounds", "1", "--out", "r", "-q", "--set", "partition.name=uniform",
               "--set", "partition.num_clients=4")[0] == 0  # fmt: skip
    known = fedem.Result.load(tmp_path / "r").config.run.partition_hash
    (tmp_path / "u.csv").write_text("\n".join(lines[:-6]) + "\n")
    for position, options in enumerate(
        (
            ["--seed", "1"],
            ["--set", "run.seed=1"],
            ["--set", "partition.num_clients=3"],
            ["--set", "partition.name=natural"],
            ["--data", "u.csv"],
        )
    ):
        code, _, err = run("train", "r/config.toml", *options, "--out", f"r{position}", "-q")
        assert code == 0, err
        assert fedem.Result.load(tmp_path / f"r{position}").config.run.partition_hash not in ("", known)
    # What the file says already changes nothing, and who sets the hash is held to it.
    for options in (["--seed", "0"], ["--rounds", "2"], ["--unseen", "0"]):
        (tmp_path / "t.csv").write_text("\n".join(lines[:-6]) + "\n")
        code, _, err = run("train", "r/config.toml", *options, "--out", "s", "-q")
        assert (code, "run.partition_hash is" in err) == (2, True)
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    bound = ["--seed", "1", "--set", f"run.partition_hash={known}"]
    code, _, err = run("train", "r/config.toml", *bound, "--out", "s", "-q")
    assert (code, f"run.partition_hash is '{known}'" in err) == (2, True)


def test_resume_needs_no_other_option(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    code, out, _ = run("train", "--out", tmp_path / "r", "--resume")
    assert code == 0
    assert "FedEM (M=3)" in out


def test_baselines_keep_their_own_settings_when_resumed_or_run_from_a_config(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--baselines", "fedavg", "--out", tmp_path / "r", "-q")
    expected = fedem.Result.load(tmp_path / "r/baselines/fedavg").config
    assert expected.schedule.learning_rate != fedem.Result.load(tmp_path / "r").config.schedule.learning_rate
    assert run("train", "--out", tmp_path / "r", "--resume", "--baselines", "fedavg, local", "-q")[0] == 0
    assert (tmp_path / "r/baselines/local/summary.json").exists()
    shutil.rmtree(tmp_path / "r/baselines")
    assert run("train", "--out", tmp_path / "r", "--resume", "--baselines", "fedavg", "-q")[0] == 0
    assert fedem.Result.load(tmp_path / "r/baselines/fedavg").config == expected
    assert run("train", tmp_path / "r/config.toml", "--out", tmp_path / "s", "--baselines", "fedavg", "-q")[0] == 0
    assert fedem.Result.load(tmp_path / "s/baselines/fedavg").config == expected


def test_columns_are_matched_by_name(run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [[f"{i % 3}", *rng.normal(size=2).round(3), i % 2] for i in range(60)]

    def write(name: str, order: list[int], header: list[str]) -> Path:
        lines = [",".join(str(row[k]) for k in order) for row in rows]
        path = tmp_path / name
        path.write_text("\n".join([",".join(header), *lines]) + "\n")
        return path

    train = write("train.csv", [0, 1, 2, 3], ["shop", "a", "b", "label"])
    columns = ["--set", "data.target_column=label", "--set", "data.client_column=shop"]
    assert run("train", "--data", train, *columns, "--rounds", "3", "--out", tmp_path / "r", "-q")[0] == 0
    outcomes = []
    for name, order, header in (("same", [0, 1, 2, 3], "shop,a,b,label"), ("swapped", [3, 2, 0, 1], "label,b,shop,a")):
        data = write(f"{name}.csv", order, header.split(","))
        out = tmp_path / f"{name}-predictions.csv"
        assert run("predict", tmp_path / "r", "--client", "1", "--data", data, "--out", out, "-q")[0] == 0
        outcomes.append(out.read_text())
    assert outcomes[0] == outcomes[1]
    other = write("other.csv", [0, 1, 2, 3], ["shop", "a", "c", "label"])
    code, _, err = run("predict", tmp_path / "r", "--client", "1", "--data", other, "--out", tmp_path / "p.csv")
    assert code == 2
    assert "The columns are a, c; allowed: a, b, as in training." in err
    monkey = tmp_path / "elsewhere"
    monkey.mkdir()
    os.chdir(monkey)  # a run remembers where its data lie
    assert run("evaluate", tmp_path / "r", "-q")[0] == 0


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


def test_a_lost_history_does_not_stop_an_evaluation(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    (tmp_path / "r" / "metrics.jsonl").unlink()
    assert run("evaluate", tmp_path / "r")[0] == 0


def test_evaluate_scores_again(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    code, out, _ = run("evaluate", tmp_path / "r", "--out", tmp_path / "scores.json")
    assert code == 0
    assert "best" in out
    written, kept = (json.loads((tmp_path / name).read_text()) for name in ("scores.json", "r/summary.json"))
    assert written["test_accuracy"] == kept["test_accuracy"]


@pytest.mark.parametrize("ending", ["csv", "npz"])
def test_from_a_file_to_personal_predictions(run, tmp_path: Path, ending: str) -> None:
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(200, 3)).astype(np.float32), np.arange(200) % 4
    y = (np.where(client < 2, x[:, 0], -x[:, 0]) > 0).astype(int)

    def write(name: str, rows: slice) -> Path:
        path = tmp_path / f"{name}.{ending}"
        if ending == "npz":
            np.savez(path, x=x[rows], y=y[rows], client=client[rows].astype(str))
        else:
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["client", "a", "b", "c", "y"])
                writer.writerows([c, *row, t] for c, row, t in zip(client[rows], x[rows], y[rows], strict=True))
        return path

    old, new = write("old", slice(0, 150)), write("new", slice(150, 200))
    options = ["--seed", "1", "--components", "2", "--rounds", "40", "--set", "schedule.learning_rate=1.0"]
    assert run("train", "--data", old, *options, "--out", tmp_path / "r", "-q")[0] == 0
    code, out, err = run("personalize", tmp_path / "r", "--data", new, "--out", tmp_path / "p")
    assert code == 0, err
    assert "4 clients" in out
    code, out, err = run("show", tmp_path / "p")
    assert (code, err) == (0, "")
    assert "FedEM (M=2)" in out
    for target in ("predictions.csv", "predictions.npz"):
        code, _, err = run("predict", tmp_path / "p", "--data", new, "--out", tmp_path / target)
        assert code == 0, err
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert len(rows) == 50
    assert all(abs(float(row["probability_0"]) + float(row["probability_1"]) - 1) < 1e-5 for row in rows)
    assert [row["client"] for row in rows] == client[150:].astype(str).tolist()
    hits = [int(row["prediction"]) == t for row, t in zip(rows, y[150:], strict=True)]
    assert np.mean(hits) > 0.75  # one model for all is right in half of them
    with np.load(tmp_path / "predictions.npz") as archive:
        assert archive["predictions"].shape == (50, 2)
        assert [int(row["prediction"]) for row in rows] == archive["prediction"].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--method", "ifca", "--components", "2"], "method ifca has no components; allowed with: fedem."),
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


def test_a_killed_runs_folder_can_be_shown(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    (tmp_path / "r/summary.json").unlink()
    code, out, _ = run("show", tmp_path / "r")
    assert code == 0
    assert "not complete: 4 of 4 rounds" in " ".join(out.split())


@pytest.mark.parametrize(
    "command", ["train", "compare", "methods", "show", "evaluate", "personalize", "predict", "version"]
)
def test_every_command_has_help_that_teaches(run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Usage" in out


def test_methods_are_listed_within_eighty_columns(run) -> None:
    code, out, err = run("methods")
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    words = " ".join(out.split())
    for name, row in fedem.METHODS.items():
        assert f"\n {name} " in out
        assert row.summary in words
        assert row.paper in words
        assert all(word in words for part in (row.personal, row.sent, row.unseen) for word in part.split())


@pytest.mark.parametrize("name", fedem.METHODS)
def test_a_method_is_told_in_full(run, name: str) -> None:
    code, out, err = run("methods", name)
    assert (code, err) == (0, "")
    row, words = fedem.METHODS[name], " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())
    for fact in (row.title, row.summary, row.paper, row.personal, row.sent, row.unseen, row.algorithm.__module__):
        assert fact in words
    for key in names_of(row.algorithm, row.mixer):
        assert f" {key} " in words
    told = shipped(name)
    for data in DATA:
        config = fedem.Config.build({"method": {"name": name}, "data": {"name": data}})
        values = told.get(data, told["any data"])
        assert values["schedule.learning_rate"] == config.schedule.learning_rate
        assert values["solver.name"] == config.name("solver")
    shown = next(line.split() for line in out.splitlines() if "schedule.learning_rate" in line)
    assert shown[0] == "schedule.learning_rate"
    assert set(shown[1:]) == {str(values["schedule.learning_rate"]) for values in told.values()}
    assert all(data in words for data in told)


def test_settings_are_told_with_defaults_ranges_and_meanings(run) -> None:
    _, out, _ = run("methods", "ditto")
    assert "pull 0.1 at least 0 lambda; 0 trains each client's model alone." in " ".join(out.split())
    _, out, _ = run("methods", "fedem")
    assert "initial_weights random random or uniform" in " ".join(out.split())
    assert "Mixture of Distributions, NeurIPS 2021." in " ".join(out.split())
    assert settings_of(fedem.METHODS["apfl"].algorithm)[1].default == "true"
    _, out, _ = run("methods", "fedavg+")
    assert "run.fine_tune_epochs 1" in " ".join(out.split())
    _, alias, _ = run("methods", "hypcluster")
    assert alias == run("methods", "ifca")[1]


def test_a_baseline_keeps_its_own_fine_tuning(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    assert run("train", tmp_path / "r/config.toml", "--out", tmp_path / "s", "--baselines", "fedavg+", "-q")[0] == 0
    assert fedem.Result.load(tmp_path / "s").config.run.fine_tune_epochs == 0
    assert fedem.Result.load(tmp_path / "s/baselines/fedavg+").config.run.fine_tune_epochs == 1


def test_python_m_fedem_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "fedem", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fedem.__version__
