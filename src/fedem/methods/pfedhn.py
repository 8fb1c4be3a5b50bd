"""pFedHN: the server owns a network that makes each client's model from an embedding of the client.

Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021 (Alg. 1). Clients never
see the network: they download a model and upload it trained. The difference is the gradient that goes back into it.

Shapes: T clients, C clients of the cohort, E numbers in an embedding, H hidden units, P parameters.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.func import vjp

from fedem.core.random import derive, uniform
from fedem.core.tree import Tree, add_prefix, row_of, take_prefix, tree_flat, tree_map
from fedem.methods.base import Method, register
from fedem.methods.fedavg import FedAvg
from fedem.methods.mixer import Mixed, OneGroup, Round, Served, Star, Start, Uploads, Welcome, by_samples, gather

_EMBEDDING, _FIRST, _LAST = 1, 2, 3


@final
@dataclass(frozen=True)
class Hypernetwork(OneGroup):
    """One group: the last layer's bias, a model itself. The memory: the other layers, and the clients' embeddings.

    A client's model is base + last tanh(first embedding + bias).

    Attributes:
        embedding_size: E, numbers in the embedding of a client.
        hidden_size: H, units of the hidden layer of the network that makes models.
        server_rate: step of the network along the mean of the clients' gradients; for the base alone, 1 is FedAvg.
        embedding_rate: step of a client's embedding along its own gradient.
    """

    embedding_size: int = field(default=8, metadata={"min": 1})
    hidden_size: int = field(default=32, metadata={"min": 1})
    server_rate: float = field(default=0.5, metadata={"above": 0})
    embedding_rate: float = field(default=0.1, metadata={"min": 0})

    def init(self, start: Start) -> tuple[Tree, Tree]:
        shared, seed, like = start.shared, start.seed, tree_flat(start.shared)
        size, hidden = self.embedding_size, self.hidden_size

        def draw(key: Tensor, *shape: int, scale: float) -> Tensor:
            numbers = uniform(key, int(torch.Size(shape).numel()))
            return (scale * (2 * numbers - 1)).reshape(*key.shape, *shape).to(like)

        first = draw(derive(seed, _FIRST), hidden, size, scale=(3 / size) ** 0.5)
        network = {"first": first, "bias": like.new_zeros(hidden)}
        for index, name in enumerate(sorted(start.trained)):
            width = shared[name].numel()
            network[f"last/{name}"] = draw(derive(seed, _LAST, index), width, hidden, scale=hidden**-0.5)
        embeddings = draw(derive(start.keys, _EMBEDDING, seed), size, scale=1.0)
        return super().init(start)[0], add_prefix("network", network) | {"embeddings": embeddings}

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        embeddings = memory["embeddings"][clients.to(memory["embeddings"].device)]
        return Served(_models(shared, take_prefix("network", memory), embeddings), torch.arange(len(clients)))

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        trees, clients = gather(uploads), this.clients.to(memory["embeddings"].device)
        network, embeddings = take_prefix("network", memory), memory["embeddings"]
        trained = take_prefix("last", network)
        base = {name: shared[name] for name in trained}
        made, backward, *_ = vjp(_make, base, network, embeddings[clients])
        change = tree_map(lambda old, new: old - new, made, {name: trees[name] for name in made})
        share = by_samples(this)[0].to(embeddings)
        base_slope, slope, _ = backward(tree_map(lambda leaf: leaf * row_of(share, leaf), change))
        _, _, own = backward(change)
        network = tree_map(lambda value, g: value - self.server_rate * g, network, slope)
        embeddings = embeddings.index_add(0, clients, own, alpha=-self.embedding_rate)
        base = tree_map(lambda value, g: value - self.server_rate * g, base, base_slope)
        # What is not trained is averaged, as a server does.
        rest = {name: leaf for name, leaf in trees.items() if name not in trained}
        mixed, _ = Star().mix(shared, memory, this, [(torch.arange(len(clients)), rest)])
        memory = add_prefix("network", network) | {"embeddings": embeddings}
        return mixed._replace(means=base | mixed.means), memory

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        """A newcomer learns an embedding, from the mean of those there are; the network stays (the paper's rule)."""
        network = take_prefix("network", memory)
        base = {name: shared[name] for name in take_prefix("last", network)}

        def learn(embeddings: Tensor, uploads: Tree) -> tuple[Tensor, Tree]:
            made, backward, *_ = vjp(lambda vectors: _make(base, network, vectors), embeddings)
            (slope,) = backward(tree_map(lambda old, new: old - new, made, {name: uploads[name] for name in made}))
            embeddings = embeddings - self.embedding_rate * slope
            return embeddings, _models(shared, network, embeddings)

        mean = memory["embeddings"].mean(0, keepdim=True)
        return Welcome(_models(shared, network, mean), kept=mean, learn=learn)


def _models(shared: Tree, network: Tree, embeddings: Tensor) -> Tree:
    """Return the whole models of ``embeddings`` ``[C, E]``; what is not trained is the same for all. ``[C, ...]``."""
    rest = tree_map(lambda leaf: leaf.expand(len(embeddings), *leaf.shape[1:]), shared)
    return rest | _make({name: shared[name] for name in take_prefix("last", network)}, network, embeddings)


def _make(base: Tree, network: Tree, embeddings: Tensor) -> Tree:
    """Return the trained leaves of the models of ``embeddings`` ``[C, E]``, ``[C, ...]``."""
    hidden = torch.tanh(embeddings @ network["first"].T + network["bias"])
    # Scaled so that a step of the last layer and one of the base are of a size, however many hidden units there are.
    hidden = hidden / hidden.shape[1] ** 0.5
    return {
        name: base[name] + (hidden @ last.T).reshape(-1, *base[name].shape[1:])
        for name, last in take_prefix("last", network).items()
    }


register(Method("pfedhn", FedAvg, Hypernetwork, title="pFedHN",
                summary="a server's network makes each client's model from an embedding", paper="Shamsian et al. 2021",
                unseen="learns an embedding, the network fixed", position=210))  # fmt: skip
