"""One round, written once: the first state, the clients' step, the server's step and what a round costs.

The simulator (:class:`Training`) calls them for a whole federation, a server and its clients over a network each for
their side, and peers for the clients of one process.

Shapes: T clients, G groups, g groups written in a round, C clients of the cohort, c clients that finish together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.utils import get_total_norm

from fedem.core.errors import UserError
from fedem.core.random import COHORT, COMPONENTS, MIXER, PERSONAL, SHUFFLE, choose, derive
from fedem.core.tree import Tree, tree_bytes, tree_index, tree_map, tree_repeat, tree_sorted, tree_stack, tree_to
from fedem.data.federation import Federation
from fedem.engines import Batching, Cohort, Engine, Work
from fedem.engines.base import Finished
from fedem.engines.processes import ALONE, Team, placed
from fedem.methods.assembly import Assembled
from fedem.methods.base import Algorithm
from fedem.methods.mixer import Mixed, Mixer, Round, RoundPlan, Start, Uploads
from fedem.methods.wrappers.compression import Codec, join_residual, split_residual
from fedem.runs.attacks import Attackers, Post
from fedem.solvers.schedules import Schedule


@dataclass(frozen=True, eq=False)
class State:
    """All that a federation has learnt. Stepping makes a new one."""

    round: int  # rounds done
    shared: Tree  # [G, ...]
    personal: Tree  # [T, ...]
    memory: Tree = field(default_factory=dict)  # the mixer's

    def to(self, device: torch.device) -> State:
        return State(self.round, *(tree_to(tree, device) for tree in (self.shared, self.personal, self.memory)))


class RoundCosts(NamedTuple):
    """What a round cost; a line of metrics.jsonl begins with it."""

    round: int  # rounds done with it
    learning_rate: float
    clients: int  # that took part
    seconds: float
    bytes_up: int
    bytes_down: int


# Why numbers may no longer be finite, and what to do about it.
CAUSES = (
    "either steps are too long, and a smaller schedule.learning_rate is needed, "
    "or a client's data or upload have numbers that are too large, and that client is to be looked at"
)


class DivergedError(UserError):
    """Numbers are no longer finite."""


def mixer_seed(seed: int, *round_index: int) -> int:
    """Return the source of what a mixer draws once for a run or, with its index, in a round."""
    return int(derive(seed, MIXER, *round_index))


def first_state(method: Assembled, names: Tensor, seed: int) -> State:
    """Draw the state before the first round, of clients whose names have these keys ``[T]``, if they are known."""
    algorithm, mixer, codec = method
    shared, draws = tree_sorted(algorithm.init_shared(int(derive(seed, COMPONENTS)))), list[Tree]()

    def draw_each() -> Tree:
        draws.extend(algorithm.init_shared(draw) for draw in derive(names, COMPONENTS, seed).tolist())
        return tree_stack(draws)

    groups, memory = mixer.init(Start(shared, algorithm.model.trainable, names, mixer_seed(seed), draw_each))
    personal = first_personal(method, groups if draws else shared, names, seed, bool(draws)) if len(names) else {}
    if codec is not None:
        memory |= codec.first_memory(groups)
    # As a checkpoint gives them back: a run that is resumed must add up in the same order.
    return State(0, *map(tree_sorted, (groups, personal, memory)))


def first_personal(method: Assembled, shared: Tree, names: Tensor, seed: int, apart: bool = False) -> Tree:
    """Return what clients keep at first, ``[T, ...]``, beside one ``shared`` tree or, where ``apart``, each its own."""
    personal = init_personal(method.algorithm, shared, derive(names, PERSONAL, seed), apart)
    if method.codec is None:
        return personal
    return join_residual(personal, tree_repeat(method.codec.first_residual(shared), len(names)))


def init_personal(algorithm: Algorithm, shared: Tree, keys: Tensor, apart: bool = False) -> Tree:
    """Return the first v_t of the clients with these ``keys``, ``[T, ...]``; ``shared`` and ``apart`` likewise."""
    if not algorithm.init_personal(tree_index(shared, 0) if apart else shared, keys[0]):
        return {}
    return vmap(algorithm.init_personal, in_dims=(0 if apart else None, 0))(shared, keys)


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """The clients' side of a round, for any number of them."""

    algorithm: Algorithm
    engine: Engine
    batching: Batching
    seed: int
    codec: Codec | None = field(default=None, kw_only=True)  # writes the messages, where they are compressed

    def train(
        self, cohort: Cohort, names: Tensor, round_index: int, learning_rate: float, plan: RoundPlan
    ) -> Iterator[Finished]:
        """Train C clients, whose names have these keys ``[C]``, for a round as the mixer plans it, some by some."""
        keys = derive(names, SHUFFLE, self.seed, round_index)
        personal, residual = split_residual(cohort.personal)
        cohort = cohort._replace(personal=personal)
        work = Work(self.batching, keys, learning_rate, plan.scales)
        found = self.engine.train_dealt(self.algorithm, cohort, work, names, plan.num_steps)
        if self.codec is None:
            yield from found
            return
        received = tree_index(cohort.shared, 0)  # by all: messages are compressed behind a server that averages
        if not residual:
            # Nothing is left unsaid by a client that was fitted after training.
            residual = tree_repeat(self.codec.first_residual(received), len(names))
        encode = vmap(self.codec.encode, in_dims=(0, None, 0, 0))
        for chunk in found:
            unsaid = tree_index(residual, chunk.positions.to(cohort.device))
            messages, unsaid = encode(chunk.uploads, received, chunk.personal, unsaid)
            yield chunk._replace(uploads=messages, personal=join_residual(chunk.personal, unsaid))


