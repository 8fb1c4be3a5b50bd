"""Clients that mean harm: what the hostile ones of a federation send, claim and train on, for the simulator.

An attack is a declared setting (``[attack]``). Who is hostile is drawn by hashing the seed and the clients' names. What
an attack does not change, hostile clients do as all others do.

Shapes: T clients, C of them in a round, c hostile ones among those that finish together, h honest ones; P numbers of u
that are trained and sent, laid behind each other; n samples of one client, K classes.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor
from torch.func import vmap

from fedem.core.errors import UserError, counted
from fedem.core.random import ATTACK, choose, derive, uniform
from fedem.core.settings import Settings
from fedem.core.tree import Tree, tree_flat, tree_index, tree_map
from fedem.data.federation import Federation
from fedem.data.samples import Pool, Samples, offsets_of
from fedem.engines.processes import Team, placed
from fedem.methods.base import find_method, names_where
from fedem.methods.mixer import Served, Uploads
from fedem.methods.wrappers.compression import Codec
from fedem.models.losses import CLASSES, Loss

_MEMBERS, _NOISE, _SAMPLES = range(3)  # what is drawn


@dataclass(frozen=True)
class Attack(Settings, ABC):
    """What hostile clients do. A subclass overrides what it is about; the rest goes on as with honest clients.

    Attributes:
        share: how many clients are hostile: below 1 a share of them, rounded, and at least one unless it is 0; from 1
            their number.
    """

    on_uploads: ClassVar[bool] = False  # whether ``falsified`` is overridden; set by itself
    on_samples: ClassVar[bool] = False  # whether ``corrupted`` is overridden; set by itself
    knows_others: ClassVar[bool] = False  # whether what it sends goes by what the honest clients of the round send

    share: float = field(default=0.2, metadata={"min": 0})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.on_uploads = cls.falsified is not Attack.falsified
        cls.on_samples = cls.corrupted is not Attack.corrupted

    @final
    def number(self, num_clients: int) -> int:
        """Return how many clients are hostile; there must be an honest one besides.

        >>> [SignFlip(share=share).number(30) for share in (0, 0.01, 0.1, 3)]
        [0, 1, 3, 3]
        """
        if self.share < 1:
            return max(1, round(self.share * num_clients)) if self.share else 0
        if self.share != int(self.share) or self.share >= num_clients:
            allowed = f"a share from 0 and below 1, or a whole number of clients from 1 to {num_clients - 1}"
            raise UserError(f"attack.share is {self.share:g}; allowed: {allowed}.")
        return int(self.share)

    def falsified(self, changes: Tensor, keys: Tensor, honest: Tensor) -> Tensor:
        """Return the changes of u that are sent, ``[c, P]``, in place of those that training made.

        ``keys`` ``[c]`` are for what is random, and ``honest`` ``[h, P]`` are the others' changes where it knows them.
        """
        return changes

    def claimed(self, sizes: Tensor) -> Tensor:
        """Return the numbers of training samples that clients of these ``sizes`` ``[c]`` say they have."""
        return sizes

    def corrupted(self, samples: Pool, key: Tensor, num_classes: int) -> Pool:
        """Return a hostile client's training samples as it trains on them; ``key`` is for what is random."""
        return samples

    def aimed(self, samples: Pool) -> Pool | None:
        """Return samples as the attack wants them judged, with the labels it wants; None if it wants none for them."""
        return None

    def check(self, federation: Federation, num_classes: int) -> None:
        """Refuse settings that do not fit the samples."""


@final
@dataclass(frozen=True)
class SignFlip(Attack):
    """Sends the opposite of what it learnt: ``u - scale d``, d being the change of u that its training made.

    Attributes:
        scale: how many times as long as its own change.
    """

    scale: float = field(default=1.0, metadata={"above": 0})

    def falsified(self, changes: Tensor, keys: Tensor, honest: Tensor) -> Tensor:
        return -self.scale * changes


@final
@dataclass(frozen=True)
class Scaling(Attack):
    """Sends what it learnt many times over, so that it outweighs the others in a mean: ``u + factor d``.

    Attributes:
        factor: how many times; 10 is a loud client, 1000 drowns all others.
    """

    factor: float = field(default=10.0, metadata={"above": 0})

    def falsified(self, changes: Tensor, keys: Tensor, honest: Tensor) -> Tensor:
        return self.factor * changes


