"""What training hands over: predictors, personalisation, saving and loading.

Shapes: T clients, M components, n samples, K classes (or target dimensions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedem.algorithms.base import Algorithm, Mixture
from fedem.arrays import check_inputs
from fedem.config import GIVEN, Config
from fedem.engines import Engine, choose_engine
from fedem.errors import UserError, unknown
from fedem.evaluate import evaluate_unseen, personalize, predict
from fedem.federation import Federation
from fedem.methods import find_method
from fedem.mixing.base import Mixer
from fedem.models.base import Model
from fedem.records import Record, client_rows, name_scores
from fedem.rounds import State
from fedem.runs import RunFolder
from fedem.samples import Samples
from fedem.tree import Tree, tree_index

ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class Shapes:
    """What a model must know of the data."""

    inputs: tuple[int, ...]
    input_dtype: torch.dtype
    outputs: int
    features: tuple[str, ...] | None = None
    """names of the input columns, when they came from a table"""

    def conform(self, name: str, values: Any) -> Tensor:
        """Check a client's new inputs; they must be of the kind that was trained on."""
        inputs = check_inputs(name, values)
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
        model = Model(source, loss, dtype)
        method = find_method(config.name("method"))
        algorithm = method.algorithm(model, config.solver, **config.values("method"))
        return cls(model, algorithm, method.mixer(), find_device(config.run.device))

    def describe(self, config: Config, state: State) -> Record:
        """Say what was trained: the head of every summary."""
        first = tree_index(state.shared, 0), tree_index(state.personal, 0)
        return {
            "method": config.name("method"),
            "data": config.name("data"),
            "rounds": state.round,
            "seed": config.run.seed,
            "num_components": len(self.algorithm.predictor(*first).log_weights),
            "num_parameters": self.model.num_parameters,
            "device": str(self.device),
        }

    def engine(self, config: Config) -> tuple[Engine, str | None]:
        """Choose the engine; returns a note when it is not the one hoped for."""
        return choose_engine(config.run.engine, config.run.chunk_size, self.model)


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


@dataclass(frozen=True, eq=False)
class PersonalModel:
    """One client's predictor: a mixture of models."""

    model: Model
    mixture: Mixture
    shapes: Shapes

    @property
    def mixture_weights(self) -> Tensor:
        """``[M]``, summing to one."""
        return self.mixture.log_weights.exp().cpu()

    def predict(self, inputs: Any) -> Tensor:
        """Return class probabilities ``[n, K]``, or means ``[n, D]``, for inputs ``[n, ...]``."""
        checked = self.shapes.conform("(new inputs)", inputs).to(self.mixture.log_weights.device)
        try:
            with torch.no_grad():
                return predict(self.model, self.mixture, checked).cpu()
        except RuntimeError as error:
            raise UserError(f"The model can't take inputs of shape {list(checked.shape)}: {error}") from error


