"""Federated surrogate optimisation for a user's own objective: try a surrogate, then optimise with it."""

from fedem.algorithms.surrogate import Fixed, Surrogate
from fedem.surrogates.checking import check
from fedem.surrogates.optimising import Outcome, optimise
from fedem.surrogates.verdict import Condition, Verdict

__all__ = ["Condition", "Fixed", "Outcome", "Surrogate", "Verdict", "check", "optimise"]
