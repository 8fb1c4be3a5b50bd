"""One client at work: what the simulator does for it, on its own samples alone.

Trees are one client's, without a dimension for clients.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.files import write_atomically
from fedem.core.random import PERSONAL, SHUFFLE, derive
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_index, tree_repeat, tree_to
from fedem.data.encoding import plain_targets, some
from fedem.data.federation import Federation
from fedem.data.files import FromFile
from fedem.data.tables import Table, read_table
from fedem.deploy.plan import Plan
from fedem.engines import Cohort, OneByOne, SolverDeal, Work
from fedem.methods.mixer import Star
from fedem.methods.wrappers.compression import join_residual, split_residual
from fedem.runs.evaluate import evaluate
from fedem.runs.personalize import Personalizer, Predictors
from fedem.runs.rounds import State, init_personal

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
        samples, expected = self._own.train, self.plan.format.inputs
        shape = samples.inputs.shape[1:]
        if tuple(shape) != expected:
            raise UserError(
                f"Client {self.name!r} has inputs of shape {list(shape)}; allowed: {list(expected)}, as in the plan."
            )
        self.plan.check_samples(samples.inputs, samples.targets)
        self.plan.check_batches(self._own)
        return self

    @property
    def num_samples(self) -> int:
        """n_t, samples to train on."""
        return len(self._own.train)

    def first_personal(self, shared: Tree) -> Tree:
        """Return the personal tree that the client starts from."""
        keys = derive(self._own.keys, PERSONAL, self._seed)
        placed, codec = self._placed(shared), self.plan.codec
        personal = tree_index(init_personal(self.plan.algorithm, placed, keys.to(self._device)), 0)
        return join_residual(personal, codec.first_residual(placed)) if codec else personal

    def train(
        self, shared: Tree, personal: Tree, round_index: int, learning_rate: float, scale: float = 1.0
    ) -> tuple[Tree, Tree]:
        """Run one round, counted from 0, with the same random numbers as the simulator.

        ``scale`` multiplies the learning rate. Returns what is uploaded, and the client's next personal tree.
        """
        names = self._own.keys
        keys = derive(names, SHUFFLE, self._seed, round_index)
        here = torch.zeros(1, dtype=torch.int64)
        personal, residual = split_residual(self._placed(personal))
        cohort = Cohort(self._one(shared), here, self._one(personal), self._own.train)
        scales = None if scale == 1.0 else torch.tensor([scale], dtype=torch.float64)
        with self.plan.products():
            work = Work(self.plan.config.batching, keys, learning_rate, scales)
            (finished,) = self._deal.train(OneByOne(), cohort, work, names)
        upload, personal = tree_index(finished.uploads, 0), tree_index(finished.personal, 0)
        if (codec := self.plan.codec) is None:
            return upload, personal
        received = self._placed(shared)
        # A client that was fitted after training has left nothing unsaid.
        message, residual = codec.encode(upload, received, personal, residual or codec.first_residual(received))
        return message, join_residual(personal, residual)

    def fit(self, shared: Tree) -> Tree:
        """Return the personal tree of a client that never trained, fitted beside ``shared``."""
        # What fine-tuning makes belongs to a predictor, not to what is kept.
        plain = replace(self._personalizer, fine_tune_epochs=0)
        with torch.no_grad(), self.plan.products():
            found = plain.personalize(State(0, self._one(shared), {}), self._own.train, self._own.keys)
        return tree_index(found.personal, 0)

    def settle(self, shared: Tree, personal: Tree) -> tuple[Tree, Tree]:
        """Return what the client's predictor is made of: the trees themselves, unless clients fine-tune them first."""
        found, (_, residual) = self._predictors(shared, personal), split_residual(personal)
        own = tree_index(found.shared, int(found.reads[0]))
        # A run that goes on after it was complete goes on from what messages left unsaid.
        return own, join_residual(tree_index(found.personal, 0), residual)

    def assess(self, shared: Tree, personal: Tree) -> dict[str, Assessed]:
        """Score the client's predictor on every part of its data that there is."""
        found = self._predictors(shared, personal)
        with self.plan.products():
            scores = evaluate(self.plan.algorithm, OneByOne(), found, self._own)
        return {
            part: Assessed(count, count * float(entry.losses), count * float(entry.values))
            for part, entry in scores.items()
            if (count := int(entry.counts))
        }

    def _predictors(self, shared: Tree, personal: Tree) -> Predictors:
        state = State(0, self._one(shared), self._one(personal))
        with torch.no_grad(), self.plan.products():
            return self._personalizer.predictors(state, self._own)

    @cached_property
    def _own(self) -> Federation:
        """The client alone."""
        return self.federation.take(torch.tensor([self.federation.position(self.name)]))

    @cached_property
    def _deal(self) -> SolverDeal:
        return SolverDeal(self.plan.algorithm)

    @cached_property
    def _personalizer(self) -> Personalizer:
        # Whatever stands between the clients, each reads the one tree that it has got.
        return replace(self.plan.personalizer(OneByOne()), mixer=Star())

    @property
    def _seed(self) -> int:
        return self.plan.config.run.seed

    @property
    def _device(self) -> torch.device:
        return self.plan.device

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
    encoding, seed, data = plan.format.encoding, plan.config.run.seed, plan.config.values("data")
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
    inputs: Tensor = plan.format.conform("(all)", table.stacked())
    return Federation.from_arrays(inputs, plain_targets(table), owners, seed=seed, **shares)


