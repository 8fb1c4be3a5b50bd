"""What a configuration describes, built: the pieces that training and a loaded result share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedem.core.errors import UserError
from fedem.core.random import client_keys
from fedem.core.tree import tree_index
from fedem.data.dataset import Dataset
from fedem.data.encoding import Encoding
from fedem.data.federation import PARTS, Federation
from fedem.data.samples import check_inputs
from fedem.engines import Batching, Engine, choose_engine
from fedem.graphs import GRAPHS, Topology
from fedem.methods import find_method
from fedem.methods.base import Algorithm
from fedem.methods.clustered import Clusters
from fedem.methods.decentralised import Graph
from fedem.methods.fedem import FedEM
from fedem.methods.mixer import Alone, Mixer, Star
from fedem.methods.wrappers.compression import Changes, Compressed
from fedem.methods.wrappers.label_shares import LabelShares, shifted
from fedem.methods.wrappers.local_layers import LocalLayers
from fedem.models import Model
from fedem.models.losses import LOSSES, guess_loss
from fedem.runs.config import Config
from fedem.runs.evaluate import Record
from fedem.runs.personalize import Personalizer
from fedem.runs.rounds import State

ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class Shapes:
    """What a model must know of the data."""

    inputs: tuple[int, ...]
    input_dtype: torch.dtype
    outputs: int
    features: tuple[str, ...] | None = None
    """names of the input columns, when they came from a table"""
    encoding: Encoding | None = None
    """how a table becomes inputs and targets"""
    labels: tuple[str, ...] | None = None
    """names of the classes, where they have some"""

    def conform(self, name: str, values: Any) -> Tensor:
        """Check a client's new inputs; they must be of the kind that was trained on."""
        inputs = check_inputs(name, values if self.encoding is None else self.encoding.accept(values))
        if inputs.dtype == torch.int64 and self.input_dtype.is_floating_point:
            return inputs.to(self.input_dtype)
        kinds = ["float" if dtype.is_floating_point else str(dtype) for dtype in (inputs.dtype, self.input_dtype)]
        if kinds[0] != kinds[1]:
            raise UserError(f"The inputs are {inputs.dtype}; allowed: {self.input_dtype}, as in training.")
        return inputs


@dataclass(frozen=True, eq=False)
class Parts:
    """What a configuration describes, built: the pieces that training and a loaded result share."""

    model: Model
    algorithm: Algorithm
    mixer: Mixer
    device: torch.device

    @classmethod
    def build(cls, config: Config, shapes: Shapes, source: ModelSource | None) -> Parts:
        """Build from a configuration whose loss is settled, and the user's own model if there is one."""
        dtype = {"float32": torch.float32, "float64": torch.float64}[config.run.dtype]
        loss = config.loss
        assert loss is not None, "the loss is settled once the targets are known"
        if source is None:
            spec = config.model
            source = partial(spec.build, shapes.inputs, shapes.outputs)
        if config.run.precision == "bfloat16" and dtype == torch.float64:
            raise UserError(
                "run.precision is 'bfloat16' but run.dtype is 'float64'; allowed with it: run.dtype float32."
            )
        if config.run.label_shares:
            source = shifted(source, shapes.outputs)
        model = Model(source, loss, dtype, config.run.precision)
        algorithm, mixer = find_method(config.name("method")).build(model, config.solver, config.values("method"))
        mixer = _over_graph(config, algorithm, mixer)
        if config.run.label_shares:
            _check_label_shares(config, mixer)
        if config.run.local_layers == "batch_norm":
            mixer = _with_local_layers(config.name("method"), algorithm, mixer)
        if config.run.label_shares:
            algorithm = LabelShares.of(algorithm)
        if config.compression.is_on:
            algorithm, mixer = _compressed(config, algorithm, mixer)
        return cls(model, algorithm, mixer, find_device(config.run.device))

    def describe(self, config: Config, state: State) -> Record:
        """Say what was trained: the head of every summary."""
        read = self.mixer.own(state.shared, state.memory, torch.tensor([0]))
        shared = tree_index(read.shared, int(read.reads[0]))
        # A server over a network has no client's tree; a new one is of the same kind.
        personal = self.algorithm.init_personal(shared, client_keys(["(anybody)"])[0].to(self.device))
        return {
            "method": config.name("method"),
            "data": config.name("data"),
            "rounds": state.round,
            "seed": config.run.seed,
            "num_components": len(self.algorithm.predictor(shared, personal).log_weights),
            "num_parameters": self.model.num_parameters,
            "device": str(self.device),
        }

    def engine(self, config: Config) -> tuple[Engine, str | None]:
        """Choose the engine; returns a note when it is not the one hoped for."""
        return choose_engine(config.run.engine, config.run.chunk_size, self.model, self.device)

    def personalizer(self, config: Config, engine: Engine) -> Personalizer:
        """Return what makes clients' predictors."""
        run = config.run
        return Personalizer(
            self.algorithm,
            self.mixer,
            engine,
            config.batching,
            config.schedule.learning_rate,
            run.fine_tune_epochs,
            run.unseen_epochs,
            run.seed,
            run.fine_tune_rate,
        )


