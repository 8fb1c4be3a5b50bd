"""All readers, and how many inputs each gets."""

from __future__ import annotations

from collections.abc import Sequence

from fuzzing import deployed, models, runs, samples
from fuzzing.harness import Reader

READERS: tuple[type[Reader], ...] = (*samples.READERS, *runs.READERS, *models.READERS, *deployed.READERS)


def shares(readers: Sequence[type[Reader]], inputs: int) -> dict[type[Reader], int]:
    """Return how many inputs each reader gets: those that are slow get fewer, and all get some."""
    whole = sum(1 / kind.slowness for kind in readers)
    found = {kind: max(1, int(inputs / kind.slowness / whole)) for kind in readers}
    # Whatever rounding leaves goes to the quickest.
    first = min(readers, key=lambda kind: kind.slowness)
    found[first] = max(1, found[first] + inputs - sum(found.values()))
    return found