def server_step(
    method: Assembled,
    state: State,
    this: Round,
    uploads: Uploads,
    share: float,
    team: Team = ALONE,
    causes: str = CAUSES,
) -> tuple[State, int]:
    """Mix the clients' messages as they come in, and step every group that is written; refuse what is not finite.

    A process of a ``team`` has the uploads of its share of the clients. ``share`` of all samples took part. Returns the
    state after the round, personal trees as they were, and how many messages were sent. ``causes`` are what a refusal
    says that the reason may be.
    """
    algorithm, mixer, codec = method
    read = vmap(codec.decode if codec else algorithm.summand)
    summands: Uploads = ((positions, read(trees)) for positions, trees in uploads)
    adds_up = mixer.adds_up and (codec is None or codec.adds_up)
    if team.size > 1 and not adds_up:
        count = len(this.clients)
        (together,) = team.total(placed(summands, count))
        summands = [(torch.arange(count), together)]
    mixed, memory = mixer.mix(state.shared, state.memory, this, summands)
    if adds_up:
        mixed = mixed._replace(means=team.total(mixed.means)[0])
    mixed, memory = mixer.advance(state.shared, memory, this, mixed)
    if codec is not None:
        update, said = codec.announce(mixed.means, state.memory)
        mixed, memory = mixed._replace(means=tree_map(torch.add, state.shared, update)), memory | said
    shared = step_groups(algorithm, state.shared, mixed, mixer.share(this, share))
    _refuse_divergence(not_finite(shared) or not_finite(memory), state.round + 1, this.learning_rate, causes)
    return replace(state, round=state.round + 1, shared=shared, memory=memory), mixed.num_messages


def step_groups(algorithm: Algorithm, shared: Tree, mixed: Mixed, share: float) -> Tree:
    """Return the groups' next trees ``[G, ...]``: those that are written take the method's step on the server."""
    first, step = next(iter(shared.values())), vmap(partial(algorithm.update, share=share))
    count = len(first)
    if torch.equal(mixed.groups.cpu(), torch.arange(count)):  # most often: nothing is to be picked or put back
        return tree_map(lambda leaf, rows: rows.to(leaf.dtype), shared, step(shared, mixed.means))
    groups = mixed.groups.to(first.device)
    # A new group has no past of its own.
    past = tree_index(shared, torch.where(groups < count, groups, 0))
    written = step(past, mixed.means)
    new = max(0, int(groups.max()) + 1 - count)
    grown = tree_map(lambda leaf: torch.cat([leaf, leaf[:1].expand(new, *leaf.shape[1:])]), shared) if new else shared
    return tree_map(lambda leaf, rows: leaf.index_copy(0, groups, rows.to(leaf.dtype)), grown, written)


def not_finite(tree: Tree, is_fine: Callable[[Tensor], Tensor] = torch.isfinite) -> str | None:
    """Return the name of a leaf with numbers that are not finite, or not ``is_fine``, if there is one."""
    floats = [leaf for leaf in tree.values() if leaf.is_floating_point() and leaf.numel()]
    if not floats or math.isfinite(get_total_norm(floats, math.inf).item()):
        return None  # a deep network has hundreds of leaves: few calls answer for all of them
    return next((name for name, leaf in tree.items() if not is_fine(leaf).all()), None)


def _refuse_divergence(name: str | None, round_number: int, learning_rate: float, causes: str) -> None:
    if name is not None:
        where = f"in round {round_number}: {name!r} is no longer finite at learning rate {learning_rate:g}"
        raise DivergedError(f"Training diverged {where}; {causes}.")


def took_part(keys: Tensor, size: int, seed: int, rounds: int) -> Tensor:
    """Say which of the clients with these ``keys`` ``[T]`` were among the ``size`` of some of the first ``rounds``."""
    seen = torch.zeros(len(keys), dtype=torch.bool)
    for round_index in range(rounds):
        if bool(seen.all()):
            break
        seen[choose(keys, size, COHORT, seed, round_index)] = True
    return seen


def cohort_size(clients_per_round: float, num_clients: int) -> int:
    """Turn a share of the clients (up to 1.0) or a count (a whole number above 1) into a count.

    >>> cohort_size(0.2, 300), cohort_size(1.0, 300), cohort_size(50, 300)
    (60, 300, 50)
    """
    if 0 < clients_per_round <= 1:
        return max(1, round(clients_per_round * num_clients))
    if clients_per_round != int(clients_per_round) or not 1 < clients_per_round <= num_clients:
        allowed = f"a share above 0 and up to 1, or a whole number of clients from 2 to {num_clients}"
        raise UserError(f"clients_per_round is {clients_per_round:g}; allowed: {allowed}.")
    return int(clients_per_round)


