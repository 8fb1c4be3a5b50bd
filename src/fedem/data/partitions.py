"""Partitions: recipes that make clients of a collection of samples, and what those that deal samples have in common.

The order of a collection's rows does not matter. Samples to be dealt are first put in a random order, by hashes of the
seed and of their content. What is drawn afterwards, from a generator that knows the seed alone, goes by the places in
that order and by labels.

Shapes: N samples of a collection, n of them dealt, T clients, G groups of samples, C coarse labels, F fine labels.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.random import choose, client_keys, derive, scramble
from fedem.core.settings import Settings
from fedem.data.samples import Pool, describe, offsets_of

Integers = NDArray[np.int64]
SAMPLES, CLIENTS, DRAWS = 101, 102, 103  # purposes, beside those of fedem.core.random
NOBODY = -1
# The logarithm of a small share is of the order of -1 / concentration, which must not overflow.
CONCENTRATION = {"min": 1e-300}
_ATTEMPTS = 100  # draws of a Dirichlet partition, until no client is too small
_ROWS = 1 << 16  # samples that are hashed at once
_BLOCK = 4 << 20  # ... and their bytes
_SEED = 20211206  # of the words that hash a sample's content


@dataclass(frozen=True, eq=False)
class Collection:
    """All samples of a data set, before anybody owns them, with what a partition may go by."""

    pool: Pool
    ids: Tensor  # [N] int64: a hash of each sample's content and of which one it is among equal ones
    fingerprint: str  # a hash of all samples, whatever their order
    owners: Tensor | None = None  # [N] int64, each sample's own client (writer, role, ...), a position in owner_names
    owner_names: tuple[str, ...] = ()  # names of those clients; empty when the data set has none
    coarse: Tensor | None = None  # [N] int64, the group that each sample's label belongs to, where labels have groups
    order: Tensor | None = None  # [N], each sample's time, where clients' samples are cut in that order


class Assignment(NamedTuple):
    """Who owns which samples of a collection."""

    names: tuple[str, ...]  # of the T clients, all different
    rows: Tensor  # [n] int64, rows of the collection, one client after the other; none stands twice
    offsets: Tensor  # [T + 1] int64; client t owns rows[offsets[t]:offsets[t + 1]]


def content_ids(*columns: NDArray[np.generic]) -> Integers:
    """Hash each sample's content to a word: arrays ``[N, ...]`` of plain numbers -> ``[N]``."""
    # Each column's words are multiplied with odd random ones and the sum scrambled; equal samples have equal ids.
    rng = np.random.default_rng(_SEED)
    ids = torch.zeros(len(columns[0]), dtype=torch.int64)
    for column in columns:
        width = int(np.prod(column.shape[1:])) * column.dtype.itemsize
        draws = rng.integers(0, 1 << 63, size=-(-width // 8), dtype=np.uint64)
        factors = torch.from_numpy(draws.view(np.int64)) * 2 + 1  # products of words wrap around
        rows = max(1, min(_ROWS, _BLOCK // max(width, 1)))
        for start in range(0, len(column), rows):
            block = np.ascontiguousarray(column[start : start + rows]).reshape(-1)
            content = np.zeros((len(block) * column.dtype.itemsize // max(width, 1), 8 * len(factors)), np.uint8)
            content[:, :width] = block.view(np.uint8).reshape(-1, width)
            words = scramble(torch.from_numpy(content.view(np.int64)))
            ids[start : start + rows] += (words * factors).sum(1)
        ids = scramble(ids)
    return ids.numpy()


def numbered(ids: Integers) -> Integers:
    """Hash into each id which one it is among equal ones, lest they be drawn all or none. ``[N] -> [N]``."""
    import pandas

    return content_ids(ids, pandas.Series(ids).groupby(ids).cumcount().to_numpy())


def fingerprint_of(ids: Integers) -> str:
    """Hash all samples, whatever their order: 32 hexadecimal digits."""
    return blake2b(np.sort(ids).tobytes(), digest_size=16).hexdigest()


def from_arrays(
    inputs: NDArray[np.generic],
    targets: NDArray[np.generic],
    owners: NDArray[np.str_] | None = None,
    *further: NDArray[np.generic],
) -> Collection:
    """Make a collection of arrays in memory; ``owners`` ``[N]`` name clients, ``further`` ones tell samples apart."""
    ids = content_ids(inputs, targets, *further)
    names, positions = (), None
    if owners is not None:
        unique, codes = np.unique(owners.astype(str), return_inverse=True)
        names, positions = tuple(unique.tolist()), torch.from_numpy(codes.astype(np.int64))
        ids = content_ids(ids, client_keys(names).numpy()[codes])
    ids = numbered(ids)
    pool = Pool(torch.from_numpy(inputs), torch.from_numpy(targets))
    return Collection(pool, torch.from_numpy(ids), fingerprint_of(ids), positions, names)


@dataclass(frozen=True)
class Partition(Settings, ABC):
    """A recipe for clients: the same samples, recipe and seed make the same ones.

    Attributes:
        share: how much of the samples is kept, chosen uniformly.
        min_samples: no client has fewer; where one would, the partition is refused.
    """

    share: float = field(default=1.0, metadata={"above": 0, "max": 1})
    min_samples: int = field(default=1, metadata={"min": 1})

    def assign(self, collection: Collection, seed: int) -> Assignment:
        """Say who owns which samples; the rows of each client ascend."""
        if not 0 <= seed < 1 << 63:
            raise UserError(f"The seed is {seed}; allowed: at least 0 and below 2**63.")
        return self._assign(collection, seed)

    @abstractmethod
    def _assign(self, collection: Collection, seed: int) -> Assignment: ...


@dataclass(frozen=True)
class Dealing(Partition):
    """Samples dealt to ``num_clients`` clients called "0", "1", ...; whose they were plays no part.

    With the same seed, all partitions of this kind keep the same ``share`` of the samples.

    Attributes:
        num_clients: T, to whom samples are dealt.
    """

    least: ClassVar[tuple[str, ...]] = ("min_samples",)  # settings that say how many samples a client needs
    num_clients: int = field(default=100, metadata={"min": 1})

    def _assign(self, collection: Collection, seed: int) -> Assignment:
        count = round(self.share * len(collection.ids))
        needed = max(getattr(self, name) for name in self.least)
        if self.num_clients * needed > count:
            why = f"{count} of {len(collection.ids)} samples are dealt and each client needs at least {needed}"
            allowed = f"at most {count // needed}, since {why}"
            raise UserError(f"partition.num_clients is {self.num_clients}; allowed: {allowed}.")
        rows = np.argsort(derive(derive(SAMPLES, seed), collection.ids).numpy(), kind="stable")[:count]
        clients = self._deal(collection, rows, np.random.default_rng((DRAWS, seed)))
        assignment = assignment_of([str(client) for client in range(self.num_clients)], rows, clients)
        if (smallest := int(assignment.offsets.diff().min())) < self.min_samples:
            allowed = f"at most {smallest}, what the smallest client gets here"
            raise UserError(f"partition.min_samples is {self.min_samples}; allowed: {allowed}.")
        return assignment

    @abstractmethod
    def _deal(self, collection: Collection, rows: Integers, rng: Generator) -> Integers:
        """Return the client of each of ``rows``, which are in random order, or ``NOBODY``. ``[n] -> [n]``."""


def assignment_of(names: Sequence[str], rows: Integers, clients: Integers) -> Assignment:
    """Put ``rows`` ``[n]`` in the order of their ``clients`` ``[n]``, positions among ``names``."""
    owned = clients != NOBODY
    rows, clients = rows[owned], clients[owned]
    sizes = np.bincount(clients, minlength=len(names))
    in_order = rows[np.lexsort((rows, clients))]
    return Assignment(tuple(names), torch.from_numpy(in_order), offsets_of(torch.from_numpy(sizes)))


def labels_of(collection: Collection, rows: Integers) -> Integers:
    """Return the labels of ``rows`` ``[n]``, numbered from 0 in their order without gaps. ``[n]``."""
    if (targets := collection.pool.targets).is_floating_point() or targets.ndim != 1:
        raise UserError(f"The targets are {describe(targets)}; allowed for a partition by labels: integers [n].")
    return np.unique(targets.numpy()[rows], return_inverse=True)[1]


def deal_counts(groups: Integers, counts: Integers) -> Integers:
    """Deal ``counts`` ``[G, T]`` samples of each group to each client. Groups ``[n]`` -> clients ``[n]``."""
    rest = np.bincount(groups, minlength=len(counts)) - counts.sum(1)
    receivers = np.tile([*range(counts.shape[1]), NOBODY], len(counts))
    clients = np.empty_like(groups)
    clients[np.argsort(groups, kind="stable")] = np.repeat(receivers, np.column_stack([counts, rest]).flatten())
    return clients


def log_gammas(rng: Generator, concentration: float, *shape: int) -> NDArray[np.float64]:
    """Draw a symmetric Dirichlet's shares as logarithms, which no concentration makes underflow; not normalised."""
    # Gamma(a) is Gamma(a + 1) U^(1 / a), and minus the logarithm of a uniform U is exponential.
    return np.log(rng.standard_gamma(concentration + 1, shape)) - rng.standard_exponential(shape) / concentration


def normalized(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the shares, of sum 1 over the last dimension."""
    shares = np.exp(logs - logs.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def fingerprint(assignment: Assignment, collection: Collection) -> str:
    """Hash who owns which samples, whatever the order of rows and clients: 32 hexadecimal digits."""
    ids = collection.ids[assignment.rows].tensor_split(assignment.offsets[1:-1])
    digest = blake2b(digest_size=16)
    for name, own in sorted(zip(assignment.names, ids, strict=True), key=lambda pair: pair[0]):
        word = name.encode(errors="surrogatepass")
        digest.update(f"{len(word)} {len(own)} ".encode() + word + own.sort().values.numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Dirichlet(Dealing):
    """Every label dealt by itself in Dirichlet shares: the paper's EMNIST and CIFAR-10 (after Wang et al. 2020).

    How many samples of a label each client gets is multinomial with shares from a symmetric Dirichlet(``alpha``) over
    the clients, as in the paper's own code. Where a client would have fewer than ``min_samples``, all shares are drawn
    again, as is common. So the clients follow that law given that none is too small; samples moved to small clients
    would bring labels that no Dirichlet drew.

    Attributes:
        min_samples: no client has fewer; where one would, all shares are drawn again.
        alpha: concentration of the shares; the smaller, the fewer clients have most of a label.
    """

    min_samples: int = field(default=10, metadata={"min": 1})
    alpha: float = field(default=0.4, metadata=CONCENTRATION)

    def _deal(self, collection: Collection, rows: Integers, rng: Generator) -> Integers:
        groups = self._groups(labels_of(collection, rows), rng)
        sizes = np.bincount(groups)
        for _ in range(_ATTEMPTS):
            counts = rng.multinomial(sizes, normalized(log_gammas(rng, self.alpha, len(sizes), self.num_clients)))
            if counts.sum(0).min() >= self.min_samples:
                return deal_counts(groups, counts)
        left = f"left one of {self.num_clients} clients with fewer than {self.min_samples} samples"
        allowed = "a smaller partition.min_samples or partition.num_clients, or a larger partition.alpha"
        raise UserError(f"With partition.alpha {self.alpha:g}, each of {_ATTEMPTS} draws {left}; allowed: {allowed}.")

    def _groups(self, labels: Integers, rng: Generator) -> Integers:
        """Return what is dealt in the same shares: the group of each sample, from 0 to G - 1. ``[n] -> [n]``."""
        return labels


@dataclass(frozen=True)
class LabelGroups(Dirichlet):
    """Labels put at random into ``num_groups`` groups, as equal as can be: what the paper's own code does for CIFAR-10.

    The labels of a group have the same shares.

    Attributes:
        num_groups: G, at most as many as there are labels.
    """

    num_groups: int = field(default=3, metadata={"min": 1})

    def _groups(self, labels: Integers, rng: Generator) -> Integers:
        if self.num_groups > (num_labels := int(labels.max()) + 1):
            said = f"partition.num_groups is {self.num_groups}"
            raise UserError(f"{said}; allowed: at most {num_labels}, the number of labels.")
        return (rng.permutation(num_labels) % self.num_groups)[labels]


@dataclass(frozen=True)
class Pachinko(Dealing):
    """The paper's CIFAR-100 (after Li and McCallum 2006, Reddi et al. 2021): clients of the same size.

    A client draws shares of the coarse labels from a Dirichlet(``alpha``) and, for each of them, shares of its fine
    labels from a Dirichlet(``beta``). Its samples are drawn one by one: a coarse label, a fine label of it, an unused
    sample of that. A fine label leaves with its last unused sample, a coarse one with its last fine label; the shares
    of those that stay are normalised again.

    Attributes:
        samples_per_client: the same for all; 0 stands for as many as there are for everybody.
        alpha: concentration of a client's shares of the coarse labels; the smaller, the fewer it has.
        beta: concentration of its shares of a coarse label's fine labels; likewise.
    """

    least = ("min_samples", "samples_per_client")
    samples_per_client: int = field(default=600, metadata={"min": 0})
    alpha: float = field(default=0.4, metadata=CONCENTRATION)
    beta: float = field(default=10.0, metadata=CONCENTRATION)

    def _deal(self, collection: Collection, rows: Integers, rng: Generator) -> Integers:
        if collection.coarse is None:
            said = "These labels have no coarse labels above them, which the pachinko partition needs"
            raise UserError(f"{said}; allowed: another partition by labels, such as dirichlet.")
        fine = labels_of(collection, rows)
        coarse = np.unique(collection.coarse.numpy()[rows], return_inverse=True)[1]
        pairs, groups = np.unique(np.stack([coarse, fine]), axis=1, return_inverse=True)
        groups = groups.reshape(-1)  # some releases of numpy keep the dimension that was not searched
        size = self.samples_per_client or len(rows) // self.num_clients
        return deal_counts(groups, self._counts(pairs[0], np.bincount(groups), size, rng))

    def _counts(self, parents: Integers, unused: Integers, size: int, rng: Generator) -> Integers:
        """Draw how many of the ``unused`` ``[F]`` samples of each fine label each client gets, ``[F, T]``."""
        unused = unused.copy()  # parents [F] are the coarse labels of the fine ones, ascending from 0
        counts = np.zeros((len(parents), self.num_clients), dtype=np.int64)
        for own in counts.T:
            coarse = log_gammas(rng, self.alpha, int(parents[-1]) + 1)
            fine = log_gammas(rng, self.beta, len(parents))
            while missing := size - int(own.sum()):
                # Up to the one that takes a label's last sample, all draws have one distribution: draw them at once.
                there = np.flatnonzero(unused)
                draws = there[rng.choice(len(there), missing, p=_joint(coarse, fine[there], parents[there]))]
                taken = np.bincount(draws[: _valid(draws, unused)], minlength=len(parents))
                own += taken
                unused -= taken
        return counts


def _joint(coarse: NDArray[np.float64], fine: NDArray[np.float64], parents: Integers) -> NDArray[np.float64]:
    """Return the probability of each fine label: logarithms ``[C]`` and ``[f]`` of those still there -> ``[f]``."""
    there, starts, members = np.unique(parents, return_index=True, return_counts=True)
    within = fine - np.repeat(np.logaddexp.reduceat(fine, starts), members)
    return np.exp(within) * np.repeat(normalized(coarse[there]), members)


def _valid(draws: Integers, unused: Integers) -> int:
    """Count the draws up to the first that takes the last unused sample of a label."""
    spent = np.flatnonzero((np.bincount(draws, minlength=len(unused)) >= unused) & (unused > 0))
    return min((int(np.flatnonzero(draws == label)[unused[label] - 1]) + 1 for label in spent), default=len(draws))


class Uniform(Dealing):
    """Samples dealt at random: all clients have one distribution, and their sizes differ by at most one."""

    def _deal(self, collection: Collection, rows: Integers, rng: Generator) -> Integers:
        return np.arange(len(rows)) % self.num_clients


@dataclass(frozen=True)
class Shards(Dealing):
    """Few labels per client (McMahan et al. 2017): samples sorted by label, cut into shards, and those dealt at random.

    The sizes of shards differ by at most one.

    Attributes:
        shards_per_client: about as many as a client then has labels, since few shards hold two.
    """

    least = ("min_samples", "shards_per_client")
    shards_per_client: int = field(default=2, metadata={"min": 1})

    def _deal(self, collection: Collection, rows: Integers, rng: Generator) -> Integers:
        count = self.num_clients * self.shards_per_client
        receivers = rng.permutation(count) % self.num_clients
        clients = np.empty_like(rows)
        by_label = np.argsort(labels_of(collection, rows), kind="stable")
        clients[by_label] = receivers[np.arange(len(rows)) * count // len(rows)]
        return clients


@dataclass(frozen=True)
class Natural(Partition):
    """Writers, roles or whatever the samples came with, in the order of their names.

    Those that are kept are chosen by their names: with the same seed, a smaller choice is part of a larger one.

    Attributes:
        share: how much of the clients is kept, each with all its samples.
        min_samples: clients with fewer are left out beforehand.
        max_clients: how many are kept at most; 0: all.
    """

    min_samples: int = field(default=2, metadata={"min": 1})
    max_clients: int = field(default=0, metadata={"min": 0})

    def _assign(self, collection: Collection, seed: int) -> Assignment:
        if collection.owners is None:
            said = "These samples have no clients of their own, which the natural partition needs"
            raise UserError(f"{said}; allowed: a partition that deals samples, such as dirichlet or uniform.")
        owners = collection.owners.numpy()
        sizes = np.bincount(owners, minlength=len(collection.owner_names)).tolist()
        names = collection.owner_names
        large = sorted(name for name, size in zip(names, sizes, strict=True) if size >= self.min_samples)
        if not large:
            allowed = f"at most {max(sizes, default=0)}, what the largest client has"
            raise UserError(f"partition.min_samples is {self.min_samples}; allowed: {allowed}.")
        count = max(1, round(self.share * len(large)))
        chosen = choose(client_keys(large), min(count, self.max_clients or count), CLIENTS, seed)
        positions = {large[place]: position for position, place in enumerate(chosen.tolist())}
        clients = np.array([positions.get(name, NOBODY) for name in names])[owners]
        return assignment_of([*positions], np.arange(len(owners)), clients)


PARTITIONS: dict[str, type[Partition]] = {
    "natural": Natural,
    "dirichlet": Dirichlet,
    "label_groups": LabelGroups,
    "pachinko": Pachinko,
    "shards": Shards,
    "uniform": Uniform,
}
