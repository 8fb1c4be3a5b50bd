"""Clients unseen in training.

A client that comes after training needs no training of its own: the components are there, and only its mixture weights
have to be fitted. A handful of samples is enough for that. Without samples it takes the uniform mixture.

The script holds a quarter of the clients out and trains FedEM on the others. Then each newcomer fits its weights to 0,
5, 20 and all of its samples. The script prints the newcomers' mean accuracy on test samples, first with one update of
the weights, as in the paper, and then with as many as it takes to converge.
"""

import torch

import fedem

SHOWN = (0, 5, 20, None)  # None for all

made = fedem.Synthetic(num_clients=60, num_components=2, dimension=30, noise_scale=0.0, num_test=200).make(seed=0)
federation = made.federation.hold_out(0.25, seed=0)
newcomers = federation.unseen
print(f"{federation.num_clients} clients train, {newcomers.num_clients} come later")

result = fedem.train(federation, "fedem", num_components=2, rounds=40, learning_rate=2.0)
print(f"those who trained: {result.summary['test_accuracy']:.3f}")


def mean_accuracy(shown: int | None, max_iterations: int) -> float:
    """Return the newcomers' mean test accuracy, each fitted on its first ``shown`` samples."""
    accuracies = []
    for position in range(newcomers.num_clients):
        inputs, targets = newcomers.train.client(position)
        personal = result.personalize(inputs[:shown], targets[:shown], max_iterations=max_iterations)
        test_inputs, test_targets = newcomers.test.client(position)
        accuracies.append((personal.predict(test_inputs).argmax(1) == test_targets).double().mean())
    return float(torch.stack(accuracies).mean())


print("samples   one update   converged")
for shown in SHOWN:
    label = "all" if shown is None else shown
    print(f"{label:>7}   {mean_accuracy(shown, 1):10.3f}   {mean_accuracy(shown, 0):9.3f}")
