"""The robust regression of docs/surrogates.md, as it stands there, and clients for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from fedem.data.federation import Federation

GUIDE = (Path(__file__).parent.parent / "docs" / "surrogates.md").read_text()
CLASS, USE = re.findall(r"```python\n(from .*?|model = .*?)```", GUIDE, flags=re.DOTALL)


def load() -> dict[str, Any]:
    """Run the first block: the class and what it imports."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(CLASS, "surrogates.md", "exec", dont_inherit=True), names)
    return names


def make_lines(sizes: tuple[int, ...] = (40, 15, 60), seed: int = 0) -> Federation:
    """Clients on one line, with noise of different scales and heavy tails."""
    rng = np.random.default_rng(seed)
    pairs = []
    for number, size in enumerate(sizes):
        x = rng.normal(size=(size, 3))
        pairs.append((x, x @ [1.0, -2.0, 0.5] + 0.3 + 0.3 * (number + 1) * rng.standard_t(3, size=size)))
    return Federation.from_parts(pairs)