def _check_label_shares(config: Config, mixer: Mixer) -> None:
    """Refuse what makes clients' models in another way than by averages, and messages that are rounded."""
    if not isinstance(mixer, Star | Graph | Alone | Clusters):
        raise UserError(
            f"run.label_shares is true, but models of method {config.name('method')} are no averages; allowed with it: "
            "methods such as fedem, bfedem, dfedem, fedavg, fedavg+, fedprox and clustered."
        )
    if config.compression.is_on:
        raise UserError("run.label_shares is true and [compression] is on; allowed: one of them.")


def _over_graph(config: Config, algorithm: Algorithm, mixer: Mixer) -> Mixer:
    """Put a graph in the place of the server, if one is asked for."""
    method, topology = config.name("method"), config.graph
    if topology is None:
        if isinstance(mixer, Graph):
            raise UserError(f"Method {method} needs a graph, and graph.name is 'none'; allowed: {', '.join(GRAPHS)}.")
        return mixer
    if not isinstance(mixer, Graph | Star) or not _uploads_its_model(algorithm):
        raise UserError(
            f"graph.name is {config.name('graph')!r}, but method {method} needs a server; allowed over a graph: "
            "methods whose clients send a model to be averaged, such as fedem, fedavg, fedprox, ditto, apfl and pfedme."
        )
    _check_scale(config, algorithm, topology)
    if topology.start == "apart" and config.run.local_layers != "none":
        raise UserError(
            f"graph.start is 'apart' and run.local_layers {config.run.local_layers!r}, but layers that stay with their "
            "clients start alike; allowed: graph.start alike, or run.local_layers none."
        )
    return Graph(topology)


def _check_scale(config: Config, algorithm: Algorithm, topology: Topology) -> None:
    """Refuse to scale steps where the learning rate is not their length, or theirs alone."""
    if topology.scale != "steps":
        return
    allowed = "allowed: updates, which scales what all steps of a round come to, or none."
    if not algorithm.solver.obeys_rate:
        raise UserError(
            f"graph.scale is 'steps', but solver {config.name('solver')} has steps without a learning rate; {allowed}"
        )
    # Mixture weights have no steps of their own.
    if type(algorithm).init_personal is not Algorithm.init_personal and not isinstance(algorithm, FedEM):
        raise UserError(
            f"graph.scale is 'steps', but clients of method {config.name('method')} train models of their own with "
            f"the same learning rate; {allowed}"
        )


def _uploads_its_model(algorithm: Algorithm) -> bool:
    """Whether clients upload u as they trained it, no more and no less."""
    kind = type(algorithm)
    return kind.finish is Algorithm.finish and kind.summand is Algorithm.summand


def _with_local_layers(method: str, algorithm: Algorithm, mixer: Mixer) -> Mixer:
    """Keep batch normalisations with their clients (FedBN)."""
    leaves = algorithm.model.normalising
    if not leaves:
        raise UserError("run.local_layers is 'batch_norm', but the model normalises no batches; allowed: none.")
    if leaves >= algorithm.model.trainable:
        raise UserError(
            "run.local_layers is 'batch_norm', but the model trains nothing else, so clients would share nothing; "
            "allowed: none."
        )
    if not _uploads_its_model(algorithm):
        raise UserError(
            f"run.local_layers is 'batch_norm', but clients of method {method} upload more or less than their model; "
            "allowed with methods that upload it as it is, such as fedavg, fedprox, ditto and fedem."
        )
    return LocalLayers(mixer, leaves)


def _compressed(config: Config, algorithm: Algorithm, mixer: Mixer) -> tuple[Algorithm, Mixer]:
    """Make messages smaller."""
    if not isinstance(mixer, Star):
        raise UserError(
            f"[compression] is on, but with method {config.name('method')}, graph.name {config.name('graph')} and "
            f"run.local_layers {config.run.local_layers} clients don't all update one model; allowed with it: a method "
            "whose server averages, such as fedem and fedavg, graph.name none and run.local_layers none."
        )
    wrapped = Compressed.of(algorithm, config.compression)
    downloads = config.compression.downloads
    return wrapped, mixer if downloads == "none" else Changes(downloads, wrapped.leading)


