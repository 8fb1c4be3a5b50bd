"""Eight methods written anew in numpy, a few lines each, from their papers; fedem's rounds agree to 1e-12.

Every client takes ``STEPS`` gradient steps over all of its samples, on logistic regression; three of five clients take
part in a round (all of them on a graph). Clients count by their samples, unless said.

Shapes: n samples of a client, d parameters (intercept first), M components or clusters, T clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from helpers import make_federation, make_training
from least_squares import design

from fedem.core.tree import Tree, take_prefix
from fedem.engines import Batching
from fedem.graphs import Ring
from fedem.methods import Graph
from fedem.runs.rounds import State, Training
from fedem.solvers import SGD
from fedem.solvers.schedules import Constant

Array = np.ndarray
Gradient = Callable[[Array], Array]
ROUNDS, STEPS, RATE, MOMENTUM, DECAY = 4, 3, 0.3, 0.9, 0.01
FEDERATION = make_federation(sizes=(7, 3, 12, 30, 5))
DATA = [design(FEDERATION, position) for position in range(5)]
SIZES = np.array([len(targets) for _, targets in DATA])


def losses(t: int, w: Array) -> Array:
    """-log p(y|x) of client t's samples, ``[n]``."""
    a, y = DATA[t]
    return np.logaddexp(0, np.where(y > 0, -1, 1) * (a @ w))


def gradient(t: int, w: Array, counts: Array | float = 1.0) -> Array:
    """Gradient of the mean of client t's losses, each sample counting as often as ``counts`` says."""
    a, y = DATA[t]
    return a.T @ (counts * (1 / (1 + np.exp(-a @ w)) - y)) / len(y)


def descend(w: Array, slope: Gradient, rate: float = RATE, momentum: float = MOMENTUM, decay: float = DECAY) -> Array:
    """Momentum starts afresh; the decay is part of the gradient."""
    velocity = np.zeros_like(w)
    for _ in range(STEPS):
        velocity = momentum * velocity + slope(w) + decay * w
        w = w - rate * velocity
    return w


def shares(clients: Array) -> Array:
    return SIZES[clients] / SIZES[clients].sum()


def make(method: str, cohort_size: int = 3, solver: SGD | None = None, **settings: object) -> Training:
    batching, solver = Batching(0, local_steps=STEPS), SGD(DECAY, momentum=MOMENTUM) if solver is None else solver
    return make_training(
        method,
        FEDERATION,
        batching=batching,
        solver=solver,
        schedule=Constant(RATE),
        cohort_size=cohort_size,
        **settings,
    )


def rounds(training: Training) -> Iterator[tuple[Array, State]]:
    """Yield each round's clients, and fedem's state after it."""
    state = training.init()
    for _ in range(ROUNDS):
        clients = training.sample(state.round).numpy()
        state, _ = training.step(state)
        yield clients, state


def models(tree: Tree) -> Array:
    """A stack of models, ``[..., d]``."""
    bias, weight = tree["bias"].numpy(), tree["weight"].numpy()
    return np.concatenate([bias, weight.squeeze(-2)], axis=-1)


