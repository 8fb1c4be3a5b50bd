"""A peer at work: D-FedEM and its kin without a server, each process with one client or several.

A round is the simulator's (:class:`fedem.methods.decentralised.Graph`), seen from one process: its clients train,
models pass along the links of the round's matrix, and u_t <- sum_s W_ts u_s. What a client has learnt lies in its file
after every round.

Shapes: T clients that are there, C of a round's cohort.
"""

from __future__ import annotations

import secrets
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fedem.core import VERSION
from fedem.core.errors import UserError, counted
from fedem.core.files import locked
from fedem.core.random import COHORT, choose, client_keys
from fedem.core.tree import Tree, tree_index, tree_repeat, tree_sorted, tree_stack, tree_to
from fedem.data.federation import PARTS
from fedem.deploy.kept import Kept, kept_path
from fedem.deploy.node import Node, combine_scores
from fedem.deploy.peers import neighbours
from fedem.deploy.peers.group import PeersChangedError, ProcessGroup, pack, unpack
from fedem.deploy.peers.meeting import AgentFolder, Meeting, MeetingOverError, Notify, read_key, take_part
from fedem.deploy.peers.neighbours import PeerGraph, routes
from fedem.deploy.plan import Plan
from fedem.graphs import File, Ring, Topology, among
from fedem.methods import names_where
from fedem.methods.assembly import Assembled
from fedem.methods.decentralised import Graph, scaled
from fedem.methods.mixer import Mixed, Round, weighted_means
from fedem.methods.wrappers.defences import Blocks
from fedem.models.images import INSTALLED
from fedem.runs.config import Config
from fedem.runs.evaluate import Record
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import CAUSES, RoundCosts, cohort_size, first_state, mixer_seed, not_finite, step_groups

_CPU, _HERE = torch.device("cpu"), torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True)
class Task:
    """What a peer's process is to do."""

    plan: Path
    data: Path
    clients: tuple[str, ...]  # names; none where the data are of one client that has its name there
    state: Path  # a folder for what the clients learn
    notify: Notify

    def open(self) -> list[PeerClient]:
        """Read the plan, the samples and what the clients have kept; refuse what can't work."""
        plan = Plan.load(self.plan)
        graph_of(plan)
        if twice := {name for name in self.clients if self.clients.count(name) > 1}:
            raise UserError(f"Client {min(twice)!r} is named twice; allowed: each once.")
        return [PeerClient.open(Node.open(plan, self.data, name), self.state) for name in self.clients or (None,)]


def join(meeting: Meeting, task: Task) -> bool:
    """Train with those who meet there until the plan's rounds are done; returns whether any was left to do."""
    key, clients = read_key(task.plan), task.open()
    if _are_done(clients):
        return False
    with ExitStack() as stack:
        for client in clients:
            stack.enter_context(client.locked())
        try:
            take_part(meeting, key, work, task, task.notify)
        except MeetingOverError:
            # Somebody may be gone just when the others leave: then the meeting is over, and so is the run.
            if not _are_done(task.open()):
                raise
    return True


def _are_done(clients: Sequence[PeerClient]) -> bool:
    return all(client.round == client.node.plan.config.run.rounds for client in clients)


def work(folder: AgentFolder, task: Task) -> None:
    """Take part in one meeting, in a process of its own, until the run is over or the peers change."""
    folder.end_with_agent()  # alone it would count as present, and nobody could stop it
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the agent answers to the keyboard, and the worker just ends
    try:
        clients = task.open()
        with ProcessGroup(folder.round_timeout) as group:
            Peer(group, clients, folder, task.notify).run_rounds()
    except PeersChangedError:
        raise SystemExit(1) from None  # the agent meets those who are left, and starts another worker
    except UserError as error:
        folder.stop_agent(str(error))
    except Exception as error:
        traceback.print_exc()
        folder.stop_agent(f"The peer's worker failed ({type(error).__name__}: {error}).")


