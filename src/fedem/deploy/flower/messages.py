"""Trees <-> Flower's records, and what is wrong with an answer.

One tree is one record whose keys are the names of its leaves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedem.core import VERSION
from fedem.core.errors import UserError
from fedem.core.random import client_keys
from fedem.core.tree import Tree, tree_bytes
from fedem.data.federation import PARTS
from fedem.deploy.node import Assessed
from fedem.deploy.plan import Plan
from fedem.models.losses import SquaredError

TRAIN, EVALUATE, KEEP = "train", "evaluate", "query.keep"
"""types of messages: run a round, score, and keep what has come out"""
_MOST_SAMPLES = 10**12
"""of one client: a mean must not be one client's because its number is absurd, nor overflow"""

Kind = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and type of each leaf."""


class Ask(NamedTuple):
    """What the server says to a client."""

    shared: Tree
    round: int
    """rounds done"""
    learning_rate: float
    experiment: str
    run: str
    """which run of the experiment: there may have been others by the same name"""


class Answer(NamedTuple):
    """What a client's round has come to."""

    client: str
    num_samples: int
    upload: Tree
    num_bytes: int
    """as it came over the network"""


class Scored(NamedTuple):
    """A client's sums."""

    client: str
    num_samples: int
    parts: dict[str, Assessed]


def to_record(tree: Tree) -> ArrayRecord:
    """Write a tree; a number becomes an array of one, and bfloat16, which numpy does not know, its bits."""
    arrays = {}
    for name, leaf in tree.items():
        plain = leaf.detach().cpu()
        plain = plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain
        arrays[name] = Array(plain.reshape(plain.shape or (1,)).contiguous().numpy())
    return ArrayRecord(arrays)


def to_tree(record: ArrayRecord, kind: Kind) -> Tree:
    """Read what :func:`to_record` wrote; ``kind`` tells which leaves were numbers, or bfloat16."""
    tree: Tree = {}
    for name, array in record.items():
        try:
            leaf = torch.from_numpy(array.numpy())
        except Exception as error:  # whatever reading bytes from outside may raise: that of numpy has no end
            raise UserError(f"leaf {name!r} can't be read ({type(error).__name__})") from None
        shape, dtype = kind.get(name, (None, None))
        if dtype == torch.bfloat16 and leaf.dtype == torch.int16:
            leaf = leaf.view(torch.bfloat16)
        tree[name] = leaf.reshape(()) if shape == () and leaf.shape == (1,) else leaf
    return tree


def kind_of(tree: Tree) -> Kind:
    """Return the shapes and types of a tree's leaves."""
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items()}


def upload_kind(plan: Plan, shared: Tree) -> Kind:
    """Return what an upload looks like, by a round without steps on two samples of zeros."""
    algorithm, shapes, device = plan.algorithm, plan.format, plan.device
    inputs = torch.zeros(2, *shapes.inputs, dtype=shapes.input_dtype, device=device)
    if isinstance(algorithm.model.loss, SquaredError):
        targets = torch.zeros(2, shapes.outputs, device=device)
    else:
        targets = torch.zeros(2, dtype=torch.int64, device=device)
    everything = torch.ones(2, dtype=torch.bool, device=device)
    personal = algorithm.init_personal(shared, client_keys(["(nobody)"])[0].to(device))
    scores = algorithm.score(shared, inputs, targets) | algorithm.survey(shared, personal, inputs, targets, everything)
    local, _ = algorithm.begin(shared, personal, scores, everything)
    trained = algorithm.finish(local)
    if (codec := plan.codec) is None:
        return kind_of(trained.upload)
    message, _ = codec.encode(trained.upload, shared, trained.personal, codec.first_residual(shared))
    return kind_of(message)


def check_leaves(tree: Tree, kind: Kind) -> None:
    """Refuse leaves that are missing, foreign, of another shape or type, or not finite."""
    for name in [*kind, *tree]:
        if name not in tree:
            raise UserError(f"leaf {name!r} is missing")
        if name not in kind:
            raise UserError(f"leaf {name!r} is none of {', '.join(kind)}")
        leaf, (shape, dtype) = tree[name], kind[name]
        if (tuple(leaf.shape), leaf.dtype) != (shape, dtype):
            raise UserError(
                f"leaf {name!r} is {leaf.dtype} of shape {list(leaf.shape)}; allowed: {dtype} of shape {list(shape)}"
            )
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise UserError(f"leaf {name!r} is not finite")


def write_ask(
    plan: Plan, arrays: ArrayRecord, round_index: int, learning_rate: float, experiment: str, run: str
) -> RecordDict:
    """Write what the server says."""
    config = ConfigRecord({"version": VERSION, "plan": plan.fingerprint, "experiment": experiment, "run": run})
    config["round"], config["learning_rate"] = round_index, learning_rate
    return RecordDict({"arrays": arrays, "config": config})


