"""What training hands over: predictors, personalisation, saving and loading.

Shapes: T clients, M components, n samples, K classes (or target dimensions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedem.core.errors import UserError, unknown
from fedem.core.random import client_keys
from fedem.core.tree import Tree, tree_index
from fedem.data.federation import Federation
from fedem.data.samples import Samples
from fedem.engines.device import products
from fedem.methods.base import Mixture
from fedem.methods.mixer import Served, Settled
from fedem.models.base import Model
from fedem.runs.config import GIVEN, Config
from fedem.runs.evaluate import client_rows, evaluate, name_scores, predict
from fedem.runs.folder import RunFolder, check_here
from fedem.runs.personalize import Predictors
from fedem.runs.recipe import ModelSource, Parts, Shapes, check_model, checkpoint_facts, take_shapes
from fedem.runs.rounds import State

TUNED = "tuned-"


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
                found = predict(self.model, self.mixture, checked).cpu()
        except (RuntimeError, IndexError) as error:
            allowed = ", ".join(map(str, ("n", *self.shapes.inputs)))
            raise UserError(
                f"The model can't take inputs of shape {list(checked.shape)}; allowed: [{allowed}], as in training."
            ) from error
        return found if self.shapes.encoding is None else self.shapes.encoding.decode(found)


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
    tuned: Mapping[str, State] = field(default_factory=dict)
    """where clients fine-tune before they predict: their own models, settled, by role"""

    def __repr__(self) -> str:
        about = self.summary
        score = next((f", {key} {about[key]:.4g}" for key in about if key.startswith("test_") and about[key]), "")
        return (
            f"<Result of {about['method']} on {about['data']}: {about['num_clients']} clients, {about['rounds']} rounds"
            f"{score}>"
        )

    def state(self, which: str = "last") -> State:
        """Return the state called "last" or "best"."""
        if which not in self.states:
            raise unknown("state", which, self.states)
        return self.states[which]

    def client(self, name: str, which: str = "last") -> PersonalModel:
        """Return the predictor of a client that took part in training."""
        position = self._position(name)
        found = self._served(which, torch.tensor([position]))
        state = self.tuned.get(which, self.state(which))
        shared = tree_index(found.shared, int(found.reads[0]))
        return self._personal(shared, tree_index(state.personal, position))

    def _position(self, name: str) -> int:
        check_here(self.names)
        if name not in self.names:
            some = ", ".join(map(repr, self.names[:5])) + (", ..." if len(self.names) > 5 else "")
            raise UserError(f"Unknown client {name!r}; allowed: one of the {len(self.names)} clients ({some}).")
        return self.names.index(name)

    def _served(self, which: str, clients: Tensor) -> Served:
        """Return what clients read: their fine-tuned trees, where the run fine-tunes."""
        state, mixer = self.state(which), self.parts.mixer
        if self.config.run.fine_tune_epochs and not isinstance(mixer, Settled):
            if which not in self.tuned:
                raise UserError(
                    "Clients fine-tune their models once the run is complete; go on with it first (--resume)."
                )
            state, mixer = self.tuned[which], Settled()
        return mixer.own(state.shared, state.memory, clients)

    def _personal(self, shared: Tree, personal: Tree) -> PersonalModel:
        return PersonalModel(self.parts.model, self.parts.algorithm.predictor(shared, personal), self.shapes)

    def predict(self, client: str, inputs: Any, which: str = "last") -> Tensor:
        """Predict for a client that took part in training: class probabilities ``[n, K]``, or means ``[n, D]``."""
        return self.client(client, which).predict(inputs)

    def personalize(
        self,
        inputs: Any,
        targets: Any,
        *,
        max_iterations: int | None = None,
        which: str = "last",
        beside: str | None = None,
    ) -> PersonalModel:
        """Fit a client unseen in training on its samples, from any number of them; what others share stays fixed.

        Args:
            inputs: ``[n, ...]``; n may be 0, and the client then gets uniform weights, or the shared model as it is.
            targets: ``[n]``
            max_iterations: for FedEM updates of the mixture weights, 1 in the paper and None for convergence; for a
                method that must train, passes over the samples, None for ``unseen_epochs``.
            which: "last" or "best".
            beside: a client that took part: start from what it has, such as a peer's components, and not from the mean
                of all.

        """
        x = self.shapes.conform("(new client)", inputs)
        if len(x) == 0:
            nothing = torch.zeros(0, *self.shapes.inputs, dtype=self.shapes.input_dtype)
            samples = Samples.of(nothing, torch.zeros(0).long(), torch.tensor([0, 0]))
        else:
            if self.shapes.encoding is not None:
                targets = self.shapes.encoding.accept_targets(targets)
            samples = Federation.from_clients([(x, targets)], ["(new client)"], validation=0, test=0).train
            self._check(samples)
        found = self.fit_unseen(samples, client_keys(["(new client)"]), max_iterations, which, beside)
        return PersonalModel(self.parts.model, found.of(self.parts.algorithm, 0), self.shapes)

    def _check(self, samples: Samples) -> None:
        """Refuse samples that the model has no place for."""
        inputs = samples.inputs
        if self.config.name("model") != GIVEN and not inputs.is_floating_point() and inputs.dtype != torch.uint8:
            self.config.model.check(int(inputs.min()), int(inputs.max()))
        self.parts.model.check(inputs, samples.targets)

    def fit_unseen(
        self,
        samples: Samples,
        keys: Tensor,
        max_iterations: int | None = None,
        which: str = "last",
        beside: str | None = None,
    ) -> Predictors:
        """Fit several unseen clients, whose names are hashed to ``keys``; the rest is as in :meth:`personalize`."""
        position = None if beside is None else self._position(beside)
        engine, _ = self.parts.engine(self.config)
        personalizer = self.parts.personalizer(self.config, engine)
        with torch.no_grad(), products(self.config.run.precision, self.parts.device):
            return personalizer.personalize(self.state(which), samples, keys, max_iterations, position)

    def with_unseen(
        self,
        federation: Federation,
        *,
        max_iterations: int | None = None,
        which: str = "last",
        beside: str | None = None,
    ) -> Result:
        """Fit the clients of ``federation`` on their training samples; returns a result whose clients they are."""
        self.shapes.conform(federation.names[0], federation.train.inputs[:1])
        self._check(federation.train)
        found = self.fit_unseen(federation.train, federation.keys, max_iterations, which, beside)
        parts = replace(self.parts, mixer=Settled())
        state = found.settled(self.state(which).round)
        engine, _ = parts.engine(self.config)
        scores = evaluate(parts.algorithm, engine, found, federation)
        summary = parts.describe(self.config, state) | {"num_clients": federation.num_clients}
        summary |= name_scores(scores)
        rows = client_rows("unseen", federation.names, scores, found.log_weights(parts.algorithm))
        return replace(
            self,
            parts=parts,
            states={"last": state},
            tuned={},
            names=federation.names,
            clients=rows,
            history=(),
            summary=summary,
            origin={"settled": True},
        )

    def save(self, path: str | Path) -> Path:
        """Write a run folder; :meth:`load` reads it back."""
        folder = RunFolder(Path(path))
        folder.create(self.config)
        with folder.open_metrics(0) as file:
            file.writelines(folder.line(record) for record in self.history)
        facts = checkpoint_facts(self.names, self.shapes, self.parts.model) | dict(self.origin)
        folder.save({**self.states, **name_tuned(self.tuned)}, facts)
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
        shapes = take_shapes(facts)
        parts = Parts.build(config.replace("run", device=device), shapes, model)
        check_model(parts.model, facts.pop("leaves", None))
        parts.model.not_stackable = facts.pop("not_stackable")
        parts.model.bytes_per_sample = facts.pop("bytes_per_sample")
        if facts.get("settled"):
            parts = replace(parts, mixer=Settled())
        everything = {role: state.to(parts.device) for role, state in states.items()}
        placed = {role: state for role, state in everything.items() if not role.startswith(TUNED)}
        tuned = {role.removeprefix(TUNED): state for role, state in everything.items() if role.startswith(TUNED)}
        clients = tuple(facts.pop("clients"))
        summary = folder.summary()
        rows = folder.clients() if summary else []
        # A killed run has no summary yet.
        head = summary or parts.describe(config, placed["last"]) | {"num_clients": len(clients)}
        return cls(config, parts, shapes, placed, clients, head, folder.metrics(), rows, facts, tuned)


def name_tuned(tuned: Mapping[str, State]) -> dict[str, State]:
    """Return the roles under which a checkpoint holds fine-tuned models."""
    return {f"{TUNED}{role}": state for role, state in tuned.items()}
