"""Models by name."""

from fedem.models.base import Auto, Model, ModelSpec
from fedem.models.images import CNN, EfficientNetLite0, LeafCNN, MobileNetV2, ResNet18, ResNet34
from fedem.models.losses import CrossEntropy, Logistic, SquaredError
from fedem.models.small import LSTM, MLP, Linear

MODELS: dict[str, type[ModelSpec]] = {
    "linear": Linear,
    "mlp": MLP,
    "cnn": CNN,
    "leaf_cnn": LeafCNN,
    "mobilenet_v2": MobileNetV2,
    "resnet18": ResNet18,
    "resnet34": ResNet34,
    "efficientnet_lite0": EfficientNetLite0,
    "lstm": LSTM,
}

__all__ = [
    "CNN", "LSTM", "MLP", "MODELS", "Auto", "CrossEntropy", "EfficientNetLite0", "LeafCNN", "Linear", "Logistic",
    "MobileNetV2", "Model", "ModelSpec", "ResNet18", "ResNet34", "SquaredError",
]  # fmt: skip
