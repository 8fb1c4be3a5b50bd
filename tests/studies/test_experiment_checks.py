"""What is refused before the first run of an experiment is trained, and what ratios are to."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from declared import SMALL, declare, nobody_watches
from kept import declare_made_up, keep
from stores import make_home

import fedem
from fedem.core.errors import UserError
from fedem.report.studies import experiment_markdown
from fedem.runs.config import Config
from fedem.studies.experiments import check, plan, sort_settings, tabulate
from fedem.studies.sweep import SharedData, work_off

ROUNDS = [{"run": {"rounds": 3}}]
TWO_DATA_SETS = """
title = "Two data sets"
figures = ["test_accuracy"]

[settings]
"run.rounds" = 2

[axes.data]
Synthetic = { "data.num_clients" = 4, "data.dimension" = 3, "data.num_test" = 10 }
CIFAR-10 = { "data.name" = "cifar10" }

[axes.method]
FedEM = { "method.name" = "fedem" }
FedAvg = { "method.name" = "fedavg" }
"""


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_missing_data_are_told_before_work_and_what_is_there(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_home(tmp_path, monkeypatch)
    declare(tmp_path, TWO_DATA_SETS)
    before = files(tmp_path)
    options = ["experiment", "run", "small", "--experiments", tmp_path, "--out", tmp_path / "out"]
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert err.count("'cifar10' is not prepared") == 1
    assert "run: fedem data prepare cifar10." in err
    assert err.endswith("--data Synthetic\n")
    assert files(tmp_path) == before
    assert run(*options, "--data", "Synthetic")[0] == 0
    # What is complete needs no data.
    code, _, err = run(*options)
    assert code == 2
    assert err.endswith("--data Synthetic\n")
    # Where nothing is there, nothing is proposed.
    assert "--data" not in run(*options, "--data", "CIFAR-10")[2]


def test_a_run_that_can_not_be_prepared_has_failed_if_others_can(run, tmp_path: Path) -> None:
    network = SMALL.replace('FedAvg = { "method.name" = "fedavg" }', 'MOCHA = { "method.name" = "mocha" }')
    network = network.replace('method = "FedAvg"', 'method = "MOCHA"')
    declare(tmp_path, network.replace("[settings]", '[settings]\n"model.name" = "mlp"'))
    place = ["small", "--experiments", tmp_path, "--out", tmp_path / "out"]
    code, _, err = run("experiment", "run", *place, "-q", "--only", "method=MOCHA")
    assert code == 2
    assert err.startswith("error: MOCHA, fast, seed 1: Method mocha trains linear models alone")
    assert not (tmp_path / "out").exists()
    code, out, err = run("experiment", "run", *place)
    assert code == 0
    assert "2 of 6 runs failed" in err
    told = "MOCHA / fast failed with seeds 0, 1: Method mocha trains linear models alone"
    assert told in " ".join(out.split())
    table = (tmp_path / "out/table.md").read_text()
    assert told in table
    assert "| MOCHA | fast | - | failed: can't be trained | - | - | - |" in table
    assert "failed: can't be trained" in run("experiment", "status", *place)[1]
    assert told in " ".join(run("experiment", "table", *place)[1].split())
    # Nothing is left to do, and nothing is tried again.
    code, out, err = run("experiment", "run", *place, "-q")
    assert code == 0
    assert "2 of 6 runs failed" in err
    # Other settings might do better.
    linear = ["--set", "MOCHA:model.name=linear"]
    assert "--retry-failed trains it" in run("experiment", "table", *place, *linear)[2]
    code, out, _ = run("experiment", "run", *place, *linear, "--retry-failed")
    assert (code, "failed" in out) == (0, False)


def test_settings_that_one_choice_can_not_have_are_refused_with_its_name(tmp_path: Path) -> None:
    small = declare(tmp_path, SMALL)
    shared, own = sort_settings(small, ["FedAvg:method.num_components=2"])
    with pytest.raises(UserError, match="FedAvg, fast, seed 0: Unknown key"):
        plan(small, tmp_path / "out", [0], asked=shared, own=own)
    with pytest.raises(UserError, match="The seeds are 4, 4"):
        plan(small, tmp_path / "out", [4, 4])


def test_checking_makes_data_once_a_seed_and_leaves_the_first_at_hand(tmp_path: Path) -> None:
    entries = plan(declare(tmp_path, SMALL), tmp_path / "out", [0, 1])
    made: list[int] = []

    def make(config: Config) -> fedem.Dataset:
        made.append(config.run.seed)
        return config.make_data()

    data = SharedData(make)
    check(entries, data)
    assert made == [1, 0]
    assert not (tmp_path / "out").exists()
    assert work_off(entries, nobody_watches, data) == {}
    assert made == [1, 0, 1]
    check(entries, data)
    assert made == [1, 0, 1], "what is complete needs no data"


def test_runs_with_other_settings_are_not_mixed_in(run, tmp_path: Path) -> None:
    small = declare(tmp_path, SMALL)
    place = ["small", "--experiments", tmp_path, "--out", tmp_path / "out", "--seeds", "1"]
    assert run("experiment", "run", *place, "-q")[0] == 0
    for command in ("run", "status", "table"):
        code, _, err = run("experiment", command, *place, "--rounds", "3")
        assert code == 2
        assert "started with other settings (run.rounds)" in err
    # The same but for where it runs.
    assert run("experiment", "run", *place, "--device", "cpu")[0] == 0
    # Begun, and not complete.
    begun = plan(small, tmp_path / "out", [0])[0]
    (begun.folder.path / "summary.json").unlink()
    others = plan(small, tmp_path / "out", [0], {axis: [label] for axis, label in begun.labels.items()}, ROUNDS)
    with pytest.raises(UserError, match=rf"{begun.title}: .*other settings \(run\.rounds\)"):
        check(others, SharedData())
    # Another process is at it, and will tell.
    with (tmp_path / "out" / ".claims" / begun.folder.path.name).open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        check(others, SharedData())


def test_the_users_settings_win_over_those_of_a_short_trial(tmp_path: Path) -> None:
    small = declare(tmp_path, SMALL + '\n[quick.FedEM]\n"run.rounds" = 1\n')
    shared, own = sort_settings(small, ["FedEM:run.rounds=5"])
    found = plan(small, tmp_path, [0], {"method": ["FedEM"]}, [*ROUNDS, *shared], own, quick=True)
    assert {entry.config.run.rounds for entry in found} == {5}
    found = plan(small, tmp_path, [0], {"method": ["FedEM"]}, quick=True)
    assert {entry.config.run.rounds for entry in found} == {1}


def test_a_ratio_is_to_the_run_of_the_same_seed_with_another_label(tmp_path: Path) -> None:
    text = SMALL.replace('"recovery.component_distances"', '"test_loss / FedAvg"').partition("[paper]")[0]
    small = declare(tmp_path, text)
    entries = plan(small, tmp_path / "out", [0, 1])
    work_off(entries, nobody_watches, SharedData())
    losses = {
        (*entry.labels.values(), entry.seed): summary["test_loss"]
        for entry in entries
        if (summary := entry.folder.summary()) is not None
    }
    lines = {tuple(line.labels.values()): line.ours["test_loss / FedAvg"] for line in tabulate(small, entries)}
    ratios = [losses["FedEM", "fast", seed] / losses["FedAvg", "fast", seed] for seed in (0, 1)]
    assert lines["FedEM", "fast"].mean == pytest.approx(sum(ratios) / 2)
    assert lines["FedAvg", "fast"] == (1.0, 0.0)
    assert lines["FedEM", "slow"].mean is None, "there is no slow FedAvg"
    assert "| test loss / FedAvg |" in experiment_markdown(small, tabulate(small, entries))


def test_a_table_prints_what_is_kept_and_says_how_it_was_made(run, tmp_path: Path) -> None:
    made_up, kept = declare_made_up(tmp_path), tmp_path / "made-up/results"
    for method in ("FedEM", "FedAvg"):
        keep(made_up, kept, "Here", method, [0.5] * 4, seed=2, run_rounds=9)
    keep(made_up, kept, "There", "FedEM", [0.25] * 5, run_rounds=9, data_noise_scale=0.5)
    keep(made_up, kept, "There", "FedAvg", [0.75] * 5)
    place = ["made-up", "--experiments", tmp_path]
    code, out, err = run("experiment", "table", *place)
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert f"Runs: {kept}" in said.replace("/ ", "/")
    assert "Here: made with run.rounds=9, other than declared." in said
    assert "There / FedEM: made with data.noise_scale=0.5 run.rounds=9, other than declared." in said
    # Where it was made does not matter; what it was made with does, once it is asked for.
    assert run("experiment", "table", *place, "--device", "cpu", "--data", "Here")[1].count("50.0") == 4
    code, _, err = run("experiment", "table", *place, "--data", "Here", "--seeds", "2,", "--rounds", "3")
    assert code == 2
    assert "started with other settings (run.rounds)" in err
    code, out, _ = run("experiment", "table", *place, "--data", "Here", "--seeds", "2,", "--set", "run.rounds=9")
    assert (code, "other than declared" in out) == (0, False)
    # What was run here comes before what is kept.
    keep(made_up, tmp_path / "runs/experiments/made-up", "Here", "FedEM", [0.125] * 4)
    out = run("experiment", "table", *place)[1]
    assert "12.5" in out
    assert "50.0" not in out
    # Training never goes by what is there: it is held to what is asked for.
    code, _, err = run("experiment", "run", *place, "--data", "Here", "--seeds", "2,", "--out", kept, "-q")
    assert code == 2
    assert "started with other settings (run.rounds)" in err
