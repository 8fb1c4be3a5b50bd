"""The server's side in Flower: a strategy that runs any method whose server averages, and the app around it."""

from __future__ import annotations

import logging
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.app.exception import AppExitException
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from fedem.core.errors import UserError
from fedem.core.random import COHORT, choose, client_keys
from fedem.core.tree import tree_bytes, tree_index, tree_repeat, tree_to
from fedem.deploy.flower.messages import (
    EVALUATE,
    KEEP,
    TRAIN,
    ScoreReply,
    TrainReply,
    read_scores,
    read_upload,
    to_record,
    upload_layout,
    write_request,
)
from fedem.deploy.flower.project import check_server
from fedem.deploy.node import combine_scores
from fedem.deploy.plan import Plan, RunConfig
from fedem.methods.mixer import Round
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import DivergedError, RoundCosts, State, cohort_size, first_state, round_key, server_step

log = logging.getLogger("flwr")  # whose lines are shown while a run is followed
_WAYS = ("bytes_up", "bytes_down")
_POLL = 1.0
"""seconds between looks at who is connected"""

Reply = TypeVar("Reply", TrainReply, ScoreReply)


class ClientRegistry:
    """Which node has which client, so that no two clients' samples go by one name.

    A name is a node's for as long as that node is connected: a node that starts again keeps its number if its key is
    registered, and has another if not. What is kept of names is their hashes: nothing else that the server writes
    shows who took part.

    Attributes:
        connected: the nodes that were, when those who answer were asked.
    """

    def __init__(self, token: str, nodes: Mapping[str, str]):
        self.connected: frozenset[int] = frozenset()
        self._token, self._nodes = token, {int(node): name for node, name in nodes.items()}
        self._warned: set[tuple[str, int]] = set()

    def admits(self, client: str, node: int) -> bool:
        """Whether ``client`` may answer from ``node``, which has its name from then on; warns once if not."""
        name = blake2b(client.encode(errors="surrogatepass"), digest_size=16, key=self._token.encode()).hexdigest()
        owner = next((other for other, known in self._nodes.items() if known == name and other != node), None)
        if owner in self.connected:
            if (client, node) not in self._warned:
                log.warning("Client %r is at node %d; node %d, which uses its name, is left out.", client, owner, node)
                self._warned.add((client, node))
            return False
        if owner is not None:
            log.warning("Client %r is at node %d now; node %d is not connected any more.", client, node, owner)
            del self._nodes[owner]
        self._nodes[node] = name
        return True

    def to_json(self) -> dict[str, str]:
        """Return the hashes of names by nodes, as JSON has them."""
        return {str(node): name for node, name in self._nodes.items()}


class Start(NamedTuple):
    """Where a run begins, or goes on."""

    state: State
    seconds: float = 0.0
    """taken so far"""
    token: str = ""
    """what distinguishes it from other runs by the same name"""
    nodes: Mapping[str, str] = {}
    """which node has which client, as :meth:`ClientRegistry.to_json` has it"""


class StoppedError(UserError, AppExitException):
    """What a user is to read of a run that fails; whatever its server raises, Flower has it fail."""

    exit_code = 249
    """none of Flower's own, which come with explanations that are wrong here"""


