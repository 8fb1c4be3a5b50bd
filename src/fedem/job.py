"""A run, prepared and carried on round by round; what is trained is scored here and summed up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from fedem.config import Config
from fedem.data.base import Dataset, Truth
from fedem.diagnostics import check_diagnosable, estimate_dissimilarity
from fedem.diagnostics import measure as diagnose
from fedem.engines import Engine
from fedem.engines.memory import free_bytes, peak_bytes
from fedem.engines.sharing import share_out
from fedem.errors import UserError
from fedem.evaluate import Scores, evaluate, evaluate_oracle
from fedem.facts import checkpoint_facts
from fedem.federation import Federation
from fedem.inexactness import check_measurable, measure
from fedem.parts import ModelSource, Parts, Shapes
from fedem.personal import Personalizer, Predictors
from fedem.records import Record, client_rows, name_scores, name_weights
from fedem.recovery import Recovery, recover
from fedem.result import Result
from fedem.rounds import RoundLog, State, Training, cohort_size, mixer_seed
from fedem.settling import all_targets, check_batches, check_encoding, settle_loss, settle_partition
from fedem.splits import thinned
from fedem.team import ALONE, Team

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
            entry |= measure(self.training, before).record()
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
