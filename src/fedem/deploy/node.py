"""One client at work: what the simulator does for it, on its own samples alone.

Trees are one client's, without a dimension for clients.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from fedem.core.errors import UserError, counted
from fedem.core.tree import Tree, tree_index, tree_repeat, tree_to
from fedem.data.encoding import plain_targets, some
from fedem.data.federation import PARTS, Federation
from fedem.data.files import FromFile
from fedem.data.tables import Dialect, read_table
from fedem.deploy.plan import Plan
from fedem.engines import Cohort, OneByOne
from fedem.methods.mixer import RoundPlan, Served, Star
from fedem.methods.wrappers.compression import join_residual, split_residual
from fedem.runs.evaluate import Scores, evaluate
from fedem.runs.personalize import Personalizer, Predictors
from fedem.runs.rounds import LocalTraining, State, first_personal

_UNSEEN = "Column %r of %s has %s that the plan has not (%s), taken for none of those known."
_SURPLUS = "Columns of %s that the plan has not are left out: %s."
log = logging.getLogger("flwr")  # on a peer, where Flower is not at work, Python shows its warnings all the same


class ScoreSums(NamedTuple):
    """The scores of a client's predictor on one part of its data, as sums over its samples."""

    samples: int
    loss: float
    """summed negative log-likelihood"""
    value: float
    """samples predicted right, or the summed squared error"""


def combine_scores(metric: str, clients: Sequence[tuple[int, Mapping[str, ScoreSums]]]) -> dict[str, Scores]:
    """Put scores of clients, with their numbers of training samples, together by part, without those who have none."""
    found = {}
    for part in PARTS:
        if there := [(weight, sums[part]) for weight, sums in clients if part in sums]:
            weights = torch.tensor([weight for weight, _ in there], dtype=torch.float64)
            counts, losses, values = torch.tensor([sums for _, sums in there], dtype=torch.float64).T
            found[part] = Scores(metric, weights, counts, losses / counts, values / counts)
    return found