def read_ask(message: Message, plan: Plan) -> Ask:
    """Read what the server says; refuse it if it follows another plan."""
    try:
        config = message.content.config_records["config"]
        arrays = message.content.array_records["arrays"]
        version, theirs, experiment, run = (str(config[key]) for key in ("version", "plan", "experiment", "run"))
        done, rate = config["round"], config["learning_rate"]
    except KeyError as error:
        raise UserError(f"The server's message has no {error}.") from None
    if version != VERSION:
        raise UserError(f"The server has fedem {version}; allowed: {VERSION}, which this client has.")
    if theirs != plan.fingerprint:
        raise UserError(f"The server follows plan {theirs!r}; allowed: {plan.fingerprint!r}, which this client has.")
    # On all machines u looks alike, so an own one tells what to expect.
    kind = kind_of(plan.algorithm.init_shared(0))
    shared = to_tree(arrays, kind)
    try:
        check_leaves(shared, kind)
    except UserError as error:
        raise UserError(f"The server sent something else than the plan's model: {error}.") from None
    return Ask(shared, int(str(done)), float(str(rate)), experiment, run)


def write_answer(plan: Plan, client: str, num_samples: int, upload: Tree) -> RecordDict:
    """Write what a client's round has come to."""
    arrays = to_record(plan.codec.pack(upload) if plan.codec else upload)
    return _signed(plan, client, MetricRecord({"num_samples": num_samples}), arrays)


def write_scores(plan: Plan, client: str, num_samples: int, parts: Mapping[str, Assessed]) -> RecordDict:
    """Write a client's sums."""
    sums = {f"{part}_{key}": value for part, entry in parts.items() for key, value in entry._asdict().items()}
    return _signed(plan, client, MetricRecord({"num_samples": num_samples, **sums}))


def _signed(plan: Plan, client: str, metrics: MetricRecord, arrays: ArrayRecord | None = None) -> RecordDict:
    config = ConfigRecord({"version": VERSION, "plan": plan.fingerprint, "client": client})
    content = RecordDict({"config": config, "metrics": metrics})
    if arrays is not None:
        content["arrays"] = arrays
    return content


def check_reply(reply: Message, plan: Plan, kind: Kind) -> Answer:
    """Read a client's answer, or refuse it: the message names the client and what is wrong."""
    client, num_samples, _ = _head(reply, plan)
    try:
        if "arrays" not in reply.content.array_records:
            raise UserError("the upload is missing")
        raw = to_tree(reply.content.array_records["arrays"], kind)
        try:
            upload = plan.codec.unpack(raw) if plan.codec else raw
        except Exception as error:  # likewise: nothing is known of the leaves yet
            raise UserError(f"the upload can't be unpacked ({error})") from None
        check_leaves(upload, kind)
    except UserError as error:
        raise UserError(f"Client {client!r} is refused: {error}.") from None
    return Answer(client, num_samples, upload, tree_bytes(raw))


def check_scores(reply: Message, plan: Plan) -> Scored:
    """Read a client's sums, or refuse them likewise."""
    client, num_samples, metrics = _head(reply, plan)
    parts = {}
    for part in PARTS:
        if f"{part}_samples" not in metrics:
            continue
        samples, loss, value = (metrics.get(f"{part}_{key}") for key in Assessed._fields)
        if not isinstance(samples, int) or samples < 1:
            raise UserError(f"Client {client!r} is refused: {part}_samples is {samples!r}; allowed: from 1.")
        sums = [number for number in (loss, value) if isinstance(number, int | float) and math.isfinite(number)]
        if len(sums) < 2:
            raise UserError(f"Client {client!r} is refused: its sums of {part} are {loss!r} and {value!r}.")
        parts[part] = Assessed(samples, *map(float, sums))
    return Scored(client, num_samples, parts)


def _head(reply: Message, plan: Plan) -> tuple[str, int, MetricRecord]:
    """Return who answers, its number of training samples and all its numbers."""
    node = reply.metadata.src_node_id
    if reply.has_error():
        raise UserError(f"Node {node} did not answer: {reply.error.reason or f'error {reply.error.code}'}")
    config = reply.content.config_records.get("config", ConfigRecord())
    metrics = reply.content.metric_records.get("metrics", MetricRecord())
    client, theirs, count = config.get("client"), config.get("plan"), metrics.get("num_samples")
    if not isinstance(client, str) or not client:
        raise UserError(f"Node {node} is refused: its client's name is {client!r}.")
    if theirs != plan.fingerprint:
        raise UserError(f"Client {client!r} is refused: it follows plan {theirs!r}; allowed: {plan.fingerprint!r}.")
    if (version := config.get("version")) != VERSION:
        raise UserError(f"Client {client!r} is refused: it has fedem {version!r}; allowed: {VERSION!r}.")
    if not isinstance(count, int) or not 1 <= count <= _MOST_SAMPLES:
        raise UserError(
            f"Client {client!r} is refused: its number of samples is {count!r}; allowed: from 1 to {_MOST_SAMPLES:,}."
        )
    return client, count, metrics
