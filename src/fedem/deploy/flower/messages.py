"""What a Flower server and its clients say to each other, written as Flower's records, and which of it is refused."""

import math
from collections.abc import Mapping
from reprlib import repr as shorten
from typing import NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedem.core import VERSION
from fedem.core.errors import UserError, naming
from fedem.core.random import client_keys
from fedem.core.tree import Tree, tree_bytes
from fedem.data.federation import PARTS
from fedem.deploy.node import Node, ScoreSums
from fedem.deploy.plan import MOST_ROUNDS, Plan, check_name
from fedem.models.losses import SquaredError

# Messages: run a round, score, keep the result, and say how many samples there are.
TRAIN, EVALUATE, KEEP, COUNT = "train", "evaluate", "query.keep", "query.count"
_MOST_SAMPLES = 10**12  # of a client: a mean must not be one client's because its number is absurd, nor overflow
_LONGEST_NAME = 200  # characters of a client's name

About = dict[str, str | int | float | list[int]]  # the fields of a request beside the tree
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # the shape and type of each leaf


class Request(NamedTuple):
    """A message of the server."""

    shared: Tree
    round: int  # rounds done
    learning_rate: float
    experiment: str
    run: str  # which run of the experiment: there may have been others by the same name
    num_rounds: int  # of the run, which may have other rounds than its plan
    rollbacks: tuple[int, ...] = ()  # the rounds that the run was rolled back to, in that order


class Reply(NamedTuple):
    """A client's answer."""

    client: str
    num_samples: int
    scores: dict[str, ScoreSums]  # by part of its data; none after a round
    upload: Tree
    num_bytes: int  # of the upload, as it came over the network


def to_record(tree: Tree) -> ArrayRecord:
    """Write a tree, one array for each leaf; a number becomes an array of one, bfloat16 its bits, for numpy's sake."""
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
            raise UserError(f"leaf {name!r} can't be read ({type(error).__name__}).") from None
        shape, dtype = layout.get(name, (None, None))
        if dtype == torch.bfloat16 and leaf.dtype == torch.int16:
            leaf = leaf.view(torch.bfloat16)
        tree[name] = leaf.reshape(()) if shape == () and leaf.shape == (1,) else leaf
    return tree


def layout_of(tree: Tree) -> Layout:
    """Return the shape and type of each leaf."""
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items()}


def upload_layout(plan: Plan, shared: Tree) -> Layout:
    """Return the layout of an upload, by a round without steps on two samples of zeros."""
    algorithm, codec, sample, device = plan.algorithm, plan.codec, plan.format, plan.device
    inputs = torch.zeros(2, *sample.inputs, dtype=sample.input_dtype, device=device)
    is_regression = isinstance(algorithm.model.loss, SquaredError)
    targets = torch.zeros(2, sample.outputs) if is_regression else torch.zeros(2, dtype=torch.int64)
    targets = targets.to(device)
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
            raise UserError(f"leaf {name!r} is missing.")
        if name not in layout:
            raise UserError(f"leaf {name!r} is none of {', '.join(layout)}.")
        leaf, (shape, dtype) = tree[name], layout[name]
        if (tuple(leaf.shape), leaf.dtype) != (shape, dtype):
            found = f"{leaf.dtype} of shape {list(leaf.shape)}"
            raise UserError(f"leaf {name!r} is {found}; allowed: {dtype} of shape {list(shape)}.")
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise UserError(f"leaf {name!r} is not finite.")


def write_request(plan: Plan, arrays: ArrayRecord, about: About) -> RecordDict:
    """Write a message of the server: a :class:`Request` whose fields beside the tree are ``about`` the run."""
    config = ConfigRecord({"version": VERSION, "plan": plan.fingerprint, **about})
    return RecordDict({"arrays": arrays, "config": config})


def read_request(message: Message, plan: Plan) -> Request:
    """Read a message of the server; refuse it if it follows another plan, or asks for what no run of fedem does."""
    with naming("The server's message is refused"):
        records = message.content if message.has_content() else RecordDict()
        config, arrays = records.config_records.get("config"), records.array_records.get("arrays")
        if config is None or arrays is None:
            raise UserError("it has no 'config' or no 'arrays'.")
        _check_agreement(config, plan)
        num_rounds = _read_whole(config, "num_rounds", 1, MOST_ROUNDS)
        # All rounds may be done, unless another is to be trained.
        done = _read_whole(config, "round", 0, num_rounds - (message.metadata.message_type == TRAIN))
        rate = config.get("learning_rate")
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate < math.inf:
            raise UserError(f"learning_rate is {shorten(rate)}; allowed: a finite number, at least 0.")
        experiment, run = (check_name(key, config.get(key)) for key in ("experiment", "run"))
        # On all machines u looks alike, so an own one shows what to expect.
        layout = layout_of(plan.algorithm.init_shared(0))
        shared = to_tree(arrays, layout)
        check_leaves(shared, layout)
        rollbacks = _read_rollbacks(config)
    return Request(shared, done, rate, experiment, run, num_rounds, rollbacks)