@dataclass(frozen=True, eq=False)
class Node:
    """One client under a plan.

    Attributes:
        plan: what all agree on.
        name: of the client.
        federation: one that the client is in; nobody else's samples are touched.
        num_rounds: of the run; 0 for as many as the plan has.
    """

    plan: Plan
    name: str
    federation: Federation
    num_rounds: int = 0

    @classmethod
    def open(cls, plan: Plan, path: Path, name: str | None = None) -> Node:
        """Read a client's samples from a file, encode them as the plan says and split them as the simulator does.

        Where the samples have a column of clients, the rows of ``name`` are taken (None if there is one client only);
        where they have none, all are the client's.
        """
        federation = read_clients(plan, path, name)
        if name is None:
            if federation.num_clients > 1:
                names = some(federation.names)
                raise UserError(f"{path} has {federation.num_clients} clients ({names}); a client's name is needed.")
            name = federation.names[0]
        return cls(plan, name, federation).check()

    def check(self) -> Node:
        """Refuse samples that the model has no place for."""
        samples, expected = self._own.train, list(self.plan.format.inputs)
        if (shape := list(samples.inputs.shape[1:])) != expected:
            raise UserError(f"Client {self.name!r} has inputs of shape {shape}; allowed: {expected}, as in the plan.")
        self.plan.check_samples(samples.inputs, samples.targets)
        self.plan.check_batches(self._own)
        return self

    @property
    def num_samples(self) -> int:
        """n_t, samples to train on."""
        return len(self._own.train)

    def first_personal(self, shared: Tree) -> Tree:
        """Return the personal tree that the client starts from."""
        return tree_index(first_personal(self.plan.method, shared, self._own.keys, self.plan.config.run.seed), 0)

    def train(
        self, shared: Tree, personal: Tree, round_index: int, learning_rate: float, scale: float = 1.0
    ) -> tuple[Tree, Tree]:
        """Run one round, counted from 0, with the same random numbers as the simulator.

        ``scale`` multiplies the learning rate. Returns what is uploaded, and the client's next personal tree.
        """
        cohort = Cohort(self._one(shared), torch.zeros(1, dtype=torch.int64), self._one(personal), self._own.train)
        scales = None if scale == 1.0 else torch.tensor([scale], dtype=torch.float64)
        begin, plan = RoundPlan(Served(cohort.shared, cohort.reads), scales=scales), self.plan
        seed, codec = plan.config.run.seed, plan.codec
        local = LocalTraining(plan.algorithm, OneByOne(), plan.config.batching, seed, codec=codec)
        with plan.products():
            (done,) = local.train(cohort, self._own.keys, round_index, learning_rate, begin)
        return tree_index(done.uploads, 0), tree_index(done.personal, 0)

    def fit(self, shared: Tree) -> Tree:
        """Return the personal tree of a client that never trained, fitted beside ``shared``."""
        # What fine-tuning makes belongs to a predictor, not to what is kept.
        plain = self._personalizer.untuned
        with torch.no_grad(), self.plan.products():
            found = plain.personalize(State(0, self._one(shared), {}), self._own.train, self._own.keys)
        return tree_index(found.personal, 0)

    def predictor(self, shared: Tree, personal: Tree) -> tuple[Tree, Tree]:
        """Return what the client predicts with: the trees themselves, unless clients fine-tune them first."""
        found, (_, residual) = self._predictors(shared, personal), split_residual(personal)
        own = tree_index(found.shared, int(found.reads[0]))
        # A run that goes on after it was complete goes on from what messages left unsaid.
        return own, join_residual(tree_index(found.personal, 0), residual)

    def score(self, shared: Tree, personal: Tree) -> dict[str, ScoreSums]:
        """Score the client's predictor on every part of its data that there is."""
        found = self._predictors(shared, personal)
        with self.plan.products():
            scores = evaluate(self.plan.algorithm, OneByOne(), found, self._own)
        return {
            part: ScoreSums(count, count * float(entry.losses), count * float(entry.values))
            for part, entry in scores.items()
            if (count := int(entry.counts))
        }

    def _predictors(self, shared: Tree, personal: Tree) -> Predictors:
        state = State(0, self._one(shared), self._one(personal))
        with torch.no_grad(), self.plan.products():
            return self._personalizer.predictors(state, self._own)

    @cached_property
    def _own(self) -> Federation:
        return self.federation.take(torch.tensor([self.federation.position(self.name)]))  # the client alone

    @cached_property
    def _personalizer(self) -> Personalizer:
        # Whatever stands between the clients, each reads the one tree that it has got.
        config = self.plan.config
        rate = config.schedule.rate(0, self.num_rounds or config.run.rounds)
        return replace(self.plan.personalizer(OneByOne()), mixer=Star(), learning_rate=rate)

    def _one(self, tree: Tree) -> Tree:
        """Give a tree a dimension for its one client, or group."""
        return tree_repeat(tree_to(tree, self.plan.device), 1)


def read_clients(plan: Plan, path: Path, name: str | None = None) -> Federation:
    """Read, encode and split the samples of a file; ``name`` owns all of them where no column says whose they are."""
    encoding, seed, data = plan.format.encoding, plan.config.run.seed, plan.config.values("data")
    if encoding is not None:
        split = {key: data[key] for key in ("validation", "test", "split_by") if key in data}
        dialect = Dialect(**{key: data[key] for key in Dialect._fields if key in data})
        table = read_table(path, encoding.target.name, encoding.client, split.get("split_by", ""), dialect)
        federation = FromFile(path=str(path), table=table, **split).make_by(encoding, seed, owner=name)
        if surplus := encoding.surplus(table):
            log.warning(_SURPLUS, path, ", ".join(map(repr, surplus)))
        for column, categories in encoding.unseen(table).items():
            log.warning(_UNSEEN, column, path, counted(len(categories), "category", "categories"), some(categories))
        return federation
    table = read_table(path)
    owners = table.owners()
    if owners is None and name is None:
        raise UserError(f"{path} has no column {table.client!r}; the name of the client is needed then.")
    owners = table.owned_by(str(name)).owners() if owners is None else owners
    inputs = plan.format.conform("(all)", table.stacked())
    cut = plan.config.data.cut if data else {}
    return Federation.from_arrays(inputs, plain_targets(table), owners, seed=seed, **cut)
