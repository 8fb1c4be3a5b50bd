"""One body, several heads.

A network is a body, which turns inputs into features, and a head, its last layer, which reads the answer off them.
Often clients agree on the features and differ in the answer. Then there is no need for M whole networks: FedEM's
components can share their body, and each sample trains it, whichever component it belongs to.

Here all clients see the world through one hidden layer. Three kinds of answers are read off it, and each client has a
mixture of them, so the best accuracy is known. The script trains

- one network for all (FedAvg), and one for each client (Local);
- a body for all and a head for each client (FedPer);
- three networks (FedEM), and one body with three heads (fedem-heads);

and prints accuracies and what a client sends in a round. It leaves a picture of the mixture weights, `components.png`:
a column is a client, and colours are components, those learnt matched with the true ones.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import linear_sum_assignment

import fedem

CLASSES, FEATURES, HIDDEN, KINDS, CLIENTS, TRAINING, TESTING, ROUNDS = 4, 30, 12, 3, 60, 120, 200, 60

rng = np.random.default_rng(0)
body = 2 * rng.normal(size=(FEATURES, HIDDEN)) / np.sqrt(FEATURES)
heads = 3 * rng.normal(size=(KINDS, HIDDEN, CLASSES))
weights = rng.dirichlet(np.full(KINDS, 0.2), CLIENTS)


def chances(inputs: np.ndarray) -> np.ndarray:
    """Return the probabilities of the classes under each kind of answer, ``[kinds, samples, classes]``."""
    odds = np.exp(np.tanh(inputs @ body) @ heads)
    return odds / odds.sum(axis=-1, keepdims=True)


def draw(weight: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a client's samples: an input, a kind of answer, a class."""
    inputs, kinds = rng.normal(size=(count, FEATURES)), rng.choice(KINDS, count, p=weight)
    known = chances(inputs)[kinds, np.arange(count)].cumsum(axis=1)
    return inputs, (rng.uniform(size=(count, 1)) > known[:, :-1]).sum(axis=1)


train, test = ([draw(weight, count) for weight in weights] for count in (TRAINING, TESTING))
clients = fedem.Federation.from_parts(train, test=test)
mixed = [np.tensordot(weight, chances(x), 1).argmax(axis=1) for weight, (x, _) in zip(weights, test, strict=True)]
best = np.mean([(found == y).mean() for found, (_, y) in zip(mixed, test, strict=True)])

settings = {"model": {"name": "mlp", "hidden": 48}, "rounds": ROUNDS, "batch_size": 20, "learning_rate": 0.3}
learnt = {}
print("             accuracy   kB sent by a client")
for method in ("fedavg", "local", "fedper", "fedem", "fedem-heads"):
    result = fedem.train(clients, method, evaluate_every=0, **settings)
    sent = result.history[-1]["bytes_up"] / CLIENTS / 1000
    print(f"{method:<12} {result.summary['test_accuracy']:>8.3f} {sent:>21.1f}")
    learnt[method] = [result.client(name).mixture_weights for name in result.names]
print(f"best         {best:>8.3f}")

order = np.lexsort((weights.max(axis=1), weights.argmax(axis=1)))
figure, rows = plt.subplots(3, 1, figsize=(8, 4.5), sharex=True, sharey=True, layout="constrained")
panels = {"true": weights, "fedem": learnt["fedem"], "fedem-heads": learnt["fedem-heads"]}
for axes, (title, shares) in zip(rows, panels.items(), strict=True):
    found = np.array(shares)
    _, match = linear_sum_assignment(weights.T @ found, maximize=True)
    axes.stackplot(np.arange(CLIENTS), found[order][:, match].T, step="mid")
    axes.set_ylabel(title)
rows[-1].set_xlabel("clients")
figure.savefig("components.png")