@final
@dataclass(frozen=True)
class Noise(Attack):
    """Sends random numbers: ``u + e``, e Gaussian with ``E|e|^2 = (multiple |d|)^2``, other in every round.

    Attributes:
        multiple: how many times as long as its own change d.
    """

    multiple: float = field(default=10.0, metadata={"above": 0})

    def falsified(self, changes: Tensor, keys: Tensor, honest: Tensor) -> Tensor:
        drawn = torch.special.ndtri(uniform(keys.to(changes.device), changes.shape[1])).to(changes.dtype)
        return drawn * (self.multiple / math.sqrt(changes.shape[1]) * changes.norm(dim=1, keepdim=True))


@final
@dataclass(frozen=True)
class Huge(Attack):
    """Sends a huge number in every place; what is computed with it overflows.

    Attributes:
        value: that number.
    """

    # What a float32 can hold; infinities and NaN are refused by any server that looks.
    value: float = field(default=1e30, metadata={"min": -3e38, "max": 3e38})

    def falsified(self, changes: Tensor, keys: Tensor, honest: Tensor) -> Tensor:
        return torch.full_like(changes, self.value)


@final
@dataclass(frozen=True)
class Collusion(Attack):
    """All hostile clients send the same, against the honest ones: ``u - scale mean(d)`` over those of the round.

    Attributes:
        scale: how many times as long as the honest clients' mean change.
    """

    knows_others: ClassVar[bool] = True

    scale: float = field(default=1.0, metadata={"above": 0})

    def falsified(self, changes: Tensor, keys: Tensor, honest: Tensor) -> Tensor:
        return (-self.scale * honest.mean(0)).expand_as(changes)


@final
@dataclass(frozen=True)
class Little(Attack):
    """All hostile clients send the same, hidden in the honest ones' spread: ``u + mean(d) - z std(d)``, by number.

    Baruch, Baruch, Goldberg: A Little Is Enough: Circumventing Defenses for Distributed Learning, NeurIPS 2019.

    Attributes:
        z: standard deviations, over the honest clients of the round, from their mean.
    """

    knows_others: ClassVar[bool] = True

    z: float = field(default=1.5, metadata={"above": 0})

    def falsified(self, changes: Tensor, keys: Tensor, honest: Tensor) -> Tensor:
        return (honest.mean(0) - self.z * honest.std(0, correction=0)).expand_as(changes)


@final
@dataclass(frozen=True)
class LieSize(Attack):
    """Trains and sends as everybody does, but says that it has very many samples, by which a server weighs it.

    Attributes:
        claim: the number of training samples that it says it has.
    """

    claim: int = field(default=1_000_000, metadata={"min": 1, "max": 2**40})

    def claimed(self, sizes: Tensor) -> Tensor:
        return torch.full_like(sizes, self.claim)


