"""The section [defence]: what it takes, what it refuses, and whole runs with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY
from helpers import DIMENSION, StopError, make_federation, same_states, stop_at
from small_runs import SMALL
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.methods import METHODS
from fedem.methods.wrappers.defences import DEFENCES, Clip, Median, TrimmedMean
from fedem.runs.config import Config


def _run(out: Path | None = None, listener: Any = None, resume: bool = False, **defence: Any) -> fedem.Result:
    run = {"rounds": 4, "evaluate_every": 2, "checkpoint_every": 2, "clients_per_round": 0.5}
    config = Config.build({"run": run, "data": SMALL, "defence": defence})
    return fedem.run(config, config.make_data(), out=out, resume=resume, listener=listener)


def test_it_is_off_unless_asked_for_and_old_files_have_no_such_section(tmp_path: Path) -> None:
    assert Config.build().defence is None
    plain = _run(tmp_path / "old", name="none")
    path = tmp_path / "old" / "config.toml"
    text = path.read_text()
    assert '[defence]\nname = "none"\n' in text
    path.write_text(text.replace('[defence]\nname = "none"\n', ""))
    assert fedem.Result.load(tmp_path / "old").config.defence is None
    assert same_states(_run(tmp_path / "old", resume=True).state(), plain.state())


def test_files_and_callers_may_say_it_in_every_way(tmp_path: Path) -> None:
    config = Config.build({"defence": {"name": "clip", "tightest": 2.0}})
    assert config.defence == Clip(tightest=2.0)
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml())
    assert Config.build(fedem.runs.config.read_toml(path)).defence == config.defence
    ways: tuple[Any, ...] = ("median", {"name": "median"}, Median())
    found = [fedem.train(make_federation(), "fedavg", rounds=2, defence=defence) for defence in ways]
    assert all(same_states(result.state(), found[0].state()) for result in found)
    # Another name keeps what it has too.
    kept = Config.build({"defence": {"name": "clip", "share": 0.1, "max_weight": 0.2}}, {"defence": {"name": "median"}})
    assert kept.values("defence") == {"max_weight": 0.2}


@pytest.mark.parametrize("name", DEFENCES)
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    whole = _run(tmp_path / "whole", name=name, max_weight=0.2)
    with pytest.raises(StopError):
        _run(tmp_path / "stopped", stop_at(3), name=name, max_weight=0.2)
    resumed = _run(tmp_path / "stopped", resume=True, name=name, max_weight=0.2)
    assert same_states(whole.state(), resumed.state())
    with pytest.raises(UserError, match=r"defence\.max_weight"):
        _run(tmp_path / "stopped", resume=True, name=name, max_weight=0.3)


def test_an_honest_run_with_clipping_is_the_one_without() -> None:
    assert same_states(_run(name="clip").state(), _run(name="none").state())


def test_those_that_take_it_are_those_whose_server_averages_models() -> None:
    takes = {name for name, row in METHODS.items() if row.takes_defence}
    assert takes >= {"fedem", "fedavg", "fedprox", "ensemble", "ditto", "pfedme", "fedbabu", "fedper", "fedem-heads"}
    assert takes.isdisjoint(("local", "bfedem", "scaffold", "ifca", "qffl", "afl", "clustered", "mocha", "dsgd"))


REFUSED = sorted(name for name, row in METHODS.items() if not (row.takes_defence or row.mixer.over_graph))


@pytest.mark.parametrize("method", REFUSED)
def test_methods_whose_server_does_something_else_are_refused(method: str) -> None:
    told = f"defence.name is 'clip', but the server of method {method} .*; allowed with it: fedem, "
    with pytest.raises(UserError, match=told):
        fedem.train(make_federation(), method, rounds=1, defence="clip")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"defence": "krum"}, "Unknown defence 'krum'"),
        ({"defence": {"name": "none", "share": 0.1}}, "'none' takes no settings"),
        ({"defence": {"name": "median", "share": 0.1}}, r"Unknown key in \[defence\] 'share'"),
        ({"defence": {"name": "trimmed_mean", "share": 0.5}}, r"defence\.share is 0\.5; allowed: .*below 0\.5"),
        ({"defence": {"name": "mean", "max_weight": 0}}, r"defence\.max_weight is 0; allowed: above 0"),
        ({"defence": {"name": "clip", "tightest": 0.5}}, r"defence\.tightest is 0\.5; allowed: at least 1"),
        ({"defence": "clip", "diagnose_every": 1}, r"guarded by Clip can't be diagnosed.*; allowed: defence\.name"),
        (
            {"defence": {"name": "clip", "max_weight": 0.5}, "graph": "ring"},
            r"defence\.max_weight is 0\.5, but over a graph, and graph\.name is 'ring'",
        ),
        *(
            (
                {"defence": name, "graph": "ring"},
                f"defence.name is '{name}', but graph.name is 'ring'; allowed over a graph: clip, trimmed_mean",
            )
            for name in ("mean", "median", "geometric_median", "multi_krum")
        ),
    ],
)
def test_what_can_not_be_is_refused_before_work(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fedem.train(make_federation(), "fedem", rounds=1, **options)


def test_it_goes_with_whatever_else_a_run_may_have() -> None:
    """Label shares, local layers, clients held out of training, a server that steps, components that are found."""
    federation = make_federation("cross_entropy", sizes=(12, 9, 14, 8, 11)).hold_out(0.2, 0)
    settings: dict[str, Any] = {"defence": {"name": "trimmed_mean", "max_weight": 0.4}, "rounds": 3}
    model = nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    found = [
        fedem.train(federation, "fedem", label_shares=True, server="momentum", **settings),
        fedem.train(federation, "fedavg", model=model, local_layers="head", fine_tune_epochs=1, **settings),
        fedem.train(federation, "fedem", weighting="equal", measure_alpha_every=3, **settings),
        fedem.train(federation, "fedem", num_components="auto", initial_components=3, **settings),
        fedem.train(federation, "fedem-heads", model=model, compression={"updates": "int8"}, **settings),
    ]
    for result in found:
        assert 0 <= result.summary["unseen_test_accuracy"] <= 1
        assert result.config.defence == TrimmedMean(max_weight=0.4)


def test_graphs_take_it() -> None:
    plain = fedem.train(make_federation(), "dfedem", rounds=2, graph="complete")
    for name in ("clip", "trimmed_mean"):
        found = fedem.train(make_federation(), "dfedem", rounds=2, graph="complete", defence=name)
        assert found.state().shared.keys() == plain.state().shared.keys()
        assert found.state().memory.keys() == plain.state().memory.keys()
        assert torch.isfinite(found.state().shared["weight"]).all()
    local = fedem.train(
        make_federation(), "fedavg", rounds=2, graph="ring", model="mlp", local_layers="head", defence="clip"
    )
    assert local.summary["consensus_p"] > 0


def test_the_command_line_takes_it(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    out = tmp_path / "run"
    arguments = ["train", *TINY, "--method", "fedavg", "--set", "defence.name=clip", "--set", "defence.share=0.1"]
    code, _, err = run(*arguments, "--out", str(out))
    assert code == 0, err
    assert fedem.Result.load(out).config.defence == Clip(share=0.1)
    code, page, _ = run("settings", "defence.clip")
    assert code == 0
    assert "tightest" in page
