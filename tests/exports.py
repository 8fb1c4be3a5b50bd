"""Personal models of all kinds, made without training."""

from __future__ import annotations

from dataclasses import asdict

import torch

import fedem
from fedem.core.tree import tree_stack
from fedem.methods.base import Mixture
from fedem.models import CNN, LSTM, MLP, Linear, MobileNetV2, Model, ModelSpec
from fedem.models.losses import CrossEntropy, Logistic, Loss, SquaredError
from fedem.runs.recipe import SampleFormat

Case = tuple[str, ModelSpec, Loss, tuple[int, ...], torch.dtype, int]
CASES: dict[str, Case] = {
    "linear": ("linear", Linear(), Logistic(), (6,), torch.float32, 1),
    "regression": ("linear", Linear(), SquaredError(variance=0.5), (6,), torch.float64, 2),
    "mlp": ("mlp", MLP(hidden=8, dropout=0.5), CrossEntropy(), (3, 4), torch.float32, 3),
    "cnn": ("cnn", CNN(pixel_mean=0.3, pixel_deviation=0.2), CrossEntropy(), (10, 9), torch.uint8, 4),
    "lstm": ("lstm", LSTM(vocabulary=11, hidden=6), CrossEntropy(), (5,), torch.int64, 11),
    "mobilenet_v2": ("mobilenet_v2", MobileNetV2(), CrossEntropy(), (3, 8, 8), torch.uint8, 3),
}
_LOSSES = {Logistic: "logistic", CrossEntropy: "cross_entropy", SquaredError: "squared_error"}


def make_personal(case: str, weights: tuple[float, ...] = (0.7, 0.3)) -> tuple[fedem.PersonalModel, fedem.Config]:
    """A mixture of freshly drawn components, whose buffers are no longer what a fresh module has."""
    name, spec, loss, shape, dtype, outputs = CASES[case]
    model = Model(lambda: spec.build(shape, outputs), loss)
    components = tree_stack([model.init(seed) for seed in range(len(weights))])
    for key, leaf in components.items():
        if key.endswith("running_mean"):
            components[key] = leaf + torch.linspace(-0.5, 0.5, leaf[0].numel()).expand_as(leaf)
    config = fedem.Config.build(
        {"model": {"name": name, **asdict(spec)}, "loss": {"name": _LOSSES[type(loss)], **asdict(loss)}}, preset=False
    )
    mixture = Mixture(components, torch.tensor(weights).log())
    return fedem.PersonalModel(model, mixture, SampleFormat(shape, dtype, outputs)), config


def some_inputs(case: str, count: int, seed: int = 1) -> torch.Tensor:
    """Other inputs than those that an export tries by itself."""
    _, _, _, shape, dtype, outputs = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return 3 * torch.randn((count, *shape), generator=generator, dtype=dtype)
    return torch.randint(256 if dtype == torch.uint8 else outputs, (count, *shape), generator=generator, dtype=dtype)
