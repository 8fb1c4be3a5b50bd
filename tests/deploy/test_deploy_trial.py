"""``fedem deploy trial`` refuses before anything is started; what it starts is tried in test_deploy_network.py."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedem.core.errors import UserError
from fedem.deploy.flower import trial
from fedem.deploy.flower.trial import SHORT, choose_clients, draw_clients, run_trial
from fedem.runs.config import Config, RunSettings
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import RoundCosts

pytest.importorskip("flwr")
SUMMARY = {"method": "fedavg", "data": "file", "rounds": 1, "seed": 0, "num_clients": 2, "num_components": 1}


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise AssertionError("a network was started")

    monkeypatch.setattr(trial, "Loopback", refuse)


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    path = tmp_path / "shops.csv"
    with path.open("w", newline="") as file:
        rows = [(f"shop {number % 3}", number % 20, number % 2) for number in range(60)]
        csv.writer(file).writerows([("shop", "size", "y"), *rows])
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "1"], "trial of 1 nodes is asked for; allowed: 2 to 50"),
        (["--timeout", "0"], "--timeout is 0.0; allowed: above 0"),
        (["--rounds", "0"], "run.rounds is 0"),
        (["--method", "dfedem"], "dfedem"),
        (["--data", "nothing.csv"], "nothing.csv"),
        (["--set", "run.unseen=0.5"], "run.unseen is 0.5"),
        (["--set", "compression.downloads=int8"], "compression.downloads is 'int8'"),
    ],
)
def test_what_can_t_be_tried_is_refused(run, words: list[str], message: str) -> None:
    code, out, err = run("deploy", "trial", *words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_file_with_too_few_clients_is_refused(run, shops: Path) -> None:
    code, _, err = run("deploy", "trial", "--nodes", "4", "--data", str(shops), "--client-column", "shop")
    assert code == 2
    assert "has 3 clients; allowed for a trial of 4 nodes: at least as many" in " ".join(err.split())
    assert [client.name for client in choose_clients(["a", "b", "c"], shops, 2)] == ["a", "b"]


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").write_text("precious")
    code, _, err = run("deploy", "trial", "--keep", str(tmp_path / "kept"))
    assert code == 2
    assert "kept is there already; allowed: a new or an empty folder" in " ".join(err.split())
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["mine"]


def test_nothing_is_left_when_a_trial_fails(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert run("deploy", "trial", "--method", "dfedem")[0] == 2
    assert not list(tmp_path.iterdir())


def test_each_client_gets_a_file_of_its_own_that_the_seed_decides(tmp_path: Path) -> None:
    first, again, other = (draw_clients(tmp_path / name, 3, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert [client.name for client in first] == [client.data.stem for client in first]
    columns = [[np.load(client.data)["x"] for client in clients] for clients in (first, again, other)]
    assert all(np.array_equal(one, two) for one, two in zip(columns[0], columns[1], strict=True))
    assert not np.array_equal(columns[0][0], columns[2][0])
    assert not np.array_equal(columns[0][0][:5], columns[0][1][:5])
    config = Config.build(SHORT, {"data": {"name": "file", "path": str(tmp_path / "a")}})
    assert config.make_data().federation.names == tuple(client.name for client in first)


def test_an_app_that_is_there_already_is_not_replaced(tmp_path: Path) -> None:
    clients = draw_clients(tmp_path / "data", 2, 0)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "app.py").write_text("mine")
    config = Config.build(SHORT, {"data": {"name": "file", "path": str(tmp_path / "data")}})
    with pytest.raises(UserError, match="app is there already"):
        run_trial(tmp_path, config, clients, print, 120.0)


class FakeProgram:
    """A program that has said something and is alive, or has ended."""

    def __init__(self, said: str = "", code: int | None = None):
        self.name, self._said, self.process = "node-1", said, SimpleNamespace(poll=lambda: code, returncode=code)

    def output(self) -> str:
        return self._said

    def failure(self, why: str) -> UserError:
        return UserError(f"{self.name} {why}")


def follow(
    folder: Path, lines: list[int], *, complete: bool, node: FakeProgram, hangs: bool = False
) -> list[dict[str, Any]]:
    """Follow a run that is over, or hangs, whose rounds had so many clients; returns what the listener heard."""
    (folder / "metrics.jsonl").write_text(
        "".join(RunFolder.line(RoundCosts(at + 1, 0.1, count, 1.0, 0, 0)._asdict()) for at, count in enumerate(lines))
    )
    if complete:
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
    network: Any = SimpleNamespace(superlink=FakeProgram(), executor=FakeProgram())
    heard: list[dict[str, Any]] = []
    # Programs that are not there, in the place of real ones.
    run: Any = FakeProgram("INFO : fine\nWARNING : Client 'a' is refused", None if hangs else 0)
    nodes: list[Any] = [FakeProgram(), node]
    trial._follow(run, network, nodes, RunFolder(folder), heard.append, 0.0)
    return heard


def test_a_run_is_told_round_by_round(tmp_path: Path) -> None:
    heard = follow(tmp_path, [2, 2], complete=True, node=FakeProgram())
    assert [record["round"] for record in heard] == [1, 2]


def test_a_trial_says_why_it_went_wrong(tmp_path: Path) -> None:
    broken = FakeProgram("INFO : read\nERROR : no file patients.csv")
    with pytest.raises(UserError, match=r"(?s)2 nodes answered in rounds 2:.*Client 'a' is refused.*no file patients"):
        follow(tmp_path, [2, 1], complete=True, node=broken)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(UserError, match=r"(?s)did not come to its end.*node-1: ERROR : no file patients.csv"):
        follow(tmp_path, [2], complete=False, node=broken)
    with pytest.raises(UserError, match="ended with code 3 amid the run"):
        follow(tmp_path, [2], complete=False, node=FakeProgram(code=3))


def test_a_trial_that_hangs_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has not ended within 0 s, and 2 rounds are done"):
        follow(tmp_path, [2, 2], complete=False, node=FakeProgram(), hangs=True)


@pytest.mark.parametrize(("evaluate_every", "messages"), [(0, 9), (4, 10), (1, 14)])
def test_a_trial_has_time_for_all_its_messages(evaluate_every: int, messages: int) -> None:
    run = RunSettings(rounds=6, evaluate_every=evaluate_every)
    assert trial._longest_time(run, 50.0) - trial._longest_time(run, 40.0) == 10 * messages
    assert trial._longest_time(run, 50.0) > 50 * messages


def test_certificates_and_keys_are_made_by_commands(run, tmp_path: Path) -> None:
    code, out, _ = run("deploy", "certificates", str(tmp_path / "made"), "--host", "federation.example")
    assert code == 0
    assert [Path(line).name for line in out.splitlines()] == ["ca.crt", "server.crt", "server.key"]
    assert run("deploy", "key", str(tmp_path / "north"))[0] == 0
    assert (tmp_path / "north.pub").exists()
    code, _, err = run("deploy", "key", str(tmp_path / "north"))
    assert code == 2
    assert "never overwritten" in " ".join(err.split())
