"""Beyond one machine: the same methods over a network, behind a server or among peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedem.core.errors import needed

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

__all__ = ["client_app", "server_app"]


def client_app(plan: str | Path) -> ClientApp:
    """Return Flower's app of a client under the plan in a folder."""
    needed("A Flower app", "flwr", extra="flower")
    from fedem.deploy.flower.client import make_client_app

    return make_client_app(Path(plan))


def server_app(plan: str | Path) -> ServerApp:
    """Return Flower's app of the server under the plan in a folder."""
    needed("A Flower app", "flwr", extra="flower")
    from fedem.deploy.flower.server import make_server_app

    return make_server_app(Path(plan))
