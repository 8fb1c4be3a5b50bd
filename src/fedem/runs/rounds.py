"""Rounds: who takes part, and one step of the whole federation's state.

Shapes: T clients, G groups, C clients of the cohort.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedem.core.errors import UserError
from fedem.core.random import COHORT, COMPONENTS, MIXER, PERSONAL, SHUFFLE, choose, derive
from fedem.core.tree import (
    Tree,
    tree_bytes,
    tree_floats,
    tree_index,
    tree_map,
    tree_repeat,
    tree_sorted,
    tree_stack,
    tree_to,
)
from fedem.data.federation import Federation
from fedem.engines import Batching, Cohort, Engine, Finished, SolverDeal, Work
from fedem.engines.processes import ALONE, Team, placed
from fedem.methods.base import Algorithm
from fedem.methods.mixer import Mixed, Mixer, Round, RoundPlan, Start
from fedem.methods.wrappers.compression import Codec, join_residual, split_residual
from fedem.solvers.schedules import Schedule


@dataclass(frozen=True, eq=False)
class State:
    """All that a federation has learnt. Stepping makes a new one."""

    round: int
    """rounds done"""
    shared: Tree
    """``[G, ...]``"""
    personal: Tree
    """``[T, ...]``"""
    memory: Tree = field(default_factory=dict)
    """the mixer's"""

    def to(self, device: torch.device) -> State:
        """Move to ``device``."""
        return State(self.round, *(tree_to(tree, device) for tree in (self.shared, self.personal, self.memory)))


class RoundLog(NamedTuple):
    """What a round cost."""

    cohort: Tensor
    learning_rate: float
    seconds: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, eq=False)
