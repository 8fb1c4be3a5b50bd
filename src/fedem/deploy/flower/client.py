"""The client's side behind a Flower server: answers to messages, between which all it learns is in one file."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedem.core.errors import UserError
from fedem.core.tree import Tree
from fedem.deploy.flower.messages import Request, read_request, write_reply
from fedem.deploy.kept import Kept, kept_path
from fedem.deploy.node import Node, read_clients
from fedem.deploy.plan import NodeConfig, Plan, RunConfig

log = logging.getLogger("flwr")  # whose lines end up where the rest of a run's do
_RENAME = "allowed: a run config whose experiment has another name"


@dataclass(frozen=True, eq=False)
class Client:
    """A node's answers to the server."""

    node: Node
    path: Path  # of the file that it keeps

    def train(self, request: Request) -> RecordDict:
        """Run a round from what was kept, keep its result, then answer."""
        start = self._start(self._kept(request), request)
        upload, personal = self.node.train(request.shared, start, request.round, request.learning_rate)
        self._keep(request, request.round + 1, personal, before=start)
        return write_reply(self.node, {}, upload)

    def count(self, request: Request) -> RecordDict:
        """Say how many samples there are to train on, and no more."""
        return write_reply(self.node, {})

    def _start(self, kept: Kept | None, request: Request) -> Tree:
        if kept is None:
            return self.node.first_personal(request.shared)
        if kept.round <= request.round:
            return kept.personal
        # The server repeats a round: it never got the answer, or lost it.
        if kept.round == request.round + 1 and kept.before is not None:
            return kept.before
        rounds = f"of round {kept.round}, but the server begins round {request.round + 1}"
        raise UserError(f"{self.path} is {rounds}; {_RENAME}, or to remove that file.")

    def evaluate(self, request: Request) -> RecordDict:
        """Score the predictor; weights that were never trained are fitted at once, and not kept."""
        kept = self._kept(request)
        personal = self.node.fit(request.shared) if kept is None else kept.personal
        return write_reply(self.node, self.node.score(request.shared, personal))

    def keep(self, request: Request) -> RecordDict:
        """Keep the client's predictor, so that it can be used without a server."""
        if (kept := self._kept(request)) is None:
            personal = self.node.fit(request.shared)
        else:  # asked once more, it starts from what it had before it was asked
            personal = kept.personal if kept.shared is None or kept.before is None else kept.before
        shared, own = self.node.predictor(request.shared, personal)
        self._keep(request, request.round, own, shared, before=personal)
        return write_reply(self.node, {})

    def _keep(self, request: Request, done: int, personal: Tree, shared: Tree | None = None, *, before: Tree) -> None:
        Kept(self.node.plan, done, personal, shared, before, request.run, self.node.name).save(self.path)

    def _kept(self, request: Request) -> Kept | None:
        """Read what was kept, if there is something; refuse what belongs to another plan, or another run."""
        if not self.path.exists():
            return None
        kept = Kept.load(self.path)
        theirs, ours = kept.plan.fingerprint, self.node.plan.fingerprint
        if theirs != ours:
            raise UserError(f"{self.path} was kept under plan {theirs}, but the present one is {ours}; {_RENAME}.")
        if kept.run != request.run:
            other = f"another run of experiment {request.experiment!r}, and stays as it is"
            raise UserError(f"{self.path} was kept in {other}; {_RENAME}, or to move that file away.")
        return kept


def make_client_app(folder: Path) -> ClientApp:
    """Return the app of a client under the plan in ``folder``."""
    app = ClientApp()
    app.train()(partial(_answer, folder, Client.train))
    app.evaluate()(partial(_answer, folder, Client.evaluate))
    app.query("count")(partial(_answer, folder, Client.count))
    app.query("keep")(partial(_answer, folder, Client.keep))
    return app


def _answer(folder: Path, act: Callable[[Client, Request], RecordDict], message: Message, context: Context) -> Message:
    """Answer a message, or say why not. What is wrong with data stays here: the server only gets a hint."""
    try:
        own, run = NodeConfig.read(context.node_config), RunConfig.read(context.run_config)
        data, state = own.places(run)
        plan = Plan.load(folder).on_node(own.device)
        request = read_request(message, plan)
    except UserError as error:
        return _refusal(message, error, str(error))
    except Exception as error:
        return _failure(message, error)
    try:
        node = replace(_open(plan, data, own), num_rounds=request.num_rounds)
        return Message(act(Client(node, kept_path(state, request.experiment, node.name)), request), reply_to=message)
    except Exception as error:
        return _failure(message, error)


def _open(plan: Plan, data: Path, own: NodeConfig) -> Node:
    """Open the node's data; in a simulation the number of its partition says whose they are."""
    if own.client or own.partition_id < 0:
        return Node.open(plan, data, own.client or None)
    federation = read_clients(plan, data)
    if own.partition_id >= (count := federation.num_clients):
        raise UserError(f"The partition-id is {own.partition_id}; allowed: below {count}, the clients.")
    return Node(plan, federation.names[own.partition_id], federation).check()


def _failure(message: Message, error: Exception) -> Message:
    """Say that something failed; Flower would send the server what the error says."""
    if not isinstance(error, UserError):
        log.error("The message can't be answered.", exc_info=error)
    return _refusal(message, error, "its own log says why; see 'data' and 'state' of its node config.")


def _refusal(message: Message, error: Exception, reason: str) -> Message:
    log.error("%s", error)
    return Message(Error(0, reason), reply_to=message)