def agree(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def em_client(t: int, theta: Array, pi: Array, scale: float = 1.0) -> tuple[Array, Array]:
    """Eqs. 4 to 6 of the paper: responsibilities, mixture weights, steps on each component. ``theta`` is ``[M, d]``."""
    joint = pi[:, None] * np.exp(-np.stack([losses(t, w) for w in theta]))
    q = joint / joint.sum(0)
    ends = [descend(w, lambda w, row=row: gradient(t, w, row), scale * RATE) for w, row in zip(theta, q, strict=True)]
    return np.stack(ends), q.mean(1)


def test_fedem() -> None:
    training = make("fedem")
    start = training.init()
    theta, pi = models(start.shared)[0], start.personal["log_weights"].exp().numpy()
    for clients, after in rounds(training):
        ends = []
        for t in clients:
            end, pi[t] = em_client(t, theta, pi[t])
            ends.append(end)
        theta = np.einsum("t,tmd->md", shares(clients), ends)
        agree(models(after.shared)[0], theta)
        agree(after.personal["log_weights"].exp().numpy(), pi)


def test_d_fedem() -> None:
    """A ring of five by Metropolis' rule: a third for oneself and each neighbour. Steps are scaled by T n_t / n."""
    ring = Ring(weights="metropolis", scale="steps")
    training = replace(make("fedem", 5), mixer=Graph(ring))
    start = training.init()
    theta, pi = models(start.shared), start.personal["log_weights"].exp().numpy()
    linked = ring.matrices(FEDERATION.keys, seed=0)[0].numpy() > 0  # who sits beside whom follows from the names
    assert (linked.sum(1) == 3).all()
    mixing = linked / 3
    for _, after in rounds(training):
        for t in range(5):
            theta[t], pi[t] = em_client(t, theta[t], pi[t], SIZES[t] / SIZES.mean())
        theta = np.einsum("ts,smd->tmd", mixing, theta)
        agree(models(after.shared), theta)
        agree(after.personal["log_weights"].exp().numpy(), pi)


def test_ifca() -> None:
    training = make("ifca")
    theta = models(training.init().shared)[0]
    for clients, after in rounds(training):
        choices = np.array([np.argmin([losses(t, w).sum() for w in theta]) for t in clients])
        ends = np.stack(
            [descend(theta[k], lambda w, t=t: gradient(t, w)) for t, k in zip(clients, choices, strict=True)]
        )
        for k in np.unique(choices):
            mine = choices == k
            theta[k] = shares(clients[mine]) @ ends[mine]
        agree(models(after.shared)[0], theta)
        chosen = after.personal["log_weights"].exp().numpy()[clients]
        agree(chosen, np.eye(3)[choices])


def test_ditto() -> None:
    training, pull = make("ditto", pull=0.7), 0.7
    u = models(training.init().shared)[0]
    own: dict[int, Array] = {}
    for clients, after in rounds(training):
        for t in clients:
            own[t] = descend(own.get(t, u), lambda v, t=t, u=u: gradient(t, v) + pull * (v - u))
        u = shares(clients) @ [descend(u, lambda w, t=t: gradient(t, w)) for t in clients]
        agree(models(after.shared)[0], u)
        found = models(take_prefix("own", after.personal))
        agree(found[list(own)], np.stack(list(own.values())))


def test_pfedme() -> None:
    training = make("pfedme", solver=SGD(), pull=2.0, inner_steps=4, inner_rate=0.1, server_rate=0.6)
    u = models(training.init().shared)[0]
    own: dict[int, Array] = {}
    for clients, after in rounds(training):
        ends = []
        for t in clients:
            w = theta = u
            for _ in range(STEPS):
                for _ in range(4):
                    theta = theta - 0.1 * (gradient(t, theta) + 2.0 * (theta - w))
                w = w - RATE * 2.0 * (w - theta)
            ends.append(w)
            own[t] = theta
        u = 0.4 * u + 0.6 * (shares(clients) @ ends)
        agree(models(after.shared)[0], u)
        agree(models(take_prefix("own", after.personal))[list(own)], np.stack(list(own.values())))


@pytest.mark.parametrize("adaptive", [True, False])
def test_apfl(adaptive: bool) -> None:
    training = make("apfl", solver=SGD(), alpha=0.4, adaptive=adaptive)
    u = models(training.init().shared)[0]
    own: dict[int, Array] = {}
    alpha = np.full(5, 0.4)
    for clients, after in rounds(training):
        ends = []
        for t in clients:
            w, v = u, own.get(t, u)
            for step in range(STEPS):
                blend = alpha[t] * v + (1 - alpha[t]) * w
                if adaptive and step == 0:
                    alpha[t] = np.clip(alpha[t] - RATE * gradient(t, blend) @ (v - w), 0, 1)
                    blend = alpha[t] * v + (1 - alpha[t]) * w
                v, w = v - RATE * alpha[t] * gradient(t, blend), w - RATE * gradient(t, w)
            own[t] = v
            ends.append(w)
        u = shares(clients) @ ends
        agree(models(after.shared)[0], u)
        agree(after.personal["alpha"].numpy(), alpha)
        agree(models(take_prefix("own", after.personal))[list(own)], np.stack(list(own.values())))


def test_scaffold() -> None:
    training = make("scaffold", solver=SGD(), server_rate=0.8)
    u = models(take_prefix("model", training.init().shared))[0]
    control, controls = np.zeros_like(u), np.zeros((5, len(u)))
    for clients, after in rounds(training):
        ends, changes = [], []
        for t in clients:
            w = descend(u, lambda w, t=t, c=control - controls[t]: gradient(t, w) + c, momentum=0, decay=0)
            ends.append(w)
            changes.append((u - w) / (STEPS * RATE) - control)
            controls[t] += changes[-1]
        u = u + 0.8 * (shares(clients) @ ends - u)
        control = control + SIZES[clients].sum() / SIZES.sum() * (shares(clients) @ changes)
        agree(models(take_prefix("model", after.shared))[0], u)
        agree(models(take_prefix("control", after.shared))[0], control)
        agree(models(after.personal), controls)


@pytest.mark.parametrize("q", [0.0, 0.5, 3.0])
def test_qffl(q: float) -> None:
    training = make("qffl", solver=SGD(), q=q)
    u = models(training.init().shared)[0]
    for clients, after in rounds(training):
        push, curvature = np.zeros_like(u), 0.0
        for t, share in zip(clients, shares(clients), strict=True):
            change = (u - descend(u, lambda w, t=t: gradient(t, w), momentum=0, decay=0)) / RATE
            loss = losses(t, u).mean()
            push += share * loss**q * change
            curvature += share * (q * loss ** (q - 1) * change @ change + loss**q / RATE)
        u = u - push / curvature
        agree(models(after.shared)[0], u)
