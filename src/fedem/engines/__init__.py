"""Engines by name, and the choice between them."""

import torch

from fedem.core.errors import UserError
from fedem.engines.base import Batching, Cohort, Engine, OneByOne, Work
from fedem.engines.stacked import Stacked
from fedem.models.base import Model

__all__ = ["ENGINES", "Batching", "Cohort", "Engine", "OneByOne", "Stacked", "Work", "choose_engine"]

ENGINES = ("auto", "stacked", "one_by_one")


def choose_engine(name: str, chunk_size: int, model: Model, device: torch.device) -> Engine:
    """Return the engine called ``name``, with a note when "auto" did not stack the model."""
    if name == "one_by_one":
        return OneByOne()
    if name == "auto" and device.type == "cpu" and model.is_large:
        # One such model keeps a CPU busy, and stacked convolutions are slower there.
        return OneByOne(note="Clients are trained one by one, which is faster for such a model on a CPU.")
    if model.not_stackable is None:
        return Stacked(chunk_size)
    if name == "stacked":
        raise UserError(f"This model can't be stacked ({model.not_stackable}); use engine one_by_one or auto.")
    return OneByOne(note=f"Clients are trained one by one: this model can't be stacked ({model.not_stackable}).")
