"""Stacked equals one by one, for every model: a round of FedEM, padding and all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import advance, distance, make_training
from torch import Tensor

from fedem.core.precision import products
from fedem.core.tree import Tree
from fedem.data.federation import Federation
from fedem.engines import Batching, OneByOne, Stacked
from fedem.models import MODELS, Model
from fedem.models.losses import CrossEntropy
from fedem.solvers.schedules import Constant

SHAPES: dict[str, tuple[int, ...]] = {
    "linear": (6,),
    "mlp": (6,),
    "cnn": (1, 8, 8),
    "leaf_cnn": (1, 8, 8),
    "mobilenet_v2": (3, 64, 64),
    "resnet18": (3, 64, 64),
    "resnet34": (3, 64, 64),
    "efficientnet_lite0": (3, 64, 64),
    "lstm": (7,),
}
SMALL = {"lstm": {"hidden": 16, "vocabulary": 12}, "mlp": {"dropout": 0.3}}
DOUBLE, SINGLE = (torch.float64, 1e-9), (torch.float32, 1e-4)
# Of what takes long on a CPU, what the others have not shown: ResNet-34 is ResNet-18 with more blocks, and single
# precision is the small models' too.
SLOW = ("mobilenet_v2", "resnet18", "efficientnet_lite0")
ON_CPU = [
    *(
        pytest.param(name, "cpu", *DOUBLE, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in MODELS
        if name != "resnet34"
    ),
    *((name, "cpu", *SINGLE) for name in MODELS if name not in (*SLOW, "resnet34")),
]
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))
ON_GPU = [pytest.param(name, "cuda", *kind, marks=NEEDS_GPU) for name in MODELS for kind in (DOUBLE, SINGLE)]


def _federation(name: str) -> Federation:
    rng = np.random.default_rng(0)
    pairs = []
    # Batch normalisation over very few numbers magnifies rounding without bound: images of 16 x 16 pixels in batches of
    # two turn 1e-12 into 1.
    for size in (9, 5):
        inputs = rng.integers(0, 12 if name == "lstm" else 256, (size, *SHAPES[name]))
        pairs.append((inputs.astype(np.int64 if name == "lstm" else np.uint8), rng.integers(0, 3, size)))
    return Federation.from_parts(pairs, names=("ann", "bob"))


def test_every_model_is_here() -> None:
    assert SHAPES.keys() == MODELS.keys()


@pytest.mark.parametrize(("name", "device", "dtype", "tolerance"), [*ON_CPU, *ON_GPU])
def test_loop_equals_stacked(name: str, device: str, dtype: torch.dtype, tolerance: float) -> None:
    spec = MODELS[name](**SMALL.get(name, {}))
    model = Model(partial(spec.build, SHAPES[name], 3), CrossEntropy(), dtype)
    federation = _federation(name)
    model.probe(federation.train.inputs[:5].to(device))
    assert model.not_stackable is None
    with products("float32", torch.device(device)):
        states = [
            advance(
                make_training(
                    "fedem",
                    federation.to(torch.device(device)),
                    model=model,
                    engine=engine,
                    batching=Batching(batch_size=5),
                    schedule=Constant(0.001),
                    num_components=2,
                    device=device,
                ),
                1,
            )
            for engine in (OneByOne(), Stacked())
        ]
    for name, leaf in states[0].shared.items():
        # Running variances of deep layers are large numbers.
        apart = (leaf - states[1].shared[name]).abs() / leaf.abs().clamp(min=1)
        assert float(apart.max()) < tolerance
    assert distance(replace(states[0], shared={}), replace(states[1], shared={})) < tolerance


def test_components_of_a_network_are_trained_in_turn_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution keeps the cores busy by itself; stacked ones take longer, and give the same."""
    federation, passes, real, states = _federation("cnn"), list[None](), Model.training_losses, []

    def counted(model: Model, *arguments: Any) -> tuple[Tensor, Tree]:
        passes.append(None)
        return real(model, *arguments)

    monkeypatch.setattr(Model, "training_losses", counted)
    for is_large, passes_a_step in ((True, 2), (False, 1)):
        monkeypatch.setattr(Model, "is_large", is_large)
        model = Model(partial(MODELS["cnn"]().build, SHAPES["cnn"], 3), CrossEntropy(), torch.float64)
        training = make_training(
            "fedem",
            federation,
            model=model,
            engine=OneByOne(),
            batching=Batching(batch_size=5),
            schedule=Constant(0.001),
            num_components=2,
        )
        passes.clear()
        states.append(advance(training, 1))
        assert len(passes) == 3 * passes_a_step, "nine samples and five, in batches of five"
    assert distance(*states) < 1e-9
