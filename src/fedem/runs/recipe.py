"""From a configuration to what is trained: the recipe of a run, settled on its data.

:func:`resolve` is the one place where what depends on the data is settled and checked. A trainer is a recipe and a
federation, a result is a recipe and states, a deployment's plan is a recipe that is sent around.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedem.core.errors import UserError, counted
from fedem.core.precision import products
from fedem.core.random import client_keys
from fedem.core.schema import Listed, Maybe, Number, Table, Text, Whole
from fedem.core.tree import tree_index
from fedem.data.dataset import Dataset
from fedem.data.encoding import ENCODING, Encoding
from fedem.data.federation import PARTS, Federation
from fedem.data.samples import check_inputs
from fedem.engines import Engine, choose_engine
from fedem.methods.assembly import Around, Assembled, assemble
from fedem.methods.base import Algorithm, Mixture
from fedem.methods.mixer import Mixer, Settled
from fedem.methods.wrappers.compression import Codec, split_residual
from fedem.methods.wrappers.label_shares import shifted
from fedem.models import Model
from fedem.models.losses import LOSSES, Classification, Loss, guess_loss
from fedem.models.metrics import Metric, choose_metrics
from fedem.runs.attacks import Attackers, check_attack
from fedem.runs.checkpoints import naming_tensors
from fedem.runs.config import Config
from fedem.runs.defaults import curvature, settle_batches
from fedem.runs.evaluate import Record
from fedem.runs.measures import check_diagnosable, check_measurable
from fedem.runs.personalize import Personalizer
from fedem.runs.rounds import State, mixer_seed
from fedem.runs.unlabelled import check_unlabelled

# What a file says of the samples.
FORMAT = {
    "input_shape": Listed(Whole(least=0, most=2**40)),
    "input_dtype": Text(choices=("float32", "float64", "float16", "bfloat16", "int64", "uint8")),
    "num_outputs": Whole(least=1, most=2**40),
    "feature_names": Maybe(Listed(Text())),
}
FURTHER = {
    "encoding": Maybe(ENCODING),
    "labels": Maybe(Listed(Text())),
    "class_weights": Maybe(Listed(Number(least=0))),
}
# ... and of the model, so that it can be loaded without the data.
METADATA = Table(FORMAT | {"clients": Listed(Text()), "not_stackable": Maybe(Text())}, FURTHER)
ModelSource = nn.Module | Callable[[], nn.Module]
_TRIED = 5  # samples that a model is tried on


@dataclass(frozen=True, eq=False)
class SampleFormat:
    """What a model must know of the data: the shape and type of an input, the number of outputs, names, encoding."""

    inputs: tuple[int, ...]  # shape of one input
    input_dtype: torch.dtype
    outputs: int  # number of a model's outputs
    features: tuple[str, ...] | None = None  # names of the input columns, when they came from a table
    encoding: Encoding | None = None  # how a table becomes inputs and targets
    labels: tuple[str, ...] | None = None  # names of the classes, where they have some
    class_weights: tuple[float, ...] | None = None  # what a training sample of each class counts, where that differs

    @property
    def deviation(self) -> float | None:
        """By which a table's targets were standardised; None for classes and where there is no table."""
        if self.encoding is None or self.encoding.target.classes is not None:
            return None
        return self.encoding.target.deviation

    def conform(self, name: str, values: Any) -> Tensor:
        """Check a client's new inputs; they must be of the kind that was trained on."""
        inputs = check_inputs(name, values if self.encoding is None else self.encoding.accept(values))
        if inputs.dtype == torch.int64 and self.input_dtype.is_floating_point:
            return inputs.to(self.input_dtype)
        kinds = ["float" if dtype.is_floating_point else str(dtype) for dtype in (inputs.dtype, self.input_dtype)]
        if kinds[0] != kinds[1]:
            raise UserError(f"The inputs are {inputs.dtype}; allowed: {self.input_dtype}, as in training.")
        return inputs

    def to_json(self) -> dict[str, Any]:
        return {
            "input_shape": list(self.inputs),
            "input_dtype": str(self.input_dtype).removeprefix("torch."),
            "num_outputs": self.outputs,
            "feature_names": self.features and list(self.features),
            "encoding": self.encoding and self.encoding.to_json(),
            "labels": self.labels and list(self.labels),
            **({} if self.class_weights is None else {"class_weights": list(self.class_weights)}),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SampleFormat:
        names, encoding, labels = content["feature_names"], content.get("encoding"), content.get("labels")
        shape, outputs = tuple(content["input_shape"]), content["num_outputs"]
        dtype = getattr(torch, content["input_dtype"], None)
        if not all(type(size) is int and size >= 1 for size in (*shape, outputs)) or not isinstance(dtype, torch.dtype):
            given = f"inputs of shape {list(shape)} and type {content['input_dtype']!r}, and {outputs!r} outputs"
            raise UserError(f"The model is for {given}; allowed: sizes of at least 1, a type such as float32.")
        known = encoding and Encoding.from_json(encoding)
        weights = content.get("class_weights")
        texts = (names and tuple(names), known, labels and tuple(labels))
        return cls(shape, dtype, outputs, *texts, weights and tuple(weights))


@dataclass(frozen=True, eq=False)
class Recipe:
    """A configuration settled on its data; what it names, such as a device or a file, need not be there to read it."""

    config: Config
    format: SampleFormat
    source: ModelSource | None = None  # the user's own model; None for the one that the configuration names
    is_fitted: bool = False  # whether its clients were fitted after training: their models are not mixed any more
    device_name: str = ""  # where to compute in place of run.device: a run may be loaded on another machine
    slowed: float = 1.0  # what the learning rate was multiplied by in training, where it was halved

    @property
    def loss(self) -> Loss:
        if self.config.loss is None:
            raise UserError(f"loss.name is 'auto', which needs the data; allowed without them: {', '.join(LOSSES)}.")
        return self.config.loss

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """What clients are scored by; the first decides which state is best."""
        return choose_metrics(self.config.run.metrics, self.loss, self.format.outputs)

    @cached_property
    def device(self) -> torch.device:
        return find_device(self.device_name or self.config.run.device)

    @cached_property
    def model(self) -> Model:
        run, source = self.config.run, self.source
        if source is None:
            source = partial(self.config.model.build, self.format.inputs, self.format.outputs)
        dtype = {"float32": torch.float32, "float64": torch.float64}[run.dtype]
        if run.precision == "bfloat16" and dtype == torch.float64:
            raise UserError("run.precision is 'bfloat16' but run.dtype is 'float64'; allowed: run.dtype float32.")
        if run.label_shares:
            source = shifted(source, self.format.outputs)
        return Model(source, self.loss, dtype, run.precision, self.format.class_weights)

    @cached_property
    def method(self) -> Assembled:
        config, run = self.config, self.config.run
        around = Around(
            config.graph,
            run.label_shares,
            run.local_layers,
            config.compression,
            config.server,
            config.defence,
            run.keep_momentum,
        )
        return assemble(config.method.name, self.model, config.solver, config.method.values, around)

    @property
    def algorithm(self) -> Algorithm:
        return self.method.algorithm

    @property
    def mixer(self) -> Mixer:
        return Settled() if self.is_fitted else self.method.mixer

    @property
    def codec(self) -> Codec | None:
        return self.method.codec

    def attackers(self, keys: Tensor) -> Attackers | None:
        """Say who means harm among the clients of the training, whose names have these keys ``[T]``; None if nobody."""
        attack = self.config.attack
        return None if attack is None or self.is_fitted else Attackers.among(keys, attack, self.config.run.seed)

    def fitted(self, **run: Any) -> Recipe:
        """Return the recipe of clients that were fitted after training; the model and the algorithm are the same.

        ``run`` are settings that hold for these clients alone.
        """
        return self._alike(is_fitted=True, config=self.config.replace("run", **run) if run else self.config)

    def with_rate(self, learning_rate: float) -> Recipe:
        """Return the recipe with a learning rate that was found, and may be halved."""
        return self._alike(config=self.config.replace("schedule", learning_rate=learning_rate, backtrack=True))

    def slowed_by(self, factor: float) -> Recipe:
        """Return the recipe whose learning rate is multiplied by ``factor`` altogether."""
        return self if factor == self.slowed else self._alike(slowed=factor)

    def _alike(self, **changed: Any) -> Recipe:
        recipe = replace(self, **changed)
        vars(recipe).update(model=self.model, method=self.method)
        return recipe

    def engine(self) -> Engine:
        return choose_engine(self.config.run.engine, self.config.run.chunk_size, self.model, self.device)

    def products(self) -> AbstractContextManager[None]:
        """Return a context in which models multiply as exactly as run.precision says."""
        return products(self.config.run.precision, self.device)

    def personalizer(self, engine: Engine) -> Personalizer:
        config, rate = self.config, self.slowed * self.config.schedule.rate(0, self.config.run.rounds)
        return Personalizer(self.algorithm, self.mixer, engine, config.batching, rate, config.run)

    def describe(self, state: State) -> Record:
        """Say what was trained: the head of every summary."""
        read = self.mixer.read(state.shared, state.memory, torch.tensor([0]))
        shared = tree_index(read.shared, int(read.reads[0]))
        # A server over a network has no client's tree; a new one is of the same kind.
        personal = self.algorithm.init_personal(shared, client_keys(["(anybody)"])[0].to(self.device))
        return {
            "method": self.config.name("method"),
            "data": self.config.name("data"),
            "rounds": state.round,
            "seed": self.config.run.seed,
            "num_components": len(self.algorithm.predictor(shared, personal).log_weights),
            "num_parameters": self.model.num_parameters,
            "device": str(self.device),
        }

    def check_samples(self, inputs: Tensor, targets: Tensor, whole: Federation | None = None) -> None:
        """Refuse samples that the model has no place for; the ``inputs`` may be some of those of the ``whole``."""
        if self.source is None and not inputs.is_floating_point() and inputs.dtype != torch.uint8:
            self.config.model.check(*(whole.input_range if whole else (int(inputs.min()), int(inputs.max()))))
        self.model.check(inputs, targets)

    def check_batches(self, federation: Federation) -> None:
        """Refuse batches of one sample where layers normalise over the batch."""
        if not self.model.normalises_batches:
            return
        sizes = federation.train.sizes
        batching = self.config.batching
        widths = batching.widths(sizes)
        alone, left_over = widths == 1, sizes % widths.clamp(min=1) == 1
        lonely = alone if batching.drop_short else alone | left_over
        if bool(lonely.any()):
            which = int(lonely.nonzero()[0])
            mend = "another batching.batch_size is needed, or a model without batch normalisation, which can't take it"
            mend = mend if alone[which] else f"batching.drop_short = true leaves it out; else {mend}"
            raise UserError(f"Client {federation.names[which]!r} would train on a batch of one sample; {mend}.")

    def check_leaves(self, leaves: Mapping[str, list[int]] | None) -> None:
        """Refuse a model with other parameters than those that were trained; what it does with them can't be seen."""
        mine = self.model.leaf_shapes
        if leaves is None or mine == leaves:
            return
        name = next(name for name in {**leaves, **mine} if leaves.get(name) != mine.get(name))
        found = f"its {name!r} has shape {mine.get(name, 'none')}; allowed: {leaves.get(name, 'none')}"
        raise UserError(f"The model is not the one that was trained: {found}.")

    def check_mixture(self, mixture: Mixture, where: object) -> None:
        """Refuse a mixture, read from ``where``, that is not one of this model: a file may be whole, but another's."""
        components, log_weights = mixture
        if log_weights.ndim != 1 or not len(log_weights) or not log_weights.is_floating_point():
            found = f"{log_weights.dtype} of shape {list(log_weights.shape)}"
            raise UserError(f"The mixture weights in {where} are {found}; allowed: one number a component.")
        count, mine = len(log_weights), self.model.leaf_shapes
        for name in {**mine, **components}:
            there, shape = components.get(name), mine.get(name)
            has = "none" if there is None else list(there.shape)
            # Leaves that components have in common have one row.
            if shape is None or has not in ([count, *shape], [1, *shape]):
                problem = f"are not those of the model {self.config.name('model')!r}: {name!r} has shape {has}"
                allowed = "none" if shape is None else [count, *shape]
                raise UserError(f"The parameters in {where} {problem}; allowed: {allowed}.")

    def mixture(self, state: State, position: int, mixer: Mixer | None = None) -> Mixture:
        """Return what the client at a ``position`` predicts with in a state."""
        found = (mixer or self.mixer).read(state.shared, state.memory, torch.tensor([position]))
        shared, personal = tree_index(found.shared, int(found.reads[0])), tree_index(state.personal, position)
        return self.algorithm.predictor(shared, split_residual(personal)[0])

    def check_state(self, state: State, clients: int, where: Path, mixer: Mixer | None = None) -> None:
        """Refuse a state, read from ``where``, that is not one of this model and so many ``clients``."""
        for name, leaf in state.personal.items():
            if leaf.shape[:1] != (clients,):
                found = f"{name!r} of shape {list(leaf.shape)}"
                raise UserError(f"{where} has {found} for {counted(clients, 'client')}; allowed: a row for each.")
        if clients:
            with naming_tensors(where):
                mixture = self.mixture(state, 0, mixer)
            self.check_mixture(mixture, where)

    def to_json(self) -> dict[str, Any]:
        return {"config": self.config.sections, "shapes": self.format.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(Config.build(content["config"], preset=False), SampleFormat.from_json(content["shapes"]))

    def metadata(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what a checkpoint of clients called ``names`` says, so that it can be loaded without the data."""
        return {
            "clients": list(names),
            **self.format.to_json(),
            "leaves": self.model.leaf_shapes,
            "not_stackable": self.model.not_stackable,
            "bytes_per_sample": self.model.bytes_per_sample,
            "settled": self.is_fitted,
            "slowed": self.slowed,
        }

    @classmethod
    def from_metadata(
        cls, config: Config, content: Mapping[str, Any], source: ModelSource | None = None, device_name: str = ""
    ) -> Self:
        fitted, slowed = bool(content.get("settled")), content.get("slowed", 1.0)
        recipe = cls(config, SampleFormat.from_json(content), source, fitted, device_name, slowed)
        recipe.check_leaves(content.get("leaves"))
        recipe.model.not_stackable = content["not_stackable"]
        recipe.model.bytes_per_sample = content.get("bytes_per_sample", recipe.model.bytes_per_sample)
        return recipe


def resolve(config: Config, dataset: Dataset, source: ModelSource | None = None, fresh: bool = True) -> Recipe:
    """Settle what depends on the data, and check everything that can be checked before work starts.

    A run that is not ``fresh`` but taken up has a state, and in it what the mixer makes at the start, such as a graph.
    """
    federation, run = dataset.federation, config.run
    if run.unseen and federation.unseen is None:  # some may be held out already
        federation = federation.hold_out(run.unseen, run.seed)
    _check_data(config, dataset)
    # Written down, so that a run with this config.toml is refused on any other partition.
    config = config.replace("run", partition_hash=dataset.partition_hash)
    batching = settle_batches(config.batching, federation.train.sizes, by_data=config.schedule.learning_rate == 0)
    config = config.replace("batching", batch_size=batching.batch_size, local_epochs=batching.local_epochs)
    groups = [federation] + ([federation.unseen] if federation.unseen else [])
    targets = torch.cat([group.part(part).targets for group in groups for part in PARTS])
    if (loss := config.loss) is None:
        loss = guess_loss(targets)
        config = config.replace("loss", name=next(name for name, kind in LOSSES.items() if kind is type(loss)))
    inputs = federation.train.span(0, min(_TRIED, len(federation.train))).inputs
    outputs, labels = loss.num_outputs(targets), dataset.label_names
    if labels is not None and outputs > 1:
        outputs = len(labels)  # some may have no sample among these clients
    shape, features, encoding = federation.input_shape, dataset.feature_names, dataset.encoding
    weights = loss.weights_of(federation.train.targets, max(2, outputs)) if isinstance(loss, Classification) else None
    recipe = Recipe(config, SampleFormat(shape, inputs.dtype, outputs, features, encoding, labels, weights), source)
    algorithm, model, mixer = recipe.algorithm, recipe.model, recipe.mixer
    _ = recipe.metrics  # refused here if they do not fit
    recipe.check_samples(inputs, targets, federation)
    recipe.check_batches(federation)
    if config.attack is not None:
        check_attack(config.attack, config.name("attack"), config.method.name, loss, outputs, federation)
        if measure := next((key for key in ("measure_alpha_every", "diagnose_every") if getattr(run, key)), ""):
            problem = f"run.{measure} is {getattr(run, measure)}, but attack.name is {config.name('attack')!r}"
            raise UserError(f"{problem}, and the theorems are of honest clients; allowed: one of them 0 or none.")
    if config.solver.differentiates_twice and not model.is_twice_differentiable:
        problem = "needs second derivatives, and this model normalises batches or is recurrent"
        allowed = "models without such layers, or another solver"
        raise UserError(f"Solver {config.name('solver')} {problem}; allowed with it: {allowed}.")
    _probe(recipe, inputs)
    if config.schedule.learning_rate == 0:
        recipe = recipe.with_rate(_found_rate(recipe, federation))
    algorithm.check(inputs)
    if fresh:
        mixer.check(federation.keys, mixer_seed(run.seed))
    if run.neighbours:
        _check_neighbours(recipe, federation, inputs)
    if run.unlabelled:
        check_unlabelled(config)
        model.features(model.init(0), inputs)
    if run.measure_alpha_every:
        check_measurable(algorithm, compressed=recipe.codec is not None)
    if run.diagnose_every:
        check_diagnosable(algorithm, mixer, compressed=recipe.codec is not None)
    return recipe


# What was found by trying models, for this process: a study prepares each run twice, many runs train one kind of model,
# and to try a deep one takes seconds.
_found_of_models: dict[Hashable, tuple[int, str | None]] = {}


def _probe(recipe: Recipe, inputs: Tensor) -> None:
    """Try the model on a few samples, unless one of the same settings was tried; a user's own is always tried."""
    model, run, samples = recipe.model, recipe.config.run, recipe.format
    if recipe.source is not None:
        model.probe(inputs.to(recipe.device))
        return
    settings = recipe.config.model, recipe.loss, run.dtype, run.precision, run.label_shares, recipe.device
    kind = settings, tuple(inputs.shape), samples.input_dtype, samples.outputs, samples.class_weights
    if kind not in _found_of_models:
        model.probe(inputs.to(recipe.device))
        _found_of_models[kind] = model.bytes_per_sample, model.not_stackable
    model.bytes_per_sample, model.not_stackable = _found_of_models[kind]


def _check_neighbours(recipe: Recipe, federation: Federation, inputs: Tensor) -> None:
    """Refuse neighbours where nothing says how much they count, and of a model without features."""
    if not len(federation.validation):
        problem = f"run.neighbours is {recipe.config.run.neighbours}, but no client has validation samples"
        why = "by which it is chosen how much neighbours count"
        raise UserError(f"{problem}, {why}; allowed: data with a validation part, or run.neighbours 0.")
    recipe.model.features(recipe.model.init(0), inputs)


def _found_rate(recipe: Recipe, federation: Federation) -> float:
    """Return the learning rate that the clients' losses allow, in two digits."""
    config = recipe.config
    bend = curvature(recipe.model, federation, config.batching, config.run.seed, recipe.device)
    if bend <= 0:
        return config.solver.usual_rate
    rate = recipe.algorithm.suitable_rate(bend)
    if sum(len(shape) > 1 for shape in recipe.model.leaf_shapes.values()) <= 1:
        # With momentum a step goes on, and is as long as 1 / (1 - momentum) of them. Networks, which bend most where
        # they start, can do with such steps.
        rate *= 1 - getattr(config.solver, "momentum", 0.0)
    return float(f"{rate:.2g}")


def _check_data(config: Config, dataset: Dataset) -> None:
    """Refuse clients with other samples than before, and to hold out those that a table's encoding was fitted on."""
    run, found = config.run, dataset.partition_hash
    if run.partition_hash not in ("", found):
        problem = f"run.partition_hash is {run.partition_hash!r}, but the clients got other samples"
        allowed = "the same data and partition, or an empty run.partition_hash"
        raise UserError(f"{problem} ({found or 'no partition'}); allowed: {allowed}.")
    if dataset.encoding is not None and run.unseen and (run.unseen, run.seed) != (dataset.unseen, dataset.seed):
        problem = f"the table was encoded for {dataset.unseen} and {dataset.seed}, so by clients that would be held out"
        allowed = "the same as when the table was read (from_frame(..., unseen=, seed=))"
        raise UserError(f"run.unseen is {run.unseen} and run.seed {run.seed}, but {problem}; allowed: {allowed}.")


def find_device(name: str) -> torch.device:
    """Turn "auto", "cpu", "cuda" or "cuda:1" into a device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"Unknown device {name!r}; allowed: auto, cpu, cuda, cuda:0, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"Device {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA devices.")
    return device
