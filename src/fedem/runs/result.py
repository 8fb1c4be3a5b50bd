"""What training hands over: predictors, personalisation, saving and loading.

Shapes: T clients, M components, n samples, K classes (or target dimensions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.core.errors import UserError, counted, naming, unknown
from fedem.core.random import client_keys
from fedem.core.schema import check
from fedem.data.federation import Federation
from fedem.data.samples import Pool, Samples, offsets_of
from fedem.data.tables import is_frame, read_frame
from fedem.methods.base import Mixture, find_method
from fedem.methods.mixer import Mixer, Settled
from fedem.models.base import Model
from fedem.models.losses import CLASSES
from fedem.models.metrics import choose_metrics
from fedem.runs.checkpoints import naming_tensors
from fedem.runs.config import Config
from fedem.runs.evaluate import Record, client_rows, evaluate, evaluate_each, name_memory, name_scores
from fedem.runs.folder import RunFolder, check_here
from fedem.runs.neighbours import Memory, Neighbours, predict
from fedem.runs.personalize import Predictors
from fedem.runs.recipe import METADATA, ModelSource, Recipe, SampleFormat
from fedem.runs.rounds import State, cohort_size, took_part
from fedem.runs.unlabelled import Seen, Statistics, check_unlabelled, fit

# Before the role of fine-tuned models, of memories and of statistics of inputs, in a checkpoint.
_TUNED, _MEMORY, _INPUTS = "tuned-", "neighbours-", "inputs-"
_MISSING = ("nan", "NaT", "<NA>")  # how values of numpy and pandas that stand for nothing are written


@dataclass(frozen=True, eq=False)
class PersonalModel:
    """One client's predictor: a mixture of models, perhaps with its nearest training samples beside it."""

    model: Model
    mixture: Mixture
    format: SampleFormat
    neighbours: Neighbours | None = None
    seen: Seen | None = None
    """how the inputs that it was fitted to compare with those of training, where they came without labels"""

    @property
    def mixture_weights(self) -> Tensor:
        """``[M]``, summing to one."""
        return self.mixture.log_weights.exp().cpu()

    def predict(self, inputs: Any) -> Tensor:
        """Return class probabilities ``[n, K]``, or means ``[n, D]``, for inputs ``[n, ...]``."""
        checked = self.format.conform("(new inputs)", inputs).to(self.mixture.log_weights.device)
        try:
            with torch.no_grad():
                found = predict(self.model, self.mixture, checked, self.neighbours).cpu()
        except (RuntimeError, IndexError) as error:
            shape, allowed = list(checked.shape), ", ".join(map(str, ("n", *self.format.inputs)))
            problem = f"The model can't take inputs of shape {shape}; allowed: [{allowed}], as in training."
            raise UserError(problem) from error
        return found if self.format.encoding is None else self.format.encoding.decode(found)

    @property
    def classes(self) -> tuple[Any, ...]:
        """Names of the K classes, in the order of the probabilities; their positions where they have no names."""
        if self.model.loss.task != CLASSES:
            raise UserError("The model predicts numbers, which have no classes; allowed: models of classes.")
        return self.format.labels or tuple(range(max(2, self.format.outputs)))

    def predict_classes(self, inputs: Any) -> NDArray[Any]:
        """Return the name of the most probable class, ``[n]``, for inputs ``[n, ...]``; see :attr:`classes`."""
        return np.array(self.classes)[self.predict(inputs).argmax(1).numpy()]


