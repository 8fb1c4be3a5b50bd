"""The Python interface and run folders."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_federation
from torch import nn

import fedem
from fedem.checkpoint import load_checkpoint, same_states
from fedem.errors import UserError
from fedem.runs import RunFolder
from fedem.training import reassess

SMALL = {"num_clients": 12, "dimension": 6, "num_test": 40, "num_validation": 20}
REQUIRED = {
    "method", "data", "rounds", "seed", "num_clients", "num_components", "num_parameters", "test_accuracy",
    "test_accuracy_unweighted", "bottom_decile", "train_accuracy", "test_loss", "train_loss", "oracle_accuracy",
    "unseen_test_accuracy", "seconds_per_round", "seconds_total", "bytes_up_per_round", "bytes_down_per_round",
}  # fmt: skip


def _config(**run: object) -> fedem.Config:
    return fedem.Config.build({"run": {"rounds": 6, "evaluate_every": 2, "checkpoint_every": 2} | run, "data": SMALL})


def _run(out: Path | None, resume: bool = False, **run: object) -> fedem.Result:
    config = _config(**run)
    return fedem.run(config, config.data.make(config.run.seed), out=out, resume=resume)


def test_a_run_folder_holds_everything(tmp_path: Path) -> None:
    result = _run(tmp_path / "run", unseen=0.25)
    folder = tmp_path / "run"
    assert tomllib.loads((folder / "config.toml").read_text())["loss"] == {"name": "logistic"}
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
    first = _run(tmp_path / "run", clients_per_round=0.5)
    config = RunFolder(tmp_path / "run").config()
    second = fedem.run(config, config.data.make(config.run.seed))
    assert same_states(first.state(), second.state())


def test_tensorboard_events_carry_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = _run(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("test_accuracy")
    assert [scalar.step for scalar in scalars] == [2, 4, 6]
    assert scalars[-1].value == pytest.approx(result.summary["test_accuracy"], abs=1e-6)


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_resuming_gives_the_same_bits(tmp_path: Path, stop: int) -> None:
    whole = _run(tmp_path / "whole", clients_per_round=0.5)

    class StopError(Exception):
        pass

    def interrupt(record: dict[str, object]) -> None:
        if record["round"] == stop:
            raise StopError

    config = _config(clients_per_round=0.5)
    with pytest.raises(StopError):
        fedem.run(config, config.data.make(0), out=tmp_path / "cut", listener=interrupt)
    resumed = _run(tmp_path / "cut", resume=True, clients_per_round=0.5)
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
    whole = _run(tmp_path / "run")
    again = _run(tmp_path / "run", resume=True)
    assert same_states(whole.state(), again.state())
    assert len(RunFolder(tmp_path / "run").metrics()) == 6


def test_a_torn_last_line_is_dropped_on_resuming(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert len(RunFolder(tmp_path / "run").metrics()) == 5


def test_a_stray_tensor_file_of_a_killed_run_is_not_trusted(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    stray = tmp_path / "run" / "checkpoints" / "round-000001.safetensors"
    stray.write_bytes(b"half a file")
    _run(tmp_path / "other")
    states, _ = load_checkpoint(tmp_path / "run" / "checkpoints")
    RunFolder(tmp_path / "run").save({"last": states["last"]}, {})
    assert not stray.exists()


def test_other_settings_are_refused_on_resuming(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    with pytest.raises(UserError, match=r"other settings \(run\.seed\)"):
        _run(tmp_path / "run", resume=True, seed=1)
    _run(tmp_path / "run", resume=True, chunk_size=2, engine="stacked")  # these change no result


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        _run(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="can't be written"):
        _run(tmp_path / "file" / "run")


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to resume"):
        _run(tmp_path / "none", resume=True)
    with pytest.raises(UserError, match="resume needs the folder"):
        _run(None, resume=True)


def test_last_and_best_are_told_apart(tmp_path: Path) -> None:
    result = _run(tmp_path / "run", rounds=20)
    validations = {line["round"]: line["validation_accuracy"] for line in result.history if "test_loss" in line}
    best = max(validations, key=lambda k: (validations[k], -k))  # the first among equals
    assert result.summary["best"]["round"] == best
    assert result.state("best").round == best
    assert result.state("last").round == 20
    at_best = next(line for line in result.history if line["round"] == best)
    assert result.summary["best"]["test_accuracy"] == pytest.approx(at_best["test_accuracy"])
    assert result.summary["test_accuracy"] == pytest.approx(result.history[-1]["test_accuracy"])


def test_without_validation_there_is_no_best() -> None:
    federation = fedem.Federation.from_clients([(np.eye(4), [0, 1, 0, 1])] * 2, validation=0)
    result = fedem.train(federation, rounds=2)
    assert result.summary["best"] is None
    with pytest.raises(UserError, match="Unknown state 'best'"):
        result.state("best")


def test_save_and_load_give_the_same_predictions(tmp_path: Path) -> None:
    federation = make_federation()
    result = fedem.train(federation, num_components=2, rounds=3, dtype="float64")
    inputs = federation.test.inputs[:5]
    result.save(tmp_path / "saved")
    loaded = fedem.Result.load(tmp_path / "saved")
    assert torch.equal(result.predict("cem", inputs), loaded.predict("cem", inputs))
    assert loaded.names == result.names
    assert dict(loaded.summary) == json.loads(json.dumps(result.summary))
    weights = [r.personalize(*federation.test.client(0)).mixture_weights for r in (result, loaded)]
    assert torch.equal(*weights)


def test_a_model_of_the_users_own_must_be_given_again_to_load(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))

    federation = make_federation()
    result = fedem.train(federation, model=build, rounds=2, out=tmp_path / "run")
    with pytest.raises(UserError, match="pass model="):
        fedem.Result.load(tmp_path / "run")
    loaded = fedem.Result.load(tmp_path / "run", model=build)
    inputs = federation.test.inputs[:5]
    assert torch.equal(result.predict("ann", inputs), loaded.predict("ann", inputs))


def test_predictions_are_probabilities_and_personal() -> None:
    federation = make_federation("cross_entropy")
    result = fedem.train(federation, rounds=15, learning_rate=0.5)
    inputs = federation.test.inputs
    first, second = result.predict("ann", inputs), result.predict("dan", inputs)
    assert first.shape == (len(inputs), 3)
    torch.testing.assert_close(first.sum(1), torch.ones(len(inputs)))
    assert not torch.allclose(first, second, atol=1e-3)


def test_regression_predicts_means() -> None:
    federation = make_federation("squared_error")
    result = fedem.train(federation, method="local", rounds=300, learning_rate=0.05, batch_size=0)
    assert result.summary["train_mean_squared_error"] < 0.2
    inputs, targets = federation.train.client(3)
    errors = (result.predict("dan", inputs)[:, 0] - targets).square().mean()
    assert float(errors) < 0.2
    assert "test_accuracy" not in result.summary


def test_unseen_clients_from_python() -> None:
    data = fedem.Synthetic(**SMALL).make(0)
    result = fedem.train(data.federation, rounds=10, learning_rate=0.5)
    for count in (0, 1, 5, 40):
        personal = result.personalize(*(part[:count] for part in data.federation.test.client(2)))
        assert float(personal.mixture_weights.sum()) == pytest.approx(1, abs=1e-6)
        assert personal.predict(data.federation.test.inputs[:3]).shape == (3, 2)
    nothing = result.personalize(np.zeros((0, 6)), [])
    torch.testing.assert_close(nothing.mixture_weights, torch.full((3,), 1 / 3))
    one_step = result.personalize(*data.federation.test.client(2), max_iterations=1)
    assert not torch.allclose(one_step.mixture_weights, personal.mixture_weights, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: fedem.train(f, method="fedm"), "Unknown method 'fedm'.*Did you mean 'fedem'"),
        (lambda f: fedem.train(f, num_component=3), "Unknown option 'num_component'.*'num_components'"),
        (lambda f: fedem.train(f, method="fedavg", num_components=3), "Unknown option 'num_components'"),
        (lambda f: fedem.train(f, num_components=0), "num_components is 0; allowed: at least 1"),
        (lambda f: fedem.train(f, rounds=0), "rounds is 0"),
        (lambda f: fedem.train(f, clients_per_round=9), "whole number of clients from 2 to 5"),
        (lambda f: fedem.train(f, clients_per_round=1.5), "clients_per_round is 1.5"),
        (lambda f: fedem.train(f, loss="hinge"), "Unknown loss 'hinge'"),
        (lambda f: fedem.train(f, loss="squared_error", engine="fast"), "engine"),
        (lambda f: fedem.train(f, device="tpu"), "Unknown device 'tpu'"),
        (lambda f: fedem.train(f, unseen=0.99), "leaves none to train on"),
        (lambda f: fedem.train(make_federation("squared_error"), learning_rate=1e30, rounds=3), "diverged in round"),
        (lambda f: fedem.train(f, rounds=1).predict("zoe", np.ones((1, 4))), "Unknown client 'zoe'"),
        (lambda f: fedem.train(f, rounds=1).predict("ann", np.ones((1, 3))), r"inputs of shape \[1, 3\]"),
        (lambda f: fedem.train(f, rounds=1).predict("ann", np.full((1, 4), np.nan)), "NaN"),
        (lambda f: fedem.train(f, rounds=1).personalize(np.ones((1, 4)), [7]), "allowed: 0 to 1"),
        (lambda f: fedem.train(f, method="local", rounds=1).personalize(np.ones((1, 4)), [1]), "another method"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(make_federation())


def test_client_sampling_counts_in_the_bytes() -> None:
    result = fedem.train(make_federation(), rounds=2, clients_per_round=2, num_components=2)
    assert result.summary["bytes_up_per_round"] == 2 * 2 * 5 * 4  # clients, components, parameters, bytes a float


def test_scores_can_be_made_again_from_the_folder(tmp_path: Path) -> None:
    result = _run(tmp_path / "run", unseen=0.25)
    again = reassess(tmp_path / "run")
    for key, value in result.summary.items():
        if not key.startswith(("seconds", "peak_", "clients_together")):  # what training cost is not made again
            assert again.summary[key] == value, key


def test_the_truth_is_recovered_when_it_can_be() -> None:
    data = fedem.Synthetic(
        num_clients=40, num_components=2, dimension=60, clustered=True, min_samples=150, num_test=50
    ).make(1)
    result = fedem.train(
        data.federation, num_components=2, truth=data.truth, rounds=80, learning_rate=2.0, momentum=0.9, seed=1
    )
    recovery = result.summary["recovery"]
    assert recovery["cluster_accuracy"] == 1
    assert max(recovery["component_distances"]) < 0.02


def test_more_components_than_the_truth_has_are_still_compared() -> None:
    data = fedem.Synthetic(**SMALL).make(0)
    result = fedem.train(data.federation, num_components=5, truth=data.truth, rounds=2)
    assert len(result.summary["recovery"]["component_distances"]) == 3


def test_other_data_are_refused_on_resuming(tmp_path: Path) -> None:
    fedem.train(make_federation(), rounds=2, out=tmp_path / "run")
    with pytest.raises(UserError, match="The data are not those"):
        fedem.train(make_federation(seed=1), rounds=2, out=tmp_path / "run", resume=True)


def test_clients_fitted_later_are_not_scored_on_the_runs_own_data(tmp_path: Path) -> None:
    result = _run(tmp_path / "run")
    new = fedem.Synthetic(**SMALL).make(7).federation
    result.with_unseen(new).save(tmp_path / "new")
    with pytest.raises(UserError, match="were fitted after training"):
        reassess(tmp_path / "new")


def test_the_time_of_a_resumed_run_counts_all_of_it(tmp_path: Path) -> None:
    first = _run(tmp_path / "run")
    again = _run(tmp_path / "run", resume=True)
    assert again.summary["seconds_total"] >= sum(line["seconds"] for line in first.history)


def test_a_folder_with_remains_of_a_run_is_refused(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    (tmp_path / "run" / "config.toml").unlink()
    with pytest.raises(UserError, match="holds a run already"):
        _run(tmp_path / "run", seed=5)


def test_a_saved_result_can_be_scored_and_gone_on_with(tmp_path: Path) -> None:
    result = _run(None)
    result.save(tmp_path / "saved")
    fedem.Result.load(tmp_path / "saved").save(tmp_path / "again")
    for name in ("saved", "again"):
        assert reassess(tmp_path / name).summary["test_loss"] == result.summary["test_loss"]


def test_a_killed_runs_state_can_be_saved_and_shown(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    fedem.Result.load(tmp_path / "run").save(tmp_path / "saved")
    assert RunFolder(tmp_path / "saved").summary()["method"] == "fedem"


def test_scores_that_are_not_finite_do_not_stop_a_run(tmp_path: Path) -> None:
    federation = make_federation("squared_error", dtype=np.float32)
    federation.test.inputs[0] = 1e25
    result = fedem.train(federation, rounds=2, learning_rate=0.01, out=tmp_path / "run")
    assert math.isinf(result.summary["test_mean_squared_error"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_mean_squared_error"] is None


def test_inputs_of_another_kind_are_refused() -> None:
    bytes_ = np.random.default_rng(0).integers(0, 255, (20, 4), dtype=np.uint8)
    targets = np.arange(20) % 2
    on_bytes = fedem.train(fedem.Federation.from_clients([(bytes_, targets)]), rounds=1)
    on_floats = fedem.train(fedem.Federation.from_clients([(bytes_.astype(np.float32), targets)]), rounds=1)
    for result, inputs in ((on_bytes, bytes_.astype(np.float32)), (on_floats, bytes_)):
        with pytest.raises(UserError, match="as in training"):
            result.predict("0", inputs)
        with pytest.raises(UserError, match="as in training"):
            result.personalize(inputs, targets)
    whole = bytes_.astype(np.int64)
    assert torch.equal(on_floats.predict("0", whole), on_floats.predict("0", whole.astype(np.float32)))


def test_another_solver_does_not_inherit_a_learning_rate() -> None:
    assert fedem.Config.build({"solver": {"name": "adam"}}).schedule.learning_rate == 0.001
    assert fedem.Config.build({"solver": {"name": "adam"}}).solver.weight_decay == 0
    explicit = fedem.Config.build({"solver": {"name": "adam"}, "schedule": {"learning_rate": 0.02}})
    assert explicit.schedule.learning_rate == 0.02


def test_data_are_an_argument_and_not_an_option() -> None:
    with pytest.raises(UserError, match="the federation is the first argument"):
        fedem.train(make_federation(), data="synthetic")


def test_clients_held_out_may_have_parts_that_the_others_lack(tmp_path: Path) -> None:
    pairs = [(np.eye(4)[:1], [1])] * 3 + [(np.eye(4), [0, 1, 0, 1])] * 3
    federation = fedem.Federation.from_clients(pairs, validation=0.25, test=0.25)
    seen, held = federation.take(torch.arange(3)), federation.take(torch.arange(3, 6))
    parted = fedem.Federation(seen.names, seen.train, seen.validation, seen.test, unseen=held)
    result = fedem.train(parted, rounds=1, num_components=2, out=tmp_path / "run")
    assert "unseen_test_accuracy" in result.summary
    assert "test_accuracy" not in result.summary
    rows = list(csv.DictReader((tmp_path / "run/clients.csv").read_text().splitlines()))
    assert [row["test_accuracy"] == "" for row in rows] == [True] * 3 + [False] * 3


def test_two_processes_do_not_train_into_one_folder(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with RunFolder(tmp_path / "run").locked(), pytest.raises(UserError, match="Another process is training into"):
        _run(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    _run(tmp_path / "run", resume=True)  # and afterwards it may
