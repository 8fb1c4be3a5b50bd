"""A client refuses what no server of fedem asks for, before any work, and lets out nothing but that it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flower_grid import Deployed
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedem.core.tree import tree_index
from fedem.deploy.flower import client, messages
from fedem.deploy.flower.messages import COUNT, EVALUATE, KEEP, TRAIN, to_record, write_request
from fedem.deploy.flower.server import first_server_state
from fedem.deploy.node import Node
from fedem.deploy.plan import MOST_ROUNDS, Plan

NODE, SECRET = 11, "nobody-may-read-this"
ABOUT = {"round": 0, "num_rounds": 3, "learning_rate": 0.1, "experiment": "trial", "run": "0123456789abcdef"}
ABOUT |= {"rollbacks": []}
KINDS = (TRAIN, EVALUATE, KEEP, COUNT)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
values = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    text,
    st.binary(max_size=300),
    st.lists(st.floats(), max_size=4),
    st.lists(text, max_size=4),
)
not_whole = values.filter(lambda value: type(value) is not int)
not_number = values.filter(lambda value: type(value) not in (int, float))
no_name = st.one_of(
    values.filter(lambda value: not isinstance(value, str)),
    st.sampled_from(["", "../x", "a/b", "-x", ".x", "a b", "x\n", "x\0y", "ä", "x" * 101]),
    text.filter(lambda value: not value.isascii()),
)
DAMAGES: dict[str, st.SearchStrategy[Any]] = {
    "round": not_whole | st.integers(max_value=-1, min_value=-(2**63)) | st.integers(4, 2**63 - 1),
    "num_rounds": not_whole | st.integers(-(2**63), 0) | st.integers(MOST_ROUNDS + 1, 2**63 - 1),
    "learning_rate": not_number | st.sampled_from([math.nan, math.inf, -math.inf, -1e-300, -1]),
    "experiment": no_name,
    "run": no_name,
    "rollbacks": values.filter(lambda value: value != []) | st.just([-1]),
    "version": values,
    "plan": values,
}


class Bench:
    """A client behind a plan, whose answers are asked for one by one."""

    def __init__(self, folder: Path):
        self.there = Deployed(folder)
        self.plan: Plan = self.there.plan
        self.arrays = to_record(tree_index(first_server_state(self.plan).shared, 0))
        self.state = folder / "state"

    def content(self, **about: Any) -> RecordDict:
        return write_request(self.plan, self.arrays, ABOUT | about)

    def ask(self, content: RecordDict, kind: str) -> Message:
        own = self.there.nodes[NODE]
        context = Context(1, NODE, own, RecordDict(), self.there.run_config)
        return self.there.grid.app(Message(content, NODE, kind), context)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def idle(bench: Bench) -> Iterator[Bench]:
    """A client that must do nothing."""

    def work(*_: Any) -> Node:
        raise AssertionError("the client began to work")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_open", work)
        yield bench


def refused(answer: Message) -> str:
    assert answer.has_error()
    reason = str(answer.error.reason)
    assert reason.startswith("The server's message is refused: ")
    assert len(reason) < 500
    return reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_proper_request_is_answered(bench: Bench, kind: str) -> None:
    assert not bench.ask(bench.content(run=f"answered-{kind}", experiment=f"e-{kind}"), kind).has_error()


@settings(max_examples=300, deadline=None)
@given(damage=st.sampled_from(list(DAMAGES)).flatmap(lambda key: st.tuples(st.just(key), DAMAGES[key])), data=st.data())
def test_a_request_with_one_bad_field_is_refused_before_any_work(
    idle: Bench, damage: tuple[str, Any], data: st.DataObject
) -> None:
    key, value = damage
    content = idle.content()
    content.config_records["config"][key] = value
    reason = refused(idle.ask(content, data.draw(st.sampled_from(KINDS))))
    assert {"version": "fedem", "plan": "plan"}.get(key, key) in reason


@pytest.mark.parametrize("key", [*ABOUT, "version", "plan"])
def test_a_request_without_a_field_is_refused(idle: Bench, key: str) -> None:
    content = idle.content()
    del content.config_records["config"][key]
    refused(idle.ask(content, TRAIN))


def test_rounds_end_where_the_run_does(idle: Bench) -> None:
    assert "round is 3; allowed: a whole number from 0 to 2" in refused(idle.ask(idle.content(round=3), TRAIN))
    assert "round is 4; allowed: a whole number from 0 to 3" in refused(idle.ask(idle.content(round=4), KEEP))
    many = refused(idle.ask(idle.content(num_rounds=10**12), TRAIN))
    assert "num_rounds is 1000000000000; allowed: a whole number from 1 to 1000000" in many


array_damages = st.one_of(
    st.tuples(st.just("bytes"), st.binary(max_size=200)),
    st.tuples(st.just("dtype"), st.sampled_from(["float64", "object", "O", "", "nonsense", "int8"])),
    st.tuples(st.just("shape"), st.sampled_from([(), (0,), (-1,), (10**12,), (1, 2, 3)])),
    st.tuples(st.just("stype"), st.sampled_from(["", "pickle", "torch"])),
    st.tuples(st.just("missing"), st.none()),
    st.tuples(st.just("foreign"), st.text("abc", min_size=1, max_size=300)),
)


def damaged(record: ArrayRecord, what: str, value: Any) -> ArrayRecord:
    first, *others = record.items()
    name, array = first
    kept = dict(others)
    if what == "foreign":
        return ArrayRecord({name: array, **kept, f"foreign {value}": array})
    if what == "missing":
        return ArrayRecord(kept)
    parts = {"dtype": array.dtype, "shape": array.shape, "stype": array.stype, "bytes": array.data}
    parts[what] = value
    return ArrayRecord({name: Array(parts["dtype"], parts["shape"], parts["stype"], parts["bytes"]), **kept})


@settings(max_examples=100, deadline=None)
@given(damage=array_damages)
def test_bad_arrays_never_become_more_than_a_refusal(idle: Bench, damage: tuple[str, Any]) -> None:
    content = idle.content()
    content["arrays"] = damaged(idle.arrays, *damage)
    answer = idle.ask(content, TRAIN)
    assert answer.has_error()
    # What an array says of itself beside its bytes is not believed, and need not be right.
    if damage[0] not in ("dtype", "shape"):
        refused(answer)


RECORDS = {
    "nothing": RecordDict(),
    "other names": RecordDict({"c": ConfigRecord(), "a": ArrayRecord()}),
    "other kinds": RecordDict({"config": MetricRecord({"round": 1}), "arrays": ConfigRecord()}),
    "empty": RecordDict({"config": ConfigRecord(), "arrays": ArrayRecord()}),
}


@pytest.mark.parametrize("content", RECORDS.values(), ids=RECORDS)
def test_a_message_of_another_shape_is_refused(idle: Bench, content: RecordDict) -> None:
    refused(idle.ask(content, TRAIN))


@pytest.mark.parametrize("place", ["Plan.load", "read_request", "Node.open", "Node.train", "write_reply"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, RecursionError, UnicodeDecodeError])
def test_whatever_fails_the_server_learns_only_that(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str, error: type[Exception]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise (
            UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET) if error is UnicodeDecodeError else error(SECRET)
        )

    owner, _, name = place.rpartition(".")
    monkeypatch.setattr({"Plan": Plan, "Node": Node, "": client}[owner], name, fail)
    answer = bench.ask(bench.content(experiment="failing"), TRAIN)
    assert answer.has_error()
    assert answer.error.reason == "its own log says why; see 'data' and 'state' of its node config."


def test_a_whole_number_is_a_learning_rate_too(idle: Bench) -> None:
    content = idle.content(learning_rate=1, num_rounds=1)
    assert messages.read_request(Message(content, NODE, TRAIN), idle.plan).learning_rate == 1
