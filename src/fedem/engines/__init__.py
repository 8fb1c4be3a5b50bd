"""Engines by name, and the choice between them."""

from __future__ import annotations

import torch
from torch.func import vmap

from fedem.engines.base import Cohort, Engine, Finished
from fedem.engines.batches import Batching
from fedem.engines.one_by_one import OneByOne
from fedem.engines.stacked import Stacked
from fedem.errors import UserError, unknown
from fedem.models.base import Model
from fedem.tree import tree_stack

__all__ = ["ENGINES", "Batching", "Cohort", "Engine", "Finished", "OneByOne", "Stacked", "choose_engine"]

ENGINES = ("auto", "stacked", "one_by_one")


def choose_engine(
    name: str, chunk_size: int, model: Model, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[Engine, str | None]:
    """Return the engine called ``name``, and a note when "auto" could not stack the model.

    ``inputs`` and ``targets`` are a few samples to try the model on.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "one_by_one":
        return OneByOne(), None
    reason = model.not_stackable or _trial(model, inputs[:2], targets[:2])
    if reason is None:
        return Stacked(chunk_size), None
    if name == "stacked":
        raise UserError(f"This model can't be stacked ({reason}); use engine one_by_one or auto.")
    return OneByOne(), f"Clients are trained one by one: this model can't be stacked ({reason})."


def _trial(model: Model, inputs: torch.Tensor, targets: torch.Tensor) -> str | None:
    """Stack two copies of the model over two clients; returns why that failed or was wrong, if so."""
    stacked = tree_stack([model.init(0), model.init(1)])
    try:
        with torch.no_grad():
            together = vmap(model.losses)(stacked, inputs[None].expand(2, *inputs.shape), targets[None].expand(2, -1))
            alone = model.losses(model.init(1), inputs, targets)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0]
    if not torch.allclose(together[1], alone, rtol=1e-3, atol=1e-4):
        return "its stacked and single outputs differ"
    return None