@dataclass(frozen=True, eq=False)
class Training(LocalTraining):
    """The simulator: both sides of a round, and everything else that stays the same from round to round."""

    mixer: Mixer
    schedule: Schedule
    federation: Federation
    num_rounds: int
    cohort_size: int
    device: torch.device
    team: Team = ALONE  # the processes that share each cohort; all hold the whole state
    attackers: Attackers | None = field(default=None, kw_only=True)  # who means harm, where some do

    @cached_property
    def _method(self) -> Assembled:
        return Assembled(self.algorithm, self.mixer, self.codec)

    def init(self) -> State:
        return first_state(self._method, self.federation.keys, self.seed).to(self.device)

    def sample(self, round_index: int) -> Tensor:
        """Choose the clients of a round uniformly without replacement, ``[C]`` positions in ascending order."""
        return choose(self.federation.keys, self.cohort_size, COHORT, self.seed, round_index)

    @cached_property
    def _sizes(self) -> tuple[Tensor, int]:
        """How many training samples clients say they have, ``[T]``, and all together."""
        sizes = self.federation.train.sizes
        if self.attackers is not None:
            sizes = self.attackers.claimed(sizes)
        return sizes, int(sizes.sum())

    @property
    def causes(self) -> str:
        """What divergence may be due to."""
        return CAUSES if self.attackers is None else f"{self.attackers}, and the server does not withstand that"

    def round(self, round_index: int, clients: Tensor, slowed: float = 1.0) -> Round:
        (sizes, total), count = self._sizes, self.federation.num_clients
        key, rate = mixer_seed(self.seed, round_index), slowed * self.schedule.rate(round_index, self.num_rounds)
        trained = self.algorithm.model.trainable
        return Round(clients, sizes[clients], count, rate, key, total / count, trained)

    def step(self, state: State, slowed: float = 1.0) -> tuple[State, RoundCosts]:
        """Run one round: the cohort trains, the mixer mixes. Clients that are not sampled keep their personal tree.

        ``slowed`` is what the learning rate is multiplied by.
        """
        started = time.perf_counter()
        clients = self.sample(state.round)
        samples, this = self.federation.train.take(clients), self.round(state.round, clients, slowed)
        plan = self.mixer.plan(state.shared, state.memory, this)
        here = clients.to(self.device)
        cohort = Cohort(*plan.downloads, tree_index(state.personal, here), samples)
        own, count = self.team.share(samples.sizes), len(clients)
        kept: list[tuple[Tensor, Tree]] = []
        sent = torch.zeros(1, dtype=torch.float64, device=self.device)

        def uploads() -> Iterator[tuple[Tensor, Tree]]:
            names, scales = self.federation.keys[clients[own]], None if plan.scales is None else plan.scales[own]
            mine = plan._replace(scales=scales)
            for chunk in self.train(cohort.take(own), names, state.round, this.learning_rate, mine):
                message = chunk.uploads
                sent.add_(self.codec.num_bytes(message) if self.codec else tree_bytes(self._public(message)))
                kept.append((own[chunk.positions], chunk.personal))
                yield own[chunk.positions], message

        came: Uploads = uploads()
        if self.attackers is not None:
            leaves = self.algorithm.model.trainable - self.mixer.local_leaves
            post = Post(state.round, clients, plan.downloads, leaves, self.codec, self.team)
            came = self.attackers.falsify(came, post)
        share = int(this.sizes.sum()) / self._sizes[1]
        after, num_messages = server_step(self._method, state, this, came, share, self.team, self.causes)
        personal, total = self.team.total(placed(kept, count), {"bytes": sent})
        # Logarithms of mixture weights may be minus infinity.
        lost = not_finite(personal, lambda leaf: ~leaf.isnan())
        _refuse_divergence(lost, after.round, this.learning_rate, self.causes)
        written = tree_map(lambda old, new: old.index_copy(0, here, new), state.personal, personal)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        ways = int(total["bytes"]), self._download_bytes(state, clients, cohort.shared)
        bytes_up, bytes_down = (num_messages * way // count for way in ways)
        costs = RoundCosts(after.round, this.learning_rate, count, seconds, bytes_up, bytes_down)
        return replace(after, personal=written), costs

    def _download_bytes(self, state: State, clients: Tensor, served: Tree) -> int:
        """Count what the cohort downloads; a server may have news for those who took part in the last round."""
        whole = tree_bytes(tree_index(self._public(served), 0))
        news = self.codec.news(state.memory) if self.codec else {}
        if not news or state.round == 0:
            return len(clients) * whole
        following = int(torch.isin(clients, self.sample(state.round - 1)).sum())
        return following * tree_bytes(news) + (len(clients) - following) * whole

    def _public(self, trees: Tree) -> Tree:
        """Return the leaves that messages have: not those that never leave their client."""
        return {name: leaf for name, leaf in trees.items() if name not in self.mixer.local_leaves}