class MethodStrategy(Strategy):
    """Flower's loop over rounds, with the method and the mixer of a plan inside. Rounds that are done stay done."""

    def __init__(self, plan: Plan, run: RunConfig, folder: RunFolder, start: Start, lines: IO[str]):
        self.plan, self.run, self.folder, self.state, self.token = plan, run, folder, start.state, start.token
        self.config = folder.config()
        self._layout = upload_layout(plan, tree_index(start.state.shared, 0))
        self._lines, self._started = lines, time.perf_counter() - start.seconds
        self._registry = ClientRegistry(start.token, start.nodes)
        self._round_started, self._num_asked = 0.0, 0
        self._record: Record = {}

    @property
    def seconds(self) -> float:
        """How long the run has taken in all, as far as it is kept."""
        return time.perf_counter() - self._started

    @property
    def arrays(self) -> ArrayRecord:
        """U as it is sent."""
        return to_record(tree_index(self.state.shared, 0))

    @property
    def rate(self) -> float:
        """The learning rate of the next round."""
        return self.config.schedule.rate(self.state.round, self.config.run.rounds)

    def summary(self) -> None:
        """Say what is run."""
        log.info("\t├── Method: %s, experiment %s", self.config.name("method"), self.run.experiment)
        log.info("\t├── Rounds done: %d of %d", self.state.round, self.config.run.rounds)
        log.info("\t└── Folder: %s", self.folder.path.absolute())

    def connected(self, grid: Grid) -> list[int]:
        """Return the nodes that are connected; waits for as many as there must be, though not for ever."""
        deadline = time.monotonic() + self.run.wait
        while len(nodes := sorted(grid.get_node_ids())) < self.run.min_clients and time.monotonic() <= deadline:
            time.sleep(min(_POLL, self.run.wait))
        self._registry.connected = frozenset(nodes)
        return nodes

    def messages(self, kind: str, arrays: ArrayRecord, nodes: Iterable[int]) -> list[Message]:
        """Write the same message to some nodes; it is not delivered once nobody waits for the answer."""
        content = write_request(self.plan, arrays, self.state.round, self.rate, self.run.experiment, self.token)
        group = str(self.state.round)
        return [Message(content, node, kind, ttl=self.run.timeout, group_id=group) for node in nodes]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's cohort, chosen by hashing the seed, the round and the nodes' numbers."""
        nodes = self.connected(grid)
        if len(nodes) < self.run.min_clients:
            raise UserError(
                f"After {self.run.wait:g} seconds {len(nodes)} nodes are connected; needed: min-clients "
                f"{self.run.min_clients}. `continue = true` goes on after round {self.state.round}."
            )
        wanted = self.config.run.clients_per_round
        # A number of clients is one to aim at: fewer may be connected. A mean over too few would show single ones.
        count = max(self.run.min_clients, cohort_size(wanted, max(len(nodes), math.ceil(wanted))))
        count = min(len(nodes), count)
        keys = client_keys([str(node) for node in nodes])
        cohort = [nodes[at] for at in choose(keys, count, COHORT, self.config.run.seed, self.state.round).tolist()]
        self._round_started, self._num_asked = time.perf_counter(), len(cohort)
        return self.messages(TRAIN, arrays, cohort)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Mix the good answers; with too few of them u stays as it is."""
        answers = self._accepted(replies, lambda reply: read_upload(reply, self.plan, self._layout))
        before, rate, least = self.state, self.rate, self.run.min_clients
        self.state, taken = replace(before, round=before.round + 1), 0
        if len(answers) < least:
            log.warning(
                "Round %d: %d good answers, needed %d; the model stays as it is.", self.state.round, len(answers), least
            )
        else:
            try:
                self.state, taken = self._mix(before, answers, rate), len(answers)
            except DivergedError:
                log.warning("Round %d: the mean is not finite; the model stays as it is.", self.state.round)
        self._record = RoundCosts(
            self.state.round,
            rate,
            taken,
            time.perf_counter() - self._round_started,
            bytes_up=sum(answer.num_bytes for answer in answers),
            bytes_down=tree_bytes(tree_index(before.shared, 0)) * self._num_asked,
        )._asdict()
        return self.arrays, None

    def _mix(self, state: State, answers: Sequence[TrainReply], rate: float) -> State:
        """Take the server's step with some clients' answers.

        How many samples those have who were not asked, the server does not know: what share of all took part is counted
        by clients, of those that were connected.
        """
        sizes, connected = torch.tensor([answer.num_samples for answer in answers]), len(self._registry.connected)
        clients, key = torch.arange(len(answers)), round_key(self.config.run.seed, state.round)
        trained = self.plan.model.trainable
        this = Round(clients, sizes, connected, rate, key, float(sizes.double().mean()), trained)
        uploads = (
            (clients[at : at + 1], tree_repeat(tree_to(answer.upload, self.plan.device), 1))
            for at, answer in enumerate(answers)
        )
        return server_step(self.plan.method, state, this, uploads, len(answers) / connected)[0]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask everybody, when it is due and enough are there: whether they are or not, the round has been trained."""
        done, least = self.state.round, self.run.min_clients
        if not self.config.run.is_scored(done):
            return []
        nodes = self.connected(grid)
        if len(nodes) < least:
            log.warning("Round %d is not scored: %d nodes are connected, needed %d.", done, len(nodes), least)
            return []
        return self.messages(EVALUATE, arrays, nodes)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average over clients; then the round is complete, and written down. No client's own figures are."""
        scored, least = self._accepted(replies, lambda reply: read_scores(reply, self.plan)), self.run.min_clients
        if scored and len(scored) < least:
            log.warning("%d clients sent scores, needed %d; they are not averaged.", len(scored), least)
        metric = self.plan.model.loss.metric
        scores = combine_scores(metric, [(entry.num_samples, entry.scores) for entry in scored])
        found: Record = {}
        for part, entry in scores.items():
            if len(entry.counts) >= least:
                found |= {f"{part}_{metric}": entry.average, f"{part}_loss": entry.loss}
        self._record |= found
        self._lines.write(self.folder.line(self._record))
        self._lines.flush()
        self.save()
        return MetricRecord(found) if found else None

    def save(self) -> None:
        """Write a checkpoint: the server's tree and, of clients, at which nodes they are by hashes of their names."""
        metadata = self.plan.metadata(()) | {"plan": self.plan.fingerprint, "run": self.token, "seconds": self.seconds}
        metadata["nodes"] = self._registry.to_json()
        self.folder.save({"last": self.state}, metadata)

    def hand_over(self, grid: Grid) -> int:
        """Give everybody the final tree to keep; returns how many clients have."""
        nodes = sorted(grid.get_node_ids())
        self._registry.connected = frozenset(nodes)
        replies = grid.send_and_receive(self.messages(KEEP, self.arrays, nodes), timeout=self.run.timeout)
        kept = len(self._accepted(replies, lambda reply: read_scores(reply, self.plan)))
        log.info("%d clients keep their models; %d nodes were asked.", kept, len(nodes))
        return kept

    def _accepted(self, replies: Iterable[Message], read: Callable[[Message], Reply]) -> list[Reply]:
        """Return the good answers, one for each client, in the order of the clients' names."""
        good: dict[str, Reply] = {}
        for reply in replies:
            try:
                answer = read(reply)
            except UserError as error:
                log.warning("%s", error)
                continue
            if self._registry.admits(answer.client, reply.metadata.src_node_id):
                good[answer.client] = answer
        return [good[name] for name in sorted(good)]

    def conclude(self) -> Record:
        """Sum the run up."""
        history = self.folder.metrics()
        scored = [line for line in history if f"train_{self.plan.model.loss.metric}" in line]
        last = scored[-1] if scored else {}
        return {
            **self.plan.describe(self.state),
            "num_clients": max((line["clients"] for line in history), default=0),
            "engine": "Flower",
            **{key: value for key, value in last.items() if key.startswith(("train_", "validation_", "test_"))},
            "seconds_per_round": statistics.median(line["seconds"] for line in history),
            **{f"{way}_per_round": round(statistics.mean(line[way] for line in history)) for way in _WAYS},
            "seconds_total": self.seconds,
        }


