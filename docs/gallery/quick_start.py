"""Quick start.

Forty clients hold data of two kinds, each client in its own proportions. A single model for all must compromise, and a
model for each client sees too few samples. FedEM learns one component for each kind from everybody's samples. Each
client keeps private mixture weights, which say how much of each kind it has.

The script trains FedEM, FedAvg and Local on the same clients, and prints their test accuracies. Beside them is that of
the oracle, which knows the true parameters: nothing can do better on average. Then the script looks at one client: its
learnt mixture weights beside the true ones, and its predictions. Finally the run is saved, and loaded without the data.
"""

from tempfile import TemporaryDirectory

import fedem

data = fedem.Synthetic(num_clients=40, num_components=2, dimension=30, noise_scale=0.0, num_test=200).make(seed=0)

# Batches and learning rates are chosen from the data.
result = fedem.train(data, "fedem", num_components=2, rounds=30)
print(f"FedEM   {result.summary['test_accuracy']:.3f}")
for method, title in (("fedavg", "FedAvg"), ("local", "Local")):
    print(f"{title:<7} {fedem.train(data, method, rounds=30).summary['test_accuracy']:.3f}")
print(f"oracle  {result.summary['oracle_accuracy']:.3f}")

# Which of the learnt components is which of the true ones is arbitrary, so both are sorted.
client = result.client("7")
learnt = client.mixture_weights.sort(descending=True).values
true = data.truth.weights_of(("7",))[0].sort(descending=True).values
print("client 7 learnt the weights", ", ".join(f"{weight:.2f}" for weight in learnt.tolist()))
print("client 7's true weights are", ", ".join(f"{weight:.2f}" for weight in true.tolist()))

inputs, targets = data.federation.test.client(data.federation.position("7"))
probabilities = client.predict(inputs[:3])  # [3, 2]: three samples, two classes
for row, target in zip(probabilities.tolist(), targets[:3].tolist(), strict=True):
    print(f"predicted {row[0]:.2f} and {row[1]:.2f} for the classes 0 and 1; it was {target}")

with TemporaryDirectory() as folder:  # yours will be one that stays
    result.save(f"{folder}/my-run")
    again = fedem.Result.load(f"{folder}/my-run")
print("loaded, it predicts the same:", bool((again.predict("7", inputs) == client.predict(inputs)).all()))
