"""What server and clients say to each other, and which answers and settings they refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deployments
import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import Deployed, equal, simulated
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from fedem.core.errors import UserError
from fedem.core.tree import Tree, tree_index
from fedem.deploy.flower.messages import check_leaves, layout_of, to_record, to_tree, upload_layout
from fedem.deploy.flower.server import first_server_state
from fedem.deploy.kept import Kept
from fedem.deploy.node import Node
from fedem.deploy.plan import Plan, RunConfig
from fedem.runs.config import Config
from fedem.runs.recipe import SampleFormat

METHODS = ("fedem", "fedavg", "scaffold", "ditto", "ifca", "qffl", "fedavg+")


def _scaled(factor: float) -> Callable[[Tree], Tree]:
    return lambda tree: {name: leaf * factor for name, leaf in tree.items()}


UPLOADS: dict[str, tuple[Callable[[Tree], Tree], str]] = {
    "not a number": (_scaled(torch.nan), "is not finite"),
    "infinite": (_scaled(torch.inf), "is not finite"),
    "components": (lambda tree: {name: leaf[:2] for name, leaf in tree.items()}, "of shape [2, "),
    "type": (lambda tree: {name: leaf.double() for name, leaf in tree.items()}, "torch.float64"),
    "missing": (lambda tree: dict(list(tree.items())[1:]), "is missing"),
    "foreign": (lambda tree: tree | {"extra": torch.zeros(2)}, "'extra' is none of"),
}
FIGURES: dict[str, tuple[str, str, Any, str]] = {
    "plan": ("config", "plan", "0" * 32, "follows plan '0000"),
    "samples": ("metrics", "num_samples", 0, "number of samples is 0"),
    "fraction": ("metrics", "num_samples", 2.5, "number of samples is 2.5"),
    "absurd": ("metrics", "num_samples", 2**62, "number of samples is 4611686018427387904"),
    "version": ("config", "version", "0.0.1", "has fedem '0.0.1'"),
}
NAMES = {"no name": "", "long name": "x" * 201, "number": 7}

OTHERS = {"no upload": "upload is missing", "no numbers": "can't be read"}


def _spoilt(answer: Message, asked: Message, fault: str) -> Message:
    content = RecordDict(dict(answer.content))
    if fault in UPLOADS:
        record = answer.content.array_records["arrays"]
        kind = {name: (tuple(array.shape), torch.float32) for name, array in record.items()}
        content["arrays"] = to_record(UPLOADS[fault][0](to_tree(record, kind)))
    elif fault in FIGURES:
        record_name, key, value, _ = FIGURES[fault]
        content[record_name][key] = value
    elif fault == "no numbers":
        content["arrays"] = ArrayRecord(
            {
                name: Array(array.dtype, array.shape, array.stype, b"PK\x03\x04")
                for name, array in content["arrays"].items()
            }
        )
    else:
        del content["arrays"]
    return Message(content, reply_to=asked)


def _mean_without(there: Deployed, bad: str) -> Tree:
    """The mean of all others' uploads in the first round."""
    shared, federation = tree_index(first_server_state(there.plan).shared, 0), there.trainer.federation
    nodes = [Node(there.plan, name, federation) for name in federation.names if name != bad]
    uploads = [node.train(shared, node.first_personal(shared), 0, there.plan.rate(0))[0] for node in nodes]
    sizes = torch.tensor([float(node.num_samples) for node in nodes])
    return {
        name: torch.einsum("c,c...->...", sizes / sizes.sum(), torch.stack([upload[name] for upload in uploads]))
        for name in shared
    }


@pytest.mark.parametrize("fault", [*UPLOADS, *FIGURES, *OTHERS])
def test_a_bad_answer_is_refused_by_name_and_the_others_go_on(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "evaluate_every": 0})
    bad = there.nodes[12]["client"]
    there.grid.spoil = lambda node, asked, answer: (
        _spoilt(answer, asked, fault) if node == 12 and asked.metadata.message_type == "train" else answer
    )
    state = there.serve()
    told = {**{key: entry[-1] for key, entry in (UPLOADS | FIGURES).items()}, **OTHERS}[fault]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(f"Client {bad!r} is refused")
    assert told in warning
    equal(tree_index(state.shared, 0), _mean_without(there, bad), 1e-6)
    assert there.lines[0]["clients"] == 2


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_an_answer_under_no_proper_name_is_refused(
    tmp_path: Path, name: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "evaluate_every": 0})

    def rename(node: int, asked: Message, answer: Message) -> Message:
        if node == 12:
            answer.content.config_records["config"]["client"] = name
        return answer

    there.grid.spoil = rename
    there.serve()
    assert "Node 12 is refused: its client's name is" in caplog.text
    assert len(caplog.records[0].getMessage()) < 200
    assert there.lines[0]["clients"] == 2


