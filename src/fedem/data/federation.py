"""A federation: the clients' samples as flat arrays with offsets, nothing padded.

Shapes: T clients, N samples of all clients together, n of one client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedem.core.errors import UserError, check_known, counted
from fedem.core.random import HOLD_OUT, SPLIT, choose, client_keys, derive
from fedem.data.samples import Pool, Samples, check_finite, check_pair, describe, offsets_of, split_rows

PARTS = ("train", "validation", "test")
Pair = tuple[Any, Any]  # one client's inputs and targets
Pairs = Sequence[Pair]  # one per client
Names = Sequence[str] | None  # of the clients; None: "0", "1", ...


@dataclass(frozen=True, eq=False)
class Federation:
    """Named clients with training, validation and test samples, and clients held out of training.

    Build one with :meth:`from_clients`, :meth:`from_arrays`, :meth:`from_generator` or :meth:`from_parts`.
    """

    names: tuple[str, ...]
    train: Samples
    validation: Samples
    test: Samples
    unseen: Federation | None = None
    ids: Tensor | None = None
    """``[P]`` int64: a hash of each of the pool's samples, where they are rows of one pool"""
    origin: str = ""
    """how inputs were made of these samples, if they were"""

    def __repr__(self) -> str:
        held_out = f" and {counted(self.unseen.num_clients, 'unseen one')}" if self.unseen else ""
        sizes = f"{counted(len(self.train), 'training sample')} of shape {list(self.input_shape)}"
        return f"<Federation: {counted(self.num_clients, 'client')}{held_out}, {sizes}>"

    @classmethod
    def from_clients(
        cls,
        clients: Iterable[Pair],
        names: Names = None,
        *,
        validation: float = 0.2,
        test: float = 0.2,
        seed: int = 0,
        gap: int | None = None,
    ) -> Federation:
        """Build from one pair (inputs, targets) per client, splitting each client's samples at random.

        Args:
            clients: arrays or tensors, ``[n, ...]`` and ``[n]``.
            names: of the clients, all different; "0", "1", ... when not given.
            validation: share of each client's samples used for validation.
            test: share used for testing. At least one sample always stays for training.
            seed: decides the split, together with the client's name alone.
            gap: for samples that overlap or follow each other in time: they are not drawn but cut as they stand, first
                those for training, then validation, then test, with this many samples left out between two parts.
        """
        pairs = list(clients)
        labels = check_names(names, len(pairs))
        whole = _join(labels, pairs)
        keys, rows = client_keys(labels), torch.arange(len(whole))
        ranks = rows - whole.offsets[:-1].repeat_interleave(whole.sizes)
        cuts = split_rows(keys, rows, whole.offsets, ranks, validation, test, seed, gap)
        train, validating, testing = (Samples(whole.pool.read(rows), offsets) for rows, offsets in cuts)
        return cls(labels, train, validating, testing).check()

    @classmethod
    def from_arrays(cls, inputs: Any, targets: Any, clients: Any, **options: Any) -> Federation:
        """Build from flat arrays and one client name per row; rows of a client may stand anywhere.

        Clients are ordered by name; ``options`` are those of :meth:`from_clients`.
        """
        owners = np.asarray(clients).astype(str)
        x, y = check_pair("(all)", (inputs, targets), finite=False)
        if owners.shape != (len(y),):
            raise UserError(f"There must be one client name per row: got shape {owners.shape} for {len(y)} rows.")
        check_finite(owners, "inputs", x)
        check_finite(owners, "targets", y)
        names, codes = np.unique(owners, return_inverse=True)
        order = torch.from_numpy(np.argsort(codes, kind="stable"))
        ends = np.bincount(codes, minlength=len(names)).tolist()
        return cls.from_clients(zip(x[order].split(ends), y[order].split(ends), strict=True), names.tolist(), **options)

    @classmethod
    def from_generator(cls, clients: Iterable[tuple[str, Any, Any]], **options: Any) -> Federation:
        """Build from an iterable of (name, inputs, targets); ``options`` are those of :meth:`from_clients`."""
        triples = list(clients)
        for position, triple in enumerate(triples):
            if not isinstance(triple, tuple | list) or len(triple) != 3:
                raise UserError(f"Item {position} of the generator is not a triple (name, inputs, targets).")
        return cls.from_clients(((x, y) for _, x, y in triples), [name for name, _, _ in triples], **options)

    @classmethod
    def from_parts(
        cls, train: Pairs, validation: Pairs | None = None, test: Pairs | None = None, names: Names = None
    ) -> Federation:
        """Build from parts that are split already: one pair (inputs, targets) per client in each part given."""
        labels = check_names(names, len(train))
        for part, pairs in zip(PARTS, (train, validation, test), strict=True):
            if pairs is not None and len(pairs) != len(labels):
                found = f"The {part} part has {counted(len(pairs), 'client')}"
                raise UserError(f"{found}; allowed: {len(labels)}, as many as names.")
        first = _join(labels, train)
        empty = Samples(first.span(0, 0), torch.zeros_like(first.offsets))
        validating, testing = (empty if pairs is None else _join(labels, pairs) for pairs in (validation, test))
        return cls(labels, first, validating, testing).check()

    @classmethod
    def from_pool(
        cls, pool: Pool, names: Sequence[str], rows: Tensor, offsets: Tensor, ids: Tensor, **options: Any
    ) -> Federation:
        """Build from a pool of P samples and who owns which, as :func:`split_rows` has them; nothing is read or copied.

        The split and the order of a client's samples go by ``ids`` ``[P]`` int64, hashes of the samples' content;
        ``options`` are those of :meth:`from_clients` and, with a gap, ``order`` ``[P]``, each sample's time.
        """
        labels = check_names(names, len(offsets) - 1)
        cuts = split_rows(client_keys(labels), rows, offsets, ids, **options)
        training, validating, testing = (Samples(pool, starts, own) for own, starts in cuts)
        return cls(labels, training, validating, testing, ids=ids).check()

    def check(self) -> Federation:
        """Refuse what can't be trained on: a client without training samples, parts that do not fit."""
        if empty := [name for name, size in zip(self.names, self.train.sizes.tolist(), strict=True) if size == 0]:
            raise UserError(f"Client {empty[0]!r} has no training samples ({len(empty)} such); at least 1 is needed.")
        for part in PARTS[1:]:
            _check_kind(f"The {part}", self.part(part).pool, self.train.pool, " are", "in training")
        return self

    @property
    def num_clients(self) -> int:
        """T, without the clients held out."""
        return len(self.names)

    @cached_property
    def keys(self) -> Tensor:
        """Each client's word for random numbers, ``[T]`` int64: a hash of its name."""
        return client_keys(self.names)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and of all samples in their order, but for the clients held out."""
        digest = blake2b("\0".join((*self.names, self.origin)).encode(errors="surrogatepass"), digest_size=16)
        for part in PARTS:
            samples = self.part(part)
            content: tuple[Tensor, ...] = (samples.targets, samples.inputs)
            if self.ids is not None and samples.rows is not None:
                content = (self.ids[samples.rows],)
            for array in (samples.offsets, *content):
                digest.update(f"{array.dtype}{tuple(array.shape)}".encode())
                digest.update(array.cpu().contiguous().numpy().view(np.uint8).data if array.numel() else b"")
        return digest.hexdigest()

    def position(self, name: str) -> int:
        """Return where the client called ``name`` stands."""
        if name not in self.names:
            some = ", ".join(self.names[:5]) + (", ..." if self.num_clients > 5 else "")
            everybody = counted(self.num_clients, "client")
            raise UserError(f"Unknown client {name!r}; allowed: one of the {everybody} ({some}).")
        return self.names.index(name)

    def part(self, name: str) -> Samples:
        """Return the part called ``name``: train, validation or test."""
        check_known("part", [name], PARTS)
        return getattr(self, name)

    def take(self, clients: Tensor) -> Federation:
        """Return the federation of ``clients`` (positions) in that order."""
        names = tuple(self.names[position] for position in clients.tolist())
        train, validation, test = (self.part(part).take(clients) for part in PARTS)
        return Federation(names, train, validation, test, ids=self.ids, origin=self.origin)

    def to(self, device: torch.device) -> Federation:
        """Move all samples to ``device``."""
        train, validation, test = (self.part(part).to(device) for part in PARTS)
        unseen = None if self.unseen is None else self.unseen.to(device)
        moved = replace(self, train=train, validation=validation, test=test, unseen=unseen)
        # They are the same samples, though no longer rows of the pool that the hash goes by.
        moved.__dict__["fingerprint"] = self.fingerprint
        return moved

    @property
    def input_range(self) -> tuple[int, int]:
        """The least and the largest of all input numbers, those of the whole pool; each pool is read once."""
        groups = [self] + ([self.unseen] if self.unseen else [])
        arrays = [group.part(part).pool.inputs for group in groups for part in PARTS]
        ranges = [array.aminmax() for array in {id(array): array for array in arrays if array.numel()}.values()]
        return min(int(found.min) for found in ranges), max(int(found.max) for found in ranges)

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        return sum(self.part(part).num_bytes for part in PARTS) + (self.unseen.num_bytes if self.unseen else 0)

    def hold_out(self, share: float, seed: int = 0) -> Federation:
        """Hold ``share`` of the clients out of training: they become ``unseen``."""
        if self.unseen is not None:
            already = counted(self.unseen.num_clients, "client is", "clients are")
            raise UserError(f"{already} held out already; hold out from the whole federation.")
        if not 0 <= share < 1:
            raise UserError(f"The share of unseen clients is {share}; allowed: from 0 up to, but not including, 1.")
        if (count := round(share * self.num_clients)) == 0:
            return replace(self, unseen=None)
        if count == self.num_clients:
            raise UserError(f"Holding out {share} of {counted(self.num_clients, 'client')} leaves none to train on.")
        held = choose(self.keys, count, HOLD_OUT, seed)
        stays = torch.ones(self.num_clients, dtype=torch.bool)
        stays[held] = False
        return replace(self.take(stays.nonzero().flatten()), unseen=self.take(held))

    def without_test(self) -> Federation:
        """Return the clients without their test part, so that nothing can be chosen by it."""
        nothing = Samples(self.train.span(0, 0), torch.zeros_like(self.test.offsets))
        unseen = None if self.unseen is None else self.unseen.without_test()
        return replace(self, test=nothing, unseen=unseen)

    def redealt(self, seed: int) -> Federation:
        """Deal each client's training and validation samples anew, as many to each part; the test part stays."""
        parts = self.train, self.validation
        pool = Pool(*(torch.cat(arrays) for arrays in zip(*(part.span(0, len(part)) for part in parts), strict=True)))
        owners = torch.cat([torch.repeat_interleave(torch.arange(self.num_clients), part.sizes) for part in parts])
        tickets = derive(derive(SPLIT, seed), self.keys[owners], torch.arange(len(owners)))
        order = tickets.argsort(stable=True)
        order = order[owners[order].argsort(stable=True)]  # client by client, each one's samples shuffled
        places = torch.arange(len(order)) - offsets_of(self.train.sizes + self.validation.sizes)[owners[order]]
        trained = places < self.train.sizes[owners[order]]
        train, validation = (
            Samples(pool, part.offsets, order[which].to(pool.device))
            for part, which in zip(parts, (trained, ~trained), strict=True)
        )
        return replace(self, train=train, validation=validation, ids=None)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.pool.inputs.shape[1:])


