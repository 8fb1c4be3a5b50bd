"""The section [server]: what it takes, what it refuses, and whole runs with it."""

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
from fedem.methods.wrappers.server_steps import SERVER_RULES, FedAdam, FedAvgM, FedYogi
from fedem.runs.config import Config


def _run(out: Path | None = None, listener: Any = None, resume: bool = False, **server: Any) -> fedem.Result:
    run = {"rounds": 5, "evaluate_every": 2, "checkpoint_every": 2, "clients_per_round": 0.5}
    config = Config.build({"run": run, "data": SMALL, "server": server})
    return fedem.run(config, config.make_data(), out=out, resume=resume, listener=listener)


def test_it_is_off_unless_asked_for_and_old_files_have_no_such_section(tmp_path: Path) -> None:
    assert Config.build().server is None
    plain = _run(tmp_path / "old", name="none")
    assert plain.state().memory == {}
    path = tmp_path / "old" / "config.toml"
    text = path.read_text()
    assert '[server]\nname = "none"\n' in text
    path.write_text(text.replace('[server]\nname = "none"\n', ""))
    assert fedem.Result.load(tmp_path / "old").config.server is None
    # Nor is it another run.
    assert same_states(_run(tmp_path / "old", resume=True).state(), plain.state())


def test_files_and_callers_may_say_it_in_every_way(tmp_path: Path) -> None:
    config = Config.build({"server": {"name": "adam", "tau": 0.01}})
    assert config.server == FedAdam(tau=0.01)
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml())
    assert Config.build(fedem.runs.config.read_toml(path)).server == config.server
    ways: tuple[Any, ...] = ("yogi", {"name": "yogi"}, FedYogi())
    found = [fedem.train(make_federation(), "fedavg", rounds=2, server=server) for server in ways]
    assert all(result.config.server == FedYogi() for result in found)
    assert all(same_states(result.state(), found[0].state()) for result in found)
    # Another name keeps what it has too.
    kept = Config.build({"server": {"name": "adam", "tau": 0.5, "beta1": 0.5}}, {"server": {"name": "adagrad"}})
    assert kept.values("server") == {"learning_rate": 0.1, "tau": 0.5}


@pytest.mark.parametrize("name", SERVER_RULES)
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    whole = _run(tmp_path / "whole", name=name)
    assert whole.state().memory

    with pytest.raises(StopError):
        _run(tmp_path / "stopped", stop_at(3), name=name)
    resumed = _run(tmp_path / "stopped", resume=True, name=name)
    assert same_states(whole.state(), resumed.state())
    client = whole.names[0]
    again = fedem.Result.load(tmp_path / "stopped").client(client).mixture
    assert torch.equal(again.components["weight"], whole.client(client).mixture.components["weight"])


def test_a_compressed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    def run(out: Path, **more: Any) -> fedem.Result:
        settings = {"compression": {"updates": "int8", "downloads": "int8"}, "server": "adam", "checkpoint_every": 2}
        return fedem.train(make_federation(), "fedem", rounds=5, clients_per_round=3, out=out, **settings, **more)

    whole = run(tmp_path / "whole")
    with pytest.raises(StopError):
        run(tmp_path / "stopped", listener=stop_at(3))
    assert same_states(whole.state(), run(tmp_path / "stopped", resume=True).state())


def test_a_run_is_gone_on_with_under_its_own_server_alone(tmp_path: Path) -> None:
    _run(tmp_path / "run", name="adam")
    with pytest.raises(UserError, match=r"server\.tau"):
        _run(tmp_path / "run", resume=True, name="adam", tau=0.1)


def test_those_that_take_it_are_those_whose_server_just_averages() -> None:
    takes = {name for name, row in METHODS.items() if row.takes_server_steps}
    assert takes >= {"fedem", "fedavg", "fedavg+", "fedprox", "ensemble", "apfl", "ditto", "perfedavg"}
    assert takes.isdisjoint(("local", "bfedem", "pfedme", "scaffold", "ifca", "qffl", "afl", "clustered", "dsgd"))


