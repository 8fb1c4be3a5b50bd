"""The section [compression]: what it takes, what it refuses, and whole runs with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.compression import SETTINGS
from benchmarks.compression import main as measure
from helpers import DIMENSION, StopError, make_federation, same_states, stop_at
from small_runs import SMALL
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.methods.wrappers.compression import Compression
from fedem.runs.config import Config

BOTH: dict[str, Any] = {"updates": "int8", "downloads": "int8", "threshold": 0.05}


def _run(out: Path | None = None, listener: Any = None, resume: bool = False, **compression: Any) -> fedem.Result:
    run = {"rounds": 5, "evaluate_every": 2, "checkpoint_every": 2, "clients_per_round": 0.5}
    config = Config.build({"run": run, "data": SMALL, "compression": compression})
    return fedem.run(config, config.make_data(), out=out, resume=resume, listener=listener)


def test_it_is_off_unless_asked_for_and_old_files_have_no_such_section(tmp_path: Path) -> None:
    config = Config.build()
    assert config.compression == Compression()
    assert not config.compression.is_on
    _run(tmp_path / "old")
    path = tmp_path / "old" / "config.toml"
    text = path.read_text()
    start = text.index("[compression]")
    path.write_text(text[:start] + text[text.index("\n[", start) + 1 :])
    assert "compression" not in path.read_text()
    assert fedem.Result.load(tmp_path / "old").config.compression == Compression()


def test_off_is_the_method_itself() -> None:
    first, second = _run(), _run(updates="none", downloads="none", threshold=0)
    assert same_states(first.states["last"], second.states["last"])
    assert first.states["last"].personal.keys() == {"log_weights"}


def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", **BOTH)

    with pytest.raises(StopError):
        _run(tmp_path / "stopped", stop_at(3), **BOTH)
    resumed = _run(tmp_path / "stopped", resume=True, **BOTH)
    assert same_states(whole.states["last"], resumed.states["last"])
    lines = [[(line["bytes_up"], line["bytes_down"]) for line in result.history] for result in (whole, resumed)]
    assert lines[0] == lines[1]
    name = whole.names[0]
    again = fedem.Result.load(tmp_path / "stopped").client(name).mixture
    assert torch.equal(again.log_weights, whole.client(name).mixture.log_weights)


def test_a_run_diverges_by_name() -> None:
    with pytest.raises(UserError, match="Training diverged"):
        fedem.train(
            make_federation("squared_error"),
            "fedavg",
            rounds=30,
            learning_rate=1e6,
            loss="squared_error",
            compression={"updates": "int8"},
        )


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        *((method, "more or less than a model") for method in ("scaffold", "ifca", "qffl", "pfedme")),
        *(
            (method, "don't all update one model")
            for method in ("local", "clustered", "afl", "l2sgd", "pfedhn", "dsgd")
        ),
    ],
)
def test_methods_that_send_something_else_are_refused(method: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fedem.train(make_federation(), method, rounds=1, compression={"updates": "int8"})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": {"updates": "int4"}}, "int4"),
        ({"compression": {"downloads": 8}}, "downloads"),
        ({"compression": {"threshold": 1.0}}, "below 1"),
        ({"compression": {"threshold": -0.1}}, "at least 0"),
        ({"compression": {"threshold": 0.5}, "num_components": 2}, "allowed: below 0.5"),
        ({"compression": {"updats": "int8"}}, "Did you mean 'updates'"),
        ({"compression": "int8"}, "a mapping of its settings"),
        ({"compression": {"downloads": "int8"}, "graph": "ring"}, "graph.name ring"),
        ({"compression": {"updates": "int8"}, "measure_alpha_every": 1}, "compressed messages"),
        ({"compression": {"updates": "int8"}, "diagnose_every": 1}, "compressed messages"),
    ],
)
def test_what_can_not_be_is_refused_before_work(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fedem.train(make_federation(), "fedem", rounds=1, **options)


def test_a_threshold_needs_mixture_weights() -> None:
    with pytest.raises(UserError, match="FedAvg has no mixture weights"):
        fedem.train(make_federation(), "fedavg", rounds=1, compression={"threshold": 0.1})


def test_layers_that_stay_with_their_clients_are_refused() -> None:
    with pytest.raises(UserError, match=r"run\.local_layers batch_norm"):
        fedem.train(
            make_federation(sizes=(8, 12)),
            "fedavg",
            model=lambda: nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
            rounds=1,
            local_layers="batch_norm",
            compression={"updates": "int8"},
        )


@pytest.mark.benchmark
def test_the_benchmark_runs_and_does_not_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--seeds", "1", "--folder", str(tmp_path / "runs"), "--picture", str(tmp_path / "it.png")]
    measure(arguments)
    first = capsys.readouterr().out
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == len(SETTINGS)
    times = [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    measure(arguments)
    assert capsys.readouterr().out == first
    assert times == [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