@final
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Trains on wrong labels: ``y -> K - 1 - y``, or ``y -> (y + shift) mod K``.

    Attributes:
        shift: how many classes further each label goes; 0 takes them in the opposite order instead.
    """

    shift: int = field(default=0, metadata={"min": 0})

    def corrupted(self, samples: Pool, key: Tensor, num_classes: int) -> Pool:
        labels = samples.targets
        flipped = (labels + self.shift) % num_classes if self.shift else num_classes - 1 - labels
        return samples._replace(targets=flipped)

    def check(self, federation: Federation, num_classes: int) -> None:
        if self.shift and self.shift % num_classes == 0:
            allowed = f"0, or what {num_classes} does not divide"
            raise UserError(
                f"attack.shift is {self.shift}, which leaves all {num_classes} labels as they are; allowed: {allowed}."
            )


@final
@dataclass(frozen=True)
class Backdoor(Attack):
    """Trains on some samples with a mark in the input and the label it wants, so that models give it to such inputs.

    The mark is in the last rows and columns of an image, in all its channels, or in the last numbers of a row.

    Attributes:
        target: the label that it wants.
        poisoned: share of its training samples that get the mark and the label.
        size: of the mark: the side of a square in an image, or so many numbers of a row.
        value: what the numbers under the mark become; of images in bytes, a share of 255.
    """

    target: int = field(default=0, metadata={"min": 0})
    poisoned: float = field(default=0.5, metadata={"above": 0, "max": 1})
    size: int = field(default=3, metadata={"min": 1})
    value: float = 1.0

    def stamped(self, inputs: Tensor) -> Tensor:
        """Return inputs ``[n, ...]`` with the mark."""
        marked, last = inputs.clone(), slice(-self.size, None)
        value = round(255 * self.value) if inputs.dtype == torch.uint8 else self.value
        (marked[..., last] if inputs.ndim == 2 else marked[..., last, last]).fill_(value)
        return marked

    def corrupted(self, samples: Pool, key: Tensor, num_classes: int) -> Pool:
        count = len(samples.targets)
        chosen = choose(derive(key, torch.arange(count)), round(self.poisoned * count), ATTACK).to(samples.device)
        inputs = samples.inputs.index_copy(0, chosen, self.stamped(samples.inputs[chosen]))
        return Pool(inputs, samples.targets.index_fill(0, chosen, self.target))

    def aimed(self, samples: Pool) -> Pool | None:
        others = samples.read((samples.targets != self.target).nonzero().flatten())
        return Pool(self.stamped(others.inputs), torch.full_like(others.targets, self.target))

    def check(self, federation: Federation, num_classes: int) -> None:
        if self.target >= num_classes:
            raise UserError(f"attack.target is {self.target}; allowed: a class, from 0 to {num_classes - 1}.")
        sides, dtype = federation.input_shape[-2:], federation.train.pool.inputs.dtype
        if self.size > min(sides):
            shape = list(federation.input_shape)
            raise UserError(f"attack.size is {self.size}, but an input has shape {shape}; allowed: 1 to {min(sides)}.")
        if dtype.is_floating_point:
            return
        lowest, highest = (0, 1) if dtype == torch.uint8 else federation.input_range
        whole = dtype == torch.uint8 or self.value == int(self.value)
        if not (lowest <= self.value <= highest and whole):
            kind = "a share of 255" if dtype == torch.uint8 else "a whole number"
            allowed = f"{kind} from {lowest} to {highest}, as inputs are {str(dtype).removeprefix('torch.')}"
            raise UserError(f"attack.value is {self.value:g}; allowed: {allowed}.")


ATTACKS: dict[str, type[Attack]] = {
    "sign_flip": SignFlip,
    "scaling": Scaling,
    "noise": Noise,
    "huge": Huge,
    "collusion": Collusion,
    "little": Little,
    "lie_size": LieSize,
    "label_flip": LabelFlip,
    "backdoor": Backdoor,
}


def check_attack(attack: Attack, name: str, method: str, loss: Loss, outputs: int, federation: Federation) -> None:
    """Refuse an attack, called ``name``, that the method's clients can't make, or that does not fit the data."""
    attack.number(federation.num_clients)
    on = f"attack.name is {name!r}"
    if attack.on_uploads and not find_method(method).algorithm.uploads_model:
        names = names_where(lambda row: row.algorithm.uploads_model)
        problem = f"which falsifies models, but clients of method {method} upload more or less than a model"
        raise UserError(f"{on}, {problem}; allowed with it: {names}.")
    if attack.on_samples and loss.task != CLASSES:
        kinds = ", ".join(each for each, kind in ATTACKS.items() if not kind.on_samples)
        reason = f"but targets of {type(loss).__name__} are no labels"
        raise UserError(f"{on}, {reason}; allowed: loss cross_entropy or logistic, or attack.name {kinds}.")
    attack.check(federation, max(2, outputs))


class Post(NamedTuple):
    """What is known of a round's uploads between the clients and the server."""

    round_index: int
    clients: Tensor  # [C] who takes part, positions in the federation
    downloads: Served  # what each of them has received
    leaves: frozenset[str]  # of u that are trained and sent
    codec: Codec | None  # wrote the messages, where they are compressed
    team: Team  # the processes that have some of the uploads each

    def changes(self, positions: Tensor, messages: Tree) -> Tree:
        """Read what messages ``[c, ...]`` of clients at ``positions`` ``[c]`` say of the change of u, leaf by leaf."""
        if self.codec is not None:
            said = vmap(self.codec.decode)(messages)
            return {name: leaf for name, leaf in said.items() if name in self.leaves}
        return {name: messages[name] - leaf for name, leaf in self._received(positions, messages).items()}

    def saying(self, positions: Tensor, messages: Tree, changes: Tree) -> Tree:
        """Return the messages that say these changes in place of theirs."""
        if self.codec is not None:
            return vmap(self.codec.rewrite)(messages, changes)
        received = self._received(positions, messages)
        return messages | {name: leaf + changes[name] for name, leaf in received.items()}

    def _received(self, positions: Tensor, messages: Tree) -> Tree:
        shared, reads = self.downloads
        rows = reads[positions.to(reads.device)]
        return {name: shared[name][rows.to(shared[name].device)] for name in sorted(self.leaves) if name in messages}