def _join(names: Sequence[str], given: Pairs) -> Samples:
    """Check the clients' pairs and lay them end to end; arrays must be of the same kind as the first client's."""
    pairs = [Pool(*check_pair(name, pair)) for name, pair in zip(names, given, strict=True)]
    first = next((pair for pair in pairs if len(pair.targets)), pairs[0])
    for name, pair in zip(names, pairs, strict=True):
        _check_kind(f"Client {name!r} has", pair, first, "", "the first has")
    sizes = torch.tensor([len(pair.targets) for pair in pairs])
    return Samples(Pool(*(torch.cat(arrays) for arrays in zip(*pairs, strict=True))), offsets_of(sizes))


def _check_kind(whose: str, pool: Pool, reference: Pool, verb: str, like: str) -> None:
    for what, mine, other in zip(("inputs", "targets"), pool, reference, strict=True):
        if (mine.shape[1:], mine.dtype) != (other.shape[1:], other.dtype):
            raise UserError(f"{whose} {what}{verb} {describe(mine)}; allowed: {describe(other)}, as {like}.")


def check_names(names: Names, count: int, what: str = "clients") -> tuple[str, ...]:
    """Return the names of clients, "0", "1", ... where none are given; ``what`` there is one of for each client."""
    if count == 0:
        raise UserError("A federation needs at least one client; got none.")
    labels = tuple(map(str, range(count))) if names is None else tuple(map(str, names))
    if len(labels) != count:
        raise UserError(f"Got {len(labels)} names for {count} {what}; allowed: one name each.")
    if len(set(labels)) != count:
        twice = next(name for name, times in Counter(labels).items() if times > 1)
        raise UserError(f"The client name {twice!r} stands more than once; names must differ.")
    return labels
