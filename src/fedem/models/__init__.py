"""Models by name."""

from __future__ import annotations

from fedem.models.base import Model, ModelSpec
from fedem.models.linear import Linear

MODELS: dict[str, type[ModelSpec]] = {"linear": Linear}

__all__ = ["MODELS", "Linear", "Model", "ModelSpec"]
