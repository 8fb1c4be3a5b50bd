"""The model that the data decide: model.name = "auto"."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import StopError, same_states, stop_at

import fedem
from fedem.core.errors import UserError
from fedem.data.federation import Federation
from fedem.runs.config import Config
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import Trainer


def _xor(validation: int = 40, test_by: int = 1) -> Federation:
    """The class is whether two inputs have the same sign, which no linear model knows; -1: whether not, in testing."""
    rng = np.random.default_rng(0)

    def part(rows: int, by: int = 1) -> list[tuple[Any, Any]]:
        inputs = [rng.uniform(-1, 1, size=(rows, 2)).astype(np.float32) for _ in range(4)]
        return [(x, (by * x[:, 0] * x[:, 1] > 0).astype(int)) for x in inputs]

    return Federation.from_parts(part(80), part(validation), part(40, test_by), ["ann", "bob", "cem", "dan"])


def _linear(rows: int = 15) -> Federation:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(rows, 8)).astype(np.float32) for _ in range(4)]
    return Federation.from_clients([(x, x @ np.arange(8) + rng.normal(size=rows)) for x in inputs])


def _train(federation: Federation, method: str = "fedavg", **options: Any) -> fedem.Result:
    return fedem.train(federation, method, **{"rounds": 2, "model": "auto"} | options)


def test_a_target_that_is_not_linear_gets_a_perceptron() -> None:
    result = _train(_xor(), rounds=12)
    assert result.config.name("model") == "mlp"
    assert result.summary["test_accuracy"] > 0.8 > _train(_xor(), rounds=12, model="linear").summary["test_accuracy"]


def test_a_linear_target_with_few_rows_gets_a_linear_model() -> None:
    assert _train(_linear()).config.name("model") == "linear"


@pytest.mark.parametrize(("side", "name"), [(8, "cnn"), (7, "linear")])
def test_images_get_a_convolutional_network_unless_they_are_tiny(side: int, name: str) -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(12, 1, side, side)).astype(np.float32), rng.integers(0, 2, 12)) for _ in range(2)]
    federation = Federation.from_clients(pairs, validation=0 if side < 8 else 0.2)
    assert _train(federation, rounds=1).config.name("model") == name


@pytest.mark.parametrize("how", ["no validation samples", "a method of linear models alone"])
def test_a_linear_model_needs_no_trial(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    advanced: list[int] = []
    real = Trainer.advance

    def advance(trainer: Trainer, progress: Any) -> Any:
        advanced.append(trainer.config.run.rounds)
        return real(trainer, progress)

    monkeypatch.setattr(Trainer, "advance", advance)
    federation, method = (_xor(), "mocha") if "method" in how else (_xor(validation=0), "fedavg")
    assert _train(federation, method).config.name("model") == "linear"
    assert advanced == [2, 2]


def test_the_test_part_has_no_say() -> None:
    assert _train(_xor(test_by=-1)).config.name("model") == "mlp"


def test_clients_held_out_have_no_part_in_the_trial() -> None:
    result = _train(_xor(), unseen=0.25)
    assert result.config.name("model") == "mlp"
    assert result.summary["num_unseen_clients"] == 1


def test_the_folder_names_the_model_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 12, "checkpoint_every": 2}
    with pytest.raises(StopError):
        _train(_xor(), out=tmp_path / "cut", listener=stop_at(7), **options)
    assert RunFolder(tmp_path / "cut").config().name("model") == "mlp"
    cut = _train(_xor(), out=tmp_path / "cut", resume=True, **options)
    assert same_states(cut.state(), _train(_xor(), model="mlp", **options).state())
    assert fedem.Result.load(tmp_path / "cut").summary["test_loss"] == cut.summary["test_loss"]


def test_settings_of_a_model_that_is_not_known_are_refused() -> None:
    with pytest.raises(UserError, match="hidden"):
        Config.build({"model": {"name": "auto", "hidden": 3}})


def _write(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "a", "b", "y"])
        for client in ("ann", "bob", "cem", "dan"):
            for a, b in rng.uniform(-1, 1, size=(80, 2)):
                writer.writerow([client, a, b, "same" if a * b > 0 else "other"])
    return path


def test_the_command_line_says_which_model_and_why(run, tmp_path: Path) -> None:
    table = _write(tmp_path / "table.csv")
    options = ["--data", table, "--target-column", "y", "--method", "fedavg", "--rounds", "4"]
    code, _, told = run("train", *options, "--out", tmp_path / "run")
    assert code == 0
    line = next(line for line in told.splitlines() if "model mlp" in line)
    assert "model mlp (2 x 200 x 200 x 1, 41,001 parameters); validation accuracy " in line
    scores, after = line.rpartition("accuracy ")[2].split(" after ")
    better, worse = (float(score.rstrip("%")) for score in scores.split(" of linear")[0].split(" against "))
    assert better > worse
    assert after == "4 rounds"
    code, _, told = run("train", *options[:-1], "1", "--set", "model.name=linear", "--out", tmp_path / "given")
    assert code == 0
    assert "model linear (2 x 1, 3 parameters)\n" in told


def test_a_comparison_tries_models_once_for_a_run(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    real = Trainer.prepare.__func__  # a class method has it

    def prepare(cls: type[Trainer], config: Config, *given: Any, **more: Any) -> Trainer:
        prepared.append(config.name("model"))
        return real(cls, config, *given, **more)

    monkeypatch.setattr(Trainer, "prepare", classmethod(prepare))
    table = _write(tmp_path / "table.csv")
    options = ["--data", table, "--target-column", "y", "--methods", "fedavg", "--seeds", "1", "--rounds", "1"]
    code, _, told = run("compare", *options, "--set", "model.name=auto", "--out", tmp_path / "c", "-q")
    assert code == 0, told
    assert prepared == ["auto", "auto", "mlp", "linear"]
    assert run("compare", *options, "--set", "model.name=auto", "--out", tmp_path / "c", "--resume", "-q")[0] == 0
