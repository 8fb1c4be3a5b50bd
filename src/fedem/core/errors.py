"""The one error a user is meant to read."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Bad input: the message names the value received and what is allowed."""


def unknown(kind: str, name: object, allowed: Iterable[str]) -> UserError:
    """Return the error for a ``name`` that is not among those ``allowed``."""
    names = sorted(allowed)
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UserError(f"Unknown {kind} {name!r}; allowed: {', '.join(names) or 'none'}.{hint}")
