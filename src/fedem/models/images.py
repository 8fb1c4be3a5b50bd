"""What models of images share: the shapes they take, and how pixels reach the first convolution.

Shapes: n images, C channels, height H, width W.
"""

from __future__ import annotations

from torch import Tensor, nn, stack

from fedem.errors import UserError


def image_shape(
    model: str, input_shape: tuple[int, ...], smallest: int = 1, channels: tuple[int, ...] = ()
) -> tuple[int, int, int]:
    """Return (C, H, W) of inputs ``[H, W]`` or ``[C, H, W]``.

    Refuses other shapes, images below ``smallest`` x ``smallest`` and, where ``channels`` are given, other numbers.
    """
    shape = (1, *input_shape) if len(input_shape) == 2 else input_shape
    fits = len(shape) == 3 and min(shape[1:]) >= smallest and (shape[0] in channels if channels else shape[0] > 0)
    if not fits:
        some = f"{' or '.join(map(str, channels))} channels" if channels else "any number of channels"
        raise UserError(
            f"The inputs of {model} have shape {list(input_shape)}; allowed: [height, width] or "
            f"[channels, height, width], at least {smallest} x {smallest} pixels, {some}."
        )
    return shape[0], shape[1], shape[2]


class Images(nn.Module):
    """Gives grey images their channel; standardises colours where means and deviations are given.

    A grey image is then shown as one whose three colours are equal, so that a stem for colours sees what it was trained
    on. The numbers are Python's: as buffers they would be part of the state that clients exchange and average.
    """

    def __init__(self, means: tuple[float, ...] = (), deviations: tuple[float, ...] = ()):
        super().__init__()
        self.means, self.deviations = means, deviations

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, H, W]`` or ``[n, C, H, W]`` -> ``[n, C, H, W]``, with C = 3 when standardised."""
        images = inputs.unsqueeze(1) if inputs.ndim == 3 else inputs
        if not self.means:
            return images
        planes = images.unbind(1)
        if len(planes) == 1:
            planes *= len(self.means)
        standardised = [
            (plane - mean) / deviation
            for plane, mean, deviation in zip(planes, self.means, self.deviations, strict=True)
        ]
        return stack(standardised, 1)


class ScaledImages(Images):
    """Gives grey images their channel, and brings all pixels to ``(pixel - mean) / deviation``."""

    def __init__(self, mean: float, deviation: float):
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, H, W]`` or ``[n, C, H, W]`` -> ``[n, C, H, W]``."""
        return (super().forward(inputs) - self.mean) / self.deviation


class ImageNetImages(Images):
    """Standardises by the means and deviations of ImageNet's colours, as torchvision's weights expect."""

    def __init__(self) -> None:
        super().__init__((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def draw_convolutions(module: nn.Module) -> None:
    """Draw the weights of all convolutions as He et al. (2015) do, for the variance of what flows backwards."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
