"""The server's side in Flower: a strategy that runs any method whose server averages, and the app around it."""

from __future__ import annotations

import logging
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.app.exception import AppExitException
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from fedem.core.errors import UserError
from fedem.core.random import COHORT, choose, client_keys
from fedem.core.tree import tree_bytes, tree_index
from fedem.deploy.flower.gathering import Roster, advance, averages, check_server, first_state
from fedem.deploy.flower.messages import (
    EVALUATE,
    KEEP,
    TRAIN,
    Answer,
    Scored,
    check_reply,
    check_scores,
    to_record,
    upload_kind,
    write_ask,
)
from fedem.deploy.plan import Plan, RunConfig
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import State, cohort_size

log = logging.getLogger("flwr")  # whose lines are shown while a run is followed
_WAYS = ("bytes_up", "bytes_down")
_POLL = 1.0
"""seconds between looks at who is connected"""

Checked = TypeVar("Checked", Answer, Scored)


class Asked(NamedTuple):
    """A round under way."""

    started: float
    connected: int
    """nodes at its start"""
    cohort: int
    """those of them that were asked"""


class Begun(NamedTuple):
    """Where a run begins, or goes on."""

    state: State
    seconds: float = 0.0
    """taken so far"""
    token: str = ""
    """what tells it from other runs by the same name"""
    nodes: Mapping[str, str] = {}
    """who is who, as :meth:`Roster.to_json` has it"""


class StoppedError(UserError, AppExitException):
    """What a user is to read of a run that fails; whatever its server raises, Flower has it fail."""

    exit_code = 249
    """none of Flower's own, which come with explanations that are wrong here"""


class MethodStrategy(Strategy):
    """Flower's loop over rounds, with the method and the mixer of a plan inside. Rounds that are done stay done."""

    def __init__(self, plan: Plan, run: RunConfig, folder: RunFolder, begun: Begun, lines: IO[str]):
        self.plan, self.run, self.folder, self.state, self.token = plan, run, folder, begun.state, begun.token
        self.config = folder.config()
        self._kind = upload_kind(plan, tree_index(begun.state.shared, 0))
        self._lines, self._started = lines, time.perf_counter() - begun.seconds
        self._asked = Asked(0.0, 0, 0)
        self._roster = Roster(begun.token, begun.nodes)
        self._entry: Record = {}

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
        self._roster.connected = frozenset(nodes)
        return nodes

    def messages(self, kind: str, arrays: ArrayRecord, nodes: Iterable[int]) -> list[Message]:
        """Write the same message to some nodes; it is not delivered once nobody waits for the answer."""
        content = write_ask(self.plan, arrays, self.state.round, self.rate, self.run.experiment, self.token)
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
        # A number of clients is one to aim at: fewer may be connected. A mean over too few would tell of single ones.
        count = max(self.run.min_clients, cohort_size(wanted, max(len(nodes), math.ceil(wanted))))
        count = min(len(nodes), count)
        keys = client_keys([str(node) for node in nodes])
        cohort = [nodes[at] for at in choose(keys, count, COHORT, self.config.run.seed, self.state.round).tolist()]
        self._asked = Asked(time.perf_counter(), len(nodes), len(cohort))
        return self.messages(TRAIN, arrays, cohort)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Mix the good answers; with too few of them u stays as it is."""
        answers = self._sift(replies, lambda reply: check_reply(reply, self.plan, self._kind))
        before, rate = self.state, self.rate
        self.state = replace(before, round=before.round + 1)
        taken = len(answers) >= self.run.min_clients
        if not taken:
            log.warning(
                "Round %d: %d good answers, needed %d; the model stays as it is.",
                self.state.round,
                len(answers),
                self.run.min_clients,
            )
        elif (mixed := advance(self.plan, before, answers, self._asked.connected, rate)) is None:
            taken = False
            log.warning("Round %d: the mean is not finite; the model stays as it is.", self.state.round)
        else:
            self.state = mixed
        down = tree_bytes(tree_index(before.shared, 0))
        self._entry = {
            "round": self.state.round,
            "learning_rate": rate,
            "clients": len(answers) if taken else 0,
            "seconds": time.perf_counter() - self._asked.started,
            "bytes_up": sum(answer.num_bytes for answer in answers),
            "bytes_down": down * self._asked.cohort,
        }
        return self.arrays, None

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
        scored = self._sift(replies, lambda reply: check_scores(reply, self.plan))
        found: Record = {}
        if len(scored) >= self.run.min_clients:
            found = averages(self.plan, scored, self.run.min_clients)
        elif scored:
            log.warning("%d clients sent scores, needed %d; they are not averaged.", len(scored), self.run.min_clients)
        self._entry |= found
        self._lines.write(self.folder.line(self._entry))
        self._lines.flush()
        self.save()
        return MetricRecord(found) if found else None

    def save(self) -> None:
        """Write a checkpoint: the server's tree and, of clients, at which nodes they are by hashes of their names."""
        facts = self.plan.metadata(()) | {"plan": self.plan.fingerprint, "run": self.token, "seconds": self.seconds}
        facts["nodes"] = self._roster.to_json()
        self.folder.save({"last": self.state}, facts)

    def hand_over(self, grid: Grid) -> int:
        """Give everybody the final tree to keep; returns how many clients have."""
        nodes = sorted(grid.get_node_ids())
        self._roster.connected = frozenset(nodes)
        replies = grid.send_and_receive(self.messages(KEEP, self.arrays, nodes), timeout=self.run.timeout)
        kept = len(self._sift(replies, lambda reply: check_scores(reply, self.plan)))
        log.info("%d clients keep their models; %d nodes were asked.", kept, len(nodes))
        return kept

    def _sift(self, replies: Iterable[Message], check: Callable[[Message], Checked]) -> list[Checked]:
        """Return the good answers, one a client, in the order of the clients' names."""
        good: dict[str, Checked] = {}
        for reply in replies:
            try:
                answer = check(reply)
            except UserError as error:
                log.warning("%s", error)
                continue
            if self._roster.admits(answer.client, reply.metadata.src_node_id):
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
        begun = _restored(plan, folder) if going_on else Begun(first_state(plan), token=secrets.token_hex(8))
        with folder.open_metrics(begun.state.round) as lines, torch.no_grad():
            strategy = MethodStrategy(plan, run, folder, begun, lines)
            strategy.save()  # before anybody is asked: what clients keep goes by the run's token
            strategy.start(grid, strategy.arrays, config.run.rounds - begun.state.round, run.timeout)
        strategy.hand_over(grid)
        folder.finish(strategy.conclude(), [])
    return strategy.state


def _restored(plan: Plan, folder: RunFolder) -> Begun:
    """Read where a run stands."""
    states, facts = folder.load()
    if facts.get("plan") != plan.fingerprint:
        raise UserError(f"The run in {folder.path} followed another plan; allowed: {plan.fingerprint}.")
    return Begun(states["last"].to(plan.device), facts["seconds"], facts["run"], facts.get("nodes", {}))


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
