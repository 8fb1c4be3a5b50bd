"""What came out of trying a surrogate's conditions."""

from __future__ import annotations

from dataclasses import dataclass

from fedem.errors import UserError


@dataclass(frozen=True)
class Condition:
    """One of the conditions, and where it was tried hardest."""

    name: str
    worst: float
    """the largest violation; infinite where something was not a number"""
    allowed: float
    where: str
    """the place of the largest violation"""

    @property
    def holds(self) -> bool:
        """Whether no violation was larger than allowed."""
        return self.worst <= self.allowed


@dataclass(frozen=True)
class Verdict:
    """Whether g is a partial first-order surrogate of f, as far as trials can tell."""

    surrogate: str
    conditions: tuple[Condition, ...]
    smoothness: float
    """the largest Lipschitz constant of the gradient of g - f that was met, a lower bound of the definition's L"""

    @property
    def holds(self) -> bool:
        """Whether all conditions do."""
        return not self.failures

    @property
    def failures(self) -> tuple[Condition, ...]:
        """Those that don't hold."""
        return tuple(condition for condition in self.conditions if not condition.holds)

    def raise_for_failure(self) -> None:
        """Refuse a surrogate that failed."""
        if self.failures:
            first = self.failures[0]
            raise UserError(
                f"{self.surrogate} is no partial first-order surrogate: {first.name} is violated by {first.worst:.3g} "
                f"at {first.where}; allowed: {first.allowed:.3g}."
            )

    def __str__(self) -> str:
        width = max(len(condition.name) for condition in self.conditions)
        article = "a" if self.holds else "no"
        lines = [f"{self.surrogate} is {article} partial first-order surrogate (worst violation of what is allowed):"]
        for condition in self.conditions:
            outcome = "holds" if condition.holds else f"FAILS at {condition.where}"
            figures = f"{condition.worst:8.2e} of {condition.allowed:.0e}"
            lines.append(f"  {condition.name:<{width}}  {figures}  {outcome}")
        return "\n".join([*lines, f"  the gradient of g - f has a Lipschitz constant of {self.smoothness:.3g} or more"])
