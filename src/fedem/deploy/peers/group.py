"""The workers of one meeting and what passes between them: descriptions for all, models for neighbours, sums."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fedem.core.errors import UserError
from fedem.core.tree import Tree
from fedem.deploy.peers.meeting import join_store, open_store

_LONGEST = 1 << 30  # bytes of what a process says of its clients


class PeersChangedError(Exception):
    """Somebody is gone or must go: those who are left must meet again."""


class ProcessGroup(AbstractContextManager["ProcessGroup"]):
    """Processes that work together until one of them is gone; every call then raises :class:`PeersChangedError`."""

    def __init__(self, timeout: float):
        # Who, how many and where: from the environment that the agent made for its worker.
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with _loss_noticed():
            # The first opens the store, perhaps while the others wait for it.
            store = (join_store if self.rank else open_store)(host, port, timeout)
            limit = timedelta(seconds=timeout)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # With somebody gone there is nothing left to leave in good order.
        if kind is None:
            dist.destroy_process_group()

    def gather(self, content: Any) -> list[bytes]:
        """Send something that JSON can hold to all processes; returns the text that each of them sent, by rank."""
        # Torch's own function for objects would unpickle what others send.
        message = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _loss_noticed():
            dist.all_gather(lengths, torch.tensor([len(message)]))
            longest = int(torch.cat(lengths).max())
            if not 0 <= min(map(int, lengths)) <= longest <= _LONGEST:
                raise UserError(f"A peer's message has {longest:,} bytes; allowed: up to {_LONGEST:,}.")
            padded = torch.cat([message, message.new_zeros(longest - len(message))])
            messages = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(messages, padded)
        return [bytes(text[: int(length)].numpy()) for text, length in zip(messages, lengths, strict=True)]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send a buffer to each rank of ``outgoing``, and fill those of ``incoming``, all at the same time."""
        operations = [dist.P2POp(dist.isend, buffer, rank) for rank, buffer in outgoing.items()]
        operations += [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in incoming.items()]
        with _loss_noticed():
            for request in dist.batch_isend_irecv(operations) if operations else ():
                request.wait()

    def total(self, values: Tensor) -> Tensor:
        """Add up everybody's ``values``, of any one shape."""
        added = values.clone()
        with _loss_noticed():
            dist.all_reduce(added)
        return added


def pack(tree: Tree) -> Tensor:
    """Lay the bytes of all leaves behind each other by name, whatever their types: ``[bytes]`` uint8."""
    return torch.cat([leaf.contiguous().flatten().view(torch.uint8) for _, leaf in sorted(tree.items())])


def unpack(buffer: Tensor, like: Tree) -> Tree:
    """Return the tree that :func:`pack` laid into ``buffer``; its leaves are ``like`` these."""
    leaves = sorted(like.items())
    pairs = zip(leaves, buffer.split([leaf.nbytes for _, leaf in leaves]), strict=True)
    # A copy begins where a number of its type may begin.
    return {name: piece.clone().view(leaf.dtype).reshape(leaf.shape) for (name, leaf), piece in pairs}


@contextmanager
def _loss_noticed() -> Iterator[None]:
    """Whatever gloo and its store raise means that somebody does not answer, or that another port is needed."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise PeersChangedError(str(error)) from error
