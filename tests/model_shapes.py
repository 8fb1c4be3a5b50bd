"""Small inputs that each shipped model takes."""

from __future__ import annotations

SHAPES: dict[str, tuple[int, ...]] = {
    "linear": (5,),
    "mlp": (3, 4),
    "cnn": (7, 6),
    "leaf_cnn": (4, 5),
    "lstm": (6,),
    "mobilenet_v2": (3, 8, 9),
    "resnet18": (8, 8),
    "resnet34": (1, 8, 8),
    "efficientnet_lite0": (3, 9, 8),
}