def test_a_second_client_of_one_name_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "evaluate_every": 0, "dtype": "float64"})
    there.nodes[14] = there.nodes[12] | {"state": str(tmp_path / "elsewhere")}
    state = there.serve()
    assert f"Client {there.nodes[12]['client']!r} is at node 14; node 12" in caplog.text, "which answered later"
    equal(state.shared, simulated(there.trainer, 1).shared)


def test_too_few_answers_leave_the_model_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, {"min-clients": 3}, run={"dtype": "float64"})
    there.grid.spoil = lambda node, asked, answer: (
        None if (node, asked.metadata.group_id, asked.metadata.message_type) == (12, "1", "train") else answer
    )
    there.serve()
    assert "Round 2: 2 good answers, needed 3; the model stays as it is." in caplog.text
    assert [line["clients"] for line in there.lines] == [3, 0, 3]


def test_an_error_of_a_node_is_passed_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run={"rounds": 1})
    there.grid.spoil = lambda node, asked, answer: (
        Message(Error(2, "out of memory"), reply_to=asked) if node == 12 else answer
    )
    there.serve()
    assert "Node 12 did not answer: out of memory" in caplog.text


def test_what_goes_wrong_on_a_node_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(kept: Kept, path: Path) -> None:
        raise OSError(f"no room for {path}")

    there = Deployed(tmp_path, run={"rounds": 1})
    told: list[Message] = []
    there.grid.spoil = lambda node, asked, answer: (told.append(answer), answer)[1]
    monkeypatch.setattr(Kept, "save", fail)
    there.serve()
    assert any("no room for" in str(record.exc_info) for record in caplog.records)
    reasons = [answer.error.reason for answer in told if answer.has_error()]
    assert len(reasons) == 6, "three can't keep their round, nor what comes out"
    assert set(reasons) == {"its own log says why; see 'data' and 'state' of its node config."}


def test_a_cohort_is_never_smaller_than_the_fewest_clients(tmp_path: Path) -> None:
    there = Deployed(tmp_path, {"min-clients": 2}, run={"rounds": 4, "clients_per_round": 0.34, "evaluate_every": 0})
    there.serve()
    assert len([node for node, kind in there.grid.sent if kind == "train"]) == 8
    assert [line["clients"] for line in there.lines] == [2, 2, 2, 2]


def test_an_average_over_few_clients_is_not_written(tmp_path: Path) -> None:
    there = Deployed(tmp_path, {"min-clients": 3}, run={"rounds": 1})

    def forget(node: int, asked: Message, answer: Message) -> Message:
        metrics = answer.content.metric_records["metrics"]
        if node == 12 and asked.metadata.message_type == "evaluate":
            for key in [key for key in metrics if key.startswith("test_")]:
                del metrics[key]
        return answer

    there.grid.spoil = forget
    there.serve()
    assert "train_accuracy" in there.lines[0]
    assert "test_accuracy" not in there.lines[0]


def test_only_the_server_needs_weights_in_a_file(tmp_path: Path) -> None:
    model = {"name": "mobilenet_v2", "weights": str(tmp_path / "server.pth"), "jitter": 0.1}
    config = Config.build({"model": model, "loss": {"name": "cross_entropy"}, "run": {"device": "cpu"}})
    plan = Plan(config, SampleFormat((3, 32, 32), torch.uint8, 10))
    with pytest.raises(UserError, match=r"server\.pth"):
        assert plan.model
    there = plan.on_node("cpu")
    assert there.fingerprint == plan.fingerprint
    assert str(tmp_path) not in str(there.to_json())
    assert there.model.num_parameters > 2_000_000


