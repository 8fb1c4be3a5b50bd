"""The contract of a mixer: what stands between the clients, a server or an agreement among peers.

Every aggregation is one matrix: mean g = sum over the cohort of weight[g, c] * upload[c]. A mixer chooses the matrix,
and it may remember things from round to round: who belongs to which cluster, how tasks are related.

Shapes: G groups in all, g groups written in a round, C clients of the cohort, T clients of the federation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.settings import Settings
from fedem.core.tree import Tree, tree_cat, tree_floats, tree_map, tree_repeat
from fedem.graphs import Topology

_MOST_PAIRED = 10_000  # clients at most where the server keeps a number for each pair of them: 800 MB
_MOST_COMPARED = 1 << 24  # integers compared at once
Uploads = Iterable[tuple[Tensor, Tree]]  # as they come in: positions in the cohort [c], the trees from there [c, ...]
# What a mixer keeps of c newcomers [c, ...], what they uploaded -> the same after the round, what they read next.
Learn = Callable[[Tensor, Tree], tuple[Tensor, Tree]]


class Start(NamedTuple):
    """What a mixer begins with."""

    shared: Tree  # the one initial tree
    trained: frozenset[str]  # names of a model's leaves that are trained; the others are frozen or buffers
    keys: Tensor  # [T], for the clients' names: whatever is random must depend on them, not on positions
    seed: int  # for whatever else is random
    draw_each: Callable[[], Tree] = dict  # draws an initial tree for each client, [T, ...]


class Round(NamedTuple):
    """What a mixer knows of a round."""

    clients: Tensor  # [C] int64, who takes part, positions in the federation
    sizes: Tensor  # [C] int64, their numbers of training samples
    num_clients: int  # T
    learning_rate: float
    key: int  # the source of the round's random numbers
    average_size: float = 1.0  # n / T, training samples per client
    trained: frozenset[str] = frozenset()  # names of the leaves of u that are trained; the others are frozen or buffers


class Served(NamedTuple):
    """The shared trees that some clients read."""

    shared: Tree  # [g, ...]
    reads: Tensor  # [C] int64, each client's row of ``shared``


class RoundPlan(NamedTuple):
    """How a round begins."""

    downloads: Served  # what each client of the cohort starts from
    num_steps: int | None = None  # how many local steps everybody takes; None for what the batching says
    scales: Tensor | None = None  # [C], what each client's learning rate is multiplied by; None for one


class Mixed(NamedTuple):
    """The result of a round's uploads. Groups that are not written keep their trees."""

    groups: Tensor  # [g] int64, which groups are written; one past the last begins a new one
    means: Tree  # [g, ...]
    num_messages: int  # uploads that were sent; there are as many downloads


class Welcome(NamedTuple):
    """What a client unseen in training may start from."""

    shared: Tree  # [K, ...], it keeps the one with the least loss on its samples
    fine_tune: bool = False  # whether it goes on to train that one, for want of anything better
    kept: Tensor | None = None  # [K, ...], what the mixer keeps of a client, where a newcomer learns that instead
    learn: Learn | None = None  # how it is learnt, everybody else frozen
    refusal: str = ""  # why there is nothing to start from, where that is so