def _read_rollbacks(config: ConfigRecord) -> tuple[int, ...]:
    said = config.get("rollbacks")
    rounds = [each for each in said if type(each) is int and each >= 0] if isinstance(said, list) else None
    if rounds is None or rounds != said:
        raise UserError(f"rollbacks is {said!r}; allowed: a list of rounds, whole numbers from 0.")
    return tuple(rounds)


def _read_whole(config: ConfigRecord, key: str, least: int, most: int) -> int:
    if type(value := config.get(key)) is not int or not least <= value <= most:  # true is none
        raise UserError(f"{key} is {shorten(value)}; allowed: a whole number from {least} to {most}.")
    return value


def write_reply(node: Node, scores: Mapping[str, ScoreSums], upload: Tree | None = None) -> RecordDict:
    """Write a client's scores, or its answer to a round."""
    config = ConfigRecord({"version": VERSION, "plan": node.plan.fingerprint, "client": node.name})
    sums = {f"{part}_{key}": value for part, entry in scores.items() for key, value in entry._asdict().items()}
    content = RecordDict({"config": config, "metrics": MetricRecord({"num_samples": node.num_samples, **sums})})
    if upload is not None:
        content["arrays"] = to_record(node.plan.codec.pack(upload) if node.plan.codec else upload)
    return content


def read_reply(reply: Message, plan: Plan, layout: Layout | None = None) -> Reply:
    """Read a client's answer, with an upload if a ``layout`` is expected; an error names the client and the fault."""
    node = reply.metadata.src_node_id
    if reply.has_error():
        raise UserError(f"Node {node} did not answer: {reply.error.reason or f'error {reply.error.code}'}")
    config = reply.content.config_records.get("config", ConfigRecord())
    metrics = reply.content.metric_records.get("metrics", MetricRecord())
    client, count = config.get("client"), metrics.get("num_samples")
    if not isinstance(client, str) or not 1 <= len(client) <= _LONGEST_NAME:
        allowed = f"1 to {_LONGEST_NAME} characters"
        raise UserError(f"Node {node} is refused: its client's name is {shorten(client)}; allowed: {allowed}.")
    with naming(f"Client {client!r} is refused"):
        _check_agreement(config, plan)
        if not isinstance(count, int) or not 1 <= count <= _MOST_SAMPLES:
            raise UserError(f"its number of samples is {count!r}; allowed: from 1 to {_MOST_SAMPLES:,}.")
        scores = {part: _read_sums(metrics, part) for part in PARTS if f"{part}_samples" in metrics}
        if layout is None:
            return Reply(client, count, scores, {}, 0)
        if "arrays" not in reply.content.array_records:
            raise UserError("the upload is missing.")
        packed = to_tree(reply.content.array_records["arrays"], layout)
        try:
            upload = plan.codec.unpack(packed) if plan.codec else packed
        except Exception as error:  # likewise: nothing is known of the leaves yet
            raise UserError(f"the upload can't be unpacked ({error}).") from None
        check_leaves(upload, layout)
        return Reply(client, count, scores, upload, tree_bytes(packed))


def _read_sums(metrics: MetricRecord, part: str) -> ScoreSums:
    samples, loss, value = (metrics.get(f"{part}_{key}") for key in ScoreSums._fields)
    if not isinstance(samples, int) or samples < 1:
        raise UserError(f"{part}_samples is {samples!r}; allowed: from 1.")
    sums = [number for number in (loss, value) if isinstance(number, int | float) and math.isfinite(number)]
    if len(sums) < 2:
        raise UserError(f"its sums of {part} are {loss!r} and {value!r}.")
    return ScoreSums(samples, *map(float, sums))


def is_under(reply: Message, plan: Plan) -> bool:
    """Whether an answer came, and says that it follows the plan with this version: its faults are not of an upgrade."""
    config = None if reply.has_error() else reply.content.config_records.get("config")
    return config is not None and (config.get("version"), config.get("plan")) == (VERSION, plan.fingerprint)


def _check_agreement(config: ConfigRecord, plan: Plan) -> None:
    if (version := config.get("version")) != VERSION:
        raise UserError(f"it has fedem {version!r}; allowed: {VERSION!r}.")
    if (theirs := config.get("plan")) != plan.fingerprint:
        raise UserError(f"it follows plan {theirs!r}; allowed: {plan.fingerprint!r}.")
