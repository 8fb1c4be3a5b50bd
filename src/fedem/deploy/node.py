"""One client at work: what the simulator does for it, on its own samples alone.

Trees are one client's, without a dimension for clients.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedem.data.files import FromFile
from fedem.data.tables.columns import Table
from fedem.data.tables.features import some
from fedem.data.tables.readers import read_table
from fedem.data.tables.targets import plain_targets
from fedem.deploy.plan import Plan
from fedem.engines import Cohort, OneByOne, SolverDeal
from fedem.errors import UserError
from fedem.evaluate import evaluate
from fedem.federation import Federation
from fedem.mixing.star import Star
from fedem.personal import Personalizer, Predictors
from fedem.precision import products
from fedem.randomness import PERSONAL, SHUFFLE, derive
from fedem.rounds import State, init_personal
from fedem.settling import check_batches
from fedem.tree import Tree, tree_index, tree_repeat, tree_to

log = logging.getLogger("flwr")  # on a peer, where Flower is not at work, Python shows its warnings all the same


class Assessed(NamedTuple):
    """A client's predictor on one part of its data: sums, so that averages need no single client's."""

    samples: int
    loss: float
    """summed negative log-likelihood"""
    value: float
    """samples predicted right, or the summed squared error"""


@dataclass(frozen=True, eq=False)
class Node:
    """One client under a plan.

    Attributes:
        plan: what all agree on.
        name: of the client.
        federation: one that the client is in; nobody else's samples are touched.

    """

    plan: Plan
    name: str
    federation: Federation

    @classmethod
    def open(cls, plan: Plan, path: Path, name: str | None = None) -> Node:
        """Read a client's samples from a file, encode them as the plan says and split them as the simulator does.

        Args:
            plan: what all agree on.
            path: a file, or a folder of files, as for training.
            name: of the client. Where the samples have a column of clients, its rows are taken (may be None if there is
                one client only); where they have none, all are the client's.

        """
        federation = read_clients(plan, path, name)
        if name is None:
            if federation.num_clients > 1:
                some = ", ".join(federation.names[:5]) + (", ..." if federation.num_clients > 5 else "")
                raise UserError(f"{path} has {federation.num_clients} clients ({some}); a client's name is needed.")
            name = federation.names[0]
        return cls(plan, name, federation).check()

    def check(self) -> Node:
        """Refuse samples that the model has no place for."""
        parts, config, samples = self.plan.parts, self.plan.config, self._own.train
        inputs = samples.inputs
        if tuple(inputs.shape[1:]) != self.plan.shapes.inputs:
            raise UserError(
                f"Client {self.name!r} has inputs of shape {list(inputs.shape[1:])}; allowed: "
                f"{list(self.plan.shapes.inputs)}, as in the plan."
            )
        if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
            config.model.check(int(inputs.min()), int(inputs.max()))
        parts.model.check(inputs, samples.targets)
        check_batches(parts.model, config.batching, self._own)
        return self

    @property
    def num_samples(self) -> int:
        """n_t, samples to train on."""
        return len(self._own.train)

    def first_personal(self, shared: Tree) -> Tree:
        """Return the personal tree that the client starts from."""
        keys = derive(self._own.keys, PERSONAL, self._seed)
        return tree_index(init_personal(self.plan.parts.algorithm, self._placed(shared), keys.to(self._device)), 0)

    def train(
        self, shared: Tree, personal: Tree, round_index: int, learning_rate: float, scale: float = 1.0
    ) -> tuple[Tree, Tree]:
        """Run one round, counted from 0, with the same random numbers as the simulator.

        ``scale`` multiplies the learning rate. Returns what is uploaded, and the client's next personal tree.
        """
        names = self._own.keys
        keys = derive(names, SHUFFLE, self._seed, round_index)
        here = torch.zeros(1, dtype=torch.int64)
        cohort = Cohort(self._one(shared), here, self._one(personal), self._own.train)
        scales = None if scale == 1.0 else torch.tensor([scale], dtype=torch.float64)
        with products(self.plan.config.run.precision, self._device):
            (finished,) = self._deal.train(
                OneByOne(), cohort, self.plan.config.batching, names, keys, learning_rate, scales=scales
            )
        return tree_index(finished.uploads, 0), tree_index(finished.personal, 0)

    def fit(self, shared: Tree) -> Tree:
        """Return the personal tree of a client that never trained, fitted beside ``shared``."""
        # What fine-tuning makes belongs to a predictor, not to what is kept.
        plain = replace(self._personalizer, fine_tune_epochs=0)
        with torch.no_grad(), products(self.plan.config.run.precision, self._device):
            found = plain.personalize(State(0, self._one(shared), {}), self._own.train, self._own.keys)
        return tree_index(found.personal, 0)

    def settle(self, shared: Tree, personal: Tree) -> tuple[Tree, Tree]:
        """Return what the client's predictor is made of: the trees themselves, unless clients fine-tune them first."""
        found = self._predictors(shared, personal)
        return tree_index(found.shared, int(found.reads[0])), tree_index(found.personal, 0)

    def assess(self, shared: Tree, personal: Tree) -> dict[str, Assessed]:
        """Score the client's predictor on every part of its data that there is."""
        found = self._predictors(shared, personal)
        with products(self.plan.config.run.precision, self._device):
            scores = evaluate(self.plan.parts.algorithm, OneByOne(), found, self._own)
        return {
            part: Assessed(count, count * float(entry.losses), count * float(entry.values))
            for part, entry in scores.items()
            if (count := int(entry.counts))
        }

    def _predictors(self, shared: Tree, personal: Tree) -> Predictors:
        state = State(0, self._one(shared), self._one(personal))
        with torch.no_grad(), products(self.plan.config.run.precision, self._device):
            return self._personalizer.predictors(state, self._own)

    @cached_property
    def _own(self) -> Federation:
        """The client alone."""
        return self.federation.take(torch.tensor([self.federation.position(self.name)]))

    @cached_property
    def _deal(self) -> SolverDeal:
        return SolverDeal(self.plan.parts.algorithm)

    @cached_property
    def _personalizer(self) -> Personalizer:
        # Whatever stands between the clients, each reads the one tree that it has got.
        return replace(self.plan.parts.personalizer(self.plan.config, OneByOne()), mixer=Star())

    @property
    def _seed(self) -> int:
        return self.plan.config.run.seed

    @property
    def _device(self) -> torch.device:
        return self.plan.parts.device

    def _placed(self, tree: Tree) -> Tree:
        return tree_to(tree, self._device)

    def _one(self, tree: Tree) -> Tree:
        """Give a tree a dimension for its one client, or group."""
        return tree_repeat(self._placed(tree), 1)


