"""A whole run: data -> rounds -> scores -> a folder on disk and a :class:`~fedem.runs.result.Result`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedem.core.errors import UserError
from fedem.data.dataset import Dataset, Truth
from fedem.data.federation import Federation
from fedem.data.samples import thinned
from fedem.engines import Engine
from fedem.engines.device import free_bytes, peak_bytes, products
from fedem.engines.processes import ALONE, Team, joined, share_out
from fedem.models import MODELS
from fedem.runs.config import GIVEN, Config, route
from fedem.runs.evaluate import Record, Scores, client_rows, evaluate, evaluate_oracle, name_scores, name_weights
from fedem.runs.folder import RunFolder, check_here
from fedem.runs.measures import (
    Recovery,
    check_diagnosable,
    check_measurable,
    diagnose,
    estimate_dissimilarity,
    measure_alpha,
    recover,
)
from fedem.runs.personalize import Personalizer, Predictors
from fedem.runs.recipe import (
    ModelSource,
    Parts,
    Shapes,
    all_targets,
    check_batches,
    check_encoding,
    check_model,
    checkpoint_facts,
    settle_loss,
    settle_partition,
)
from fedem.runs.result import Result, name_tuned
from fedem.runs.rounds import RoundLog, State, Training, cohort_size, mixer_seed

Listener = Callable[[Record], None]
"""Called with each round's record."""


def train(
    federation: Federation | Dataset,
    method: str = "fedem",
    *,
    model: ModelSource | str | Mapping[str, Any] | None = None,
    truth: Truth | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **options: Any,
) -> Result:
    """Train a federation.

    Args:
        federation: the clients and their samples.
        method: a name from :data:`fedem.METHODS`.
        model: an ``nn.Module`` with parts that can be initialised afresh, or a function that builds one; or a name from
            :data:`fedem.models.MODELS`, or a name and settings, ``{"name": "mlp", "hidden": 32}``. A linear model when
            not given.
        truth: what generated the data, if known: then the oracle is scored and recovery reported.
        out: a folder to write the run to while it goes on; nothing is written when not given.
        resume: go on with the run in ``out``; the result is the same as if it had never stopped.
        listener: called with each round's record.
        **options: any setting by its name, such as ``num_components=3``, ``rounds=100``, ``learning_rate=0.3``,
            ``local_epochs=2``, ``clients_per_round=0.2``, ``seed=1``, ``solver="adam"``, ``loss="squared_error"``.

    """
    if not isinstance(federation, Federation | Dataset):
        what = repr(str(federation)) if isinstance(federation, str | Path) else f"of type {type(federation).__name__}"
        raise UserError(
            f"federation is {what}; allowed: a Federation (fedem.Federation.from_clients, ...) or a Dataset, such as "
            "fedem.FromFile(path=...).make(seed)."
        )
    given: dict[str, dict[str, Any]] = {"data": {"name": GIVEN}}
    if isinstance(model, str | Mapping):
        options, model = options | {"model": model}, None
    elif callable(model):
        given["model"] = {"name": GIVEN}
    elif model is not None:
        raise UserError(
            f"model is {model!r}; allowed: an nn.Module, a function that builds one, or a name ({', '.join(MODELS)}), "
            'also with settings, {"name": "mlp", "hidden": 32}.'
        )
    config = Config.build(given, route(options, method))
    dataset = federation if isinstance(federation, Dataset) else Dataset(federation, truth)
    return run(config, dataset, model=model, out=out, resume=resume, listener=listener)


