"""Torch's store of keys and values, by which processes find each other."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

_BACKLOG = 1024
"""processes that may knock at the same time"""


def open_store(host: str, port: int, seconds: float = 300.0) -> Any:
    """Open a store on one address of this machine (port 0: any); it lives as long as what is returned.

    Raises:
        OSError: the system does not give the address or the port.

    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Left to itself, the store listens on all addresses, whichever it is given.
    listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    given = listener.getsockname()[1]
    return _store(host, given, seconds, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def reach_store(host: str, port: int, seconds: float) -> Any:
    """Connect to a store, which may be opened meanwhile."""
    return _store(host, port, seconds, is_master=False)


def _store(host: str, port: int, seconds: float, **options: Any) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in its list

    return TCPStore(host, port, timeout=timedelta(seconds=seconds), **options)