class _ReadOnce(FromFile):
    """A file that is looked at twice."""

    def read(self) -> Table:
        return self._table

    @cached_property
    def _table(self) -> Table:
        return super().read()


def read_clients(plan: Plan, path: Path, name: str | None = None) -> Federation:
    """Read, encode and split the samples of a file; ``name`` owns all of them where no column says whose they are."""
    encoding, seed, data = plan.shapes.encoding, plan.config.run.seed, plan.config.values("data")
    shares = {key: data[key] for key in ("validation", "test") if key in data}
    if encoding is not None:
        source = _ReadOnce(path=str(path), target_column=encoding.target.name, client_column=encoding.client, **shares)
        federation = source.make_by(encoding, seed, owner=name)
        for column, categories in encoding.unseen(source.read()).items():
            log.warning(
                "Column %r of %s has %d categories that the plan has not (%s); they count as none of those known.",
                column,
                path,
                len(categories),
                some(categories),
            )
        return federation
    table = read_table(path)
    owners = table.owners()
    if owners is None and name is None:
        raise UserError(f"{path} has no column {table.client!r}; the name of the client is needed then.")
    owners = table.owned_by(str(name)).owners() if owners is None else owners
    inputs: Tensor = plan.shapes.conform("(all)", table.stacked())
    return Federation.from_arrays(inputs, plain_targets(table), owners, seed=seed, **shares)
