"""A whole run: a recipe and a federation -> rounds -> scores -> a folder and a :class:`~fedem.runs.result.Result`.

A run is prepared first, which checks everything that can be checked, and then carried out round by round.
"""

from __future__ import annotations

import errno
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedem.core.deadline import StoppedError, Watch
from fedem.core.errors import UserError, counted, naming
from fedem.core.random import CURVATURE, choose
from fedem.core.schema import Maybe, Number, Table, check
from fedem.core.tree import tree_index
from fedem.data.dataset import Dataset, Truth
from fedem.data.federation import PARTS, Federation
from fedem.data.samples import Samples, thinned
from fedem.engines import Engine
from fedem.engines.device import free_bytes, peak_bytes
from fedem.engines.processes import ALONE, Shared, Team, joined
from fedem.methods.base import AUTO, find_method
from fedem.methods.wrappers.compression import split_residual
from fedem.models import MODELS
from fedem.models.metrics import METRICS, Metric, further_metrics
from fedem.runs import measures
from fedem.runs.attacks import Attackers
from fedem.runs.components import COUNT, LOOK, Components, Search, looks
from fedem.runs.config import GIVEN, Config, route
from fedem.runs.evaluate import (
    Record,
    Scores,
    base_rate,
    client_rows,
    evaluate,
    evaluate_oracle,
    evaluate_part,
    name_memory,
    name_scores,
    name_weights,
)
from fedem.runs.folder import DIVERGED, Failure, RunFolder, check_here
from fedem.runs.personalize import Personalizer, Predictors
from fedem.runs.recipe import ModelSource, Recipe
from fedem.runs.result import Result
from fedem.runs.rounds import DivergedError, RoundCosts, State, Training, cohort_size, not_finite, took_part
from fedem.runs.unlabelled import Statistics, check_unlabelled, fit, gather, with_mean_weights

Listener = Callable[[Record], None]  # called with each round's record
_ORIGIN = Table({"seconds": Number(least=0), "best_validation": Maybe(Number())})  # what going on needs to know
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # what writing to a disk that takes no more is told
_HALVINGS = 10  # of the learning rate, for one round
_IMAGE = 8  # pixels of the smallest images that are taken for such
_TRIAL = (10, 50)  # the fewest and the most rounds in which a model that might be chosen is tried
_WATCHED, _WATCHED_ROWS = 256, 1 << 14  # clients and samples by which divergence is noticed


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
            :data:`fedem.models.MODELS`, or a name and settings, ``{"name": "mlp", "hidden": 32}``; or "auto", which
            chooses one by the data. A linear model when not given.
        truth: what generated the data, if known: then the oracle is scored and recovery reported.
        out: a folder to write the run to while it goes on; nothing is written when not given.
        resume: go on with the run in ``out``; the result is the same as if it had never stopped. It may have more
            rounds than before where the schedule is "constant".
        listener: called with each round's record.
        **options: any setting by its name, such as ``num_components=3``, ``rounds=100``, ``learning_rate=0.3``,
            ``local_epochs=2``, ``clients_per_round=0.2``, ``seed=1``, ``solver="adam"``, ``loss="squared_error"``.
    """
    if not isinstance(federation, Federation | Dataset):
        what = repr(str(federation)) if isinstance(federation, str | Path) else f"of type {type(federation).__name__}"
        allowed = "a Federation (fedem.Federation.from_clients, ...) or a Dataset"
        raise UserError(f"federation is {what}; allowed: {allowed}, such as fedem.FromFile(path=...).make(seed).")
    given: dict[str, dict[str, Any]] = {"data": {"name": GIVEN}}
    if isinstance(model, str | Mapping):
        options, model = options | {"model": model}, None
    elif callable(model):
        given["model"] = {"name": GIVEN}
    elif model is not None:
        named = f"a name ({', '.join(MODELS)}, auto), also with settings, " + '{"name": "mlp", "hidden": 32}'
        raise UserError(f"model is {model!r}; allowed: an nn.Module, a function that builds one, or {named}.")
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
    if resume and out is not None and RunFolder(Path(out)).exists():
        config = config.settled_like(RunFolder(Path(out)).config())
    with joined() as team:
        trainer = Trainer.prepare(config, dataset, model, fresh=not resume, team=team)
        return carry_out(trainer, out=out, resume=resume, listener=listener)


def carry_out(
    trainer: Trainer, *, out: str | Path | None = None, resume: bool = False, listener: Listener | None = None
) -> Result:
    """Carry out a run that is prepared already; of a team the leader alone writes, and calls the listener."""
    team, config, run = trainer.team, trainer.config, trainer.config.run
    if team.size > 1:
        team.agree("settings or data", config.to_toml() + trainer.federation.fingerprint)
    if resume and out is None:
        raise UserError("resume needs the folder of the run to go on with; pass out=... (--out).")
    folder, restored = RunFolder(Path(out)) if out is not None and team.leads else None, None
    with trainer.recipe.products(), ExitStack() as stack:
        trainer = trainer.placed()
        if folder:
            stack.enter_context(folder.reopened() if resume else folder.created(config))
            restored = _restore(trainer, folder) if resume and folder.reopen(config, longer=True) else None
            folder.fail(None)
            stack.enter_context(_failing(folder))
        restored = team.tell(restored)
        progress = restored.to(trainer.recipe.device) if restored else Progress(trainer.training.init())
        with _recording(folder, progress.rounds, listener if team.leads else None) as record:
            watch = Watch(run.checkpoint_seconds)
            while not trainer.is_over(progress):
                record(trainer.advance(progress))
                watch.after_round()
                is_over = trainer.is_over(progress)
                stops = watch.can_stop and not is_over and team.tell(watch.is_over())
                due = watch.is_due() if run.checkpoint_seconds else run.is_due(run.checkpoint_every, progress.rounds)
                if folder and (is_over or stops or due):
                    folder.save(progress.states, trainer.checkpoint(progress))
                    watch.after_checkpoint()
                if stops:
                    raise StoppedError(f"Stopped after round {progress.rounds} of {run.rounds}, as asked.")
        result = trainer.conclude(progress)
        if folder:
            if result.tuned or result.memories or result.statistics:
                result.save_states(folder)
            folder.finish(result.summary, result.clients)
        return result


@contextmanager
def _failing(folder: RunFolder) -> Iterator[None]:
    """Write down that training diverged, so that whoever reads the folder knows why; name the folder if it is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        mend = "make room and go on with --resume"
        raise UserError(f"{folder.path} can't be written: {error.strerror}; {mend}.") from None
    except DivergedError as error:
        folder.fail(Failure(DIVERGED, str(error)))
        raise


