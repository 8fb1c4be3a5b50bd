"""Models by name: sizes that are known, shapes in and out, what they refuse, and values made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_shapes import SHAPES
from torch import Tensor, nn
from torch.func import grad
from torch.utils.flop_counter import FlopCounterMode

import fedem
from fedem.core.errors import UserError
from fedem.data.federation import Federation
from fedem.models import CNN, LSTM, MLP, MODELS, LeafCNN, MobileNetV2, Model, ResNet18
from fedem.models.images import _same
from fedem.models.losses import CrossEntropy

DEEP = ("mobilenet_v2", "resnet18", "resnet34", "efficientnet_lite0")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _inputs(name: str, count: int = 4) -> Tensor:
    if name == "lstm":
        return torch.randint(0, 128, (count, *SHAPES[name]))
    if name in ("linear", "mlp"):
        return torch.randn(count, *SHAPES[name])
    return torch.randint(0, 256, (count, *SHAPES[name]), dtype=torch.uint8)


def _on_meta(name: str, **settings: object) -> nn.Module:
    """The network for ImageNet without memory for its values."""
    with torch.device("meta"):
        return MODELS[name](**settings).build((3, 224, 224), 1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_finite_and_reach_every_parameter(name: str) -> None:
    model = Model(lambda: MODELS[name]().build(SHAPES[name], 3), CrossEntropy())
    inputs, targets = _inputs(name), torch.tensor([0, 1, 2, 1])
    tree = model.init(0)
    model.check(inputs, targets)
    losses = model.losses(tree, inputs, targets)
    assert losses.shape == (4,)
    assert losses.isfinite().all()
    trained = {leaf: tree[leaf] for leaf in model.trainable}
    gradient = grad(lambda part: model.losses(tree | part, inputs, targets).mean())(trained)
    assert all(leaf.isfinite().all() for leaf in gradient.values())
    assert all(leaf.any() for leaf in gradient.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_build_draws_afresh_from_the_global_generator(name: str) -> None:
    spec = MODELS[name]()

    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [leaf for leaf in spec.build(SHAPES[name], 3).parameters() if leaf.ndim > 1]

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("name", DEEP)
def test_what_is_not_trained_is_the_statistics_of_batch_norm(name: str) -> None:
    kinds = {leaf.rpartition(".")[2] for leaf, _ in _on_meta(name).named_buffers()}
    assert kinds == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize(
    ("name", "parameters", "entries", "multiplications"),
    [
        # As torchvision documents its own.
        ("mobilenet_v2", 3_504_872, 314, 0.301e9),
        ("resnet18", 11_689_512, 122, 1.814e9),
        ("resnet34", 21_797_672, 218, 3.664e9),
    ],
)
def test_networks_have_their_known_sizes(name: str, parameters: int, entries: int, multiplications: float) -> None:
    module = _on_meta(name)
    assert sum(leaf.numel() for leaf in module.parameters()) == parameters
    assert len(module.state_dict()) == entries
    with FlopCounterMode(display=False) as counter:
        assert module(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)
    assert counter.get_total_flops() / 2 == pytest.approx(multiplications, rel=0.005)


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        (
            "mobilenet_v2",
            {
                "features.0.0.weight": (32, 3, 3, 3),
                "features.0.1.running_var": (32,),
                "features.1.conv.0.0.weight": (32, 1, 3, 3),
                "features.1.conv.1.weight": (16, 32, 1, 1),
                "features.1.conv.2.num_batches_tracked": (),
                "features.2.conv.0.0.weight": (96, 16, 1, 1),
                "features.2.conv.1.0.weight": (96, 1, 3, 3),
                "features.2.conv.2.weight": (24, 96, 1, 1),
                "features.17.conv.3.bias": (320,),
                "features.18.0.weight": (1280, 320, 1, 1),
                "classifier.1.weight": (1000, 1280),
            },
        ),
        (
            "resnet18",
            {
                "conv1.weight": (64, 3, 7, 7),
                "bn1.running_mean": (64,),
                "layer1.0.conv1.weight": (64, 64, 3, 3),
                "layer2.0.downsample.0.weight": (128, 64, 1, 1),
                "layer2.0.downsample.1.bias": (128,),
                "layer4.1.bn2.weight": (512,),
                "fc.weight": (1000, 512),
            },
        ),
        ("resnet34", {"layer3.5.conv2.weight": (256, 256, 3, 3), "fc.bias": (1000,)}),
    ],
)
def test_parameters_are_named_and_shaped_as_torchvisions(name: str, leaves: dict[str, tuple[int, ...]]) -> None:
    state = _on_meta(name).state_dict()
    assert {leaf: tuple(state[leaf].shape) for leaf in leaves} == leaves


def test_the_lite_network_has_its_known_size() -> None:
    module = _on_meta("efficientnet_lite0")
    assert sum(leaf.numel() for leaf in module.parameters()) == 4_652_008
    assert len(module.state_dict()) == 296  # as the package's file


@pytest.mark.parametrize("name", DEEP)
def test_a_stem_of_stride_one_keeps_four_times_as_much(name: str) -> None:
    seen = {}
    for stride in (1, 2):
        module = _on_meta(name, stem_stride=stride)
        stem = next(part for part in module.modules() if isinstance(part, nn.Conv2d))
        stem.register_forward_hook(lambda part, given, output, stride=stride: seen.update({stride: output.shape[-2:]}))
        module(torch.empty(1, 3, 224, 224, device="meta"))
    assert seen == {1: (224, 224), 2: (112, 112)}


def test_small_images_reach_the_residual_blocks_whole() -> None:
    module = ResNet18(small_images=True).build((3, 32, 32), 10)
    sizes = []
    module.layer1.register_forward_pre_hook(lambda part, given: sizes.append(tuple(given[0].shape)))
    module(torch.rand(2, 3, 32, 32))
    assert sizes == [(2, 64, 32, 32)]
    assert module.conv1.weight.shape == (64, 3, 3, 3)


@pytest.mark.parametrize("name", DEEP)
def test_grey_images_are_colour_images_of_equal_colours(name: str) -> None:
    spec, grey = MODELS[name](), torch.rand(2, 8, 8)
    module = spec.build((8, 8), 3).eval()
    expected = module(grey[:, None].expand(2, 3, 8, 8))
    torch.testing.assert_close(module(grey), expected)
    torch.testing.assert_close(module(grey[:, None]), expected)


def test_colours_are_standardised_each_by_its_own_numbers() -> None:
    images = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    means, deviations = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=torch.float64)
    expected = (images - means.view(3, 1, 1)) / deviations.view(3, 1, 1)
    torch.testing.assert_close(ResNet18().build((3, 4, 4), 2).images(images), expected)


@pytest.mark.parametrize("name", DEEP)
def test_convolutions_start_with_he_variance_of_what_flows_backwards(name: str) -> None:
    module = MODELS[name]().build((3, 8, 8), 4)
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and part.weight.numel() > 20_000:
            expected = math.sqrt(2 / (part.out_channels * part.kernel_size[0] ** 2))
            assert float(part.weight.detach().std()) == pytest.approx(expected, rel=0.05)


@given(size=st.tuples(st.integers(1, 40), st.integers(1, 40)), kernel=st.sampled_from((3, 5)), stride=st.integers(1, 2))
def test_same_padding_divides_the_size_by_the_stride_rounded_up(size, kernel: int, stride: int) -> None:
    layer = _same(1, 1, kernel, stride, size).to("meta")
    assert layer(torch.empty(1, 1, *size, device="meta")).shape[-2:] == tuple(math.ceil(side / stride) for side in size)
    added = [2 * each + more for each, more in zip(layer.padding, layer.more, strict=True)]
    assert all(0 <= zeros < kernel for zeros in added)  # no more than a kernel can overlap


@pytest.mark.parametrize(
    ("name", "settings", "shape", "message"),
    [
        (
            "cnn",
            {},
            (784,),
            r"The inputs of CNN have shape \[784\]; allowed: \[height, width\] or \[channels, he",
        ),
        ("cnn", {}, (2, 1, 28, 28), r"shape \[2, 1, 28, 28\]; allowed"),
        ("cnn", {}, (28, 5), "at least 6 x 6 pixels, any number of channels"),
        ("leaf_cnn", {}, (3, 28, 3), "LeafCNN .* at least 4 x 4 pixels"),
        ("leaf_cnn", {"same_padding": False}, (15, 28), "at least 16 x 16 pixels"),
        ("mobilenet_v2", {}, (0, 8), "MobileNetV2 .* at least 1 x 1 pixels, 1 or 3 channels"),
        ("resnet18", {}, (4, 8, 8), r"ResNet18 have shape \[4, 8, 8\].* 1 or 3 channels"),
        ("efficientnet_lite0", {}, (12,), r"EfficientNetLite0 have shape \[12\]"),
        ("lstm", {}, (80, 2), r"LSTM have shape \[80, 2\]; allowed: \[window\]"),
        ("lstm", {}, (0,), "at least 1 character"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name: str, settings, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MODELS[name](**settings).build(shape, 10)


@pytest.mark.parametrize(
    ("spec", "side"),
    [(CNN(), 6), (LeafCNN(), 4), (LeafCNN(same_padding=False), 16), *((MODELS[name](), 1) for name in DEEP)],
    ids=repr,
)
def test_the_smallest_images_allowed_pass(spec, side: int) -> None:
    assert spec.build((side, side), 3).eval()(torch.rand(2, side, side)).shape == (2, 3)


def test_a_model_may_be_named_in_python() -> None:
    rng = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(9, 3, generator=rng), torch.arange(9) % 2) for _ in range(2)]
    federation = Federation.from_parts(pairs, pairs, pairs, ["ann", "bob"])
    ways = ({"model": {"name": "mlp", "hidden": 5}}, {"model": "mlp", "hidden": 5})
    results = [fedem.train(federation, "fedavg", rounds=2, **way) for way in ways]
    assert [result.summary["num_parameters"] for result in results] == [4 * 5 + 6 * 5 + 6] * 2
    assert results[0].config == results[1].config
    assert results[0].config.name("model") == "mlp"
    for model, message in (
        ("mpl", "Unknown model 'mpl'; allowed: .*Did you mean 'mlp'"),
        ({"name": "mlp", "hiden": 3}, r"Unknown key in \[model\] 'hiden'"),
        ({"name": "mlp", "hidden": 0}, "model.hidden is 0; allowed: at least 1"),
        (7, "model is 7; allowed: an nn.Module, a function that builds one, or a name"),
        (MLP(), "model is MLP.*; allowed: an nn.Module"),
    ):
        with pytest.raises(UserError, match=message):
            fedem.train(federation, "fedavg", rounds=1, model=model)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (MLP, {"dropout": 1.0}, "MLP.dropout is 1.0; allowed: at least 0 and below 1"),
        (MobileNetV2, {"stem_stride": 3}, "stem_stride is 3; allowed: at least 1 and at most 2"),
        (ResNet18, {"dropout": -0.1}, "dropout is -0.1"),
        (LSTM, {"layers": 0}, "layers is 0"),
    ],
)
def test_settings_are_checked(kind, settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**settings)
