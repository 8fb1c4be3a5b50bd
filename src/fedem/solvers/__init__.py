"""Local solvers by name: one step on one batch's objective, as pure functions that vmap can stack."""

from __future__ import annotations

from fedem.solvers.optimizers import LBFGS, MEMBERS, SGD, Adam, Newton, Objective, Solver, Various

__all__ = ["LBFGS", "SGD", "SOLVERS", "Adam", "Newton", "Objective", "Solver", "Various"]

SOLVERS: dict[str, type[Solver]] = MEMBERS | {"various": Various}
