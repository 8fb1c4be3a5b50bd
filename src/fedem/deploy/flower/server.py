"""The server's side in Flower: a strategy that runs any method whose server averages, and the app around it."""

import logging
import math
import secrets
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.app.exception import AppExitException
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from fedem.core.errors import UserError, counted
from fedem.core.random import COHORT, choose, client_keys
from fedem.core.tree import tree_bytes, tree_index, tree_repeat, tree_to
from fedem.deploy.flower import messages
from fedem.deploy.flower.messages import Layout, Reply
from fedem.deploy.flower.project import check_server
from fedem.deploy.flower.watch import Watch, check_scores
from fedem.deploy.history import History, open_uploads
from fedem.deploy.node import combine_scores
from fedem.deploy.plan import Plan, RunConfig
from fedem.methods.mixer import Round
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import DivergedError, RoundCosts, State, cohort_size, first_state, mixer_seed, server_step

log = logging.getLogger("flwr")  # whose lines are shown while a run is followed
_POLL = 1.0  # seconds between looks at who is connected
_KEY = b"-----BEGIN PUBLIC KEY-----"  # what nodes of a simulation have in its place is random


class Known(NamedTuple):
    """A node as the SuperLink knows it."""

    owner: str  # a hash of its key, or its number where it has none
    name: str  # under which its key was registered; empty where under none


class ClientRegistry:
    """Which node has which client, so that no two clients' samples go by one name, and no node takes another's.

    A name belongs to a key for good: to the one that was registered under it, otherwise to the first that answered by
    it. The SuperLink takes messages of a node by its key alone. Nodes without keys, as in a simulation, have a name for
    as long as they are connected. What is kept are hashes: nothing that the server writes shows who took part.
    """

    def __init__(self, token: str, owners: Mapping[str, str]):
        self.connected: frozenset[int] = frozenset()  # when those who answer were asked
        self.sizes: dict[int, int] = {}  # samples to train on of each node that has answered
        self.owners = dict(owners)  # the one name of each owner
        self._token = token
        self._known: dict[int, Known] = {}
        self._warned: set[tuple[str, int]] = set()

    def hashed(self, client: str) -> str:
        """Return what is kept of a client's name."""
        return self._hash(client.encode(errors="surrogatepass"))

    def name_at(self, node: int) -> str:
        """Return the hash of the name that a node has answered by or is registered under; empty where by none."""
        if (known := self._known.get(node)) is None:
            return ""
        return self.owners.get(known.owner) or (self.hashed(known.name) if known.name else "")

    def meet(self, nodes: Iterable[NodeInfo]) -> list[int]:
        """Note who is connected; returns the nodes' numbers, in order."""
        found = {node.node_id: node for node in nodes}
        self.connected = frozenset(found)
        for number, node in found.items():
            plain, keyed = Known(str(number), ""), Known(f"key {self._hash(node.public_key)}", node.name)
            self._known[number] = keyed if node.public_key.startswith(_KEY) else plain
        return sorted(found)

    def admits(self, client: str, node: int) -> bool:
        """Whether ``client`` may answer from ``node``, which has its name from then on; warns once if not."""
        own, name = self._known[node], self.hashed(client)
        if own.name not in ("", client):
            why = f"Node {node} is registered as {own.name!r}; its answers as {client!r} are left out."
            return self._refuse(client, node, why)
        rivals = [owner for owner, taken in self.owners.items() if taken == name and owner != own.owner]
        if not own.name:  # nor does it take a name under which another is registered that has not answered yet
            rivals += [other.owner for other in self._known.values() if other.name == client]
        for owner in rivals:
            numbers = [number for number, other in self._known.items() if other.owner == owner]
            where = f"node {numbers[0]}" if numbers else "a node that is not connected"
            if self._keeps_name(owner, own):
                why = f"Client {client!r} is at {where}; node {node}, which uses its name, is left out."
                return self._refuse(client, node, why)
            log.warning("Client %r is at node %d now, and no longer at %s.", client, node, where)
            del self.owners[owner]
        self.owners[own.owner] = name
        return True

    def _keeps_name(self, owner: str, rival: Known) -> bool:
        there = [self._known[number].name for number in self.connected if self._known[number].owner == owner]
        if rival.name:  # who registers keys gave it this name; if to both, the first has it while it is there
            return rival.name in there
        return bool(there) or owner.startswith("key ")

    def _refuse(self, client: str, node: int, why: str) -> bool:
        if (client, node) not in self._warned:
            log.warning("%s", why)
            self._warned.add((client, node))
        return False

    def _hash(self, content: bytes) -> str:
        return blake2b(content, digest_size=16, key=self._token.encode()).hexdigest()


