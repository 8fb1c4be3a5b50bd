"""What a Flower server and its clients say to each other, written as Flower's records, and which messages are refused.

A tree is a record of arrays whose keys are the names of its leaves.
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
from fedem.deploy.node import ScoreSums
from fedem.deploy.plan import Plan
from fedem.models.losses import SquaredError

TRAIN, EVALUATE, KEEP = "train", "evaluate", "query.keep"
"""types of messages: run a round, score, and keep the result"""
_MOST_SAMPLES = 10**12
"""of one client: a mean must not be one client's because its number is absurd, nor overflow"""

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and type of each leaf."""


class Request(NamedTuple):
    """A message of the server."""

    shared: Tree
    round: int
    """rounds done"""
    learning_rate: float
    experiment: str
    run: str
    """which run of the experiment: there may have been others by the same name"""


class TrainReply(NamedTuple):
    """A client's answer to a round."""

    client: str
    num_samples: int
    upload: Tree
    num_bytes: int
    """as it came over the network"""


class ScoreReply(NamedTuple):
    """A client's scores."""

    client: str
    num_samples: int
    scores: dict[str, ScoreSums]
    """by part of its data"""


def to_record(tree: Tree) -> ArrayRecord:
    """Write a tree; a number becomes an array of one, and bfloat16, which numpy does not know, its bits."""
    arrays = {}
    for name, leaf in tree.items():
        plain = leaf.detach().cpu()
        plain = plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain
        arrays[name] = Array(plain.reshape(plain.shape or (1,)).contiguous().numpy())
    return ArrayRecord(arrays)


def to_tree(record: ArrayRecord, layout: Layout) -> Tree:
    """Read what :func:`to_record` wrote; the ``layout`` shows which leaves were numbers, or bfloat16."""
    tree: Tree = {}
    for name, array in record.items():
        try:
            leaf = torch.from_numpy(array.numpy())
        except Exception as error:  # whatever reading bytes from outside may raise: that of numpy has no end
            raise UserError(f"leaf {name!r} can't be read ({type(error).__name__})") from None
        shape, dtype = layout.get(name, (None, None))
        if dtype == torch.bfloat16 and leaf.dtype == torch.int16:
            leaf = leaf.view(torch.bfloat16)
        tree[name] = leaf.reshape(()) if shape == () and leaf.shape == (1,) else leaf
    return tree


def layout_of(tree: Tree) -> Layout:
    """Return the shapes and types of a tree's leaves."""
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items()}


def upload_layout(plan: Plan, shared: Tree) -> Layout:
    """Return the layout of an upload, by a round without steps on two samples of zeros."""
    algorithm, codec, sample, device = plan.algorithm, plan.codec, plan.format, plan.device
    inputs = torch.zeros(2, *sample.inputs, dtype=sample.input_dtype, device=device)
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    if isinstance(algorithm.model.loss, SquaredError):
        targets = torch.zeros(2, sample.outputs, device=device)
    everything = torch.ones(2, dtype=torch.bool, device=device)
    personal = algorithm.init_personal(shared, client_keys(["(nobody)"])[0].to(device))
    scores = algorithm.score(shared, inputs, targets) | algorithm.survey(shared, personal, inputs, targets, everything)
    local, _ = algorithm.begin(shared, personal, scores, everything)
    trained = algorithm.finish(local)
    if codec is None:
        return layout_of(trained.upload)
    return layout_of(codec.encode(trained.upload, shared, trained.personal, codec.first_residual(shared))[0])


def check_leaves(tree: Tree, layout: Layout) -> None:
    """Refuse leaves that are missing, foreign, of another shape or type, or not finite."""
    for name in [*layout, *tree]:
        if name not in tree:
            raise UserError(f"leaf {name!r} is missing")
        if name not in layout:
            raise UserError(f"leaf {name!r} is none of {', '.join(layout)}")
        leaf, (shape, dtype) = tree[name], layout[name]
        if (tuple(leaf.shape), leaf.dtype) != (shape, dtype):
            raise UserError(
                f"leaf {name!r} is {leaf.dtype} of shape {list(leaf.shape)}; allowed: {dtype} of shape {list(shape)}"
            )
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise UserError(f"leaf {name!r} is not finite")