def _restore(trainer: Trainer, folder: RunFolder) -> Progress:
    states, metadata = folder.load()
    if "data" not in metadata:
        raise UserError(f"The clients in {folder.path} were fitted after training; no training can be taken up.")
    if metadata["data"] != trainer.federation.fingerprint:
        raise UserError(f"The data are not those that the run in {folder.path} was trained on.")
    check(folder.checkpoints, metadata, _ORIGIN)
    with naming(folder.checkpoints):
        trainer.recipe.check_leaves(metadata.get("leaves"))
    last, best, started = states["last"], states.get("best"), time.perf_counter() - metadata["seconds"]
    for state in (last, *([best] if best else [])):
        clients, device = trainer.federation.num_clients, trainer.recipe.device
        trainer.recipe.check_state(state.to(device), clients, folder.checkpoints)
        if (name := not_finite(state.shared)) is not None:  # which no round would have left
            raise UserError(f"{folder.checkpoints} has numbers in {name!r} that are not finite; allowed: finite ones.")
    stopped = metadata.get("stopped_after")
    if stopped == last.round < trainer.config.run.rounds:  # at an end that is none any more
        stopped = None
    done = last.round if stopped is None else stopped
    history = [line for line in folder.metrics() if line["round"] <= done]
    lost = sorted({*range(1, done + 1)} - {line["round"] for line in history})
    if lost and trainer.components is not None:
        why = f"method.num_components is {AUTO!r}, which goes by the records of the rounds before"
        problem = f"{folder.path} has no record of {counted(len(lost), 'round')}, such as round {lost[0]}"
        raise UserError(f"{problem}, but {why}; allowed: a new run.")
    return Progress(last, best, metadata["best_validation"], history, started, metadata.get("slowed", 1.0), stopped)


