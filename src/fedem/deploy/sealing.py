"""The secret of a meeting: what peers read at the meeting place counts only if one of them wrote it.

Torch's agents unpickle what lies there, which runs whatever code its writer chose. A seal (HMAC-SHA256), checked first,
leaves that to those who have the key of the plan.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from fedem.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

KEY = "meeting.key"
_BYTES = 32
"""of a key, and of a seal"""


def make_key(folder: Path) -> None:
    """Write a new key into the folder of a plan; only this user may read it."""
    descriptor = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(_BYTES) + "\n")


def read_key(folder: Path) -> bytes:
    """Return the key of the plan in a folder."""
    path = folder / KEY
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no {KEY}, the secret by which peers know each other; `fedem peer plan` makes one for all."
        ) from None
    except ValueError:
        key = b""
    if len(key) != _BYTES:
        raise UserError(f"{path} is no key; allowed: the {2 * _BYTES} hexadecimal digits that `fedem peer plan` wrote.")
    return key


class Sealed:
    """A backend of torch's rendezvous whose states are sealed: it hands out none that somebody without the key wrote.

    Raises:
        RendezvousStateError: a seal is wrong.

    """

    def __init__(self, backend: RendezvousBackend, key: bytes):
        self._backend, self._key = backend, key

    @property
    def name(self) -> str:
        """What torch calls the backend."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; None while there is no state."""
        found = self._backend.get_state()
        return None if found is None else (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that ``token`` is of; returns the state that is there now, and whether it is this one."""
        found = self._backend.set_state(self._seal(state) + state, token)
        return None if found is None else (self._opened(found[0]), *found[1:])

    def _seal(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _opened(self, sealed: bytes) -> bytes:
        from torch.distributed.elastic.rendezvous.api import RendezvousStateError

        seal, state = sealed[:_BYTES], sealed[_BYTES:]
        if not hmac.compare_digest(seal, self._seal(state)):
            raise RendezvousStateError("The seal is wrong.")
        return state