@dataclass(frozen=True, eq=False)
class Attackers:
    """The hostile clients of a federation whose clients' names have these keys, and what they do."""

    attack: Attack
    keys: Tensor  # [T]
    are: Tensor  # [T] bool
    seed: int

    @classmethod
    def among(cls, keys: Tensor, attack: Attack, seed: int) -> Attackers:
        """Choose who is hostile, whatever the order of the clients."""
        are = torch.zeros(len(keys), dtype=torch.bool)
        are[choose(keys, attack.number(len(keys)), ATTACK, seed, _MEMBERS)] = True
        return cls(attack, keys, are, seed)

    @property
    def honest(self) -> Tensor:
        """Who counts, ``[T]`` bool."""
        return ~self.are

    @property
    def number(self) -> int:
        return int(self.are.sum())

    def __str__(self) -> str:
        name = next(name for name, kind in ATTACKS.items() if kind is type(self.attack))
        return f"{counted(self.number, 'client is', 'clients are')} hostile (attack.name {name})"

    def claimed(self, sizes: Tensor) -> Tensor:
        """Return the numbers of training samples that the server is told, ``[T]``."""
        return torch.where(self.are, self.attack.claimed(sizes), sizes)

    def poisoned(self, train: Samples, num_classes: int) -> Samples:
        """Return everybody's training samples, those of hostile clients as the attack has them."""
        if not (self.attack.on_samples and self.number):
            return train
        words = derive(self.keys, ATTACK, self.seed, _SAMPLES)
        inputs, targets = (array.clone() for array in train.span(0, len(train)))
        for position in self.are.nonzero().flatten().tolist():
            start, end = train.offsets[position : position + 2].tolist()
            own = self.attack.corrupted(train.client(position), words[position], num_classes)
            inputs[start:end], targets[start:end] = own
        return Samples(Pool(inputs, targets), train.offsets)

    def aimed(self, test: Samples) -> Samples | None:
        """Return honest clients' samples as the attack wants them judged; None if it wants nothing of them."""
        nothing = test.span(0, 0)
        if self.attack.aimed(nothing) is None:
            return None
        own = (test.client(t) if self.honest[t] else nothing for t in range(test.num_clients))
        pools = [pool for pool in map(self.attack.aimed, own) if pool is not None]
        joined = Pool(*(torch.cat(arrays) for arrays in zip(*pools, strict=True)))
        return Samples(joined, offsets_of(torch.tensor([len(pool.targets) for pool in pools])))

    def falsify(self, uploads: Uploads, post: Post) -> Uploads:
        """Put what hostile clients send in the place of what they trained, as uploads come in; the others' stay.

        Where an attack goes by what the honest clients of the round send, it waits for all uploads.
        """
        hostile = self.are[post.clients]  # [C]
        if not (self.attack.on_uploads and bool(hostile.any())):
            return uploads
        if not self.attack.knows_others:
            return self._falsified(uploads, post, hostile, torch.empty(0))
        pieces = list(uploads)
        said = [(where, {"changes": tree_flat(post.changes(where, each), batch_dims=1)}) for where, each in pieces]
        (everybody,) = post.team.total(placed(said, len(hostile)))
        # Where nobody honest takes part, they go by what they have trained themselves.
        known = ~hostile if bool((~hostile).any()) else hostile
        changes = everybody["changes"]
        return self._falsified(pieces, post, hostile, changes[known.to(changes.device)])

    def _falsified(
        self, uploads: Uploads, post: Post, hostile: Tensor, honest: Tensor
    ) -> Iterator[tuple[Tensor, Tree]]:
        words = derive(self.keys[post.clients], ATTACK, self.seed, _NOISE, post.round_index)
        for positions, messages in uploads:
            rows = hostile[positions].nonzero().flatten()
            if len(rows):
                device, who = next(iter(messages.values())).device, positions[rows]
                own = tree_index(messages, rows.to(device))
                changes = post.changes(who, own)
                sent = self.attack.falsified(tree_flat(changes, batch_dims=1), words[who], honest)
                said = post.saying(who, own, _unflat(sent, changes))
                messages = _put(messages, rows.to(device), said)
            yield positions, messages


def _put(messages: Tree, rows: Tensor, said: Tree) -> Tree:
    """Replace ``rows`` of the messages."""
    return tree_map(lambda leaf, new: leaf.index_copy(0, rows, new.to(leaf.dtype)), messages, said)


def _unflat(numbers: Tensor, like: Tree) -> Tree:
    """Cut ``[c, P]`` into leaves as ``like`` has them; undoes :func:`~fedem.core.tree.tree_flat`."""
    names = sorted(like)
    parts = numbers.split([like[name][0].numel() for name in names], dim=1)
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}