@contextmanager
def _recording(folder: RunFolder | None, done: int, listener: Listener | None) -> Iterator[Listener]:
    """Yield what writes a round's record to the folder's metrics and TensorBoard events, and calls the listener."""
    if folder is None:
        yield listener or (lambda entry: None)
        return
    from torch.utils.tensorboard import SummaryWriter

    where = str(folder.path / "tensorboard")
    with folder.open_metrics(done) as file, SummaryWriter(where, purge_step=done + 1) as events:

        def record(entry: Record) -> None:
            file.write(RunFolder.line(entry))
            for key, value in entry.items():
                if key != "round" and isinstance(value, int | float):
                    events.add_scalar(key, value, entry["round"])
            if listener:
                listener(entry)

        yield record


def reassess(path: str | Path, device: str = "auto", **settings: Any) -> Result:
    """Make a run's data again and score its saved states afresh, perhaps by other ``settings``; nothing is written."""
    folder = RunFolder(Path(path))
    config = folder.config().replace("run", device=device, **settings)
    if "fine_tune_rate" in settings and not config.run.fine_tune_epochs:
        problem = f"fine_tune_rate is {config.run.fine_tune_rate:g}, but clients of {path} don't fine-tune"
        raise UserError(f"{problem}; allowed with it: fine_tune_epochs of at least 1.")
    with _reopened(folder, config) as (trainer, progress):
        return trainer.conclude(progress)


def describe_inputs(path: str | Path, device: str = "auto") -> dict[str, Statistics]:
    """Make a run's data again and sum up inputs for clients without labels, by state; nothing is written or scored."""
    folder = RunFolder(Path(path))
    config = folder.config()
    check_unlabelled(config)
    with _reopened(folder, config.replace("run", device=device, unlabelled=True)) as (trainer, progress):
        return trainer.statistics(progress)


@contextmanager
def _reopened(folder: RunFolder, config: Config) -> Iterator[tuple[Trainer, Progress]]:
    """Make a run's data again, by ``config``; yields what carries it out, and where it stands."""
    check_here(folder.load().facts["clients"])
    trainer = Trainer.prepare(config, config.make_data(), fresh=False).placed()
    with trainer.recipe.products():
        yield trainer, _restore(trainer, folder).to(trainer.recipe.device)


def _choose_model(config: Config, dataset: Dataset, team: Team) -> tuple[Config, str]:
    """Return the configuration with the model that suits the data in place of "auto", and why it does."""
    shape = dataset.federation.input_shape
    if len(shape) == 3 and min(shape[1:]) >= _IMAGE:
        return config.replace("model", name="cnn"), "for images"
    linear, deep = (config.replace("model", name=name) for name in ("linear", "mlp"))
    if find_method(config.method.name).needs_layers:
        return deep, f"method {config.method.name} takes no model of a single layer"
    if not len(dataset.federation.validation):
        return linear, "there are no validation samples to choose by"
    trials = dataset._replace(federation=dataset.federation.without_test())
    try:
        tried = _Tried.of(deep, trials, team)
    except DivergedError:
        return linear, "mlp diverges"
    except UserError as error:
        return linear, f"mlp can't be trained: {error}"
    with suppress(DivergedError):
        usual = _Tried.of(linear, trials, team)
        if not tried.is_better_than(usual):
            return linear, f"{usual} against {tried.score} of mlp after {tried.rounds} rounds"
        return deep, f"{tried} against {usual.score} of linear after {tried.rounds} rounds"
    return deep, "linear diverges"