class Peer:
    """One process among those of a meeting, with its clients."""

    def __init__(self, group: ProcessGroup, clients: Sequence[PeerClient], folder: AgentFolder, notify: Notify):
        self.group, self.clients, self.notify, self.plan = group, clients, notify, clients[0].node.plan
        met = folder.read("run")  # in which others accepted a worker of this agent before
        here = [(one.node.name, one.node.num_samples, one.round, met or one.run) for one in clients]
        process = {"version": VERSION, "plan": self.plan.fingerprint, "met": bool(met), "clients": here}
        present, new_run = neighbours.read_present(group.gather(process | {"new_run": secrets.token_hex(8)}))
        refused = neighbours.refusals(present, clients[0].path.parent)
        if group.rank in refused:
            raise UserError(refused[group.rank])
        if refused:
            raise PeersChangedError("somebody must leave")
        # Where nobody has done a round yet, the run is called what the first process proposes.
        common_run = neighbours.run_to_go_on_with(present) or new_run
        for client in clients:
            client.run = common_run
        folder.write("run", common_run)
        run, self.topology = self.plan.config.run, graph_of(self.plan)
        self.names, self.ranks = [client.name for client in present], [client.rank for client in present]
        self.sizes = torch.tensor([client.samples for client in present])
        self.own = {self.names.index(client.node.name): client for client in clients}
        self.done = neighbours.round_to_go_on_with(present)
        self.graph = PeerGraph.over(self.topology, self.names, mixer_seed(run.seed))
        share = run.clients_per_round if run.clients_per_round <= 1 else min(run.clients_per_round, len(present))
        self.cohort_size = cohort_size(share, len(present))
        met = f"{counted(group.size, 'peer')} with {counted(len(present), 'client')} have met"
        notify(f"{met}; {self.done} of {counted(run.rounds, 'round is', 'rounds are')} done.")
        if self.done and (new := [client.name for client in present if not client.round]):
            notify(f"warning: Clients that have done none of these: {len(new)} of {len(present)}, such as {new[0]!r}.")
        if self.graph.remark:
            notify(f"warning: {self.graph.remark}")

    def run_rounds(self) -> None:
        """Run the rounds that are left; all leave together, once everybody has kept the last."""
        run = self.plan.config.run
        with ExitStack() as stack:
            logs = [(client, stack.enter_context(client.open_log())) for client in self.clients]
            while self.done < run.rounds:
                line = self._step(self.done)
                self.done += 1
                for client in self.clients:
                    client.round = self.done
                    client.keep()
                own: Mapping[str, Record] = {}
                if run.is_scored(self.done):
                    averages, own = self._score()
                    line |= averages
                    tests = [f"{key.replace('_', ' ')} {value:.4f}" for key, value in averages.items() if "test" in key]
                    self.notify(f"Round {self.done} of {run.rounds}: {', '.join(tests)}.")
                for client, log in logs:
                    log.write(RunFolder.line(line | own.get(client.node.name, {})))
        self.group.total(torch.zeros(1))

    def _step(self, round_index: int) -> Record:
        """Train, exchange and mix; returns what the round cost."""
        started = time.perf_counter()
        seed, algorithm = self.plan.config.run.seed, self.plan.algorithm
        cohort = choose(self.graph.keys, self.cohort_size, COHORT, seed, round_index)
        key, rate = mixer_seed(seed, round_index), self.plan.rate(round_index)
        average = float(self.sizes.double().mean())
        this = Round(cohort, self.sizes[cohort], len(self.sizes), rate, key, average, algorithm.model.trainable)
        matrix = among(self.graph.matrix(round_index, key), cohort)
        scales = Graph(self.topology).step_scales(this.sizes, average)
        members = {row: self.own[client] for row, client in enumerate(cohort.tolist()) if client in self.own}
        steps = torch.ones(len(cohort)) if scales is None else scales
        uploads = {row: client.train(round_index, rate, float(steps[row])) for row, client in members.items()}
        common = {row: self._common(upload) for row, upload in uploads.items()}
        if self.topology.scale == "updates":
            common = {row: self._scaled(this, row, members[row], tree) for row, tree in common.items()}
        bytes_up, bytes_down = self._exchange(common, matrix, cohort.tolist())
        share = int(this.sizes.sum()) / int(self.sizes.sum())
        for row, client in members.items():
            heard = matrix[row].nonzero().flatten()
            trees = tree_stack([common[other] for other in heard.tolist()])
            means = self._averaged(matrix[row, heard], heard == row, trees)
            mixed = Mixed(_HERE, means, len(heard))
            shared = step_groups(algorithm, tree_repeat(self._common(client.shared), 1), mixed, share)
            client.shared = tree_sorted(uploads[row] | tree_index(shared, 0))
        seconds = time.perf_counter() - started
        costs = RoundCosts(round_index + 1, rate, len(cohort), seconds, bytes_up, bytes_down)
        return costs._asdict() | {"peers": self.group.size}

    def _averaged(self, weights: Tensor, is_own: Tensor, trees: Tree) -> Tree:
        """Average what a client has trained, and what it has heard, by a row of the matrix, to ``[1, ...]``."""
        matrix, uploads, defence = weights[None], [(torch.arange(len(weights)), trees)], self.plan.config.defence
        if defence is None:
            return weighted_means(matrix, uploads)
        return defence.gossip(matrix, is_own.nonzero().flatten(), uploads, Blocks.of_method(self.plan.algorithm))

    def _common(self, tree: Tree) -> Tree:
        """Return the leaves that clients average; the others stay with their client."""
        return {name: leaf for name, leaf in tree.items() if name not in self.plan.mixer.local_leaves}

    def _scaled(self, this: Round, row: int, client: PeerClient, upload: Tree) -> Tree:
        """Scale what a client's training changed, as the simulator does."""
        alone = this._replace(clients=_HERE, sizes=this.sizes[[row]])
        ((_, found),) = scaled(tree_repeat(client.shared, 1), alone, [(_HERE, tree_repeat(upload, 1))])
        return tree_index(found, 0)

    def _exchange(self, trees: dict[int, Tree], matrix: Tensor, cohort: Sequence[int]) -> tuple[int, int]:
        """Add what clients of other processes have trained to ``trees``, by row; returns bytes sent and received."""
        sends, receives = routes(matrix, [self.ranks[client] for client in cohort], self.group.rank)
        outgoing = {rank: torch.cat([pack(trees[row]) for row in rows]) for rank, rows in sends.items()}
        like = self._common(self.clients[0].shared)
        size = len(pack(like))
        incoming = {rank: torch.empty(size * len(rows), dtype=torch.uint8) for rank, rows in receives.items()}
        self.group.exchange(outgoing, incoming)
        for rank, rows in receives.items():
            for row, buffer in zip(rows, incoming[rank].split(size), strict=True):
                trees[row] = unpack(buffer, like)
                if (leaf := not_finite(trees[row])) is not None:
                    sent = f"Client {self.names[cohort[row]]!r} sent {leaf!r} with numbers that are not finite"
                    why = "would spoil whoever averages with it; what was learnt before is kept. Stop that client"
                    raise UserError(f"{sent}, which {why}.")
        return sum(map(len, outgoing.values())), sum(map(len, incoming.values()))

    def _score(self) -> tuple[Record, dict[str, Record]]:
        """Score the clients here; returns averages over all that are there, by training samples, and each one's own.

        Sums pass between processes, and no list of clients' scores.
        """
        metric = self.plan.model.loss.metric
        sums = {one.node.name: (one.node.num_samples, one.node.score(one.shared, one.fitted())) for one in self.clients}
        own: dict[str, Record] = {name: {} for name in sums}
        for name, (_, scores) in sums.items():
            for part, (count, loss, value) in scores.items():
                own[name] |= {f"own_{part}_loss": loss / count, f"own_{part}_{metric}": value / count}
        here, totals = combine_scores(metric, list(sums.values())), torch.zeros(len(PARTS), 3, dtype=torch.float64)
        for row, part in enumerate(PARTS):
            if entry := here.get(part):
                totals[row] = entry.weights.sum() * torch.tensor([1, entry.average, entry.loss], dtype=torch.float64)
        averages: Record = {}
        for part, (weight, value, loss) in zip(PARTS, self.group.total(totals).tolist(), strict=True):
            if weight:
                averages |= {f"{part}_{metric}": value / weight, f"{part}_loss": loss / weight}
        return averages, own