def test_nobody_there(tmp_path: Path) -> None:
    there = Deployed(tmp_path, {"min-clients": 4, "wait": 0.01})
    with pytest.raises(UserError, match="3 nodes are connected; needed: min-clients 4"):
        there.serve()


def test_another_run_by_the_same_name_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path)
    there.serve()
    files = {path: path.read_bytes() for path in (tmp_path / "state").rglob("*.safetensors")}
    assert len(files) == 3
    told: list[Message] = []

    def listen(node: int, asked: Message, answer: Message) -> Message:
        told.append(answer)
        return answer

    there.grid.spoil = listen
    there.serve(folder=str(tmp_path / "other"))
    assert "was kept in another run of experiment 'trial', and stays as it is" in caplog.text
    assert all(path.read_bytes() == content for path, content in files.items())
    assert [answer.has_error() for answer in told] == [True] * len(told)
    assert all(str(tmp_path) not in str(answer.error.reason) for answer in told if answer.has_error())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dta": "x"}, "Unknown key in [node config] 'dta'"),
        ({"data": ""}, "The node config has no 'data'"),
        ({"state": ""}, "The node config has no 'state'"),
        ({"partition-id": "one"}, "node config.partition_id is 'one'"),
        ({"data": "nowhere.csv"}, "see 'data' and 'state' of its node config"),
    ],
)
def test_a_bad_node_config_is_told_by_its_key(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    there = Deployed(tmp_path, run={"rounds": 1, "evaluate_every": 0})
    there.nodes[12] |= change
    answers: dict[int, Message] = {}

    def listen(node: int, asked: Message, answer: Message) -> Message:
        answers[node] = answer
        return answer

    there.grid.spoil = listen
    there.serve()
    assert told in str(answers[12].error.reason)
    assert not answers[11].has_error()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"experiment": "../x"}, "experiment is '../x'; allowed: up to 100 letters"),
        ({"experiment": "x" * 101}, "experiment is 'xxx"),
        ({"rounds": 10**12}, "run config.rounds is 1000000000000; allowed: at least 0 and at most 1000000"),
        ({"timeout": 0}, "run config.timeout is 0"),
        ({"min-clients": 0}, "run config.min_clients is 0"),
        ({"continue": "yes"}, "run config.continued is 'yes'"),
        ({"round": 3}, "Unknown key in [run config] 'round'"),
    ],
)
def test_a_bad_run_config_is_refused(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        RunConfig.read(deployments.run_config(tmp_path, **values))
    assert told in str(caught.value)


@pytest.mark.parametrize("method", ["local", "clustered", "afl"])
def test_methods_without_such_a_server_are_refused(tmp_path: Path, method: str) -> None:
    there = Deployed(tmp_path, method={"name": method})
    with pytest.raises(UserError, match=f"Method {method} needs .*; allowed: fedem, "):
        there.serve()
    assert not there.run_folder.exists()


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("compression", {"downloads": "int8"}, "compression.downloads is 'int8', but .*; allowed there: none"),
        ("graph", {"name": "ring"}, "graph.name is 'ring', but .*; allowed there: none"),
    ],
)
def test_a_setting_that_the_server_has_no_place_for_is_named(
    tmp_path: Path, section: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        Deployed(tmp_path, **{section: values}).serve()


def test_records_give_trees_back() -> None:
    tree = {
        "number": torch.tensor(3.5, dtype=torch.float64),
        "counter": torch.tensor(7),
        "bytes": torch.tensor([[1, -2]], dtype=torch.int8),
        "mask": torch.tensor([True, False]),
        "short": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    record = to_record(tree)
    assert all(array.shape for array in record.values())
    back = to_tree(record, layout_of(tree))
    check_leaves(back, layout_of(tree))
    for name, leaf in tree.items():
        assert torch.equal(leaf, back[name])


@pytest.mark.parametrize("method", METHODS)
def test_the_layout_of_an_upload_is_found_without_data(tmp_path: Path, method: str) -> None:
    plan, trainer = deployments.make_plan(deployments.write_sample(tmp_path), method={"name": method})
    shared = tree_index(first_server_state(plan).shared, 0)
    node = Node(plan, trainer.federation.names[0], trainer.federation)
    assert upload_layout(plan, shared) == layout_of(node.train(shared, node.first_personal(shared), 0, 0.1)[0])