def serve(plan: Plan, run: RunConfig, grid: Grid) -> State:
    """Carry out a run, new or continued; returns the last state."""
    check_server(plan)
    config = plan.config.replace("run", rounds=run.rounds) if run.rounds else plan.config
    folder = RunFolder(Path(run.folder) / run.experiment)
    if not run.continued:
        folder.create(config)
    elif not folder.exists():
        raise UserError(f"There is no run to continue in {folder.path} (no config.toml).")
    with folder.locked():
        going_on = run.continued and folder.reopen(config)
        start = _restored(plan, folder) if going_on else Start(first_server_state(plan), token=secrets.token_hex(8))
        with folder.open_metrics(start.state.round) as lines, torch.no_grad():
            strategy = MethodStrategy(plan, run, folder, start, lines)
            strategy.save()  # before anybody is asked: what clients keep goes by the run's token
            strategy.start(grid, strategy.arrays, config.run.rounds - start.state.round, run.timeout)
        strategy.hand_over(grid)
        folder.finish(strategy.conclude(), [])
    return strategy.state


def first_server_state(plan: Plan) -> State:
    """Draw the server's first state, the simulator's for the same seed."""
    nobody = torch.zeros(0, dtype=torch.int64)
    return first_state(plan.method, nobody, plan.config.run.seed).to(plan.device)


def _restored(plan: Plan, folder: RunFolder) -> Start:
    """Read where a run stands."""
    states, facts = folder.load()
    if facts.get("plan") != plan.fingerprint:
        raise UserError(f"The run in {folder.path} followed another plan; allowed: {plan.fingerprint}.")
    return Start(states["last"].to(plan.device), facts["seconds"], facts["run"], facts.get("nodes", {}))


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
