"""Local solvers by name: one step on one batch's objective, as pure functions that vmap can stack."""

from fedem.solvers.optimizers import LBFGS, SGD, SOLVERS, Adam, Newton, Objective, Solver, Various

__all__ = ["LBFGS", "SGD", "SOLVERS", "Adam", "Newton", "Objective", "Solver", "Various"]
