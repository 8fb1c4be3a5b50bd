"""Stacked functions that are recorded once and replayed: same operations, same bits, without vmap's overhead.

A call through nested vmap and grad costs about a millisecond of Python, whatever the data. Where the same shapes come
back round after round, the tensor operations behind a call are recorded (``make_fx``) and from then on run directly.
The functions are pure, so a recording is the function, for these shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_MOST_SHAPES = 256
"""shapes remembered at most: sampled cohorts may never come back"""


class Replay:
    """A pure function of trees of tensors, recorded for the shapes that it has been called with ``after`` times.

    Recording costs about as much as sixty calls save, so it waits until a shape has proved to come back.
    """

    def __init__(self, function: Callable[..., Any], after: int):
        self._function, self._after = function, after
        self._calls: Counter[Any] = Counter()
        self._recordings: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or its recording."""
        key = tuple(_kind(leaf) for leaf in tree_leaves(arguments))
        if key in self._recordings:
            return self._recordings[key](*arguments)
        self._calls[key] += 1
        if self._calls[key] <= self._after or len(self._recordings) >= _MOST_SHAPES:
            if len(self._calls) > 8 * _MOST_SHAPES:
                self._calls.clear()
            return self._function(*arguments)
        self._recordings[key] = self._record(arguments)
        return self._recordings[key](*arguments)

    def _record(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        function = self._function
        # make_fx counts parameters, and vmap hides them.
        wrapped: dict[int, Callable[..., Any]] = {
            3: lambda a, b, c: function(a, b, c),
            4: lambda a, b, c, d: function(a, b, c, d),
        }
        recording: Callable[..., Any] = make_fx(wrapped[len(arguments)])(*arguments)
        return recording


def _kind(leaf: Tensor) -> tuple[Any, ...]:
    # Strides too: a recording may view what another layout would have to copy.
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
