"""The command line as a user meets it: what it prints and writes."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL, TINY

import fedem
from fedem.runs.config import Config


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
    def configs(folder: str) -> dict[str, Config]:
        return {name: fedem.Result.load(tmp_path / folder / "baselines" / name).config for name in ("fedavg", "mocha")}

    settings = ["--set", "batching.batch_size=16"]
    run("train", *TINY, *settings, "--rounds", "1", "--baselines", "fedavg,mocha", "--out", tmp_path / "r", "-q")
    expected, main = configs("r"), fedem.Result.load(tmp_path / "r").config
    assert expected["fedavg"].schedule.learning_rate != main.schedule.learning_rate
    # Batches are everybody's, for they were asked for; passes over the samples are shipped with the method.
    assert {config.batching.batch_size for config in expected.values()} == {16}
    assert expected["mocha"].batching.local_epochs != main.batching.local_epochs
    assert run("train", "--out", tmp_path / "r", "--resume", "--baselines", "fedavg, local", "-q")[0] == 0
    assert (tmp_path / "r/baselines/local/summary.json").exists()
    shutil.rmtree(tmp_path / "r/baselines")
    assert run("train", "--out", tmp_path / "r", "--resume", "--baselines", "fedavg,mocha", "-q")[0] == 0
    assert configs("r") == expected
    config = tmp_path / "r/config.toml"
    assert run("train", config, "--out", tmp_path / "s", "--baselines", "fedavg,mocha", "-q")[0] == 0
    assert configs("s") == expected


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
    assert "The columns are a, c; allowed: a, b, as in training; missing: b." in err
    monkey = tmp_path / "elsewhere"
    monkey.mkdir()
    os.chdir(monkey)  # a run remembers where its data lie
    assert run("evaluate", tmp_path / "r", "-q")[0] == 0


def test_a_lost_history_does_not_stop_an_evaluation(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    (tmp_path / "r" / "metrics.jsonl").unlink()
    assert run("evaluate", tmp_path / "r")[0] == 0


def test_no_command_writes_over_a_file_unless_told_to(run, tmp_path: Path) -> None:
    data = tmp_path / "mine.csv"
    data.write_text("client,a,y\n" + "".join(f"{i % 2},{i / 40},{i % 3 % 2}\n" for i in range(40)))
    assert run("train", "--data", data, "--rounds", "1", "--out", tmp_path / "r", "-q")[0] == 0
    commands = [
        (["predict", tmp_path / "r", "--data", data], "p.csv"),
        (["evaluate", tmp_path / "r"], "scores.json"),
        (["report", tmp_path / "r"], "page.html"),
        (["data", "describe", data], "clients.svg"),
    ]
    for command, name in commands:
        out = tmp_path / name
        out.write_text("precious")
        code, _, err = run(*command, "--out", out, "-q")
        assert (code, out.read_text()) == (2, "precious")
        assert f"{name} is there already; allowed: another --out, or --force" in err
        assert run(*command, "--out", out, "-q", "--force")[0] == 0
        assert out.read_text() != "precious"
    figures = ["plot", tmp_path / "r", "--figure", "clients", "--out", tmp_path / "figures", "-q"]
    assert [run(*figures, *force)[0] for force in ([], [], ["--force"])] == [0, 2, 0]


def test_a_run_is_made_longer_with_its_baselines(run, tmp_path: Path) -> None:
    out = tmp_path / "r"
    begun = [*SMALL, "--baselines", "fedavg", "--out", out, "-q"]
    assert run("train", *begun, "--set", "schedule.name=constant", "--rounds", "2")[0] == 0
    code, _, err = run("train", "--out", out, "--resume", "--rounds", "3", "--baselines", "fedavg", "-q")
    # The baseline has the schedule shipped for it: nothing is trained where one of them can't go on.
    assert code == 2
    assert "schedule.name is 'step', whose learning rates go by the number of rounds" in err
    assert json.loads((out / "summary.json").read_text())["rounds"] == 2
    assert run("train", "--out", out, "--resume", "--rounds", "3", "-q")[0] == 0
    assert json.loads((out / "summary.json").read_text())["rounds"] == 3


def test_one_is_not_several(run, tmp_path: Path) -> None:
    code, out, _ = run("data", "describe", "synthetic", "--set", "data.num_clients=1", "--set", "data.num_test=5")
    assert code == 0
    assert "samples of 1 client " in out
    run("train", *SMALL, "--rounds", "1", "--out", tmp_path / "r", "-q")
    (tmp_path / "r" / "summary.json").unlink()
    assert "1 of 1 round is recorded" in run("show", tmp_path / "r")[1]


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
    known = (
        f"4 of 4 clients took part in the training of {tmp_path / 'r'} already ('0', '1', '2', '3'); `fedem predict`"
    )
    assert f"note: {known}" in err
    assert known in run("data", "describe", new, "--run", tmp_path / "r")[1]
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
    assert np.mean(hits) > 0.7  # one model for all is right in half of them
    with np.load(tmp_path / "predictions.npz") as archive:
        assert archive["predictions"].shape == (50, 2)
        assert [int(row["prediction"]) for row in rows] == archive["prediction"].tolist()


def test_a_killed_runs_folder_can_be_shown(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    (tmp_path / "r/summary.json").unlink()
    code, out, _ = run("show", tmp_path / "r")
    assert code == 0
    assert "not complete: 4 of 4 rounds" in " ".join(out.split())


def test_a_baseline_keeps_its_own_fine_tuning(run, tmp_path: Path) -> None:
    run("train", *SMALL, "--out", tmp_path / "r", "-q")
    assert run("train", tmp_path / "r/config.toml", "--out", tmp_path / "s", "--baselines", "fedavg+", "-q")[0] == 0
    assert fedem.Result.load(tmp_path / "s").config.run.fine_tune_epochs == 0
    assert fedem.Result.load(tmp_path / "s/baselines/fedavg+").config.run.fine_tune_epochs == 1