class StoppedError(UserError, AppExitException):
    """What a user is to read of a run that fails; whatever its server raises, Flower has it fail."""

    exit_code = 249  # none of Flower's own, which come with explanations that are wrong here


class Lines(NamedTuple):
    """Files of a run that get one line per round."""

    metrics: IO[str]
    uploads: IO[str]


class MethodStrategy(Strategy):
    """Flower's loop over rounds, with the method and the mixer of a plan inside. Rounds that are done stay done."""

    def __init__(self, plan: Plan, run: RunConfig, folder: RunFolder, state: State, metadata: Record, files: Lines):
        self.plan, self.run, self.folder, self.state, self.config = plan, run, folder, state, folder.config()
        self.token = str(metadata["run"])  # what distinguishes it from other runs by the same name
        self._layout = messages.upload_layout(plan, tree_index(state.shared, 0))
        self._files, self._started = files, time.perf_counter() - metadata["seconds"]
        self._registry = ClientRegistry(self.token, metadata.get("owners", {}))
        self._rollbacks: list[int] = metadata.get("rollbacks", [])
        self._watch = Watch(run, metadata.get("watch", {}))
        self._watch.readmit(run.readmit, self._registry.hashed)
        self._round_started, self._num_asked = 0.0, 0
        self._record: Record = {}

    @property
    def seconds(self) -> float:
        """How long the run has taken in all, as far as it is kept."""
        return time.perf_counter() - self._started

    @property
    def arrays(self) -> ArrayRecord:
        return messages.to_record(tree_index(self.state.shared, 0))

    @property
    def rate(self) -> float:
        # Of the next round; a run may have other rounds than its plan.
        return self.config.schedule.rate(self.state.round, self.config.run.rounds)

    def summary(self) -> None:
        log.info("\t├── Method: %s, experiment %s", self.config.name("method"), self.run.experiment)
        log.info("\t├── Rounds done: %d of %d", self.state.round, self.config.run.rounds)
        log.info("\t└── Folder: %s", self.folder.path.absolute())

    def connected(self, grid: Grid) -> list[int]:
        """Return the nodes that are connected; waits for as many as there must be, though not for ever.

        Those that are set aside count for nothing.
        """
        deadline = time.monotonic() + self.run.wait
        while len(nodes := self._present(grid)) < self.run.min_clients and time.monotonic() <= deadline:
            time.sleep(min(_POLL, self.run.wait))
        return nodes

    def _present(self, grid: Grid) -> list[int]:
        return [node for node in self._registry.meet(grid.get_nodes()) if self._watch.takes(node)]

    def requests(self, kind: str, arrays: ArrayRecord, nodes: Iterable[int]) -> list[Message]:
        """Write the same message to some nodes; it is not delivered once nobody waits for the answer."""
        done, experiment, rounds = self.state.round, self.run.experiment, self.config.run.rounds
        about: messages.About = {"round": done, "num_rounds": rounds, "learning_rate": self.rate}
        about |= {"experiment": experiment, "run": self.token, "rollbacks": self._rollbacks}
        content = messages.write_request(self.plan, arrays, about)
        return [Message(content, node, kind, ttl=self.run.timeout, group_id=str(done)) for node in nodes]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's cohort, chosen by hashing the seed, the round and the nodes' numbers."""
        nodes, least = self.connected(grid), self.run.min_clients
        if len(nodes) < least:
            there = f"After {self.run.wait:g} seconds {counted(len(nodes), 'node is', 'nodes are')} connected"
            there += f", without {counted(aside, 'node')} set aside" if (aside := len(self._watch.aside)) else ""
            mend = f"`continue = true` goes on after round {self.state.round}"
            raise UserError(f"{there}; needed: min-clients {least}. {mend}.")
        strangers = [node for node in nodes if node not in self._registry.sizes]
        if self.plan.algorithm.needs_share and strangers:
            self._accepted(self._ask(grid, messages.COUNT, strangers))
        wanted, keys = self.config.run.clients_per_round, client_keys([str(node) for node in nodes])
        # A number of clients is one to aim at: fewer may be connected. A mean over too few would show single ones.
        count = min(len(nodes), max(least, cohort_size(wanted, max(len(nodes), math.ceil(wanted)))))
        cohort = [nodes[at] for at in choose(keys, count, COHORT, self.config.run.seed, self.state.round).tolist()]
        self._round_started, self._num_asked = time.perf_counter(), len(cohort)
        return self.requests(messages.TRAIN, arrays, cohort)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, None]:
        """Mix the good answers; with too few of them u stays as it is."""
        found = self._accepted(replies, self._layout)
        before, rate, least = self.state, self.rate, self.run.min_clients
        steps = self.config.batching.num_steps(torch.tensor([answer.num_samples for answer in found.values()]))
        found = self._watch.alike(self.plan, tree_index(before.shared, 0), found, steps)
        self._watch.heard(found)
        answers = list(found.values())
        done, count, taken = before.round + 1, len(answers), 0
        self.state = replace(before, round=done)
        if count < least:
            good = counted(count, "good answer")
            log.warning("Round %d: %s, needed %d; the model stays as it is.", done, good, least)
        else:
            try:
                self.state, taken = self._mix(before, answers, rate), count
            except DivergedError:
                log.warning("Round %d: the mean is not finite; the model stays as it is.", done)
        seconds, bytes_up = time.perf_counter() - self._round_started, sum(answer.num_bytes for answer in answers)
        bytes_down = tree_bytes(tree_index(before.shared, 0)) * self._num_asked
        self._record = RoundCosts(done, rate, taken, seconds, bytes_up, bytes_down)._asdict()
        return self.arrays, None

    def _mix(self, state: State, answers: Sequence[Reply], rate: float) -> State:
        sizes, known = torch.tensor([answer.num_samples for answer in answers]), self._registry
        clients, key = torch.arange(len(answers)), mixer_seed(self.config.run.seed, state.round)
        average, trained = float(sizes.double().mean()), self.plan.model.trainable
        there = [node for node in known.connected if self._watch.takes(node)]
        this = Round(clients, sizes, len(there), rate, key, average, trained)
        trees = (tree_repeat(tree_to(answer.upload, self.plan.device), 1) for answer in answers)
        uploads = zip(clients[:, None], trees, strict=True)
        everybody = sum(known.sizes.get(node, 0) for node in there)
        return server_step(self.plan.method, state, this, uploads, int(sizes.sum()) / everybody)[0]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask everybody, when it is due and enough are there: whether they are or not, the round has been trained."""
        done, least = self.state.round, self.run.min_clients
        if not self.config.run.is_scored(done):
            return []
        nodes = self.connected(grid)
        if len(nodes) < least:
            there = counted(len(nodes), "node is", "nodes are")
            log.warning("Round %d is not scored: %s connected, needed %d.", done, there, least)
            return []
        return self.requests(messages.EVALUATE, arrays, nodes)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average over clients; then the round is complete, and written down, clients' own figures apart."""
        answers = self._accepted(replies)
        self._watch.heard(answers)
        scored, least = list(answers.values()), self.run.min_clients
        if scored and len(scored) < least:
            log.warning("%s sent scores, needed %d; they are not averaged.", counted(len(scored), "client"), least)
        metric = self.plan.model.loss.metric
        scores = combine_scores(metric, [(entry.num_samples, entry.scores) for entry in scored])
        found: Record = {}
        for part, entry in scores.items():
            if len(entry.counts) >= least:
                found |= {f"{part}_{metric}": entry.average, f"{part}_loss": entry.loss}
        self._record |= found
        noticed = {"round": self.state.round} | self._watch.close_round(self._registry.name_at)
        self._files.uploads.write(self.folder.line(noticed))
        self._files.metrics.write(self.folder.line(self._record))
        self.save()
        return MetricRecord(found) if found else None

    def save(self) -> None:
        """Write a checkpoint: the server's tree and, of clients, whose names are whose by hashes."""
        metadata = self.plan.metadata(()) | {"plan": self.plan.fingerprint, "run": self.token, "seconds": self.seconds}
        metadata |= {"owners": self._registry.owners, "watch": self._watch.to_json(), "rollbacks": self._rollbacks}
        self.folder.save({"last": self.state}, metadata)
        History(self.folder).add(self.state.round, self.run.keep)

    def hand_over(self, grid: Grid) -> None:
        nodes = self._present(grid)
        replies = self._accepted(self._ask(grid, messages.KEEP, nodes))
        keeping = counted(len(replies), "client keeps its model", "clients keep their models")
        log.info("%s; %s asked.", keeping, counted(len(nodes), "node was", "nodes were"))

    def _ask(self, grid: Grid, kind: str, nodes: Iterable[int]) -> Iterable[Message]:
        return grid.send_and_receive(self.requests(kind, self.arrays, nodes), timeout=self.run.timeout)

    def _accepted(self, replies: Iterable[Message], layout: Layout | None = None) -> dict[int, Reply]:
        """Return the good answers by node, one for each client, in the order of the clients' names."""
        known, found = self._registry, dict[int, Reply]()
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                answer = messages.read_reply(reply, self.plan, layout)
                check_scores(self.plan, answer)
            except UserError as error:
                if messages.is_under(reply, self.plan):
                    self._watch.notice(node, "refused", error)
                else:
                    log.warning("%s", error)
                continue
            if known.admits(answer.client, node) and self._watch.takes(node, known.name_at(node)):
                found[node] = answer
        # Who came later may have got the name of one that is not connected any more.
        found = {node: answer for node, answer in found.items() if known.name_at(node) == known.hashed(answer.client)}
        sizes = {
            node: size for node, size in known.sizes.items() if node in known.connected and self._watch.takes(node)
        }
        good = self._watch.plausible(found, sizes)
        known.sizes |= {node: answer.num_samples for node, answer in good.items()}
        return dict(sorted(good.items(), key=lambda entry: entry[1].client))

    def conclude(self) -> Record:
        history, ways = self.folder.metrics(), ("bytes_up", "bytes_down")
        last: Record = next((line for line in reversed(history) if f"train_{self.plan.model.loss.metric}" in line), {})
        return {
            **self.plan.describe(self.state),
            "num_clients": max((line["clients"] for line in history), default=0),
            "engine": "Flower",
            **{key: value for key, value in last.items() if key.startswith(("train_", "validation_", "test_"))},
            "seconds_per_round": statistics.median(line["seconds"] for line in history),
            **{f"{way}_per_round": round(statistics.mean(line[way] for line in history)) for way in ways},
            "seconds_total": self.seconds,
        }