@dataclass(frozen=True)
class Mixer(Settings, ABC):
    """Who averages with whom. Each group has one shared tree. Subclasses are final frozen dataclasses.

    Class variables and the two properties declare what a run may do with it; nothing else decides it.
    """

    adds_up: ClassVar[bool] = False
    """whether means of some uploads and of the others add up to those of all (of integer leaves: the largest), and the
    memory does not depend on uploads; then processes that share a cohort need not send them to each other"""
    is_server_mean: ClassVar[bool] = False
    """whether there is one tree for all, the mean of the uploads: a server behind Flower can compute it,
    messages may be compressed, and a graph may take its place"""
    over_graph: ClassVar[bool] = False  # whether clients average with their neighbours in a graph
    averages: ClassVar[bool] = False  # whether every tree is an average of uploads: label shares may shift outputs
    seeks_consensus: ClassVar[bool] = False  # whether the trees tend to one for all clients, as in the paper's theorems

    @property
    def graph(self) -> Topology | None:
        """The graph that clients average over; None with a server."""
        return None

    @property
    def local_leaves(self) -> frozenset[str]:
        """Names of the leaves of u that never leave their client."""
        return frozenset()

    @property
    def plain(self) -> "Mixer":
        """The mixer itself, without what a run puts around it."""
        return self

    @abstractmethod
    def init(self, start: Start) -> tuple[Tree, Tree]:
        """Return the groups' first trees ``[G, ...]`` and the mixer's first memory."""

    @abstractmethod
    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        """Return what the predictors of ``clients`` (positions, ``[C]``) read."""

    def plan(self, shared: Tree, memory: Tree, this: Round) -> RoundPlan:
        """Return how the round begins: clients download what their predictors read, and train by the batching."""
        return RoundPlan(self.read(shared, memory, this.clients))

    @abstractmethod
    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Return this round's means and the next memory."""

    def advance(self, shared: Tree, memory: Tree, this: Round, mixed: Mixed) -> tuple[Mixed, Tree]:
        """Return what the groups get in place of the means of all uploads, and the next memory: as :meth:`mix` has it.

        Processes that share a cohort have added up their means by then; all of them do this.
        """
        return mixed, memory

    def weights(self, this: Round) -> Tensor:
        """Return what the cohort's clients count in the mean of a server that averages, ``[C]``, summing to one."""
        return by_samples(this)[0]

    def share(self, this: Round, of_samples: float) -> float:
        """Return what share of everybody takes part, as the mixer counts clients; ``of_samples`` of all samples do."""
        return of_samples

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        """Return what clients unseen in training start from: of all groups' trees, the best on their samples."""
        return Welcome(shared)

    def check(self, keys: Tensor, seed: int) -> None:
        """Refuse clients that the mixer can't bring together, or too many to remember; arguments as in ``Start``."""

    def summary(self, memory: Tree, cohort_size: int) -> dict[str, float]:
        """Return figures of the mixer for the summary of a run whose rounds had ``cohort_size`` clients."""
        return {}


def weighted_means(weights: Tensor, uploads: Uploads) -> Tree:
    """Mix uploads as they come by weights ``[g, C]``, to ``[g, ...]``; of counters take the largest that counts."""
    mixed: Tree = {}
    trees: Tree = {}
    for positions, trees in uploads:
        device = next((leaf.device for leaf in trees.values()), weights.device)
        here = weights[:, positions.to(weights.device)]
        heard = here.any(1).nonzero().squeeze(1)  # on a graph few groups hear of a client
        rows = None if len(heard) == len(here) else heard.to(device)
        here = here.to(device)  # once: a GPU is waited for
        floats = tree_floats(trees)
        by_type = {dtype: here.to(dtype) for dtype in {leaf.dtype for leaf in floats.values()}}
        for name, leaf in floats.items():
            mixed[name] = _added(mixed.get(name), by_type[leaf.dtype], rows, leaf)
        counters = {name: leaf for name, leaf in trees.items() if name not in floats}
        for name, part in _largest(here > 0, counters).items():
            mixed[name] = torch.maximum(mixed[name], part) if name in mixed else part
    return {name: mixed[name] for name in trees}  # in the order of the uploads' leaves


def _added(total: Tensor | None, weights: Tensor, rows: Tensor | None, leaf: Tensor) -> Tensor:
    """Add rows ``[c, ...]`` by weights ``[g, c]`` to the ``total`` ``[g, ...]``, in place, where there is one.

    Groups other than ``rows`` (None: all) have no weight for them, and are not touched.
    """
    flat, shape = leaf.reshape(len(leaf), -1), (len(weights), *leaf.shape[1:])
    if rows is None and total is None:
        return (weights @ flat).reshape(shape)
    total = leaf.new_zeros(shape) if total is None else total
    place = total.view(len(weights), -1)
    if rows is None:
        place.addmm_(weights, flat)
    else:
        place.index_add_(0, rows, weights[rows] @ flat)
    return total