REFUSED = sorted(name for name, row in METHODS.items() if not (row.takes_server_steps or row.mixer.over_graph))


@pytest.mark.parametrize("method", REFUSED)
def test_methods_whose_server_does_something_else_are_refused(method: str) -> None:
    told = f"server.name is 'adam', but the server of method {method} .*; allowed with it: fedem, "
    with pytest.raises(UserError, match=told):
        fedem.train(make_federation(), method, rounds=1, server="adam")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"server": "adamw"}, "Unknown server 'adamw'"),
        ({"server": {"name": "none", "tau": 0.1}}, "'none' takes no settings"),
        ({"server": {"name": "adagrad", "beta1": 0.1}}, r"Unknown key in \[server\] 'beta1'"),
        ({"server": {"name": "adam", "beta2": 1.0}}, r"server\.beta2 is 1\.0; allowed: at least 0 and below 1"),
        ({"server": {"name": "adam", "tau": 0}}, r"server\.tau is 0; allowed: above 0"),
        ({"server": {"name": "momentum", "learning_rate": -1}}, r"server\.learning_rate is -1; allowed: above 0"),
        ({"server": "yogi", "graph": "ring"}, r"server\.name is 'yogi', but graph\.name is 'ring'"),
        (
            {"server": "yogi", "diagnose_every": 1},
            r"server steps by FedYogi can't be diagnosed.*; allowed: server\.name",
        ),
    ],
)
def test_what_can_not_be_is_refused_before_work(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fedem.train(make_federation(), "fedem", rounds=1, **options)


def test_a_method_over_a_graph_has_no_server() -> None:
    with pytest.raises(UserError, match="over a graph there is no server"):
        fedem.train(make_federation(), "dfedem", rounds=1, server="adam", graph="ring")


def test_it_goes_with_whatever_else_a_run_may_have() -> None:
    """Label shares, local layers, clients held out of training, fine-tuning, equal weighting, alpha."""
    federation = make_federation("cross_entropy", sizes=(12, 9, 14, 8)).hold_out(0.25, 0)
    settings: dict[str, Any] = {"server": {"name": "momentum", "momentum": 0.5}, "rounds": 3, "learning_rate": 0.1}
    shares = fedem.train(federation, "fedem", label_shares=True, **settings)
    assert not any("label" in name for name in shares.state().memory)
    model = nn.Sequential(nn.Linear(DIMENSION, 5), nn.Linear(5, 3))
    head = fedem.train(federation, "fedavg", model=model, local_layers="head", fine_tune_epochs=1, **settings)
    assert {name for name in head.state().memory if "/first/" in name} == {
        "base/moments/first/0.weight",
        "base/moments/first/0.bias",
    }
    equal = fedem.train(federation, "fedem", weighting="equal", measure_alpha_every=3, **settings)
    assert equal.summary["alpha_rounds"] == 1
    for result in (shares, head, equal):
        assert 0 <= result.summary["unseen_test_accuracy"] <= 1
        assert result.config.server == FedAvgM(momentum=0.5)


def test_the_command_line_takes_it(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    out = tmp_path / "run"
    arguments = ["train", *TINY, "--method", "fedavg", "--set", "server.name=adam", "--set", "server.tau=0.01"]
    code, _, err = run(*arguments, "--out", str(out))
    assert code == 0, err
    assert fedem.Result.load(out).config.server == FedAdam(tau=0.01)
    code, _, err = run("train", *TINY, "--method", "local", "--set", "server.name=adam", "--out", str(tmp_path / "no"))
    assert code != 0
    assert "allowed with it: fedem" in err
    code, page, _ = run("settings", "server.yogi")
    assert code == 0
    assert "beta2" in page


def test_methods_that_are_compared_have_each_its_own(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    common = ["compare", *TINY, "--methods", "local,fedavg", "--seeds", "1", "--out", str(tmp_path)]
    code, _, err = run(*common, "--set", "server.name=adam")
    assert code != 0
    assert "fedavg:server.name=adam" in err
    code, out, err = run(*common, "--set", "fedavg:server.name=adam")
    assert code == 0, err
    assert "server.name is" in out + err
