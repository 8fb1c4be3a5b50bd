"""A server that returns to an earlier round, and clients that follow it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deployments
import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import Deployed, equal, simulated
from flwr.app import Message

from fedem.core.errors import Notice, UserError
from fedem.core.tree import Tree, tree_index
from fedem.deploy.flower.messages import read_request, to_record, write_request
from fedem.deploy.flower.server import first_server_state
from fedem.deploy.history import History, rollback
from fedem.deploy.kept import Earlier, Kept
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import State

Run = Callable[..., tuple[int, str, str]]
ON = {"continue": True}


def _poison(since: int) -> Callable[[int, Message, Message], Message]:
    """Uploads of node 12 are of no use from a round on, though nobody notices."""

    def spoil(node: int, asked: Message, answer: Message) -> Message:
        if node == 12 and asked.metadata.message_type == "train" and int(asked.metadata.group_id) >= since:
            arrays = answer.content.array_records["arrays"]
            answer.content["arrays"] = type(arrays)(
                {name: type(array)(-array.numpy()) for name, array in arrays.items()}
            )
        return answer

    return spoil


def _as_if_never(there: Deployed, state: State, rounds: int) -> None:
    """The server and all clients are where a simulation is."""
    known = simulated(there.trainer, rounds)
    equal(state.shared, known.shared)
    equal(state.memory, known.memory)
    for position, name in enumerate(there.trainer.federation.names):
        equal(there.kept(name).personal, tree_index(known.personal, position))


@pytest.mark.parametrize(
    "sections",
    [{}, {"compression": {"updates": "int8"}}, {"method": {"name": "ditto"}, "server": {"name": "adam"}}],
    ids=["fedem", "residuals", "personal models"],
)
def test_a_run_that_is_rolled_back_goes_on_as_if_the_rounds_had_not_been(
    tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    there = Deployed(tmp_path, {"max-norm": 0.0}, run={"rounds": 4, "dtype": "float64"}, **sections)
    there.grid.spoil = _poison(2)
    there.serve()
    folder = RunFolder(there.run_folder)
    undone = there.lines[2:]
    assert History(folder).rounds() == [2, 3, 4]
    assert rollback(folder, 2) == 4
    assert [line["round"] for line in there.lines] == [1, 2]
    assert folder.summary() is None, "it is not complete any more"
    moved = (there.run_folder / "metrics.undone.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in moved] == [line | {"rolled_back_to": 2} for line in undone]
    there.grid.spoil = lambda node, asked, answer: answer
    _as_if_never(there, there.serve(**ON), 4)
    assert [line["round"] for line in there.lines] == [1, 2, 3, 4]
    assert History(folder).rounds() == [2, 3, 4]


def test_a_client_that_was_away_goes_back_when_it_returns(tmp_path: Path) -> None:
    """By then the server's rounds are beyond its own again."""
    there = Deployed(tmp_path, {"keep": 4}, run={"rounds": 4, "dtype": "float64"}, schedule={"name": "constant"})
    there.serve(rounds=3)
    name = there.nodes[13]["client"]
    then = there.kept(name)
    rollback(RunFolder(there.run_folder), 1)
    away = there.nodes.pop(13)
    there.serve(rounds=3, **ON)
    assert there.kept(name).round == then.round == 3
    there.nodes[13] = away
    starts: list[Tree] = []

    def listen(node: int, asked: Message, answer: Message) -> Message:
        if (node, asked.metadata.message_type) == (13, "train"):
            starts.append(there.kept(name).before or {})
        return answer

    there.grid.spoil = listen
    there.serve(rounds=4, **ON)
    (start,) = starts
    equal(start, tree_index(simulated(there.trainer, 1).personal, there.trainer.federation.position(name)))
    assert there.kept(name).rollbacks == 1


