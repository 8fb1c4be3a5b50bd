"""Before anything is timed: the plain loops and the engine must do the same mathematics."""

from __future__ import annotations

import torch

from benchmarks.engine import LEARNING_RATES, as_server, make_training
from benchmarks.plain_loop import LOOPS, Server, run_round
from fedem.data.federation import Federation
from fedem.engines import Batching

TOLERANCE = 1e-4
_LOCAL_EPOCHS = (1, 3)  # a single step would not show a difference in momentum


class DisagreementError(RuntimeError):
    """A loop and the engine don't do the same mathematics, so comparing their speed means nothing."""


def check_agreement(method: str, federation: Federation) -> dict[str, float]:
    """Compare one round from the same start, with full-batch steps so that shuffling does not matter.

    Returns:
        the largest difference of each loop from the engine, over components and mixture weights

    """
    differences = dict.fromkeys(LOOPS, 0.0)
    for local_epochs in _LOCAL_EPOCHS:
        training = make_training(method, federation, Batching(batch_size=0, local_epochs=local_epochs))
        state = training.init()
        server = as_server(state, federation.num_clients)
        expected = as_server(training.step(state)[0], federation.num_clients)
        for name, prepare in LOOPS.items():
            clients = prepare(federation.train, 0)
            outcome = run_round(server, clients, LEARNING_RATES[method], local_epochs)
            difference = _distance(outcome, expected)
            # Written so that NaN does not pass.
            if not difference <= TOLERANCE:
                raise DisagreementError(
                    f"{name} and the stacked engine differ by {difference:.1e} after a round of {method} with "
                    f"{local_epochs} full-batch step(s); allowed: {TOLERANCE:g}."
                )
            differences[name] = max(differences[name], difference)
    return differences


def _distance(first: Server, second: Server) -> float:
    pairs = [(first.weights, second.weights)]
    for one, other in zip(first.components, second.components, strict=True):
        pairs += zip(one.parameters(), other.parameters(), strict=True)
    with torch.no_grad():
        # torch's maximum, unlike Python's, is NaN as soon as anything is.
        return float(torch.stack([(one - other).abs().max() for one, other in pairs]).max())
