"""Losses as negative log-likelihoods, so that exp(-loss) is a probability and the E-step means what it says.

Shapes: n samples, K classes, D target dimensions.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from fedem.core.errors import UserError
from fedem.core.settings import Settings

CLASSES, NUMBERS = "classes", "numbers"  # what is predicted
_FAR = 4.0


@dataclass(frozen=True)
class Loss(Settings, ABC):
    """A negative log-likelihood, what a model must put out for it, and how its predictions are mixed."""

    task: ClassVar[str] = CLASSES
    metric: ClassVar[str] = "accuracy"  # that predictions are judged by unless another is named
    has_bounded_slope: ClassVar[bool] = True  # in the outputs, as the convergence theorems ask of mixtures

    @abstractmethod
    def num_outputs(self, targets: Tensor) -> int:
        """Return how many numbers a model must put out for such targets."""

    @abstractmethod
    def check(self, num_outputs: int, targets: Tensor) -> None:
        """Refuse targets that do not fit a model with ``num_outputs`` outputs."""

    @abstractmethod
    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return -log p(target | output) of each sample, ``[n]``."""

    @abstractmethod
    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return what is averaged over components: class probabilities ``[n, K]``, or means ``[n, D]``."""

    @abstractmethod
    def certain(self, targets: Tensor, width: int) -> Tensor:
        """Return the predictions that leave no doubt of these targets, of ``width`` numbers each, ``[n, width]``."""

    @abstractmethod
    def surprise(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return -log p(target | prediction) of each sample, ``[n]``, for what :meth:`probabilities` returns."""

    def lowest(self, num_outputs: int) -> float:
        """Return the bound that no sample's loss lies below: 0 where p is a probability, less where it is a density."""
        return 0.0

    def far_off(self, targets: Tensor, num_outputs: int) -> float:
        """Return a mean loss that no sensible predictor of ``targets`` has: some times that of outputs of zero."""
        targets = targets.double() if targets.is_floating_point() else targets
        zeros = torch.zeros(len(targets), num_outputs, dtype=torch.float64, device=targets.device)
        return _FAR * float(self.negative_log_likelihood(zeros, targets).mean())


def log_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """-log p(target); of a probability that is zero, or rounded to it, the logarithm of the smallest one."""
    chances = predictions.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -chances.clamp(min=torch.finfo(chances.dtype).tiny).log()


def _check_classes(targets: Tensor, num_classes: int) -> None:
    if targets.is_floating_point() or targets.ndim != 1:
        said = f"Targets are {targets.dtype} of shape {list(targets.shape)}"
        raise UserError(f"{said}; allowed for classes: integers, [n].")
    if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= num_classes):
        said = f"Targets run from {int(targets.min())} to {int(targets.max())}"
        raise UserError(f"{said}; allowed: 0 to {num_classes - 1}.")


@dataclass(frozen=True)
class Classification(Loss, ABC):
    """The negative log-likelihood of a class.

    Attributes:
        class_weights: what a sample counts in the local steps. "none": all the same; "balanced": n / (K n_k) for one of
            the n_k among all n training samples that are of its class, of K classes. Responsibilities, mixture weights
            and scores go by likelihoods as they are.
    """

    class_weights: str = field(default="none", metadata={"choices": ("none", "balanced")})

    def weights_of(self, targets: Tensor, num_classes: int) -> tuple[float, ...] | None:
        """Return what a sample of each class counts, given all training targets; None where all count the same."""
        if self.class_weights == "none":
            return None
        _check_classes(targets, num_classes)
        counts = targets.bincount(minlength=num_classes)
        there = int((counts > 0).sum())
        # A class without samples has none to weigh.
        return tuple(len(targets) / (there * count) if count else 1.0 for count in counts.tolist())

    def certain(self, targets: Tensor, width: int) -> Tensor:
        return one_hot(targets.long(), width)

    def surprise(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return log_loss(predictions, targets)


@dataclass(frozen=True)
class CrossEntropy(Classification):
    """-log softmax(outputs)[target] for outputs ``[n, K]``."""

    def num_outputs(self, targets: Tensor) -> int:
        return int(targets.max()) + 1

    def check(self, num_outputs: int, targets: Tensor) -> None:
        if num_outputs < 2:
            allowed = "allowed for cross-entropy: one per class, at least 2"
            raise UserError(f"The model puts out 1 number per sample; {allowed}.")
        _check_classes(targets, num_outputs)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -torch.log_softmax(outputs, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs, -1)


@dataclass(frozen=True)
class Logistic(Classification):
    """-log sigmoid(+-output) for two classes and outputs ``[n, 1]``."""

    def num_outputs(self, targets: Tensor) -> int:
        return 1

    def check(self, num_outputs: int, targets: Tensor) -> None:
        if num_outputs != 1:
            allowed = 'allowed for two classes (logistic): 1, or loss = "cross_entropy"'
            raise UserError(f"The model puts out {num_outputs} numbers per sample; {allowed}.")
        _check_classes(targets, 2)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``softplus(-o)`` for class 1 and ``softplus(o)`` for class 0, ``[n]``."""
        return softplus((1 - 2 * targets) * outputs.squeeze(-1), threshold=40)

    def probabilities(self, outputs: Tensor) -> Tensor:
        logits = outputs.squeeze(-1)
        return torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], -1)


@dataclass(frozen=True)
class SquaredError(Loss):
    """Gaussian negative log-likelihood with a given variance: ``|y - o|^2 / (2 v) + D log(2 pi v) / 2``.

    Attributes:
        variance: v, of a target around its prediction. The smaller, the more surely samples are dealt to components.
    """

    task: ClassVar[str] = NUMBERS
    metric: ClassVar[str] = "mean_squared_error"
    has_bounded_slope: ClassVar[bool] = False

    variance: float = field(default=1.0, metadata={"above": 0})

    def num_outputs(self, targets: Tensor) -> int:
        return 1 if targets.ndim == 1 else targets.shape[1]

    def check(self, num_outputs: int, targets: Tensor) -> None:
        if self.num_outputs(targets) != num_outputs:
            allowed = f"allowed for a model with {num_outputs} outputs: [n, {num_outputs}]"
            raise UserError(f"Targets have shape {list(targets.shape)}; {allowed}.")

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        squares = (outputs - targets.reshape(outputs.shape)).square()
        return squares.sum(-1) / (2 * self.variance) + self.lowest(outputs.shape[-1])

    def lowest(self, num_outputs: int) -> float:
        """``D log(2 pi v) / 2``, of a prediction without error."""
        return num_outputs * math.log(2 * math.pi * self.variance) / 2

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The mean, ``[n, D]``."""
        return outputs

    def certain(self, targets: Tensor, width: int) -> Tensor:
        return targets.reshape(len(targets), width)

    def surprise(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self.negative_log_likelihood(predictions, targets)


LOSSES: dict[str, type[Loss]] = {"cross_entropy": CrossEntropy, "logistic": Logistic, "squared_error": SquaredError}


def guess_loss(targets: Tensor) -> Loss:
    """Choose the loss that fits: floats -> squared error, two classes -> logistic, more -> cross-entropy."""
    if targets.is_floating_point():
        return SquaredError()
    return Logistic() if int(targets.max()) <= 1 else CrossEntropy()
