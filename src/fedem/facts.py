"""What a checkpoint or a plan says besides its tensors, so that it can be loaded without the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedem.data.tables.encoding import Encoding
from fedem.errors import UserError
from fedem.models import Model
from fedem.parts import Shapes


def checkpoint_facts(names: Sequence[str], shapes: Shapes, model: Model) -> dict[str, Any]:
    """Return what a checkpoint must say."""
    return {
        "clients": list(names),
        **shape_facts(shapes),
        "leaves": model.leaf_shapes,
        "not_stackable": model.not_stackable,
        "bytes_per_sample": model.bytes_per_sample,
    }


def check_model(model: Model, leaves: Mapping[str, list[int]] | None) -> None:
    """Refuse a model with other parameters than those that were trained; what it does with them can't be seen."""
    if leaves is None or model.leaf_shapes == leaves:
        return
    name = next(name for name in {**leaves, **model.leaf_shapes} if leaves.get(name) != model.leaf_shapes.get(name))
    raise UserError(
        f"The model is not the one that was trained: its {name!r} has shape {model.leaf_shapes.get(name, 'none')}; "
        f"allowed: {leaves.get(name, 'none')}."
    )


def shape_facts(shapes: Shapes) -> dict[str, Any]:
    """Return shapes as plain values, as JSON has them."""
    return {
        "input_shape": list(shapes.inputs),
        "input_dtype": str(shapes.input_dtype).removeprefix("torch."),
        "num_outputs": shapes.outputs,
        "feature_names": None if shapes.features is None else list(shapes.features),
        "encoding": None if shapes.encoding is None else shapes.encoding.to_json(),
        "labels": None if shapes.labels is None else list(shapes.labels),
    }


def take_shapes(facts: dict[str, Any]) -> Shapes:
    """Take out of ``facts`` the shapes that :func:`shape_facts` put there."""
    names, encoding, labels = facts.pop("feature_names"), facts.pop("encoding", None), facts.pop("labels", None)
    return Shapes(
        tuple(facts.pop("input_shape")),
        getattr(torch, facts.pop("input_dtype")),
        facts.pop("num_outputs"),
        None if names is None else tuple(names),
        None if encoding is None else Encoding.from_json(encoding),
        None if labels is None else tuple(labels),
    )
