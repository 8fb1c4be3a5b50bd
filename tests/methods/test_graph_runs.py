"""Runs without a server, as a user starts, stops and resumes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import distance

import fedem
from fedem.core.errors import UserError
from fedem.graphs import GRAPHS, Ring
from fedem.runs.trainer import reassess


def test_a_user_trains_and_predicts_without_a_server(tmp_path: Path) -> None:
    data = fedem.Synthetic(num_clients=6, dimension=3, num_test=5).make(0)
    result = fedem.train(
        data.federation, "dfedem", graph={"name": "ring", "link_failure": 0.2}, rounds=3, out=tmp_path / "run"
    )
    assert 0 < result.summary["consensus_p"] < 1
    loaded = fedem.Result.load(tmp_path / "run")
    inputs = np.zeros((2, 3))
    assert torch.equal(loaded.predict("0", inputs), result.predict("0", inputs))
    by_mean = loaded.personalize(np.ones((4, 3)), np.array([0, 1, 0, 1]))
    by_peer = loaded.personalize(np.ones((4, 3)), np.array([0, 1, 0, 1]), beside="3")
    assert not torch.equal(by_mean.predict(inputs + 1), by_peer.predict(inputs + 1))
    with pytest.raises(UserError, match="Unknown client 'nobody'"):
        loaded.personalize(np.ones((4, 3)), np.array([0, 1, 0, 1]), beside="nobody")


@pytest.mark.parametrize(
    "method", ["fedem", "fedavg", "fedprox", "ditto", "apfl", "pfedme", "perfedavg", "fedavg+", "ensemble"]
)
def test_any_method_that_averages_models_goes_over_a_graph(method: str) -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    result = fedem.train(data.federation, method, graph="complete", rounds=2)
    assert result.summary["consensus_p"] == pytest.approx(1)


@pytest.mark.parametrize("method", ["mocha", "clustered", "scaffold", "ifca", "local", "qffl"])
def test_methods_that_need_a_server_say_so(method: str) -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    with pytest.raises(UserError, match=f"graph.name is 'ring', but method {method} needs a server; allowed"):
        fedem.train(data.federation, method, graph="ring", rounds=2)


def test_a_method_without_a_server_needs_a_graph() -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    with pytest.raises(UserError, match=r"Method dfedem needs a graph, and graph\.name is 'none'; allowed: "):
        fedem.train(data.federation, "dfedem", graph="none", rounds=2)
    with pytest.raises(UserError, match="rings"):
        fedem.train(data.federation, "dfedem", graph="rings", rounds=2)


def test_a_disconnected_graph_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = fedem.Synthetic(num_clients=8, dimension=3, num_test=5).make(0)
    with pytest.raises(UserError, match="connected"):
        fedem.train(
            data.federation,
            "dfedem",
            graph={"name": "erdos_renyi", "probability": 0.01},
            rounds=2,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_every_graph_trains() -> None:
    data = fedem.Synthetic(num_clients=12, dimension=3, num_test=5).make(0)
    for name in GRAPHS.keys() - {"file"}:
        assert fedem.train(data.federation, "dfedem", graph=name, rounds=1).summary["consensus_p"] > 0


def test_a_graph_may_be_given_as_an_object() -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    given, named = (
        fedem.train(data.federation, "dfedem", graph=graph, rounds=2)
        for graph in (Ring(laziness=0.25, scale="steps"), {"name": "ring", "laziness": 0.25})
    )
    assert given.config.sections["graph"] == named.config.sections["graph"]
    assert given.summary["consensus_p"] == named.summary["consensus_p"]


@pytest.mark.parametrize(("method", "options"), [("ditto", {}), ("dfedem", {"solver": "newton"}), ("apfl", {})])
def test_steps_are_scaled_only_where_the_rate_is_their_length(method: str, options: dict[str, str]) -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    with pytest.raises(UserError, match=r"graph\.scale is 'steps', but .* allowed: updates"):
        fedem.train(data.federation, method, graph={"name": "ring", "scale": "steps"}, rounds=1, **options)


def test_a_run_goes_on_without_the_file_of_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    links = Path("links.csv")
    links.write_text("".join(f"{index},{(index + 1) % 6}\n" for index in range(6)))
    config = fedem.Config.build(
        {
            "data": {"name": "synthetic", "num_clients": 6, "dimension": 3, "num_test": 5},
            "method": {"name": "dfedem"},
            "graph": {"name": "file", "path": "links.csv", "link_failure": 0.2},
            "run": {"rounds": 4, "checkpoint_every": 2},
        }
    )
    assert config.graph == fedem.graphs.File(path=str(tmp_path / "links.csv"), link_failure=0.2, scale="steps")
    whole = fedem.run(config, config.make_data(), out="whole")

    def stop(record: dict[str, float]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedem.run(config, config.make_data(), out="stopped", listener=stop)
    links.unlink()
    resumed = fedem.run(config, config.make_data(), out="stopped", resume=True)
    assert distance(resumed.state(), whole.state()) == 0
    assert reassess("whole").summary["test_loss"] == whole.summary["test_loss"]


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    data = fedem.Synthetic(num_clients=6, dimension=3, num_test=5).make(0)
    path, found = tmp_path / "links.csv", []
    for pairs in ([(t, (t + 1) % 6) for t in range(6)], [(s, t) for t in range(6) for s in range(t)]):
        path.write_text("".join(f"{first},{second}\n" for first, second in pairs))
        result = fedem.train(data.federation, "dfedem", graph={"name": "file", "path": str(path)}, rounds=1)
        found.append(result.summary["consensus_p"])
    assert found[1] == pytest.approx(1)
    assert found[0] < 0.9


def test_a_comparison_says_which_seed_has_a_broken_graph(tmp_path: Path, run) -> None:
    code, _, err = run(
        *("compare", "--methods", "dfedem", "--seeds", "2", "--out", tmp_path / "compared", "--rounds", "1"),
        *("--set", "data.num_clients=8", "--set", "data.dimension=3", "--set", "data.num_test=5"),
        *("--set", "dfedem:graph.probability=0.01"),
    )
    assert code == 2
    assert "dfedem, seed 0: The graph has" in " ".join(err.split())


def test_layers_that_stay_with_clients_can_not_start_apart() -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    graph = {"name": "ring", "start": "apart"}
    with pytest.raises(UserError, match=r"graph\.start is 'apart' and run\.local_layers 'batch_norm'"):
        fedem.train(data.federation, "dfedem", model=model, graph=graph, local_layers="batch_norm", rounds=1)
