"""Without a server.

In D-FedEM clients send their components to their neighbours in a graph, and average them by a symmetric, doubly
stochastic matrix. A number p says how fast they agree: a round of averaging leaves at most 1 - p of the squared
distance between the clients' components and their mean. p is 1 if everybody talks to everybody, and near 0 if
information travels slowly.

The script trains the same clients over a ring, over a random graph and over the complete graph. For each it prints the
kB sent per round, p, the squared distance after the last round, and the test accuracy. FedEM with a server comes last.
A client's change in a round is scaled by its share of all samples (`"scale": "updates"`). So clients count as with a
server, and the complete graph does the same as a server.
"""

import fedem

ROUNDS = 25

data = fedem.Synthetic(
    num_clients=16, num_components=2, dimension=30, noise_scale=0.0, max_samples=300, num_test=200
).make(seed=0)
federation = data.federation

print("graph        kB sent       p   distance  accuracy")
for name in ("ring", "erdos_renyi", "complete"):
    result = fedem.train(
        federation,
        "dfedem",
        graph={"name": name, "scale": "updates"},
        num_components=2,
        rounds=ROUNDS,
        learning_rate=2.0,
        diagnose_every=ROUNDS,  # measures the distance after the last round
    )
    summary, distance = result.summary, result.history[-1]["consensus"]
    sent, agreement, accuracy = summary["bytes_up_per_round"] / 1e3, summary["consensus_p"], summary["test_accuracy"]
    print(f"{name:<11} {sent:>8.1f}   {agreement:.3f}   {distance:.2e}     {accuracy:.3f}")

summary = fedem.train(federation, "fedem", num_components=2, rounds=ROUNDS, learning_rate=2.0).summary
print(f"{'server':<11} {summary['bytes_up_per_round'] / 1e3:>8.1f} {summary['test_accuracy']:>29.3f}")