def _largest(counts: Tensor, counters: Tree) -> Tree:
    """Return the largest of the rows ``[c, ...]`` that count, ``[g, c]``, as ``[g, ...]``; those of a type at once."""
    found: Tree = {}
    for dtype in {leaf.dtype for leaf in counters.values()}:
        alike = {name: leaf for name, leaf in counters.items() if leaf.dtype == dtype}
        widths = [leaf[0].numel() for leaf in alike.values()]
        flat = torch.cat(
            [leaf.reshape(len(leaf), width) for leaf, width in zip(alike.values(), widths, strict=True)], 1
        )
        # Many groups at once: clients on a graph have a row each.
        blocks = counts[:, :, None].split(max(1, _MOST_COMPARED // max(1, flat.numel())))
        lowest = torch.iinfo(dtype).min
        largest = torch.cat([torch.where(block, flat, lowest).amax(1) for block in blocks])
        for (name, leaf), piece in zip(alike.items(), largest.split(widths, 1), strict=True):
            found[name] = piece.reshape(len(piece), *leaf.shape[1:])
    return found


def gather(uploads: Uploads) -> Tree:
    """Wait for all uploads and return them in the cohort's order, ``[C, ...]``."""
    pieces = list(uploads)
    order = torch.cat([positions for positions, _ in pieces]).argsort()
    return tree_map(lambda leaf: leaf.index_select(0, order.to(leaf.device)), tree_cat([tree for _, tree in pieces]))


def by_samples(this: Round) -> Tensor:
    """Weights n_t / n over the cohort, ``[1, C]`` float64."""
    return (this.sizes.double() / this.sizes.sum())[None]


def check_pairs(who: str, num_clients: int) -> None:
    """Refuse a square matrix over the clients that would fill the memory."""
    if num_clients > _MOST_PAIRED:
        problem = f"{who} keeps a number for every pair of clients, and there are {num_clients:,}"
        raise UserError(f"{problem}; allowed: at most {_MOST_PAIRED:,} clients.")


def mean_of_groups(shared: Tree) -> Tree:
    """Return the mean of all groups, ``[1, ...]``; of integer leaves the largest."""
    return tree_map(lambda leaf: (leaf.mean if leaf.is_floating_point() else leaf.amax)(0, keepdim=True), shared)


@dataclass(frozen=True)
class OneGroup(Mixer):
    """One shared tree that everybody reads."""

    def init(self, start: Start) -> tuple[Tree, Tree]:
        return tree_repeat(start.shared, 1), {}

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        return Served(shared, torch.zeros_like(clients))


@dataclass(frozen=True)
class OwnGroups(Mixer):
    """A shared tree for each client."""

    def init(self, start: Start) -> tuple[Tree, Tree]:
        return tree_repeat(start.shared, len(start.keys)), {}

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        return Served(shared, clients)

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        return Welcome(mean_of_groups(shared), fine_tune=True)


@final
@dataclass(frozen=True)
class Star(OneGroup):
    """A server that averages the uploads of those who took part.

    Attributes:
        weighting: how clients count in the server's average: "samples" by their numbers of training samples, "equal"
            all alike.
    """

    adds_up: ClassVar[bool] = True
    is_server_mean: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    seeks_consensus: ClassVar[bool] = True

    weighting: str = field(default="samples", metadata={"choices": ("samples", "equal")})

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Over the cohort alone: clients that did not take part have nothing new to say."""
        means = weighted_means(self.weights(this)[None], uploads)
        return Mixed(torch.zeros(1, dtype=torch.int64), means, len(this.clients)), memory

    def weights(self, this: Round) -> Tensor:
        alike = this._replace(sizes=torch.ones_like(this.sizes))
        return by_samples(alike if self.weighting == "equal" else this)[0]

    def share(self, this: Round, of_samples: float) -> float:
        return len(this.clients) / this.num_clients if self.weighting == "equal" else of_samples


@final
@dataclass(frozen=True)
class Alone(OwnGroups):
    """Nobody talks: each client keeps what it trained, and the mixing matrix is the identity."""

    averages: ClassVar[bool] = True

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        return Mixed(this.clients, gather(uploads), 0), memory

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        reason = "Clients that train alone leave nothing to share with an unseen client; choose another method."
        return Welcome({}, refusal=reason)


@final
@dataclass(frozen=True)
class Settled(Mixer):
    """Clients fitted after training, who are not trained again: the memory names each client's group."""

    def init(self, start: Start) -> tuple[Tree, Tree]:
        raise AssertionError("clients fitted after training are made by personalisation alone")

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        return Served(shared, memory["reads"].cpu()[clients])

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        raise AssertionError("clients fitted after training are not trained again")

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        reason = "These clients were fitted after training; fit further ones from the run that they were fitted from."
        return Welcome({}, refusal=reason)
