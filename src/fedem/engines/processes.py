"""Several processes at work on one run: each does its share of the clients, and all learn the outcome.

A process that ends before the others closes its connections, so that they end too, and the first to fail says why.

Shapes: C clients, c of them.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from fedem.core.errors import UserError, counted
from fedem.core.tree import Tree
from fedem.engines.base import Cohort, Engine, Finished, Tally, Work
from fedem.methods.base import Algorithm

_PATIENCE = timedelta(hours=1)  # for each other: the leader may prepare a data set while the others wait
_GRACE = 1.0  # seconds for the first that fails to say why, before another ends and torchrun ends all

_meetings = count()
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Team:
    """The processes of a run, as one of them sees them. Alone, it exchanges nothing."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch's process group

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints, and writes the run's folder."""
        return self.rank == 0

    def check(self, cohort_size: int, device: torch.device) -> None:
        """Refuse processes without a client to train, or without a GPU of their own."""
        if cohort_size < self.size:
            clients = f"A round has {counted(cohort_size, 'client')} (run.clients_per_round) for {self.size} processes"
            raise UserError(f"{clients}; allowed: at most as many processes as clients.")
        if self.size == 1 or device.type != "cuda":
            return
        if device.index is not None:
            place = f"run.device is '{device}' for {self.size} processes"
            raise UserError(f"{place}; allowed: auto or cuda, a GPU for each process, or cpu.")
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > gpus:
            started = f"{here} processes were started on a machine with {gpus} GPUs"
            raise UserError(f"{started}; allowed: at most one for each GPU, or run.device cpu.")

    def share(self, sizes: Tensor) -> Tensor:
        """Return which clients are this process's, ``[c]`` ascending, given all clients' numbers of samples ``[C]``."""
        # By size they are dealt out to and fro, so all have as many clients, give or take one, and nearly as many
        # samples: no more apart than one client's.
        order = sizes.argsort(descending=True, stable=True)
        lap, seat = torch.arange(len(sizes)) // self.size, torch.arange(len(sizes)) % self.size
        owner = torch.where(lap % 2 == 0, seat, self.size - 1 - seat)
        return order[owner == self.rank].sort().values

    def total(self, *trees: Tree) -> tuple[Tree, ...]:
        """Add up the processes' trees, of the same names and shapes; of integer leaves the largest, as in a mean."""
        if self.size == 1:
            return trees
        from torch.distributed import ReduceOp, all_reduce

        totals: tuple[Tree, ...] = tuple({} for _ in trees)
        kinds: dict[torch.dtype, list[tuple[int, str]]] = {}
        for index, tree in enumerate(trees):
            for name in sorted(tree):
                kind = tree[name].dtype if tree[name].is_floating_point() else torch.int64
                kinds.setdefault(kind, []).append((index, name))
        for kind in sorted(kinds, key=str):  # one message for each kind of number, so one for most methods
            leaves = [trees[index][name] for index, name in kinds[kind]]
            numbers = torch.cat([leaf.to(kind).flatten() for leaf in leaves])
            with _in_touch():
                all_reduce(numbers, op=ReduceOp.SUM if kind.is_floating_point else ReduceOp.MAX, group=self.group)
            parts = numbers.split([leaf.numel() for leaf in leaves])
            for (index, name), leaf, part in zip(kinds[kind], leaves, parts, strict=True):
                totals[index][name] = part.reshape(leaf.shape).to(leaf.dtype)
        return totals

    def tell(self, value: _Value | None) -> _Value:
        """Return the leader's ``value`` to all; the others' are not looked at."""
        told: list[Any] = [value]
        if self.size > 1:
            from torch.distributed import broadcast_object_list

            with _in_touch():
                broadcast_object_list(told, src=0, group=self.group, device=torch.device("cpu"))
        return told[0]

    def agree(self, what: str, value: str) -> None:
        """Refuse to go on, all processes at once, where they have different values."""
        differs = torch.tensor(self.tell(value) != value)
        if bool(self.total({"differs": differs})[0]["differs"]):
            raise UserError(f"The processes differ in {what}; allowed: the same in all of them.")

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """Let the leader do something before the others do it too, such as files that it leaves for them."""
        if not self.leads:
            self.tell(None)
        yield
        if self.leads:
            self.tell(None)


ALONE = Team()