class Training:
    """Everything that stays the same from round to round."""

    algorithm: Algorithm
    mixer: Mixer
    engine: Engine
    batching: Batching
    schedule: Schedule
    federation: Federation
    num_rounds: int
    cohort_size: int
    seed: int
    device: torch.device
    team: Team = ALONE
    """the processes that share each cohort; all hold the whole state"""
    codec: Codec | None = None
    """writes the messages, where they are compressed"""

    @cached_property
    def _deal(self) -> SolverDeal:
        return SolverDeal(self.algorithm)

    def init(self) -> State:
        """Draw the initial state."""
        shared = tree_sorted(self.algorithm.init_shared(int(derive(self.seed, COMPONENTS))))
        names = self.federation.keys

        def draw_each() -> Tree:
            draws = derive(names, COMPONENTS, self.seed).tolist()
            return tree_stack([self.algorithm.init_shared(draw) for draw in draws])

        start = Start(shared, self.algorithm.model.trainable, names, mixer_seed(self.seed), draw_each)
        groups, memory = self.mixer.init(start)
        apart = len(next(iter(groups.values()))) > 1
        beside = tree_index(*self.mixer.read(groups, memory, torch.arange(len(names)))) if apart else shared
        personal = init_personal(self.algorithm, beside, derive(names, PERSONAL, self.seed), apart)
        if self.codec is not None:
            personal = join_residual(personal, tree_repeat(self.codec.first_residual(shared), len(names)))
            memory |= self.codec.first_memory(groups)
        # As a checkpoint gives them back: a run that is resumed must add up in the same order.
        return State(0, *map(tree_sorted, (groups, personal, memory))).to(self.device)

    def sample(self, round_index: int) -> Tensor:
        """Choose the clients of a round uniformly without replacement, ``[C]`` positions in ascending order."""
        return choose(self.federation.keys, self.cohort_size, COHORT, self.seed, round_index)

    def round(self, round_index: int, clients: Tensor) -> Round:
        """Return what the mixer knows of a round of ``clients``."""
        rate = self.schedule.rate(round_index, self.num_rounds)
        key = int(derive(self.seed, MIXER, round_index))
        train, count = self.federation.train, self.federation.num_clients
        trained = self.algorithm.model.trainable
        return Round(clients, train.sizes[clients], count, rate, key, len(train) / count, trained)

    def step(self, state: State) -> tuple[State, RoundLog]:
        """Run one round: the cohort trains, the mixer mixes. Clients that are not sampled keep their personal tree."""
        started = time.perf_counter()
        clients = self.sample(state.round)
        samples, this = self.federation.train.take(clients), self.round(state.round, clients)
        plan = self.mixer.plan(state.shared, state.memory, this)
        personal = tree_index(state.personal, clients.to(self.device))
        personal, residual = split_residual(personal) if self.codec else (personal, {})
        cohort = Cohort(*plan.downloads, personal, samples)
        mixed, memory, personal, upload_bytes = self._train_and_mix(state, this, cohort, plan, residual)
        download_bytes = self._download_bytes(state, clients, self._public(cohort.shared))
        if self.codec is not None:
            means, memory = self.codec.announce(mixed.means, memory)
            mixed = mixed._replace(means=tree_map(torch.add, state.shared, means))
        share = int(samples.sizes.sum()) / len(self.federation.train)
        state = State(
            state.round + 1,
            _write(self.algorithm, state.shared, mixed, share),
            tree_map(lambda old, new: old.index_copy(0, clients.to(old.device), new), state.personal, personal),
            memory,
        )
        _check_finite(state, this.learning_rate)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        bytes_up, bytes_down = (mixed.num_messages * way // len(clients) for way in (upload_bytes, download_bytes))
        return state, RoundLog(clients, this.learning_rate, seconds, bytes_up, bytes_down)

    def _train_and_mix(
        self, state: State, this: Round, cohort: Cohort, plan: RoundPlan, residual: Tree
    ) -> tuple[Mixed, Tree, Tree, int]:
        """Let the team train the cohort, each process its share, and mix all uploads.

        Returns:
            the means, the mixer's next memory, the cohort's personal trees ``[C, ...]``, and the uploads' bytes
        """
        count, own = len(this.clients), self.team.share(this.sizes)
        finished: list[tuple[Tensor, Tree]] = []
        sent = torch.zeros(1, dtype=torch.float64, device=self.device)

        def summands() -> Iterator[tuple[Tensor, Tree]]:
            scales = None if plan.scales is None else plan.scales[own]
            settings = (this.clients[own], state.round, this.learning_rate, plan.num_steps, scales)
            for chunk in self.train_cohort(cohort.take(own), *settings):
                where = own[chunk.positions]
                if self.codec is None:
                    sent.add_(tree_bytes(self._public(chunk.uploads)))
                    finished.append((where, chunk.personal))
                    yield where, vmap(self.algorithm.summand)(chunk.uploads)
                    continue
                received, unsaid = tree_index(state.shared, 0), tree_index(residual, where.to(self.device))
                encode = vmap(self.codec.encode, in_dims=(0, None, 0, 0))
                messages, unsaid = encode(chunk.uploads, received, chunk.personal, unsaid)
                sent.add_(self.codec.num_bytes(messages))
                finished.append((where, join_residual(chunk.personal, unsaid)))
                yield where, vmap(self.codec.decode)(messages)

        adds_up = self.mixer.adds_up and (self.codec is None or self.codec.adds_up)
        if adds_up or self.team.size == 1:
            mixed, memory = self.mixer.mix(state.shared, state.memory, this, summands())
            means, personal, total = self.team.total(mixed.means, placed(finished, count), {"bytes": sent})
            return mixed._replace(means=means), memory, personal, int(total["bytes"])
        uploads = placed(summands(), count)
        uploads, personal, total = self.team.total(uploads, placed(finished, count), {"bytes": sent})
        mixed, memory = self.mixer.mix(state.shared, state.memory, this, [(torch.arange(count), uploads)])
        return mixed, memory, personal, int(total["bytes"])

    def _download_bytes(self, state: State, clients: Tensor, served: Tree) -> int:
        """Count what the cohort downloads; a server may have news for those who took part in the last round."""
        whole, news = tree_bytes(tree_index(served, 0)), self.codec.news(state.memory) if self.codec else {}
        if not news or state.round == 0:
            return len(clients) * whole
        following = int(torch.isin(clients, self.sample(state.round - 1)).sum())
        return following * tree_bytes(news) + (len(clients) - following) * whole

    def train_cohort(
        self,
        cohort: Cohort,
        clients: Tensor,
        round_index: int,
        rate: float,
        num_steps: int | None,
        scales: Tensor | None,
    ) -> Iterator[Finished]:
        """Let the cohort train, those with the same solver together."""
        names = self.federation.keys[clients]
        keys = derive(names, SHUFFLE, self.seed, round_index)
        return self._deal.train(self.engine, cohort, Work(self.batching, keys, rate, scales), names, num_steps)

    def _public(self, trees: Tree) -> Tree:
        """Return the leaves that messages have: not those that never leave their client."""
        return {name: leaf for name, leaf in trees.items() if name not in self.mixer.local_leaves}


def mixer_seed(seed: int) -> int:
    """Return the source of what a mixer draws once for a run."""
    return int(derive(seed, MIXER))


def init_personal(algorithm: Algorithm, shared: Tree, keys: Tensor, apart: bool = False) -> Tree:
    """Return the first personal trees of the clients with these ``keys``, ``[T, ...]``.

    They start beside one ``shared`` tree or, where they are ``apart``, each beside its own, ``[T, ...]``.
    """
    if not algorithm.init_personal(tree_index(shared, 0) if apart else shared, keys[0]):
        return {}
    return vmap(algorithm.init_personal, in_dims=(0 if apart else None, 0))(shared, keys)


def _write(algorithm: Algorithm, shared: Tree, mixed: Mixed, share: float) -> Tree:
    """Take the server's step in every group that is written."""
    device = next(iter(shared.values())).device
    groups, count = mixed.groups.to(device), len(next(iter(shared.values())))
    # A new group has no past of its own.
    past = tree_index(shared, torch.where(groups < count, groups, 0))
    written = vmap(partial(algorithm.update, share=share))(past, mixed.means)
    new = max(0, int(groups.max()) + 1 - count)
    grown = tree_map(lambda leaf: torch.cat([leaf, leaf[:1].expand(new, *leaf.shape[1:])]), shared) if new else shared
    return tree_map(lambda leaf, rows: leaf.index_copy(0, groups, rows.to(leaf.dtype)), grown, written)


def _check_finite(state: State, rate: float) -> None:
    # Logarithms of mixture weights may be minus infinity.
    learnt = tree_floats(state.shared) | tree_floats(state.memory)
    spoilt = [name for name, leaf in learnt.items() if not bool(torch.isfinite(leaf).all())]
    spoilt += [name for name, leaf in tree_floats(state.personal).items() if bool(torch.isnan(leaf).any())]
    if spoilt:
        raise UserError(
            f"Training diverged in round {state.round}: {spoilt[0]!r} is no longer finite at learning rate {rate:g}; "
            "a smaller schedule.learning_rate is needed."
        )


def cohort_size(clients_per_round: float, num_clients: int) -> int:
    """Turn a share of the clients (up to 1.0) or a count (a whole number above 1) into a count.

    >>> cohort_size(0.2, 300), cohort_size(1.0, 300), cohort_size(50, 300)
    (60, 300, 50)
    """
    if 0 < clients_per_round <= 1:
        return max(1, round(clients_per_round * num_clients))
    if clients_per_round != int(clients_per_round) or not 1 < clients_per_round <= num_clients:
        raise UserError(
            f"clients_per_round is {clients_per_round:g}; allowed: a share above 0 and up to 1, or a whole number of "
            f"clients from 2 to {num_clients}."
        )
    return int(clients_per_round)