class _Tried(NamedTuple):
    """How well a model that might be chosen does after a short training."""

    metric: Metric
    validation: float
    rounds: int

    @classmethod
    def of(cls, config: Config, dataset: Dataset, team: Team) -> _Tried:
        rounds = min(config.run.rounds, max(config.run.rounds // 4, _TRIAL[0]), _TRIAL[1])
        none = {"unseen": 0.0, "patience": 0, "measure_alpha_every": 0, "diagnose_every": 0}
        config = config.replace("run", rounds=rounds, evaluate_every=5, **none)
        trainer = Trainer.prepare(config, dataset, fresh=False, team=team).placed()
        with trainer.recipe.products():
            progress = Progress(trainer.training.init())
            while not trainer.is_over(progress):
                trainer.advance(progress)
        assert progress.best_validation is not None
        return cls(trainer.recipe.metrics[0], progress.best_validation, rounds)

    @property
    def score(self) -> str:
        return self.metric.text(self.validation) + ("%" if self.metric.in_percent else "")

    def is_better_than(self, other: _Tried) -> bool:
        if math.isnan(other.validation):
            return not math.isnan(self.validation)
        better = self.validation > other.validation
        return better if self.metric.larger_is_better else self.validation < other.validation

    def __str__(self) -> str:
        return f"validation {self.metric.title} {self.score}"


@dataclass
class Progress:
    """Where a run stands."""

    state: State
    best: State | None = None
    best_validation: float | None = None
    history: list[Record] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)  # for a run that is resumed, as if it had never stopped
    slowed: float = 1.0  # what the learning rate is multiplied by, once it was halved
    stopped_after: int | None = None  # rounds, where training is over and the best of them has become the state

    @property
    def rounds(self) -> int:
        """Rounds trained; the state may be that of an earlier one."""
        return self.state.round if self.stopped_after is None else self.stopped_after

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def states(self) -> dict[str, State]:
        return {"last": self.state} | ({"best": self.best} if self.best else {})

    def to(self, device: torch.device) -> Progress:
        return replace(self, state=self.state.to(device), best=None if self.best is None else self.best.to(device))


@dataclass(frozen=True, eq=False)
class Trainer:
    """A run, prepared: a recipe and the federation to train. Everything is checked, nothing is trained."""

    recipe: Recipe
    federation: Federation
    truth: Truth | None = None  # what generated the data, where it is known
    team: Team = ALONE  # the processes that share the work, each of which has prepared the same run

    why: str = ""  # its model was chosen, where the data decided that

    @classmethod
    def prepare(
        cls,
        config: Config,
        dataset: Dataset,
        source: ModelSource | None = None,
        fresh: bool = True,
        team: Team = ALONE,
        tries: bool = True,
    ) -> Trainer:
        """Check everything; a model that is to be chosen is, by trials or, unless it ``tries``, for the check alone."""
        if config.run.unseen:
            dataset = dataset._replace(federation=dataset.federation.hold_out(config.run.unseen, config.run.seed))
        why = ""
        if config.name("model") == "auto" and tries:
            config, why = _choose_model(config, dataset, team)
        elif config.name("model") == "auto":
            config = config.replace("model", name="mlp" if find_method(config.method.name).needs_layers else "linear")
        trainer = cls(config.resolve(dataset, source, fresh), dataset.federation, dataset.truth, team, why)
        team.check(trainer.training.cohort_size, trainer.recipe.device)
        return trainer

    @property
    def config(self) -> Config:
        return self.recipe.config

    @cached_property
    def engine(self) -> Engine:
        """Runs clients by all processes of the team together; in a round each process runs its share by itself."""
        alone = self.training.engine
        return alone if self.team.size == 1 else Shared(alone, self.team, note=alone.note)

    @cached_property
    def training(self) -> Training:
        recipe, config, run, federation = self.recipe, self.config, self.config.run, self.federation
        cohort = cohort_size(run.clients_per_round, federation.num_clients)
        if self.attackers is not None:
            poisoned = self.attackers.poisoned(federation.train, max(2, recipe.format.outputs))
            federation = replace(federation, train=poisoned)
        how = (recipe.algorithm, recipe.engine(), config.batching, run.seed, recipe.mixer, config.schedule, federation)
        where = (run.rounds, cohort, recipe.device, self.team)
        return Training(*how, *where, codec=recipe.codec, attackers=self.attackers)

    @cached_property
    def attackers(self) -> Attackers | None:
        """The hostile clients; None where no attack is declared."""
        return self.recipe.attackers(self.federation.keys)

    @cached_property
    def honest(self) -> Federation:
        """The clients that figures are of: all but the hostile ones."""
        if self.attackers is None:
            return self.federation
        return self.federation.take(self.attackers.honest.nonzero().flatten())

    def _of_honest(self, values: Tensor) -> Tensor:
        """Return the rows of ``[T, ...]`` that are honest clients'."""
        return values if self.attackers is None else values[self.attackers.honest.to(values.device)]

    @cached_property
    def personalizer(self) -> Personalizer:
        return self.recipe.personalizer(self.engine)

    def placed(self) -> Trainer:
        """Return the trainer with its samples on its GPU, if they fit; else a chunk's are sent when it needs them."""
        device = self.recipe.device
        fits = device.type == "cuda" and self.federation.num_bytes <= free_bytes(device) // 2
        return replace(self, federation=self.federation.to(device)) if fits else self

    def origin(self, progress: Progress) -> Record:
        """Return what a checkpoint says of the training it came from, so that it can be gone on with."""
        known = {"data": self.federation.fingerprint, "best_validation": progress.best_validation}
        stopped = {} if progress.stopped_after is None else {"stopped_after": progress.stopped_after}
        return known | {"seconds": progress.seconds, "slowed": progress.slowed} | stopped

    def checkpoint(self, progress: Progress) -> Record:
        return self.recipe.metadata(self.federation.names) | self.origin(progress)

    def _took_part(self, state: State) -> Tensor:
        """Say who was in a round's cohort, ``[T]``."""
        return took_part(self.federation.keys, self.training.cohort_size, self.config.run.seed, state.round)

    def predictors(self, state: State) -> Predictors:
        with torch.no_grad():
            return self.personalizer.predictors(state, self.federation, self._took_part(state))

    def statistics(self, progress: Progress) -> dict[str, Statistics]:
        """Sum up inputs for clients without labels, by state."""
        by_round: dict[int, Statistics] = {}
        for state in progress.states.values():
            if state.round not in by_round:
                with torch.no_grad():
                    found = gather(self.personalizer, state, self.federation, self._took_part(state))
                by_round[state.round] = found
        return {role: by_round[state.round] for role, state in progress.states.items()}

    @cached_property
    def shown(self) -> tuple[Metric, ...]:
        """What final states are scored by: the run's metrics and, of a table where none are named, further ones."""
        known, named = self.recipe.metrics, self.config.run.metrics
        if named or self.recipe.format.encoding is None:
            return known
        groups = [self.federation] + ([self.federation.unseen] if self.federation.unseen else [])
        # All rows, whatever their part: with another seed the same table is judged by the same metrics.
        targets = torch.cat([group.part(part).targets for group in groups for part in PARTS])
        return known + further_metrics(self.recipe.loss, targets)

    def scores(self, found: Predictors, metrics: Sequence[Metric] = ()) -> dict[str, Scores]:
        """Score every client; by the run's metrics where no others are given."""
        metrics = metrics or self.recipe.metrics
        counted = None if self.attackers is None else self.attackers.honest
        return evaluate(self.recipe.algorithm, self.engine, found, self.federation, metrics, counted)

    @cached_property
    def patience(self) -> int:
        """Rounds without a better validation score after which training ends; 0 for never, as where none is known."""
        run = self.config.run
        return run.patience if run.evaluate_every and len(self.federation.validation) else 0

    def is_over(self, progress: Progress) -> bool:
        return progress.stopped_after is not None or progress.rounds >= self.config.run.rounds

    def advance(self, progress: Progress) -> Record:
        """Run one round and, when it is due, score the new state and judge how well clients solved their problems.

        With patience, the best state takes the place of the last one once training is over.
        """
        before = progress.state
        progress.state, costs = self._step(progress)
        entry: Record = costs._asdict()
        run, done = self.config.run, progress.state.round
        beta2 = 1.0
        if run.is_due(run.diagnose_every, done):
            found = measures.diagnose(self.training, before, progress.state)
            entry |= found._asdict()
            beta2 = found.dissimilarity / found.gradient_norm2 if found.gradient_norm2 > 0 else math.inf
        if run.is_due(run.measure_alpha_every, done):
            entry |= measures.measure_alpha(self.training, before).record(beta2)
        if self.components is not None:
            entry |= self._look(progress)
        if run.is_scored(done):
            entry |= self._score(progress)
        progress.history.append(entry)
        best = progress.best if self.patience and run.is_scored(done) else None
        if best is not None and (done == run.rounds or done - best.round >= self.patience):
            progress.state, progress.stopped_after = best, done
        return entry

    @cached_property
    def components(self) -> Components | None:
        """What finds the number of components while training; None where it is given."""
        values, recipe = self.config.method.values, self.recipe
        if values.get(COUNT) != AUTO:
            return None
        search = Search(self.config.run.rounds, values["least_gain"])
        return Components(recipe.algorithm, recipe.mixer, self.engine, self.training.federation, search)

    def _look(self, progress: Progress) -> Record:
        """Revise the components when that is due, and say how many there are."""
        assert self.components is not None, "only where their number is to be found"
        found: Record = {}
        if self.components.search.is_due(progress.state.round, progress.history):
            progress.state, found[LOOK] = self.components.revise(progress.state, progress.history)
        return {COUNT: progress.state.personal["log_weights"].shape[1]} | found

    def _step(self, progress: Progress) -> tuple[State, RoundCosts]:
        """Run a round. One that leaves clients far off is made again with half the rate, where backtracking is on."""
        before = progress.state
        if not self.config.schedule.backtrack:
            return self.training.step(before)
        slowed, first = progress.slowed, None
        for halvings in range(_HALVINGS):
            with suppress(DivergedError):
                after, costs = self.training.step(before, slowed / 2**halvings)
                loss = self._loss(after)
                if loss <= self._far_off or loss <= self._loss(before):
                    progress.slowed = slowed / 2**halvings
                    return after, costs
                first = first or (after, costs)
        if first is None:
            rate = slowed / 2**halvings * self.config.schedule.learning_rate
            problem = f"Training diverged in round {before.round + 1}, even with learning rate {rate:.2g}"
            raise DivergedError(f"{problem}; {self.training.causes}.")
        return first  # a shorter step would not help: it is not the rate that is to blame

    @cached_property
    def _far_off(self) -> float:
        """A mean loss on the training samples that means divergence."""
        return self.recipe.loss.far_off(self.federation.train.targets, self.recipe.format.outputs)

    @cached_property
    def _watched(self) -> tuple[Tensor, Samples]:
        """Some clients, and some of their training samples: enough to notice divergence after every round."""
        there = self.federation
        clients = choose(there.keys, _WATCHED, CURVATURE, self.config.run.seed)
        if self.attackers is not None:
            clients = clients[self.attackers.honest[clients]]
        samples = there.train.take(clients)
        share = _WATCHED_ROWS / max(1, len(samples))
        return clients, thinned(samples, there.keys[clients], share, self.config.run.seed) if share < 1 else samples

    def _loss(self, state: State) -> float:
        """Return the mean loss of the watched clients' predictors on the watched samples."""
        clients, samples = self._watched
        if not len(samples):
            return 0.0
        served = self.recipe.mixer.read(state.shared, state.memory, clients)
        personal = tree_index(split_residual(state.personal)[0], clients.to(self.recipe.device))
        with torch.no_grad():
            sums = self.personalizer.losses(Predictors(*served, personal), samples)
        return float(sums.sum()) / len(samples)

    def _score(self, progress: Progress) -> Record:
        scores = self.scores(self.predictors(progress.state))
        validation = scores.get("validation")
        if validation is not None and validation.improves(progress.best_validation):
            progress.best, progress.best_validation = progress.state, validation.average
        return name_scores(scores)

    def take_over(self, other: RunFolder, folder: RunFolder) -> None:
        """Write to ``folder`` the training of ``other``, a run that trains alike, to be gone on with from its end.

        Of its scores on the way nothing is left where this run has none.
        """
        here = self.placed()
        with folder.created(self.config), self.recipe.products():
            progress = _restore(here, other).to(self.recipe.device)
            if progress.history and progress.state.round == progress.rounds:
                on_the_way = self.config.run.scores_on_the_way
                if progress.best is not None and (progress.best.round == progress.rounds or not on_the_way):
                    progress.best, progress.best_validation = None, None
                scored = here._score(progress)
                if not on_the_way:
                    progress.history = [
                        {name: value for name, value in line.items() if name not in scored} for line in progress.history
                    ]
                progress.history[-1] |= scored
            with folder.open_metrics(0) as file:
                file.writelines(map(folder.line, progress.history))
            folder.save(progress.states, here.checkpoint(progress))

    def conclude(self, progress: Progress) -> Result:
        """Score the states, fit the clients held out, and sum up."""
        if progress.slowed != self.recipe.slowed:
            # Fine-tuning and clients that come later have the rate that training ended with.
            return replace(self, recipe=self.recipe.slowed_by(progress.slowed)).conclude(progress)
        algorithm, federation, run = self.recipe.algorithm, self.federation, self.config.run
        # The last state is often the best one, too.
        by_round = {state.round: state for state in progress.states.values()}
        predictors = {index: self.predictors(state) for index, state in by_round.items()}
        scored = {index: self.scores(each, self.shown) for index, each in predictors.items()}
        found = {role: predictors[state.round] for role, state in progress.states.items()}
        scores = {role: scored[state.round] for role, state in progress.states.items()}
        weights = found["last"].log_weights(algorithm)
        memory = found["last"].memory
        summary = self._summary(progress, found["last"], scores) | name_weights(self._of_honest(weights))
        summary |= name_memory(memory) | self._harm(found["last"]) | self._tuning(progress.state)
        hostile = None if self.attackers is None else self.attackers.are
        clients = client_rows("train", federation.names, scores["last"], weights, memory, hostile)
        statistics = self.statistics(progress) if run.unlabelled else {}
        if statistics:
            summary["unlabelled"] = statistics["last"].record()
        unseen = federation.unseen
        if unseen is not None and not self.recipe.mixer.welcome(progress.state.shared, progress.state.memory).refusal:
            samples = unseen.train
            if run.unseen_share < 1:
                samples = thinned(samples, unseen.keys, run.unseen_share, run.seed)
            with torch.no_grad():
                fitted = self.personalizer.personalize(progress.state, samples, unseen.keys)
                curve = None if memory is None else memory.curve
                fitted = self.personalizer.remembering(fitted, samples, unseen.validation, curve)
            theirs = evaluate(algorithm, self.engine, fitted, unseen, self.shown)
            weights = fitted.log_weights(algorithm)
            named = name_scores(theirs, self.recipe.format.deviation) | name_weights(weights)
            named |= name_memory(fitted.memory)
            summary |= {f"unseen_{key}": value for key, value in named.items()}
            clients += client_rows("unseen", unseen.names, theirs, weights, fitted.memory)
            if statistics:
                summary["unlabelled"] |= self._without_labels(progress.state, statistics["last"], unseen, samples)
        summary |= {"seconds_total": progress.seconds, **peak_bytes(self.recipe.device)}
        states = progress.states
        tuned = {role: found[role].settled(state.round) for role, state in states.items() if run.fine_tune_epochs}
        for role, state in states.items():
            own = found[role].personal
            if role not in tuned and any(not leaf.equal(state.personal[name]) for name, leaf in own.items()):
                # Some were fitted by samples, which whoever loads the run need not have.
                tuned[role] = State(state.round, {}, own)
        origin, history = self.origin(progress), progress.history
        memories = {role: each.memory for role, each in found.items() if each.memory is not None}
        return Result(
            self.recipe, states, federation.names, summary, history, clients, origin, tuned, memories, statistics
        )

    def _tuning(self, state: State) -> Record:
        """Say how clients fine-tuned and, by validation, how good they were before; nothing where they did not."""
        if not self.config.run.fine_tune_epochs:
            return {}
        known: Record = {"epochs": self.config.run.fine_tune_epochs, "rate": self.personalizer.tuning_rate}
        samples, metric = self.federation.validation, self.recipe.metrics[0]
        if len(samples):
            with torch.no_grad():
                found = self.personalizer.untuned.predictors(state, self.federation, self._took_part(state))
            honest = None if self.attackers is None else self.attackers.honest
            how = (self.recipe.algorithm, self.engine, found, samples, (metric,), self.federation.train.sizes)
            known[f"validation_{metric.name}_before"] = evaluate_part(*how, counted=honest).average
        return {"fine_tuning": known}

    def _harm(self, found: Predictors) -> Record:
        """Say how many clients are hostile and, where they want labels of their own given, how often they get them."""
        if self.attackers is None:
            return {}
        known: Record = {"hostile_clients": self.attackers.number}
        aimed = self.attackers.aimed(self.federation.test)
        if aimed is not None and len(aimed):
            how = (self.recipe.algorithm, self.engine, found, aimed, (METRICS["accuracy"],), aimed.sizes)
            known["backdoor_success"] = evaluate_part(*how).average
        return known

    def _without_labels(self, state: State, statistics: Statistics, unseen: Federation, samples: Samples) -> Record:
        """Score clients held out as if the ``samples`` that they are fitted on had no labels, and with mean weights."""
        with torch.no_grad():
            fitted, seen = fit(self.personalizer, statistics, state, samples, unseen.keys)
        mean, record = with_mean_weights(fitted, statistics), {"unseen_novel": sum(each.is_novel for each in seen)}
        for name, found in (("unseen", fitted), ("unseen_mean_weights", mean)):
            scores = evaluate(self.recipe.algorithm, self.engine, found, unseen, self.shown)
            record |= {
                f"{name}_{key}": value for key, value in name_scores(scores, self.recipe.format.deviation).items()
            }
        return record

    def _summary(self, progress: Progress, found: Predictors, scores: Mapping[str, Mapping[str, Scores]]) -> Record:
        history, unseen, deviation = progress.history, self.federation.unseen, self.recipe.format.deviation
        seconds = [line["seconds"] for line in history]
        sent = {way: [line[way] for line in history] for way in ("bytes_up", "bytes_down")}
        summary: Record = {
            **self.recipe.describe(progress.state),
            "num_clients": self.federation.num_clients,
            "num_unseen_clients": unseen.num_clients if unseen else 0,
            "engine": type(self.training.engine).__name__,
            **name_scores(scores["last"], deviation),
            # The test part took no part in choosing it.
            "best": {"round": progress.best.round, **name_scores(scores["best"], deviation)} if progress.best else None,
            "seconds_per_round": statistics.median(seconds[1:] or seconds) if seconds else None,
            **{f"{way}_per_round": round(statistics.mean(each)) if each else None for way, each in sent.items()},
        }
        if progress.stopped_after is not None:
            run = self.config.run
            summary |= {"stopped_after": progress.stopped_after, "max_rounds": run.rounds, "patience": run.patience}
        if self.engine.most_together:
            summary["clients_together"] = self.engine.most_together
        if self.components is not None:
            summary["initial_components"] = self.config.method.values["initial_components"]
            summary["components_history"] = [{"round": when} | look for when, look in looks(history)]
        summary |= self.recipe.mixer.summary(progress.state.memory, self.training.cohort_size)
        summary |= measures.summarise_alpha(history)
        if any("dissimilarity" in line for line in history):
            summary |= measures.estimate_dissimilarity(history).record()
        if self.truth is not None:
            if (oracle := evaluate_oracle(self.truth, self.honest, self.shown)) is not None:
                summary |= {f"oracle_{each.metric}": each.average for each in oracle.by_metric}
                summary |= {"oracle_bottom_decile": oracle.bottom_decile, "oracle_loss": oracle.loss}
            if (recovery := self._recovery(found)) is not None:
                summary["recovery"] = {key: value for key, value in vars(recovery).items() if key != "matching"}
                if (optimal := measures.optimal_distance(self.truth, self.honest)) is not None:
                    summary["recovery"]["optimal_weight_distance"] = optimal
        if deviation is not None:
            # Scores are of standardised targets: times this, a root mean squared error is in the targets' own units.
            summary["target_deviation"] = deviation
        elif self.recipe.format.encoding is not None and (rate := base_rate(self.honest)) is not None:
            summary["test_base_rate"] = rate
        if self.config.schedule.backtrack:
            summary["learning_rate"] = progress.slowed * self.config.schedule.learning_rate
            summary["halvings"] = round(-math.log2(progress.slowed))
        if "train" in scores["last"] and not scores["last"]["train"].loss <= self._far_off:
            summary["diverged"] = True
        if self.engine.note:
            summary["note"] = self.engine.note
        return summary

    def _recovery(self, found: Predictors) -> measures.Recovery | None:
        """Compare with the truth, where all clients mix the same components, of the truth's kind."""
        truth, mixture = self.truth, found.of(self.recipe.algorithm, 0)
        if truth is None or len(mixture.log_weights) == 1 or bool((found.reads != found.reads[0]).any()):
            return None
        weights = self._of_honest(found.log_weights(self.recipe.algorithm).exp().cpu())
        true_weights = truth.weights_of(self.honest.names)
        slopes = next((leaf.flatten(1) for name, leaf in mixture.components.items() if name.endswith("weight")), None)
        if slopes is None or slopes.shape != (len(mixture.log_weights), truth.components.shape[1]):
            # A network's components are of another kind than the truth's, but clusters of clients can be compared.
            return measures.recover_clusters(weights, true_weights)
        return measures.recover(slopes, weights, truth.components, true_weights)
