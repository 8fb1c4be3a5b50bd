"""A time by which training must have stopped, at a checkpoint, such as the end of a machine's lease."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedem.core.errors import UserError

_END: ContextVar[float] = ContextVar("end", default=math.inf)


class StoppedError(Exception):
    """Training stopped in time, at a checkpoint from which it can be gone on with to the same result."""


@contextmanager
def stopping_after(seconds: float | None) -> Iterator[None]:
    """Stop all training within, at a checkpoint, before so many seconds have passed; None: never."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError(f"stop_after is {seconds:g}; allowed: seconds above 0.")
    token = _END.set(math.inf if seconds is None else time.perf_counter() + seconds)
    try:
        yield
    finally:
        _END.reset(token)


class Watch:
    """Says after each round whether it is time for a checkpoint, or to stop.

    Attributes:
        seconds: between checkpoints.
    """

    # A checkpoint waits until training has taken so many times as long as the one before took to write.
    _LEAST = 50

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, _END.get()
        self._saved = self._round = time.perf_counter()
        self._longest, self._cost = 0.0, 0.0

    @property
    def can_stop(self) -> bool:
        """Whether there is an end at all."""
        return self._end < math.inf

    def after_round(self) -> None:
        """Note that a round has just ended."""
        now = time.perf_counter()
        self._longest, self._round = max(self._longest, now - self._round), now

    def is_over(self) -> bool:
        """Whether another round like the longest so far, and a checkpoint, would end too late."""
        return self._round + self._longest + self._cost > self._end

    def is_due(self) -> bool:
        """Whether a checkpoint is due by the time that has passed since the last one."""
        return self._round - self._saved >= max(self.seconds, self._LEAST * self._cost)

    def after_checkpoint(self) -> None:
        """Note that a checkpoint, begun after the last round, has just been written."""
        self._saved = time.perf_counter()
        self._cost, self._round = self._saved - self._round, self._saved
