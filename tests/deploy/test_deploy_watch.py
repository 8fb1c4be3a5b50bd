"""What a server notices of hostile or broken clients, and that honest ones of other sizes and kinds are left alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shops
import torch

pytest.importorskip("flwr")

from flower_grid import Deployed, equal, scaled, simulated
from flwr.app import Message

from fedem.core.errors import UserError
from fedem.core.tree import Tree, tree_index
from fedem.deploy.flower.messages import Reply
from fedem.deploy.flower.server import first_server_state
from fedem.deploy.flower.watch import Watch, check_scores, compare
from fedem.deploy.node import Node, ScoreSums
from fedem.deploy.plan import RunConfig

NAMES = ("a", "b", "c", "d")


def _shops(folder: Path, sizes: tuple[int, ...]) -> Path:
    """A file of clients with these numbers of rows, every second of which is of another kind."""
    names = tuple(f"client {at}" for at in range(len(sizes)))
    made = shops.make_shops(max(sizes), names=names)
    rows = [
        row for name, size in zip(names, sizes, strict=True) for row in [r for r in made if r["shop"] == name][:size]
    ]
    return shops.write_shops(folder / "shops.csv", rows)


def _noticed(there: Deployed) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (there.run_folder / "uploads.jsonl").read_text().splitlines()]


def _left_out(there: Deployed) -> list[list[str]]:
    return [[entry["left_out"] for entry in line["uploads"] if "left_out" in entry] for line in _noticed(there)]


def _says(key: str, value: Any, kind: str = "train") -> Callable[[int, Message, Message], Message]:
    """Node 12 says another value in its answers to messages of this kind; ``value`` may be one for each round."""

    def spoil(node: int, asked: Message, answer: Message) -> Message:
        if node == 12 and asked.metadata.message_type == kind:
            done = int(asked.metadata.group_id)
            answer.content.metric_records["metrics"][key] = value[done] if isinstance(value, list) else value
        return answer

    return spoil


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "12,000, max-ratio 1000 times what is usual here"),
        ({"max-samples": 500}, "max-samples 500"),
    ],
)
def test_a_client_does_not_take_the_model_by_a_number_of_samples(
    tmp_path: Path, settings: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "evaluate_every": 0, "dtype": "float64"})
    shared = tree_index(first_server_state(there.plan).shared, 0)
    names = [there.nodes[node]["client"] for node in (11, 13)]
    nodes = [Node(there.plan, name, there.trainer.federation) for name in names]
    uploads = [node.train(shared, node.first_personal(shared), 0, there.plan.rate(0))[0] for node in nodes]
    assert nodes[0].num_samples == nodes[1].num_samples
    there.grid.spoil = _says("num_samples", 10**12)
    state = there.serve(**settings)
    said = f"its number of samples is 1,000,000,000,000; allowed: {told}."
    assert f"Client {there.nodes[12]['client']!r} is refused: {said}" in caplog.text
    equal(tree_index(state.shared, 0), {name: (uploads[0][name] + uploads[1][name]) / 2 for name in shared})
    assert there.lines[0]["clients"] == 2
    assert _left_out(there) == [["samples"]]


SCORES: dict[str, tuple[ScoreSums, int, str]] = {
    "accuracy": (
        ScoreSums(10, 5.0, 17290.0),
        10,
        "train_value is 17290 over 10 samples; allowed: a mean of at least 0",
    ),
    "negative": (ScoreSums(10, 5.0, -1.0), 10, "train_value is -1"),
    "loss": (ScoreSums(10, -5.0, 5.0), 10, "train_loss is -5 over 10 samples; allowed: a mean of at least 0."),
    "samples": (ScoreSums(9, 5.0, 5.0), 10, "of 9 training samples; allowed: 10"),
}


@pytest.mark.parametrize("fault", SCORES)
def test_scores_that_no_samples_have_are_refused(tmp_path: Path, fault: str) -> None:
    sums, count, told = SCORES[fault]
    with pytest.raises(UserError, match="Client 'a' is refused") as caught:
        check_scores(Deployed(tmp_path).plan, Reply("a", count, {"train": sums}, {}, 0))
    assert told in str(caught.value)


def test_scores_at_their_bounds_are_taken(tmp_path: Path) -> None:
    plan = Deployed(tmp_path).plan
    for sums in (ScoreSums(3, 0.0, 3.0), ScoreSums(3, -1e-6, 0.0), ScoreSums(3, 50.0, 3.000001)):
        check_scores(plan, Reply("a", 3, {"test": sums, "train": sums}, {}, 0))


def test_a_density_may_have_a_negative_loss(tmp_path: Path) -> None:
    columns = ("shop", "weekday", "price", "temperature", "promotion", "units")
    sample = shops.write_shops(tmp_path / "units.csv", shops.make_shops(20, names=NAMES), columns)
    there = Deployed(
        tmp_path, sample=sample, data={"target_column": "units"}, loss={"name": "squared_error", "variance": 0.01}
    )
    lowest = np.log(2 * np.pi * 0.01) / 2
    check_scores(there.plan, Reply("a", 3, {"train": ScoreSums(3, 3 * lowest, 0.0)}, {}, 0))
    with pytest.raises(UserError, match="train_loss is"):
        check_scores(there.plan, Reply("a", 3, {"train": ScoreSums(3, 3 * lowest - 1, 0.0)}, {}, 0))


@pytest.mark.parametrize(("key", "value"), [("train_value", 1729.0 * 12), ("test_loss", 1e30)])
def test_a_lie_in_scores_is_in_no_average(
    tmp_path: Path, key: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    there = Deployed(tmp_path, run={"rounds": 1})
    there.grid.spoil = _says(key, value, "evaluate")
    there.serve()
    assert f"Client {there.nodes[12]['client']!r} is refused" in caplog.text
    line = there.lines[0]
    assert 0 <= line["train_accuracy"] <= 1
    assert line["test_loss"] < 100
    assert line["clients"] == 3, "its upload was good"
    assert len(_left_out(there)[0]) == 1


def test_numbers_of_samples_that_change_are_noted_and_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = Deployed(tmp_path, run={"rounds": 4, "evaluate_every": 0})
    there.grid.spoil = _says("num_samples", [12, 13, 14, 15])
    there.serve()
    told = [record.getMessage() for record in caplog.records if "samples of train, and had" in record.getMessage()]
    said = [f" has {count} samples of train, and had {count - 1} before" for count in (13, 14, 15)]
    assert all(part in text for part, text in zip(said, told, strict=False))
    assert len(told) == 4, "and the right number when it was scored"
    assert _left_out(there) == [[], [], [], []]


def _equal_comparison(found: list[Any], steps: np.ndarray) -> None:
    norms = np.linalg.norm(steps, axis=1)
    clipped = steps * np.minimum(1, np.median(norms) / norms)[:, None]
    for at, entry in enumerate(found):
        others = np.delete(clipped, at, 0).mean(0)
        cosine = steps[at] @ others / norms[at] / np.linalg.norm(others)
        assert entry.norm == pytest.approx(norms[at], rel=1e-9)
        assert entry.cosine == pytest.approx(cosine, rel=1e-9)


def _flat(tree: Tree) -> np.ndarray:
    return np.concatenate([tree[name].numpy().ravel() for name in sorted(tree)])


@pytest.mark.parametrize("updates", ["none", "int8"])
def test_norms_and_cosines_are_those_of_the_updates(tmp_path: Path, updates: str) -> None:
    there = Deployed(tmp_path, method={"name": "fedavg"}, compression={"updates": updates}, run={"dtype": "float64"})
    plan, federation = there.plan, there.trainer.federation
    shared = tree_index(first_server_state(plan).shared, 0)
    nodes = [Node(plan, name, federation) for name in federation.names]
    uploads = [node.train(shared, node.first_personal(shared), 0, 0.5)[0] for node in nodes]
    if plan.codec is None:
        uploads[0] = {name: shared[name] - 40 * (leaf - shared[name]) for name, leaf in uploads[0].items()}
        steps = [_flat(upload) - _flat(shared) for upload in uploads]
    else:
        steps = [_flat(plan.codec.decode(upload)) for upload in uploads]
    _equal_comparison(compare(plan, shared, uploads), np.stack(steps))


def test_comparisons_have_limits(tmp_path: Path) -> None:
    there = Deployed(tmp_path, method={"name": "fedavg"}, run={"dtype": "float64"})
    shared = tree_index(first_server_state(there.plan).shared, 0)
    moved = {name: leaf + 1 for name, leaf in shared.items()}
    back = {name: leaf - 3 for name, leaf in shared.items()}
    assert compare(there.plan, shared, []) == []
    assert compare(there.plan, shared, [moved])[0].cosine is None
    assert compare(there.plan, shared, [shared, moved])[0] == (0.0, None)
    first, second = compare(there.plan, shared, [moved, back])
    assert first.cosine == second.cosine == pytest.approx(-1)
    assert second.norm == pytest.approx(3 * first.norm)
    huge = {name: torch.full_like(leaf, 1e300) for name, leaf in shared.items()}
    found = compare(there.plan, shared, [moved, huge, moved])
    assert found[1].norm == np.inf, "beyond the largest number"
    assert found[0].cosine == pytest.approx(1)


def test_a_mass_that_is_no_number_is_noticed(tmp_path: Path) -> None:
    """q-FFL takes the logarithm of a loss, which a client may say is below zero: the mean of all would be none."""
    there = Deployed(tmp_path, method={"name": "qffl"}, run={"dtype": "float64"})
    shared, federation = tree_index(first_server_state(there.plan).shared, 0), there.trainer.federation
    nodes = [Node(there.plan, name, federation) for name in federation.names]
    uploads = [node.train(shared, node.first_personal(shared), 0, 0.5)[0] for node in nodes]
    uploads[1]["loss"] = -uploads[1]["loss"]
    assert [np.isfinite(entry.norm) for entry in compare(there.plan, shared, uploads)] == [True, False, True]


def test_a_scaled_upload_is_left_out_and_its_client_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run={"rounds": 5, "evaluate_every": 2, "dtype": "float64"})
    bad = there.nodes[12]["client"]
    there.grid.spoil = lambda node, asked, answer: (
        scaled(asked, answer, -1000) if node == 12 and asked.metadata.message_type == "train" else answer
    )
    there.serve()
    assert f"Client {bad!r} is left out: its update has norm" in caplog.text
    assert "Node 12 is set aside: answers of 3 rounds in a row were left out, the last since: Client" in caplog.text
    assert [line["clients"] for line in there.lines] == [2] * 5
    assert _left_out(there) == [["norm"], ["norm"], ["norm"], [], []]
    asked = [kind for node, kind in there.grid.sent if node == 12]
    assert asked == ["train", "train", "evaluate", "train"], "nothing once it was set aside, the model neither"
    honest = [kind for node, kind in there.grid.sent if node == 11]
    assert honest.count("train") == 5
    written = b"".join(path.read_bytes() for path in there.run_folder.rglob("*") if path.is_file())
    assert not any(there.nodes[node]["client"].encode() in written for node in there.nodes)


def test_who_is_set_aside_stays_so_until_taken_back_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "dtype": "float64"}, schedule={"name": "constant"})
    there.grid.spoil = _says("num_samples", 10**12)
    there.serve(strikes=1)
    there.grid.spoil = lambda node, asked, answer: answer
    there.grid.sent.clear()
    there.serve(rounds=2, **{"continue": True})
    assert {node for node, _ in there.grid.sent} == {11, 13}
    with pytest.raises(UserError, match="2 nodes are connected, without 1 node set aside; needed: min-clients 3"):
        there.serve(rounds=3, **{"continue": True, "min-clients": 3, "wait": 0.01})
    there.serve(rounds=3, **{"continue": True, "readmit": "nobody"})
    assert "Nobody is set aside as 'nobody' (readmit); nodes that are: 12." in caplog.text
    there.serve(rounds=4, **{"continue": True, "readmit": there.nodes[12]["client"]})
    assert [line["clients"] for line in there.lines] == [2, 2, 2, 3]


def test_a_client_that_never_gave_a_good_answer_is_set_aside_by_the_name_it_is_registered_under(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "evaluate_every": 0}, schedule={"name": "constant"})
    there.grid.keys = {node: (f"key {node}", own["client"]) for node, own in there.nodes.items()}

    def spoil(node: int, asked: Message, answer: Message) -> Message:
        if node == 12:
            answer.content.metric_records["metrics"]["num_samples"] = 0
        return answer

    there.grid.spoil = spoil
    there.serve(strikes=1)
    (entry,) = [entry for entry in _noticed(there)[0]["uploads"] if "left_out" in entry]
    assert len(entry["client"]) == 32, "a hash, and no number of a node"
    there.grid.spoil = lambda node, asked, answer: answer
    there.serve(rounds=2, **{"continue": True, "readmit": there.nodes[12]["client"]})
    assert [line["clients"] for line in there.lines] == [2, 3]


def test_a_name_that_is_set_aside_is_so_from_another_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "evaluate_every": 0}, schedule={"name": "constant"})
    there.grid.spoil = _says("num_samples", 10**12)
    there.serve(strikes=1)
    there.grid.spoil = lambda node, asked, answer: answer
    there.nodes[14] = there.nodes.pop(12)
    there.serve(rounds=3, **{"continue": True})
    assert "Node 14 has a client that is set aside, and is set aside with it." in caplog.text
    assert [line["clients"] for line in there.lines] == [2, 2, 2]
    assert [kind for node, kind in there.grid.sent if node == 14] == ["train"]


@pytest.mark.parametrize("strikes", [0, 3])
def test_strikes_are_counted_in_a_row(tmp_path: Path, strikes: int) -> None:
    there = Deployed(tmp_path, run={"rounds": 6, "evaluate_every": 1})
    right = Node.open(there.plan, there.sample, there.nodes[12]["client"]).num_samples
    bad = [10**12] * 6 if strikes == 0 else [10**12, 10**12, right, 10**12, 10**12, right]
    there.grid.spoil = _says("num_samples", bad)
    there.serve(strikes=strikes)
    assert [line["clients"] for line in there.lines] == [2 if count == 10**12 else 3 for count in bad]
    assert there.grid.sent.count((12, "train")) == 6


def test_whoever_has_another_version_may_come_back_at_once(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"rounds": 5, "evaluate_every": 0})

    def spoil(node: int, asked: Message, answer: Message) -> Message:
        if node == 12 and int(asked.metadata.group_id) < 4:
            answer.content.config_records["config"]["version"] = "0.0.1"
        return answer

    there.grid.spoil = spoil
    there.serve()
    assert [line["clients"] for line in there.lines] == [2, 2, 2, 2, 3]


def test_a_cosine_counts_where_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sample = shops.write_shops(
        tmp_path / "shops.csv",
        [row | {"shop": f"{row['shop']} {at % 4}"} for at, row in enumerate(shops.make_shops(80, names=("one",)))],
    )
    run = {"rounds": 1, "evaluate_every": 0, "dtype": "float64"}
    there = Deployed(tmp_path, sample=sample, method={"name": "fedavg"}, run=run)
    there.grid.spoil = lambda node, asked, answer: (
        scaled(asked, answer, -1.0) if node == 12 and asked.metadata.message_type == "train" else answer
    )
    there.serve(**{"min-cosine": -0.2})
    assert f"Client {there.nodes[12]['client']!r} is left out: its update has cosine -0." in caplog.text
    assert [line["clients"] for line in there.lines] == [3]
    there.serve(experiment="again")
    (line,) = (tmp_path / "server" / "again" / "uploads.jsonl").read_text().splitlines()
    assert not any("left_out" in entry for entry in json.loads(line)["uploads"])


@pytest.mark.parametrize("method", ["fedem", "scaffold", "ifca"])
def test_honest_clients_of_other_sizes_and_kinds_are_left_alone(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    sample = _shops(tmp_path, (8, 8, 10, 40, 160, 640))
    there = Deployed(tmp_path, sample=sample, method={"name": method}, run={"rounds": 3, "evaluate_every": 2})
    there.serve(strikes=1)
    assert [line["clients"] for line in there.lines] == [6, 6, 6]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    lines = _noticed(there)
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert not any(_left_out(there))
    assert all(len(entry["client"]) == 32 and entry["norm"] > 0 for line in lines for entry in line["uploads"])
    assert ["loss_change" in line["uploads"][0] for line in lines] == [False, False, True]


def test_what_is_noticed_changes_no_honest_run(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run={"dtype": "float64"})
    equal(there.serve().shared, simulated(there.trainer).shared)


@pytest.mark.parametrize(("scale", "steps", "good"), [(0.0, 1, False), (1.0, 1, True), (0.0, 1000, True)])
def test_what_is_usual_goes_by_rounds_before_and_by_local_steps(
    tmp_path: Path, scale: float, steps: int, good: bool
) -> None:
    """Others whose norms vanish, since they have learnt all there is, make nobody suspect, nor does a larger client."""
    plan = Deployed(tmp_path, method={"name": "fedavg"}, run={"dtype": "float64"}).plan
    shared = tree_index(first_server_state(plan).shared, 0)
    moves = dict(zip((11, 12, 13), (1e-3, 1e-3, 0.5), strict=True))
    answers = {
        node: Reply(str(node), 9, {}, {name: leaf + move for name, leaf in shared.items()}, 0)
        for node, move in moves.items()
    }
    watch = Watch(RunConfig(), json.loads(json.dumps(Watch(RunConfig(), {"scale": scale}).to_json())))
    assert (13 in watch.alike(plan, shared, answers, torch.tensor([1, 1, steps]))) == good


def test_a_hostile_cohort_does_not_change_for_good_what_is_usual(tmp_path: Path) -> None:
    plan = Deployed(tmp_path, method={"name": "fedavg"}, run={"dtype": "float64"}).plan
    shared = tree_index(first_server_state(plan).shared, 0)

    def answers(*moves: float) -> dict[int, Reply]:
        trees = [{name: leaf + move for name, leaf in shared.items()} for move in moves]
        return {node: Reply(str(node), 9, {}, tree, 0) for node, tree in enumerate(trees, start=11)}

    watch, steps = Watch(RunConfig(), {}), torch.ones(3)
    assert len(watch.alike(plan, shared, answers(1.0, 1.0, 1.0), steps)) == 3
    assert len(watch.alike(plan, shared, answers(1.0, 1e6, 1e6), steps)) == 3, "of which nobody is odd"
    assert list(watch.alike(plan, shared, answers(1.0, 1.0, 1e3), steps)) == [11, 12]