# What a client keeps between messages: one file, replaced whole, that never leaves it.

_TREES = ("personal", "before", "shared")
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
_LONGEST = 120
"""characters of a name that are written out: systems allow 255 bytes"""


@dataclass(frozen=True, eq=False)
class Kept:
    """What a client has learnt, and what it was learnt under.

    Attributes:
        plan: what all agreed on.
        round: rounds of the run done when ``personal`` was.
        personal: v_t.
        shared: u as it was received last of all; None while the run goes on, since every message brings it.
        before: v_t before the client's last round, so that a server that repeats it after a crash gets the same answer.
        run: which run of the experiment it is of, as its server, or its peers, call it.
        client: its name; empty in files that do not say.

    """

    plan: Plan
    round: int
    personal: Tree
    shared: Tree | None = None
    before: Tree | None = None
    run: str = ""
    client: str = ""

    def save(self, path: Path) -> None:
        """Replace the file, which nobody else on the machine may read."""
        from safetensors.torch import save

        there = {name: tree for name in _TREES if (tree := getattr(self, name)) is not None}
        tensors = {
            # Copies: trees may share leaves, which the format does not take.
            key: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tree in there.items()
            for key, leaf in add_prefix(name, tree).items()
        }
        facts = {"round": self.round, "trees": list(there), "run": self.run, "client": self.client}
        facts["plan"] = self.plan.to_json()
        for folder in (path.parent.parent, path.parent):  # an experiment's, in that of all
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, save(tensors, metadata={"kept": json.dumps(facts)}), private=True)

    @classmethod
    def load(cls, path: Path) -> Kept:
        """Read a file that :meth:`save` wrote."""
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file

        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()["kept"])
            tensors = load_file(path)
            trees = {name: take_prefix(name, tensors) for name in facts["trees"]}
            plan, client = Plan.from_json(facts["plan"]), facts.get("client", "")
            return cls(plan, facts["round"], **trees, run=facts["run"], client=client)
        except FileNotFoundError:
            raise UserError(f"There is no kept file {path}.") from None
        except (OSError, KeyError, TypeError, AttributeError, ValueError, SafetensorError) as error:
            raise UserError(
                f"The kept file {path} can't be read ({type(error).__name__}: {error}); "
                "without it the client starts anew."
            ) from None


def place(folder: Path, experiment: str, client: str) -> Path:
    """Return where a client keeps what it learns in an experiment: ``folder/EXPERIMENT/CLIENT.safetensors``."""
    return folder / _safe("experiment", experiment) / f"{_safe('client', client)}.safetensors"


def _safe(what: str, name: str) -> str:
    """Return a name that any file system takes and that no other name gets, though capitals may count for nothing."""
    if not name:
        raise UserError(f"The name of the {what} is empty; allowed: at least one character.")
    content = name.encode(errors="surrogatepass")
    escaped = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02x}" for byte in content)
    if len(escaped) <= _LONGEST:
        return escaped
    return f"{escaped[:_LONGEST]}~{blake2b(content, digest_size=16).hexdigest()}"