def graph_of(plan: Plan) -> Topology:
    """Return the graph that peers average over; refuse plans that need a server."""
    graph = plan.mixer.graph
    if graph is None:
        decentralised = names_where(lambda row: row.mixer.over_graph)
        others = names_where(lambda row: row.goes_over_graph and not row.mixer.over_graph)
        allowed = f"{decentralised}, and with a graph (graph.name) {others}"
        raise UserError(f"Method {plan.config.name('method')} needs a server; allowed among peers: {allowed}.")
    if isinstance(graph, File):
        raise UserError("graph.name is 'file', a graph of certain clients; allowed: others, since peers come and go.")
    return graph


def check_start(config: Config) -> None:
    """Refuse a start from a file that others may not have, or have another one of: each peer draws its own."""
    weights = config.values("model").get("weights", "")
    if weights not in ("", INSTALLED):
        why = "a file of this machine, and there is no server to send it to all"
        allowed = f"none, or {INSTALLED!r}, which a package brings (efficientnet_lite0)"
        raise UserError(f"model.weights is {weights!r}, {why}; allowed among peers: {allowed}.")


@dataclass
class PeerClient:
    """A client of this process, and what it has learnt."""

    node: Node
    path: Path
    round: int  # rounds of the run that it has done
    shared: Tree
    personal: Tree
    run: str = ""  # which run that was, by a word that those who began it agreed on; empty before the first round
    is_first: bool = True  # whether ``personal`` is as drawn at first: the client has taken part in no round

    @classmethod
    def open(cls, node: Node, state: Path) -> PeerClient:
        """Take up what the client has kept under this plan, or start."""
        plan = node.plan
        path = kept_path(state, f"peers-{plan.fingerprint[:12]}", node.name)
        if path.exists():
            kept = Kept.load(path)
            if kept.plan.fingerprint != plan.fingerprint or kept.shared is None or not kept.run:
                raise UserError(f"{path} was not kept by a peer under this plan; allowed: another folder for --state.")
            return cls(node, path, kept.round, kept.shared, kept.personal, kept.run, kept.is_first)
        # Alone it needs no neighbours yet, whatever the graph will be.
        method = Assembled(plan.algorithm, Graph(Ring(start=graph_of(plan).start)))
        first = first_state(method, client_keys([node.name]), plan.config.run.seed)
        return cls(node, path, 0, tree_index(first.shared, 0), tree_index(first.personal, 0))

    def keep(self) -> None:
        plan, name = self.node.plan, self.node.name
        is_over = self.round == plan.config.run.rounds
        personal, is_first = (self.fitted(), False) if is_over else (self.personal, self.is_first)
        Kept(plan, self.round, personal, self.shared, run=self.run, client=name, is_first=is_first).save(self.path)

    def fitted(self) -> Tree:
        """Return v_t as the client predicts with it: one that never took part fits it as an unseen client does."""
        return tree_to(self.node.fit(self.shared), _CPU) if self.is_first else self.personal

    def locked(self) -> AbstractContextManager[bool]:
        path = self.path.with_suffix(".lock")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        other = f"in use by another process, which holds {path}; allowed: one at a time"
        return locked(path, refusal=f"What client {self.node.name!r} has learnt is {other}.")

    def open_log(self) -> IO[str]:
        folder = RunFolder(self.path.with_suffix(""))
        folder.path.mkdir(parents=True, exist_ok=True)
        return folder.open_metrics(self.round)

    def train(self, round_index: int, rate: float, scale: float) -> Tree:
        """Run one round; returns what it uploads, and refuses numbers that are no longer finite."""
        trained = self.node.train(self.shared, self.personal, round_index, rate, scale)
        upload, self.personal = (tree_to(tree, _CPU) for tree in trained)
        self.is_first = False
        if (name := not_finite(upload)) is not None:
            diverged = f"diverged in round {self.round + 1}: {name!r} is no longer finite at learning rate {rate:g}"
            raise UserError(f"Training of client {self.node.name!r} {diverged}; {CAUSES}.")
        return upload