def run(
    config: Config,
    dataset: Dataset,
    *,
    model: ModelSource | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> Result:
    """Carry out the run that ``config`` describes on ``dataset``; processes started together share the work."""
    with joined() as team:
        job = Job.prepare(config, dataset, model, fresh=not resume, team=team)
        return carry_out(job, out=out, resume=resume, listener=listener)


def carry_out(
    job: Job, *, out: str | Path | None = None, resume: bool = False, listener: Listener | None = None
) -> Result:
    """Carry out a job that is prepared already; of a team the leader alone writes, and tells the listener."""
    if job.training.team.size > 1:
        job.training.team.agree("settings or data", job.config.to_toml() + job.federation.fingerprint)
    with products(job.config.run.precision, job.parts.device):
        return _in_folder(job.placed(), RunFolder(Path(out)) if out is not None else None, resume, listener)


def _in_folder(job: Job, folder: RunFolder | None, resume: bool, listener: Listener | None) -> Result:
    if resume and folder is None:
        raise UserError("resume needs the folder of the run to go on with; pass out=... (--out).")
    if not job.training.team.leads:
        return _carry_out(job, None, None, None)
    if folder is None:
        return _carry_out(job, None, None, listener)
    if not resume:
        folder.create(job.config)
    elif not folder.exists():
        raise UserError(f"There is no run to resume in {folder.path} (no config.toml).")
    with folder.locked():
        resumed = resume and folder.reopen(job.config)
        return _carry_out(job, folder, _restore(job, folder) if resumed else None, listener)


def _carry_out(job: Job, folder: RunFolder | None, restored: Progress | None, listener: Listener | None) -> Result:
    rounds, told = job.config.run.rounds, job.training.team.tell(restored)
    progress = Progress(job.training.init(), None, None, []) if told is None else _placed(told, job)
    with _Recorder(folder, progress.state.round, listener) as record:
        while progress.state.round < rounds:
            record(job.advance(progress))
            due = progress.state.round % job.config.run.checkpoint_every == 0
            if folder and (due or progress.state.round == rounds):
                folder.save(progress.states, job.checkpoint_facts(progress))
    result = job.conclude(progress)
    if folder:
        if result.tuned:
            folder.save(progress.states | name_tuned(result.tuned), job.checkpoint_facts(progress))
        folder.finish(result.summary, result.clients)
    return result


def _restore(job: Job, folder: RunFolder) -> Progress:
    """Take up a run where its last checkpoint left it."""
    states, facts = folder.load()
    if "data" not in facts:
        raise UserError(f"The clients in {folder.path} were fitted after training; no training can be taken up.")
    if facts["data"] != job.federation.fingerprint:
        raise UserError(f"The data are not those that the run in {folder.path} was trained on.")
    check_model(job.parts.model, facts.get("leaves"))
    history = [line for line in folder.metrics() if line["round"] <= states["last"].round]
    return Progress(states["last"], states.get("best"), facts["best_validation"], history, facts["seconds"])


def _placed(progress: Progress, job: Job) -> Progress:
    """Move what was read from files to where the job is done."""
    best = None if progress.best is None else progress.best.to(job.parts.device)
    return replace(progress, state=progress.state.to(job.parts.device), best=best)


class _Recorder:
    """Writes each round's record to the folder's metrics and TensorBoard events, and tells the listener."""

    def __init__(self, folder: RunFolder | None, done: int, listener: Listener | None):
        self._listener, self._file, self._events = listener, None, None
        if folder:
            from torch.utils.tensorboard import SummaryWriter

            self._file = folder.open_metrics(done)
            self._events = SummaryWriter(str(folder.path / "tensorboard"), purge_step=done + 1)

    def __enter__(self) -> Listener:
        return self._record

    def __exit__(self, *_: object) -> None:
        if self._file and self._events:
            self._file.close()
            self._events.close()

    def _record(self, entry: Record) -> None:
        if self._file and self._events:
            self._file.write(RunFolder.line(entry))
            self._file.flush()
            for key, value in entry.items():
                if key != "round" and value is not None:
                    self._events.add_scalar(key, value, entry["round"])
        if self._listener:
            self._listener(entry)


def reassess(
    path: str | Path, device: str = "auto", fine_tune_epochs: int | None = None, fine_tune_rate: float | None = None
) -> Result:
    """Make a run's data again and score its saved states afresh; nothing is trained together, nothing is written.

    Fine-tuning may be another than the run's: it comes after training, so its settings can be tried without training
    again.
    """
    folder = RunFolder(Path(path))
    asked = {"device": device, "fine_tune_epochs": fine_tune_epochs, "fine_tune_rate": fine_tune_rate}
    config = folder.config().replace("run", **{key: value for key, value in asked.items() if value is not None})
    if fine_tune_rate is not None and not config.run.fine_tune_epochs:
        raise UserError(
            f"fine_tune_rate is {fine_tune_rate:g}, but clients of {path} don't fine-tune; allowed with it: "
            "fine_tune_epochs of at least 1."
        )
    check_here(folder.load()[1]["clients"])
    job = Job.prepare(config, config.make_data(), None, fresh=False).placed()
    with products(config.run.precision, job.parts.device):
        return job.conclude(_placed(_restore(job, folder), job))


# A run, prepared and carried on round by round; what is trained is scored here and summed up.

_PROBED = 5
"""samples that a model is tried on"""


@dataclass
class Progress:
    """Where a run stands."""

    state: State
    best: State | None
    best_validation: float | None
    history: list[Record]
    seconds_before: float = 0.0
    """taken before the run was resumed"""
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """How long the run has taken in all."""
        return self.seconds_before + time.perf_counter() - self.started

    @property
    def states(self) -> dict[str, State]:
        """The states worth keeping, by role."""
        return {"last": self.state} | ({"best": self.best} if self.best else {})


@dataclass(frozen=True)
class Job:
    """A run, prepared: everything checked, nothing trained."""

    config: Config
    parts: Parts
    shapes: Shapes
    engine: Engine
    note: str | None
    federation: Federation
    truth: Truth | None
    training: Training
    personalizer: Personalizer

    @classmethod
    def prepare(
        cls, config: Config, dataset: Dataset, source: ModelSource | None, fresh: bool = True, team: Team = ALONE
    ) -> Job:
        """Check everything that can be checked before work starts.

        A run that is not ``fresh`` has a state: what the mixer makes at the start, such as a graph, is in it. The
        processes of a ``team`` prepare the same run, each for itself.
        """
        federation = dataset.federation
        if config.run.unseen:
            federation = federation.hold_out(config.run.unseen, config.run.seed)
        check_encoding(config, dataset)
        config = settle_partition(config, dataset.partition_hash)
        targets = all_targets(federation)
        config = settle_loss(config, targets)
        loss = config.loss
        assert loss is not None, "just settled"
        inputs = federation.train.span(0, min(_PROBED, len(federation.train))).inputs
        classes = dataset.label_names
        outputs = loss.num_outputs(targets)
        if classes is not None and outputs > 1:
            outputs = len(classes)  # some may have no sample among these clients
        shapes = Shapes(
            federation.input_shape, inputs.dtype, outputs, dataset.feature_names, dataset.encoding, dataset.label_names
        )
        parts = Parts.build(config, shapes, source)
        if source is None and not inputs.is_floating_point() and inputs.dtype != torch.uint8:
            config.model.check(*federation.input_range)
        parts.model.check(inputs, targets)
        check_batches(parts.model, config.batching, federation)
        if config.solver.differentiates_twice and not parts.model.is_twice_differentiable:
            raise UserError(
                f"Solver {config.name('solver')} needs second derivatives, and this model normalises batches or is "
                "recurrent; allowed with it: models without such layers, or another solver."
            )
        parts.model.probe(inputs.to(parts.device))
        parts.algorithm.check(inputs)
        if fresh:
            parts.mixer.check(federation.keys, mixer_seed(config.run.seed))
        if config.run.measure_alpha_every:
            check_measurable(parts.algorithm)
        if config.run.diagnose_every:
            check_diagnosable(parts.algorithm, parts.mixer)
        engine, note = parts.engine(config)
        training = Training(
            parts.algorithm,
            parts.mixer,
            engine,
            config.batching,
            config.schedule,
            federation,
            config.run.rounds,
            cohort_size(config.run.clients_per_round, federation.num_clients),
            config.run.seed,
            parts.device,
            team,
        )
        team.check(training.cohort_size, parts.device)
        engine = share_out(engine, team)
        personalizer = parts.personalizer(config, engine)
        return cls(config, parts, shapes, engine, note, federation, dataset.truth, training, personalizer)

    def placed(self) -> Job:
        """Return the job with its samples on its GPU, if they fit there; else a chunk's are sent when it needs them."""
        device = self.parts.device
        if device.type != "cuda" or self.federation.num_bytes > free_bytes(device) // 2:
            return self
        federation = self.federation.to(device)
        return replace(self, federation=federation, training=replace(self.training, federation=federation))

    def checkpoint_facts(self, progress: Progress) -> Record:
        """What a checkpoint must say besides its tensors."""
        return checkpoint_facts(self.federation.names, self.shapes, self.parts.model) | self._origin(progress)

    def _origin(self, progress: Progress) -> Record:
        return {
            "data": self.federation.fingerprint,
            "best_validation": progress.best_validation,
            "seconds": progress.seconds,
        }

    def predictors(self, state: State) -> Predictors:
        """Return every client's predictor."""
        with torch.no_grad():
            return self.personalizer.predictors(state, self.federation)

    def scores(self, found: Predictors) -> dict[str, Scores]:
        """Score the clients' predictors on every part of the data."""
        return evaluate(self.parts.algorithm, self.engine, found, self.federation)

    def advance(self, progress: Progress) -> Record:
        """Run one round and, when it is due, score the new state and judge how well clients solved their problems."""
        before = progress.state
        progress.state, log = self.training.step(before)
        entry = _cost(progress.state.round, log)
        run, done = self.config.run, progress.state.round
        if run.is_due(run.measure_alpha_every, done):
            entry |= measure_alpha(self.training, before).record()
        if run.is_due(run.diagnose_every, done):
            entry |= diagnose(self.training, before, progress.state).record()
        if run.is_scored(done):
            scores = self.scores(self.predictors(progress.state))
            entry |= name_scores(scores)
            validation = scores.get("validation")
            if validation is not None and _improves(validation, progress.best_validation):
                progress.best, progress.best_validation = progress.state, validation.average
        progress.history.append(entry)
        return entry

    def conclude(self, progress: Progress) -> Result:
        """Score the end of the run and sum it up."""
        found = {role: self.predictors(state) for role, state in progress.states.items()}
        scores = {role: self.scores(entry) for role, entry in found.items()}
        summary = self._summary(progress, found["last"], scores)
        weights = found["last"].log_weights(self.parts.algorithm)
        summary |= name_weights(weights)
        clients = client_rows("train", self.federation.names, scores["last"], weights)
        unseen = self.federation.unseen
        if unseen is not None and self.parts.mixer.welcome(progress.state.shared, progress.state.memory) is not None:
            run, samples = self.config.run, unseen.train
            if run.unseen_share < 1:
                samples = thinned(samples, unseen.keys, run.unseen_share, run.seed)
            with torch.no_grad():
                fitted = self.personalizer.personalize(progress.state, samples, unseen.keys)
            theirs = evaluate(self.parts.algorithm, self.engine, fitted, unseen)
            summary |= {f"unseen_{key}": value for key, value in name_scores(theirs).items()}
            their_weights = fitted.log_weights(self.parts.algorithm)
            summary |= {f"unseen_{key}": value for key, value in name_weights(their_weights).items()}
            clients += client_rows("unseen", unseen.names, theirs, their_weights)
        summary |= {"seconds_total": progress.seconds, **peak_bytes(self.parts.device)}
        tuned = {}
        if self.config.run.fine_tune_epochs:
            tuned = {role: found[role].settled(state.round) for role, state in progress.states.items()}
        return Result(
            self.config,
            self.parts,
            self.shapes,
            progress.states,
            self.federation.names,
            summary,
            progress.history,
            clients,
            self._origin(progress),
            tuned,
        )

    def _summary(self, progress: Progress, found: Predictors, scores: Mapping[str, Mapping[str, Scores]]) -> Record:
        seconds = [line["seconds"] for line in progress.history]
        history = progress.history
        summary: Record = {
            **self.parts.describe(self.config, progress.state),
            "num_clients": self.federation.num_clients,
            "num_unseen_clients": self.federation.unseen.num_clients if self.federation.unseen else 0,
            "engine": type(self.training.engine).__name__,
            **name_scores(scores["last"]),
            # The test part took no part in choosing it.
            "best": {"round": progress.best.round, **name_scores(scores["best"])} if progress.best else None,
            "seconds_per_round": statistics.median(seconds[1:] or seconds) if seconds else None,
            **{f"{way}_per_round": _mean(line[way] for line in history) for way in ("bytes_up", "bytes_down")},
        }
        if self.engine.most_together:
            summary["clients_together"] = self.engine.most_together
        summary |= self.parts.mixer.facts(progress.state.memory, self.training.cohort_size)
        measured = [line for line in history if "alpha_mean" in line]
        if measured:
            summary |= {name: measured[-1][name] for name in ("alpha_mean", "alpha_max")}
        if any("dissimilarity" in line for line in history):
            summary |= estimate_dissimilarity(history).record()
        if self.truth is not None:
            oracle = evaluate_oracle(self.truth, self.federation)
            if oracle is not None:
                summary |= {"oracle_accuracy": oracle.average, "oracle_bottom_decile": oracle.bottom_decile}
                summary["oracle_loss"] = oracle.loss
            recovery = self._recovery(found)
            if recovery is not None:
                summary["recovery"] = {
                    "component_distances": list(recovery.component_distances),
                    "weight_distance": recovery.weight_distance,
                    "cluster_accuracy": recovery.cluster_accuracy,
                }
        encoding = self.shapes.encoding
        if encoding is not None and encoding.classes is None:
            # Scores are of standardised targets: times this, a root mean squared error is in the targets' own units.
            summary["target_deviation"] = encoding.target_deviation
        if self.note:
            summary["note"] = self.note
        return summary

    def _recovery(self, found: Predictors) -> Recovery | None:
        """Compare with the truth, where all clients mix the same components, of the truth's kind."""
        truth, mixture = self.truth, found.of(self.parts.algorithm, 0)
        if truth is None or len(mixture.log_weights) == 1 or bool((found.reads != found.reads[0]).any()):
            return None
        components = next((leaf for name, leaf in mixture.components.items() if name.endswith("weight")), None)
        if components is None or components.flatten(1).shape[1] != truth.components.shape[1]:
            return None
        weights = found.log_weights(self.parts.algorithm).exp().cpu()
        return recover(components.flatten(1), weights, truth.components, truth.weights_of(self.federation.names))


def _mean(values: Iterable[int]) -> int | None:
    known = list(values)
    return round(statistics.mean(known)) if known else None


def _improves(scores: Scores, best: float | None) -> bool:
    if best is None:
        return True
    return scores.average > best if scores.larger_is_better else scores.average < best


def _cost(round_number: int, log: RoundLog) -> Record:
    return {
        "round": round_number,
        "learning_rate": log.learning_rate,
        "clients": len(log.cohort),
        "seconds": log.seconds,
        "bytes_up": log.bytes_up,
        "bytes_down": log.bytes_down,
    }
