"""The table of graphs, and how fast clients agree over one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedem.graphs import GRAPHS, Topology
from fedem.randomness import client_keys
from fedem.report.methods import flowing, paragraphs_of, plain, settings_of, settings_table
from fedem.rounds import mixer_seed
from fedem.settings import names_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def graphs_table() -> Table:
    """Return a row a graph."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("graph", no_wrap=True, style="bold")
    table.add_column("what it is")
    table.add_column("settings of its own")
    common = names_of(Topology)
    for name, kind in GRAPHS.items():
        own = [setting for setting in names_of(kind) if setting not in common]
        table.add_row(name, _about(kind).partition("\n")[0], ", ".join(own) or "-")
    return table


def graph_pages(name: str) -> Iterator[RenderableType]:
    """Yield all there is to say of the graph called ``name``."""
    from rich.text import Text

    kind = GRAPHS[name]
    yield Text.assemble((name, "bold"), "\n", _about(kind))
    yield settings_table("Settings: --set graph.KEY=VALUE", settings_of(kind))


def _about(kind: type[Topology]) -> str:
    return plain("\n\n".join(map(flowing, paragraphs_of(kind))))


def describe(topology: Topology, num_clients: int, seed: int) -> Table:
    """Build the graph as a run with this seed would for clients called 0, 1, ..., and tell its figures."""
    from rich.table import Table

    keys = client_keys([str(index) for index in range(num_clients)])
    source = mixer_seed(seed)
    matrices = topology.matrices(keys, source)
    pairs = np.unique(np.concatenate(topology.edges(keys, source)), axis=0)
    degrees = np.bincount(pairs.flatten(), minlength=num_clients)
    found = topology.consensus(matrices, keys)
    about = "about " if found.is_estimate else ""
    rounds = found.tau * math.log(2) / -math.log1p(-found.p) if found.p < 1 else 0.0
    often = "each round" if found.tau == 1 else f"every {found.tau} rounds"
    halved = f"every {about}{rounds:.3g} rounds" if rounds > found.tau else often
    table = Table.grid(padding=(0, 2, 0, 0))
    for label, value in {
        "clients, links": f"{num_clients:,}, {len(pairs):,}",
        "neighbours": f"{degrees.min()} to {degrees.max()}, {degrees.mean():.1f} on average",
        "own weight": _range(matrices.diagonal(dim1=1, dim2=2)),
        "spectral gap": f"{found.spectral_gap:.6f}",
        "consensus": f"p = {about}{found.p:.6f}, tau = {found.tau}",
        "disagreement halves": f"{halved}, in squared distance",
    }.items():
        table.add_row(label, value)
    return table


def _range(values: torch.Tensor) -> str:
    return f"{float(values.min()):.4f} to {float(values.max()):.4f}"
