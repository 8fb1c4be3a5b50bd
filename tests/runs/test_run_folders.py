"""Run folders: what they hold, how a run goes on from them, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from helpers import StopError, make_federation, same_states, stop_at
from small_runs import SMALL, small_config, small_run

import fedem
from fedem.core.errors import UserError
from fedem.runs import folder as folder_module
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import reassess

REQUIRED = {
    "method", "data", "rounds", "seed", "num_clients", "num_components", "num_parameters", "test_accuracy",
    "test_accuracy_unweighted", "bottom_decile", "train_accuracy", "test_loss", "train_loss", "oracle_accuracy",
    "unseen_test_accuracy", "seconds_per_round", "seconds_total", "bytes_up_per_round", "bytes_down_per_round",
}  # fmt: skip


def test_a_run_folder_holds_everything(tmp_path: Path) -> None:
    result = small_run(tmp_path / "run", unseen=0.25)
    folder = tmp_path / "run"
    assert tomllib.loads((folder / "config.toml").read_text())["loss"]["name"] == "logistic"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert ["test_accuracy" in line for line in lines] == [False, True] * 3
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= REQUIRED
    assert summary == json.loads(json.dumps(result.summary))
    rows = list(csv.DictReader((folder / "clients.csv").read_text().splitlines()))
    assert [row["role"] for row in rows] == ["train"] * 9 + ["unseen"] * 3
    assert all(math.isclose(sum(float(row[f"weight_{m}"]) for m in range(3)), 1, abs_tol=1e-5) for row in rows)
    assert list((folder / "tensorboard").glob("events*"))
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert "checkpoint.json" in names
    assert all(name.endswith((".json", ".safetensors")) for name in names)


def test_the_config_in_the_folder_runs_again_to_the_same_bits(tmp_path: Path) -> None:
    first = small_run(tmp_path / "run", clients_per_round=0.5)
    config = RunFolder(tmp_path / "run").config()
    second = fedem.run(config, config.data.make(config.run.seed))
    assert same_states(first.state(), second.state())


def test_tensorboard_events_carry_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = small_run(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("test_accuracy")
    assert [scalar.step for scalar in scalars] == [2, 4, 6]
    assert scalars[-1].value == pytest.approx(result.summary["test_accuracy"], abs=1e-6)


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_run_at_a_constant_rate_may_be_made_longer(tmp_path: Path, epochs: int) -> None:
    constant = {"schedule": {"name": "constant"}}

    def configure(rounds: int) -> fedem.Config:
        return fedem.Config.build(small_config(rounds=rounds, fine_tune_epochs=epochs).sections, constant)

    long, data, out = configure(6), configure(6).make_data(), tmp_path / "grown"
    whole = fedem.run(long, data)
    fedem.run(configure(2), data, out=out)
    complete: list[bool] = []
    with pytest.raises(StopError):  # killed once more, and taken up as it is now
        fedem.run(long, data, out=out, resume=True, listener=stop_at(3))
    complete.append(RunFolder(out).summary() is not None)
    assert RunFolder(out).config().run.rounds == 6
    grown = fedem.run(RunFolder(out).config(), data, out=out, resume=True)
    assert complete == [False]
    for role in ("last", "best"):
        assert same_states(whole.state(role), grown.state(role))
        if epochs:
            assert same_states(whole.tuned[role], fedem.Result.load(out).tuned[role])
    assert [line["round"] for line in RunFolder(out).metrics()] == [1, 2, 3, 4, 5, 6]
    assert grown.summary["test_loss"] == whole.summary["test_loss"]


@pytest.mark.parametrize("schedule", ["step", "cosine", "inverse_sqrt"])
def test_rates_that_go_by_the_number_of_rounds_keep_a_run_as_long_as_it_is(tmp_path: Path, schedule: str) -> None:
    config = fedem.Config.build(small_config(rounds=2).sections, {"schedule": {"name": schedule}})
    data, before = config.make_data(), {}
    fedem.run(config, data, out=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    for rounds, said in (
        (4, rf"4 are asked for, but schedule.name is '{schedule}'.*a new run of 4 rounds"),
        (1, "or more"),
    ):
        with pytest.raises(UserError, match=said):
            fedem.run(config.replace("run", rounds=rounds), data, out=tmp_path / "run", resume=True)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_resuming_gives_the_same_bits(tmp_path: Path, stop: int) -> None:
    whole = small_run(tmp_path / "whole", clients_per_round=0.5)

    config = small_config(clients_per_round=0.5)
    with pytest.raises(StopError):
        fedem.run(config, config.data.make(0), out=tmp_path / "cut", listener=stop_at(stop))
    resumed = small_run(tmp_path / "cut", resume=True, clients_per_round=0.5)
    for role in ("last", "best"):
        assert same_states(whole.state(role), resumed.state(role))
    timings = {"seconds_per_round", "seconds_total", "peak_host_bytes"}
    assert {k: v for k, v in whole.summary.items() if k not in timings} == {
        k: v for k, v in resumed.summary.items() if k not in timings
    }
    whole_lines, cut_lines = (
        [{**line, "seconds": 0} for line in RunFolder(tmp_path / name).metrics()] for name in ("whole", "cut")
    )
    assert whole_lines == cut_lines
    assert (tmp_path / "whole/clients.csv").read_bytes() == (tmp_path / "cut/clients.csv").read_bytes()


def test_resuming_a_complete_run_changes_nothing(tmp_path: Path) -> None:
    whole = small_run(tmp_path / "run")
    again = small_run(tmp_path / "run", resume=True)
    assert same_states(whole.state(), again.state())
    assert len(RunFolder(tmp_path / "run").metrics()) == 6


def test_a_torn_last_line_is_dropped_on_resuming(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert len(RunFolder(tmp_path / "run").metrics()) == 5


def test_a_stray_tensor_file_of_a_killed_run_is_not_trusted(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    stray = tmp_path / "run" / "checkpoints" / "round-000001.safetensors"
    stray.write_bytes(b"half a file")
    small_run(tmp_path / "other")
    states, _ = RunFolder(tmp_path / "run").load()
    RunFolder(tmp_path / "run").save({"last": states["last"]}, {})
    assert not stray.exists()


def test_other_settings_are_refused_on_resuming(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"other settings \(run\.seed\)"):
        small_run(tmp_path / "run", resume=True, seed=1)
    small_run(tmp_path / "run", resume=True, chunk_size=2, engine="stacked")  # these change no result


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        small_run(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="can't be written"):
        small_run(tmp_path / "file" / "run")


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to go on with"):
        small_run(tmp_path / "none", resume=True)
    with pytest.raises(UserError, match="resume needs the folder"):
        small_run(None, resume=True)


def test_scores_can_be_made_again_from_the_folder(tmp_path: Path) -> None:
    result = small_run(tmp_path / "run", unseen=0.25)
    again = reassess(tmp_path / "run")
    for key, value in result.summary.items():
        if not key.startswith(("seconds", "peak_", "clients_together")):  # what training cost is not made again
            assert again.summary[key] == value, key


def test_other_data_are_refused_on_resuming(tmp_path: Path) -> None:
    fedem.train(make_federation(), rounds=2, out=tmp_path / "run")
    with pytest.raises(UserError, match="The data are not those"):
        fedem.train(make_federation(seed=1), rounds=2, out=tmp_path / "run", resume=True)


def test_clients_fitted_later_are_not_scored_on_the_runs_own_data(tmp_path: Path) -> None:
    result = small_run(tmp_path / "run")
    new = fedem.Synthetic(**SMALL).make(7).federation
    result.with_unseen(new).save(tmp_path / "new")
    with pytest.raises(UserError, match="were fitted after training"):
        reassess(tmp_path / "new")


def test_the_time_of_a_resumed_run_counts_all_of_it(tmp_path: Path) -> None:
    first = small_run(tmp_path / "run")
    again = small_run(tmp_path / "run", resume=True)
    assert again.summary["seconds_total"] >= sum(line["seconds"] for line in first.history)


def test_a_folder_with_remains_of_a_run_is_refused(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    (tmp_path / "run" / "config.toml").unlink()
    with pytest.raises(UserError, match="holds a run already"):
        small_run(tmp_path / "run", seed=5)


def test_a_saved_result_can_be_scored_and_gone_on_with(tmp_path: Path) -> None:
    result = small_run(None)
    result.save(tmp_path / "saved")
    fedem.Result.load(tmp_path / "saved").save(tmp_path / "again")
    for name in ("saved", "again"):
        assert reassess(tmp_path / name).summary["test_loss"] == result.summary["test_loss"]


def test_a_killed_runs_state_can_be_saved_and_shown(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    fedem.Result.load(tmp_path / "run").save(tmp_path / "saved")
    assert RunFolder(tmp_path / "saved").summary()["method"] == "fedem"


def test_a_run_that_ended_between_the_look_and_the_lock_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folder_module.holding

    def late(path: Path, refusal: str) -> AbstractContextManager[None]:
        """Hold the folder only once another has held it, trained and let it go."""
        monkeypatch.setattr(folder_module, "holding", real)
        small_run(path)
        return real(path, refusal)

    monkeypatch.setattr(folder_module, "holding", late)
    with pytest.raises(UserError, match="holds a run already"):
        small_run(tmp_path / "run", seed=1)
    assert RunFolder(tmp_path / "run").config().run.seed == 0


def test_two_processes_do_not_train_into_one_folder(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with RunFolder(tmp_path / "run").locked(), pytest.raises(UserError, match="Another process is training into"):
        small_run(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    small_run(tmp_path / "run", resume=True)  # and afterwards it may
