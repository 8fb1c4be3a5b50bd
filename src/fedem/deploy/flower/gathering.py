"""What the server makes of answers: the same mixer and method as in the simulator, for those who answered."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from fedem.core.errors import UserError
from fedem.core.random import COMPONENTS, MIXER, derive
from fedem.core.tree import Tree, tree_floats, tree_map, tree_repeat, tree_sorted, tree_to
from fedem.data.federation import PARTS
from fedem.deploy.node import Assessed
from fedem.deploy.plan import Plan
from fedem.methods import find_method, names_where
from fedem.methods.mixer import Round, Start
from fedem.runs.evaluate import Record, Scores
from fedem.runs.rounds import State, mixer_seed

if TYPE_CHECKING:
    from fedem.deploy.flower.messages import Answer, Scored

log = logging.getLogger("flwr")  # whose lines are shown while a run is followed


def check_server(plan: Plan) -> None:
    """Refuse a method whose server does more than to average what everybody sends."""
    mixer, config, method = plan.mixer, plan.config, plan.config.name("method")
    if mixer.is_server_mean and config.compression.downloads == "none":
        return
    if not find_method(method).mixer.is_server_mean:
        names = names_where(lambda row: row.mixer.is_server_mean)
        raise UserError(
            f"Method {method} needs {type(mixer).__name__} between its clients, and not a server that averages; "
            f"allowed: {names}."
        )
    chosen = {
        "graph.name": config.name("graph"),
        "run.local_layers": config.run.local_layers,
        "compression.downloads": config.compression.downloads,
    }
    refused = " and ".join(f"{key} is {value!r}" for key, value in chosen.items() if value != "none")
    raise UserError(
        f"{refused}, but behind this server all clients get the same components, and whole; allowed there: none."
    )


class Roster:
    """Which node has which client, so that no two clients' samples go by one name.

    A name is a node's for as long as that node is connected: a node that starts again keeps its number if its key is
    registered, and has another if not. What is kept of names is their hashes: nothing else that the server writes
    tells who took part.

    Attributes:
        connected: the nodes that were, when those who answer were asked.

    """

    def __init__(self, token: str, nodes: Mapping[str, str]):
        self.connected: frozenset[int] = frozenset()
        self._token, self._nodes = token, {int(node): name for node, name in nodes.items()}
        self._told: set[tuple[str, int]] = set()

    def admits(self, client: str, node: int) -> bool:
        """Whether ``client`` may answer from ``node``, which has its name from then on; warns once if not."""
        name = blake2b(client.encode(errors="surrogatepass"), digest_size=16, key=self._token.encode()).hexdigest()
        holder = next((other for other, known in self._nodes.items() if known == name and other != node), None)
        if holder in self.connected:
            if (client, node) not in self._told:
                log.warning("Client %r is at node %d; node %d, which uses its name, is left out.", client, holder, node)
                self._told.add((client, node))
            return False
        if holder is not None:
            log.warning("Client %r is at node %d now; node %d is not connected any more.", client, node, holder)
            del self._nodes[holder]
        self._nodes[node] = name
        return True

    def to_json(self) -> dict[str, str]:
        """Return the hashes of names by nodes, as JSON has them."""
        return {str(node): name for node, name in self._nodes.items()}


def first_state(plan: Plan) -> State:
    """Draw the server's first state, the simulator's for the same seed."""
    algorithm, mixer, seed = plan.algorithm, plan.mixer, plan.config.run.seed
    shared = tree_sorted(algorithm.init_shared(int(derive(seed, COMPONENTS))))
    nobody = torch.zeros(0, dtype=torch.int64)
    groups, memory = mixer.init(Start(shared, algorithm.model.trainable, nobody, mixer_seed(seed)))
    return State(0, groups, {}, memory).to(plan.device)


def advance(plan: Plan, state: State, answers: Sequence[Answer], connected: int, rate: float) -> State | None:
    """Take the server's step with some clients' answers; None when it leads to what is not finite.

    How many samples those have who were not asked, the server does not know: what share of all took part is counted by
    clients, of ``connected`` ones.
    """
    algorithm, mixer, device, codec = plan.algorithm, plan.mixer, plan.device, plan.codec
    sizes = torch.tensor([answer.num_samples for answer in answers])
    key = int(derive(plan.config.run.seed, MIXER, state.round))
    positions = torch.arange(len(answers))
    this = Round(positions, sizes, connected, rate, key, float(sizes.double().mean()), algorithm.model.trainable)

    def summands() -> Iterator[tuple[Tensor, Tree]]:
        for position, answer in enumerate(answers):
            upload = tree_repeat(tree_to(answer.upload, device), 1)
            yield positions[position : position + 1], vmap(codec.decode if codec else algorithm.summand)(upload)

    mixed, memory = mixer.mix(state.shared, state.memory, this, summands())
    if codec is not None:
        mixed = mixed._replace(means=tree_map(torch.add, state.shared, mixed.means))
    step = partial(algorithm.update, share=len(answers) / connected)
    shared = tree_map(lambda old, new: new.to(old.dtype), state.shared, vmap(step)(state.shared, mixed.means))
    if not all(bool(torch.isfinite(leaf).all()) for leaf in tree_floats(shared).values()):
        return None
    return State(state.round + 1, shared, {}, memory)


def averages(plan: Plan, scored: Sequence[Scored], least: int = 1) -> Record:
    """Average clients' scores, weighted by their numbers of training samples, where at ``least`` so many have them."""
    metric = plan.model.loss.metric
    weights = torch.tensor([entry.num_samples for entry in scored], dtype=torch.float64)
    record: Record = {}
    for part in PARTS:
        sums = torch.tensor([entry.parts.get(part, Assessed(0, 0.0, 0.0)) for entry in scored], dtype=torch.float64)
        counts, losses, values = sums.T
        if int((counts > 0).sum()) >= least:
            scores = Scores(metric, weights, counts, losses / counts, values / counts)
            record |= {f"{part}_{metric}": scores.average, f"{part}_loss": scores.loss}
    return record