def test_a_client_that_joined_in_an_undone_round_starts_anew(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"rounds": 3, "dtype": "float64", "evaluate_every": 0})
    late = there.nodes.pop(13)

    def join(node: int, asked: Message, answer: Message) -> Message:
        if asked.metadata.group_id == "1":
            there.nodes[13] = late
        return answer

    there.grid.spoil = join
    there.serve()
    assert there.kept(late["client"]).joined == 2
    rollback(RunFolder(there.run_folder), 1)
    there.serve(**ON)
    kept = there.kept(late["client"])
    assert (kept.joined, kept.round) == (1, 3)
    first = tree_index(there.trainer.training.init().personal, there.trainer.federation.position(late["client"]))
    equal(kept.earlier[-1].personal, first)


def test_who_is_set_aside_stays_so_through_a_rollback(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"rounds": 3, "evaluate_every": 0})

    def spoil(node: int, asked: Message, answer: Message) -> Message:
        if (node, asked.metadata.group_id) == (12, "1"):
            answer.content.metric_records["metrics"]["num_samples"] = 10**12
        return answer

    there.grid.spoil = spoil
    there.serve(strikes=1)
    rollback(RunFolder(there.run_folder), 1)
    there.serve(**ON)
    assert [line["clients"] for line in there.lines] == [3, 2, 2]
    lines = [json.loads(line) for line in (there.run_folder / "uploads.jsonl").read_text().splitlines()]
    assert [len(line["uploads"]) for line in lines] == [3, 2, 2]
    undone = (there.run_folder / "uploads.undone.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in undone] == [2, 3]


def test_a_killed_rollback_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Deployed(tmp_path, run={"rounds": 3, "dtype": "float64"})
    there.serve()
    folder, save = RunFolder(there.run_folder), RunFolder.save

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save", kill)
    with pytest.raises(KeyboardInterrupt):
        rollback(folder, 1)
    assert folder.load()[0]["last"].round == 3
    monkeypatch.setattr(RunFolder, "save", save)
    monkeypatch.setattr(RunFolder, "open_metrics", kill)
    with pytest.raises(KeyboardInterrupt):
        rollback(folder, 1)
    monkeypatch.undo()
    assert len((there.run_folder / "metrics.undone.jsonl").read_text().splitlines()) == 2
    _as_if_never(there, there.serve(**ON), 3)
    assert [line["round"] for line in there.lines] == [1, 2, 3]


def test_a_second_rollback_goes_by_both(tmp_path: Path) -> None:
    there = Deployed(tmp_path, {"keep": 5}, run={"rounds": 4, "dtype": "float64"})
    there.serve()
    folder = RunFolder(there.run_folder)
    rollback(folder, 3)
    rollback(folder, 1)
    assert folder.load()[1]["rollbacks"] == [3, 1]
    assert History(folder).rounds() == [0, 1]
    _as_if_never(there, there.serve(**ON), 4)


def test_as_many_rounds_are_kept_as_asked_for(tmp_path: Path) -> None:
    there = Deployed(tmp_path, {"keep": 2}, run={"rounds": 4, "evaluate_every": 0})
    there.grid.run_config |= {"keep": 2}
    there.serve()
    folder = RunFolder(there.run_folder)
    assert History(folder).rounds() == [3, 4]
    assert [each.round for each in there.kept("shop B").earlier] == [4, 3]
    with pytest.raises(UserError, match="can't go back to round 2; kept are rounds: 3, 4"):
        rollback(folder, 2)
    states, _ = History(folder).at(4).load()
    equal(states["last"].shared, folder.load()[0]["last"].shared, 0)


def test_a_damaged_checkpoint_is_not_taken_for_that_of_another_round(tmp_path: Path) -> None:
    there = Deployed(tmp_path, {"keep": 5})
    there.serve()
    folder = RunFolder(there.run_folder)
    saved = History(folder).at(2).checkpoints
    # A file of its own: checkpoints share what they have in common.
    (saved / "round-000002.safetensors").unlink()
    (saved / "round-000002.safetensors").write_bytes(b"damaged")
    with (
        pytest.warns(Notice, match="The checkpoint before it is used"),
        pytest.raises(UserError, match="that of round 2 is damaged, and the one before it is of round 1"),
    ):
        rollback(folder, 2)
    assert folder.load().states["last"].round == 3


def test_lines_of_uploads_that_are_damaged_are_named(tmp_path: Path) -> None:
    there = Deployed(tmp_path, {"keep": 5})
    there.serve()
    path = there.run_folder / "uploads.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first.replace('"round"', '"rounds"', 1), *others]))
    with pytest.raises(UserError, match=r"uploads\.jsonl, line 1 can't be read: round is missing"):
        rollback(RunFolder(there.run_folder), 2)


def test_the_command(tmp_path: Path, run: Run) -> None:
    there = Deployed(tmp_path, run={"rounds": 3, "evaluate_every": 3})
    there.serve()
    place = there.run_folder
    code, said, _ = run("deploy", "rollback", place, "--list")
    assert (code, [line.split(",")[0] for line in said.splitlines()]) == (0, ["round 1", "round 2", "round 3"])
    assert "test_accuracy 0." in said
    assert run("deploy", "rollback", place)[0] == 2
    assert run("deploy", "rollback", place, "--list", "--to", "1")[0] == 2
    code, _, told = run("deploy", "rollback", place, "--to", "9")
    assert (code, "kept are rounds: 1, 2, 3." in told) == (2, True)
    code, said, _ = run("deploy", "rollback", place, "--to", "1")
    assert (code, "is at round 1 again, and was at round 3" in said) == (0, True)
    assert [line["round"] for line in there.lines] == [1]
    code, said, _ = run("show", place)
    words = "1 of 3 rounds are recorded; go on by `flwr run` with continue=true in its run config"
    assert (code, words in " ".join(said.split())) == (0, True)


def test_what_a_client_kept_is_found_by_round(tmp_path: Path) -> None:
    plan, _ = deployments.make_plan(deployments.write_sample(tmp_path))
    trees: list[Tree] = [{"log_weights": torch.full((3,), float(at))} for at in range(10)]
    kept = Kept(plan, 9, trees[9], earlier=[Earlier(7, trees[7]), Earlier(4, trees[4])], joined=2)
    for round_index, found in {12: 9, 9: 9, 8: 7, 7: 7, 6: 4, 4: 4}.items():
        then = kept.at(round_index)
        assert then is not None
        assert then.round == found
        assert then.personal is trees[found]
    assert kept.at(1) is None, "it had not taken part"
    with pytest.raises(UserError, match="is of rounds 9, 7, 4, and none of round 3"):
        kept.at(3)


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_file_of_before_there_were_several_rounds_is_read(tmp_path: Path, handed_over: bool) -> None:
    from safetensors.torch import save_file

    plan, _ = deployments.make_plan(deployments.write_sample(tmp_path))
    tensors = {"personal/w": torch.ones(2), "before/w": torch.zeros(2)} | (
        {"shared/u": torch.ones(1)} if handed_over else {}
    )
    content = {"round": 5, "trees": sorted({key.split("/")[0] for key in tensors}), "run": "r", "client": "a"}
    save_file(tensors, tmp_path / "old", {"kept": json.dumps(content | {"plan": plan.to_json()})})
    kept = Kept.load(tmp_path / "old")
    assert (kept.round, kept.earlier[0].round) == (5, 5 if handed_over else 4)
    equal(kept.before or {}, {"w": torch.zeros(2)})


@pytest.mark.parametrize("said", ["none", 3, [-1], [1.5]])
def test_a_client_refuses_rollbacks_that_no_server_says(tmp_path: Path, said: Any) -> None:
    there = Deployed(tmp_path, run={"rounds": 1})
    content = write_request(there.plan, to_record({}), {"experiment": "trial", "run": "r", "num_rounds": 1})
    content.config_records["config"].update({"round": 0, "learning_rate": 0.1, "rollbacks": said})
    shared = tree_index(first_server_state(there.plan).shared, 0)
    content["arrays"] = to_record(shared)
    with pytest.raises(UserError, match=r"rollbacks is .*; allowed: a list of rounds"):
        read_request(Message(content, 12, "train"), there.plan)
