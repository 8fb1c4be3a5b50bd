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
from fedem.deploy.kept import Earlier, Kept, kept_path
from fedem.deploy.node import Node, read_clients
from fedem.deploy.plan import NodeConfig, Plan, RunConfig

log = logging.getLogger("flwr")  # whose lines end up where the rest of a run's do
_RENAME = "allowed: a run config whose experiment has another name"


@dataclass(frozen=True, eq=False)
class Client:
    """A node's answers to the server."""

    node: Node
    path: Path  # of the file that it keeps
    keep_rounds: int = RunConfig.keep  # of how many rounds it keeps v_t, as many as the server can be rolled back by

    def train(self, request: Request) -> RecordDict:
        """Run a round from what was kept, keep its result, then answer."""
        kept = self._kept(request)
        # The server may repeat a round: it never got the answer, or lost it.
        start = self.node.first_personal(request.shared) if kept is None else kept.personal
        upload, personal = self.node.train(request.shared, start, request.round, request.learning_rate)
        self._keep(kept, request, request.round + 1, personal, before=start)
        return write_reply(self.node, {}, upload)

    def count(self, request: Request) -> RecordDict:
        """Say how many samples there are to train on, and no more."""
        return write_reply(self.node, {})

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
        self._keep(kept, request, request.round, own, shared, before=personal)
        return write_reply(self.node, {})

    def _keep(
        self, kept: Kept | None, request: Request, done: int, own: Tree, shared: Tree | None = None, *, before: Tree
    ) -> None:
        """Replace the file; ``before`` is the personal tree that ``own`` was made from."""
        if kept is None:
            joined, earlier = request.round, [Earlier(request.round, before)]
        else:  # asked for its predictor once more, it has had this one before
            past = kept.earlier[1:] if kept.shared is not None and shared is not None else kept.earlier
            joined, earlier = kept.joined, [Earlier(kept.round, before), *past][: self.keep_rounds]
        plan, name, followed = self.node.plan, self.node.name, len(request.rollbacks)
        new = Kept(plan, done, own, shared, earlier, request.run, name, joined=joined, rollbacks=followed)
        new.save(self.path)

    def _kept(self, request: Request) -> Kept | None:
        """Read what was kept by the round that the server has reached; refuse what is of another plan or run.

        A server that was rolled back says to which rounds. Whatever came after them is undone here, too, also where the
        client was away until the server's rounds were beyond its own again.
        """
        if not self.path.exists():
            return None
        kept = Kept.load(self.path)
        theirs, ours = kept.plan.fingerprint, self.node.plan.fingerprint
        if theirs != ours:
            raise UserError(f"{self.path} was kept under plan {theirs}, but the present one is {ours}; {_RENAME}.")
        if kept.run != request.run:
            other = f"another run of experiment {request.experiment!r}, and stays as it is"
            raise UserError(f"{self.path} was kept in {other}; {_RENAME}, or to move that file away.")
        try:
            then = kept.at(min([request.round, *request.rollbacks[kept.rollbacks :]]))
        except UserError as error:
            raise UserError(f"{self.path}: {error}; {_RENAME}, or to remove that file.") from None
        if then is not kept and request.rollbacks[kept.rollbacks :]:
            log.warning("The server was rolled back; %s goes back to round %d.", self.path, then.round if then else 0)
        return then


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
        client = Client(node, kept_path(state, request.experiment, node.name), run.keep)
        return Message(act(client, request), reply_to=message)
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