def placed(pieces: Iterable[tuple[Tensor, Tree]], size: int) -> Tree:
    """Put trees ``[c, ...]`` at their positions ``[c]`` among ``size``, for :meth:`Team.total` to put all together."""
    found: Tree = {}
    for positions, tree in pieces:
        for name, leaf in tree.items():
            if name not in found:
                # Elsewhere is what counts for nothing there: zero in a sum, where a log weight's minus infinity stays.
                is_added = leaf.is_floating_point() or leaf.dtype == torch.bool
                nothing = 0 if is_added else torch.iinfo(leaf.dtype).min
                found[name] = leaf.new_full((size, *leaf.shape[1:]), nothing)
            found[name].index_copy_(0, positions.to(leaf.device), leaf)
    return found


def number_started() -> int:
    """Return how many processes torchrun started, this one among them; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def joined() -> Iterator[Team]:
    """Join the processes that were started together, by torchrun or by a caller that made a process group.

    Where none was, this process is a team of one. Of processes that torchrun started only the first that fails raises
    what went wrong; the others exit.
    """
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # A group of our own carries all kinds of tensors, and closing it is heard by the others at once.
        group = dist.new_group(backend=backend, timeout=_PATIENCE)
        try:
            yield Team(dist.get_rank(), dist.get_world_size(), group)
        finally:
            dist.destroy_process_group(group)
    elif (size := number_started()) > 1:
        from torch.distributed.distributed_c10d import PrefixStore  # which not all builds of torch have

        rank = int(os.environ["RANK"])
        name = f"fedem/{next(_meetings)}"
        store = PrefixStore(name, _meeting_place())
        if torch.cuda.is_available():
            # Then "cuda" means another GPU in each process; more of them than GPUs are refused once a GPU is asked for.
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
        try:
            yield Team(rank, size, dist.group.WORLD)
        except BaseException as error:
            try:
                is_first = store.add("failures", 1) == 1
            except RuntimeError:  # whoever kept the store has ended
                is_first = False
            if not is_first:
                time.sleep(_GRACE)
                raise SystemExit(1) from error
            raise
        finally:
            dist.destroy_process_group()
    else:
        yield ALONE


@cache
def _meeting_place() -> Any:
    """Find the place where processes leave word for each other; it stays for all their runs."""
    from torch.distributed.rendezvous import rendezvous

    try:
        return next(rendezvous("env://", timeout=_PATIENCE))[0]
    except ValueError as error:
        problem = f"RANK and WORLD_SIZE are set, but the processes can't meet ({error})"
        raise UserError(f"{problem}; allowed: processes started by torchrun, or neither of the two set.") from None


@contextmanager
def _in_touch() -> Iterator[None]:
    """Say what it means when a message can't be exchanged."""
    try:
        yield
    except RuntimeError as error:
        raise UserError("Another process of this run ended or can't be reached, so the run can't go on.") from error


@final
@dataclass(frozen=True)
class Shared(Engine):
    """Another engine in each process, which runs its share of the clients; all get everybody's results."""

    base: Engine
    team: Team

    @property
    def most_together(self) -> int:
        return self.base.most_together

    def train(self, algorithm: Algorithm, cohort: Cohort, work: Work) -> Iterator[Finished]:
        sizes = cohort.samples.sizes
        if len(sizes) < self.team.size:  # then all run them all, and nothing is exchanged
            yield from self.base.train(algorithm, cohort, work)
            return
        members = self.team.share(sizes)
        chunks = list(self.base.train(algorithm, cohort.take(members), work.take(members)))
        uploads, personal = (
            placed([(members[chunk.positions], getattr(chunk, name)) for chunk in chunks], len(sizes))
            for name in ("uploads", "personal")
        )
        yield Finished(torch.arange(len(sizes)), *self.team.total(uploads, personal))

    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        sizes = cohort.samples.sizes
        # In every process somebody must have samples.
        if int((sizes > 0).sum()) < self.team.size:
            return self.base.tally(algorithm, function, cohort)
        members = self.team.share(sizes)
        sums = self.base.tally(algorithm, function, cohort.take(members))
        return self.team.total(placed([(members, sums)], len(sizes)))[0]

    def fit(self, algorithm: Algorithm, cohort: Cohort, max_iterations: int | None = None) -> Tree | None:
        sizes = cohort.samples.sizes
        if len(sizes) < self.team.size:
            return self.base.fit(algorithm, cohort, max_iterations)
        members = self.team.share(sizes)
        fitted = self.base.fit(algorithm, cohort.take(members), max_iterations)
        return None if fitted is None else self.team.total(placed([(members, fitted)], len(sizes)))[0]
