"""Federated surrogate optimisation for a user's own objective: try a surrogate, then optimise with it."""

from __future__ import annotations

from fedem.methods.surrogate import Fixed, Surrogate
from fedem.surrogates.checking import Condition, Verdict, check
from fedem.surrogates.optimising import Outcome, optimise

__all__ = ["Condition", "Fixed", "Outcome", "Surrogate", "Verdict", "check", "optimise"]