@dataclass(frozen=True, eq=False)
class Result:
    """A trained federation.

    Attributes:
        recipe: what was trained, and how.
        states: "last" and, when there was validation data, "best" by validation. Never mixed up: methods use "last"
            unless told otherwise. With patience the best has become the last.
        names: of the clients that took part in training.
        summary: what summary.json holds.
        history: one record per round, as in metrics.jsonl.
        clients: one record per client, as in clients.csv.
        origin: what a checkpoint says of the training it came from, so that it can be gone on with.
        tuned: by role, what clients predict with where they fine-tune first; where they don't but some fitted v_t to
            their samples, everybody's v_t alone.
        memories: by role, what clients remember of their training samples, where neighbours have a say.
        statistics: by role, sums over the clients' inputs, for clients that come later without labels.
    """

    recipe: Recipe
    states: Mapping[str, State]
    names: tuple[str, ...]
    summary: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    clients: Sequence[Mapping[str, Any]]
    origin: Mapping[str, Any]
    tuned: Mapping[str, State] = field(default_factory=dict)
    memories: Mapping[str, Memory] = field(default_factory=dict)
    statistics: Mapping[str, Statistics] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The complete configuration."""
        return self.recipe.config

    def __repr__(self) -> str:
        about = self.summary
        score = next((f", {key} {about[key]:.4g}" for key in about if key.startswith("test_") and about[key]), "")
        sizes = f"{counted(about['num_clients'], 'client')}, {counted(about['rounds'], 'round')}"
        return f"<Result of {about['method']} on {about['data']}: {sizes}{score}>"

    def state(self, which: str = "last") -> State:
        """Return the state called "last" or "best"."""
        if which not in self.states:
            raise unknown("state", which, self.states)
        return self.states[which]

    def client(self, name: str, which: str = "last") -> PersonalModel:
        """Return the predictor of a client of the training: the fine-tuned one, where the run fine-tunes."""
        position, recipe, run = self._position(name), self.recipe, self.config.run
        state, tuned = self.state(which), self.tuned.get(which)
        if run.fine_tune_epochs and tuned is None and not recipe.is_fitted:
            raise UserError("Clients fine-tune their models once the run is complete; resume it first (--resume).")
        source, mixer = self._read_by(which)
        predictor = recipe.mixture(source, position, mixer)
        if len(predictor.log_weights) > 1 and tuned is None and not recipe.is_fitted:
            keys, size = client_keys(self.names), cohort_size(run.clients_per_round, len(self.names))
            if not took_part(keys, size, run.seed, state.round)[position]:
                problem = f"Client {name!r} has taken part in no round, and its mixture weights are as drawn at first"
                raise UserError(f"{problem}; they are fitted once the run is complete: resume it first (--resume).")
        memory = self._memory(which)
        neighbours = None if memory is None else memory.of(position)
        return PersonalModel(recipe.model, predictor, recipe.format, neighbours)

    def _read_by(self, which: str) -> tuple[State, Mixer]:
        """Return the state that predictors are read from, the tuned one where there is one, and by which mixer."""
        state, mixer, tuned = self.state(which), self.recipe.mixer, self.tuned.get(which)
        if tuned is None:
            return state, mixer
        return (tuned, Settled()) if tuned.shared else (replace(state, personal=tuned.personal), mixer)

    def _memory(self, which: str) -> Memory | None:
        """Return what clients remember; None where neighbours have no say."""
        if self.config.run.neighbours and which not in self.memories:
            raise UserError("Clients remember their samples once the run is complete; resume it first (--resume).")
        return self.memories.get(which)

    def _position(self, name: str) -> int:
        check_here(self.names)
        if name not in self.names:
            some = ", ".join(map(repr, self.names[:5])) + (", ..." if len(self.names) > 5 else "")
            everybody = counted(len(self.names), "client")
            raise UserError(f"Unknown client {name!r}; allowed: one of the {everybody} ({some}).")
        return self.names.index(name)

    def predict(self, client: str, inputs: Any, which: str = "last") -> Tensor:
        """Predict for a client that took part in training: class probabilities ``[n, K]``, or means ``[n, D]``."""
        return self.client(client, which).predict(inputs)

    def predict_classes(self, client: str, inputs: Any, which: str = "last") -> NDArray[Any]:
        """Return the names of the most probable classes, ``[n]``, for a client that took part in training."""
        return self.client(client, which).predict_classes(inputs)

    def newcomer(self, which: str = "last") -> PersonalModel:
        """Return the predictor of a client of which nothing is known: what the method has for one without samples.

        Where clients mix components, they are mixed by the mean of all clients' weights.
        """
        sample_format = self.recipe.format
        nothing = torch.zeros(0, *sample_format.inputs, dtype=sample_format.input_dtype)
        personal = self.personalize(nothing, (), which=which)
        if not find_method(self.config.method.name).algorithm.is_mixture:
            return personal
        mean = torch.stack([self.client(name, which).mixture.log_weights.exp() for name in self.names]).mean(0)
        return replace(personal, mixture=personal.mixture._replace(log_weights=mean.log()))

    def score(
        self, inputs: Any, targets: Any = None, client: Any = None, *, which: str = "last", metrics: str = ""
    ) -> Record:
        """Score new labelled samples, each by its own client's predictor; returns the figures over all of them.

        Args:
            inputs: a data frame with the columns of training, those of targets and clients among them; or inputs as
                :meth:`predict` takes them, with ``targets`` and ``client`` beside them.
            targets: ``[n]``, names of classes or numbers, as in training.
            client: the client of all samples, or of each one, ``[n]``. Who took no part in training is a newcomer
                (:meth:`newcomer`).
            which: "last" or "best".
            metrics: names of metrics with commas between them; those of the run when not given.
        """
        encoding = self.recipe.format.encoding
        if targets is None and encoding is not None and is_frame(inputs):
            table = read_frame(inputs, encoding.target.name, encoding.client)
            x, y, owners = encoding.inputs(table), encoding.target.encode(table), table.owners()
            client = owners if client is None else client
        elif targets is None:
            raise UserError("The targets are not given; allowed: score(inputs, targets, client), or a run's own frame.")
        else:
            x = self.recipe.format.conform("(new samples)", inputs).numpy()
            y = np.asarray(targets) if encoding is None else encoding.accept_targets(targets)
        if client is None:
            raise UserError("The clients are not given; allowed: client, the name of one or one name per sample.")
        names = np.broadcast_to(np.asarray(client).astype(str), (len(x),)) if np.ndim(client) == 0 else client
        return self.score_encoded(x, y, names, which, metrics)[0]

    def score_encoded(
        self, inputs: Any, targets: Any, clients: Any, which: str = "last", metrics: str = ""
    ) -> tuple[Record, list[Record]]:
        """Score samples whose inputs and targets are encoded already; returns figures over all, and by client.

        Clients count by their samples in the averages, those of a name that ends in ``_unweighted`` alike. Hostile ones
        of a run with an attack do not count.
        """
        recipe, part = self.recipe, "new"
        chosen = choose_metrics(metrics, recipe.loss, recipe.format.outputs) if metrics else recipe.metrics
        federation = Federation.from_arrays(inputs, targets, clients, validation=0, test=0)
        samples, known = federation.train, set(self.names)
        recipe.check_samples(samples.inputs, samples.targets)
        attackers = recipe.attackers(client_keys(self.names))
        bad = () if attackers is None else [self.names[t] for t in attackers.are.nonzero().flatten().tolist()]
        counted = None if attackers is None else torch.tensor([name not in bad for name in federation.names])
        newcomer = None if known.issuperset(federation.names) else self.newcomer(which)
        models = [newcomer if newcomer and name not in known else self.client(name, which) for name in federation.names]
        with recipe.products():
            mixtures, near = [each.mixture for each in models], [each.neighbours for each in models]
            asked = near.__getitem__ if any(near) else None
            scores = {
                part: evaluate_each(recipe.model, mixtures, samples, chosen, neighbours_of=asked, counted=counted)
            }
        weights = torch.stack([each.mixture.log_weights for each in models])
        rows = client_rows("known", federation.names, scores, weights)
        figures = {"samples": len(samples), "clients": federation.num_clients, **name_scores(scores)}
        return _unprefixed(part, figures), [
            _unprefixed(part, row) | {"role": "known" if row["client"] in known else "unknown"} for row in rows
        ]

    def personalize(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        max_iterations: int | None = None,
        unseen_epochs: int | None = None,
        fine_tune_epochs: int | None = None,
        which: str = "last",
        beside: str | None = None,
    ) -> PersonalModel:
        """Fit a client unseen in training on its samples, from any number of them; what others share stays fixed.

        Args:
            inputs: ``[n, ...]``; n may be 0, and the client then gets uniform weights, or the shared model as it is.
            targets: ``[n]``; None where the client has no labels. Its mixture weights are then fitted to the inputs,
                by what the clients of the run have summed up (``unlabelled=True`` in training), and ``seen`` of what is
                returned says how, and whether the inputs are unlike anything seen in training.
            max_iterations: updates of FedEM's mixture weights, 1 in the paper, 0 for convergence; like the next two,
                None for what the run's settings say.
            unseen_epochs: passes over the samples, with methods that train a newcomer to fit it.
            fine_tune_epochs: passes over the samples before it predicts.
            which: "last" or "best".
            beside: a client that took part: start from what it has, such as a peer's components, and not from the mean
                of all.
        """
        recipe, sample_format = self.recipe, self.recipe.format
        x = sample_format.conform("(new client)", inputs)
        epochs = {"unseen_epochs": unseen_epochs, "fine_tune_epochs": fine_tune_epochs}
        if targets is None:
            _check_without_labels(beside=beside, **epochs)
            samples = _unlabelled(x if len(x) else x.reshape(0, *sample_format.inputs), np.full(len(x), ""))
            found, seen = self._fit_inputs(samples, client_keys(["(new client)"]), which, max_iterations)
            return PersonalModel(recipe.model, found.of(recipe.algorithm, 0), sample_format, None, seen[0])
        _check_labelled(targets)
        if len(x) == 0:
            nothing = torch.zeros(0, *sample_format.inputs, dtype=sample_format.input_dtype)
            samples = Samples(Pool(nothing, torch.zeros(0).long()), torch.tensor([0, 0]))
        else:
            if sample_format.encoding is not None:
                targets = sample_format.encoding.accept_targets(targets)
            samples = Federation.from_clients([(x, targets)], ["(new client)"], validation=0, test=0).train
            recipe.check_samples(samples.inputs, samples.targets)
        found = self._fit(samples, client_keys(["(new client)"]), which, beside, max_iterations, None, **epochs)
        return PersonalModel(recipe.model, found.of(recipe.algorithm, 0), sample_format, found.neighbours(0))

    def _fit(
        self,
        samples: Samples,
        keys: Tensor,
        which: str,
        beside: str | None,
        updates: int | None,
        validation: Samples | None,
        **epochs: int | None,
    ) -> Predictors:
        """Fit several unseen clients, whose names are hashed to ``keys``; the rest is as in :meth:`personalize`.

        Where neighbours have a say, the ``validation`` samples say how much, beside those of the clients of the run.
        """
        method, position = self.config.method.name, None if beside is None else self._position(beside)
        if updates is not None and not find_method(method).algorithm.is_mixture:
            problem = f"max_iterations is {updates}, but method {method} has no mixture weights"
            raise UserError(f"{problem}; allowed: unseen_epochs or fine_tune_epochs, for clients that train.")
        _check_updates(updates)
        given = {name: value for name, value in epochs.items() if value is not None}
        personalizer = self.recipe.personalizer(self.recipe.engine())
        personalizer = replace(personalizer, run=self.config.replace("run", **given).run)
        with torch.no_grad(), self.recipe.products():
            found = personalizer.personalize(self.state(which), samples, keys, updates, position)
            memory = self._memory(which)
            return found if memory is None else personalizer.remembering(found, samples, validation, memory.curve)

    def with_unseen(
        self,
        federation: Federation,
        max_iterations: int | None = None,
        which: str = "last",
        beside: str | None = None,
        *,
        unseen_epochs: int | None = None,
        fine_tune_epochs: int | None = None,
    ) -> Result:
        """Fit the clients of ``federation`` on their training samples; returns a result whose clients they are.

        Further arguments are those of :meth:`personalize`.
        """
        samples, recipe = federation.train, self.recipe.fitted()
        recipe.format.conform(federation.names[0], samples.inputs[:1])
        recipe.check_samples(samples.inputs, samples.targets)
        epochs = {"unseen_epochs": unseen_epochs, "fine_tune_epochs": fine_tune_epochs}
        held = federation.validation
        found = self._fit(samples, federation.keys, which, beside, max_iterations, held, **epochs)
        state = found.settled(self.state(which).round)
        scores = evaluate(recipe.algorithm, recipe.engine(), found, federation, recipe.metrics)
        summary = recipe.describe(state) | {"num_clients": federation.num_clients} | name_scores(scores)
        summary |= name_memory(found.memory)
        rows = client_rows("unseen", federation.names, scores, found.log_weights(recipe.algorithm), found.memory)
        memories = {} if found.memory is None else {"last": found.memory}
        return Result(recipe, {"last": state}, federation.names, summary, (), rows, {}, memories=memories)

    def _fit_inputs(
        self, samples: Samples, keys: Tensor, which: str, updates: int | None
    ) -> tuple[Predictors, list[Seen]]:
        """Fit several unseen clients by their inputs, and say how these compare with those of training."""
        check_unlabelled(self.config)
        _check_updates(updates)
        state = self.state(which)
        if self.recipe.is_fitted:
            raise UserError(self.recipe.mixer.welcome(state.shared, state.memory).refusal)
        if which not in self.statistics:
            missing = "The run has no sums over its clients' inputs, by which a client without labels is fitted"
            how = "train with run.unlabelled=true (from Python: unlabelled=True)"
            later = "or make them of a run's own data with `fedem evaluate RUN --unlabelled --save FOLDER`"
            raise UserError(f"{missing}; {how}, {later}.")
        shape, allowed = tuple(samples.pool.inputs.shape[1:]), self.recipe.format.inputs
        if shape != allowed:
            raise UserError(f"The inputs have shape {[*shape]} each; allowed: {[*allowed]}, as in training.")
        personalizer = self.recipe.personalizer(self.recipe.engine())
        with torch.no_grad(), self.recipe.products():
            return fit(personalizer, self.statistics[which], state, samples, keys, updates)

    def with_unlabelled(
        self, inputs: Any, clients: Any, max_iterations: int | None = None, which: str = "last"
    ) -> Result:
        """Fit clients without labels to their inputs; returns a result whose clients they are.

        Their rows say how far the inputs lie from those of training: ``novelty``, and ``is_novel`` below 0.01.

        Args:
            inputs: ``[n, ...]``, encoded already.
            clients: the client of each row, ``[n]``.
            max_iterations: as in :meth:`personalize`.
            which: the same.
        """
        owners, x = np.asarray(clients).astype(str), self.recipe.format.conform("(new clients)", inputs)
        if not len(x) or owners.shape != (len(x),):
            raise UserError(
                f"Got clients of shape {[*owners.shape]} for {len(x)} inputs; allowed: one name each, from 1."
            )
        samples, names = _unlabelled(x, owners), tuple(np.unique(owners).tolist())
        found, seen = self._fit_inputs(samples, client_keys(names), which, max_iterations)
        # What needs labels to predict is left out.
        recipe, state = self.recipe.fitted(fine_tune_epochs=0, neighbours=0), found.settled(self.state(which).round)
        about = self.statistics[which].record() | {"novel": sum(each.is_novel for each in seen)}
        summary = recipe.describe(state) | {"num_clients": len(names), "unlabelled": about}
        rows = client_rows("unseen", names, {}, found.log_weights(recipe.algorithm))
        for row, size, each in zip(rows, samples.sizes.tolist(), seen, strict=True):
            row |= {"train_samples": size, "novelty": each.novelty, "is_novel": each.is_novel}
        return Result(recipe, {"last": state}, names, summary, (), rows, {})

    def save(self, path: str | Path) -> Path:
        """Write a run folder; :meth:`load` reads it back."""
        folder = RunFolder(Path(path))
        with folder.created(self.config):
            with folder.open_metrics(0) as file:
                file.writelines(folder.line(record) for record in self.history)
            self.save_states(folder)
            folder.finish(self.summary, self.clients)
        return folder.path

    def save_states(self, folder: RunFolder) -> None:
        tuned = {f"{_TUNED}{role}": state for role, state in self.tuned.items()}
        memories = {f"{_MEMORY}{role}": each.settled(self.states[role].round) for role, each in self.memories.items()}
        inputs = {f"{_INPUTS}{role}": each.settled(self.states[role].round) for role, each in self.statistics.items()}
        folder.save(
            {**self.states, **tuned, **memories, **inputs}, self.recipe.metadata(self.names) | dict(self.origin)
        )

    @classmethod
    def load(cls, path: str | Path, model: ModelSource | None = None, device: str = "auto") -> Result:
        """Read a run folder, complete or killed; the data are not needed, but a ``model`` passed from Python is."""
        folder = RunFolder(Path(path))
        config, (states, metadata) = folder.config(), folder.load()
        check(folder.checkpoints, metadata, METADATA)
        with naming(folder.checkpoints):
            recipe = Recipe.from_metadata(config, metadata, model, device)
        names = tuple(metadata["clients"])
        origin = {key: value for key, value in metadata.items() if key not in recipe.metadata(names)}
        placed = {role: state.to(recipe.device) for role, state in states.items()}
        tuned = {role.removeprefix(_TUNED): placed.pop(role) for role in states if role.startswith(_TUNED)}
        kept = {role.removeprefix(_MEMORY): placed.pop(role) for role in states if role.startswith(_MEMORY)}
        summed = {role.removeprefix(_INPUTS): placed.pop(role) for role in states if role.startswith(_INPUTS)}
        with naming_tensors(folder.checkpoints):
            memories = {role: Memory.from_state(state) for role, state in kept.items()}
            statistics = {role: Statistics.from_state(state) for role, state in summed.items()}
        summary = folder.summary()
        if summary is not None and summary["rounds"] != placed["last"].round:
            summary = None  # of a state that was damaged
        rows = folder.clients() if summary else []
        # A killed run has no summary yet.
        head = summary or recipe.describe(placed["last"]) | {"num_clients": len(names)}
        found = cls(recipe, placed, names, head, folder.metrics(), rows, origin, tuned, memories, statistics)
        for role in found.states:
            source, mixer = found._read_by(role)
            recipe.check_state(source, len(names), folder.checkpoints, mixer)
        return found


def _unlabelled(inputs: Tensor, owners: NDArray[np.str_]) -> Samples:
    """Return inputs ``[n, ...]`` of ``owners`` ``[n]``, by name, as samples of no label; of nobody as one client's."""
    names, codes = np.unique(owners, return_inverse=True)
    order = torch.from_numpy(np.argsort(codes, kind="stable"))
    sizes = torch.from_numpy(np.bincount(codes, minlength=max(1, len(names))).astype(np.int64))
    return Samples(Pool(inputs[order], torch.zeros(len(inputs), dtype=torch.int64)), offsets_of(sizes))


def _check_without_labels(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            why = "starts from the components of all" if name == "beside" else "has nothing to train on"
            raise UserError(f"{name} is {value!r}, but a client without labels {why}; leave it out, or pass targets.")


def _check_labelled(targets: Any) -> None:
    """Refuse targets of which some are missing: weights are fitted to labels or to inputs, never to both."""
    values = targets.detach().cpu().numpy() if isinstance(targets, Tensor) else np.asarray(targets, dtype=object)
    each = values.reshape(-1).tolist()
    missing = sum(value is None or (not isinstance(value, str) and str(value) in _MISSING) for value in each)
    if missing:
        some = f"{missing} of {counted(len(each), 'target')} {'is' if missing == 1 else 'are'} missing"
        raise UserError(f"{some}; allowed: labels of all samples, or none (targets=None). Leave out the rows without.")


def _check_updates(updates: int | None) -> None:
    if updates is not None and updates < 0:
        raise UserError(f"max_iterations is {updates}; allowed: from 1, or 0 for convergence.")


def _unprefixed(part: str, record: Mapping[str, Any]) -> Record:
    """Leave out the name of the one part that figures are of."""
    return {key.removeprefix(f"{part}_"): value for key, value in record.items()}
