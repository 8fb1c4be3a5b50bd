"""A whole run: data -> rounds -> scores -> a folder on disk and a :class:`~fedem.result.Result`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedem.config import Config, route
from fedem.data.base import Dataset, Truth
from fedem.errors import UserError
from fedem.facts import check_model
from fedem.federation import Federation
from fedem.job import Job, Progress
from fedem.models import MODELS
from fedem.parts import ModelSource
from fedem.precision import products
from fedem.records import Record
from fedem.result import Result, name_tuned
from fedem.runs import RunFolder, check_here
from fedem.sections import GIVEN
from fedem.team import joined

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
