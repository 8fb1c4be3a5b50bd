"""Clients that differ in their labels.

Clients often see the same classes in different proportions: a class looks alike at all clients, but its share differs.
If p(x | y) is common to all and p_t(y) is the client's own, its best prediction is

    p_t(y | x), proportional to p_t(y) p(x | y)

So only the shares of its labels are personal, and the client can count them. With `label_shares` each client adds their
logarithms to the outputs of the shared models, in training and in prediction. Then the models learn only what is common
to all. Nobody else sees the shares. A mixture of components comes close to this only with many components, because
there are as many different shares as clients.

Here six classes are normally distributed around different centres. The best model is known, a linear map (discriminant
analysis), and so is the best accuracy. The script prints the accuracies of FedEM, FedAvg and models trained alone,
without and with each client's shares, and the best.
"""

import numpy as np

import fedem

CLASSES, FEATURES, CLIENTS, TRAINING, TESTING, ROUNDS = 6, 30, 30, 60, 300, 40

rng = np.random.default_rng(0)
centres = rng.normal(size=(CLASSES, FEATURES)) / 3  # around which features have a standard deviation of one
shares = rng.dirichlet(np.full(CLASSES, 0.4), CLIENTS)


def draw(share: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a client's samples."""
    labels = rng.choice(CLASSES, count, p=share)
    return rng.normal(centres[labels]), labels


train, test = ([draw(share, count) for share in shares] for count in (TRAINING, TESTING))
clients = fedem.Federation.from_parts(train, test=test)

distances = 0.5 * (centres**2).sum(axis=1)
logits = [x @ centres.T - distances + np.log(share) for (x, _), share in zip(test, shares, strict=True)]
best = np.mean([(found.argmax(axis=1) == y).mean() for found, (_, y) in zip(logits, test, strict=True)])

print("         as it is  with shares")
for method in ("fedem", "fedavg", "local"):
    plain, shifted = (
        fedem.train(clients, method, label_shares=on, rounds=ROUNDS, learning_rate=1.0).summary["test_accuracy"]
        for on in (False, True)
    )
    print(f"{method:<8} {plain:>9.3f} {shifted:>12.3f}")
print(f"best     {best:>22.3f}")
