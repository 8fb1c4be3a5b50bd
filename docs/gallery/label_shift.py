"""Clients that differ in their labels.

Clients often see the same things in different proportions: what they have of each class looks alike, but its share is
another. If p(x | y) is common to all and p_t(y) the client's own, its best prediction is

    p_t(y | x), proportional to p_t(y) p(x | y)

so all that is personal are the shares of its labels, which it can count. Their logarithms are added to the outputs of a
shared network, in training as in prediction, and what the network learns then is common to all. A mixture of components
comes close to that only with many of them, for there are as many different shares as clients.

Here six classes are normal around different centres. The best network is known, a linear map (discriminant analysis),
and so is the best accuracy. The script prints what FedEM, FedAvg and models trained alone reach, as they are and with
each client's counted shares, and the best. To hand the shares to a network they are columns beside the features.
"""

import numpy as np
from torch import Tensor, nn

import fedem

CLASSES, FEATURES, CLIENTS, TRAINING, TESTING, ROUNDS = 6, 30, 30, 60, 300, 40

rng = np.random.default_rng(0)
centres = rng.normal(size=(CLASSES, FEATURES)) / 3  # of classes whose features vary by one
shares = rng.dirichlet(np.full(CLASSES, 0.4), CLIENTS)


def draw(share: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a client's samples."""
    labels = rng.choice(CLASSES, count, p=share)
    return rng.normal(centres[labels]), labels


train, test = ([draw(share, count) for share in shares] for count in (TRAINING, TESTING))


class Shifted(nn.Module):
    """A linear map of the features; the other columns are added to its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, FEATURES + CLASSES] -> [n, CLASSES]``."""
        return self.map(inputs[:, :FEATURES]) + inputs[:, FEATURES:]


def beside(part: list[tuple[np.ndarray, np.ndarray]], columns: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Put each client's row of ``columns`` beside its samples."""
    return [(np.hstack([x, np.tile(row, (len(x), 1))]), y) for (x, y), row in zip(part, columns, strict=True)]


# Half a sample more of every class: one that a client has not seen yet is rare there, not impossible.
counts = np.stack([np.bincount(labels, minlength=CLASSES) for _, labels in train]) + 0.5
counted = np.log(counts / counts.sum(axis=1, keepdims=True))

distances = 0.5 * (centres**2).sum(axis=1)
logits = [x @ centres.T - distances + np.log(share) for (x, _), share in zip(test, shares, strict=True)]
best = np.mean([(found.argmax(axis=1) == y).mean() for found, (_, y) in zip(logits, test, strict=True)])

print("         as it is  with shares")
for method in ("fedem", "fedavg", "local"):
    accuracies = []
    for columns in (np.zeros_like(counted), counted):
        clients = fedem.Federation.from_parts(beside(train, columns), test=beside(test, columns))
        result = fedem.train(clients, method, model=Shifted, rounds=ROUNDS, learning_rate=1.0)
        accuracies.append(result.summary["test_accuracy"])
    print(f"{method:<8} {accuracies[0]:>9.3f} {accuracies[1]:>12.3f}")
print(f"best     {best:>22.3f}")