def write_request(
    plan: Plan, arrays: ArrayRecord, round_index: int, learning_rate: float, experiment: str, run: str
) -> RecordDict:
    """Write a message of the server."""
    config = ConfigRecord({"version": VERSION, "plan": plan.fingerprint, "experiment": experiment, "run": run})
    config["round"], config["learning_rate"] = round_index, learning_rate
    return RecordDict({"arrays": arrays, "config": config})


def read_request(message: Message, plan: Plan) -> Request:
    """Read a message of the server; refuse it if it follows another plan."""
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
    # On all machines u looks alike, so an own one shows what to expect.
    layout = layout_of(plan.algorithm.init_shared(0))
    shared = to_tree(arrays, layout)
    try:
        check_leaves(shared, layout)
    except UserError as error:
        raise UserError(f"The server sent something else than the plan's model: {error}.") from None
    return Request(shared, int(str(done)), float(str(rate)), experiment, run)


def write_upload(plan: Plan, client: str, num_samples: int, upload: Tree) -> RecordDict:
    """Write a client's answer to a round."""
    packed = plan.codec.pack(upload) if plan.codec else upload
    return _reply(plan, client, {"num_samples": num_samples}, packed)


def write_scores(plan: Plan, client: str, num_samples: int, scores: Mapping[str, ScoreSums]) -> RecordDict:
    """Write a client's scores."""
    sums = {f"{part}_{key}": value for part, entry in scores.items() for key, value in entry._asdict().items()}
    return _reply(plan, client, {"num_samples": num_samples, **sums})


def read_upload(reply: Message, plan: Plan, layout: Layout) -> TrainReply:
    """Read a client's answer to a round, or refuse it: the error names the client and what is wrong."""
    client, num_samples, _ = _read_head(reply, plan)
    try:
        if "arrays" not in reply.content.array_records:
            raise UserError("the upload is missing")
        packed = to_tree(reply.content.array_records["arrays"], layout)
        try:
            upload = plan.codec.unpack(packed) if plan.codec else packed
        except Exception as error:  # likewise: nothing is known of the leaves yet
            raise UserError(f"the upload can't be unpacked ({error})") from None
        check_leaves(upload, layout)
    except UserError as error:
        raise UserError(f"Client {client!r} is refused: {error}.") from None
    return TrainReply(client, num_samples, upload, tree_bytes(packed))


def read_scores(reply: Message, plan: Plan) -> ScoreReply:
    """Read a client's scores, or refuse them likewise."""
    client, num_samples, metrics = _read_head(reply, plan)
    scores = {}
    for part in PARTS:
        if f"{part}_samples" not in metrics:
            continue
        samples, loss, value = (metrics.get(f"{part}_{key}") for key in ScoreSums._fields)
        if not isinstance(samples, int) or samples < 1:
            raise UserError(f"Client {client!r} is refused: {part}_samples is {samples!r}; allowed: from 1.")
        sums = [number for number in (loss, value) if isinstance(number, int | float) and math.isfinite(number)]
        if len(sums) < 2:
            raise UserError(f"Client {client!r} is refused: its sums of {part} are {loss!r} and {value!r}.")
        scores[part] = ScoreSums(samples, *map(float, sums))
    return ScoreReply(client, num_samples, scores)


def _reply(plan: Plan, client: str, metrics: Mapping[str, float], arrays: Tree | None = None) -> RecordDict:
    """Write an answer that says whose it is."""
    config = ConfigRecord({"version": VERSION, "plan": plan.fingerprint, "client": client})
    content = RecordDict({"config": config, "metrics": MetricRecord(dict(metrics))})
    if arrays is not None:
        content["arrays"] = to_record(arrays)
    return content


def _read_head(reply: Message, plan: Plan) -> tuple[str, int, MetricRecord]:
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