def find_device(name: str) -> torch.device:
    """Turn "auto", "cpu", "cuda" or "cuda:1" into a device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"Unknown device {name!r}; allowed: auto, cpu, cuda, cuda:0, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"Unknown device {name!r}; allowed: auto, cpu, cuda, cuda:0, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"Device {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA devices.")
    return device


# What a checkpoint or a plan says besides its tensors, so that it can be loaded without the data.


def checkpoint_facts(names: Sequence[str], shapes: Shapes, model: Model) -> dict[str, Any]:
    """Return what a checkpoint must say."""
    return {
        "clients": list(names),
        **shape_facts(shapes),
        "leaves": model.leaf_shapes,
        "not_stackable": model.not_stackable,
        "bytes_per_sample": model.bytes_per_sample,
    }


def check_model(model: Model, leaves: Mapping[str, list[int]] | None) -> None:
    """Refuse a model with other parameters than those that were trained; what it does with them can't be seen."""
    if leaves is None or model.leaf_shapes == leaves:
        return
    name = next(name for name in {**leaves, **model.leaf_shapes} if leaves.get(name) != model.leaf_shapes.get(name))
    raise UserError(
        f"The model is not the one that was trained: its {name!r} has shape {model.leaf_shapes.get(name, 'none')}; "
        f"allowed: {leaves.get(name, 'none')}."
    )


def shape_facts(shapes: Shapes) -> dict[str, Any]:
    """Return shapes as plain values, as JSON has them."""
    return {
        "input_shape": list(shapes.inputs),
        "input_dtype": str(shapes.input_dtype).removeprefix("torch."),
        "num_outputs": shapes.outputs,
        "feature_names": None if shapes.features is None else list(shapes.features),
        "encoding": None if shapes.encoding is None else shapes.encoding.to_json(),
        "labels": None if shapes.labels is None else list(shapes.labels),
    }


def take_shapes(facts: dict[str, Any]) -> Shapes:
    """Take out of ``facts`` the shapes that :func:`shape_facts` put there."""
    names, encoding, labels = facts.pop("feature_names"), facts.pop("encoding", None), facts.pop("labels", None)
    return Shapes(
        tuple(facts.pop("input_shape")),
        getattr(torch, facts.pop("input_dtype")),
        facts.pop("num_outputs"),
        None if names is None else tuple(names),
        None if encoding is None else Encoding.from_json(encoding),
        None if labels is None else tuple(labels),
    )


# What must be settled between a configuration and its data before a run starts.


def check_encoding(config: Config, dataset: Dataset) -> None:
    """Refuse to hold out clients that a table's encoding was fitted on."""
    asked, fitted = (config.run.unseen, config.run.seed), (dataset.unseen, dataset.seed)
    if dataset.encoding is not None and config.run.unseen and asked != fitted:
        raise UserError(
            f"run.unseen is {asked[0]} and run.seed {asked[1]}, but the table was encoded for {fitted[0]} and "
            f"{fitted[1]}, so by clients that would be held out; allowed: the same as when the table was read "
            "(from_frame(..., unseen=, seed=))."
        )


def settle_partition(config: Config, found: str) -> Config:
    """Write down what the partition came to, so that a run with this config.toml is refused on any other."""
    known = config.run.partition_hash
    if known and known != found:
        raise UserError(
            f"run.partition_hash is {known!r}, but the clients got other samples ({found or 'no partition'}); "
            "allowed: the same data and partition, or an empty run.partition_hash."
        )
    return config.replace("run", partition_hash=found)


def settle_loss(config: Config, targets: Tensor) -> Config:
    """Replace loss "auto" by the one that fits the targets, so that config.toml says what was done."""
    if config.loss is not None:
        return config
    kind = type(guess_loss(targets))
    return config.replace("loss", name=next(name for name, cls in LOSSES.items() if cls is kind))


def check_batches(model: Model, batching: Batching, federation: Federation) -> None:
    """Refuse batches of one sample where layers normalise over the batch."""
    if not model.normalises_batches:
        return
    sizes = federation.train.sizes
    lonely = (sizes % batching.widths(sizes) == 1) | (batching.widths(sizes) == 1)
    if bool(lonely.any()):
        name = federation.names[int(lonely.nonzero()[0])]
        raise UserError(
            f"Client {name!r} would train on a batch of one sample, which batch normalisation can't take; "
            "another batching.batch_size is needed, or a model without it."
        )


def all_targets(federation: Federation) -> Tensor:
    """Return the targets of all parts, clients held out included."""
    groups = [federation] + ([federation.unseen] if federation.unseen else [])
    return torch.cat([group.part(part).targets for group in groups for part in PARTS])
