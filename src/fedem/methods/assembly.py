"""Putting a method together: its algorithm and mixer, with whatever a run asks for around them.

A graph in the place of the server, label shares, layers that stay with their clients, smaller messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedem.core.errors import UserError
from fedem.core.settings import Settings
from fedem.graphs import GRAPHS, Topology
from fedem.methods.base import Algorithm
from fedem.methods.decentralised import Graph
from fedem.methods.mixer import Mixer
from fedem.methods.registry import Method, find_method, names_where
from fedem.methods.wrappers.compression import Codec, Compression
from fedem.methods.wrappers.label_shares import LabelShares
from fedem.methods.wrappers.local_layers import LocalLayers
from fedem.models import Model
from fedem.models.losses import CLASSES
from fedem.solvers import SOLVERS, Solver


class Assembled(NamedTuple):
    """A method that is ready to train."""

    algorithm: Algorithm
    mixer: Mixer
    codec: Codec | None = None
    """writes the messages, where they are compressed"""


def assemble(
    method: str,
    model: Model,
    solver: Solver,
    settings: dict[str, Any],
    *,
    topology: Topology | None = None,
    label_shares: bool = False,
    local_layers: str = "none",
    compression: Compression | None = None,
) -> Assembled:
    """Build the method called ``method``, and put around it what the run asks for; refuse what does not go together.

    Args:
        method: a name in the table.
        model: what clients train; with ``label_shares`` one with room for them
            (:func:`~fedem.methods.wrappers.label_shares.shifted`).
        solver: of the clients.
        settings: of the method, checked.
        topology: a graph to average over instead of a server (graph.name); None for none.
        label_shares: whether clients shift outputs by the shares of their labels (run.label_shares).
        local_layers: "none", or "batch_norm" for FedBN (run.local_layers).
        compression: what messages leave out ([compression]); None for nothing.

    """
    row, compression = find_method(method), compression or Compression()
    algorithm, mixer = row.build(model, solver, settings)
    mixer = _over_graph(row, algorithm, mixer, topology, local_layers)
    if label_shares:
        _check_label_shares(row, model, compression)
    if local_layers == "batch_norm":
        mixer = _with_local_layers(row, model, mixer)
    if not compression.is_on:
        return Assembled(LabelShares.of(algorithm) if label_shares else algorithm, mixer)
    if not mixer.is_server_mean:
        graph = "none" if topology is None else _name_of(topology, GRAPHS)
        raise UserError(
            f"[compression] is on, but with method {method}, graph.name {graph} and run.local_layers {local_layers} "
            f"clients don't all update one model; allowed with it: {names_where(_compressible)}, graph.name none and "
            "run.local_layers none."
        )
    return Assembled(algorithm, mixer, _codec(algorithm, settings, compression))


def _over_graph(row: Method, algorithm: Algorithm, mixer: Mixer, topology: Topology | None, local_layers: str) -> Mixer:
    """Put a graph in the place of the server, if one is asked for."""
    if topology is None:
        if row.mixer.over_graph:
            raise UserError(f"Method {row.name} needs a graph, and graph.name is 'none'; allowed: {', '.join(GRAPHS)}.")
        return mixer
    if not row.goes_over_graph:
        raise UserError(
            f"graph.name is {_name_of(topology, GRAPHS)!r}, but method {row.name} needs a server; allowed over a "
            "graph, since their clients send a model to be averaged: "
            f"{names_where(lambda other: other.goes_over_graph)}."
        )
    _check_scale(row, algorithm, topology)
    if topology.start == "apart" and local_layers != "none":
        raise UserError(
            f"graph.start is 'apart' and run.local_layers {local_layers!r}, but layers that stay with their "
            "clients start alike; allowed: graph.start alike, or run.local_layers none."
        )
    return Graph(topology)


def _check_scale(row: Method, algorithm: Algorithm, topology: Topology) -> None:
    """Refuse to scale steps where the learning rate is not their length, or theirs alone."""
    if topology.scale != "steps":
        return
    allowed = "allowed: updates, which scales the sum of all steps of a round, or none."
    if not algorithm.solver.obeys_rate:
        solver = _name_of(algorithm.solver, SOLVERS)
        raise UserError(f"graph.scale is 'steps', but solver {solver} has steps without a learning rate; {allowed}")
    if algorithm.steps_personal:
        raise UserError(
            f"graph.scale is 'steps', but clients of method {row.name} train models of their own with the same "
            f"learning rate; {allowed}"
        )


def _check_label_shares(row: Method, model: Model, compression: Compression) -> None:
    """Refuse other models and messages than averaged copies of u, rounded messages, and targets that are not labels."""
    allowed = f"allowed with it: {names_where(lambda other: other.takes_label_shares)}."
    if not row.mixer.averages:
        raise UserError(f"run.label_shares is true, but models of method {row.name} are not averages; {allowed}")
    if compression.is_on:
        raise UserError("run.label_shares is true and [compression] is on; allowed: one of them.")
    if not row.algorithm.takes_label_shares:
        raise UserError(
            f"run.label_shares is true, but clients of {row.algorithm.__name__} have models or messages of their own; "
            f"{allowed}"
        )
    if model.loss.task != CLASSES:
        raise UserError(
            f"run.label_shares is true, but targets of {type(model.loss).__name__} are not labels; allowed: false, or "
            "loss cross_entropy or logistic."
        )


def _with_local_layers(row: Method, model: Model, mixer: Mixer) -> Mixer:
    """Keep batch normalisations with their clients (FedBN)."""
    if not model.normalising:
        raise UserError("run.local_layers is 'batch_norm', but the model normalises no batches; allowed: none.")
    if model.normalising >= model.trainable:
        raise UserError(
            "run.local_layers is 'batch_norm', but the model trains nothing else, so clients would share nothing; "
            "allowed: none."
        )
    if not row.algorithm.uploads_model:
        raise UserError(
            f"run.local_layers is 'batch_norm', but clients of method {row.name} upload more or less than their model; "
            f"allowed with it: {names_where(lambda other: other.algorithm.uploads_model)}."
        )
    return LocalLayers(mixer, model.normalising)


def _compressible(row: Method) -> bool:
    return row.is_compressible


def _codec(algorithm: Algorithm, settings: Mapping[str, Any], compression: Compression) -> Codec:
    """Return what writes the messages of a method whose server averages."""
    name, threshold = type(algorithm).__name__, compression.threshold
    if not algorithm.compressible:
        raise UserError(
            f"Uploads of {name} can't be compressed: its clients send more or less than a model to be averaged; "
            f"allowed: [compression] off, or method {names_where(_compressible)}."
        )
    if threshold and not algorithm.is_mixture:
        raise UserError(
            f"compression.threshold is {threshold:g}, but {name} has no mixture weights; allowed: 0, or method "
            f"{names_where(lambda row: row.is_compressible and row.algorithm.is_mixture)}."
        )
    if algorithm.is_mixture and threshold >= 1 / settings["num_components"]:
        count = settings["num_components"]
        raise UserError(
            f"compression.threshold is {threshold:g}, and with {count} components all weights of a client may be "
            f"below; allowed: below {1 / count:.4g}."
        )
    return Codec(compression, algorithm.model, int(algorithm.is_mixture))


def _name_of(chosen: Settings, table: Mapping[str, type[Settings]]) -> str:
    """Return the name that a class has in a table."""
    return next((name for name, kind in table.items() if kind is type(chosen)), type(chosen).__name__)