def serve(plan: Plan, run: RunConfig, grid: Grid) -> State:
    """Carry out a run, new or continued; returns the last state."""
    check_server(plan)
    config = plan.config.replace("run", rounds=run.rounds) if run.rounds else plan.config
    folder = RunFolder(Path(run.folder) / run.experiment)
    with folder.reopened() if run.continued else folder.created(config):
        if run.continued and folder.reopen(config, longer=True):
            states, metadata = folder.load()
            if metadata.get("plan") != plan.fingerprint:
                raise UserError(f"The run in {folder.path} followed another plan; allowed: {plan.fingerprint}.")
            start = states["last"].to(plan.device)
        else:
            start, metadata = first_server_state(plan), {"run": secrets.token_hex(8), "seconds": 0.0}
        History(folder).drop_after(start.round)
        with ExitStack() as stack, torch.no_grad():
            files = Lines(
                *map(stack.enter_context, (folder.open_metrics(start.round), open_uploads(folder, start.round)))
            )
            strategy = MethodStrategy(plan, run, folder, start, metadata, files)
            strategy.save()  # before anybody is asked: what clients keep goes by the run's token
            strategy.start(grid, strategy.arrays, config.run.rounds - start.round, run.timeout)
        strategy.hand_over(grid)
        folder.finish(strategy.conclude(), [])
    return strategy.state


def first_server_state(plan: Plan) -> State:
    """Draw the server's first state, the simulator's for the same seed."""
    nobody = torch.zeros(0, dtype=torch.int64)
    return first_state(plan.method, nobody, plan.config.run.seed).to(plan.device)


def _in_one_line(record: logging.LogRecord) -> bool:
    """Leave nothing but the message of what a user is to read, where Flower would print a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UserError):
        record.msg, record.args, record.exc_info = "%s", (error,), None
    return True


def make_server_app(folder: Path) -> ServerApp:
    """Return the app of the server under the plan in ``folder``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log.addFilter(_in_one_line)
        try:
            serve(Plan.load(folder), RunConfig.read(context.run_config), grid)
        except UserError as error:
            raise StoppedError(str(error)) from None

    return app
