"""Putting a method together: its algorithm and mixer, with whatever a run asks for around them.

A graph in the place of the server, label shares, layers that stay with their clients, smaller messages, a server that
steps by an optimiser of its own, uploads that are guarded before they are averaged, solvers that go on from round to
round.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedem.core.errors import UserError
from fedem.core.settings import Settings
from fedem.graphs import GRAPHS, Topology
from fedem.methods.base import AUTO, Algorithm, Method, find_method, names_where
from fedem.methods.decentralised import Graph
from fedem.methods.mixer import Mixer
from fedem.methods.wrappers.compression import Codec, Compression
from fedem.methods.wrappers.defences import DEFENCES, Blocks, Defence, DefendedGraph, DefendedServer
from fedem.methods.wrappers.kept_momentum import KeptMomentum
from fedem.methods.wrappers.label_shares import LabelShares
from fedem.methods.wrappers.local_layers import LocalLayers
from fedem.methods.wrappers.server_steps import SERVER_RULES, ServerRule, ServerSteps
from fedem.models import Model
from fedem.models.losses import CLASSES
from fedem.solvers import SOLVERS, Solver


class Around(NamedTuple):
    """What a run puts around a method."""

    topology: Topology | None = None  # a graph to average over instead of a server
    label_shares: bool = False  # the model then has room for them: fedem.methods.wrappers.label_shares.shifted
    local_layers: str = "none"  # in the place of the method's own; "none": those that it has, if any
    compression: Compression = Compression()
    server: ServerRule | None = None  # how the server steps towards the mean, where it does not just take it
    defence: Defence | None = None  # how uploads are kept from spoiling the mean
    keep_momentum: bool = False  # whether local solvers go on from round to round


class Assembled(NamedTuple):
    """A method that is ready to train."""

    algorithm: Algorithm
    mixer: Mixer
    codec: Codec | None = None  # writes the messages, where they are compressed


def assemble(method: str, model: Model, solver: Solver, settings: dict[str, Any], around: Around) -> Assembled:
    """Build a method of checked settings, and put around it what the run asks for; refuse what does not go together."""
    row, (topology, label_shares, asked, compression, server, defence, keep_momentum) = find_method(method), around
    local_layers = row.layers_kept(asked)
    problem = _problem(row, model, solver, settings, around)
    if problem:
        raise UserError(f"{problem}.")
    algorithm, mixer = row.build(model, solver, settings)
    blocks = Blocks.of_method(algorithm)
    if topology is not None:
        mixer = Graph(topology) if defence is None else DefendedGraph(Graph(topology), defence, blocks)
    elif defence is not None:
        mixer = DefendedServer(mixer, defence, blocks, of_updates=compression.is_on)
    if server is not None:
        mixer = ServerSteps(mixer, server, of_updates=compression.is_on)
    if local_layers != "none":
        mixer = LocalLayers(mixer, model.leaves_called(local_layers))
    if label_shares:
        algorithm = LabelShares.of(algorithm)
    codec = Codec(compression, model, int(algorithm.is_mixture), algorithm.common) if compression.is_on else None
    if keep_momentum:
        algorithm = KeptMomentum.of(algorithm)
    return Assembled(algorithm, mixer, codec)


def _problem(row: Method, model: Model, solver: Solver, settings: Mapping[str, Any], around: Around) -> str:
    """Say what does not go together, from what the method declares, and what is allowed; nothing if all does."""
    topology, label_shares, asked, compression, server, defence, keep_momentum = around
    name, kind, threshold, local_layers = row.name, row.algorithm, compression.threshold, row.layers_kept(asked)
    graph = "none" if topology is None else _name_of(topology, GRAPHS)
    compressible = names_where(lambda other: other.is_compressible)
    if topology is None and row.mixer.over_graph:
        return f"Method {name} needs a graph, and graph.name is 'none'; allowed: {', '.join(GRAPHS)}"
    if topology is not None:
        if not row.goes_over_graph:
            allowed = "allowed over a graph, since their clients send a model to be averaged"
            names = names_where(lambda other: other.goes_over_graph)
            return f"graph.name is {graph!r}, but method {name} needs a server; {allowed}: {names}"
        if settings.get("num_components") == AUTO:
            asked = (
                f"method.num_components is {AUTO!r}, but graph.name is {graph!r}, and a server decides on components"
            )
            return f"{asked}; allowed over a graph: a number, at least 1"
        if settings.get("weighting", "samples") != "samples":
            asked = f"method.weighting is {settings['weighting']!r}, which is of a server, but graph.name is {graph!r}"
            return f"{asked}; allowed: samples; with graph.scale none clients count alike over a graph"
        if topology.scale == "steps" and (kind.steps_personal or not solver.obeys_rate):
            # The learning rate must be the length of their steps, and of no others.
            reason = f"clients of method {name} train models of their own with the same learning rate"
            if not solver.obeys_rate:
                reason = f"solver {_name_of(solver, SOLVERS)} has steps without a learning rate"
            allowed = "allowed: updates, which scales the sum of all steps of a round, or none"
            return f"graph.scale is 'steps', but {reason}; {allowed}"
        if topology.start == "apart" and local_layers != "none":
            reason = "layers that stay with their clients start alike"
            if asked == "none":
                return f"graph.start is 'apart', but clients of {name} keep layers, and {reason}; allowed: alike"
            allowed = "allowed: graph.start alike, or run.local_layers none"
            return f"graph.start is 'apart' and run.local_layers {local_layers!r}, but {reason}; {allowed}"
    if server is not None:
        on = f"server.name is {_name_of(server, SERVER_RULES)!r}"
        if topology is not None:
            return f"{on}, but graph.name is {graph!r}, and over a graph there is no server; allowed: one of them none"
        if not row.takes_server_steps:
            names = names_where(lambda other: other.takes_server_steps)
            return f"{on}, but the server of method {name} does not just average models; allowed with it: {names}"
    if keep_momentum and not row.may_keep_momentum:
        names = names_where(lambda other: other.may_keep_momentum)
        reason = f"clients of method {name} train or send more than copies of the shared models, or in several stages"
        return f"run.keep_momentum is true, but {reason}; allowed with it: {names}"
    if defence is not None:
        on = f"defence.name is {_name_of(defence, DEFENCES)!r}"
        if topology is not None and not defence.over_graph:
            allowed = ", ".join(other for other, rule in DEFENCES.items() if rule.over_graph)
            return f"{on}, but graph.name is {graph!r}; allowed over a graph: {allowed}"
        if topology is not None and defence.max_weight < 1:
            reason = f"over a graph, and graph.name is {graph!r}, a matrix says what clients count"
            return f"defence.max_weight is {defence.max_weight:g}, but {reason}; allowed there: 1"
        if topology is None and not row.takes_defence:
            names = names_where(lambda other: other.takes_defence)
            return f"{on}, but the server of method {name} does not just average models; allowed with it: {names}"
    if label_shares:
        on, names = "run.label_shares is true", names_where(lambda other: other.takes_label_shares)
        if not row.mixer.averages:
            return f"{on}, but models of method {name} are not averages; allowed with it: {names}"
        if compression.is_on:
            return f"{on} and [compression] is on; allowed: one of them"
        if not kind.takes_label_shares:
            reason = f"clients of {kind.__name__} have models or messages of their own"
            return f"{on}, but {reason}; allowed with it: {names}"
        if model.loss.task != CLASSES:
            reason = f"targets of {type(model.loss).__name__} are not labels"
            return f"{on}, but {reason}; allowed: false, or loss cross_entropy or logistic"
    if problem := _layers_problem(row, model, asked):
        return problem
    if compression.is_on and not (row.mixer.is_server_mean and topology is None and local_layers == "none"):
        own = "" if row.shares_all else f", which keeps {row.local_layers} with its clients"
        given = f"with method {name}{own}, graph.name {graph} and run.local_layers {asked}"
        allowed = f"allowed with it: {compressible}, graph.name none and run.local_layers none"
        return f"[compression] is on, but {given} clients don't all update one model; {allowed}"
    if compression.is_on and not kind.compressible:
        reason = "can't be compressed: its clients send more or less than a model to be averaged"
        return f"Uploads of {kind.__name__} {reason}; allowed: [compression] off, or method {compressible}"
    on = f"compression.threshold is {threshold:g}"
    if threshold and not kind.is_mixture:
        names = names_where(lambda other: other.is_compressible and other.algorithm.is_mixture)
        return f"{on}, but {kind.__name__} has no mixture weights; allowed: 0, or method {names}"
    if threshold and settings["num_components"] == AUTO:
        return (
            f"{on}, but method.num_components is {AUTO!r}, so it is not known yet what is little; allowed: one of them"
        )
    if threshold and threshold >= 1 / (count := settings["num_components"]):
        allowed = f"allowed: below {1 / count:.4g}"
        return f"{on}, and with {count} components all weights of a client may be below; {allowed}"
    return ""


def _layers_problem(row: Method, model: Model, asked: str) -> str:
    """Say why a method's clients can't keep layers, its own or those that are ``asked`` for; nothing if they can."""
    name, words = row.name, row.layers_kept(asked)
    on, allowed = f"run.local_layers is {asked!r}", "allowed: none"
    if asked == "none":
        on, allowed = f"Method {name} keeps {words} with its clients", "allowed: another model, or another method"
    if words == "batch_norm" and not model.normalising:
        return f"{on}, but the model normalises no batches; {allowed}"
    if row.needs_layers and model.trainable <= model.head:
        reason = "has only one layer that is trained"
        return f"Method {name} tells layers of a model apart, and this one {reason}; allowed: two or more, as mlp has"
    if words == "none":
        return ""
    if model.leaves_called(words) >= model.trainable:
        return f"{on}, but the model trains nothing else, so clients would share nothing; {allowed}"
    if not row.algorithm.uploads_model:
        names = names_where(lambda other: other.algorithm.uploads_model)
        return f"{on}, but clients of method {name} upload more or less than their model; allowed with it: {names}"
    return ""


def _name_of(chosen: Settings, table: Mapping[str, type[Settings]]) -> str:
    return next((name for name, kind in table.items() if kind is type(chosen)), type(chosen).__name__)
