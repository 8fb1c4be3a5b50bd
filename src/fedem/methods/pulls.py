"""Models of the clients' own, pulled towards each other after local training (L2SGD, FedU).

Shapes: T clients, C clients of the cohort.
"""

import math
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from fedem.core.random import derive, uniform
from fedem.core.tree import Tree, tree_map
from fedem.methods.base import Method, register
from fedem.methods.fedavg import FedAvg
from fedem.methods.mixer import Mixed, OwnGroups, Round, RoundPlan, Uploads, gather

_LOCAL_RUN, _MEAN_RUN = 1, 2


@final
@dataclass(frozen=True)
class Loopless(OwnGroups):
    """L2SGD: gradient steps and steps towards the mean, in random order.

    Hanzely, Richtarik: Federated Learning of a Mixture of Global and Local Models, 2020. The objective is
    mean_t f_t(x_t) + penalty/2 mean_t |x_t - mean|^2. Before every step a coin is thrown, the same for all: with
    probability p it is a step towards the mean, x_t <- (1 - a) x_t + a mean, else a gradient step. Steps towards the
    mean leave it where it is, so only the first of a run of them needs a message. A round here is a run of gradient
    steps and the run of steps towards the mean that ends it: both have geometrically distributed lengths. With a
    learning rate eta of the gradient steps, which is the paper's alpha/(n (1 - p)), a = eta penalty (1 - p) / p.

    Attributes:
        penalty: lambda, how strongly clients are pulled towards their mean; 0 is Local.
        probability: p, of a step towards the mean.
    """

    penalty: float = field(default=0.1, metadata={"min": 0})
    probability: float = field(default=0.3, metadata={"above": 0, "below": 1})

    def plan(self, shared: Tree, memory: Tree, this: Round) -> RoundPlan:
        steps = _run_length(this.key, _LOCAL_RUN, self.probability)
        return super().plan(shared, memory, this)._replace(num_steps=steps)

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        once = min(1.0, this.learning_rate * self.penalty * (1 - self.probability) / self.probability)
        strength = 1 - (1 - once) ** _run_length(this.key, _MEAN_RUN, 1 - self.probability)
        return Mixed(this.clients, pulled(shared, this.clients, gather(uploads), strength), len(this.clients)), memory


@final
@dataclass(frozen=True)
class Laplacian(OwnGroups):
    """FedU: after R local steps each model moves towards the others.

    Dinh, Vu, Tran, Dao, Zhang: FedU: A Unified Framework for Federated Multi-Task Learning with Laplacian
    Regularization, 2021. The objective is sum_t f_t(w_t) + penalty/2 sum a_ts |w_t - w_s|^2, the last sum over pairs
    of clients, and the server's step w_t <- w_t - eta penalty R sum_s a_ts (w_t - w_s). Here all clients are related
    alike, a_ts = 1/T.

    Attributes:
        penalty: the weight of the regularisation, times R.
    """

    penalty: float = field(default=1.0, metadata={"min": 0})

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        strength = min(1.0, this.learning_rate * self.penalty)
        return Mixed(this.clients, pulled(shared, this.clients, gather(uploads), strength), len(this.clients)), memory


def pulled(shared: Tree, clients: Tensor, uploads: Tree, strength: float) -> Tree:
    """Move uploads ``[C, ...]`` by ``strength`` towards the mean of all T models, the others' being as last seen."""

    def one(group: Tensor, mine: Tensor) -> Tensor:
        if not mine.is_floating_point():
            return mine
        everyone = group.index_copy(0, clients.to(group.device), mine)
        return mine + strength * (everyone.mean(0, keepdim=True) - mine)

    return tree_map(one, shared, uploads)


def _run_length(key: int, purpose: int, ends: float) -> int:
    """Draw the length of a run that ends after each element with probability ``ends``, at least 1."""
    number = float(uniform(derive(key, purpose), 1))
    return 1 + int(math.log(number) / math.log1p(-ends)) if ends < 1 else 1


register(
    Method("l2sgd", FedAvg, Loopless, title="L2SGD", summary="own models, pulled towards their mean at random times",
           paper="Hanzely, Richtarik 2020", personal="a model (sent)", unseen="fine-tunes the mean of all models",
           position=120),
    Method("fedu", FedAvg, Laplacian, title="FedU", summary="own models under Laplacian regularisation",
           paper="Dinh et al. 2021", personal="a model (sent)", unseen="fine-tunes the mean of all models",
           position=200),
)  # fmt: skip
