"""Graphs of clients, by name, and the matrices by which neighbours average."""

from fedem.graphs.base import Consensus, Topology, among
from fedem.graphs.topologies import Complete, ErdosRenyi, File, Grid, Regular, Ring, SmallWorld, StarGraph
from fedem.graphs.weights import Fastest, check_mixing, fastest_mixing, second_modulus

GRAPHS: dict[str, type[Topology]] = {
    "erdos_renyi": ErdosRenyi,
    "ring": Ring,
    "grid": Grid,
    "complete": Complete,
    "star": StarGraph,
    "small_world": SmallWorld,
    "regular": Regular,
    "file": File,
}

__all__ = [
    "GRAPHS", "Complete", "Consensus", "ErdosRenyi", "Fastest", "File", "Grid", "Regular", "Ring", "SmallWorld",
    "StarGraph", "Topology", "among", "check_mixing", "fastest_mixing", "second_modulus",
]  # fmt: skip
