"""Nodes that lie, a random lie in each round: the model is that of the others, and the liar is named and set aside."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shops
import torch

pytest.importorskip("flwr")

from flower_grid import Deployed, equal, scaled
from flwr.app import Message
from killing import one_in

from fedem.core.errors import counted
from fedem.core.tree import Tree, tree_flat, tree_index, tree_map
from fedem.deploy.flower.server import first_server_state
from fedem.deploy.node import Node
from fedem.methods.wrappers.defences import Clip
from fedem.runs.rounds import State

NAMES = ("north", "east", "south", "west")
STRIKES, ROUNDS = 3, 4
Lie = Callable[[random.Random, Message, Message], Message]
pytestmark = pytest.mark.processes  # not for the fast lane, which has a test of every single lie


def _says(**values: float) -> Lie:
    def lie(chance: random.Random, asked: Message, answer: Message) -> Message:
        for key, value in values.items():
            answer.content.metric_records["metrics"][key] = value
        return answer

    return lie


def _puts(value: float) -> Lie:
    """One number of the upload, anywhere, is another."""

    def lie(chance: random.Random, asked: Message, answer: Message) -> Message:
        arrays = answer.content.array_records["arrays"]
        found = {name: np.array(array.numpy()) for name, array in arrays.items()}
        place = found[chance.choice(sorted(found))]
        place[tuple(chance.randrange(size) for size in place.shape)] = value
        answer.content["arrays"] = type(arrays)({name: type(arrays[name])(array) for name, array in found.items()})
        return answer

    return lie


def _scales(chance: random.Random, asked: Message, answer: Message) -> Message:
    return scaled(asked, answer, chance.choice((-1, 1)) * 10 ** chance.uniform(3, 12))


UPLOADS: dict[str, list[Lie]] = {
    "samples": [_says(num_samples=10**12), _says(num_samples=10**6)],
    "refused": [_puts(np.nan), _puts(np.inf), _puts(-np.inf), _says(num_samples=0), _says(num_samples=10**15)],
    "norm": [_scales, _puts(1e30)],
}
SCORES: dict[str, list[Lie]] = {
    "refused": [
        _says(train_value=1729.0 * 12), _says(train_value=-1.0), _says(test_loss=-5.0), _says(test_loss=np.nan),
        _says(train_samples=10**9),
    ],
    "scores": [_says(train_loss=1e30), _says(test_loss=1e12)],
}  # fmt: skip


class Liar:
    """A node that lies in every answer of one kind of message."""

    def __init__(self, node: int, kind: str, lies: dict[str, list[Lie]], chance: random.Random):
        self.node, self.told = node, list[str]()
        self._kind, self._lies, self._chance = kind, lies, chance

    def __call__(self, node: int, asked: Message, answer: Message) -> Message:
        if (node, asked.metadata.message_type) != (self.node, self._kind):
            return answer
        what = self._chance.choice(sorted(self._lies))
        self.told.append(what)
        return self._chance.choice(self._lies[what])(self._chance, asked, answer)


def _deploy(folder: Path, **sections: Any) -> Deployed:
    folder.mkdir()
    sample = shops.write_shops(folder / "shops.csv", shops.make_shops(30, names=NAMES))
    run = {"rounds": ROUNDS, "evaluate_every": 0, "dtype": "float64"} | sections.pop("run", {})
    there = Deployed(folder, sample=sample, run=run, **sections)
    there.grid.keys = {node: (f"key {node}", own["client"]) for node, own in there.nodes.items()}  # all are registered
    return there


def _check_noticed(there: Deployed, liar: Liar, words: str) -> None:
    """The log names the client, and uploads.jsonl has its strikes until it is set aside; of others there are none."""
    name = there.nodes[liar.node]["client"]
    assert f"Node {liar.node} is set aside: answers of {STRIKES} rounds in a row were left out" in words
    assert words.count(f"Client {name!r} is refused") + words.count(f"Client {name!r} is left out") >= STRIKES
    assert not any(f"Client {other!r} is" in words for other in NAMES if other != name)
    lines = [json.loads(line) for line in (there.run_folder / "uploads.jsonl").read_text().splitlines()]
    noticed = [[entry for entry in line["uploads"] if "left_out" in entry] for line in lines]
    assert [len(entries) for entries in noticed] == [1] * STRIKES + [0] * (ROUNDS - STRIKES)
    found = [entries[0] for entries in noticed[:STRIKES]]
    assert [entry["left_out"] for entry in found] == liar.told
    assert [entry["strikes"] for entry in found] == list(range(1, STRIKES + 1))
    assert ["set_aside" in entry for entry in found] == [False] * (STRIKES - 1) + [True]
    assert len({entry["client"] for entry in found}) == 1


METHODS = ("fedem", "fedavg", "ditto")


def test_lies_in_uploads_leave_the_model_to_the_honest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, tries = random.Random(6), one_in(6, least=2)
    for number in range(tries):
        method = {"name": METHODS[number % len(METHODS)]}
        there, honest = (_deploy(tmp_path / f"{name}-{number}", method=method) for name in ("there", "honest"))
        liar = Liar(chance.choice(sorted(there.nodes)), "train", UPLOADS, chance)
        there.grid.spoil = liar
        caplog.clear()
        state = there.serve(strikes=STRIKES)
        _check_noticed(there, liar, caplog.text)
        assert [line["clients"] for line in there.lines] == [len(NAMES) - 1] * ROUNDS
        honest.nodes.pop(liar.node)
        equal(state.shared, honest.serve().shared)
    with capsys.disabled():
        print(f"\n{counted(tries, 'node')} that lied in uploads: models are those of the others, and it is set aside")


def test_lies_in_scores_are_in_no_average(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, tries = random.Random(7), one_in(6, least=2)
    for number in range(tries):
        method = {"name": METHODS[number % len(METHODS)]}
        sections = {"method": method, "run": {"evaluate_every": 1}}
        there, expected = (_deploy(tmp_path / f"{name}-{number}", **sections) for name in ("there", "expected"))
        liar = Liar(chance.choice(sorted(there.nodes)), "evaluate", SCORES, chance)
        there.grid.spoil = liar
        caplog.clear()
        state = there.serve(strikes=STRIKES)
        _check_noticed(there, liar, caplog.text)

        def silent(node: int, asked: Message, answer: Message, liar: int = liar.node) -> Message | None:
            """It trains until it would be set aside, and sends no scores."""
            is_scored, done = asked.metadata.message_type == "evaluate", int(asked.metadata.group_id)
            return None if node == liar and (is_scored or done >= STRIKES) else answer

        expected.grid.spoil = silent
        equal(state.shared, expected.serve().shared)
        for line, known in zip(there.lines, expected.lines, strict=True):
            scores = {key for key in known if key.startswith(("train_", "test_"))}
            assert {key: line[key] for key in scores} == pytest.approx({key: known[key] for key in scores}, rel=1e-9)
            assert line["clients"] == known["clients"]
    with capsys.disabled():
        print(f"\n{counted(tries, 'node')} that lied in scores: no average has them, and it is set aside")


def _moved(tree: Tree, shared: Tree) -> torch.Tensor:
    return tree_flat(tree_map(torch.sub, tree, shared))


def test_a_liar_that_nothing_notices_moves_the_model_within_the_clip_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sum over honest t of w_t d_t, and of the liar no more than w times loosest times the longest honest d_t."""
    chance, tries = random.Random(8), one_in(6, least=2)
    rule = Clip(share=1 / len(NAMES))
    for number in range(tries):
        defence = {"name": "clip", "share": rule.share}
        there = _deploy(tmp_path / f"there-{number}", method={"name": "fedavg"}, defence=defence, run={"rounds": 1})
        liar = chance.choice(sorted(there.nodes))
        there.grid.spoil = lambda node, asked, answer, liar=liar: (
            _scales(chance, asked, answer) if (node, asked.metadata.message_type) == (liar, "train") else answer
        )
        state: State = there.serve(**{"max-norm": 0.0})
        shared = tree_index(first_server_state(there.plan).shared, 0)
        nodes = [Node(there.plan, there.nodes[at]["client"], there.trainer.federation) for at in sorted(there.nodes)]
        uploads = [node.train(shared, node.first_personal(shared), 0, there.plan.rate(0))[0] for node in nodes]
        steps = torch.stack([_moved(upload, shared) for upload in uploads])
        weights = torch.tensor([node.num_samples for node in nodes], dtype=torch.float64)
        weights /= weights.sum()
        is_honest = torch.tensor([at != liar for at in sorted(there.nodes)])
        rest = _moved(tree_index(state.shared, 0), shared) - weights[is_honest] @ steps[is_honest]
        longest = float(steps[is_honest].norm(dim=1).max())
        bound = float(weights[~is_honest]) * rule.loosest * longest
        assert 0 < float(rest.norm()) <= bound * (1 + 1e-9)
        assert there.lines[0]["clients"] == len(NAMES)
    with capsys.disabled():
        print(f"\n{counted(tries, 'node')} with a scaled upload that is not looked for: each within the clip bound")
