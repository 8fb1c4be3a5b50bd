"""Calls whose shapes come back, recorded and replayed: the same operations, the same bits, without the Python around.

A call through nested vmap and grad costs a millisecond of Python for a small model and most of a second for a deep one,
whatever the data.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from fedem.engines.device import copy_all, is_out_of_memory

_MOST_SHAPES = 256  # recorded at most: sampled cohorts may never come back


class Replay(ABC):
    """A pure function of trees of tensors, recorded for the shapes that it has been called with ``after`` times."""

    def __init__(self, function: Callable[..., Any], after: int):
        self._function, self._after = function, after
        self._calls: Counter[Any] = Counter()
        self._recordings: dict[Any, Callable[[tuple[Any, ...]], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = tuple(map(self._kind, tree_leaves(arguments)))
        if key not in self._recordings:
            self._calls[key] += 1
            if self._calls[key] <= self._after or len(self._recordings) >= _MOST_SHAPES:
                if len(self._calls) > 8 * _MOST_SHAPES:
                    self._calls.clear()
                return self._function(*arguments)
            self._recordings[key] = self._record(arguments)
        return self._recordings[key](arguments)

    def _kind(self, leaf: Tensor) -> tuple[Any, ...]:
        """Return what of an argument a recording depends on."""
        return leaf.shape, leaf.dtype

    @abstractmethod
    def _record(self, arguments: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
        """Return what computes the function of a tuple of arguments of these shapes."""


class Traced(Replay):
    """The tensor operations behind a call (``make_fx``), run directly.

    To record costs about what sixty calls save, so it waits for a shape's return.
    """

    def _kind(self, leaf: Tensor) -> tuple[Any, ...]:
        # Strides too: a recording may view what another layout would have to copy.
        return leaf.shape, leaf.dtype, leaf.stride(), leaf.device

    def _record(self, arguments: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        # make_fx counts parameters, and vmap hides them.
        return make_fx(lambda given: self._function(*given))(arguments)


class Captured(Replay):
    """A step of a state on a GPU, all of whose kernels are launched at once (a CUDA graph).

    What is launched reads and writes fixed places. So the state that a call returns, which is that of its first
    argument brought forward, is overwritten by the next call, whatever its shapes.
    """

    def __init__(self, function: Callable[..., Any], after: int):
        def in_order(*arguments: Any) -> Any:
            # Dictionaries are equal in any order, but what is recorded has one: that of the state.
            form = tree_structure(arguments[0])
            return tree_unflatten(form.flatten_up_to(function(*arguments)), form)

        # What is compiled, or chosen by trial, on a first call can't be captured.
        super().__init__(in_order, max(1, after))
        self._pool: Any = None  # memory of all recordings' temporaries, which are never in use at the same time
        self._places: dict[int, Tensor] = {}  # by an argument's position, as large as its largest

    def _record(self, arguments: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
        leaves, form = tree_flatten(arguments)
        places = [self._place(position, leaf) for position, leaf in enumerate(leaves)]
        own, graph = tree_unflatten(places, form), torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                _fill(tree_leaves(own[0]), tree_leaves(self._function(*own)))
        except RuntimeError as error:
            self._pool = None  # after a failure torch takes no further recording into it; those it has stay
            if is_out_of_memory(error):
                raise
            said = f"Steps can't be captured on the GPU, and each is launched anew, which is slower: {error}"
            warnings.warn(said, stacklevel=2)
            return lambda given: self._function(*given)

        def replay(given: tuple[Any, ...]) -> Any:
            _fill(places, tree_leaves(given))
            graph.replay()
            return own[0]

        return replay

    def _place(self, position: int, leaf: Tensor) -> Tensor:
        """Return where an argument lies for its shape: the first part of what its largest one took."""
        room = self._places.get(position)
        if room is None or room.dtype != leaf.dtype or len(room) < leaf.numel():
            # Zeros: a step may be run to be recorded, and labels are indices, which not any bits in memory are.
            room = self._places[position] = leaf.new_zeros(leaf.numel())
        return room[: leaf.numel()].view(leaf.shape)


def _fill(places: list[Tensor], leaves: list[Tensor]) -> None:
    """Copy leaves to their places, but those that are there."""
    taken = {place.untyped_storage().data_ptr() for place in places}
    moved: list[tuple[Tensor, Tensor]] = []
    for place, leaf in zip(places, leaves, strict=True):
        if place.data_ptr() != leaf.data_ptr() or place.stride() != leaf.stride():
            # One that lies in another's place, or otherwise in its own, is about to be overwritten.
            moved.append((place, leaf.clone() if leaf.untyped_storage().data_ptr() in taken else leaf))
    copy_all(moved)