@dataclass(frozen=True, eq=False)
class Result:
    """A trained federation.

    Attributes:
        config: the complete configuration.
        states: "last" and, when there was validation data, "best" by validation. Never mixed up: methods use "last"
            unless told otherwise.
        names: of the clients that took part in training.
        summary: what summary.json holds.
        history: a record a round, as in metrics.jsonl.
        clients: a record a client, as in clients.csv.

    """

    config: Config
    parts: Parts
    shapes: Shapes
    states: Mapping[str, State]
    names: tuple[str, ...]
    summary: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    clients: Sequence[Mapping[str, Any]]
    origin: Mapping[str, Any]
    """what a checkpoint says of the training it came from, so that it can be gone on with"""

    def state(self, which: str = "last") -> State:
        """Return the state called "last" or "best"."""
        if which not in self.states:
            raise unknown("state", which, self.states)
        return self.states[which]

    def client(self, name: str, which: str = "last") -> PersonalModel:
        """Return the predictor of a client that took part in training."""
        if name not in self.names:
            some = ", ".join(self.names[:5]) + (", ..." if len(self.names) > 5 else "")
            raise UserError(f"Unknown client {name!r}; allowed: one of the {len(self.names)} clients ({some}).")
        position = self.names.index(name)
        state = self.state(which)
        group = int(self.parts.mixer.reads(torch.tensor([position])))
        return self._personal(tree_index(state.shared, group), tree_index(state.personal, position))

    def _personal(self, shared: Tree, personal: Tree) -> PersonalModel:
        return PersonalModel(self.parts.model, self.parts.algorithm.predictor(shared, personal), self.shapes)

    def predict(self, client: str, inputs: Any, which: str = "last") -> Tensor:
        """Predict for a client that took part in training: class probabilities ``[n, K]``, or means ``[n, D]``."""
        return self.client(client, which).predict(inputs)

    def personalize(
        self, inputs: Any, targets: Any, *, max_iterations: int | None = None, which: str = "last"
    ) -> PersonalModel:
        """Fit a client unseen in training on its samples, from any number of them, with all shared models fixed.

        Args:
            inputs: ``[n, ...]``; n may be 0, and the client then gets uniform weights.
            targets: ``[n]``
            max_iterations: 1 for the paper's single update of the mixture weights; None for convergence.
            which: "last" or "best".

        """
        x = self.shapes.conform("(new client)", inputs)
        if len(x) == 0:
            nothing = torch.zeros(0, *self.shapes.inputs, dtype=self.shapes.input_dtype)
            samples = Samples(nothing, torch.zeros(0).long(), torch.tensor([0, 0]))
        else:
            samples = Federation.from_clients([(x, targets)], ["(new client)"], validation=0, test=0).train
            self.parts.model.check(samples.inputs, samples.targets)
        shared, personal = self.fit_unseen(samples, max_iterations=max_iterations, which=which)
        return self._personal(shared, tree_index(personal, 0))

    def fit_unseen(
        self, samples: Samples, *, max_iterations: int | None = None, which: str = "last"
    ) -> tuple[Tree, Tree]:
        """Fit several unseen clients; returns the shared tree they read and their personal trees ``[T, ...]``."""
        with torch.no_grad():
            return personalize(self.parts.algorithm, self.parts.mixer, self.state(which), samples, max_iterations)

    def with_unseen(self, federation: Federation, *, max_iterations: int | None = None, which: str = "last") -> Result:
        """Fit the clients of ``federation`` on their training samples; returns a result whose clients they are."""
        self.shapes.conform(federation.names[0], federation.train.inputs[:1])
        self.parts.model.check(federation.train.inputs, federation.train.targets)
        shared, personal = self.fit_unseen(federation.train, max_iterations=max_iterations, which=which)
        state = State(self.state(which).round, {name: leaf[None] for name, leaf in shared.items()}, personal)
        engine, _ = self.parts.engine(self.config)
        scores = evaluate_unseen(self.parts.algorithm, engine, shared, personal, federation)
        summary = self.parts.describe(self.config, state) | {"num_clients": federation.num_clients}
        summary |= name_scores(scores)
        rows = client_rows("unseen", federation.names, scores, personal)
        return replace(
            self,
            states={"last": state},
            names=federation.names,
            clients=rows,
            history=(),
            summary=summary,
            origin={},
        )

    def save(self, path: str | Path) -> Path:
        """Write a run folder; :meth:`load` reads it back."""
        folder = RunFolder(Path(path))
        folder.create(self.config)
        with folder.open_metrics(0) as file:
            file.writelines(folder.line(record) for record in self.history)
        folder.save(self.states, checkpoint_facts(self.names, self.shapes, self.parts.model) | dict(self.origin))
        folder.finish(self.summary, self.clients)
        return folder.path

    @classmethod
    def load(cls, path: str | Path, model: ModelSource | None = None, device: str = "auto") -> Result:
        """Read a run folder, complete or killed; the data are not needed.

        Args:
            path: the folder.
            model: the user's own model, if the run was trained with one.
            device: where to put it, wherever it was trained.
        """
        folder = RunFolder(Path(path))
        config = folder.config()
        if config.name("model") == GIVEN and model is None:
            raise UserError("This run was trained with a model passed from Python; pass model=... again to load it.")
        states, facts = folder.load()
        names = facts.pop("feature_names")
        shapes = Shapes(
            tuple(facts.pop("input_shape")),
            getattr(torch, facts.pop("input_dtype")),
            facts.pop("num_outputs"),
            None if names is None else tuple(names),
        )
        parts = Parts.build(config.replace("run", device=device), shapes, model)
        parts.model.not_stackable = facts.pop("not_stackable")
        placed = {role: state.to(parts.device) for role, state in states.items()}
        clients = tuple(facts.pop("clients"))
        summary = folder.summary()
        rows = folder.clients() if summary else []
        # A killed run has no summary yet.
        head = summary or parts.describe(config, placed["last"]) | {"num_clients": len(clients)}
        return cls(config, parts, shapes, placed, clients, head, folder.metrics(), rows, facts)


def checkpoint_facts(names: Sequence[str], shapes: Shapes, model: Model) -> dict[str, Any]:
    """Return what a checkpoint must say besides its tensors, so that it can be loaded without the data."""
    return {
        "clients": list(names),
        "input_shape": list(shapes.inputs),
        "input_dtype": str(shapes.input_dtype).removeprefix("torch."),
        "num_outputs": shapes.outputs,
        "feature_names": None if shapes.features is None else list(shapes.features),
        "not_stackable": model.not_stackable,
    }
