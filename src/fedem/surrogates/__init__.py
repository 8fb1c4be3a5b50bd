"""Federated surrogate optimisation for a user's own objective: try a surrogate, then optimise with it."""

from fedem.core.random import uniform
from fedem.core.tree import Tree
from fedem.methods.base import Batch
from fedem.methods.surrogate import Fixed, Surrogate
from fedem.surrogates.checking import Condition, Verdict, check
from fedem.surrogates.optimising import Outcome, optimise

__all__ = ["Batch", "Condition", "Fixed", "Outcome", "Surrogate", "Tree", "Verdict", "check", "optimise", "uniform"]
