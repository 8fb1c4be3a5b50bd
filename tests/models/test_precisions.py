"""Every network in every precision: finite losses, float32's directions and statistics, stacked and padded."""

from __future__ import annotations

import pytest
import torch
from model_shapes import SHAPES
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cosine_similarity
from torch.nn.modules.batchnorm import _BatchNorm

import fedem
from fedem.core.errors import UserError
from fedem.core.precision import PRECISIONS
from fedem.core.tree import Tree, tree_flat, tree_stack
from fedem.models import MODELS, Model
from fedem.models.layers import training_pass
from fedem.models.losses import CrossEntropy
from fedem.models.stackable import make_stackable

# Fifty layers one after the other add up their roundings: 0.94 to 0.98 were seen.
BOUNDS = {"mobilenet_v2": 0.9, "efficientnet_lite0": 0.9}
DEEP = ("mobilenet_v2", "resnet18", "resnet34", "efficientnet_lite0")
EVERY = [pytest.param(name, marks=[pytest.mark.slow] if name in DEEP else []) for name in MODELS]
ROWS, PADDING = 6, 2
ROUNDING = 2**-8  # of one number in bfloat16

# A processor that has no products in bfloat16 says so once.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def _inputs(name: str) -> Tensor:
    generator, shape = torch.Generator().manual_seed(0), (ROWS + PADDING, *SHAPES[name])
    if name in ("linear", "mlp"):
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 128, shape, generator=generator, dtype=torch.int64 if name == "lstm" else torch.uint8)


def _model(name: str, precision: str) -> Model:
    def build() -> nn.Module:
        module = MODELS[name]().build(SHAPES[name], 3)
        for part in module.modules():
            # A variance of few numbers may be as small as it likes, so that dividing by its root magnifies rounding
            # without bound. A floor of one takes that away, and nothing else.
            if isinstance(part, _BatchNorm):
                part.eps = 1.0
        return module

    return Model(build, CrossEntropy(), precision=precision)


def _train(model: Model, inputs: Tensor, mask: Tensor | None) -> tuple[Tree, Tree, Tensor]:
    """Gradients, buffers and losses of two stacked models, [2, ...], of rows that count."""
    targets, weights = torch.arange(len(inputs)) % 3, torch.ones(len(inputs)) if mask is None else mask.float()

    def pull(tree: Tree) -> tuple[Tree, tuple[Tree, Tensor]]:
        def objective(trained: Tree) -> tuple[Tensor, tuple[Tree, Tensor]]:
            losses, buffers = model.training_losses(tree | trained, inputs, targets, mask, torch.tensor(1))
            return (losses * weights).sum() / weights.sum(), (buffers, losses)

        return grad(objective, has_aux=True)({leaf: tree[leaf] for leaf in model.trainable})

    gradients, (buffers, losses) = vmap(pull)(tree_stack([model.init(seed) for seed in (0, 1)]))
    return gradients, buffers, losses


def test_every_model_is_here() -> None:
    assert SHAPES.keys() == MODELS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_all_precisions_agree_with_float32(name: str, padded: bool) -> None:
    inputs = _inputs(name)
    mask = torch.arange(len(inputs)) < ROWS if padded else None
    found = {precision: _train(_model(name, precision), inputs, mask) for precision in PRECISIONS}
    exact, exact_buffers, _ = found["float32"]
    for precision, (gradients, buffers, losses) in found.items():
        assert losses.isfinite().all()
        assert all(leaf.dtype == torch.float32 for leaf in gradients.values())
        for one in (0, 1):
            pair = [tree_flat({leaf: tree[leaf][one] for leaf in exact}) for tree in (gradients, exact)]
            least = BOUNDS.get(name, 0.95) if precision == "bfloat16" else 1 - 1e-6
            assert float(cosine_similarity(*pair, dim=0)) > least
        for leaf in exact_buffers:
            if leaf.endswith("num_batches_tracked"):
                assert torch.equal(buffers[leaf], exact_buffers[leaf])
            else:  # a mean in units of the standard deviation, which rounding is relative to
                scale = exact_buffers[leaf.replace("running_mean", "running_var")]
                scale = scale.sqrt() if leaf.endswith("mean") else scale
                apart = (buffers[leaf] - exact_buffers[leaf]).abs() / scale
                assert float(apart.max()) < (ROUNDING if precision == "bfloat16" else 1e-6), leaf


@pytest.mark.parametrize("name", EVERY)
def test_evaluation_in_bfloat16_agrees_with_float32(name: str) -> None:
    inputs, targets = _inputs(name), torch.arange(ROWS + PADDING) % 3
    exact, rough = (_model(name, precision) for precision in ("float32", "bfloat16"))
    trees = tree_stack([exact.init(seed) for seed in (0, 1)])
    for losses in (rough.component_losses, vmap(rough.losses, in_dims=(0, None, None))):
        expected = exact.component_losses(trees, inputs, targets)
        torch.testing.assert_close(losses(trees, inputs, targets), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_bfloat16_is_float32s_rounded_once(padding: int, affine: bool) -> None:
    """Inputs that bfloat16 holds: statistics are float32's to its own rounding, outputs to one of bfloat16's."""
    inputs = (3 + torch.randn(2, 9 + padding, 4, 5, generator=torch.Generator().manual_seed(0))).bfloat16()
    mask = torch.arange(9 + padding) < 9 if padding else None

    def run(one: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer.running_mean, layer.running_var = torch.zeros(4) + 0 * one.sum().float(), torch.ones(4) + 0 * one.sum()
        layer.num_batches_tracked = torch.zeros((), dtype=torch.int64) + 0 * one.sum().long()
        with training_pass(mask, torch.tensor(0)):
            return layer(one), layer.running_mean, layer.running_var

    layer = make_stackable(nn.BatchNorm1d(4, affine=affine)).train()
    outputs, *statistics = vmap(run)(inputs)
    expected, *exact = vmap(run)(inputs.float())
    assert (outputs.dtype, statistics[0].dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(outputs, expected.bfloat16())
    torch.testing.assert_close(statistics, exact)


def test_a_run_in_bfloat16_trains_a_network_with_batch_norm() -> None:
    def build() -> nn.Module:
        first = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 1))

    classes = torch.arange(60) % 2
    images = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)) + classes[:, None, None, None]
    federation = fedem.Federation.from_arrays(images, classes, torch.arange(60) // 21)  # of 21, 21 and 18
    settings = {"model": build, "batch_size": 5, "learning_rate": 0.05, "num_components": 2, "device": "cpu"}
    for engine in ("stacked", "one_by_one"):
        result = fedem.train(federation, rounds=5, precision="bfloat16", engine=engine, **settings)
        assert result.summary["train_accuracy"] > 0.9


def test_what_bfloat16_cannot_compute_is_refused_before_training() -> None:
    class Mixed(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs)
            return torch.lerp(outputs, inputs, 0.5) if self.training else outputs  # of one type alone

    with pytest.raises(UserError, match=r"can't be trained in bfloat16: .*; allowed: run.precision tf32 or float32"):
        Model(lambda: Mixed(5, 5), CrossEntropy(), precision="bfloat16").probe(torch.randn(5, 5))
